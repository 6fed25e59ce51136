"""Layouts for fuzzing: strides that a Solution says it reads, and that no contiguous tensor has."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

from tilegym_db.records import Definition, Solution
from tilegym_db.records.dtypes import STORED_BYTES
from tilegym_db.records.layouts import accepts, contiguous_strides

__all__ = ["CONTIGUOUS", "ROWS_ALIGNED", "ROWS_OFF", "draw_layouts", "layout_choices", "ragged_rows"]

CONTIGUOUS = "contiguous"
ROWS_ALIGNED, ROWS_OFF = "rows_aligned", "rows_off"
"""Padded rows that all begin at multiples of 16 bytes, as vectors and the tensor copy engine (TMA) want them, or that do not.

Where they do and the last extent is no such multiple, whatever writes whole vectors reaches into the padding: TMA does.
"""

_VECTOR_BYTES = 16
_ALIGNED_ELEMENTS = 64
_PADDING = (1, 2, 3, 5, 7, 8, 9, 13, 16, 24, 64)
"""Odd padding puts every second row off any vector's alignment; even padding keeps some alignments and loses others."""

# Layout -> the class that a Solution must declare for a tensor to get it, and the dimensions that it takes.
_NEEDS: dict[str, tuple[str, int]] = {
    ROWS_ALIGNED: ("row_contiguous", 2),
    ROWS_OFF: ("row_contiguous", 2),
    "rows_swapped": ("row_contiguous", 3),
    "transposed": ("strided", 2),
    "columns_padded": ("strided", 2),
    "every_other": ("strided", 1),
}
_SHARE_LAID_OUT = 0.75
_COLUMNS_START_AT = (4, 4, 8, 7)


def layout_choices(definition: Definition, solution: Solution) -> dict[str, tuple[str, ...]]:
    """Layout -> the tensors that may have it under the Solution's declared classes; ``contiguous`` is always there.

    A tensor whose strides the Definition says has those in every case: only the sizes in them vary.
    """
    tensors = [
        name for name in (*definition.tensor_inputs, *definition.written_outputs) if name not in definition.layouts
    ]
    found: dict[str, tuple[str, ...]] = {CONTIGUOUS: ()}
    for layout, (needed, dimensions) in _NEEDS.items():
        takers = tuple(
            name
            for name in tensors
            if accepts(solution.spec.layouts.get(name, CONTIGUOUS), needed) and _rank(definition, name) >= dimensions
        )
        if takers:
            found[layout] = takers
    return found


def _rank(definition: Definition, name: str) -> int:
    return len((definition.inputs.get(name) or definition.outputs[name]).shape or ())


def ragged_rows(
    definition: Definition, takers: Sequence[str], axes: Mapping[str, int], dtypes: Mapping[str, str]
) -> int:
    """How many rows that end between two multiples of 16 bytes an output among the tensors has; any, where none is written."""
    most = 0
    written = [name for name in takers if name in definition.written_outputs or name in definition.in_place]
    for name in written or takers:
        shape = definition.shape_of(name, axes)
        if shape[-1] * _bytes(definition, name, dtypes) % _VECTOR_BYTES:
            most = max(most, math.prod(shape[:-1]))
    return most


def _bytes(definition: Definition, name: str, dtypes: Mapping[str, str]) -> int:
    return STORED_BYTES[definition.dtype_of(name, dtypes)]


def draw_layouts(
    definition: Definition,
    takers: Sequence[str],
    layout: str,
    axes: Mapping[str, int],
    dtypes: Mapping[str, str],
    generator: random.Random,
    *,
    everywhere: bool = False,
) -> dict[str, str]:
    """Tensor -> ``strided(...)`` for most of the tensors that may have the layout, each with strides of its own.

    Some stay contiguous, unless ``everywhere``, and no two need have the same padding, so that a kernel which takes one
    tensor's strides for another's is found out. A tensor without elements stays contiguous.
    """
    solid = [name for name in takers if 0 not in definition.shape_of(name, axes)]
    if not solid or layout == CONTIGUOUS:
        return {}
    surely = solid if everywhere else [generator.choice(solid)]
    laid_out = [name for name in solid if name in surely or generator.random() < _SHARE_LAID_OUT]
    return {
        name: _spelled(
            _strides(layout, definition.shape_of(name, axes), _bytes(definition, name, dtypes), generator),
        )
        for name in laid_out
    }


def _strides(layout: str, shape: tuple[int, ...], itemsize: int, generator: random.Random) -> tuple[int, ...]:
    match layout:
        case "rows_swapped":  # [B, H, S, D] of memory that holds [B, S, H, D], as a model passes its heads
            return _permuted(shape, -3, -2)
        case "transposed":
            return _permuted(shape, -2, -1)
        case "columns_padded":  # as scales that are loaded by columns, which begin at addresses of 16 bytes each
            return _columns_padded(shape, generator.choice(_COLUMNS_START_AT))
        case "every_other":
            return tuple(2 * step for step in contiguous_strides(shape))
    return contiguous_strides((*shape[:-1], generator.choice(_row_strides(layout, shape[-1], itemsize))))


def _row_strides(layout: str, size: int, itemsize: int) -> list[int]:
    """From one row to the next, longer than a row: where the next vector, or a larger block, begins, or off any vector."""
    if layout == ROWS_OFF:
        return [size + padding for padding in _PADDING if (size + padding) * itemsize % _VECTOR_BYTES]
    vector = max(1, _VECTOR_BYTES // itemsize)
    blocks = [size // step * step + step for step in (vector, _ALIGNED_ELEMENTS)]
    return [blocks[0], blocks[0] + vector, blocks[1], blocks[1]]


def _columns_padded(shape: tuple[int, ...], multiple: int) -> tuple[int, ...]:
    """Columns one after the other, each a multiple of so many elements long: gaps between them belong to nobody."""
    *batches, down, up = shape
    length = -(-down // multiple) * multiple
    return (*contiguous_strides((*batches, up, length))[:-2], 1, length)


def _permuted(shape: tuple[int, ...], one: int, other: int) -> tuple[int, ...]:
    order = list(range(len(shape)))
    order[one], order[other] = order[other], order[one]
    in_memory = contiguous_strides([shape[dimension] for dimension in order])
    strides = [0] * len(shape)
    for dimension, step in zip(order, in_memory, strict=True):
        strides[dimension] = step
    return tuple(strides)


def _spelled(strides: tuple[int, ...]) -> str:
    return f"strided({', '.join(map(str, strides))})"
