"""Our Definitions in FlashInfer-Bench's terms: one per dtype binding and per tuple of constants.

FlashInfer-Bench knows neither dtype variables nor expressions in shapes, and it reads the variable axes of a call off the
shapes of its input tensors. So an axis stays variable only if a call tells it: it is an entry of an input's shape, no output
needs an expression of it that no input has, and it is no constant of a model (the last dimension of a tensor, or one that never
changes within a model whose other axes do).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilegym_db.integrations.interchange.checks import FIB_DTYPES
from tilegym_db.records import Definition, Workload
from tilegym_db.records.expressions import evaluate_int, names_in

__all__ = ["Specialised", "constant_axes", "specialised", "why_not"]


@dataclass(frozen=True)
class Specialised:
    """One Definition with its dtypes and constants bound."""

    source: Definition
    name: str
    dtypes: Mapping[str, str]
    constants: Mapping[str, int]

    @property
    def suffix(self) -> str:
        """What tells it from the other ones of its Definition."""
        return self.name.removeprefix(f"{self.source.name}_")

    def covers(self, axes: Mapping[str, int], dtypes: Mapping[str, str]) -> bool:
        """Whether a call of the Definition is one of this."""
        bound = self.source.bind_axes(axes)
        same = all(bound[name] == size for name, size in self.constants.items())
        return same and self.source.bind_dtypes(dtypes) == dict(self.dtypes)

    def axis_of(self, entry: str | int) -> tuple[str, dict[str, Any]]:
        """The axis that an entry of a shape becomes, and how it is declared."""
        if isinstance(entry, int):
            return f"n{entry}", {"type": "const", "value": entry, "description": f"The number {entry}."}
        text = entry.strip()
        axes, _ = names_in(text)
        if text in self.source.axes:
            description = self.source.axes[text].description or f"Axis {text} of {self.source.name}."
            if text in self.constants:
                return text, {"type": "const", "value": self.constants[text], "description": description}
            return text, {"type": "var", "description": description}
        name = (
            "n" + re.sub(r"\W+", "_", text).strip("_") if text[:1].isdigit() else re.sub(r"\W+", "_", text).strip("_")
        )
        if axes <= set(self.constants):
            return name, {"type": "const", "value": evaluate_int(text, self.constants), "description": f"{text}."}
        return name, {"type": "var", "description": f"{text}."}

    def derived(self) -> dict[str, str]:
        """Variable axis -> the expression of other axes that it stands for."""
        found = {}
        for entry in _entries(self.source, (*self.source.inputs, *self.source.outputs)):
            name, axis = self.axis_of(entry)
            if axis["type"] == "var" and name not in self.source.axes:
                found[name] = str(entry).strip()
        return found

    def var_axes(self, axes: Mapping[str, int]) -> dict[str, int]:
        """The sizes that a Workload of it states."""
        bound = self.source.bind_axes(axes)
        given = {name: size for name, size in bound.items() if name not in self.constants}
        return given | {name: evaluate_int(text, bound) for name, text in self.derived().items()}

    def record(self) -> dict[str, Any]:
        """As FlashInfer-Bench writes it."""
        source = self.source
        axes = {name: self.axis_of(name)[1] for name in source.axes}
        for entry in _entries(source, (*source.inputs, *source.outputs)):
            name, axis = self.axis_of(entry)
            axes.setdefault(name, axis)
        derived = [f"{name} == {text}" for name, text in self.derived().items()]
        record: dict[str, Any] = {
            "name": self.name,
            "op_type": source.op_type,
            "axes": axes,
            "inputs": {name: self._tensor(name) for name in source.inputs},
            "outputs": {name: self._tensor(name) for name in source.outputs},
            "reference": _returning_all(source),
            "tags": [*source.tags],
            "description": source.description or f"{source.name} of tilegym-db.",
        }
        constraints = [*source.constraints, *source.content_constraints, *derived]
        return record | ({"constraints": constraints} if constraints else {})

    def _tensor(self, name: str) -> dict[str, Any]:
        spec = self.source.inputs.get(name) or self.source.outputs[name]
        shape = None if spec.shape is None else [self.axis_of(entry)[0] for entry in spec.shape]
        dtype = self.source.dtype_of(name, self.dtypes)
        said = {"shape": shape, "dtype": dtype, "description": spec.description or f"{name} of {self.source.name}."}
        return said | ({"optional": True} if name in self.source.optional_outputs else {})


def _returning_all(source: Definition) -> str:
    """The reference; one of an operator that overwrites an input may return only what it does not, and so gets a frame."""
    if not source.in_place:
        return source.reference
    arguments = ", ".join(source.inputs)
    copies = "".join(f"    {name} = {name}.clone()\n" for name in source.in_place)
    return (
        f"{source.reference.rstrip()}\n\n\n_as_written = run\n\n\n"
        f"def run({arguments}):\n    # Every output, and the inputs as they were.\n{copies}"
        f"    returned = _as_written({arguments})\n{returned_outputs(source)}"
    )


def returned_outputs(source: Definition) -> str:
    """The last lines of a function that has ``returned`` and the overwritten inputs: every output, in order."""
    values = "returned if isinstance(returned, tuple | list) else (returned,)"
    overwritten = {target: name for name, target in source.in_place.items()}
    settled = "".join(f"    outputs.setdefault({target!r}, {name})\n" for target, name in overwritten.items())
    return (
        f"    values = {values}\n"
        f"    names = {tuple(source.outputs)!r} if len(values) == {len(source.outputs)} else {source.written_outputs!r}\n"
        f"    outputs = dict(zip(names, values, strict=True))\n{settled}"
        f"    return tuple(outputs[name] for name in {tuple(source.outputs)!r})\n"
    )


def _entries(source: Definition, tensors: Iterable[str]) -> list[str | int]:
    specs = [source.inputs.get(name) or source.outputs[name] for name in tensors]
    return list(dict.fromkeys(entry for spec in specs for entry in spec.shape or ()))


def constant_axes(source: Definition, workloads: Sequence[Workload]) -> tuple[str, ...]:
    """The axes that become constants, in the Definition's order."""
    told = {str(entry).strip() for entry in _entries(source, source.inputs)}
    needed = {str(entry).strip() for entry in _entries(source, source.outputs)} - told
    hidden = {axis for entry in needed for axis in names_in(entry)[0]}
    specs = [*source.inputs.values(), *source.outputs.values()]
    last = {axis for spec in specs if spec.shape and len(spec.shape) > 1 for axis in names_in(str(spec.shape[-1]))[0]}
    changing = _changing_within_a_model(workloads)
    fixed = set(source.axes) - changing if changing else set()
    return tuple(
        name
        for name, axis in source.axes.items()
        if axis.type == "const" or name not in told or name in hidden | last | fixed
    )


