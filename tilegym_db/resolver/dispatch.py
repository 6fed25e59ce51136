"""One call site's cache, from what a call looks like to the launcher that serves it.

The key is everything that decides correctness: type, shape, strides, dtype and device of every tensor argument, outputs
included, and the scalars that select code. A key seen before costs one dict lookup; a new one is bound to the
Definition, decided, loaded, and remembered. A kernel that raises is put in quarantine for its key. Whatever no verified
kernel can serve is left to the stock code.

An axis that grows by one at each call (a cache) is left out of the key: see :mod:`~tilegym_db.resolver.dispatch`.
"""

from __future__ import annotations

import ast
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from tilegym_db.errors import NoSolutionError, SolutionError, TilegymDBError
from tilegym_db.records import Definition, axes_key
from tilegym_db.records.call import Call, bind_call
from tilegym_db.records.expressions import names_in, parse_expression
from tilegym_db.resolver import device
from tilegym_db.resolver.decide import Decision, not_in_compiled_code
from tilegym_db.resolver.hot_path import Allocate, compile_attempt, compile_serve, size_of, with_outputs
from tilegym_db.resolver.loader import Launcher, load_computer, load_launcher

if TYPE_CHECKING:
    import torch


MAX_KEYS = 4096
"""Keys a call site remembers; beyond that the oldest is forgotten (a server sees a new token count at every step)."""

Choose = Callable[[Call, "torch.device", str | None], Decision]
"""(call, device, name of the solution that served this call site last) -> Decision."""


