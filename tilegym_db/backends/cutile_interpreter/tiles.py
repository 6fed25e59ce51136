"""Operations on tiles as NumPy functions, and the representation of every cuTile type in NumPy.

A tile is a NumPy array of its shape, an array with axes of length 1 where it repeats, or a scalar. An operation that
depends on the shape takes it as an argument and broadcasts the tile first. The others leave this to NumPy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tilegym_db.errors import SolutionError

__all__ = [
    "NARROW",
    "bits_as",
    "ceil_div",
    "constant",
    "convert",
    "decoder",
    "encoder",
    "extract",
    "flush",
    "fold",
    "fold_pairs",
    "fused_multiply_add",
    "host_dtype",
    "insert",
    "is_float",
    "multiply_tiles",
    "raw_dtype",
    "require",
    "reshape",
    "reverse_square_root",
    "rounder",
    "scan",
    "scan_pairs",
    "spread",
]


Shape = tuple[int, ...]


def spread(tile: Any, shape: Shape) -> Any:
    """Return the tile broadcast to its whole shape."""
    return tile if tile.shape == shape else np.broadcast_to(tile, shape)


def reshape(tile: Any, shape: Shape, new: Shape) -> Any:
    """Return the same elements in row-major order in another shape."""
    return tile if tile.ndim == 0 and new else spread(tile, shape).reshape(new)


def bits_as(tile: Any, dtype: Any) -> Any:
    """Return the same bits as another type of the same width."""
    return tile.view(dtype)


def require(condition: Any, message: str) -> None:
    """Raise :class:`SolutionError` if an assertion in the kernel fails."""
    if not np.all(condition):
        raise SolutionError(f"The kernel's assertion fails: {message}", code="assertion_failed")


# -- arithmetic ------------------------------------------------------------------------------------------------------


def ceil_div(a: Any, b: Any) -> Any:
    """Return the integer quotient rounded up."""
    quotient = a // b
    return quotient + (quotient * b != a)


def fused_multiply_add(a: Any, b: Any, c: Any) -> Any:
    """Return ``a * b + c`` of float32, rounded once: the product is exact in float64."""
    return np.add(np.multiply(a, b, dtype=np.float64), c).astype(np.float32)


def reverse_square_root(x: Any) -> Any:
    """Return ``1 / sqrt(x)``, rounded once."""
    return (1.0 / np.sqrt(x.astype(np.float64))).astype(x.dtype)


def multiply_tiles(x: Any, y: Any, acc: Any, shapes: tuple[Shape, Shape, Shape]) -> Any:
    """Return ``x @ y + acc`` in the accumulator's type. Float16 accumulates in float32, as hardware does."""
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
    """Return one part of a tile that is cut into parts of equal shape."""
    return spread(tile, shape)[_part(shape, part, index)]


def insert(tile: Any, shape: Shape, value: Any, part: Shape, index: tuple[Any, ...]) -> Any:
    """Return the tile with one of its parts replaced."""
    whole = spread(tile, shape).copy()
    whole[_part(shape, part, index)] = value
    return whole


# -- reductions and scans --------------------------------------------------------------------------------------------


def fold(operation: Any, tile: Any, shape: Shape, axis: int) -> Any:
    """Reduce an axis with one NumPy function and keep the type."""
    whole = spread(tile, shape)
    return operation.reduce(whole, axis=axis, dtype=whole.dtype)


def fold_pairs(body: Callable[..., Any], tiles: tuple[Any, ...], shape: Shape, axis: int) -> tuple[Any, ...]:
    """Reduce an axis with any function: combine halves until one element is left, as a device does."""
    parts = [np.moveaxis(spread(tile, shape), axis, 0) for tile in tiles]
    while (count := parts[0].shape[0]) > 1:
        half = count // 2
        joined = body(*(side for part in parts for side in (part[:half], part[half : 2 * half])))
        joined = [spread(new, part[:half].shape) for new, part in zip(joined, parts, strict=True)]
        odd = count % 2
        parts = [np.concatenate((new, part[-1:])) if odd else new for new, part in zip(joined, parts, strict=True)]
    return tuple(part[0] for part in parts)


