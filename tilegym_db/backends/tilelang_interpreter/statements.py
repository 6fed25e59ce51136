"""Compiles statements to actions on the state, which run for all active lanes of a chunk of blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from tvm import arith, ir, tirx

from tilegym_db.backends.tilelang_interpreter.expressions import Expressions, Value, operation_of
from tilegym_db.backends.tilelang_interpreter.state import (
    Array,
    GlobalMemory,
    KernelFault,
    LaneMemory,
    NotInterpreted,
    State,
    any_active,
    convert,
    dtype_of,
    is_float,
    wide,
)

_NOTHING = frozenset(
    {
        "tl.no_set_max_nreg",
        "tl.set_max_nreg",
        "tl.annotate_producer_reg_dealloc",
        "tl.annotate_consumer_reg_alloc",
        "tl.sync_warp",
        "tl.named_barrier_arrive",
        "tl.fence_proxy_async",
        "tl.wait_wgmma",
        "tl.cluster_sync",
        "tirx.ptx_commit_group",
        "tirx.ptx_wait_group",
        "tl.ptx_commit_group",
        "tl.ptx_wait_group",
        "tl.pdl_trigger",
        "tl.pdl_sync",
    }
)
"""Operations without effect here: lanes and all blocks of a cluster run in lockstep, and copies complete at once."""
_BARRIERS = frozenset({"tirx.tvm_storage_sync"})
_ATTRIBUTES = frozenset({"min_blocks_per_sm", "tl.min_blocks_per_sm", "pragma_import_llvm", "tl.ws_op_id"})


def _loop_variables(node: Any) -> set[Any]:
    found: set[Any] = set()

    def visit(part: Any) -> None:
        if isinstance(part, tirx.For):
            found.add(part.loop_var)

    tirx.stmt_functor.post_order_visit(node, visit)
    return found


class Statements:
    """A compiler of statements; ``launch`` compiles the start of a kernel's blocks."""

    def __init__(self, expressions: Expressions, launch: Any) -> None:
        """Prepare for one kernel."""
        self.expressions, self.launch, self.slots = expressions, launch, expressions.slots

    def compile(self, node: Any) -> Action:
        """Return the action of a statement."""
        method = getattr(self, f"_{type(node).__name__.lower()}", None)
        if method is None:
            raise NotInterpreted(f"no rule for a statement of the kind {type(node).__name__}", code="not_interpreted")
        return method(node)  # type: ignore[no-any-return]

    def _seqstmt(self, node: Any) -> Action:
        actions, parts = [], list(node.seq)
        while parts:
            part = parts.pop(0)
            if type(part).__name__ == "Bind" and self._is_early(part, parts):
                parts = [tirx.stmt_functor.substitute(later, {part.var: part.value}) for later in parts]
            else:
                actions.append(self.compile(part))

        def run(state: State) -> None:
            for action in actions:
                action(state)

        return run

    def _is_early(self, node: Any, after: list[Any]) -> bool:
        """Return True if a value uses the variable of a later loop, as ``T.Persistent`` names its tiles before its loop."""
        unknown = {one for one in tirx.analysis.undefined_vars(node.value) if not self.slots.knows(one)}
        return bool(unknown) and any(not unknown.isdisjoint(_loop_variables(later)) for later in after)

    def _sblockrealize(self, node: Any) -> Action:
        block = node.block
        if len(block.iter_vars) or len(block.match_buffers) or block.init is not None:
            raise NotInterpreted("no rule for a block with additional axes", code="not_interpreted")
        return self.compile(block.body)

    def _attrstmt(self, node: Any) -> Action:
        if str(node.attr_key) not in _ATTRIBUTES:
            raise NotInterpreted(f"no rule for the attribute {node.attr_key}", code="not_interpreted")
        return self.compile(node.body)

    def _bind(self, node: Any) -> Action:
        slot = self.slots.variable(node.var)
        if type(node.value).__name__ == "Call" and operation_of(node.value) == "tl.launch_thread_idx":
            axis = f"thread {int(node.value.args[0].value)}"

            def bind_thread(state: State) -> None:
                state.values[slot] = state.notes[axis]

            return bind_thread
        value = self.expressions.compile(node.value)

        def bind(state: State) -> None:
            found = value(state)
            # A register's value may change while the name is in use.
            state.values[slot] = found.copy() if isinstance(found, np.ndarray) and found.base is not None else found

        return bind

    def _bufferstore(self, node: Any) -> Action:
        if node.predicate is not None:
            raise NotInterpreted("no rule for a store with a predicate", code="not_interpreted")
        slot, indices = self.slots.buffer(node.buffer), self.expressions.many(node.indices)
        value = self.expressions.compile(node.value)

        def store(state: State) -> None:
            state.memories[slot].store(state, [index(state) for index in indices], value(state))

        return store

    def _ifthenelse(self, node: Any) -> Action:
        condition, one = self.expressions.compile(node.condition), self.compile(node.then_case)
        two = None if node.else_case is None else self.compile(node.else_case)

        def choose(state: State) -> None:
            chosen = condition(state)
            if np.ndim(chosen) == 0:
                action = one if chosen else two
                if action is not None:
                    action(state)
                return
            before = state.mask
            left = state.narrowed(chosen)
            right = None if two is None else state.narrowed(np.logical_not(chosen))
            if any_active(left):
                state.mask = left
                one(state)
            if two is not None and any_active(right):
                state.mask = right
                two(state)
            state.mask = before

        return choose

    # -- loops --------------------------------------------------------------------------------------------------------

    def _for(self, node: Any) -> Action:
        kind = int(node.kind)
        if kind == THREAD_BINDING:
            return self.launch(node)  # type: ignore[no-any-return]
        slot, body = self.slots.variable(node.loop_var), self.compile(node.body)
        least, extent = self.expressions.compile(node.min), self.expressions.compile(node.extent)
        dtype = dtype_of(node.loop_var.dtype)
        if kind == PARALLEL or runs_at_once(node):
            return _at_once(slot, least, extent, body, dtype, shared=kind == PARALLEL)

        def run(state: State) -> None:
            first, count = least(state), extent(state)
            if np.ndim(count):
                _until(state, slot, first, count, body)
                return
            for number in range(int(count)):
                state.values[slot] = dtype.type(number) + first
                body(state)

        return run

    def _while(self, node: Any) -> Action:
        condition, body = self.expressions.compile(node.condition), self.compile(node.body)

        def run(state: State) -> None:
            before = state.mask
            while True:
                goes_on = condition(state)
                if np.ndim(goes_on) == 0:
                    if not goes_on:
                        break
                else:
                    state.mask = state.narrowed(goes_on)
                    if not any_active(state.mask):
                        break
                body(state)
            state.mask = before

        return run

    # -- calls --------------------------------------------------------------------------------------------------------

    def _evaluate(self, node: Any) -> Action:
        call = node.value
        if type(call).__name__ != "Call":
            return lambda state: None
        name = operation_of(call)
        if name in TILE_OPERATORS:
            return TILE_OPERATORS[name](self.expressions, call.args)
        if name in _NOTHING:
            return lambda state: None
        if name in _BARRIERS:
            # A named barrier is for the threads that it counts, which need not be all of a block.
            return _barrier if len(call.args) == 1 else lambda state: None
        if name.endswith(".assume"):
            return self._assume(call)
        if name.endswith(".ptx_cp_async"):
            return self._asynchronous_copy(call)
        value = self.expressions.compile(call)

        def evaluate(state: State) -> None:
            value(state)

        return evaluate

    def _assume(self, call: Any) -> Action:
        condition, text = self.expressions.compile(call.args[0]), str(call.args[0])

        def check(state: State) -> None:
            wrong = np.logical_not(condition(state))
            if np.any(wrong if state.mask is None else wrong & state.mask):
                raise KernelFault(f"T.assume({text}) does not hold", code="assumption_failed")

        return check

    def _asynchronous_copy(self, call: Any) -> Action:
        loads = [pointer.args[0] for pointer in call.args[:2]]
        slots = [self.slots.buffer(load.buffer) for load in loads]
        starts = [self.expressions.many(load.indices) for load in loads]
        count = self.expressions.compile(call.args[2])
        if len(call.args) > 3:
            raise NotInterpreted("no rule for cp.async with a predicate", code="not_interpreted")

        def copy(state: State) -> None:
            steps = np.arange(int(count(state)), dtype=np.int64).reshape(-1, *[1] * state.depth, 1, 1)
            target, source = ([np.asarray(one(state)) for one in start] for start in starts)
            target[-1], source[-1] = target[-1] + steps, source[-1] + steps
            value = state.memories[slots[1]].load(state, source)
            state.memories[slots[0]].store(state, target, value)

        return copy


