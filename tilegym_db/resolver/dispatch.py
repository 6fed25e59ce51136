"""One call site's cache, from what a call looks like to the launcher that serves it.

The key is everything that decides correctness: type, shape, strides, dtype and device of every tensor argument, outputs
included, and the scalars that select code. A key seen before costs one dict lookup; a new one is bound to the
Definition, decided, loaded, and remembered. A kernel that raises is put in quarantine for its key. Whatever no verified
kernel can serve is left to the stock code.

An axis that grows by one at each call (a cache) is left out of the key: see :mod:`~tilegym_db.resolver.growing`.
"""

from __future__ import annotations

import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from tilegym_db.errors import NoSolutionError, SolutionError, TilegymDBError
from tilegym_db.records import Definition
from tilegym_db.records.binding import Binding, bind_call
from tilegym_db.resolver import device
from tilegym_db.resolver.decide import Decision, not_in_compiled_code
from tilegym_db.resolver.growing import answer, are_bounds_of, span_around
from tilegym_db.resolver.hot_path import compile_attempt, compile_serve, size_of
from tilegym_db.resolver.loader import Launcher, load_computer, load_launcher
from tilegym_db.resolver.site_report import Failure, KeyReport, SiteReport

if TYPE_CHECKING:
    import torch

__all__ = ["MAX_KEYS", "Allocate", "Choose", "Dispatcher", "Preview"]

MAX_KEYS = 4096
"""Keys a call site remembers; beyond that the oldest is forgotten (a server sees a new token count at every step)."""

Allocate = Callable[..., Any]
"""``allocate(*inputs)``: the one output, or a tuple of them, uninitialised."""

Choose = Callable[[Binding, "torch.device", str | None], Decision]
"""(binding, device, name of the solution that served this call site last) -> Decision."""


class Preview(NamedTuple):
    """What would serve a call: ``launch`` and ``kernel``, the solution and its config; or None and the reason for stock."""

    launch: Launcher | None
    kernel: str | None
    reason: str


class _Bound:
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
        axes: dict[str, int] | None = None,
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
        if self.kernel_calls is not None:
            return self.kernel_calls
        return 0 if self.launch is None else self.calls

    def retire(self, reason: str) -> None:
        """Leave this key to stock code from now on; the call that failed is not counted as a kernel's."""
        self.kernel_calls = self.calls - 1
        self.launch = None
        self.reason = reason


class _Spans:
    """What kinds of calls are bound to, each for spans of a growing axis.

    ``recent`` has the span that the last call of a kind fell into; a cache that grows stays in it for long.
    """

    def __init__(self) -> None:
        self.recent: dict[Any, _Bound] = {}
        self._known: dict[Any, list[_Bound]] = {}

    def find(self, kind: Any, size: int) -> _Bound | None:
        """What holds for a size."""
        for bound in self._known.get(kind, ()):
            if bound.low <= size <= bound.high:
                self.recent[kind] = bound
                return bound
        return None

    def add(self, kind: Any, bound: _Bound) -> None:
        """Remember what a kind is bound to."""
        self._known[kind] = [*self._known.get(kind, ()), bound]
        self.recent[kind] = bound

    def forget(self, bound: _Bound) -> None:
        """Have it decided again where it held."""
        self._known = {kind: [one for one in all_of if one is not bound] for kind, all_of in self._known.items()}
        for kind in [kind for kind, one in self.recent.items() if one is bound]:
            del self.recent[kind]


