"""What a call site remembers of a kind of call: the launcher that serves it, and for which sizes it holds."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from tilegym_db.records import Definition
from tilegym_db.resolver.loader import Launcher

__all__ = ["Bound", "Preview", "Spans", "undoable"]


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
    """A launch that can be undone, for an operator that overwrites an input; the one that follows it cannot.

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
