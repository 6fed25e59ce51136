"""The outputs that a Definition promises: shapes, dtypes and strides, for every Definition that there is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from shipped_records import CATALOG

from tilegym_db.records import Definition
from tilegym_db.records.definition_parts import layout_strides
from tilegym_db.resolver.hot_path import allocate_of
from tilegym_db.sandbox.shared_buffers import storage_dtype

DEFINITIONS = list(CATALOG.definitions.values())
SERVED = [record for record in DEFINITIONS if record.serving is not None]


def a_call(definition: Definition) -> tuple[dict[str, int], dict[str, str], list[Any]]:
    """The sizes and dtypes of a tiny Workload, and inputs for them without contents."""
    workload = next(one for one in CATALOG.workloads_for(definition.name) if "tiny" in one.tags)
    axes, dtypes = definition.bind_axes(workload.axes), definition.bind_dtypes(workload.dtypes)
    inputs = [
        workload.scalars()[name]
        if spec.is_scalar
        else torch.empty(definition.shape_of(name, axes), dtype=storage_dtype(definition.dtype_of(name, dtypes)))
        for name, spec in definition.inputs.items()
    ]
    return axes, dtypes, inputs


def made(definition: Definition, inputs: list[Any]) -> dict[str, torch.Tensor]:
    found = allocate_of(definition)(*inputs)
    return dict(zip(definition.written_outputs, found if isinstance(found, tuple) else (found,), strict=True))


@pytest.mark.records("definition")
@pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda record: record.name)
def test_outputs_have_the_shapes_and_dtypes_of_the_definition(definition: Definition) -> None:
    axes, dtypes, inputs = a_call(definition)
    for name, output in made(definition, inputs).items():
        assert tuple(output.shape) == definition.shape_of(name, axes)
        assert output.dtype == storage_dtype(definition.dtype_of(name, dtypes))


@pytest.mark.records("definition")
@pytest.mark.parametrize("definition", SERVED, ids=lambda record: record.name)
def test_outputs_lie_in_memory_as_the_definition_says(definition: Definition) -> None:
    axes, _, inputs = a_call(definition)
    spread = [value.transpose(1, 2).contiguous().transpose(1, 2) if is_heads(value) else value for value in inputs]
    given = dict(zip(definition.inputs, spread, strict=True))
    assert definition.serving is not None
    for name, output in made(definition, spread).items():
        layout = definition.serving.outputs.get(name)
        if layout is None and name in definition.layouts:
            shape = definition.shape_of(name, axes)
            assert output.stride() == layout_strides(definition.layouts[name], shape, axes)
        elif layout is None:
            assert output.is_contiguous()
        elif layout.like is not None:
            assert output.stride() == given[layout.like].stride()
        else:
            assert layout.order is not None
            assert output.permute(layout.order).is_contiguous()


def is_heads(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 4


@pytest.mark.parametrize(
    "definition", [one for one in SERVED if one.serving and one.serving.rows], ids=lambda record: record.name
)
def test_rows_with_leading_axes_give_outputs_with_them(definition: Definition) -> None:
    _, _, inputs = a_call(definition)
    rows = [value for value in inputs if isinstance(value, torch.Tensor) and value.dim() == 2]
    led = [value.expand(3, *value.shape) if any(value is one for one in rows) else value for value in inputs]
    for name, output in made(definition, led).items():
        shape = definition.outputs[name].shape or ()
        assert (output.dim(), output.shape[0]) == ((3, 3) if len(shape) == 2 else (1, output.shape[0]))


def test_layout_changes_with_serving_but_not_the_digest() -> None:
    record = CATALOG.definition("attention_prefill")
    other = Definition.from_dict({**record.to_dict(), "serving": {}})
    _, _, inputs = a_call(record)
    assert other.digest == record.digest
    assert made(other, inputs)["out"].is_contiguous()
    assert made(record, inputs)["out"].transpose(1, 2).is_contiguous()
