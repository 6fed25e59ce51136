"""The share of GPU time that verified kernels take, from a profile of one call of a patched model.

During the profile, each call site marks the stretch of host time in which it launches a kernel. The profiler numbers every
launch and writes the number on the resulting GPU work. Work counts as a verified kernel's if its launch lies within a mark of
the same thread. The names of kernels play no part.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import json
import secrets
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from tilegym_db.models.call_site import CallSite
from tilegym_db.models.called_functions import Around, Seam, watched

MARK = "tilegym_db::"
"""Prefix of the name of a mark; the Definition follows."""
MARKS = ("user_annotation",)
LAUNCHES = ("cuda_runtime", "cuda_driver")
WORK = ("kernel", "gpu_memcpy", "gpu_memset")
GRAPH_LAUNCHES = ("cudaGraphLaunch", "cuGraphLaunch")
"""CUDA functions that launch a whole graph; newer ones have the same name with a suffix."""
NO_GPU = "this machine has no GPU, so the call took no GPU time"
NO_WORK = (
    "the profiler recorded no GPU work: the model is not on a GPU, or CUPTI has no permission to profile (in a container, "
    "grant it)"
)

NO_MATCH = "the profiler names threads in a way that links no launch to a mark, so GPU work cannot be attributed"


@dataclass(frozen=True)
class GpuTime:
    """GPU time of one call in microseconds: kernels, copies and fills, summed over all streams.

    ``replayed_us`` is the time of replayed CUDA graphs. A graph may contain kernels of this package, but a replay does not
    show them, so it does not count for them. ``reason`` says why there are no figures; it is empty if there are.
    """

    total_us: float = 0.0
    by_definition: Mapping[str, float] = field(default_factory=dict)
    replayed_us: float = 0.0
    reason: str = ""

    @property
    def share(self) -> float | None:
        """Time in verified kernels divided by all GPU time; None if there are no figures."""
        return None if self.reason or not self.total_us else sum(self.by_definition.values()) / self.total_us

    @property
    def shares(self) -> dict[str, float]:
        """Definition -> its share of all GPU time, the largest first."""
        largest_first = sorted(self.by_definition.items(), key=lambda item: (-item[1], item[0]))
        return {name: time_us / self.total_us for name, time_us in largest_first} if self.total_us else {}

    def to_dict(self) -> dict[str, Any]:
        """Return the content, ready for JSON."""
        return {
            "total_us": self.total_us,
            "by_definition": dict(self.by_definition),
            "replayed_us": self.replayed_us,
            "share": self.share,
            "shares": self.shares,
            "reason": self.reason,
        }


class _Thread(NamedTuple):
    """The process and thread of a launch or a mark."""

    process: Any
    thread: Any


def attributed(events: Iterable[Mapping[str, Any]]) -> GpuTime:
    """Sum the GPU work of a profile by the Definition whose mark surrounds the launch."""
    marks: dict[_Thread, list[tuple[float, float, str]]] = defaultdict(list)
    launches: dict[Any, tuple[_Thread, float, str]] = {}
    work: list[tuple[Any, float]] = []
    for event in events:
        kind, name = event.get("cat"), str(event.get("name", ""))
        if kind in MARKS and name.startswith(MARK):
            begin = float(event["ts"])
            marks[_thread_of(event)].append((begin, begin + float(event["dur"]), name.removeprefix(MARK)))
        elif kind in LAUNCHES and "correlation" in event.get("args", {}):
            launches[event["args"]["correlation"]] = (_thread_of(event), float(event["ts"]), name)
        elif kind in WORK:
            work.append((event.get("args", {}).get("correlation"), float(event["dur"])))
    if not work:
        return GpuTime(reason=NO_WORK)
    if marks and not any(thread in marks for thread, _, _ in launches.values()):
        return GpuTime(reason=NO_MATCH)
    for of_thread in marks.values():
        of_thread.sort()
    by_definition: dict[str, float] = defaultdict(float)
    total_us = replayed_us = 0.0
    for correlation, duration_us in work:
        total_us += duration_us
        thread, at, function = launches.get(correlation, (None, 0.0, ""))
        definition = None if thread is None else _mark_at(marks.get(thread, []), at)
        if definition is not None:
            by_definition[definition] += duration_us
        elif function.startswith(GRAPH_LAUNCHES):
            replayed_us += duration_us
    return GpuTime(total_us, dict(sorted(by_definition.items())), replayed_us)


def _thread_of(event: Mapping[str, Any]) -> _Thread:
    return _Thread(event.get("pid"), event.get("tid"))


def _mark_at(marks: Sequence[tuple[float, float, str]], moment: float) -> str | None:
    """Return the Definition of the mark around a moment.

    The marks of one thread do not overlap, because a kernel calls no call site.
    """
    index = bisect.bisect_right(marks, moment, key=lambda mark: mark[0]) - 1
    if index < 0 or moment > marks[index][1]:
        return None
    return marks[index][2]


Serve = Callable[..., Any]


def _marking(definition: str, serve: Serve) -> Serve:
    name = MARK + definition

    def serve_within_a_mark(*inputs: Any) -> Any:
        with torch.profiler.record_function(name):
            return serve(*inputs)

    return serve_within_a_mark


@contextlib.contextmanager
def marked(sites: Iterable[tuple[str, CallSite]]) -> Iterator[None]:
    """Make call sites, each with the name of its Definition, mark their kernel launches inside a ``with`` block."""
    with contextlib.ExitStack() as undo:
        for definition, site in sites:
            undo.callback(setattr, site, "serve", site.serve)
            site.serve = _marking(definition, site.serve)
            if site.training is not None:
                undo.enter_context(site.training.served_through(_marking))
        yield


def profiled(call: Callable[[], Any], sites: Iterable[tuple[str, CallSite]]) -> GpuTime:
    """Run a call twice, the second time under the profiler, and return its GPU time by the call sites of its patch."""
    if not torch.cuda.is_available():
        return GpuTime(reason=NO_GPU)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    call()  # loads and compiles kernels
    torch.cuda.synchronize()
    with marked(sites), torch.profiler.profile(activities=activities) as profiler:
        call()
        torch.cuda.synchronize()
    return attributed(exported(profiler))


def exported(profiler: Any) -> list[Mapping[str, Any]]:
    """Return the events of a finished profile."""
    with tempfile.TemporaryDirectory(prefix="tilegym-db-") as folder:
        path = Path(folder) / "profile.json"
        profiler.export_chrome_trace(str(path))
        events: list[Mapping[str, Any]] = json.loads(path.read_bytes())["traceEvents"]
    return events


# ---- time by module class -------------------------------------------------------------------------
# The time of one call of a model by module class, and the share of verified kernels.
#
# On a GPU, each module marks the stretch in which its forward runs. The name of the marks is drawn anew for each profile.
# GPU work counts for the innermost mark around its launch, by the profiler's launch numbers. On a CPU, the CPU time of this
# process counts, less that of inner modules. The profiler's durations are wall time there and include waiting on a busy host.

MEASUREMENTS = 3
"""Measurements of a model whose module classes are ranked."""
TimeOf = Literal["gpu", "cpu"]


@dataclass(frozen=True)
class ModuleTime:
    """Time that the modules of one class, or a function that they call, spent in one call.

    It is without the time of modules and watched functions inside them.
    """

    module_class: type[torch.nn.Module]
    calls: int
    time_us: float
    function: str = ""
    """The function, as :class:`Seam` names it; empty for the modules."""


class _Mark(NamedTuple):
    begin: float
    end: float
    name: str


def time_of(model: torch.nn.Module) -> TimeOf:
    """Return the clock that a profile of a model uses: GPU time, or the CPU time of the process on a CPU."""
    return "gpu" if next(model.parameters()).device.type == "cuda" else "cpu"


def module_times(
    model: torch.nn.Module, call: Callable[[], Any], seams: Sequence[Seam] = ()
) -> tuple[list[ModuleTime], float]:
    """Return the time of each module class and watched function in one call, the longest first, and the total.

    Times are in microseconds.

    Args:
        call: runs the model. One call before the measurements loads and compiles kernels.
        seams: the functions whose time is separate from that of the modules that call them.

    Each module's least time over several measurements counts, because other load on the machine only adds time.
    """
    call()
    owners = {str(number): Seam(type(module)) for number, module in enumerate(model.modules())}
    names = {seam: f"f{number}" for number, seam in enumerate(seams)}
    owners |= {name: seam for seam, name in names.items()}
    measure = _gpu_times if time_of(model) == "gpu" else _cpu_times
    measured = [measure(model, call, names) for _ in range(MEASUREMENTS)]
    by_seam: dict[Seam, list[float]] = defaultdict(lambda: [0, 0.0])
    for name, (calls, _) in measured[0].items():
        by_seam[owners[name]][0] += calls
        by_seam[owners[name]][1] += min(one[name][1] for one in measured if name in one)
    found = [ModuleTime(seam.module_class, int(calls), us, seam.function) for seam, (calls, us) in by_seam.items()]
    total = sum(item.time_us for item in found)
    return sorted(found, key=lambda item: (-item.time_us, item.module_class.__name__, item.function)), total


def _between(names: Mapping[Seam, str], begin: Callable[[str], Any], end: Callable[[str], Any]) -> Around:
    """Return a wrapper for watched functions: it calls ``begin`` with the name, then the function, then ``end``."""

    def around(seam: Seam, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def marked_function(*args: Any, **kwargs: Any) -> Any:
            begin(names[seam])
            try:
                return function(*args, **kwargs)
            finally:
                end(names[seam])

        return marked_function

    return around


def _cpu_times(
    model: torch.nn.Module, call: Callable[[], Any], names: Mapping[Seam, str]
) -> dict[str, tuple[int, float]]:
    """Return number of a module or name of a function -> its calls and the CPU time of this process in its own code."""
    counts: dict[str, int] = defaultdict(int)
    times: dict[str, float] = defaultdict(float)
    open_: list[tuple[int, list[int]]] = []

    def begin(*_: Any) -> None:
        open_.append((time.process_time_ns(), [0]))

    def end(name: str) -> None:
        began, inner = open_.pop()
        lasted = time.process_time_ns() - began
        counts[name] += 1
        times[name] += (lasted - inner[0]) / 1e3
        if open_:
            open_[-1][1][0] += lasted

    def ending(name: str) -> Callable[..., None]:
        return lambda *_: end(name)

    with contextlib.ExitStack() as undo:
        for number, module in enumerate(model.modules()):
            undo.callback(module.register_forward_pre_hook(begin).remove)
            undo.callback(module.register_forward_hook(ending(str(number)), always_call=True).remove)
        undo.enter_context(watched(model, names, _between(names, begin, end)))
        call()
    return {name: (count, times[name]) for name, count in counts.items()}


def _gpu_times(
    model: torch.nn.Module, call: Callable[[], Any], names: Mapping[Seam, str]
) -> dict[str, tuple[int, float]]:
    """Return number of a module or name of a function -> its calls and the GPU time of the work that its own code launched."""
    nonce, marks = secrets.token_hex(8), list[Any]()

    def begin(name: str) -> None:
        _beginning(f"{nonce}:{name}", marks)()

    def end(name: str) -> None:
        _ending(marks)()

    with contextlib.ExitStack() as undo:
        for number, module in enumerate(model.modules()):
            undo.callback(module.register_forward_pre_hook(_beginning(f"{nonce}:{number}", marks)).remove)
            undo.callback(module.register_forward_hook(_ending(marks), always_call=True).remove)
        undo.enter_context(watched(model, names, _between(names, begin, end)))
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
    """Return mark -> how often it was made, and the microseconds of GPU work launched in it but in no inner mark. Pure.

    Args:
        nonce: the prefix of the names of marks; marks with another prefix are ignored.
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
    """Return the share of this process's CPU time in a call that verified kernels took.

    On a machine without a GPU it stands for the share of GPU time. A call that asked for a kernel and got none counts as
    stock code. So does code that calls itself a kernel.
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
