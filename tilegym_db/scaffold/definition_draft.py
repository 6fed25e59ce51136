"""Drafts a Definition as a folder. Python sources lie in separate files, since JSON has no comments or line breaks.

``definition.json`` is the record without its source texts. ``reference.py``, ``independent.py`` and
``planted_errors.json`` are those texts. ``workloads.jsonl`` has small sizes for the self-test.
:func:`read_definition_file` combines them.

The second part drafts a Definition around the code of a model. Its reference is that code, and ``serving`` names the
modules that contain the code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tilegym_db.errors import RecordError, UsageError
from tilegym_db.files import read_bytes
from tilegym_db.records import Definition, Workload
from tilegym_db.records.dtypes import DTYPE_BYTES, RECORD_DTYPES

RECORD_FILE = "definition.json"
REFERENCE_FILE, INDEPENDENT_FILE, ERRORS_FILE = "reference.py", "independent.py", "planted_errors.json"
WORKLOADS_FILE = "workloads.jsonl"

DTYPES = ("float32", "bfloat16", "float16")
TINY_SIZES = (8, 256, 4, 32, 16)
"""Axis sizes of a tiny workload, in order: several rows, long enough for a norm to show a lost digit."""
TRIAL_SCALARS: dict[str, Any] = {"bool": False, "int64": 1, "int32": 1}


def is_draft(path: Path) -> bool:
    """Return True if a path is a folder made by ``new definition``."""
    return path.is_dir() and (path / RECORD_FILE).exists()


def read_definition_file(path: Path) -> Definition:
    """Read the Definition of a JSON file or of a draft's folder; an error names the file, and every fault that was found."""
    if not path.is_dir():
        return Definition.from_json(read_bytes(path, "definition"), path)
    if not is_draft(path):
        raise RecordError(f"{path}: has no {RECORD_FILE}. Try: tilegym-db new definition NAME", code="draft_incomplete")
    content = _json(path / RECORD_FILE)
    if not isinstance(content, dict):
        raise RecordError(f"{path / RECORD_FILE}: a definition is a JSON object.", code="object_expected")
    for key in ("reference", "self_test"):
        if key in content:
            raise RecordError(
                f"{path / RECORD_FILE}: '{key}' lies in a separate file of a draft; remove the key.", code="draft_key"
            )
    test = {
        "independent": read_bytes(path / INDEPENDENT_FILE, "formulation").decode(errors="replace"),
        "planted_errors": _json(path / ERRORS_FILE),
    }
    reference = read_bytes(path / REFERENCE_FILE, "reference").decode(errors="replace")
    return Definition.from_dict({**content, "reference": reference, "self_test": test}, path)