class Dispatcher:
    """Serves the calls of one call site.

    ``attempt(*inputs, *written_outputs)`` runs a verified kernel and returns True, or returns False with nothing done:
    the caller then runs its own stock code. Calling the dispatcher does both, with the ``stock`` it was given.
    :meth:`serving` makes the same for a caller that has no outputs yet. ``is_capturing`` and ``max_keys`` may be set later.
    """

    def __init__(
        self,
        definition: Definition,
        choose: Choose,
        *,
        stock: Launcher | None = None,
        is_capturing: Callable[[], bool] = device.is_capturing,
        max_keys: int = MAX_KEYS,
    ) -> None:
        """Make a call site with an empty cache.

        Args:
            definition: the operator that is called here.
            choose: decides for a call that is new; see :data:`Choose`.
            stock: destination-passing stock code, for ``__call__``.
            is_capturing: whether a CUDA graph is being captured on the current stream.
            max_keys: how many keys to remember.
        """
        self.definition = definition
        self.choose = choose
        self._stock = stock
        self.is_capturing = is_capturing
        self.max_keys = max_keys
        self._keys: dict[Any, Bound] = {}
        self._spans: list[Spans] = []
        self._quarantined: dict[Any, KernelFailure] = {}
        self._refused: dict[str, str] = {}
        self._serving: str | None = None
        self._misses = self._capture_misses = self._forgotten_calls = self._forgotten_kernel_calls = 0
        self._binding_a_key = threading.Lock()
        self.attempt = compile_attempt(definition, self._keys.get, self._miss_written, self._failed)

    def __call__(self, *args: Any) -> None:
        """Run the call: a verified kernel, or the stock code.

        Raises:
            NoSolutionError: no verified kernel serves the call and the call site has no stock code.
        """
        if not self.attempt(*args):
            self.run_stock(*args)

    def serving(self, allocate: Allocate, growing: str | None = None) -> Callable[..., Any]:
        """``serve(*inputs)``: the outputs by a verified kernel, or None with nothing done and nothing allocated.

        Args:
            allocate: the outputs for some inputs, uninitialised. Their layout may depend on what the inputs' key says and on
                nothing else; to decide about a new key it is called with tensors on the ``meta`` device.
            growing: an axis of inputs alone that has another size at each call. What is decided for a size is kept for those
                around it that are decided alike: see :mod:`tilegym_db.resolver.dispatch`.
        """
        if growing is None:

            def miss(key: Any, inputs: tuple[Any, ...]) -> Bound:
                return self._miss(key, lambda: self._bind(key, inputs, allocate))

            return compile_serve(self.definition, self._keys.get, miss, self._failed, allocate)

        spans = Spans()
        self._spans.append(spans)
        name, dimension = size_of(self.definition, growing)
        position = list(self.definition.inputs).index(name)

        def miss_span(kind: Any, inputs: tuple[Any, ...]) -> Bound:
            size = inputs[position].shape[dimension]

            def bind() -> Bound:
                bound = self._bind(kind, inputs, allocate, (growing, size))
                spans.add(kind, bound)
                return bound

            bound = spans.find(kind, size)
            if bound is None:
                bound = self._miss((kind, size), bind)
            elif bound.launch is not None and self.is_capturing():
                return self._frozen()  # a kernel may compile for a size that it has not had yet
            bound.seen.add(size)
            return bound

        return compile_serve(self.definition, spans.recent.get, miss_span, self._failed, allocate, growing)

    def belongs_in_compiled_code(self, inputs: tuple[Any, ...], where: torch.device, allocate: Allocate) -> bool:
        """Return True if a call with such inputs (tensors on ``meta`` will do) on a device pays as a kernel inside
        compiled code.

        Nothing is loaded, remembered or counted.
        """
        try:
            call = bind_call(self.definition, with_outputs(inputs, allocate))
            decision = self.choose(call, where, self._serving)
        except TilegymDBError:
            return False
        if decision.solution is None or str(decision.evidence.candidate) in self._refused:
            return False
        return not_in_compiled_code(decision) is None

    def preview(self, inputs: tuple[Any, ...], allocate: Allocate) -> Preview:
        """What would serve such inputs, loaded and ready to be tried. Nothing is remembered or counted as a call."""
        bound = self._bind(("preview", len(self._quarantined)), inputs, allocate)
        return Preview(bound.launch, bound.solution, bound.reason)

    def refuse(self, kernel: str, reason: str) -> None:
        """Leave to stock code whatever would be bound to a kernel (its solution and config, as :class:`Preview` has it).

        For calls that are new from now on: what is bound to it already stays.
        """
        self._refused[kernel] = reason

    def run_stock(self, *args: Any) -> None:
        """Run the stock code that the call site was given; raises as calling the dispatcher does."""
        if self._stock is None:
            raise NoSolutionError(
                f"no verified kernel serves this call of {self.definition.name}, and the call site has no stock code.",
                code="no_kernel",
            )
        self._stock(*args)

    def report(self) -> DispatchReport:
        """What this call site did so far. Counts may lag by a few while several threads call at once."""
        bound = list(self._keys.values())
        calls = self._forgotten_calls + self._capture_misses + sum(item.calls for item in bound)
        return DispatchReport(
            definition=self.definition.name,
            calls=calls,
            hits=calls - self._misses,
            misses=self._misses,
            capture_misses=self._capture_misses,
            kernel_calls=self._forgotten_kernel_calls + sum(item.kernel_calls_so_far for item in bound),
            keys=tuple(KeyReport(b.axes, b.solution, b.reason, b.calls, b.kernel_calls_so_far) for b in bound),
            failures=tuple(self._quarantined.values()),
        )

    # -- a call seen for the first time -------------------------------------------------------------------------------

    def _miss_written(self, key: Any, args: tuple[Any, ...]) -> Bound:
        return self._miss(key, lambda: self._bind(key, args))

    def _miss(self, key: Any, bind: Callable[[], Bound]) -> Bound:
        if self.is_capturing():
            return self._frozen()
        self._misses += 1
        with self._binding_a_key:
            bound = self._keys.get(key)
            if bound is None:
                bound = bind()
                while len(self._keys) >= self.max_keys:
                    self._forget_oldest()
                self._keys[key] = bound
        return bound

    def _frozen(self) -> Bound:
        """Stock, and nothing remembered: loading and compiling allocate and synchronise, which a capture forbids."""
        self._misses += 1
        self._capture_misses += 1
        return Bound(None, "first seen while a CUDA graph was being captured")

    def _forget_oldest(self) -> None:
        forgotten = self._keys.pop(next(iter(self._keys)))
        self._forgotten_calls += forgotten.calls
        self._forgotten_kernel_calls += forgotten.kernel_calls_so_far
        for spans in self._spans:
            spans.forget(forgotten)

    def _bind(
        self,
        key: Any,
        args: tuple[Any, ...],
        allocate: Allocate | None = None,
        growing: tuple[str, int] | None = None,
    ) -> Bound:
        """Decide about a call, and load what is to serve it.

        Args:
            key: what the call looks like; a kernel that fails is put in quarantine for it.
            args: of the call.
            allocate: makes the outputs where ``args`` has none.
            growing: the axis that the key does not say the size of, and this size.
        """
        if key in self._quarantined:
            return Bound(None, self._quarantined[key].summary)
        where = device.common_device(args)
        if isinstance(where, str):
            return Bound(None, where)
        given = args if allocate is None else with_outputs(args, allocate)
        try:
            call = bind_call(self.definition, given)
            decision = self.choose(call, where, self._serving)
        except TilegymDBError as error:  # not a call that the database knows; stock code may well serve it
            bound = Bound(None, str(error))
            if growing is not None:
                bound.low = bound.high = growing[1]
            return bound
        promised = None if allocate is None else given[len(self.definition.inputs) :]
        bound = self._load(key, where, call, decision, promised)
        if growing is not None:
            bound.low, bound.high = alike_span(
                growing[0], call, decision, self.definition, lambda other: self.choose(other, where, self._serving)
            )
        return bound

    def _load(
        self,
        key: Any,
        where: torch.device,
        call: Call,
        decision: Decision,
        promised: Sequence[torch.Tensor] | None,
    ) -> Bound:
        candidate = decision.evidence.candidate
        if decision.solution is None or candidate is None:
            return Bound(None, decision.evidence.reason, axes=call.axes)
        if str(candidate) in self._refused:
            return Bound(None, self._refused[str(candidate)], axes=call.axes)
        verified = decision.solution, decision.config, candidate.solution_digest
        returns = not decision.solution.record.spec.destination_passing_style and not self.definition.in_place
        try:
            launch = load_launcher(self.definition, *verified)
            compute = load_computer(*verified, promised) if promised is not None and returns else None
        except TilegymDBError as error:
            failure = self._quarantine(key, str(candidate), call.axes, error)
            return Bound(None, failure.summary, axes=call.axes)
        self._serving = candidate.solution
        launch = device.on_device(launch, where)
        bound = Bound(launch, decision.evidence.reason, str(candidate), call.axes)
        if self.definition.in_place:
            bound.launch = undoable(self.definition, bound, launch)
        elif compute is not None:
            bound.compute = device.on_device(compute, where)
        return bound

    # -- a kernel that cannot be used ---------------------------------------------------------------------------------

    def _failed(self, key: Any, bound: Bound, error: Exception) -> None:
        """Retire a kernel that raised.

        Raises:
            SolutionError: an input may be overwritten already, so that stock code would compute something else.
        """
        failure = self._quarantine(key, str(bound.solution), bound.axes, error)
        bound.retire(failure.summary)
        if not bound.undoes:
            raise SolutionError(
                f"{failure.summary}. It may have overwritten {', '.join(self.definition.in_place)} before, so that "
                "stock code cannot repeat this call: run the step again from fresh inputs.",
                code="in_place_failed",
            ) from error

    def _quarantine(self, key: Any, solution: str, axes: Mapping[str, int], error: Exception) -> KernelFailure:
        text = "".join(traceback.format_exception(error))
        failure = self._quarantined[key] = KernelFailure(self.definition.name, solution, dict(axes), text)
        warnings.warn(f"tilegym-db: {failure.summary}; stock code runs instead", RuntimeWarning, stacklevel=5)
        return failure