def _changing_within_a_model(workloads: Sequence[Workload]) -> set[str]:
    sizes: dict[tuple[str, str], set[int]] = {}
    for workload in workloads:
        for tag in workload.tags:
            if tag.startswith("model:"):
                for name, size in workload.axes.items():
                    sizes.setdefault((tag, name), set()).add(size)
    return {name for (_, name), found in sizes.items() if len(found) > 1}


def specialised(source: Definition, workloads: Sequence[Workload]) -> list[Specialised]:
    """One for each dtype binding and tuple of constants that the Workloads have, by name."""
    constants = constant_axes(source, workloads)
    found: dict[str, Specialised] = {}
    for workload in workloads:
        axes, dtypes = source.bind_axes(workload.axes), source.bind_dtypes(workload.dtypes)
        sizes = {name: axes[name] for name in constants}
        parts = [*dict.fromkeys(dtypes.values()), *(f"{name.lower()}{size}" for name, size in sizes.items())]
        name = "_".join([source.name, *parts])
        found.setdefault(name, Specialised(source, name, dtypes, sizes))
    return [found[name] for name in sorted(found)]


def why_not(item: Specialised) -> str | None:
    """Why FlashInfer-Bench cannot be told this Definition; None where it can."""
    for name in (*item.source.inputs, *item.source.outputs):
        dtype = item.source.dtype_of(name, item.dtypes)
        if dtype not in FIB_DTYPES:
            return f"'{name}' has dtype {dtype}, which FlashInfer-Trace does not have"
    return None
