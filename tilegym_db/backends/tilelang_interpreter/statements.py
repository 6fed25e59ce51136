"""Statements as actions on the state, run for all active lanes of a chunk of blocks, one after the other."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilegym_db.backends.tilelang_interpreter.expressions import Expressions, operation_of
from tilegym_db.backends.tilelang_interpreter.faults import KernelFault, NotInterpreted
from tilegym_db.backends.tilelang_interpreter.loops import PARALLEL, THREAD_BINDING, runs_at_once
from tilegym_db.backends.tilelang_interpreter.numbers import Array, dtype_of
from tilegym_db.backends.tilelang_interpreter.state import State, any_active
from tilegym_db.backends.tilelang_interpreter.tiles import TILE_OPERATORS, Action

__all__ = ["Statements"]

_NOTHING = frozenset(
    {
        "tl.no_set_max_nreg",
        "tl.set_max_nreg",
        "tl.annotate_producer_reg_dealloc",
        "tl.annotate_consumer_reg_alloc",
        "tl.sync_warp",
        "tl.fence_proxy_async",
        "tl.cluster_sync",
        "tirx.ptx_commit_group",
        "tirx.ptx_wait_group",
        "tl.ptx_commit_group",
        "tl.ptx_wait_group",
        "tl.pdl_trigger",
        "tl.pdl_sync",
    }
)
"""Operations that change nothing where lanes run in lockstep, all blocks of a cluster among them, and copies are done at once."""
_BARRIERS = frozenset({"tirx.tvm_storage_sync"})
_ATTRIBUTES = frozenset({"min_blocks_per_sm", "tl.min_blocks_per_sm", "pragma_import_llvm", "tl.ws_op_id"})


class Statements:
    """Compiles statements; ``launch`` is asked for what begins the blocks of a kernel."""

    def __init__(self, expressions: Expressions, launch: Any) -> None:
        """For one kernel."""
        self.expressions, self.launch, self.slots = expressions, launch, expressions.slots

    def compile(self, node: Any) -> Action:
        """The action of a statement.

        Raises:
            NotInterpreted: there is no rule for a part of it.
        """
        method = getattr(self, f"_{type(node).__name__.lower()}", None)
        if method is None:
            raise NotInterpreted(f"no rule for a statement of the kind {type(node).__name__}", code="not_interpreted")
        return method(node)  # type: ignore[no-any-return]

    def _seqstmt(self, node: Any) -> Action:
        actions = [self.compile(part) for part in node.seq]

        def run(state: State) -> None:
            for action in actions:
                action(state)

        return run

    def _sblockrealize(self, node: Any) -> Action:
        block = node.block
        if len(block.iter_vars) or len(block.match_buffers) or block.init is not None:
            raise NotInterpreted("no rule for a block with axes of its own", code="not_interpreted")
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
            # What a register holds may change while the name is in use.
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
            return _barrier
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
    """All iterations along an axis of their own; ``shared`` between the threads of a block."""

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
    """Iterations of lanes that have different numbers of them."""
    before = state.mask
    counts = count if before is None else np.where(before, count, 0)
    for number in range(int(counts.max(initial=0))):
        state.mask = state.narrowed(number < count) if before is None else before & (number < count)
        state.values[slot] = count.dtype.type(number) + first
        body(state)
    state.mask = before


def _barrier(state: State) -> None:
    """Lanes in lockstep are always together, where all threads of a block come here."""
    state.block_mask("T.sync_threads()")