def open_places(path: Path) -> list[str]:
    """Return one line for each TODO left in a draft."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    found = []
    for file in files:
        if file.suffix in (".json", ".py") and file.is_file():
            lines = read_bytes(file, "file").decode(errors="replace").splitlines()
            found += [
                f"{file}:{number}: {_after_todo(line)}" for number, line in enumerate(lines, start=1) if "TODO" in line
            ]
    return found


def _after_todo(line: str) -> str:
    text = line[line.index("TODO") :].strip().rstrip('",')
    return text if len(text) <= 100 else f"{text[:97]}..."


def _json(path: Path) -> Any:
    content = read_bytes(path, "file")
    try:
        return json.loads(content)
    except ValueError as error:
        raise RecordError(f"{path}: not valid JSON: {error}.", code="json_syntax") from None


def draft_definition(
    name: str,
    op_type: str,
    inputs: Mapping[str, dict[str, Any]],
    outputs: Mapping[str, dict[str, Any]],
    description: str = "",
) -> dict[str, str]:
    """Return file name -> content of a draft: a valid Definition of that signature, with placeholder maths.

    Args:
        inputs, outputs: as :func:`parse_tensors` returns them.
    """
    scalars = [key for key, spec in outputs.items() if spec["shape"] is None]
    if scalars:
        raise UsageError(
            f"--outputs: a kernel writes tensors, and '{scalars[0]}' is a number. Try: {scalars[0]}[1]",
            code="output_not_tensor",
        )
    record = _record(name, op_type, inputs, outputs, description)
    files = {
        RECORD_FILE: json.dumps(record, indent=2) + "\n",
        REFERENCE_FILE: _reference(name, inputs, outputs),
        INDEPENDENT_FILE: _independent(name, inputs, outputs),
        ERRORS_FILE: json.dumps(PLANTED_ERRORS, indent=2) + "\n",
    }
    test = {"independent": files[INDEPENDENT_FILE], "planted_errors": PLANTED_ERRORS}
    made = Definition.from_dict({**record, "reference": files[REFERENCE_FILE], "self_test": test}, name)
    files[WORKLOADS_FILE] = "".join(workload.to_json() + "\n" for workload in _tiny_workloads(made))
    return files


def _record(
    name: str,
    op_type: str,
    inputs: Mapping[str, dict[str, Any]],
    outputs: Mapping[str, dict[str, Any]],
    description: str,
) -> dict[str, Any]:
    axes = axes_of(dict(inputs), dict(outputs))
    uses_variable = any(spec["dtype"] == "T" for spec in (*inputs.values(), *outputs.values()))
    return {
        "schema_version": 1,
        "name": name,
        "version": "1.0.0",
        "op_type": op_type,
        "description": description or "TODO: what it computes, where it rounds, and what it does with rows of zeros.",
        "tags": ["status:draft"],
        **({"dtypes": {"T": list(DTYPES)}} if uses_variable else {}),
        "axes": {axis: {"type": "var", "description": _axis_note(axis)} for axis in axes},
        "inputs": _described(inputs),
        "outputs": dict(outputs),
        "constraints": [f"{axis} >= 1" for axis in axes[1:]],
        "cost": cost_of_signature(inputs, outputs),
    }


def cost_of_signature(
    inputs: Mapping[str, Mapping[str, Any]], outputs: Mapping[str, Mapping[str, Any]]
) -> dict[str, str]:
    """Return a draft of the cost: every tensor moved once, and two operations for each element of the first output."""
    tensors = [spec for spec in (*inputs.values(), *outputs.values()) if spec["shape"] is not None]
    moved = " + ".join(f"{_count(spec['shape'])} * {_width(spec['dtype'])}" for spec in tensors)
    return {"flops": f"2 * {_count(next(iter(outputs.values()))['shape'])}", "bytes": moved}


def _count(shape: list[str | int] | None) -> str:
    return " * ".join(
        str(entry) if isinstance(entry, int) or entry.isidentifier() else f"({entry})" for entry in shape or [1]
    )


def _width(dtype: str) -> str:
    return "sizeof(T)" if dtype == "T" else str(max(1, round(DTYPE_BYTES[dtype])))


def _axis_note(axis: str) -> str:
    known = {"M": "tokens: every leading axis of the activation, flattened", "N": "hidden size", "B": "sequences"}
    known |= {"S": "positions", "Hq": "query heads", "Hkv": "key and value heads", "D": "head size", "E": "experts"}
    return known.get(axis, "TODO: what this axis counts, in a model's words: hidden size, experts, ...")


WORDS = {
    "x": "activation; rows may be padded",
    "residual": "residual stream",
    "weight": "learned scale",
    "bias": "learned shift",
    "eps": "added before the root, so that a row of zeros stays finite",
    "q": "queries",
    "k": "keys",
    "v": "values",
    "scale": "what scores are multiplied by",
}
"""Descriptions of usual argument names. Other names get none, since a description is optional."""


def _described(tensors: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: {**spec, **({"description": WORDS[name]} if name in WORDS else {})} for name, spec in tensors.items()}


PLANTED_ERRORS = [
    {"find": "wide.to(", "replace": "(wide * 1.5).to(", "why": "TODO: every value half as large again"},
    {"find": "wide.to(", "replace": "wide.abs().to(", "why": "TODO: the sign is lost"},
    {"find": "wide.to(", "replace": "wide.flip(0).to(", "why": "TODO: the rows in reverse"},
]
"""Planted errors for the template's maths. The author replaces them by typical errors of the real operator."""


def _reference(name: str, inputs: Mapping[str, dict[str, Any]], outputs: Mapping[str, dict[str, Any]]) -> str:
    lines = [
        "# Source: TODO: permalink to the model code whose maths and rounding this restates (a file at a commit, with lines)",
        "import torch",
        "",
        "",
        f"def run({', '.join(inputs)}):",
        f"    # TODO: the maths of {name}, in plain PyTorch. Compute in float32 where the model does, and round where it rounds:",
        "    # the verifier lifts every dtype to float64 for the exact answer, and runs this text as it is for the rounded one.",
    ]
    return "\n".join([*lines, *_template_body(inputs, outputs, reverse=False)]) + "\n"