def scan(operation: Any, tile: Any, shape: Shape, axis: int, reverse: bool) -> Any:
    """Scan an axis with one NumPy function and keep the type."""
    whole = spread(tile, shape)
    whole = np.flip(whole, axis) if reverse else whole
    done = operation.accumulate(whole, axis=axis, dtype=whole.dtype)
    return np.flip(done, axis) if reverse else done


def scan_pairs(
    body: Callable[..., Any], tiles: tuple[Any, ...], shape: Shape, axis: int, reverse: bool
) -> tuple[Any, ...]:
    """Scan an axis with any function, one element after another."""
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


# ---- numerics -------------------------------------------------------------------------------------
# NumPy computes in every cuTile type except the narrow floats. A narrow float is stored as the float32 of equal value.
# An operation on it computes in float32 and rounds once, as a device does.

_NATIVE: dict[str, Any] = {
    "bool_": np.bool_,
    **{f"{sign}int{bits}": getattr(np, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)},
    **{f"float{bits}": getattr(np, f"float{bits}") for bits in (16, 32, 64)},
}
_EIGHT_BITS = {
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "float8_e8m0fnu": torch.float8_e8m0fnu,
}
NARROW = frozenset({"bfloat16", "tfloat32", *_EIGHT_BITS})
"""Types whose values are held as float32."""

_TABLES = {
    name: torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype).float().numpy()
    for name, dtype in _EIGHT_BITS.items()
}
_E8M0_BIAS_SHIFT, _E8M0_NAN = 23, 255


def host_dtype(name: str) -> Any:
    """Return the NumPy type that stores values of a cuTile type; raise KeyError if there is no such type."""
    return np.float32 if name in NARROW else _NATIVE[name]


def raw_dtype(name: str) -> Any:
    """Return the NumPy type of the bits in memory."""
    if name == "bfloat16":
        return np.uint16
    return np.uint8 if name in _EIGHT_BITS else host_dtype(name)


def is_float(name: str) -> bool:
    """Return True if a cuTile type is a float."""
    return name in NARROW or name.startswith("float")


# -- bits ------------------------------------------------------------------------------------------------------------


def decoder(name: str) -> Callable[[Any], Any] | None:
    """Return the function that decodes bits from memory into values, or None if they are the same."""
    if name == "bfloat16":
        return lambda bits: (np.asarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)
    if name in _EIGHT_BITS:
        return lambda bits: _TABLES[name][bits]
    return None


