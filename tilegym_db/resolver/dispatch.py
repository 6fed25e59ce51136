"""The cache of one call site: from the appearance of a call to the launcher that serves it.

The key is everything that decides correctness: type, shape, strides, dtype and device of every tensor argument, including
outputs, and the scalars that select code. A known key costs one dict lookup. A new call is bound to the Definition, decided,
loaded and remembered. A kernel that raises is put in quarantine for its key. Stock code runs what no verified kernel can serve.

An axis that grows by one at each call (a cache) is not part of the key; see the section on growing axes below.
Calls that will be replayed have keys of another class, so they do not change the answers of eager calls.
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

from tilegym_db.backends.toolchains import check_libraries
from tilegym_db.errors import NoSolutionError, SolutionError, TilegymDBError
from tilegym_db.records import Definition, axes_key
from tilegym_db.records.call import Call, Launch, bind_call
from tilegym_db.records.expressions import names_in, parse_expression
from tilegym_db.resolver import device
from tilegym_db.resolver.decide import Decision, not_in_compiled_code
from tilegym_db.resolver.first_call import check_first_call
from tilegym_db.resolver.hot_path import (
    Allocate,
    Replayed,
    compile_attempt,
    compile_serve,
    is_replayed,
    size_of,
    with_outputs,
)
from tilegym_db.resolver.loader import Launcher, load_computer, load_launcher

if TYPE_CHECKING:
    import torch

    from tilegym_db.published.entries import Candidate


PREVIEW = "preview"
"""First part of the key of a call that is only asked about."""

MAX_KEYS = 4096
"""Number of keys that a call site remembers. Then it forgets the oldest, because a server has a new token count at every step."""

Choose = Callable[[Call, "torch.device", str | None, Launch], Decision]
"""(call, device, name of the solution that served this call site last, way of launching) -> Decision."""

Propose = Callable[[Call, "torch.device", Launch], Decision | None]
"""(call, device, way of launching) -> the kernel to check at the first call of a size that was not measured, or None."""


class Dispatcher:
    """The cache and the launchers of one call site.

    ``attempt(*inputs, *written_outputs)`` runs a verified kernel and returns True, or does nothing and returns False. The caller
    then runs its stock code. Calling the dispatcher does both, with its ``stock``. :meth:`serving` makes such a function for a
    caller that has no outputs yet. ``is_capturing`` and ``max_keys`` may be set later.
    """

    def __init__(
        self,
        definition: Definition,
        choose: Choose,
        *,
        stock: Launcher | None = None,
        is_capturing: Callable[[], bool] = device.is_capturing,
        max_keys: int = MAX_KEYS,
        propose: Propose | None = None,
        launch: Launch = "call",
    ) -> None:
        """Create a call site with an empty cache.

        Args:
            choose: decides about a new call; see :data:`Choose`.
            stock: destination-passing stock code, for ``__call__``.
            is_capturing: returns True while a CUDA graph is being captured on the current stream.
            max_keys: the number of keys to remember.
            propose: names the kernel to check at a first call that was not measured; None if no call is checked.
            launch: ``replay`` if all calls will be replayed, not only those inside ``replayed()``.
        """
        self.definition = definition
        self.choose = choose
        self._stock = stock
        self._propose = propose
        self._launch = launch
        self.is_capturing = is_capturing
        self.max_keys = max_keys
        self._keys: dict[Any, Bound] = {}
        self._spans: list[Spans] = []
        self._quarantined: dict[Any, KernelFailure] = {}
        self._refused: dict[str, str] = {}
        self.loaded: dict[str, tuple[Candidate, str]] = {}
        """Solution and config -> the candidate and the GPU slug of its table, of each kernel that was bound to a call."""
        self._serving: dict[Launch, str] = {}
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
        """Return ``serve(*inputs)``, which returns the outputs of a verified kernel, or None with nothing run or allocated.

        Args:
            allocate: makes the uninitialised outputs for some inputs. Their layout may depend only on what the key of the
                inputs contains. To decide about a new key it is called with tensors on the ``meta`` device.
            growing: an axis of inputs alone whose size changes at each call. A decision for one size is kept for the sizes
                around it with the same decision.
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
                return self._frozen()  # a kernel may compile for a new size
            bound.seen.add(size)
            return bound

        return compile_serve(self.definition, spans.recent.get, miss_span, self._failed, allocate, growing)

    def belongs_in_compiled_code(self, inputs: tuple[Any, ...], where: torch.device, allocate: Allocate) -> bool:
        """Return True if a kernel for such a call on a device is faster even inside compiled code.

        The inputs may be on ``meta``. Nothing is loaded, remembered or counted.
        """
        try:
            call = bind_call(self.definition, with_outputs(inputs, allocate))
            decision = self._choose(call, where, self._launch)
        except TilegymDBError:
            return False
        if decision.solution is None or str(decision.evidence.candidate) in self._refused:
            return False
        return not_in_compiled_code(decision) is None

    def preview(self, inputs: tuple[Any, ...], allocate: Allocate) -> Preview:
        """Return the kernel for such inputs, loaded and ready to try. Nothing is remembered or counted as a call.

        Inside ``replayed()`` it is the kernel for a replay.
        """
        launch: Launch | None = "replay" if is_replayed() else None
        bound = self._bind((PREVIEW, len(self._quarantined)), inputs, allocate, launch=launch)
        return Preview(bound.launch, bound.solution, bound.reason)

    def refuse(self, kernel: str, reason: str) -> None:
        """Leave new calls to stock code that would be bound to a kernel (named by solution and config as in :class:`Preview`).

        Calls that are already bound to it stay bound.
        """
        self._refused[kernel] = reason

    def run_stock(self, *args: Any) -> None:
        """Run the stock code of the call site; raise the same errors as a call of the dispatcher."""
        if self._stock is None:
            raise NoSolutionError(
                f"no verified kernel serves this call of {self.definition.name}, and the call site has no stock code.",
                code="no_kernel",
            )
        self._stock(*args)

    def report(self) -> DispatchReport:
        """Return the counts so far. They may lag by a few calls while several threads call at once."""
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

    # -- new calls ----------------------------------------------------------------------------------------------------

    def _choose(self, call: Call, where: torch.device, launch: Launch) -> Decision:
        return self.choose(call, where, self._serving.get(launch), launch)

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
        """Return stock, and remember nothing: loading and compiling allocate and synchronise, which a capture forbids."""
        self._misses += 1
        self._capture_misses += 1
        return Bound(None, "its first call was during the capture of a CUDA graph")

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
        launch: Launch | None = None,
    ) -> Bound:
        """Decide about a call, and load the kernel that serves it.

        Args:
            key: the key of the call; a kernel that fails is put in quarantine for it.
            allocate: makes the outputs if ``args`` has none.
            growing: the axis whose size is not in the key, and its size.
            launch: the way of launching, if the key does not have it.
        """
        launch = launch or ("replay" if isinstance(key, Replayed) else self._launch)
        failure = self._quarantined.get(key)
        if failure is None and isinstance(key, Replayed):
            failure = self._quarantined.get(key.key)
        if failure is not None:
            return Bound(None, failure.summary)
        where = device.common_device(args)
        if isinstance(where, str):
            return Bound(None, where)
        given = args if allocate is None else with_outputs(args, allocate)
        try:
            call = bind_call(self.definition, given)
            decision = self._choose(call, where, launch)
        except TilegymDBError as error:  # the call does not fit the Definition, but stock code may accept it
            bound = Bound(None, str(error))
            if growing is not None:
                bound.low = bound.high = growing[1]
            return bound
        promised = None if allocate is None else given[len(self.definition.inputs) :]
        bound = self._load(key, where, call, decision, promised, launch)
        if decision.evidence.source != "exact" and growing is None and key[0] != PREVIEW:
            bound = self._checked(key, where, call, args, promised, launch) or bound
        if growing is not None:
            bound.low, bound.high = alike_span(
                growing[0], call, decision, self.definition, lambda other: self._choose(other, where, launch)
            )
        return bound

    def _checked(
        self,
        key: Any,
        where: torch.device,
        call: Call,
        args: tuple[Any, ...],
        promised: Sequence[torch.Tensor] | None,
        launch: Launch,
    ) -> Bound | None:
        """Check the kernel of the nearest measured point on this very call; return None if there is nothing to check.

        This happens once for a key. Later calls find its binding.
        """
        proposed = None if self._propose is None or self._stock is None else self._propose(call, where, launch)
        if proposed is None or self._stock is None or str(proposed.evidence.candidate) in self._refused:
            return None
        bound = self._load(key, where, call, proposed, promised, launch)
        if bound.launch is None:
            return bound
        count = len(self.definition.inputs)
        inputs = args[:count]
        outputs = device.made_like(promised, where) if promised is not None else args[count:]
        found = check_first_call(
            self.definition,
            call.dtypes,
            load_launcher_of(self.definition, proposed, where),
            self._stock,
            inputs,
            tuple(outputs),
            lambda: device.synchronise(where),
        )
        if found.reason:
            return Bound(None, f"{proposed.evidence.candidate}, {found.text}", axes=call.axes)
        bound.reason = found.text
        return bound

    def _load(
        self,
        key: Any,
        where: torch.device,
        call: Call,
        decision: Decision,
        promised: Sequence[torch.Tensor] | None,
        way: Launch,
    ) -> Bound:
        candidate = decision.evidence.candidate
        if decision.solution is None or candidate is None:
            return Bound(None, decision.evidence.reason, axes=call.axes)
        if str(candidate) in self._refused:
            return Bound(None, self._refused[str(candidate)], axes=call.axes)
        verified = decision.solution, decision.config, candidate.solution_digest
        returns = not decision.solution.record.spec.destination_passing_style and not self.definition.in_place
        try:
            check_libraries(decision.solution.record.spec.dependencies, candidate.libs, candidate.solution)
            launch = load_launcher(self.definition, *verified)
            compute = load_computer(*verified, promised) if promised is not None and returns else None
        except TilegymDBError as error:
            failure = self._quarantine(key, str(candidate), call.axes, error)
            return Bound(None, failure.summary, axes=call.axes)
        self._serving[way] = candidate.solution
        self.loaded[str(candidate)] = candidate, decision.evidence.gpu
        launch = device.on_device(launch, where)
        bound = Bound(launch, decision.evidence.reason, str(candidate), call.axes)
        if self.definition.in_place:
            bound.launch = undoable(self.definition, bound, launch)
        elif compute is not None:
            bound.compute = device.on_device(compute, where)
        return bound

    # -- failing kernels ----------------------------------------------------------------------------------------------

    def _failed(self, key: Any, bound: Bound, error: Exception) -> None:
        """Retire a kernel that raised; raise if an input may already be overwritten, because stock code would then be wrong."""
        failure = self._quarantine(key, str(bound.solution), bound.axes, error)
        bound.retire(failure.summary)
        if not bound.undoes:
            raise SolutionError(
                f"{failure.summary}. It may already have overwritten {', '.join(self.definition.in_place)}, so stock code "
                "cannot repeat this call: run the step again from fresh inputs.",
                code="in_place_failed",
            ) from error

    def _quarantine(self, key: Any, solution: str, axes: Mapping[str, int], error: Exception) -> KernelFailure:
        text = "".join(traceback.format_exception(error))
        failure = self._quarantined[key] = KernelFailure(self.definition.name, solution, dict(axes), text)
        warnings.warn(f"tilegym-db: {failure.summary}; stock code runs instead", RuntimeWarning, stacklevel=5)
        return failure