def _independent(name: str, inputs: Mapping[str, dict[str, Any]], outputs: Mapping[str, dict[str, Any]]) -> str:
    lines = [
        "import torch",
        "",
        "",
        f"def run({', '.join(inputs)}):",
        f"    # TODO: {name} by another road: the library's own function, another formula, or NumPy's order of operations.",
        "    # A copy of the reference proves nothing.",
    ]
    return "\n".join([*lines, *_template_body(inputs, outputs, reverse=True)]) + "\n"


def _template_body(
    inputs: Mapping[str, dict[str, Any]], outputs: Mapping[str, dict[str, Any]], *, reverse: bool
) -> list[str]:
    """Return placeholder maths for any signature: each output is the product of the inputs that broadcast to it."""
    lines, results = [], []
    for name, spec in outputs.items():
        factors = [key for key, other in inputs.items() if _broadcasts(other, spec)]
        whole = next((key for key in factors if inputs[key]["shape"] == spec["shape"]), None)
        others = [key for key in factors if key != whole]
        if whole is None:
            lines.append(f"    {name}_sizes = {_sizes(spec['shape'], inputs)}")
            start = f"torch.ones({name}_sizes, dtype=torch.float32, device={_device_of(inputs)})"
        else:
            start = f"{whole}.float()"
        lines.append(f"    wide = {start}")
        lines += [f"    wide = {_product(key, inputs[key], reverse)}" for key in (others[::-1] if reverse else others)]
        dtype = _dtype_of(spec["dtype"], inputs)
        lines.append(f"    {name} = wide.to({dtype})")
        results.append(name)
    return [*lines, f"    return {', '.join(results)}"]


def _broadcasts(given: Mapping[str, Any], output: Mapping[str, Any]) -> bool:
    if given["shape"] is None:
        return bool(given["dtype"] == "float32")
    length = len(given["shape"])
    floating: bool = given["dtype"] in ("T", "float32", "float16", "bfloat16")
    fits: bool = output["shape"][-length:] == given["shape"]
    return floating and length > 0 and fits


def _product(name: str, spec: Mapping[str, Any], reverse: bool) -> str:
    factor = f"(1 + {name})" if spec["shape"] is None else f"{name}.float()"
    return f"{factor} * wide" if reverse else f"wide * {factor}"


def _sizes(shape: list[str | int], inputs: Mapping[str, dict[str, Any]]) -> str:
    return f"({', '.join(_size(entry, inputs) for entry in shape)},)"


def _size(entry: str | int, inputs: Mapping[str, dict[str, Any]]) -> str:
    """Return the expression for an output size in terms of the inputs: an axis, or a part of one (``2*I``)."""
    for name, spec in inputs.items():
        for place, other in enumerate(spec["shape"] or ()):
            if other == entry:
                return f"{name}.shape[{place}]"
            multiple = re.fullmatch(rf"(\d+)\s*\*\s*{re.escape(str(entry))}", str(other))
            if multiple:
                return f"{name}.shape[{place}] // {multiple[1]}"
    return str(entry) if isinstance(entry, int) else "1"


def _device_of(inputs: Mapping[str, dict[str, Any]]) -> str:
    tensor = next((name for name, spec in inputs.items() if spec["shape"] is not None), None)
    return f"{tensor}.device" if tensor else "'cpu'"


def _dtype_of(dtype: str, inputs: Mapping[str, dict[str, Any]]) -> str:
    if dtype != "T":
        return f"torch.{dtype}"
    like = next((name for name, spec in inputs.items() if spec["dtype"] == "T"), None)
    return f"{like}.dtype" if like else "torch.float32"


def _tiny_workloads(record: Definition) -> list[Workload]:
    """Return one small Workload per dtype, tagged ``tiny``, for the self-test."""
    sizes = {name: TINY_SIZES[index % len(TINY_SIZES)] for index, name in enumerate(record.var_axes)}
    scalars = {name: spec for name, spec in record.inputs.items() if spec.is_scalar}
    inputs = {name: {"type": "scalar", "value": example_scalar(name, spec.dtype)} for name, spec in scalars.items()}
    bindings: list[dict[str, str]] = [{"T": dtype} for dtype in record.dtypes["T"]] if record.dtypes else [{}]
    return [
        Workload.from_dict(
            {"definition": record.name, "axes": sizes, "dtypes": dtypes, "inputs": inputs, "tags": ["tiny"]}
        )
        for dtypes in bindings
    ]