def encoder(name: str) -> Callable[[Any], Any] | None:
    """Return the function that encodes values as bits for memory, or None if they are the same."""
    if name == "bfloat16":
        return lambda values: (np.asarray(values).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    if name in _EIGHT_BITS:
        return lambda values: _eight_bits(name, values)
    return None


def _eight_bits(name: str, values: Any) -> Any:
    if name == "float8_e8m0fnu":
        return _e8m0_bits(values, "RZ")
    dtype = _EIGHT_BITS[name]
    most = torch.finfo(dtype).max  # beyond, hardware gives the largest number
    tensor = torch.from_numpy(np.array(values, dtype=np.float32, ndmin=1))
    return tensor.clamp(-most, most).to(dtype).view(torch.uint8).numpy().reshape(np.shape(values))


def _e8m0_bits(values: Any, mode: str) -> Any:
    """Return the exponent bits. ``RP`` rounds up if there is a mantissa. Negative values become NaN.

    Infinity becomes the largest finite code.
    """
    bits = np.asarray(values, dtype=np.float32).view(np.uint32)
    exponent = bits >> np.uint32(_E8M0_BIAS_SHIFT)
    if mode == "RP":
        exponent = exponent + ((bits & np.uint32(0x7FFFFF)) != 0)
    exponent = np.minimum(exponent, np.uint32(_E8M0_NAN - 1))
    return np.where(np.isnan(values) | (np.asarray(values) < 0), np.uint32(_E8M0_NAN), exponent).astype(np.uint8)


# -- rounding --------------------------------------------------------------------------------------------------------


def _to_bits_kept(values: Any, dropped: int) -> Any:
    """Round float32 to nearest even, so that the ``dropped`` low bits are zero."""
    bits = np.asarray(values).view(np.uint32)
    half = np.uint32((1 << (dropped - 1)) - 1)
    kept = (bits + (half + ((bits >> np.uint32(dropped)) & np.uint32(1)))) & np.uint32((1 << 32) - (1 << dropped))
    return np.where(values == values, kept, bits | np.uint32(1 << 22)).view(np.float32)


def rounder(name: str) -> Callable[[Any], Any] | None:
    """Return the function that rounds float32 to nearest even in a narrow float, or None for any other type."""
    if name == "bfloat16":
        return lambda values: _to_bits_kept(values, 16)
    if name == "tfloat32":
        return lambda values: _to_bits_kept(values, 13)
    if name in _EIGHT_BITS:
        return lambda values: _TABLES[name][_eight_bits(name, values)]
    return None


def flush(values: Any) -> Any:
    """Replace subnormal float32 numbers by zeros of the same sign."""
    tiny = np.finfo(np.float32).tiny
    return np.where(np.abs(values) < tiny, np.copysign(np.float32(0), values), values)


# -- casts -----------------------------------------------------------------------------------------------------------


def convert(source: str, target: str, mode: str | None) -> Callable[[Any], Any] | None:
    """Return the function of a cast, or None if values stay as they are; raise KeyError for an unsupported rounding mode."""
    if target == "bool_":
        return lambda values: values != 0
    if is_float(source) and not is_float(target):
        return _to_integer(_NATIVE[target])
    if target in NARROW:
        return _to_narrow(source, target, mode)
    if mode not in (None, "RN"):
        raise KeyError(mode)
    host = host_dtype(target)
    return None if host is host_dtype(source) else lambda values: values.astype(host)


def _to_integer(host: Any) -> Callable[[Any], Any]:
    """Return a cast that rounds towards zero.

    cuTile does not define the result beyond the range. This cast returns what hardware does: the limit, and zero for NaN.
    """
    limits = np.iinfo(host)
    # Use limits that float64 can represent: those of 64 bits are rounded inwards.
    low, high = float(limits.min), float(limits.max) if limits.bits < 64 else np.nextafter(float(limits.max), 0)

    def cast(values: Any) -> Any:
        wide = np.where(values == values, values, 0).astype(np.float64)
        return np.clip(wide, low, high).astype(host)

    return cast


def _to_narrow(source: str, target: str, mode: str | None) -> Callable[[Any], Any] | None:
    if source in ("float8_e4m3fn", "float8_e5m2") and target in ("bfloat16", "tfloat32"):
        return None
    if target == "float8_e8m0fnu" and mode in ("RZ", "RP"):
        return lambda values: _TABLES[target][_e8m0_bits(values.astype(np.float32), mode)]
    if target == "bfloat16" and mode == "RZ":
        cut = np.uint32(0xFFFF0000)
        return lambda values: (np.asarray(values.astype(np.float32)).view(np.uint32) & cut).view(np.float32)
    if mode not in (None, "RN") or target == "float8_e8m0fnu":
        raise KeyError(mode)
    narrowed = rounder(target)
    assert narrowed is not None
    return lambda values: narrowed(values.astype(np.float32))


def constant(value: Any, name: str) -> Any:
    """Return a Python number, or nested tuples of numbers, as a value of a type; an integer wraps."""
    host = host_dtype(name)
    if name == "bool_" or is_float(name):
        held = np.asarray(value).astype(host)
    else:
        bits = 8 * np.dtype(host).itemsize
        wrapped = np.asarray(value, dtype=object) & ((1 << bits) - 1)
        held = wrapped.astype(f"uint{bits}").view(host) if np.ndim(value) else np.uint64(wrapped).astype(host)
    narrowed = rounder(name)
    held = held if narrowed is None else narrowed(held)
    return held[()] if np.ndim(held) == 0 else held
