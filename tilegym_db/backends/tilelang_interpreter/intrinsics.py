"""Functions of TileLang that compute one value from others, by the name of the operation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tilegym_db.backends.tilelang_interpreter.numbers import Array, is_float, wide

__all__ = ["BINARY", "FUNCTIONS"]


def _narrowed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Computed in float32 or wider, then rounded once: what a device's function gives, but for its last bits."""

    def call(*values: Array) -> Array:
        dtype = values[0].dtype
        return function(*(wide(value).astype(np.float64) for value in values)).astype(dtype)

    return call


def _maximum(one: Array, two: Array) -> Array:
    return np.fmax(one, two) if is_float(one.dtype) else np.maximum(one, two)


def _minimum(one: Array, two: Array) -> Array:
    return np.fmin(one, two) if is_float(one.dtype) else np.minimum(one, two)


def _truncated_quotient(one: Array, two: Array) -> Array:
    if is_float(one.dtype):
        return one / two
    quotient = np.floor_divide(one, two)
    return quotient + ((quotient < 0) & (quotient * two != one)).astype(quotient.dtype)


def _fused(one: Array, two: Array, three: Array) -> Array:
    """a b + c rounded once: two float32 have an exact product in float64, and the sum is rounded to odd before the last step."""
    product = np.asarray(one, np.float64) * np.asarray(two, np.float64)
    addend = np.asarray(three, np.float64)
    total = np.asarray(product + addend)
    part = total - product
    error = (product - (total - part)) + (addend - part)
    even = (total.view(np.int64) & 1) == 0
    toward = np.where(error > 0, np.inf, -np.inf)
    odd = np.where((error != 0) & even & np.isfinite(total), np.nextafter(total, toward), total)
    return odd.astype(np.float32)


BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Div": _truncated_quotient,
    "Mod": np.fmod,
    "FloorDiv": np.floor_divide,
    "FloorMod": np.mod,
    "Min": _minimum,
    "Max": _maximum,
    "EQ": np.equal,
    "NE": np.not_equal,
    "LT": np.less,
    "LE": np.less_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
}
"""Expression nodes of two operands, both evaluated."""


def _rounded_half_away(value: Array) -> Array:
    return np.copysign(np.floor(np.abs(value) + 0.5), value)


_ERF = np.vectorize(math.erf, otypes=[np.float64])

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "bitwise_and": np.bitwise_and,
    "bitwise_or": np.bitwise_or,
    "bitwise_xor": np.bitwise_xor,
    "bitwise_not": np.invert,
    "shift_left": np.left_shift,
    "shift_right": np.right_shift,
    "fabs": np.abs,
    "floor": _narrowed(np.floor),
    "ceil": _narrowed(np.ceil),
    "trunc": _narrowed(np.trunc),
    "round": _narrowed(_rounded_half_away),
    "nearbyint": _narrowed(np.rint),
    "isnan": lambda value: value != value,
    "isinf": lambda value: np.isinf(wide(value)),
    "isfinite": lambda value: np.isfinite(wide(value)),
    "sqrt": _narrowed(np.sqrt),
    "rsqrt": _narrowed(lambda value: 1 / np.sqrt(value)),
    "exp": _narrowed(np.exp),
    "exp2": _narrowed(np.exp2),
    "exp10": _narrowed(lambda value: 10.0**value),
    "log": _narrowed(np.log),
    "log2": _narrowed(np.log2),
    "log10": _narrowed(np.log10),
    "log1p": _narrowed(np.log1p),
    "tanh": _narrowed(np.tanh),
    "sigmoid": _narrowed(lambda value: 1 / (1 + np.exp(-value))),
    "sin": _narrowed(np.sin),
    "cos": _narrowed(np.cos),
    "erf": _narrowed(_ERF),
    "pow": _narrowed(np.power),
    "fast_rcp": _narrowed(np.reciprocal),
    "__exp": _narrowed(np.exp),
    "__exp10": _narrowed(lambda value: 10.0**value),
    "__log": _narrowed(np.log),
    "__log2": _narrowed(np.log2),
    "__log10": _narrowed(np.log10),
    "__cos": _narrowed(np.cos),
    "__sin": _narrowed(np.sin),
    "__tan": _narrowed(np.tan),
    "fmul": np.multiply,
    "fadd": np.add,
    "fsub": np.subtract,
    "fdiv": np.divide,
    "ieee_mul": lambda one, two, *_: np.multiply(one, two),
    "ieee_add": lambda one, two, *_: np.add(one, two),
    "ieee_sub": lambda one, two, *_: np.subtract(one, two),
    "ieee_fdiv": lambda one, two, *_: np.divide(one, two),
    "ieee_fmaf": lambda one, two, three, *_: _fused(one, two, three),
    "ieee_fsqrt": lambda value, *_: _narrowed(np.sqrt)(value),
    "ieee_frcp": lambda value, *_: _narrowed(np.reciprocal)(value),
}
"""Operation without its dialect -> function of its operands. Fast intrinsics are as accurate as the others here."""
