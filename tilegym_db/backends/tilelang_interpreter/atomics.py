"""Atomic operations: lanes take their turns in the order of their numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tilegym_db.backends.tilelang_interpreter.faults import NotInterpreted
from tilegym_db.backends.tilelang_interpreter.intrinsics import BINARY
from tilegym_db.backends.tilelang_interpreter.memory import LaneMemory, Memory
from tilegym_db.backends.tilelang_interpreter.numbers import Array
from tilegym_db.backends.tilelang_interpreter.state import State

__all__ = ["ATOMICS", "atomic"]

_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {"add": np.add, "max": BINARY["Max"], "min": BINARY["Min"]}
ATOMICS = {f"atomic_{name}{kind}_elem_op": name for name in _OPERATIONS for kind in ("", "_ret")}
"""Operation of TileLang -> what it does with one element; those with ``ret`` give what was there before."""


def atomic(state: State, short: str, memory: Memory, indices: Sequence[Array], value: Array) -> Array:
    """Change elements once for each active lane; gives what each of them found."""
    if isinstance(memory, LaneMemory):
        raise NotInterpreted(f"{short} on registers", code="not_interpreted")
    if state.collapsed and state.mask is not None and state.mask.shape[-1] > 1:
        raise NotInterpreted(
            f"{short} under a condition on the thread inside of a loop that threads share out", code="not_interpreted"
        )
    operation = _OPERATIONS[ATOMICS[short]]
    address = memory.address(memory.linear(state, indices, f"{short} on"))
    threads = (1 if state.collapsed else state.threads,)
    shapes = [np.shape(item) for item in (address, value, state.mask) if item is not None]
    shape = np.broadcast_shapes(*shapes, (state.blocks, *threads))
    active = np.ones(shape, bool) if state.mask is None else np.broadcast_to(state.mask, shape)
    where, what = np.broadcast_to(address, shape)[active], np.broadcast_to(value, shape)[active]
    found = np.zeros(shape, memory.flat.dtype)
    if "_ret_" not in short and operation is np.add and memory.flat.dtype.itemsize >= 4:
        np.add.at(memory.flat, where, what)
        return found
    before = np.empty_like(what)
    for number, (place, operand) in enumerate(zip(where, what, strict=True)):
        before[number] = memory.flat[place]
        memory.flat[place] = operation(memory.flat[place], operand)
    found[active] = before
    return found
