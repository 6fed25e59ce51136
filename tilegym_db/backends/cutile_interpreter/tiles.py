"""What operations on tiles compute. A tile is a NumPy array of its shape, or of ones where it repeats, or a scalar.

An operation that looks at the shape is told it and spreads the tile first; all others leave that to NumPy's broadcasting.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilegym_db.errors import SolutionError

__all__ = [
    "bits_as",
    "ceil_div",
    "extract",
    "fold",
    "fold_pairs",
    "fused_multiply_add",
    "insert",
    "multiply_tiles",
    "require",
    "reshape",
    "reverse_square_root",
    "scan",
    "scan_pairs",
    "spread",
]

Shape = tuple[int, ...]


def spread(tile: Any, shape: Shape) -> Any:
    """The tile in its whole shape."""
    return tile if tile.shape == shape else np.broadcast_to(tile, shape)


def reshape(tile: Any, shape: Shape, new: Shape) -> Any:
    """The same elements, row by row, in another shape."""
    return tile if tile.ndim == 0 and new else spread(tile, shape).reshape(new)


def bits_as(tile: Any, dtype: Any) -> Any:
    """The same bits as another type of the same width."""
    return tile.view(dtype)


def require(condition: Any, message: str) -> None:
    """The kernel's own assertion."""
    if not np.all(condition):
        raise SolutionError(f"The kernel's assertion fails: {message}", code="assertion_failed")


# -- arithmetic ------------------------------------------------------------------------------------------------------


def ceil_div(a: Any, b: Any) -> Any:
    """Integer division rounded up."""
    quotient = a // b
    return quotient + (quotient * b != a)


def fused_multiply_add(a: Any, b: Any, c: Any) -> Any:
    """``a * b + c`` of float32, rounded once: the product is exact in float64."""
    return np.add(np.multiply(a, b, dtype=np.float64), c).astype(np.float32)


def reverse_square_root(x: Any) -> Any:
    """``1 / sqrt(x)``, rounded once."""
    return (1.0 / np.sqrt(x.astype(np.float64))).astype(x.dtype)


def multiply_tiles(x: Any, y: Any, acc: Any, shapes: tuple[Shape, Shape, Shape]) -> Any:
    """Matrix product added to the accumulator, in the accumulator's type but float16, which hardware widens."""
    x, y, acc = (spread(tile, shape) for tile, shape in zip((x, y, acc), shapes, strict=True))
    if acc.dtype == np.int32:
        return acc + np.matmul(x.astype(np.float64), y.astype(np.float64)).astype(np.int64).astype(np.int32)
    wide = np.float64 if acc.dtype == np.float64 else np.float32
    return (np.matmul(x.astype(wide), y.astype(wide)) + acc).astype(acc.dtype)


# -- parts -----------------------------------------------------------------------------------------------------------


def _part(shape: Shape, part: Shape, index: tuple[Any, ...]) -> tuple[slice, ...]:
    chosen = []
    for whole, size, at in zip(shape, part, index, strict=True):
        start = int(at) * size
        if not 0 <= start <= whole - size:
            raise SolutionError(
                f"Part {tuple(map(int, index))} of shape {part} lies outside of a tile {shape}.", code="part_outside"
            )
        chosen.append(slice(start, start + size))
    return tuple(chosen)


def extract(tile: Any, shape: Shape, part: Shape, index: tuple[Any, ...]) -> Any:
    """One part of a tile cut in parts of the same shape."""
    return spread(tile, shape)[_part(shape, part, index)]


def insert(tile: Any, shape: Shape, value: Any, part: Shape, index: tuple[Any, ...]) -> Any:
    """The tile with one of its parts replaced."""
    whole = spread(tile, shape).copy()
    whole[_part(shape, part, index)] = value
    return whole


# -- reductions and scans --------------------------------------------------------------------------------------------


def fold(operation: Any, tile: Any, shape: Shape, axis: int) -> Any:
    """A reduction by one NumPy function; the type stays."""
    whole = spread(tile, shape)
    return operation.reduce(whole, axis=axis, dtype=whole.dtype)


def fold_pairs(body: Callable[..., Any], tiles: tuple[Any, ...], shape: Shape, axis: int) -> tuple[Any, ...]:
    """A reduction by any function: halves with halves, until one is left, as a device does."""
    parts = [np.moveaxis(spread(tile, shape), axis, 0) for tile in tiles]
    while (count := parts[0].shape[0]) > 1:
        half = count // 2
        joined = body(*(side for part in parts for side in (part[:half], part[half : 2 * half])))
        joined = [spread(new, part[:half].shape) for new, part in zip(joined, parts, strict=True)]
        odd = count % 2
        parts = [np.concatenate((new, part[-1:])) if odd else new for new, part in zip(joined, parts, strict=True)]
    return tuple(part[0] for part in parts)


def scan(operation: Any, tile: Any, shape: Shape, axis: int, reverse: bool) -> Any:
    """A scan by one NumPy function; the type stays."""
    whole = spread(tile, shape)
    whole = np.flip(whole, axis) if reverse else whole
    done = operation.accumulate(whole, axis=axis, dtype=whole.dtype)
    return np.flip(done, axis) if reverse else done


def scan_pairs(
    body: Callable[..., Any], tiles: tuple[Any, ...], shape: Shape, axis: int, reverse: bool
) -> tuple[Any, ...]:
    """A scan by any function, one element after another."""
    parts = [np.moveaxis(spread(tile, shape), axis, 0) for tile in tiles]
    order = range(shape[axis])[::-1] if reverse else range(shape[axis])
    done = [np.empty_like(part) for part in parts]
    last: tuple[Any, ...] = ()
    for at in order:
        row = tuple(part[at] for part in parts)
        last = row if not last else body(*(side for pair in zip(last, row, strict=True) for side in pair))
        for part, value in zip(done, last, strict=True):
            part[at] = value
    return tuple(np.moveaxis(part, 0, axis) for part in done)