def _at_once(slot: int, least: Any, extent: Any, body: Action, dtype: Any, *, shared: bool) -> Action:
    """Run all iterations at once along a new axis; ``shared`` distributes them over the threads of a block."""

    def run(state: State) -> None:
        first, count = least(state), extent(state)
        if np.ndim(count):
            raise NotInterpreted(
                "no rule for a parallel loop whose length differs between lanes", code="not_interpreted"
            )
        if int(count) <= 0:
            return
        mask, collapsed = state.mask, state.collapsed
        if shared and not collapsed:
            state.mask, state.collapsed = state.block_mask("a parallel loop") if not state.depth else mask, True
        steps: Array = np.arange(int(count), dtype=dtype).reshape(-1, *[1] * state.depth, 1, 1)
        state.values[slot] = steps + first
        state.depth += 1
        body(state)
        state.depth -= 1
        state.mask, state.collapsed = mask, collapsed

    return run


def _until(state: State, slot: int, first: Array, count: Array, body: Action) -> None:
    """Run iterations until all lanes have finished; the lanes may have different numbers of them."""
    before = state.mask
    counts = count if before is None else np.where(before, count, 0)
    for number in range(int(counts.max(initial=0))):
        state.mask = state.narrowed(number < count) if before is None else before & (number < count)
        state.values[slot] = count.dtype.type(number) + first
        body(state)
    state.mask = before