def example_scalar(name: str, dtype: str) -> Any:
    """Return a usual value of a scalar input."""
    return TRIAL_SCALARS.get(dtype, 1e-5 if name.startswith("eps") else 0.5)


# ---- tensors --------------------------------------------------------------------------------------
# Parses ``x[M, N], weight[N], eps`` into the inputs of a Definition.

_ITEM = re.compile(r"\s*(?P<name>[A-Za-z_]\w*)\s*(?:\[(?P<shape>[^\]]*)\])?\s*(?::\s*(?P<dtype>\w+))?\s*(?:,|$)")
_SPELLING = (
    "Write tensors as name[AXIS, AXIS] or name[AXIS]:dtype and scalars as name or name:dtype, as in 'x[M, N], eps'."
)


def parse_tensors(option: str, text: str) -> dict[str, dict[str, Any]]:
    """Return name -> ``{"shape": [...], "dtype": ...}``. A scalar has shape None; a tensor has dtype variable T by
    default.
    """
    found: dict[str, dict[str, Any]] = {}
    position = 0
    while position < len(text.rstrip()):
        match = _ITEM.match(text, position)
        if match is None:
            raise UsageError(f"{option}: cannot read {text[position:].strip()!r}. {_SPELLING}", code="tensor_syntax")
        name, shape = match["name"], match["shape"]
        dtype = match["dtype"] or ("float32" if shape is None else "T")
        if name in found:
            raise UsageError(f"{option}: '{name}' is given twice.", code="tensor_repeated")
        if dtype != "T" and dtype not in RECORD_DTYPES:
            raise UsageError(
                f"{option}: unknown dtype '{dtype}' of '{name}'; known: T, {', '.join(sorted(RECORD_DTYPES))}.",
                code="dtype_unknown",
            )
        if shape is not None and not shape.strip():
            raise UsageError(f"{option}: '{name}[]' has no axis. {_SPELLING}", code="axis_empty")
        if shape is not None and not all(part.strip() for part in shape.split(",")):
            raise UsageError(
                f"{option}: '{name}[{shape}]' lacks an axis beside a comma. {_SPELLING}", code="axis_empty"
            )
        entries = None if shape is None else _entries(shape)
        for entry in entries or ():
            if entry == 0 or (isinstance(entry, str) and not re.search("[A-Za-z_]", entry)):
                raise UsageError(
                    f"{option}: '{entry}' of '{name}' is not a size. Give a whole number from 1, or an axis. {_SPELLING}",
                    code="tensor_size",
                )
        found[name] = {"shape": entries, "dtype": dtype}
        position = match.end()
    if not found:
        raise UsageError(f"{option}: names no tensor. {_SPELLING}", code="tensor_missing")
    return found


def _entries(shape: str) -> list[str | int]:
    parts = [part.strip() for part in shape.split(",")]
    return [int(part) if part.isascii() and part.isdecimal() else part for part in parts]


def axes_of(*groups: dict[str, dict[str, Any]]) -> list[str]:
    """Return every axis named by the shapes, in order of first use."""
    names: dict[str, None] = {}
    for group in groups:
        for spec in group.values():
            for entry in spec["shape"] or ():
                if isinstance(entry, str):
                    names.update(
                        dict.fromkeys(word for word in re.findall(r"[A-Za-z_]\w*", entry) if word != "ceil_div")
                    )
    return list(names)


# ---- Drafts around the code of a model -------------------------------------------------------------------

Size = str | int
Tensor = tuple[list[Size] | None, str]
"""The shape, None for a scalar, and the dtype."""

LAST = "# The outputs, in order."
PLANTED = (
    ("{out} * 1.5", "TODO: every value half as large again"),
    ("{out}.abs()", "TODO: the sign is lost"),
    ("{out}.flip(0)", "TODO: the first axis in reverse"),
)