# ---- bound ----------------------------------------------------------------------------------------
# What a call site remembers of a kind of call: the launcher that serves it, and for which sizes it holds.


class Preview(NamedTuple):
    """What would serve a call: ``launch`` and ``kernel``, the solution and its config; or None and the reason for stock."""

    launch: Launcher | None
    kernel: str | None
    reason: str


class Bound:
    """What one key is bound to; ``launch`` None means stock."""

    __slots__ = (
        "axes",
        "calls",
        "compute",
        "high",
        "kernel_calls",
        "launch",
        "low",
        "reason",
        "seen",
        "solution",
        "undoes",
    )

    def __init__(
        self,
        launch: Launcher | None,
        reason: str,
        solution: str | None = None,
        axes: Mapping[str, int] | None = None,
    ) -> None:
        self.launch = launch
        self.reason = reason
        self.solution = solution
        self.axes = axes or {}
        # Instead of launch, where the caller has no outputs: gives those that the solution returns.
        self.compute: Launcher | None = None
        self.low, self.high = 0, sys.maxsize  # the sizes of a growing axis that this holds for
        self.seen: set[int] = set()  # those of them that there was a call of
        self.calls = 0
        self.kernel_calls: int | None = None  # set when a kernel is retired; until then every call ran it
        self.undoes = True  # a launch that raises leaves the inputs as they were

    @property
    def kernel_calls_so_far(self) -> int:
        """Calls of this kind that ran a kernel."""
        if self.kernel_calls is not None:
            return self.kernel_calls
        return 0 if self.launch is None else self.calls

    def retire(self, reason: str) -> None:
        """Leave this key to stock code from now on; the call that failed is not counted as a kernel's."""
        self.kernel_calls = self.calls - 1
        self.launch = None
        self.reason = reason


