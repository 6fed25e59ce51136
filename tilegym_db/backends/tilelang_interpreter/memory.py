"""Buffers of a running kernel: global, one a block, or one a thread; with every index checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tilegym_db.backends.tilelang_interpreter.faults import KernelFault, NotInterpreted
from tilegym_db.backends.tilelang_interpreter.numbers import Array, poison
from tilegym_db.backends.tilelang_interpreter.state import State, uniform_over_threads

__all__ = ["BlockMemory", "GlobalMemory", "LaneMemory", "Memory", "bits"]

_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def bits(value: Array) -> Array:
    """The bit patterns of an array, which tell NaN from NaN and -0 from 0."""
    return np.ascontiguousarray(value).view(_BITS[value.dtype.itemsize])


class Memory:
    """A buffer: its shape, its strides in elements, and its elements as one flat array."""

    def __init__(self, name: str, shape: Sequence[int], strides: Sequence[int], flat: Array) -> None:
        """Take over the elements."""
        self.name, self.shape, self.strides, self.flat = name, tuple(shape), tuple(strides), flat

    def address(self, linear: Array) -> Array:
        """Where elements lie in the flat array, by their place in the buffer."""
        return linear

    def outside(self, indices: Sequence[Array], mask: Any) -> Any:
        """Where active lanes are outside of the buffer; None where none of them is."""
        found = None
        for index, size in zip(indices, self.shape, strict=True):
            if np.ndim(index) == 0:
                if not 0 <= index < size:
                    return np.True_ if mask is None else mask
                continue
            wrong = (index < 0) | (index >= size)
            if wrong.any():
                wrong = wrong if mask is None else wrong & mask
                if wrong.any():
                    found = wrong if found is None else found | wrong
        return found

    def linear(self, state: State, indices: Sequence[Array], what: str) -> Array:
        """Places in the buffer.

        Raises:
            KernelFault: an active lane is outside of it.
        """
        wrong = self.outside(indices, state.mask)
        if wrong is not None:
            raise KernelFault(self._complaint(indices, wrong, what), code="index_outside")
        place: Any = 0
        for index, stride in zip(indices, self.strides, strict=True):
            if stride:
                place = place + np.asarray(index).astype(np.int64) * stride
        return np.asarray(place)

    def _complaint(self, indices: Sequence[Array], wrong: Array, what: str) -> str:
        shape = np.broadcast_shapes(np.shape(wrong), *(np.shape(index) for index in indices))
        at = np.unravel_index(int(np.argmax(np.broadcast_to(wrong, shape))), shape) if shape else ()
        where = [int(np.broadcast_to(index, shape)[at]) for index in indices]
        return f"{what} {self.name}{where}, which is outside of its shape {list(self.shape)}"

    def load(self, state: State, indices: Sequence[Array]) -> Array:
        """The elements at the indices; anything for lanes that are not active."""
        return np.take(self.flat, self.address(self.linear(state, indices, "reads")), mode="clip")

    def store(self, state: State, indices: Sequence[Array], value: Array) -> None:
        """Write elements for active lanes.

        Raises:
            KernelFault: outside of the buffer, or different values in one place.
        """
        self.scatter(self.address(self.linear(state, indices, "writes")), value, state.mask)

    def scatter(self, address: Array, value: Array, mask: Any) -> None:
        """Write to addresses, of which those that are the same must get the same."""
        shape = np.broadcast_shapes(np.shape(address), np.shape(value), np.shape(mask) if mask is not None else ())
        address, value = np.broadcast_to(address, shape), np.broadcast_to(value, shape)
        if mask is not None:
            chosen = np.broadcast_to(mask, shape)
            address, value = address[chosen], value[chosen]
        self.flat[address] = value
        if address.size > 1 and not np.array_equal(bits(self.flat[address]), bits(value)):
            raise KernelFault(
                f"lanes write different values to one element of {self.name} in one statement", code="store_conflict"
            )


class GlobalMemory(Memory):
    """A tensor argument."""


class BlockMemory(Memory):
    """Shared memory, or a fragment, whose elements the threads of a block have between them."""

    def __init__(self, name: str, shape: Sequence[int], dtype: Any, blocks: int) -> None:
        """Memory of so many blocks that nobody has written."""
        self.size = int(np.prod(shape, dtype=np.int64))
        super().__init__(name, shape, _row_major(shape), poison(blocks * self.size, dtype))
        self.base = (np.arange(blocks, dtype=np.int64) * self.size)[:, None]

    def address(self, linear: Array) -> Array:
        """Where elements of each block lie."""
        return linear + self.base


class LaneMemory(Memory):
    """Registers: the lanes lie next to each other."""

    def __init__(self, name: str, shape: Sequence[int], dtype: Any, blocks: int, threads: int, *, zero: bool) -> None:
        """Registers of all threads; variables begin with 0, arrays with what nobody has written."""
        self.size, self.lanes = int(np.prod(shape, dtype=np.int64)), (blocks, threads)
        whole = (self.size, blocks, threads)
        self.rows = np.zeros(whole, dtype) if zero else poison(whole, dtype)
        super().__init__(name, shape, _row_major(shape), self.rows.reshape(-1))
        self.base = np.arange(blocks * threads, dtype=np.int64).reshape(blocks, threads)

    def address(self, linear: Array) -> Array:
        """Where elements of each lane lie."""
        return linear * (self.lanes[0] * self.lanes[1]) + self.base

    def load(self, state: State, indices: Sequence[Array]) -> Array:
        """The elements at the indices; one value a block where the threads share out the work."""
        place = self.linear(state, indices, "reads")
        if place.ndim == 0:
            found = self.rows[int(place)]
        elif place.shape[-2:] == (1, 1):
            found = np.take(self.rows, place[..., 0, 0], axis=0, mode="clip")
        else:
            found = np.take(self.flat, self.address(place), mode="clip")
        if state.collapsed:
            return uniform_over_threads(found, state.mask, f"{self.name} differs between threads that share out a loop")
        return found

    def store(self, state: State, indices: Sequence[Array], value: Array) -> None:
        """Write the registers of active lanes."""
        if state.collapsed:
            raise NotInterpreted(
                f"{self.name}, which each thread has for itself, is written where threads share out the work",
                code="not_interpreted",
            )
        place = self.linear(state, indices, "writes")
        mask = state.mask
        if place.ndim == 0 and np.ndim(value) <= 2 and np.ndim(mask) <= 2:
            if mask is None:
                self.rows[int(place)] = value
            else:
                np.copyto(self.rows[int(place)], value, where=mask)
            return
        if place.ndim > 2 and place.shape[-2:] == (1, 1):
            rows = place[..., 0, 0]
            whole = rows.shape + self.lanes
            fits = all(np.ndim(item) <= len(whole) for item in (value, mask) if item is not None)
            if fits and np.unique(rows).size == rows.size:
                self.rows[rows] = value if mask is None else np.where(mask, value, self.rows[rows])
                return
        self.scatter(self.address(place), value, mask)


def _row_major(shape: Sequence[int]) -> list[int]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return strides[::-1]
