"""Captured calls as Workloads, so that ``bench`` measures what a model really asks for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from tilegym_db.catalog import Catalog
from tilegym_db.errors import TilegymDBError
from tilegym_db.integrations.transformers.capture import CapturedCall
from tilegym_db.records import Definition, Workload
from tilegym_db.records.binding import bind_call
from tilegym_db.records.layouts import contiguous_strides, layout_class, layout_strides
from tilegym_db.resolver.allocate import Allocate

__all__ = ["new_workloads", "workload_of"]

CAPTURED = "captured"


def workload_of(definition: Definition, call: CapturedCall, allocate: Allocate) -> Workload | None:
    """The sizes, dtypes, scalars and strides of a captured call; None where no Workload can say them.

    That is so for a call that is none of the Definition (stock code serves it), and for a tensor that overlaps itself.
    """
    shadows = [
        torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        if isinstance(value, torch.Tensor)
        else value
        for value in call.inputs
    ]
    made = allocate(*shadows)
    values = (*shadows, *(made if isinstance(made, tuple) else (made,)))
    try:
        binding = bind_call(definition, values)
    except TilegymDBError:
        return None
    layouts = {}
    for name, value in zip((*definition.inputs, *definition.written_outputs), values, strict=True):
        if isinstance(value, torch.Tensor) and binding.layouts[name] != "contiguous":
            strides = _settled_strides(value)
            if 0 in strides:
                return None
            layouts[name] = f"strided({', '.join(map(str, strides))})"
    return Workload.from_dict(
        {
            "definition": definition.name,
            "axes": {name: binding.axes[name] for name in definition.var_axes},
            "dtypes": binding.dtypes,
            "inputs": {name: {"type": "scalar", "value": value} for name, value in binding.scalars.items()},
            "layouts": layouts,
            "tags": [f"stage:{call.stage}", CAPTURED],
        }
    )


def _settled_strides(value: torch.Tensor) -> tuple[int, ...]:
    """The strides, with that of a dimension of size 1, which may be anything, as if the dimensions after it were dense."""
    dense = contiguous_strides(value.shape)
    return tuple(own if size != 1 else step for size, own, step in zip(value.shape, value.stride(), dense, strict=True))


def new_workloads(workloads: Iterable[Workload], catalog: Catalog, tags: Sequence[str] = ()) -> list[Workload]:
    """Those that the catalog does not have under whatever spelling, with more tags.

    Two Workloads are one where sizes, dtypes, scalars and strides agree: ``strided(S*D, 1)`` is ``strided(1024, 1)``.
    """
    known: dict[str, set[Any]] = {}
    new = []
    for workload in workloads:
        definition = catalog.definition(workload.definition)
        seen = known.setdefault(
            workload.definition, {_meaning(definition, other) for other in catalog.workloads_for(workload.definition)}
        )
        meaning = _meaning(definition, workload)
        if meaning not in seen:
            seen.add(meaning)
            new.append(workload.model_copy(update={"tags": (*tags, *workload.tags)}))
    return new


def _meaning(definition: Definition, workload: Workload) -> Any:
    axes = definition.bind_axes(workload.axes)
    layouts = {}
    for name, text in workload.layouts.items():
        shape = definition.shape_of(name, axes)
        strides = layout_strides(text, shape, axes)
        if layout_class(shape, strides) != "contiguous":
            pairs = zip(shape, strides, strict=True)
            layouts[name] = tuple(stride for size, stride in pairs if size != 1)
    contents = {name: spec.model_dump_json() for name, spec in workload.inputs.items() if spec.type != "scalar"}
    parts: tuple[dict[str, Any], ...] = (
        axes, definition.bind_dtypes(workload.dtypes), workload.scalars(), layouts, contents,
    )  # fmt: skip
    return tuple(tuple(sorted(part.items())) for part in parts)
