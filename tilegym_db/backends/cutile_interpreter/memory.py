"""The memory of kernels: the storage of an array, accessed by element, and the detection of races between blocks.

On a device the blocks of one launch run in any order, or at once. If a block reads what another one writes, or two
blocks write different values to one element, the result depends on the order. That is an error here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tilegym_db.backends.cutile_interpreter.tiles import decoder, encoder, host_dtype, raw_dtype, spread
from tilegym_db.errors import SolutionError

__all__ = ["ArrayMemory", "Launch", "compare_and_exchange", "load", "load_tile", "store", "store_tile", "update"]


Shape = tuple[int, ...]
View = tuple[Any, Shape, Shape, Shape]
"""Offset of an array, its shape and strides, and the elements from one tile to the next."""


class Launch:
    """A launch: the block that runs, and the blocks that accessed the elements of every storage that it writes."""

    def __init__(self, kernel: str) -> None:
        self.kernel = kernel
        self.block = 0
        self._marks: dict[tuple[int, int], tuple[Any, Any]] = {}

    def marks(self, address: int, size: int, count: int) -> tuple[Any, Any]:
        """Return, for each element, the block that read it last and the block that wrote it last; 0 for no block."""
        if (address, size) not in self._marks:
            self._marks[address, size] = (np.zeros(count, np.int32), np.zeros(count, np.int32))
        return self._marks[address, size]


class ArrayMemory:
    """The storage of one array, as elements of the array's type."""

    def __init__(self, tensor: torch.Tensor, dtype: str, launch: Launch, position: int, written: bool) -> None:
        """Map the tensor's storage; ``written`` says whether the kernel writes to this array."""
        storage = tensor.untyped_storage()
        count = storage.nbytes() // tensor.element_size()
        flat = tensor.detach().as_strided((count,), (1,), 0)
        raw = raw_dtype(dtype)
        self.data: Any = flat.view(getattr(torch, np.dtype(raw).name)).numpy()
        self.decode, self.encode = decoder(dtype), encoder(dtype)
        self.launch = launch
        self.name = f"array {position} of {launch.kernel}"
        self.readers: Any = None
        self.writers: Any = None
        if written:
            self.readers, self.writers = launch.marks(storage.data_ptr(), tensor.element_size(), count)
        # A value for undefined elements: it shows in a result that depends on them.
        self.garbage = np.array(np.nan if np.issubdtype(host_dtype(dtype), np.floating) else 85).astype(
            host_dtype(dtype)
        )[()]

    def note_read(self, marked: Any, read: Any) -> None:
        """Record a read of elements; raise :class:`SolutionError` if another block wrote one of them."""
        block = self.launch.block
        if ((marked != 0) & (marked != block)).any():
            raise SolutionError(
                f"A block reads what another block writes in the same launch: {self.name}.", code="blocks_race"
            )
        read[...] = block

    def check_write(self, readers: Any, writers: Any, old: Any, new: Any) -> None:
        """Raise :class:`SolutionError` if a write changes elements that other blocks have accessed."""
        block = self.launch.block
        others = ((writers != 0) & (writers != block)) | ((readers != 0) & (readers != block))
        if others.any() and (_bits(old) != _bits(new))[others].any():
            raise SolutionError(
                f"Blocks of one launch read and write, or write differently, the same element of {self.name}.",
                code="blocks_race",
            )


def _bits(values: Any) -> Any:
    return values.view(f"u{values.dtype.itemsize}") if values.dtype.kind == "f" else values


# -- by element ------------------------------------------------------------------------------------------------------


def _check(memory: ArrayMemory, index: Any) -> None:
    if index.size and (index.min() < 0 or index.max() >= memory.data.size):
        raise SolutionError(f"An index lies outside of the memory of {memory.name}.", code="index_outside")


def load(memory: ArrayMemory, offset: Any, mask: Any, padding: Any, shape: Shape) -> Any:
    """Return the elements at offsets, and the padding if the mask is false."""
    index = offset.view(np.int64)
    padding = memory.garbage if padding is None else padding
    if mask is not None:
        if not mask.any():
            return padding
        if mask.all():
            mask = None
        else:
            index = np.where(mask, index, index[mask].flat[0] if index.shape == mask.shape else _any(index, mask))
    _check(memory, index)
    values = memory.data[index]
    if memory.writers is not None:
        _note_load(memory, index, mask)
    if memory.decode is not None:
        values = memory.decode(values)
    return values if mask is None else np.where(mask, values, padding)


def _any(index: Any, mask: Any) -> Any:
    """Return an index that the mask selects, as a substitute for those that it does not."""
    index, mask = np.broadcast_arrays(index, mask)
    return index[mask].flat[0]


def _note_load(memory: ArrayMemory, index: Any, mask: Any) -> None:
    if mask is not None:
        index, mask = np.broadcast_arrays(index, mask)
        index = index[mask]
    block = memory.launch.block
    marked = memory.writers[index]
    if ((marked != 0) & (marked != block)).any():
        raise SolutionError(
            f"A block reads what another block writes in the same launch: {memory.name}.", code="blocks_race"
        )
    memory.readers[index] = block


