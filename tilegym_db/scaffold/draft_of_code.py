"""Drafts a Definition around the code of a model: its reference is that code, and ``serving`` says where it stands."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tilegym_db.records import Definition, Workload
from tilegym_db.scaffold.definition_draft import (
    ERRORS_FILE,
    INDEPENDENT_FILE,
    RECORD_FILE,
    REFERENCE_FILE,
    WORKLOADS_FILE,
    cost_of_signature,
)

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
    """Its parameters -> expressions over the inputs."""
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
    """Return the Definition and the files of a draft: file name -> content.

    Raises:
        RecordError: the signature is not one that a Definition can have.
    """
    record = _record(code)
    reference = _reference(code)
    (first, *_) = code.outputs
    ending = _ending(code)
    errors = [
        {"find": ending, "replace": ending.replace(f"return {first}", f"return {text.format(out=first)}"), "why": why}
        for text, why in PLANTED
    ]
    files = {
        RECORD_FILE: json.dumps(record, indent=2) + "\n",
        REFERENCE_FILE: reference,
        INDEPENDENT_FILE: _independent(code),
        ERRORS_FILE: json.dumps(errors, indent=2) + "\n",
    }
    test = {"independent": files[INDEPENDENT_FILE], "planted_errors": errors}
    made = Definition.from_dict({**record, "reference": reference, "self_test": test}, code.name)
    files[WORKLOADS_FILE] = "".join(workload.to_json() + "\n" for workload in _tiny(made, code))
    return made, files


def _record(code: DraftedCode) -> dict[str, Any]:
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


def _reference(code: DraftedCode) -> str:
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


def _independent(code: DraftedCode) -> str:
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