def load_launcher_of(definition: Definition, decision: Decision, where: torch.device) -> Launcher:
    """Return the kernel of a decision with its config, on a device; loading it again costs nothing."""
    candidate = decision.evidence.candidate
    assert decision.solution is not None
    assert candidate is not None
    launch = load_launcher(definition, decision.solution, decision.config, candidate.solution_digest)
    return device.on_device(launch, where)


# ---- bound calls ----------------------------------------------------------------------------------
# A binding is the memory of a call site about a kind of call: the launcher, and the sizes that it is valid for.


class Preview(NamedTuple):
    """The kernel for a call: ``launch`` and ``kernel`` (solution and config), or None and the reason for stock code."""

    launch: Launcher | None
    kernel: str | None
    reason: str


class Bound:
    """The binding of one key. If ``launch`` is None, stock code runs."""

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
        # Replaces launch for callers without outputs: it returns the outputs of the solution.
        self.compute: Launcher | None = None
        self.low, self.high = 0, sys.maxsize  # the sizes of a growing axis for which this is valid
        self.seen: set[int] = set()  # the sizes that were called
        self.calls = 0
        self.kernel_calls: int | None = None  # set when a kernel is retired; every call before ran the kernel
        self.undoes = True  # a launch that raises leaves the inputs unchanged

    @property
    def kernel_calls_so_far(self) -> int:
        """Number of calls of this kind that ran a kernel."""
        if self.kernel_calls is not None:
            return self.kernel_calls
        return 0 if self.launch is None else self.calls

    def retire(self, reason: str) -> None:
        """Leave this key to stock code from now on; the failed call does not count as a kernel's."""
        self.kernel_calls = self.calls - 1
        self.launch = None
        self.reason = reason


