"""Where the time of one call of a model goes, module class by module class, and what share verified kernels have of it.

Each module marks the stretch in which its forward runs, by a name that is drawn anew for each profile: code that knows it can
only be this module's. On a GPU, work counts for the innermost mark around its launch, by the profiler's launch numbers. On a
CPU the time between the ends of a mark counts, less that of the marks within it. Names of kernels play no part.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from tilegym_db.integrations.transformers.call_site import CallSite
from tilegym_db.integrations.transformers.gpu_time import LAUNCHES, MARKS, WORK, exported

__all__ = ["ModuleTime", "cpu_share", "exclusive_us", "module_times", "time_of"]

PROFILES = 3
"""Of a model whose pieces are ranked."""
TimeOf = Literal["gpu", "cpu"]


@dataclass(frozen=True)
class ModuleTime:
    """Time that the modules of one class spent in code of their own, in one call, without that of modules within them."""

    module_class: type[torch.nn.Module]
    calls: int
    time_us: float


class _Mark(NamedTuple):
    begin: float
    end: float
    name: str


def time_of(model: torch.nn.Module) -> TimeOf:
    """What a profile of a model counts: GPU time, or on a CPU the profiler's CPU time in its place."""
    return "gpu" if next(model.parameters()).device.type == "cuda" else "cpu"


def module_times(model: torch.nn.Module, call: Callable[[], Any]) -> tuple[list[ModuleTime], float]:
    """The time of each module class in one call, the longest first; and all of it, in microseconds.

    Args:
        model: whose modules are marked.
        call: runs it. It is called once more than it is profiled: what loads or compiles at first is not counted.

    Of several profiles the least time of each module counts: whatever else the machine does only adds to one.
    """
    call()
    nonce, classes = secrets.token_hex(8), {}
    marks: list[Any] = []
    with contextlib.ExitStack() as undo:
        for number, module in enumerate(model.modules()):
            name = f"{nonce}:{number}"
            classes[name] = type(module)
            undo.callback(module.register_forward_pre_hook(_beginning(name, marks)).remove)
            undo.callback(module.register_forward_hook(_ending(marks), always_call=True).remove)
        profiles = [exclusive_us(_profiled(call, f"{nonce}:call"), nonce, time_of(model)) for _ in range(PROFILES)]
    times = {name: (calls, min(one[name][1] for one in profiles)) for name, (calls, _) in profiles[0].items()}
    total = sum(time_us for _, time_us in times.values())
    by_class: dict[type[torch.nn.Module], list[float]] = defaultdict(lambda: [0, 0.0])
    for name, (calls, time_us) in times.items():
        if name in classes:
            by_class[classes[name]][0] += calls
            by_class[classes[name]][1] += time_us
    found = [ModuleTime(cls, int(calls), time_us) for cls, (calls, time_us) in by_class.items()]
    return sorted(found, key=lambda item: (-item.time_us, item.module_class.__name__)), total


def _beginning(name: str, marks: list[Any]) -> Callable[..., None]:
    def begin(*_: Any) -> None:
        mark: Any = torch.profiler.record_function(name)
        mark.__enter__()
        marks.append(mark)

    return begin


def _ending(marks: list[Any]) -> Callable[..., None]:
    def end(*_: Any) -> None:
        marks.pop().__exit__(None, None, None)

    return end


def _profiled(call: Callable[[], Any], whole: str) -> list[Mapping[str, Any]]:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
        torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profiler:
        with torch.profiler.record_function(whole):
            call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return exported(profiler)


def exclusive_us(events: Iterable[Mapping[str, Any]], nonce: str, counted: TimeOf) -> dict[str, tuple[int, float]]:
    """Mark -> how often it was made and the microseconds that count for it and for no mark within it. Pure.

    Args:
        events: of a trace as the profiler exports it.
        nonce: what the names of marks begin with; marks of any other name are nobody's.
        counted: ``gpu`` adds up the work that was launched within a mark, ``cpu`` the time that it lasted.
    """
    marks: list[_Mark] = []
    launches: dict[Any, float] = {}
    work: list[tuple[Any, float]] = []
    for event in events:
        kind, name = event.get("cat"), str(event.get("name", ""))
        if kind in MARKS and name.startswith(f"{nonce}:"):
            begin = float(event["ts"])
            marks.append(_Mark(begin, begin + float(event["dur"]), name))
        elif kind in LAUNCHES and "correlation" in event.get("args", {}):
            launches[event["args"]["correlation"]] = float(event["ts"])
        elif kind in WORK:
            work.append((event.get("args", {}).get("correlation"), float(event["dur"])))
    marks.sort(key=lambda mark: (mark.begin, -mark.end))
    counts: dict[str, int] = defaultdict(int)
    for mark in marks:
        counts[mark.name] += 1
    times = _own_durations(marks) if counted == "cpu" else _launched(marks, launches, work)
    return {name: (count, times.get(name, 0.0)) for name, count in counts.items()}


def _own_durations(marks: Sequence[_Mark]) -> dict[str, float]:
    times: dict[str, float] = defaultdict(float)
    around: list[_Mark] = []
    for mark in marks:
        while around and around[-1].end <= mark.begin:
            around.pop()
        times[mark.name] += mark.end - mark.begin
        if around:
            times[around[-1].name] -= mark.end - mark.begin
        around.append(mark)
    return times


def _launched(
    marks: Sequence[_Mark], launches: Mapping[Any, float], work: Iterable[tuple[Any, float]]
) -> dict[str, float]:
    times: dict[str, float] = defaultdict(float)
    for correlation, duration_us in work:
        moment = launches.get(correlation)
        index = -1 if moment is None else bisect.bisect_right(marks, moment, key=lambda mark: mark.begin) - 1
        while index >= 0 and moment is not None and marks[index].end < moment:
            index -= 1
        if index >= 0:
            times[marks[index].name] += duration_us
    return times


def cpu_share(call: Callable[[], Any], sites: Iterable[CallSite]) -> float:
    """Share of the CPU time of a call that passes within calls which a verified kernel served, by the profiler.

    It stands for the share of GPU time on a machine without a GPU. A call that asked for a kernel and got none counts for stock
    code; so does whatever calls itself a mark of this package.
    """
    nonce, numbers = secrets.token_hex(8), itertools.count()
    served: set[str] = set()
    call()
    with _marked(sites, nonce, numbers, served):
        events = _profiled(call, f"{nonce}:call")
    lasted = {
        str(event["name"]): float(event["dur"])
        for event in events
        if event.get("cat") in MARKS and str(event.get("name", "")).startswith(f"{nonce}:")
    }
    total = lasted.get(f"{nonce}:call", 0.0)
    return sum(lasted.get(name, 0.0) for name in served) / total if total else 0.0


@contextlib.contextmanager
def _marked(sites: Iterable[CallSite], nonce: str, numbers: Iterator[int], served: set[str]) -> Iterator[None]:
    with contextlib.ExitStack() as undo:
        for site in sites:
            undo.callback(setattr, site, "serve", site.serve)
            site.serve = _marking(site.serve, nonce, numbers, served)
        yield


def _marking(serve: Callable[..., Any], nonce: str, numbers: Iterator[int], served: set[str]) -> Callable[..., Any]:
    def serve_within_a_mark(*inputs: Any) -> Any:
        name = f"{nonce}:{next(numbers)}"
        with torch.profiler.record_function(name):
            outputs = serve(*inputs)
        if outputs is not None:
            served.add(name)
        return outputs

    return serve_within_a_mark