class Dispatcher:
    """Serves the calls of one call site.

    ``attempt(*inputs, *written_outputs)`` runs a verified kernel and returns True, or returns False with nothing done:
    the caller then runs its own stock code. Calling the dispatcher does both, with the ``stock`` it was given.
    :meth:`serving` makes the same for a caller that has no outputs yet.
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
        self._choose = choose
        self._stock = stock
        self._is_capturing = is_capturing
        self._max_keys = max_keys
        self._keys: dict[Any, _Bound] = {}
        self._spans: list[_Spans] = []
        self._quarantined: dict[Any, Failure] = {}
        self._refused: dict[str, str] = {}
        self._incumbent: str | None = None
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
                around it that are decided alike: see :mod:`tilegym_db.resolver.growing`.
        """
        if growing is None:

            def miss(key: Any, inputs: tuple[Any, ...]) -> _Bound:
                return self._miss(key, lambda: self._bind(key, inputs, allocate))

            return compile_serve(self.definition, self._keys.get, miss, self._failed, allocate)

        spans = _Spans()
        self._spans.append(spans)
        name, dimension = size_of(self.definition, growing)
        position = list(self.definition.inputs).index(name)

        def miss_span(kind: Any, inputs: tuple[Any, ...]) -> _Bound:
            size = inputs[position].shape[dimension]

            def bind() -> _Bound:
                bound = self._bind(kind, inputs, allocate, (growing, size))
                spans.add(kind, bound)
                return bound

            bound = spans.find(kind, size)
            if bound is None:
                bound = self._miss((kind, size), bind)
            elif bound.launch is not None and self._is_capturing():
                return self._frozen()  # a kernel may compile for a size that it has not had yet
            bound.seen.add(size)
            return bound

        return compile_serve(self.definition, spans.recent.get, miss_span, self._failed, allocate, growing)

    def belongs_in_compiled_code(self, inputs: tuple[Any, ...], where: torch.device, allocate: Allocate) -> bool:
        """Whether a call with such inputs (tensors on ``meta`` will do) on a device pays as a kernel inside compiled code.

        Nothing is loaded, remembered or counted.
        """
        try:
            binding = bind_call(self.definition, _with_outputs(inputs, allocate))
            decision = self._choose(binding, where, self._incumbent)
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
                f"no verified kernel serves this call of {self.definition.name}, and the call site has no stock code."
            )
        self._stock(*args)

    def report(self) -> SiteReport:
        """What this call site did so far. Counts may lag by a few while several threads call at once."""
        bound = list(self._keys.values())
        calls = self._forgotten_calls + self._capture_misses + sum(item.calls for item in bound)
        return SiteReport(
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

    def _miss_written(self, key: Any, args: tuple[Any, ...]) -> _Bound:
        return self._miss(key, lambda: self._bind(key, args))

    def _miss(self, key: Any, bind: Callable[[], _Bound]) -> _Bound:
        if self._is_capturing():
            return self._frozen()
        self._misses += 1
        with self._binding_a_key:
            bound = self._keys.get(key)
            if bound is None:
                bound = bind()
                while len(self._keys) >= self._max_keys:
                    self._forget_oldest()
                self._keys[key] = bound
        return bound

    def _frozen(self) -> _Bound:
        """Stock, and nothing remembered: loading and compiling allocate and synchronise, which a capture forbids."""
        self._misses += 1
        self._capture_misses += 1
        return _Bound(None, "first seen while a CUDA graph was being captured")

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
    ) -> _Bound:
        """Decide about a call, and load what is to serve it.

        Args:
            key: what the call looks like; a kernel that fails is put in quarantine for it.
            args: of the call.
            allocate: makes the outputs where ``args`` has none.
            growing: the axis that the key does not say the size of, and this size.
        """
        if key in self._quarantined:
            return _Bound(None, self._quarantined[key].summary)
        where = device.common_device(args)
        if isinstance(where, str):
            return _Bound(None, where)
        given = args if allocate is None else _with_outputs(args, allocate)
        try:
            binding = bind_call(self.definition, given)
            decision = self._choose(binding, where, self._incumbent)
        except TilegymDBError as error:  # not a call that the database knows; stock code may well serve it
            bound = _Bound(None, str(error))
            if growing is not None:
                bound.low = bound.high = growing[1]
            return bound
        promised = None if allocate is None else given[len(self.definition.inputs) :]
        bound = self._load(key, where, binding, decision, promised)
        if growing is not None:
            bound.low, bound.high = self._span(growing[0], binding, where, decision)
        return bound

    def _load(
        self,
        key: Any,
        where: torch.device,
        binding: Binding,
        decision: Decision,
        promised: Sequence[torch.Tensor] | None,
    ) -> _Bound:
        candidate = decision.evidence.candidate
        if decision.solution is None or candidate is None:
            return _Bound(None, decision.evidence.reason, axes=binding.axes)
        if str(candidate) in self._refused:
            return _Bound(None, self._refused[str(candidate)], axes=binding.axes)
        verified = decision.solution, decision.config, candidate.solution_digest
        returns = not decision.solution.record.spec.destination_passing_style and not self.definition.in_place
        try:
            launch = load_launcher(self.definition, *verified)
            compute = load_computer(*verified, promised) if promised is not None and returns else None
        except TilegymDBError as error:
            failure = self._quarantine(key, str(candidate), binding.axes, error)
            return _Bound(None, failure.summary, axes=binding.axes)
        self._incumbent = candidate.solution
        launch = device.on_device(launch, where)
        bound = _Bound(launch, decision.evidence.reason, str(candidate), binding.axes)
        if self.definition.in_place:
            bound.launch = self._first_launch(bound, launch)
        elif compute is not None:
            bound.compute = device.on_device(compute, where)
        return bound

    def _span(self, axis: str, binding: Binding, where: torch.device, decision: Decision) -> tuple[int, int]:
        """The sizes of an axis that are decided as this one is."""
        size = binding.axes[axis]
        if not are_bounds_of(axis, self.definition, decision):
            return size, size
        picked = answer(decision)

        def is_alike(other: int) -> bool:
            asked = replace(binding, axes={**binding.axes, axis: other})
            try:
                return answer(self._choose(asked, where, self._incumbent)) == picked
            except TilegymDBError:
                return False

        return span_around(size, is_alike)

    def _first_launch(self, bound: _Bound, launch: Launcher) -> Launcher:
        """A launch that can be undone, for an operator that overwrites an input; the one that follows it cannot.

        Compile and argument errors show at the first launch. Keeping a copy at every launch would cost what the kernel
        saves.
        """
        names = list(self.definition.inputs)
        overwritten = [names.index(name) for name in self.definition.in_place]

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

    # -- a kernel that cannot be used ---------------------------------------------------------------------------------

    def _failed(self, key: Any, bound: _Bound, error: Exception) -> None:
        """Retire a kernel that raised.

        Raises:
            SolutionError: an input may be overwritten already, so that stock code would compute something else.
        """
        failure = self._quarantine(key, str(bound.solution), bound.axes, error)
        bound.retire(failure.summary)
        if not bound.undoes:
            raise SolutionError(
                f"{failure.summary}. It may have overwritten {', '.join(self.definition.in_place)} before, so that "
                "stock code cannot repeat this call: run the step again from fresh inputs."
            ) from error

    def _quarantine(self, key: Any, solution: str, axes: dict[str, int], error: Exception) -> Failure:
        text = "".join(traceback.format_exception(error))
        failure = self._quarantined[key] = Failure(self.definition.name, solution, dict(axes), text)
        warnings.warn(f"tilegym-db: {failure.summary}; stock code runs instead", RuntimeWarning, stacklevel=5)
        return failure


def _with_outputs(inputs: tuple[Any, ...], allocate: Allocate) -> tuple[Any, ...]:
    """Inputs and outputs as they would be, without memory: enough to bind a call by shapes, strides and dtypes."""
    import torch

    shadows = tuple(
        torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        if isinstance(value, torch.Tensor)
        else value
        for value in inputs
    )
    outputs = allocate(*shadows)
    return (*shadows, *(outputs if isinstance(outputs, tuple) else (outputs,)))
