"""State of a chunk of thread blocks: numbers, variables, memories and the mask of active lanes.

All blocks of a chunk and all their threads run in lockstep, one statement after the other. The last two axes of a value
are blocks and threads. An axis along which the value does not vary has length 1, and a value that all lanes share is a
scalar. A loop with independent iterations runs them at once and adds an axis in front.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import torch

from tilegym_db.errors import SolutionError


@dataclass
class State:
    """The state that the statements of a kernel share while they run for one chunk of blocks."""

    blocks: int
    threads: int
    values: list[Any]
    """Values of the variables, by slot."""
    memories: list[Any]
    """Memories of the buffers, by slot."""
    mask: Any = None
    """Mask of the lanes that run the current statement; None for all lanes."""
    depth: int = 0
    """Number of axes that enclosing loops with independent iterations added."""
    collapsed: bool = False
    """True inside a loop that the threads of a block share; there a value that depends on a thread is undefined."""
    notes: dict[str, Any] = field(default_factory=dict)

    @contextmanager
    def where(self, mask: Any) -> Iterator[None]:
        """Run the body of the ``with`` statement with another mask."""
        before, self.mask = self.mask, mask
        try:
            yield
        finally:
            self.mask = before

    def narrowed(self, condition: Array) -> Any:
        """Return the mask of the active lanes for which the condition holds."""
        return condition if self.mask is None else self.mask & condition

    def block_mask(self, what: str) -> Any:
        """Return the mask per block; raise :class:`KernelFault` if only some threads of a block reach ``what``."""
        return (
            None
            if self.mask is None
            else uniform_over_threads(self.mask, None, f"{what} is reached by some threads of a block")
        )


def any_active(mask: Any) -> bool:
    """Return True if a mask leaves a lane active."""
    return bool(np.any(mask))


def uniform_over_threads(value: Array, mask: Any, complaint: str) -> Array:
    """Return a value with a thread axis of length 1; raise :class:`KernelFault` if active threads differ."""
    if np.ndim(value) == 0 or value.shape[-1] == 1:
        return value
    if mask is None or np.ndim(mask) == 0:
        first = value[..., :1]
    else:
        lanes = np.broadcast_to(mask, np.broadcast_shapes(mask.shape, value.shape))
        at = np.argmax(lanes, axis=-1)[..., None]
        first = np.take_along_axis(np.broadcast_to(value, lanes.shape), at, axis=-1)
    differs = (value != first) & ((value == value) | (first == first))
    if mask is not None:
        differs = differs & mask
    if differs.any():
        raise KernelFault(complaint, code="threads_differ")
    return first


# ---- numbers --------------------------------------------------------------------------------------
# TileLang's dtypes in NumPy, and conversions between them.
# NumPy rounds every operation to the dtype of its operands, as the device does. It uses ``ml_dtypes`` for bfloat16 and
# the 8-bit formats. Its integers wrap around.

Array = Any
"""A NumPy array or scalar."""

_DTYPES: dict[str, Any] = {
    **{
        name: np.dtype(name)
        for name in ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
    },
    **{name: np.dtype(name) for name in ("float16", "float32", "float64")},
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
}
_NARROW = {np.dtype(ml_dtypes.float8_e4m3fn): 448.0, np.dtype(ml_dtypes.float8_e5m2): 57344.0}
"""Formats to which a cast saturates, with their maximum values."""
_FLOATS = frozenset(_DTYPES[name] for name in _DTYPES if name.startswith(("float", "bfloat")))
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def dtype_of(name: Any) -> Any:
    """Return the NumPy dtype of a scalar TileLang dtype."""
    found = _DTYPES.get(str(name))
    if found is None:
        raise NotInterpreted(f"no rule for the dtype {name}", code="not_interpreted")
    return found


def is_float(dtype: Any) -> bool:
    """Return True for a floating format, including the 8-bit ones."""
    return dtype in _FLOATS


def wide(value: Array) -> Array:
    """Return a number of a 16-bit or 8-bit floating format as float32, and any other unchanged."""
    return value.astype(np.float32) if value.dtype.itemsize < 4 and is_float(value.dtype) else value


def convert(value: Array, target: Any) -> Array:
    """Cast as the device does.

    Casts round to nearest even and saturate to 8-bit formats. From floats to integers they round toward zero and saturate.
    """
    source = value.dtype
    if source == target:
        return value
    if is_float(source) and not is_float(target) and target != np.bool_:
        return _to_integer(value, target)
    if target in _NARROW:
        most = np.float32(_NARROW[target])
        return np.clip(value.astype(np.float32), -most, most).astype(target)  # NaN stays
    if is_float(target) and target.itemsize < 4 and not is_float(source):
        return value.astype(np.float32).astype(target)  # as the device's conversion operators do
    return value.astype(target)


def _to_integer(value: Array, target: Any) -> Array:
    """Convert floats to integers as the device does.

    NaN becomes 0. Values beyond 32 or 64 bits saturate. A narrower target keeps the low bits of the 32-bit result.
    """
    held = target if target.itemsize >= 4 else np.dtype(np.int32)
    exact = np.nan_to_num(np.trunc(value.astype(np.float64)), nan=0.0, posinf=np.inf, neginf=-np.inf)
    info = np.iinfo(held)
    inside = np.where(
        (exact >= -(2.0 ** (held.itemsize * 8))) & (exact < float(info.max) + 1) & (exact >= info.min), exact, 0
    )
    found = inside.astype(held)
    found = np.where(exact >= float(info.max) + 1, held.type(info.max), found)
    found = np.where(exact < info.min, held.type(info.min), found)
    return found.astype(target)


def reinterpret(value: Array, target: Any) -> Array:
    """Return the same bits as another dtype of the same size."""
    if value.dtype.itemsize != target.itemsize:
        raise NotInterpreted(f"no rule for reinterpreting {value.dtype} as {target}", code="not_interpreted")
    return np.array(value, order="C").view(target)


def poison(shape: tuple[int, ...] | int, dtype: Any) -> Array:
    """Return memory with values for unwritten elements: NaN, or integers that are not valid indices."""
    if is_float(dtype):
        return (
            np.full(shape, np.nan, dtype=np.float32).astype(dtype)
            if dtype.itemsize < 4
            else np.full(shape, np.nan, dtype)
        )
    if dtype == np.bool_:
        return np.ones(shape, dtype)
    return (
        np.full(shape, 0x6B, np.uint8).astype(dtype)
        if dtype.itemsize == 1
        else np.full(shape, np.iinfo(dtype).max // 5 * 2, dtype)
    )


def flat_memory(tensor: torch.Tensor, dtype: Any) -> Array:
    """Return the elements from a tensor's first to its last in memory, gaps included; one poison element for an empty tensor."""
    if tensor.numel() == 0:
        return poison(1, dtype)
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    flat = torch.as_strided(tensor.detach(), (span,), (1,))
    if dtype == np.bool_:
        return flat.view(torch.uint8).numpy().view(np.bool_)
    return flat.view(_SAME_SIZE[dtype.itemsize]).numpy().view(dtype)