@dataclass(frozen=True)
class DraftedCode:
    """A piece of code with its signature, from which a draft is made."""

    name: str
    description: str
    source: str
    """The permalink or file of the code."""
    text: str
    """A file that defines the function ``called``."""
    called: str
    arguments: Mapping[str, str]
    """Parameter of the function -> an expression over the inputs."""
    returns: Sequence[str | None]
    """An output for each result, or None for None."""
    is_tuple: bool
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    dtypes: Sequence[str]
    """The dtypes of the variable T."""
    generators: Mapping[str, dict[str, Any] | None]
    sizes: Mapping[str, int]
    """The size of each axis in a run of the model, for which the code is known to run."""
    scalars: Mapping[str, float] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)
    """Axis -> description."""
    serving: Mapping[str, Any] = field(default_factory=dict)


def code_files(code: DraftedCode) -> tuple[Definition, dict[str, str]]:
    """Return the Definition and the files of a draft: file name -> content."""
    record = _record_of_code(code)
    reference = _reference_of_code(code)
    (first, *_) = code.outputs
    ending = _ending(code)
    errors = [
        {"find": ending, "replace": ending.replace(f"return {first}", f"return {text.format(out=first)}"), "why": why}
        for text, why in PLANTED
    ]
    files = {
        RECORD_FILE: json.dumps(record, indent=2) + "\n",
        REFERENCE_FILE: reference,
        INDEPENDENT_FILE: _independent_of_code(code),
        ERRORS_FILE: json.dumps(errors, indent=2) + "\n",
    }
    test = {"independent": files[INDEPENDENT_FILE], "planted_errors": errors}
    made = Definition.from_dict({**record, "reference": reference, "self_test": test}, code.name)
    files[WORKLOADS_FILE] = "".join(workload.to_json() + "\n" for workload in _tiny(made, code))
    return made, files


def _record_of_code(code: DraftedCode) -> dict[str, Any]:
    inputs = {name: {"shape": shape, "dtype": dtype} for name, (shape, dtype) in code.inputs.items()}
    outputs = {name: {"shape": shape, "dtype": dtype} for name, (shape, dtype) in code.outputs.items()}
    generators = {name: one for name, one in code.generators.items() if one is not None}
    uses_variable = any(spec["dtype"] == "T" for spec in (*inputs.values(), *outputs.values()))
    return {
        "schema_version": 1,
        "name": code.name,
        "version": "1.0.0",
        "op_type": "model",
        "description": code.description,
        "tags": ["status:draft"],
        **({"dtypes": {"T": list(code.dtypes)}} if uses_variable else {}),
        "axes": {axis: {"type": "var", "description": code.notes.get(axis, "")} for axis in code.sizes},
        "inputs": inputs,
        "outputs": outputs,
        "constraints": [f"{axis} >= 1" for axis in code.sizes],
        "cost": cost_of_signature(inputs, outputs),
        **({"input_generators": generators} if generators else {}),
        "serving": dict(code.serving),
    }


def _reference_of_code(code: DraftedCode) -> str:
    given = ", ".join(f"{name}={text}" for name, text in code.arguments.items())
    called = f"{code.called}({given})"
    lines = [f"# Source: {code.source}"]
    if "import torch\n" not in code.text:
        lines.append("import torch")
    lines += [code.text.rstrip(), "", "", f"def run({', '.join(code.inputs)}):"]
    if code.is_tuple:
        lines.append(f"    returned = {called}")
        lines += [f"    {name} = returned[{at}]" for at, name in enumerate(code.returns) if name is not None]
    else:
        lines.append(f"    {next(iter(code.outputs))} = {called}")
    return "\n".join([*lines, _ending(code)]) + "\n"


def _ending(code: DraftedCode) -> str:
    return f"    {LAST}\n    return {', '.join(code.outputs)}"


def _independent_of_code(code: DraftedCode) -> str:
    return (
        f"def run({', '.join(code.inputs)}):\n"
        f"    # TODO: {code.name} by another road: the library's own function, another formula, or another order of operations.\n"
        "    # A copy of the reference proves nothing.\n"
        f'    raise NotImplementedError("another formulation of {code.name}")\n'
    )


def _tiny(definition: Definition, code: DraftedCode) -> list[Workload]:
    """Return a Workload of the sizes of the run for each dtype, tagged ``tiny``."""
    inputs = {name: {"type": "scalar", "value": value} for name, value in code.scalars.items()}
    bindings: list[dict[str, str]] = [{"T": dtype} for dtype in code.dtypes] if definition.dtypes else [{}]
    content = {"definition": definition.name, "axes": dict(code.sizes), "inputs": inputs, "tags": ["tiny"]}
    return [Workload.from_dict({**content, "dtypes": dtypes}) for dtypes in bindings]