class Spans:
    """The bindings of each kind of call, each for a span of a growing axis.

    ``recent`` has the span of the last call of a kind; a growing cache stays in one span for many calls.
    """

    def __init__(self) -> None:
        self.recent: dict[Any, Bound] = {}
        self._known: dict[Any, list[Bound]] = {}

    def find(self, kind: Any, size: int) -> Bound | None:
        """Return the binding that is valid for a size; None if there is none."""
        for bound in self._known.get(kind, ()):
            if bound.low <= size <= bound.high:
                self.recent[kind] = bound
                return bound
        return None

    def add(self, kind: Any, bound: Bound) -> None:
        """Remember a binding of a kind of call."""
        self._known[kind] = [*self._known.get(kind, ()), bound]
        self.recent[kind] = bound

    def forget(self, bound: Bound) -> None:
        """Remove a binding, so that its sizes are decided again."""
        self._known = {kind: [one for one in all_of if one is not bound] for kind, all_of in self._known.items()}
        for kind in [kind for kind, one in self.recent.items() if one is bound]:
            del self.recent[kind]


def undoable(definition: Definition, bound: Bound, launch: Launcher) -> Launcher:
    """Return a launch that can be undone, for an operator that overwrites an input; later launches cannot be undone.

    Compile errors and argument errors show at the first launch. A copy at every launch would cost what the kernel saves.
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


# ---- growing axes ---------------------------------------------------------------------------------
# One decision for a span of sizes. A cache grows by one position a step, so every step has a new shape.
#
# A decision takes a hundred times as long as a call of a known shape. It depends on the nearest measured point in log space and
# on the constraints of the candidates. The sizes of one axis for which a point is nearest form an interval, for any sizes of the
# other axes. Constraints that are bounds of the axis also hold on an interval. So if both ends of a span have the same decision,
# its kernel is verified, allowed and faster at every size in between. Only the fastest of several such kernels may differ inside.
#
# A span that is left to stock code may contain sizes that a kernel serves. Its constraints may allow scattered sizes, or it was
# verified for one size only. These run stock code too, which costs only speed.


def octave(size: int) -> tuple[int, int]:
    """Return the range of sizes from one power of two up to the next that contains ``size``; a span is never longer."""
    low = 1 << (max(size, 1).bit_length() - 1)
    return low, 2 * low - 1


def span_around(size: int, is_alike: Callable[[int], bool]) -> tuple[int, int]:
    """Return the range of sizes around one, within its octave, whose ends have the same decision.

    Args:
        is_alike: returns True if another size has the same decision, which is so on an interval around ``size``. It is called
            at most 2 log2(size) times.
    """
    low, high = octave(size)
    return min(size, _farthest(size, low, is_alike)), _farthest(size, high, is_alike)


def _farthest(inside: int, limit: int, is_alike: Callable[[int], bool]) -> int:
    """Return the last size from ``inside`` towards ``limit`` with the same decision, by bisection."""
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
    """Return the key by which two decisions are equal: the kernel with its source and config, and the measured point."""
    candidate, axes = decision.evidence.candidate, decision.evidence.axes
    kernel = None if candidate is None else (str(candidate), candidate.solution_digest)
    return kernel, decision.evidence.gpu, None if axes is None else tuple(sorted(axes.items()))


def are_bounds_of(axis: str, definition: Definition, decision: Decision) -> bool:
    """Return True if all constraints of a kernel on an axis are bounds, such as ``L >= 2`` but not ``L % 16 == 0``."""
    own: Iterable[str] = () if decision.solution is None else decision.solution.record.spec.constraints
    texts = (*definition.constraints, *own)
    return all(_is_bound(parse_expression(text), axis) for text in texts if axis in names_in(text)[0])


def _is_bound(node: ast.expr, axis: str) -> bool:
    """Return True if an expression compares the axis itself with a value that does not depend on it."""
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
    """Return the range of sizes of an axis around a call's size that have the same decision; ``choose`` decides a size."""
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