# ---- faults ---------------------------------------------------------------------------------------


class KernelFault(SolutionError):
    """A kernel operation that is undefined on a device, such as an access outside of a buffer."""

    code = "kernel_fault"


class NotInterpreted(SolutionError):
    """A part of TileLang that the interpreter does not support."""

    code = "not_interpreted"


# ---- slots ----------------------------------------------------------------------------------------
# The compiler assigns a slot to each variable and buffer of a kernel.


class Slots:
    """Numbers of variables and of buffers; a running kernel keeps their values in lists."""

    def __init__(self) -> None:
        """Start without variables and buffers."""
        self._variables: dict[Any, int] = {}
        self._buffers: dict[Any, int] = {}

    def variable(self, variable: Any) -> int:
        """Return the number of a variable; assign a new one at its first use."""
        return self._variables.setdefault(variable, len(self._variables))

    def knows(self, variable: Any) -> bool:
        """Return True if a variable has a number."""
        return variable in self._variables

    def buffer(self, buffer: Any) -> int:
        """Return the number of a buffer. Buffers with the same data pointer share one number."""
        return self._buffers.setdefault(buffer.data, len(self._buffers))

    @property
    def variables(self) -> int:
        """The number of variables."""
        return len(self._variables)

    @property
    def buffers(self) -> int:
        """The number of buffers."""
        return len(self._buffers)


