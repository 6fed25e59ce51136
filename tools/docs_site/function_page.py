"""The site's page of operators as functions, from the shipped Definitions."""

from __future__ import annotations

from tilegym_db.catalog import Catalog
from tilegym_db.ops.function import arguments, results
from tilegym_db.paths import shipped_root
from tilegym_db.records import Definition
from tilegym_db.records.dtypes import scalar_type

__all__ = ["page_text"]

HEAD = """# Operators as functions

`help(ops.NAME)` prints what this page says of an operator.

```python
import torch

from tilegym_db import ops

x, weight = torch.randn(4, 256), torch.ones(256)
y = ops.rms_norm(x, weight, 1e-6)  # x [M, N], weight [N]
print(y.shape)
help(ops.rms_norm)  # shapes, dtypes, sizes, and the kernels that are verified for it
```

```output
torch.Size([4, 256])
Help on function rms_norm in module tilegym_db.ops:
...
```

- A call allocates its outputs and returns them in the order of the Definition, one tensor or a tuple. An output that is written
  in place is the input itself.
- It runs the fastest kernel that is verified for these sizes, dtypes, strides and scalars on this GPU and faster than the code
  that models run, by the rules of `resolve`; if there is none, on whatever machine, the reference of the Definition.
- `backend="reference"` runs the reference, to compare with. `backend="rms_norm_triton"` runs that solution, or says why it is not
  verified for the call.
- An argument that does not fit (a rank, a size, a dtype, a number) is an error that names it.
- A call that a derivative may be asked of, also by `torch.func`, runs the reference, which autograd sees through.
- In code that `torch.compile` compiles, a call is one operator, `torch.ops.tilegym_db_ops.<name>`, without a graph break; what
  runs is decided when it runs. The reference is compiled with the code around it where it was asked for, or a derivative is.
"""


def page_text() -> str:
    """Return the whole page as Markdown."""
    catalog = Catalog((shipped_root(),))
    families: dict[str, list[Definition]] = {}
    for definition in catalog.definitions.values():
        families.setdefault(definition.op_type, []).append(definition)
    parts = [HEAD]
    for family, definitions in sorted(families.items()):
        parts.append(f"\n## {family}\n")
        parts += [_section(definition) for definition in definitions]
    return "".join(parts)


def _section(definition: Definition) -> str:
    inputs = [
        f"{name}: {scalar_type(spec.dtype).__name__ if spec.is_scalar else 'Tensor'}"
        for name, spec in definition.inputs.items()
    ]
    count = len(definition.outputs)
    returned = "Tensor" if count == 1 else f"tuple[{', '.join(['Tensor'] * count)}]"
    items = [f"- `{name}`: {text}" for name, text in {**arguments(definition), **results(definition)}.items()]
    sizes = [f"- sizes: `{'`, `'.join(definition.constraints)}`"] if definition.constraints else []
    signature = f"{definition.name}({', '.join(inputs)}) -> {returned}"
    return f"\n### {definition.name}\n\n```text\n{signature}\n```\n\n{definition.description}\n\n" + "\n".join(
        [*items, *sizes, ""]
    )
