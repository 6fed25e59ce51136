"""How much of the GPU's time goes into verified kernels, from a profile of one call of a patched model.

While it is profiled, each call site marks the stretch of host time in which it launches a kernel. The profiler numbers every
launch and writes that number on the GPU work that came of it: what was launched within a mark, by the thread that made the
mark, is a verified kernel's. What kernels are called plays no part.
"""

from __future__ import annotations

import bisect
import contextlib
import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tilegym_db.integrations.transformers.call_site import CallSite

__all__ = ["GpuTime", "attributed", "marked", "profiled"]

MARK = "tilegym_db::"
"""Before the Definition, in the name of a mark."""
MARKS = ("user_annotation",)
LAUNCHES = ("cuda_runtime", "cuda_driver")
WORK = ("kernel", "gpu_memcpy", "gpu_memset")
GRAPH_LAUNCHES = ("cudaGraphLaunch", "cuGraphLaunch")
"""Functions of CUDA that launch a whole graph; newer ones of the same name have an ending."""
NO_GPU = "there is no GPU: no GPU time was spent"
NO_WORK = (
    "the profiler saw no work on a GPU: the model is not on one, or CUPTI is not allowed here (in a container, it "
    "needs permission to profile)"
)

NO_MATCH = "no launch is of a thread that made a mark, as this profiler names threads: what is whose cannot be said"


@dataclass(frozen=True)
class GpuTime:
    """GPU time of one call in microseconds: kernels, copies and fills, added up over all streams.

    ``replayed_us`` are replays of CUDA graphs. What was recorded into one may well be kernels of this package; in a replay
    nothing says so, and it is not counted as theirs. ``reason`` says why there are no figures, empty where there are.
    """

    total_us: float = 0.0
    by_definition: Mapping[str, float] = field(default_factory=dict)
    replayed_us: float = 0.0
    reason: str = ""

    @property
    def share(self) -> float | None:
        """Time in verified kernels over all GPU time; None where there are no figures."""
        return None if self.reason or not self.total_us else sum(self.by_definition.values()) / self.total_us

    @property
    def shares(self) -> dict[str, float]:
        """Definition -> its part of all GPU time, the largest first."""
        largest_first = sorted(self.by_definition.items(), key=lambda item: (-item[1], item[0]))
        return {name: time_us / self.total_us for name, time_us in largest_first} if self.total_us else {}

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready content."""
        return {
            "total_us": self.total_us,
            "by_definition": dict(self.by_definition),
            "replayed_us": self.replayed_us,
            "share": self.share,
            "shares": self.shares,
            "reason": self.reason,
        }


class _Thread(NamedTuple):
    """Where a launch or a mark was made."""

    process: Any
    thread: Any


def attributed(events: Iterable[Mapping[str, Any]]) -> GpuTime:
    """Add up the GPU work of a profile, by the Definition in whose mark it was launched.

    Args:
        events: those of a trace as the profiler exports it (Chrome's format, times in microseconds). Kinds that are not
            known are ignored.
    """
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
    """The Definition of the mark around a moment. Marks of one thread follow each other: a kernel calls no call site."""
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
    """Let call sites mark where they launch kernels, forward and for gradients, for the length of a ``with`` block.

    Args:
        sites: each with the name of its Definition.
    """
    with contextlib.ExitStack() as undo:
        for definition, site in sites:
            undo.callback(setattr, site, "serve", site.serve)
            site.serve = _marking(definition, site.serve)
            if site.training is not None:
                undo.enter_context(site.training.served_through(_marking))
        yield


def profiled(call: Callable[[], Any], sites: Iterable[tuple[str, CallSite]]) -> GpuTime:
    """Run a call twice, the second time under the profiler, and say where its GPU time went.

    Args:
        call: runs the model.
        sites: the call sites of its patch, each with the name of its Definition.
    """
    if not torch.cuda.is_available():
        return GpuTime(reason=NO_GPU)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    call()  # loads and compiles what is not yet
    torch.cuda.synchronize()
    with marked(sites), torch.profiler.profile(activities=activities) as profiler:
        call()
        torch.cuda.synchronize()
    return attributed(exported(profiler))


def exported(profiler: Any) -> list[Mapping[str, Any]]:
    """The events of a profile that has ended."""
    with tempfile.TemporaryDirectory(prefix="tilegym-db-") as folder:
        path = Path(folder) / "profile.json"
        profiler.export_chrome_trace(str(path))
        events: list[Mapping[str, Any]] = json.loads(path.read_bytes())["traceEvents"]
    return events