# ---- memory ---------------------------------------------------------------------------------------
# Buffers of a running kernel: global, per block, or per thread. Every index is checked.

_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def bits(value: Array) -> Array:
    """Return the bit patterns of an array, which distinguish NaN from NaN and -0 from 0."""
    return np.ascontiguousarray(value).view(_BITS[value.dtype.itemsize])


class Memory:
    """A buffer: its shape, its strides in elements, and its elements as one flat array."""

    def __init__(self, name: str, shape: Sequence[int], strides: Sequence[int], flat: Array) -> None:
        """Take over the elements."""
        self.name, self.shape, self.strides, self.flat = name, tuple(shape), tuple(strides), flat

    def address(self, linear: Array) -> Array:
        """Return positions in the flat array for positions in the buffer."""
        return linear

    def outside(self, indices: Sequence[Array], mask: Any) -> Any:
        """Return the mask of active lanes whose index is outside of the buffer, or None if all are inside."""
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
        """Return positions in the buffer; an active lane outside of it is a fault."""
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
        """Return the elements at the indices. The values for inactive lanes are arbitrary."""
        return np.take(self.flat, self.address(self.linear(state, indices, "reads")), mode="clip")

    def store(self, state: State, indices: Sequence[Array], value: Array) -> None:
        """Write elements for active lanes.

        Raises:
                KernelFault: an index is outside of the buffer, or lanes write different values to one element.
        """
        self.scatter(self.address(self.linear(state, indices, "writes")), value, state.mask)

    def scatter(self, address: Array, value: Array, mask: Any) -> None:
        """Write to addresses; raise :class:`KernelFault` if lanes write different values to one address."""
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
    """Shared memory, or a fragment whose elements are distributed over the threads of a block."""

    def __init__(self, name: str, shape: Sequence[int], dtype: Any, blocks: int) -> None:
        """Allocate memory for all blocks, filled with values for unwritten elements."""
        self.size = int(np.prod(shape, dtype=np.int64))
        super().__init__(name, shape, _row_major(shape), poison(blocks * self.size, dtype))
        self.base = (np.arange(blocks, dtype=np.int64) * self.size)[:, None]

    def address(self, linear: Array) -> Array:
        """Return the positions of the elements of each block."""
        return linear + self.base


class LaneMemory(Memory):
    """Registers: the values of all lanes lie next to each other."""

    def __init__(self, name: str, shape: Sequence[int], dtype: Any, blocks: int, threads: int, *, zero: bool) -> None:
        """Allocate registers for all threads. ``zero`` sets them to 0; otherwise they are filled as unwritten memory."""
        self.size, self.lanes = int(np.prod(shape, dtype=np.int64)), (blocks, threads)
        whole = (self.size, blocks, threads)
        self.rows = np.zeros(whole, dtype) if zero else poison(whole, dtype)
        super().__init__(name, shape, _row_major(shape), self.rows.reshape(-1))
        self.base = np.arange(blocks * threads, dtype=np.int64).reshape(blocks, threads)

    def address(self, linear: Array) -> Array:
        """Return the positions of the elements of each lane."""
        return linear * (self.lanes[0] * self.lanes[1]) + self.base

    def load(self, state: State, indices: Sequence[Array]) -> Array:
        """Return the elements at the indices; one value per block if the threads share a loop."""
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
