"""Values that the threads of a warp exchange: permutations of lanes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilegym_db.backends.tilelang_interpreter.faults import KernelFault, NotInterpreted
from tilegym_db.backends.tilelang_interpreter.numbers import Array, is_float
from tilegym_db.backends.tilelang_interpreter.state import State

__all__ = ["REDUCTIONS", "SHUFFLES", "reduce_warp", "shuffle"]

WARP = 32

SHUFFLES: dict[str, Callable[[Any, Any, int], tuple[Any, Any]]] = {
    "tl.shfl_xor_sync": lambda lane, delta, width: (lane ^ delta, (lane ^ delta) // width == lane // width),
    "tl.shfl_up_sync": lambda lane, delta, width: (lane - delta, lane % width >= delta),
    "tl.shfl_down_sync": lambda lane, delta, width: (lane + delta, lane % width + delta < width),
    "tl.shfl_sync": lambda lane, source, width: (lane // width * width + source % width, lane >= 0),
}
"""Operation -> of a lane's number, the operand and the width: whose value it gets, and whether it gets any but its own."""

REDUCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "tl.warp_reduce_sum": np.add,
    "tl.warp_reduce_max": lambda a, b: np.fmax(a, b) if is_float(a.dtype) else np.maximum(a, b),
    "tl.warp_reduce_min": lambda a, b: np.fmin(a, b) if is_float(a.dtype) else np.minimum(a, b),
    "tl.warp_reduce_bitand": np.bitwise_and,
    "tl.warp_reduce_bitor": np.bitwise_or,
}


def shuffle(state: State, name: str, value: Array, operand: Array, width: Array) -> Array:
    """What each lane gets from another one of its warp.

    Raises:
        KernelFault: an active lane asks for the value of one that is not there, which is undefined.
    """
    _together(state, name)
    lane = np.arange(state.threads, dtype=np.int64)
    source, gets = SHUFFLES[name](lane, np.asarray(operand).astype(np.int64), int(width))
    source = np.where(gets & (source >= 0), source, lane)
    return _exchanged(state, name, value, source)


def reduce_warp(state: State, name: str, value: Array) -> Array:
    """The sum, or another total, over a warp, for all its lanes; added up as the device does it, in halves."""
    _together(state, name)
    lane = np.arange(state.threads, dtype=np.int64)
    total = np.asarray(value)
    for step in (16, 8, 4, 2, 1):
        total = REDUCTIONS[name](total, _exchanged(state, name, total, lane ^ step))
    return total


def _together(state: State, name: str) -> None:
    if state.collapsed:
        raise NotInterpreted(f"{name} inside of a loop that threads share out", code="not_interpreted")


def _exchanged(state: State, name: str, value: Array, source: Array) -> Array:
    """The value of the source lane, which must be one of those that run this."""
    wanted = np.ones((1, 1), bool) if state.mask is None else state.mask
    missing = (source >= state.threads) & wanted
    source = np.minimum(source, state.threads - 1)
    if state.mask is not None:
        lanes = np.broadcast_to(state.mask, (*state.mask.shape[:-1], state.threads))
        missing = missing | (lanes & ~_taken(lanes, source))
    if missing.any():
        raise KernelFault(f"{name} reads from a lane that does not take part in it", code="lane_absent")
    if np.ndim(value) == 0 or value.shape[-1] == 1:
        return value
    return _taken(value, source)


def _taken(value: Array, source: Array) -> Array:
    if source.ndim == 1:
        return np.take(value, source, axis=-1)
    shape = np.broadcast_shapes(value.shape, source.shape)
    return np.take_along_axis(np.broadcast_to(value, shape), np.broadcast_to(source, shape), axis=-1)