def _barrier(state: State) -> None:
    """Check that all threads of a block reach the barrier. Lanes in lockstep need no further synchronisation."""
    state.block_mask("T.sync_threads()")


# ---- loops ----------------------------------------------------------------------------------------
# A loop may run all its iterations at once if no iteration needs the result of another one.

SERIAL, PARALLEL, THREAD_BINDING = 0, 1, 4
MAX_AT_ONCE = 64
"""Limit on the iterations of a loop of a kind that is not parallel, because each of them takes memory."""
_PLAIN = frozenset({"SeqStmt", "BufferStore", "IfThenElse", "Bind"})


def runs_at_once(loop: Any) -> bool:
    """Return True if a sequential loop gives the same result when all iterations run at once.

    This holds if each iteration reads and writes the stored buffers only at one place, which no other iteration uses.
    """
    extent = loop.extent
    if type(extent).__name__ != "IntImm" or not 1 < int(extent.value) <= MAX_AT_ONCE:
        return False
    accesses: dict[Any, list[Any]] = {}
    stored, plain = set(), True

    def visit(node: Any) -> None:
        nonlocal plain
        if isinstance(node, tirx.Stmt):
            plain &= type(node).__name__ in _PLAIN
        elif type(node).__name__ == "Call":
            plain &= "atomic" not in str(node.op)
        if type(node).__name__ in ("BufferLoad", "BufferStore"):
            accesses.setdefault(node.buffer.data, []).append(node.indices)
        if type(node).__name__ == "BufferStore":
            stored.add(node.buffer.data)

    tirx.stmt_functor.post_order_visit(loop.body, visit)
    return plain and all(_one_place(accesses[data], loop.loop_var) for data in stored)


def _one_place(accesses: list[Any], variable: Any) -> bool:
    first = accesses[0]
    if any(not ir.structural_equal(first, other) for other in accesses[1:]):
        return False
    return any(_differs(index, variable) for index in first)


def _differs(index: Any, variable: Any) -> bool:
    """Return True if an index differs in each iteration."""
    found = arith.detect_linear_equation(index, [variable])
    return len(found) == 2 and type(found[0]).__name__ == "IntImm" and int(found[0].value) != 0


# ---- tiles ----------------------------------------------------------------------------------------
# Copies, products, fills, reductions and running sums run for all active blocks at once.

Action = Callable[[State], None]


class Region:
    """A box of a buffer that an operator works on: its start and its extent."""

    def __init__(self, expressions: Expressions, node: Any) -> None:
        """Compile a ``tl.region``."""
        if type(node).__name__ != "Call" or operation_of(node) != "tl.region":
            raise NotInterpreted(f"no rule for a tile operator on a {type(node).__name__}", code="not_interpreted")
        load = node.args[0]
        self.slot = expressions.slots.buffer(load.buffer)
        self.starts, self.extents = expressions.many(load.indices), expressions.many(node.args[2:])

    def shape(self, state: State) -> tuple[int, ...]:
        """Return the extent along each axis of the buffer."""
        sizes = [extent(state) for extent in self.extents]
        if any(np.ndim(size) for size in sizes):
            raise NotInterpreted("no rule for a tile whose size differs between blocks", code="not_interpreted")
        return tuple(int(size) for size in sizes)

    def indices(self, state: State, *, squeezed: bool) -> list[Array]:
        """Return the indices of all elements; ``squeezed`` drops axes of length 1."""
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
        """Return the elements, with axes for blocks and threads last; elements outside of a tensor are 0."""
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
        """Replace the elements, except those outside of a tensor."""
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
    """Return a tile with the blocks first and the two matrix axes last."""
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
    "tl.tileop.wgmma_gemm": _gemm,
    "tl.tileop.reduce": _reduce,
    "tl.tileop.cumsum": _cumsum,
}


def _maker(name: str) -> Callable[[Expressions, Any], Action]:
    return lambda expressions, arguments: _together(_MAKERS[name](expressions, arguments), name)


TILE_OPERATORS = {name: _maker(name) for name in _MAKERS}
"""Operation -> function that compiles its arguments."""
