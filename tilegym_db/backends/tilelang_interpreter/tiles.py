"""Operators on tiles: copies, products, fills, reductions and running sums, each for all active blocks at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilegym_db.backends.tilelang_interpreter.expressions import Expressions, Value, operation_of
from tilegym_db.backends.tilelang_interpreter.faults import NotInterpreted
from tilegym_db.backends.tilelang_interpreter.memory import GlobalMemory, LaneMemory
from tilegym_db.backends.tilelang_interpreter.numbers import Array, convert, is_float, wide
from tilegym_db.backends.tilelang_interpreter.state import State

__all__ = ["TILE_OPERATORS", "Action"]

Action = Callable[[State], None]


class Region:
    """A box of a buffer, as the operators take it: where it begins and how far it reaches."""

    def __init__(self, expressions: Expressions, node: Any) -> None:
        """Compile a ``tl.region``."""
        if type(node).__name__ != "Call" or operation_of(node) != "tl.region":
            raise NotInterpreted(f"no rule for a tile operator on a {type(node).__name__}", code="not_interpreted")
        load = node.args[0]
        self.slot = expressions.slots.buffer(load.buffer)
        self.starts, self.extents = expressions.many(load.indices), expressions.many(node.args[2:])

    def shape(self, state: State) -> tuple[int, ...]:
        """How far it reaches along each axis of the buffer."""
        sizes = [extent(state) for extent in self.extents]
        if any(np.ndim(size) for size in sizes):
            raise NotInterpreted("no rule for a tile whose size differs between blocks", code="not_interpreted")
        return tuple(int(size) for size in sizes)

    def indices(self, state: State, *, squeezed: bool) -> list[Array]:
        """Of all its elements; axes of length 1 have no axis of their own where ``squeezed``."""
        shape = self.shape(state)
        axes = [size for size in shape if size != 1] if squeezed else list(shape)
        found, axis = [], 0
        for start, size in zip(self.starts, shape, strict=True):
            first = np.asarray(start(state)).astype(np.int64)
            if squeezed and size == 1:
                found.append(first)
                continue
            steps = [1] * len(axes)
            steps[axis] = size
            found.append(first + np.arange(size, dtype=np.int64).reshape(*steps, 1, 1))
            axis += 1
        return found

    def read(self, state: State, *, squeezed: bool = False) -> Array:
        """Its elements, with an axis for blocks and one for threads last; 0 where it reaches out of a tensor."""
        memory, indices = self._memory(state), self.indices(state, squeezed=squeezed)
        if not isinstance(memory, GlobalMemory):
            return memory.load(state, indices)
        wrong = memory.outside(indices, state.mask)
        if wrong is None:
            return memory.load(state, indices)
        kept = np.logical_not(wrong)
        state.mask, before = state.narrowed(kept), state.mask
        value = memory.load(state, indices)
        state.mask = before
        return np.where(kept, value, value.dtype.type(0))

    def write(self, state: State, value: Array, *, squeezed: bool = False) -> None:
        """Replace its elements, except where it reaches out of a tensor."""
        memory, indices = self._memory(state), self.indices(state, squeezed=squeezed)
        wrong = memory.outside(indices, state.mask) if isinstance(memory, GlobalMemory) else None
        before = state.mask
        if wrong is not None:
            state.mask = state.narrowed(np.logical_not(wrong))
        memory.store(state, indices, convert(value, memory.flat.dtype))
        state.mask = before

    def _memory(self, state: State) -> Any:
        memory = state.memories[self.slot]
        if isinstance(memory, LaneMemory):
            raise NotInterpreted(
                f"no rule for a tile operator on {memory.name}, which each thread has for itself",
                code="not_interpreted",
            )
        return memory


def _together(action: Action, name: str) -> Action:
    """Run for whole blocks."""

    def run(state: State) -> None:
        if state.depth:
            raise NotInterpreted(f"no rule for {name} inside of a parallel loop", code="not_interpreted")
        mask, collapsed = state.mask, state.collapsed
        state.mask, state.collapsed = state.block_mask(name), True
        action(state)
        state.mask, state.collapsed = mask, collapsed

    return run


def _copy(expressions: Expressions, arguments: Any) -> Action:
    source, target = Region(expressions, arguments[0]), Region(expressions, arguments[1])

    def copy(state: State) -> None:
        sizes = [[size for size in region.shape(state) if size != 1] for region in (source, target)]
        if sizes[0] != sizes[1]:
            raise NotInterpreted(f"no rule for a copy of a tile {sizes[0]} to one {sizes[1]}", code="not_interpreted")
        target.write(state, source.read(state, squeezed=True), squeezed=True)

    return copy


def _fill(expressions: Expressions, arguments: Any) -> Action:
    target, value = Region(expressions, arguments[0]), expressions.compile(arguments[1])
    return lambda state: target.write(state, np.asarray(value(state)))


def _gemm(expressions: Expressions, arguments: Any) -> Action:
    one, two, total = (Region(expressions, argument) for argument in arguments[:3])
    turned = [bool(int(argument.value)) for argument in arguments[3:5]]
    clear: Value = expressions.compile(arguments[9])

    def multiply(state: State) -> None:
        left, right = (_matrix(region.read(state)) for region in (one, two))
        left, right = (np.swapaxes(x, -1, -2) if t else x for x, t in zip((left, right), turned, strict=True))
        if left.dtype == np.float32 or right.dtype == np.float32:
            raise NotInterpreted("no rule for T.gemm on float32, which a device rounds to tf32", code="not_interpreted")
        before = total.read(state)
        accumulated = before.dtype
        wider = np.float32 if is_float(left.dtype) else np.int32
        active = (
            np.arange(state.blocks)
            if state.mask is None
            else np.flatnonzero(np.broadcast_to(state.mask, (state.blocks, 1)))
        )
        left, right = (np.broadcast_to(x, (state.blocks, *x.shape[1:]))[active] for x in (left, right))
        product = np.zeros((state.blocks, left.shape[-2], right.shape[-1]), wider)
        product[active] = np.matmul(left.astype(wider), right.astype(wider))
        product = np.moveaxis(product, 0, -1)[..., None].reshape(*before.shape[:-2], state.blocks, 1)
        base = np.zeros_like(before) if bool(clear(state)) else before
        total.write(state, (wide(base) + product).astype(accumulated))

    return multiply


def _matrix(tile: Array) -> Array:
    """A tile with the blocks first and its last two axes."""
    blocks = np.moveaxis(tile[..., 0], -1, 0)
    return blocks.reshape(blocks.shape[0], *blocks.shape[-2:])


_REDUCTIONS: dict[str, tuple[Any, Callable[..., Any]]] = {
    "sum": (np.add, lambda x: x),
    "abssum": (np.add, np.abs),
    "max": (np.fmax, lambda x: x),
    "absmax": (np.fmax, np.abs),
    "min": (np.fmin, lambda x: x),
    "bitand": (np.bitwise_and, lambda x: x),
    "bitor": (np.bitwise_or, lambda x: x),
    "bitxor": (np.bitwise_xor, lambda x: x),
}


def _reduce(expressions: Expressions, arguments: Any) -> Action:
    source, target = Region(expressions, arguments[0]), Region(expressions, arguments[1])
    combine, prepare = _REDUCTIONS[str(arguments[2].value)]
    axis, clear = int(arguments[3].value), bool(int(arguments[4].value))

    def reduce(state: State) -> None:
        tile = prepare(wide(source.read(state)))
        found = combine.reduce(tile, axis=axis, keepdims=True)
        shape = (*target.shape(state), *found.shape[-2:])
        found = found.reshape(shape)
        target.write(state, found if clear else combine(wide(target.read(state)), found))

    return reduce


def _cumsum(expressions: Expressions, arguments: Any) -> Action:
    source, target = Region(expressions, arguments[0]), Region(expressions, arguments[1])
    axis, reverse = int(arguments[2].value), bool(int(arguments[3].value))

    def add_up(state: State) -> None:
        tile = source.read(state)
        turned = np.flip(tile, axis) if reverse else tile
        sums = np.cumsum(wide(turned), axis=axis, dtype=wide(turned).dtype)
        target.write(state, np.flip(sums, axis) if reverse else sums)

    return add_up


_MAKERS: dict[str, Callable[[Expressions, Any], Action]] = {
    "tl.tileop.copy": _copy,
    "tl.tileop.fill": _fill,
    "tl.tileop.gemm": _gemm,
    "tl.tileop.reduce": _reduce,
    "tl.tileop.cumsum": _cumsum,
}


def _maker(name: str) -> Callable[[Expressions, Any], Action]:
    return lambda expressions, arguments: _together(_MAKERS[name](expressions, arguments), name)


TILE_OPERATORS = {name: _maker(name) for name in _MAKERS}
"""Operation -> what compiles its arguments."""
