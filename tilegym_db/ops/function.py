"""Makes the function of a Definition, with its signature and its description."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from tilegym_db.catalog import Catalog
from tilegym_db.errors import UsageError
from tilegym_db.ops.catalog_operator import REFERENCE, CatalogOperator
from tilegym_db.ops.describe import described
from tilegym_db.ops.in_graph import define
from tilegym_db.records import Definition
from tilegym_db.records.dtypes import scalar_type

__all__ = ["operator_function"]

# Plain code, so that a compiler can look inside. Made of the names of inputs, which are identifiers, and of nothing else.
_TEMPLATE = """\
def {called}({parameters}, *, backend="auto"):
    if _is_compiling() or _dispatch_modes():
        return _traced(({parameters},), backend)
    return _operator(({parameters},), backend)
"""


def operator_function(definition: Definition, catalog: Catalog) -> Callable[..., Any]:
    """``function(*inputs, backend="auto")`` of a Definition; see :class:`tilegym_db.ops.catalog_operator.CatalogOperator`.

    Raises:
        UsageError: the shape of an output does not follow from the inputs, or an input is called ``backend``.
    """
    if "backend" in definition.inputs:
        raise UsageError(
            f"an input of {definition.name} is called 'backend', as the option of its function is.",
            code="input_name_reserved",
        )
    operator = CatalogOperator(definition, catalog)
    in_graph = define(operator)

    def traced(inputs: tuple[Any, ...], backend: str) -> Any:
        if backend == REFERENCE or operator.is_differentiated(inputs):
            return operator.by_reference(inputs)
        written = in_graph(*inputs, backend)
        return operator.returned(inputs, () if written is None else written)

    called = re.sub(r"\W|^(?=\d)", "_", definition.name)
    namespace: dict[str, Any] = {
        "_is_compiling": torch.compiler.is_compiling,
        "_dispatch_modes": torch._C._len_torch_dispatch_stack,
        "_traced": traced,
        "_operator": operator,
    }
    source = _TEMPLATE.format(called=called, parameters=", ".join(definition.inputs))
    exec(compile(source, f"<tilegym_db.ops.{called}>", "exec"), namespace)
    function: Callable[..., Any] = namespace[called]
    function.__module__, function.__doc__ = "tilegym_db.ops", described(definition, catalog)
    function.__annotations__ = _annotations(definition)
    return function


def _annotations(definition: Definition) -> dict[str, Any]:
    inputs = {
        name: scalar_type(spec.dtype) if spec.is_scalar else torch.Tensor for name, spec in definition.inputs.items()
    }
    count = len(definition.outputs)
    returned: Any = torch.Tensor if count == 1 else tuple[(torch.Tensor,) * count]  # type: ignore[misc]
    return {**inputs, "backend": str, "return": returned}
