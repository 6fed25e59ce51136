"""Layouts for fuzzing: strides that a Solution says it reads, and that no contiguous tensor has."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from tilegym_db.records import Definition, Solution
from tilegym_db.records.layouts import accepts, contiguous_strides

__all__ = ["CONTIGUOUS", "draw_layouts", "layout_choices"]

CONTIGUOUS = "contiguous"

# Odd padding puts every second row off any vector's alignment; even padding keeps some alignments and loses others.
_PADDING: dict[str, tuple[int, ...]] = {"padded_odd": (1, 3, 5, 7, 9, 13), "padded_even": (2, 8, 16, 24, 64)}
_ALIGNED, _SHARE_ALIGNED = 64, 0.5
"""Where rows begin at multiples of this, a kernel may take whole vectors, and the last one reaches into the padding."""

# Layout -> the class that a Solution must declare for a tensor to get it, and the dimensions that it takes.
_NEEDS: dict[str, tuple[str, int]] = {
    "padded_odd": ("row_contiguous", 2),
    "padded_even": ("row_contiguous", 2),
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


def draw_layouts(
    definition: Definition, takers: Sequence[str], layout: str, axes: Mapping[str, int], generator: random.Random
) -> dict[str, str]:
    """Tensor -> ``strided(...)`` for most of the tensors that may have the layout, each with strides of its own.

    Some stay contiguous, and no two need have the same padding, so that a kernel which takes one tensor's strides for
    another's is found out. A tensor without elements stays contiguous.
    """
    solid = [name for name in takers if 0 not in definition.shape_of(name, axes)]
    if not solid or layout == CONTIGUOUS:
        return {}
    surely = generator.choice(solid)
    laid_out = [name for name in solid if name == surely or generator.random() < _SHARE_LAID_OUT]
    return {name: _spelled(_strides(layout, definition.shape_of(name, axes), generator)) for name in laid_out}


def _strides(layout: str, shape: tuple[int, ...], generator: random.Random) -> tuple[int, ...]:
    match layout:
        case "rows_swapped":  # [B, H, S, D] of memory that holds [B, S, H, D], as a model passes its heads
            return _permuted(shape, -3, -2)
        case "transposed":
            return _permuted(shape, -2, -1)
        case "columns_padded":  # as scales that are loaded by columns, which begin at addresses of 16 bytes each
            return _columns_padded(shape, generator.choice(_COLUMNS_START_AT))
        case "every_other":
            return tuple(2 * step for step in contiguous_strides(shape))
        case "padded_even" if generator.random() < _SHARE_ALIGNED:
            return contiguous_strides((*shape[:-1], (shape[-1] // _ALIGNED + 1) * _ALIGNED))
    return contiguous_strides((*shape[:-1], shape[-1] + generator.choice(_PADDING[layout])))


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