class Spans:
    """What kinds of calls are bound to, each for spans of a growing axis.

    ``recent`` has the span that the last call of a kind fell into; a cache that grows stays in it for long.
    """

    def __init__(self) -> None:
        self.recent: dict[Any, Bound] = {}
        self._known: dict[Any, list[Bound]] = {}

    def find(self, kind: Any, size: int) -> Bound | None:
        """What holds for a size."""
        for bound in self._known.get(kind, ()):
            if bound.low <= size <= bound.high:
                self.recent[kind] = bound
                return bound
        return None

    def add(self, kind: Any, bound: Bound) -> None:
        """Remember what a kind is bound to."""
        self._known[kind] = [*self._known.get(kind, ()), bound]
        self.recent[kind] = bound

    def forget(self, bound: Bound) -> None:
        """Have it decided again where it held."""
        self._known = {kind: [one for one in all_of if one is not bound] for kind, all_of in self._known.items()}
        for kind in [kind for kind, one in self.recent.items() if one is bound]:
            del self.recent[kind]


def undoable(definition: Definition, bound: Bound, launch: Launcher) -> Launcher:
    """Return a launch that can be undone, for an operator that overwrites an input; the one that follows it cannot.

    Compile and argument errors show at the first launch. Keeping a copy at every launch would cost what the kernel
    saves.
    """
    names = list(definition.inputs)
    overwritten = [names.index(name) for name in definition.in_place]

    def launch_with_backup(*args: Any) -> None:
        backup = [args[index].clone() for index in overwritten]
        try:
            launch(*args)
        except BaseException:
            for index, saved in zip(overwritten, backup, strict=True):
                args[index].copy_(saved)
            raise
        bound.launch, bound.undoes = launch, False

    return launch_with_backup


# ---- growing --------------------------------------------------------------------------------------
# One decision for a span of sizes: of a cache that grows by one position a step, so that every step is a new shape.
#
# Deciding about a shape takes a hundred times as long as a call whose shape is known. A decision rests on the
# measured point that is nearest in log space, and on the constraints of its candidates. The sizes of one axis for
# which a point is the nearest are an interval, whatever the other axes are; constraints that are bounds of the axis
# hold on an interval as well. So where both ends of a span are decided alike, the kernel is verified, declared and
# faster at every size between them, by the rule that picks it at the ends. Only which of several such kernels is the
# fastest may differ inside.
#
# A span of sizes that are left to stock code may hold some that a kernel serves, where its constraints pick out
# scattered sizes or it was verified for one alone. Those may be left to stock too, which costs speed and nothing
# else.


def octave(size: int) -> tuple[int, int]:
    """Return the sizes from one power of two up to the next that ``size`` lies among; a span is never longer."""
    low = 1 << (max(size, 1).bit_length() - 1)
    return low, 2 * low - 1


def span_around(size: int, is_alike: Callable[[int], bool]) -> tuple[int, int]:
    """Return the sizes around one, within its octave, up to which both ends are decided alike.

    Args:
        size: what was decided; not asked about again.
        is_alike: whether another size is decided as it is. True on an interval around it; asked about 2 log2 of them at most.
    """
    low, high = octave(size)
    return min(size, _farthest(size, low, is_alike)), _farthest(size, high, is_alike)