def store(memory: ArrayMemory, offset: Any, value: Any, mask: Any, shape: Shape) -> None:
    """Write elements at offsets if the mask is true."""
    index, value = spread(offset.view(np.int64), shape), spread(value, shape)
    if mask is not None:
        mask = spread(mask, shape)
        if not mask.all():
            index, value = index[mask], value[mask]
    if not index.size:
        return
    _check(memory, index)
    value = np.asarray(value if memory.encode is None else memory.encode(value))
    memory.check_write(memory.readers[index], memory.writers[index], np.asarray(memory.data[index]), value)
    memory.data[index] = value
    if (_bits(np.asarray(memory.data[index])) != _bits(value)).any():
        raise SolutionError(
            f"One store writes different values to the same element of {memory.name}.", code="store_conflict"
        )
    memory.writers[index] = memory.launch.block


# -- by tile ---------------------------------------------------------------------------------------------------------


class _TileView:
    """The part of a tile that lies inside of its partitioned array."""

    def __init__(self, memory: ArrayMemory, view: View, index: tuple[Any, ...], tile: Shape) -> None:
        base, shape, strides, steps = view
        starts = [int(at) * step for at, step in zip(index, steps, strict=True)]
        if any(start < 0 or start >= whole for start, whole in zip(starts, shape, strict=True)):
            raise SolutionError(
                f"A tile at {tuple(map(int, index))} lies outside of {memory.name}, of shape {shape}; "
                "cuTile does not say what happens.",
                code="tile_outside",
            )
        self.sizes = tuple(
            min(int(whole) - start, size) for whole, start, size in zip(shape, starts, tile, strict=True)
        )
        self.start = int(base) + sum(start * int(stride) for start, stride in zip(starts, strides, strict=True))
        self.strides = strides

    def of(self, elements: Any) -> Any:
        """Return the part of a tile inside of its array, as a view of the storage's elements."""
        size = elements.itemsize
        return np.ndarray(
            self.sizes,
            elements.dtype,
            elements,
            self.start * size,
            tuple(int(stride) * size for stride in self.strides),
        )


def load_tile(memory: ArrayMemory, view: View, index: tuple[Any, ...], tile: Shape, padding: float | None) -> Any:
    """Return one tile of a partitioned array, with padding beyond the end of the array."""
    part = _TileView(memory, view, index, tile)
    values = part.of(memory.data).copy()
    if memory.writers is not None:
        memory.note_read(part.of(memory.writers), part.of(memory.readers))
    if memory.decode is not None:
        values = memory.decode(values)
    if part.sizes == tile:
        return values
    whole = np.full(tile, memory.garbage if padding is None else padding, dtype=values.dtype)
    whole[tuple(map(slice, part.sizes))] = values
    return whole


def store_tile(memory: ArrayMemory, view: View, index: tuple[Any, ...], value: Any, tile: Shape) -> None:
    """Write one tile of a partitioned array; elements outside of the array are dropped."""
    part = _TileView(memory, view, index, tile)
    value = spread(value, tile)[tuple(map(slice, part.sizes))]
    value = np.ascontiguousarray(value if memory.encode is None else memory.encode(value))
    target = part.of(memory.data)
    memory.check_write(part.of(memory.readers), part.of(memory.writers), target.copy(), value)
    target[...] = value
    part.of(memory.writers)[...] = memory.launch.block


# ---- atomics --------------------------------------------------------------------------------------
# Atomic updates handle one element after another, in the order of the blocks in the grid.

_STEPS: dict[str, Callable[[Any, Any], Any]] = {
    "ADD_INT": lambda old, new: old + new,
    "ADD_FLOAT": lambda old, new: old + new,
    "MAX_SIGNED_INT": max,
    "MAX_UNSIGNED_INT": max,
    "MIN_SIGNED_INT": min,
    "MIN_UNSIGNED_INT": min,
    "BITWISE_AND": lambda old, new: old & new,
    "BITWISE_OR": lambda old, new: old | new,
    "BITWISE_XOR": lambda old, new: old ^ new,
    "EXCHANGE": lambda old, new: new,
}


def _each(memory: ArrayMemory, offset: Any, mask: Any, shape: Shape, host: Any, step: Callable[[int, Any], Any]) -> Any:
    """Apply a function that returns the new value to every element; return the old values."""
    index = spread(offset.view(np.int64), shape)
    counts = np.broadcast_to(True if mask is None else mask, shape)
    before = np.zeros(shape, host)
    flat, old = index.reshape(-1), before.reshape(-1)
    for at in np.flatnonzero(counts):
        place = int(flat[at])
        if not 0 <= place < memory.data.size:
            raise SolutionError(f"An index lies outside of the memory of {memory.name}.", code="index_outside")
        value = memory.data[place]
        old[at] = value if memory.decode is None else memory.decode(value)
        new = step(int(at), old[at])
        memory.data[place] = new if memory.encode is None else memory.encode(new)
    return before[()] if not shape else before


def update(
    memory: ArrayMemory,
    offset: Any,
    value: Any,
    mask: Any,
    shape: Shape,
    mode: str,
    rounding: Callable[[Any], Any] | None,
) -> Any:
    """Read, change and write every element; return the old values."""
    values = spread(value, shape).reshape(-1)
    change = _STEPS[mode]

    def step(at: int, old: Any) -> Any:
        new = change(old, values[at])
        return new if rounding is None else rounding(new)

    return _each(memory, offset, mask, shape, values.dtype, step)


def compare_and_exchange(memory: ArrayMemory, offset: Any, expected: Any, desired: Any, mask: Any, shape: Shape) -> Any:
    """Write the desired value to elements that hold the expected one; return the old values."""
    wanted, given = spread(expected, shape).reshape(-1), spread(desired, shape).reshape(-1)
    return _each(memory, offset, mask, shape, given.dtype, lambda at, old: given[at] if old == wanted[at] else old)
