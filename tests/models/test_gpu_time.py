"""Where GPU time goes: events as the profiler writes them, and the marks that a patched model really makes."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from raising import raises

from tilegym_db import Catalog, patched
from tilegym_db.errors import UsageError
from tilegym_db.models.bench.generation import static_cache
from tilegym_db.models.gpu_time import MARK, NO_GPU, NO_MATCH, NO_WORK, GpuTime, attributed, exported, marked
from tilegym_db.models.report import PatchReport
from tilegym_db.resolver.device import device_gpu

MAIN, OTHER = 41, 42


def mark(definition: str, begin: float, end: float, thread: int = MAIN) -> dict[str, Any]:
    name = f"tilegym_db::{definition}"
    return {"ph": "X", "cat": "user_annotation", "name": name, "pid": 7, "tid": thread, "ts": begin, "dur": end - begin}


def launch(number: int, at: float, function: str = "cudaLaunchKernel", thread: int = MAIN) -> dict[str, Any]:
    kind = "cuda_driver" if function.startswith("cu") and not function.startswith("cuda") else "cuda_runtime"
    return {
        "ph": "X", "cat": kind, "name": function, "pid": 7, "tid": thread, "ts": at, "dur": 3.0,
        "args": {"correlation": number, "External id": 900 + number},
    }  # fmt: skip


def work(number: int, us: float, kind: str = "kernel", name: str = "rms_norm_kernel") -> dict[str, Any]:
    args = {"correlation": number, "stream": 7, "device": 0}
    return {"ph": "X", "cat": kind, "name": name, "pid": 0, "tid": 7, "ts": 1e6, "dur": us, "args": args}


NOISE: list[dict[str, Any]] = [
    {"ph": "M", "name": "process_name", "pid": 7, "args": {"name": "python"}},
    {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 7, "tid": MAIN, "ts": 1.0, "dur": 5.0, "args": {}},
    {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "pid": 7, "tid": MAIN, "ts": 0.0, "dur": 1e9},
    {"ph": "X", "cat": "gpu_user_annotation", "name": "tilegym_db::swiglu", "pid": 0, "tid": 7, "ts": 0.0, "dur": 1e9},
    {"ph": "X", "cat": "cuda_runtime", "name": "cudaEventRecord", "pid": 7, "tid": MAIN, "ts": 11.0, "dur": 1.0},
    {"ph": "i", "name": "Iteration Start", "ts": 0.0},
]


def test_gpu_work_belongs_to_the_mark_of_its_launch() -> None:
    found = attributed(
        [
            *NOISE,
            work(1, 30.0),  # before its launch in the file: order says nothing
            mark("swiglu", 100, 120),
            mark("rms_norm", 10, 20),
            launch(1, 12, "cuLaunchKernelEx"),
            launch(2, 20.5),  # just after the mark
            work(2, 50.0, name="tilegym_db::rms_norm"),  # names say nothing
            launch(3, 105),
            work(3, 5.0),
            launch(4, 110, "cudaMemsetAsync"),
            work(4, 5.0, "gpu_memset"),
            launch(5, 15, thread=OTHER),  # at the same time, by another thread
            work(5, 6.0),
            launch(6, 200, "cudaMemcpyAsync"),
            work(6, 4.0, "gpu_memcpy"),
        ]
    )
    assert found.total_us == 100
    assert found.by_definition == {"rms_norm": 30, "swiglu": 10}
    assert found.share == pytest.approx(0.4)
    assert found.shares == {"rms_norm": 0.3, "swiglu": 0.1}
    assert list(found.shares) == ["rms_norm", "swiglu"]
    assert (found.replayed_us, found.reason) == (0, "")


def test_launch_may_cause_several_works_or_be_missing() -> None:
    found = attributed([mark("swiglu", 0, 9), launch(1, 1), work(1, 2.0), work(1, 3.0), work(99, 5.0)])
    assert (found.total_us, found.by_definition) == (10, {"swiglu": 5})


@pytest.mark.parametrize("function", ["cudaGraphLaunch", "cudaGraphLaunch_ptsz", "cuGraphLaunch"])
def test_replays_of_graphs_are_nobodys_and_said_so(function: str) -> None:
    events = [mark("swiglu", 0, 9), launch(1, 1), work(1, 2.0), launch(2, 20, function), work(2, 3.0), work(2, 5.0)]
    found = attributed(events)
    assert (found.total_us, found.replayed_us, found.by_definition) == (10, 8, {"swiglu": 2})
    assert "replays of CUDA graphs" in str(PatchReport((), found))


def test_a_profile_without_gpu_work_has_no_share() -> None:
    found = attributed([*NOISE, mark("swiglu", 0, 9), launch(1, 1)])
    assert (found.share, found.shares, found.reason) == (None, {}, NO_WORK)


def test_threads_that_cannot_be_matched_are_no_share_of_zero() -> None:
    found = attributed([mark("swiglu", 0, 9), launch(1, 1, thread=OTHER), work(1, 2.0)])
    assert (found.share, found.reason) == (None, NO_MATCH)
    assert attributed([launch(1, 1), work(1, 2.0)]).share == 0  # no call site launched anything


def test_a_report_shows_the_profile_as_text_and_as_json() -> None:
    report = PatchReport((), GpuTime(200.0, {"rms_norm": 20.0, "swiglu": 30.0}, 50.0))
    lines = [line.split("│")[1:-1] for line in str(report).splitlines() if "│" in line]
    cells = [tuple(cell.strip() for cell in line) for line in lines]
    assert "25.0% in verified kernels" in str(report)
    assert cells[-5:] == [
        ("swiglu", "30.0", "15.0%"),
        ("rms_norm", "20.0", "10.0%"),
        ("replays of CUDA graphs", "50.0", "25.0%"),
        ("everything else", "100.0", "50.0%"),
        ("all", "200.0", "100.0%"),
    ]
    content = json.loads(json.dumps(report.to_dict()))["gpu_time"]
    assert (content["share"], content["shares"]) == (0.25, {"swiglu": 0.15, "rms_norm": 0.1})
    assert "gpu_time" not in PatchReport(()).to_dict()
    with raises(UsageError, "nothing_profiled", "handle.report(profile="):
        PatchReport(()).gpu_table()


def test_profile_without_a_gpu_reports_it_and_makes_no_call(kernels: Catalog, build: Any) -> None:
    with patched(build(), catalog=kernels) as handle:
        assert handle.report().gpu_time is None
        report = handle.report(profile=lambda: pytest.fail("there is nothing to see"))
        assert report.gpu_time == handle.report().gpu_time == GpuTime(reason=NO_GPU)
        assert NO_GPU in str(report)
        assert report.to_dict()["gpu_time"]["reason"] == NO_GPU


def names_of_marks(call: Any) -> list[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        call()
    events = [event for event in exported(profiler) if event.get("cat") == "user_annotation"]
    return sorted(str(event["name"]).removeprefix(MARK) for event in events if str(event["name"]).startswith(MARK))


@pytest.mark.turn("tilegym_db/models/gpu_time.py")  # profiles
@pytest.mark.parametrize("compiled", [False, True])
def test_kernel_calls_are_marked_only_during_a_profile(
    compiled: bool, kernels: Catalog, build: Any, prompt: Any, logits: Any
) -> None:
    torch.compiler.reset()
    model, ids = build(num_hidden_layers=1), prompt()
    with patched(model, catalog=kernels) as handle:
        run = torch.compile(model, backend="aot_eager") if compiled else model
        logits(run, ids)
        before = handle.report().hits()
        with marked(handle.sites):
            found = names_of_marks(lambda: logits(run, ids))
        served = {op: count - before[op] for op, count in handle.report().hits().items() if count > before[op]}
        assert {name: found.count(name) for name in found} == served
        assert len(served) == (3 if compiled else 6)
        assert names_of_marks(lambda: logits(run, ids)) == []


def test_gradients_are_marked_under_their_own_name(training_kernels: Catalog, build: Any, prompt: Any) -> None:
    model, ids = build(num_hidden_layers=1).train(), prompt()
    with patched(model, catalog=training_kernels) as handle:
        with marked(handle.sites):
            found = names_of_marks(lambda: model(ids).logits.sum().backward())
        assert {"rms_norm", "rms_norm_backward", "swiglu", "swiglu_backward"} <= set(found)
        assert names_of_marks(lambda: model(ids).logits.sum().backward()) == []


# -- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu_kernels(shop: Any) -> Catalog:
    """As ``kernels``, published for the GPU in this machine."""
    catalog: Catalog = shop.offer(device=device_gpu(torch.device("cuda", 0)))
    return catalog


@pytest.mark.gpu
def test_share_of_a_real_profile_equals_that_of_kernel_calls(
    gpu_kernels: Catalog, build: Any, prompt: Any, logits: Any
) -> None:
    model, ids = build().cuda(), prompt().cuda()
    with patched(model, catalog=gpu_kernels) as handle:
        found = handle.profile(lambda: logits(model, ids))
        assert found.by_definition.keys() == {op for op, count in handle.report().hits().items() if count}
        assert found.share is not None
        assert 0 < found.share < 1
    with patched(model, catalog=gpu_kernels, ops=()) as handle:
        assert handle.profile(lambda: logits(model, ids)).share == 0


@pytest.mark.gpu
def test_compiled_decoding_in_cuda_graphs_equals_stock(gpu_kernels: Catalog, build: Any, prompt: Any) -> None:
    torch.compiler.reset()
    model, ids = build().cuda(), prompt(2).cuda()
    stock = static_cache(model, ids, 8)
    want = [stock().tokens.tolist() for _ in range(3)][-1]
    with patched(model, catalog=gpu_kernels) as handle:
        generate = static_cache(model, ids, 8)
        first = generate().tokens.tolist()
        served = handle.report().hits()
        assert [first, generate().tokens.tolist(), generate().tokens.tolist()] == [want] * 3
        assert served["rms_norm"] > 5
        assert not handle.report().failures
        assert handle.profile(generate).replayed_us > 0