# ---- report ---------------------------------------------------------------------------------------
# The counts of a call site by key, and the kernels that were put in quarantine.


@dataclass(frozen=True)
class KernelFailure:
    """A kernel that could not be loaded, or raised, for one key. Stock code has served that key since."""

    definition: str
    solution: str
    axes: Mapping[str, int]
    traceback: str

    @property
    def summary(self) -> str:
        """One line with the kernel, the place, and the last line of the exception."""
        last = self.traceback.strip().splitlines()[-1]
        return (
            f"{self.solution} failed for {self.definition} at {axes_key(dict(self.axes))} and is in quarantine: {last}"
        )


@dataclass(frozen=True)
class KeyReport:
    """One kind of call (shapes, dtypes, strides, device), and the solution that serves it; None means stock.

    If an axis grows, one report stands for a span of sizes; its axes are those of the call that was decided.
    """

    axes: Mapping[str, int]
    solution: str | None
    reason: str
    calls: int
    kernel_calls: int


@dataclass(frozen=True)
class DispatchReport:
    """The counts of one call site: ``hits`` came from the cache, ``kernel_calls`` ran a verified kernel."""

    definition: str
    calls: int
    hits: int
    misses: int
    capture_misses: int
    """Calls whose first occurrence was during the capture of a CUDA graph. They ran stock code and were not remembered."""
    kernel_calls: int
    keys: tuple[KeyReport, ...]
    failures: tuple[KernelFailure, ...]

    @property
    def stock_calls(self) -> int:
        """Number of calls that ran the stock code."""
        return self.calls - self.kernel_calls
