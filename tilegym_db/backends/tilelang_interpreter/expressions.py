"""Compiles expressions to functions of the state: each node of TileLang's tree becomes a closure over its operands."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tilegym_db.backends.tilelang_interpreter.state import (
    Array,
    KernelFault,
    LaneMemory,
    Memory,
    NotInterpreted,
    Slots,
    State,
    any_active,
    convert,
    dtype_of,
    is_float,
    reinterpret,
    uniform_over_threads,
    wide,
)

Value = Callable[[State], Array]
_DIVISIONS = frozenset({"Div", "Mod", "FloorDiv", "FloorMod"})


def operation_of(node: Any) -> str:
    """Return the name of a call's operation."""
    return str(getattr(node.op, "name", node.op))


class Expressions:
    """A compiler of expressions; ``slots`` holds the places of variables and buffers."""

    def __init__(self, slots: Slots) -> None:
        """Prepare for one kernel."""
        self.slots = slots

    def compile(self, node: Any) -> Value:
        """Return the function that computes an expression."""
        kind = type(node).__name__
        if kind in BINARY:
            return self._binary(kind, node)
        method = getattr(self, f"_{kind.lower()}", None)
        if method is None:
            raise NotInterpreted(f"no rule for an expression of the kind {kind}", code="not_interpreted")
        return method(node)  # type: ignore[no-any-return]

    def many(self, nodes: Any) -> list[Value]:
        """Return the functions of several expressions."""
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
        """Compile "and" or "or"; the second operand is evaluated for lanes that the first one does not decide."""
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


# ---- intrinsics -----------------------------------------------------------------------------------
# Functions of values, by the name of the TileLang operation.


def _narrowed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compute in float32 or wider and round once, as a device's function does up to its last bits."""

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
    """Return a * b + c rounded once: the product is exact in float64, and the sum is rounded to odd before the last step."""
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
"""Expression nodes that evaluate both operands."""


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


# ---- atomics --------------------------------------------------------------------------------------
# Lanes run an atomic operation one after another, in the order of their numbers.

_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {"add": np.add, "max": BINARY["Max"], "min": BINARY["Min"]}
ATOMICS = {f"atomic_{name}{kind}_elem_op": name for name in _OPERATIONS for kind in ("", "_ret")}
"""TileLang operation -> its function of one element; operations with ``ret`` return the old value."""


def atomic(state: State, short: str, memory: Memory, indices: Sequence[Array], value: Array) -> Array:
    """Update elements once for each active lane; return the old value that each lane found."""
    if isinstance(memory, LaneMemory):
        raise NotInterpreted(f"{short} on registers", code="not_interpreted")
    if state.collapsed and state.mask is not None and state.mask.shape[-1] > 1:
        raise NotInterpreted(
            f"{short} under a condition on the thread inside a loop whose steps are shared by threads",
            code="not_interpreted",
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


# ---- warps ----------------------------------------------------------------------------------------
# The threads of a warp exchange values.

WARP = 32

SHUFFLES: dict[str, Callable[[Any, Any, int], tuple[Any, Any]]] = {
    "tl.shfl_xor_sync": lambda lane, delta, width: (lane ^ delta, (lane ^ delta) // width == lane // width),
    "tl.shfl_up_sync": lambda lane, delta, width: (lane - delta, lane % width >= delta),
    "tl.shfl_down_sync": lambda lane, delta, width: (lane + delta, lane % width + delta < width),
    "tl.shfl_sync": lambda lane, source, width: (lane // width * width + source % width, lane >= 0),
}
"""Operation -> function of lane, operand and width; it returns the source lane and True if the lane takes its value."""

REDUCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "tl.warp_reduce_sum": np.add,
    "tl.warp_reduce_max": lambda a, b: np.fmax(a, b) if is_float(a.dtype) else np.maximum(a, b),
    "tl.warp_reduce_min": lambda a, b: np.fmin(a, b) if is_float(a.dtype) else np.minimum(a, b),
    "tl.warp_reduce_bitand": np.bitwise_and,
    "tl.warp_reduce_bitor": np.bitwise_or,
}


def shuffle(state: State, name: str, value: Array, operand: Array, width: Array) -> Array:
    """Return the value that each lane gets from another one of its warp; a lane that is not there is a fault."""
    _together(state, name)
    lane = np.arange(state.threads, dtype=np.int64)
    source, gets = SHUFFLES[name](lane, np.asarray(operand).astype(np.int64), int(width))
    source = np.where(gets & (source >= 0), source, lane)
    return _exchanged(state, name, value, source)


def reduce_warp(state: State, name: str, value: Array) -> Array:
    """Return the sum or another total over a warp for all its lanes, added in halves as the device does."""
    _together(state, name)
    lane = np.arange(state.threads, dtype=np.int64)
    total = np.asarray(value)
    for step in (16, 8, 4, 2, 1):
        total = REDUCTIONS[name](total, _exchanged(state, name, total, lane ^ step))
    return total


def _together(state: State, name: str) -> None:
    if state.collapsed:
        raise NotInterpreted(f"{name} inside a loop whose steps are shared by threads", code="not_interpreted")


def _exchanged(state: State, name: str, value: Array, source: Array) -> Array:
    """Return the value of the source lane, which must be active."""
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