def _farthest(inside: int, limit: int, is_alike: Callable[[int], bool]) -> int:
    """Return the last size from ``inside`` towards ``limit`` that is alike, by bisection."""
    if limit == inside or is_alike(limit):
        return limit
    outside = limit
    while abs(outside - inside) > 1:
        middle = (inside + outside) // 2
        if is_alike(middle):
            inside = middle
        else:
            outside = middle
    return inside


def answer(decision: Decision) -> tuple[Any, ...]:
    """What two decisions must share to be alike: the kernel with its source and config, and the measured point it rests on."""
    candidate, axes = decision.evidence.candidate, decision.evidence.axes
    kernel = None if candidate is None else (str(candidate), candidate.solution_digest)
    return kernel, decision.evidence.gpu, None if axes is None else tuple(sorted(axes.items()))


def are_bounds_of(axis: str, definition: Definition, decision: Decision) -> bool:
    """Return True if what limits a decided kernel to some sizes of an axis are bounds, as ``L >= 2`` is and ``L % 16 ==
    0`` is not.
    """
    own: Iterable[str] = () if decision.solution is None else decision.solution.record.spec.constraints
    texts = (*definition.constraints, *own)
    return all(_is_bound(parse_expression(text), axis) for text in texts if axis in names_in(text)[0])


def _is_bound(node: ast.expr, axis: str) -> bool:
    """Return True if an expression compares the axis itself with something that does not depend on it."""
    if not isinstance(node, ast.Compare) or len(node.ops) != 1:
        return False
    sides = (node.left, node.comparators[0])
    itself = [isinstance(side, ast.Name) and side.id == axis for side in sides]
    free = [axis not in names_in(ast.unparse(side))[0] for side in sides]
    is_order = isinstance(node.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE)
    return is_order and ((itself[0] and free[1]) or (itself[1] and free[0]))


def alike_span(
    axis: str, call: Call, decision: Decision, definition: Definition, choose: Callable[[Call], Decision]
) -> tuple[int, int]:
    """Return the sizes of an axis around that of a call which are decided as the call is.

    Args:
        axis: of the Definition.
        call: the call.
        decision: what was decided about it.
        definition: the operator.
        choose: decides about the same call of another size.
    """
    size = call.axes[axis]
    if not are_bounds_of(axis, definition, decision):
        return size, size
    picked = answer(decision)

    def is_alike(other: int) -> bool:
        try:
            return answer(choose(replace(call, axes={**call.axes, axis: other}))) == picked
        except TilegymDBError:
            return False

    return span_around(size, is_alike)


# ---- dispatch report ------------------------------------------------------------------------------
# What a call site did: counts per key, and the kernels that had to be put in quarantine.


@dataclass(frozen=True)
class KernelFailure:
    """A kernel that could not be loaded, or raised, for one key; stock code serves that key since."""

    definition: str
    solution: str
    axes: Mapping[str, int]
    traceback: str

    @property
    def summary(self) -> str:
        """One line: which kernel, where, and the exception's own last line."""
        last = self.traceback.strip().splitlines()[-1]
        return (
            f"{self.solution} failed for {self.definition} at {axes_key(dict(self.axes))} and is in quarantine: {last}"
        )


@dataclass(frozen=True)
class KeyReport:
    """One kind of call (shapes, dtypes, strides, device) that was seen, and what serves it; no solution means stock.

    Where calls grow, one report stands for a span of sizes; its axes are those of the call that was decided.
    """

    axes: Mapping[str, int]
    solution: str | None
    reason: str
    calls: int
    kernel_calls: int


@dataclass(frozen=True)
class DispatchReport:
    """The counts of one call site. ``hits`` were served from the cache; ``kernel_calls`` ran a verified kernel."""

    definition: str
    calls: int
    hits: int
    misses: int
    capture_misses: int
    """Calls first seen while a CUDA graph was being captured; they ran stock code and were not remembered."""
    kernel_calls: int
    keys: tuple[KeyReport, ...]
    failures: tuple[KernelFailure, ...]

    @property
    def stock_calls(self) -> int:
        """Calls that were left to the stock code."""
        return self.calls - self.kernel_calls
