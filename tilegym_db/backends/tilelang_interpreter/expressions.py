"""Expressions as functions of the state: each node of TileLang's tree becomes a closure over those of its parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilegym_db.backends.tilelang_interpreter.atomics import ATOMICS, atomic
from tilegym_db.backends.tilelang_interpreter.faults import KernelFault, NotInterpreted
from tilegym_db.backends.tilelang_interpreter.intrinsics import BINARY, FUNCTIONS
from tilegym_db.backends.tilelang_interpreter.numbers import Array, convert, dtype_of, is_float, reinterpret
from tilegym_db.backends.tilelang_interpreter.slots import Slots
from tilegym_db.backends.tilelang_interpreter.state import State, any_active, uniform_over_threads
from tilegym_db.backends.tilelang_interpreter.warps import REDUCTIONS, SHUFFLES, reduce_warp, shuffle

__all__ = ["Expressions", "Value", "operation_of"]

Value = Callable[[State], Array]
_DIVISIONS = frozenset({"Div", "Mod", "FloorDiv", "FloorMod"})


def operation_of(node: Any) -> str:
    """The name of the operation that a call is of."""
    return str(getattr(node.op, "name", node.op))


class Expressions:
    """Compiles expressions; the slots say where variables and buffers will be."""

    def __init__(self, slots: Slots) -> None:
        """For one kernel."""
        self.slots = slots

    def compile(self, node: Any) -> Value:
        """The function that computes an expression.

        Raises:
            NotInterpreted: there is no rule for a part of it.
        """
        kind = type(node).__name__
        if kind in BINARY:
            return self._binary(kind, node)
        method = getattr(self, f"_{kind.lower()}", None)
        if method is None:
            raise NotInterpreted(f"no rule for an expression of the kind {kind}", code="not_interpreted")
        return method(node)  # type: ignore[no-any-return]

    def many(self, nodes: Any) -> list[Value]:
        """The functions of several expressions."""
        return [self.compile(node) for node in nodes]

    # -- leaves -------------------------------------------------------------------------------------------------------

    def _intimm(self, node: Any) -> Value:
        value = dtype_of(node.dtype).type(int(node.value))
        return lambda state: value

    def _floatimm(self, node: Any) -> Value:
        value = np.float64(node.value).astype(dtype_of(node.dtype))
        return lambda state: value

    def _var(self, node: Any) -> Value:
        slot, name = self.slots.variable(node), str(node.name)

        def read(state: State) -> Array:
            value = state.values[slot]
            if state.collapsed and np.ndim(value):
                return uniform_over_threads(value, state.mask, f"{name} differs between threads that share out a loop")
            return value

        return read

    def _bufferload(self, node: Any) -> Value:
        if node.predicate is not None:
            raise NotInterpreted("no rule for a load with a predicate", code="not_interpreted")
        slot, indices = self.slots.buffer(node.buffer), self.many(node.indices)
        if len(indices) == 1:
            (only,) = indices
            return lambda state: state.memories[slot].load(state, (only(state),))
        return lambda state: state.memories[slot].load(state, [index(state) for index in indices])

    # -- operators ----------------------------------------------------------------------------------------------------

    def _binary(self, kind: str, node: Any) -> Value:
        one, two, function = self.compile(node.a), self.compile(node.b), BINARY[kind]
        if kind in _DIVISIONS and not is_float(dtype_of(node.dtype)):
            return self._division(kind, node, one, two)
        return lambda state: function(one(state), two(state))

    def _division(self, kind: str, node: Any, one: Value, two: Value) -> Value:
        function = BINARY[kind]
        divisor = int(node.b.value) if type(node.b).__name__ == "IntImm" else 0
        if divisor > 0:
            typed = dtype_of(node.dtype).type
            if kind in ("FloorDiv", "FloorMod") and divisor & (divisor - 1) == 0:
                places, low = typed(divisor.bit_length() - 1), typed(divisor - 1)
                return (lambda state: one(state) >> places) if kind == "FloorDiv" else (lambda state: one(state) & low)
            constant = typed(divisor)
            return lambda state: function(one(state), constant)

        def divide(state: State) -> Array:
            dividend, by = one(state), two(state)
            zero = by == 0
            if np.any(zero):
                if np.any(zero if state.mask is None else zero & state.mask):
                    raise KernelFault("divides an integer by zero", code="division_by_zero")
                by = np.where(zero, by.dtype.type(1), by)
            return function(dividend, by)

        return divide

    def _cast(self, node: Any) -> Value:
        value, target = self.compile(node.value), dtype_of(node.dtype)
        return lambda state: convert(value(state), target)

    def _not(self, node: Any) -> Value:
        value = self.compile(node.a)
        return lambda state: np.logical_not(value(state))

    def _and(self, node: Any) -> Value:
        return self._lazily(node, needs=True)

    def _or(self, node: Any) -> Value:
        return self._lazily(node, needs=False)

    def _lazily(self, node: Any, *, needs: bool) -> Value:
        """And, or: the second operand is evaluated where the first one does not decide."""
        one, two = self.compile(node.a), self.compile(node.b)

        def decide(state: State) -> Array:
            first = one(state)
            undecided = first if needs else np.logical_not(first)
            if np.ndim(first) == 0:
                return two(state) if undecided else first
            before = state.mask
            state.mask = state.narrowed(undecided)
            if not any_active(state.mask):
                state.mask = before
                return first
            second = two(state)
            state.mask = before
            return first & second if needs else first | second

        return decide

    def _select(self, node: Any) -> Value:
        condition, one, two = (
            self.compile(node.condition),
            self.compile(node.true_value),
            self.compile(node.false_value),
        )

        def select(state: State) -> Array:
            chosen = condition(state)
            first, second = one(state), two(state)
            return np.where(chosen, first, second) if np.ndim(chosen) else first if chosen else second

        return select

    def _let(self, node: Any) -> Value:
        slot, value, body = self.slots.variable(node.var), self.compile(node.value), self.compile(node.body)

        def bind(state: State) -> Array:
            state.values[slot] = value(state)
            return body(state)

        return bind

    # -- calls --------------------------------------------------------------------------------------------------------

    def _call(self, node: Any) -> Value:
        name = operation_of(node)
        short = name.rpartition(".")[2]
        if short == "if_then_else":
            return self._if_then_else(node)
        if name in SHUFFLES:
            value, operand, width = self.many(node.args[1:4])
            return lambda state: shuffle(state, name, value(state), operand(state), width(state))
        if name in REDUCTIONS:
            value = self.compile(node.args[0])
            return lambda state: reduce_warp(state, name, value(state))
        if short in ATOMICS:
            return self._atomic(short, node)
        dtype = dtype_of(node.dtype)
        if short == "infinity":
            value_ = np.float32(np.inf).astype(dtype)
            return lambda state: value_
        if short == "reinterpret":
            value = self.compile(node.args[0])
            return lambda state: reinterpret(value(state), dtype)
        if short in ("likely", "__ldg"):
            return self.compile(node.args[0])
        return self._function(name, short, node, dtype)

    def _function(self, name: str, short: str, node: Any, dtype: Any) -> Value:
        function = FUNCTIONS.get(short)
        if function is None:
            raise NotInterpreted(f"no rule for {name}", code="not_interpreted")
        arguments = list(node.args)
        if short.startswith("ieee_") and type(arguments[-1]).__name__ == "StringImm" and arguments.pop().value != "rn":
            raise NotInterpreted(f"no rule for {name} but to the nearest", code="not_interpreted")
        values = self.many(arguments)
        if len(values) == 1:
            (only,) = values
            return lambda state: function(only(state))
        return lambda state: function(*(value(state) for value in values))

    def _if_then_else(self, node: Any) -> Value:
        condition, one, two = self.many(node.args)

        def choose(state: State) -> Array:
            chosen = condition(state)
            if np.ndim(chosen) == 0:
                return one(state) if chosen else two(state)
            before = state.mask
            left, right = state.narrowed(chosen), state.narrowed(np.logical_not(chosen))
            first = second = None
            if any_active(left):
                state.mask = left
                first = one(state)
            if any_active(right):
                state.mask = right
                second = two(state)
            state.mask = before
            if first is None or second is None:
                return second if first is None else first
            return np.where(chosen, first, second)

        return choose

    def _atomic(self, short: str, node: Any) -> Value:
        target = node.args[0]
        if operation_of(target) != "tl.access_ptr":
            raise NotInterpreted(f"no rule for {short} on {operation_of(target)}", code="not_interpreted")
        load = target.args[0]
        slot, indices, value = self.slots.buffer(load.buffer), self.many(load.indices), self.compile(node.args[1])

        def run(state: State) -> Array:
            memory = state.memories[slot]
            return atomic(state, short, memory, [index(state) for index in indices], value(state))

        return run
