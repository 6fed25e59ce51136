"""Where the time of one call of a model goes, module class by module class, and what share verified kernels have of it.

On a GPU each module marks the stretch in which its forward runs, by a name that is drawn anew for each profile, and work counts
for the innermost mark around its launch, by the profiler's launch numbers. On a CPU the CPU time of this process counts, less
that of modules within: the profiler's durations are wall time there, and on a busy host say who had to wait. Names of kernels
play no part.
"""

from __future__ import annotations

import bisect
import contextlib
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from tilegym_db.integrations.transformers.call_site import CallSite
from tilegym_db.integrations.transformers.gpu_time import LAUNCHES, MARKS, WORK, exported

__all__ = ["ModuleTime", "cpu_share", "launched_us", "module_times", "time_of"]

MEASUREMENTS = 3
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
    """What a profile of a model counts: GPU time, or on a CPU the process's CPU time in its place."""
    return "gpu" if next(model.parameters()).device.type == "cuda" else "cpu"


def module_times(model: torch.nn.Module, call: Callable[[], Any]) -> tuple[list[ModuleTime], float]:
    """The time of each module class in one call, the longest first; and all of it, in microseconds.

    Args:
        model: whose modules are marked.
        call: runs it. It is called once more than it is measured: what loads or compiles at first is not counted.

    Of several measurements the least time of each module counts: whatever else the machine does only adds to one.
    """
    call()
    classes = {str(number): type(module) for number, module in enumerate(model.modules())}
    measure = _gpu_times if time_of(model) == "gpu" else _cpu_times
    measured = [measure(model, call) for _ in range(MEASUREMENTS)]
    by_class: dict[type[torch.nn.Module], list[float]] = defaultdict(lambda: [0, 0.0])
    for name, (calls, _) in measured[0].items():
        by_class[classes[name]][0] += calls
        by_class[classes[name]][1] += min(one[name][1] for one in measured)
    found = [ModuleTime(cls, int(calls), time_us) for cls, (calls, time_us) in by_class.items()]
    total = sum(item.time_us for item in found)
    return sorted(found, key=lambda item: (-item.time_us, item.module_class.__name__)), total


def _cpu_times(model: torch.nn.Module, call: Callable[[], Any]) -> dict[str, tuple[int, float]]:
    """Number of a module -> its calls and the CPU time of this process in its own code."""
    counts: dict[str, int] = defaultdict(int)
    times: dict[str, float] = defaultdict(float)
    open_: list[tuple[int, list[int]]] = []

    def begin(*_: Any) -> None:
        open_.append((time.process_time_ns(), [0]))

    def ending(name: str) -> Callable[..., None]:
        def end(*_: Any) -> None:
            began, inner = open_.pop()
            lasted = time.process_time_ns() - began
            counts[name] += 1
            times[name] += (lasted - inner[0]) / 1e3
            if open_:
                open_[-1][1][0] += lasted

        return end

    with contextlib.ExitStack() as undo:
        for number, module in enumerate(model.modules()):
            undo.callback(module.register_forward_pre_hook(begin).remove)
            undo.callback(module.register_forward_hook(ending(str(number)), always_call=True).remove)
        call()
    return {name: (count, times[name]) for name, count in counts.items()}


def _gpu_times(model: torch.nn.Module, call: Callable[[], Any]) -> dict[str, tuple[int, float]]:
    """Number of a module -> its calls and the GPU time of what its own code launched."""
    nonce, marks = secrets.token_hex(8), list[Any]()
    with contextlib.ExitStack() as undo:
        for number, module in enumerate(model.modules()):
            undo.callback(module.register_forward_pre_hook(_beginning(f"{nonce}:{number}", marks)).remove)
            undo.callback(module.register_forward_hook(_ending(marks), always_call=True).remove)
        events = _profiled(call)
    return {name.partition(":")[2]: found for name, found in launched_us(events, nonce).items()}


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


def _profiled(call: Callable[[], Any]) -> list[Mapping[str, Any]]:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profiler:
        call()
        torch.cuda.synchronize()
    return exported(profiler)


def launched_us(events: Iterable[Mapping[str, Any]], nonce: str) -> dict[str, tuple[int, float]]:
    """Mark -> how often it was made and the microseconds of GPU work that was launched in it and in no mark within it. Pure.

    Args:
        events: of a trace as the profiler exports it.
        nonce: what the names of marks begin with; marks of any other name are nobody's.
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
    times, counts = _launched(marks, launches, work), Counter(mark.name for mark in marks)
    return {name: (count, times.get(name, 0.0)) for name, count in counts.items()}


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
    """Share of this process's CPU time in a call that passes within calls which a verified kernel served.

    It stands for the share of GPU time on a machine without a GPU. A call that asked for a kernel and got none counts for stock
    code, and so does code that calls itself a kernel.
    """
    served = [0]
    call()
    with contextlib.ExitStack() as undo:
        for site in sites:
            undo.callback(setattr, site, "serve", site.serve)
            site.serve = _timed(site.serve, served)
        began = time.process_time_ns()
        call()
        total = time.process_time_ns() - began
    return served[0] / total if total else 0.0


def _timed(serve: Callable[..., Any], served: list[int]) -> Callable[..., Any]:
    def serve_and_count(*inputs: Any) -> Any:
        began = time.process_time_ns()
        outputs = serve(*inputs)
        if outputs is not None:
            served[0] += time.process_time_ns() - began
        return outputs

    return serve_and_count
