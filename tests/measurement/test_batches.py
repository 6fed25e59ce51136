"""What is verified side by side, and what is timed while nothing else runs: pure grouping, and real runs of it."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tilegym_db.catalog import Catalog
from tilegym_db.measurement import local_executor
from tilegym_db.measurement.local_executor import (
    GPU_RUNNER_BYTES,
    MAX_BATCH_WORKLOADS,
    MAX_COMPILED_WORKLOADS,
    SUPERVISOR_BYTES,
    Capacity,
    LocalExecutor,
    make_definition_groups,
    one_task_each,
)
from tilegym_db.measurement.machine import Machine, cpu_machine
from tilegym_db.measurement.plan import DefinitionPlan, Options, make_plan
from tilegym_db.measurement.run_setup import RunContext
from tilegym_db.measurement.runner import BufferPool, Runner
from tilegym_db.measurement.timing import TimingBudget
from tilegym_db.records import Definition, Trace
from tilegym_db.records.workload import Case
from tilegym_db.sandbox import scan
from tilegym_db.sandbox.worker import WorkerHasNoMemory, WorkerProcess
from tilegym_db.verification import expected
from tilegym_db.verification.expected import OracleCase
from tilegym_db.verification.inputs import BlobReader
from tilegym_db.verification.session import Verification
from tilegym_db.verification.verifier import Failure
from tilegym_db.verification.worker_handle import SCREEN, WorkerHandle

H200 = Machine("cuda:0", "h200", "NVIDIA H200", "sm_90", memory_bytes=140 << 30)
WIDE = Capacity(runners=16, contents_bytes=1 << 30, workloads=3)
SIZES = tuple({"axes": {"M": rows, "N": 8}} for rows in (3, 5, 7, 11))
COPY = "def run(x, weight, factor, out):\n    out.copy_(x * weight * factor)\n"
DIES_LATE = """import os
def run(x, weight, factor, out):
    if tuple(x.shape) == (7, 8):
        os._exit(3)
    out.copy_(x * weight * factor)
"""


@pytest.fixture
def plans(make_catalog, tmp_path) -> Callable[..., list[DefinitionPlan]]:
    """Two operators with a Solution each beside the stock code, and the same four sizes."""

    def make(source: str = COPY) -> list[DefinitionPlan]:
        make_catalog(tmp_path / "catalog", {"row_scale_kernel": source}, SIZES)
        make_catalog(tmp_path / "catalog", {"row_times_kernel": COPY}, SIZES, {"name": "row_times"})
        return make_plan(Catalog((tmp_path / "catalog",)), cpu_machine(), Options(), ()).definitions

    return make


def shape(plans: list[DefinitionPlan], capacity: Capacity) -> list[list[list[str]]]:
    """Groups of batches of ``definition:M``."""
    return [
        [
            [f"{plan.definition.name}:{workload.axes['M']}" for plan, workload in batch]
            for batch in definition_group.batches
        ]
        for definition_group in make_definition_groups(plans, capacity)
    ]


def test_operators_share_a_batch_with_a_few_workloads_at_a_time(plans):
    first = [f"{name}:{rows}" for name in ("row_scale", "row_times") for rows in (3, 5, 7)]
    assert shape(plans(), WIDE) == [[first, ["row_scale:11", "row_times:11"]]]


def test_what_workers_there_is_room_for_live_at_the_same_time(plans):
    definition_groups = make_definition_groups(plans(), Capacity(runners=3, contents_bytes=1 << 30, workloads=9))
    assert [[plan.definition.name for plan in definition_group.plans] for definition_group in definition_groups] == [
        ["row_scale"],
        ["row_times"],
    ]


@pytest.mark.parametrize("configs", [("tuned",), ("again",), ("tuned", "again")])
def test_workers_under_configs_want_room_as_well(plans, configs):
    (one, other) = plans()
    uuid = one.workloads[0].uuid
    if "tuned" in configs:
        one.tuned["row_scale_kernel", uuid] = {"B": 2}
    if "again" in configs:  # among them the tuned config, and the defaults, which have a worker already
        same = [("row_scale_kernel", {"B": 2})] if "tuned" in configs else []
        one.likely_fastest[uuid] = [("row_scale_kernel", {}), ("row_scale_kernel", {"B": 4}), *same]
    more = 3 * len(configs)  # in each of three workloads of a batch
    assert (
        len(make_definition_groups([one, other], Capacity(runners=4 + more, contents_bytes=1 << 30, workloads=3))) == 1
    )
    assert (
        len(make_definition_groups([one, other], Capacity(runners=3 + more, contents_bytes=1 << 30, workloads=3))) == 2
    )


def test_batch_with_torch_compile_has_fewer_workloads(make_catalog, tmp_path):
    many = tuple({"axes": {"M": rows, "N": 8}} for rows in range(3, 3 + MAX_BATCH_WORKLOADS + 1))
    make_catalog(tmp_path / "catalog", {"row_scale_kernel": COPY}, many)
    compiled = "import torch\n\n\n@torch.compile\n" + COPY
    make_catalog(tmp_path / "catalog", {"row_times_kernel": compiled}, many, {"name": "row_times"})
    plans = make_plan(Catalog((tmp_path / "catalog",)), cpu_machine(), Options(), ()).definitions
    capacity = Capacity(runners=16, contents_bytes=1 << 30, workloads=MAX_BATCH_WORKLOADS)
    (group,) = make_definition_groups(plans, capacity)
    sizes = [Counter(plan.definition.name for plan, _ in batch) for batch in group.batches]
    assert sizes == [
        {"row_scale": MAX_BATCH_WORKLOADS, "row_times": MAX_COMPILED_WORKLOADS},
        {"row_scale": 1, "row_times": MAX_COMPILED_WORKLOADS},
        {"row_times": MAX_BATCH_WORKLOADS + 1 - 2 * MAX_COMPILED_WORKLOADS},
    ]


@pytest.mark.turn("tilegym_db/measurement/local_executor.py")  # whole bench runs
def test_no_operator_waits_for_all_contents_of_another(plans, tmp_path, monkeypatch):
    drawn: list[str] = []
    draw = local_executor._draw

    def watched(workload_run, context):
        drawn.append(workload_run.plan.definition.name)
        return draw(workload_run, context)

    monkeypatch.setattr(local_executor, "_draw", watched)
    run(plans(), tmp_path / "scratch", WIDE)
    assert drawn == ["row_scale", "row_times"] * 4


def test_contents_that_do_not_fit_wait_and_one_always_fits(plans):
    assert shape(plans(), Capacity(runners=16, contents_bytes=0, workloads=9)) == [
        [[f"{name}:{rows}"] for name in ("row_scale", "row_times") for rows in (3, 5, 7, 11)]
    ]


def test_workloads_that_nothing_is_planned_for_are_in_no_batch(plans):
    (one, _) = plans()
    wanted = one.workloads[2]
    one.pairs = {(name, uuid) for name, uuid in one.pairs if uuid == wanted.uuid}
    assert shape([one], WIDE) == [[["row_scale:7"]]]


def test_processor_measures_one_workload_at_a_time_a_gpu_several():
    here = Capacity.of(cpu_machine(), 64 << 30)
    assert (here.runners, here.contents_bytes, here.workloads) == (1, 0, 1)
    large, small = Capacity.of(H200, 128 << 30, processors=16), Capacity.of(H200, 12 << 30, processors=16)
    assert large.workloads == MAX_BATCH_WORKLOADS
    assert large.runners > small.runners >= 1
    assert Capacity.of(H200, 512 << 30, processors=16).runners == 16  # traces come after each group
    assert Capacity.of(H200, 512 << 30, processors=2).runners == 8
    assert 0 < large.contents_bytes < H200.memory_bytes


class Watch:
    """Counts verifications under way whenever a block is timed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.verifying: set[int] = set()
        self.most = 0
        self.seen: list[int] = []
        self._lock = threading.Lock()
        verify, time_block = Verification.verify, Runner.time_block

        @functools.wraps(verify)
        def watched(verification: Verification, *arguments: object) -> object:
            with self._lock:
                self.verifying.add(id(verification))
                self.most = max(self.most, len(self.verifying))
            try:
                return verify(verification, *arguments)
            finally:
                with self._lock:
                    self.verifying.discard(id(verification))

        @functools.wraps(time_block)
        def timed(runner: Runner, slots: object) -> object:
            self.seen.append(len(self.verifying))
            return time_block(runner, slots)

        monkeypatch.setattr(Verification, "verify", watched)
        monkeypatch.setattr(Runner, "time_block", timed)


def run(plans: list[DefinitionPlan], folder: Path, capacity: Capacity | None) -> list[Trace]:
    traces: list[Trace] = []
    context = RunContext("batches", cpu_machine(), 7)
    LocalExecutor(context, folder, TimingBudget.quick(), SCREEN, traces.append, capacity=capacity).run(plans)
    return traces


@pytest.mark.turn("tilegym_db/measurement/local_executor.py")  # whole bench runs
def test_solutions_are_verified_in_parallel_but_not_while_timing(plans, tmp_path, monkeypatch):
    watch = Watch(monkeypatch)
    traces = run(plans(), tmp_path / "scratch", WIDE)
    assert watch.most > 1
    assert set(watch.seen) == {0}
    assert [trace.status for trace in traces] == ["PASSED"] * 16
    assert len({(trace.solution, trace.workload_uuid) for trace in traces}) == 16
    kernels = [trace for trace in traces if trace.solution.endswith("_kernel")]
    assert all(trace.performance is not None and trace.performance.comparisons for trace in kernels)


# Workers that are lost.
@pytest.mark.turn("tilegym_db/measurement/local_executor.py", "tilegym_db/measurement/runner.py")
def test_solution_that_dies_later_is_timed_if_it_passed_before(plans, tmp_path, monkeypatch):
    monkeypatch.setattr(scan, "hard_findings", lambda findings: [])
    traces = run(plans(DIES_LATE)[:1], tmp_path / "scratch", WIDE)
    rows = {workload.uuid: workload.axes["M"] for workload in plans(DIES_LATE)[0].workloads}
    status = {rows[trace.workload_uuid]: trace.status for trace in traces if trace.solution == "row_scale_kernel"}
    assert status == {3: "PASSED", 5: "PASSED", 7: "RUNTIME_ERROR", 11: "PASSED"}


@pytest.mark.turn("tilegym_db/measurement/local_executor.py")  # whole bench runs
def test_fresh_worker_that_ends_before_timing_costs_one_workload(plans, tmp_path, monkeypatch):
    monkeypatch.setattr(scan, "hard_findings", lambda findings: [])
    enter, start = Runner.enter, WorkerHandle.start
    entering: list[Runner] = []

    def entered(runner: Runner, pool: BufferPool) -> Failure | None:
        entering.append(runner)
        try:
            return enter(runner, pool)
        finally:
            entering.remove(runner)

    def made(handle: WorkerHandle) -> WorkerProcess:
        worker = start(handle)
        if entering:
            worker.kill()  # as where the kernel refuses a part of the sandbox, or memory is short
        return worker

    monkeypatch.setattr(Runner, "enter", entered)
    monkeypatch.setattr(WorkerHandle, "start", made)
    chosen = plans(DIES_LATE)[0]
    chosen.workloads = chosen.workloads[:3]  # the last one kills the worker of all
    traces = run([chosen], tmp_path / "scratch", WIDE)
    assert [trace.status for trace in traces if trace.solution == "row_scale_stock"] == ["PASSED"] * 3
    lost = [trace for trace in traces if trace.solution == "row_scale_kernel"]
    assert [trace.status for trace in lost] == ["UNSUPPORTED", "UNSUPPORTED", "RUNTIME_ERROR"]
    unsupported = [str(trace.reason) for trace in lost[:2]]  # in those workers nothing of the kernel has run
    assert all("this machine could not set up a worker" in reason for reason in unsupported), unsupported


@pytest.mark.nightly
def test_memory_of_contents_that_were_not_drawn_is_freed(plans, tmp_path, monkeypatch):
    expect, drawn, still_there = expected.make_oracle_case, [], []

    def short_of_memory(definition: Definition, case: Case, device: str, blobs: BlobReader) -> OracleCase | None:
        if drawn:
            gc.collect()
            still_there.append(drawn[0]() is not None)
        if case.call.axes == SIZES[1]["axes"]:  # of one workload; small shapes that are drawn may have its rows alone
            inputs = torch.empty(1000)
            drawn.append(weakref.ref(inputs))
            raise torch.OutOfMemoryError("not enough memory")
        return expect(definition, case, device, blobs)

    monkeypatch.setattr(expected, "make_oracle_case", short_of_memory)
    traces = run(plans()[:1], tmp_path / "scratch", WIDE)
    assert sorted(trace.status for trace in traces) == ["PASSED"] * 6 + ["UNSUPPORTED"] * 2
    assert still_there
    assert not any(still_there)


# Workers that are lost, as one is daily in test_memory_short.py.
@pytest.mark.turn("tilegym_db/measurement/local_executor.py")
def test_workload_without_memory_beside_others_is_measured_later(plans, tmp_path, monkeypatch):
    """The first answer for one size of one operator is that the GPU had no memory; the second comes of a new worker."""
    full, living = Failure("UNSUPPORTED", "no memory", no_memory=True), []
    verify = Verification.verify

    def crowded(self: Verification, contents, *rest):
        first = contents.workload.axes["M"] == 5 and self.handle.definition.name == "row_scale" and not living
        if first and self.handle.solution.name == "row_scale_kernel":
            living.append(self.handle.worker)
            return full
        return verify(self, contents, *rest)

    monkeypatch.setattr(Verification, "verify", crowded)
    found, concluded = [], []
    context = RunContext("run", cpu_machine(), 5)
    executor = LocalExecutor(
        context, tmp_path, TimingBudget.quick(), SCREEN, found.append, capacity=WIDE, concluded=concluded.append
    )
    executor.run(plans())
    assert all(trace.status == "PASSED" for trace in found), [trace.reason for trace in found]
    assert len({(trace.solution, trace.workload_uuid) for trace in found}) == len(found) == 16
    assert len(concluded) == 8
    assert living[0] is not None
    assert not living[0].alive


# Workers that are lost, as one is daily in test_memory_short.py.
@pytest.mark.turn("tilegym_db/measurement/local_executor.py")
def test_workload_without_memory_even_alone_is_unsupported(plans, tmp_path, monkeypatch):
    asked = []

    def full(self: Verification, contents, *rest):
        asked.append((self.handle.solution.name, contents.workload.uuid))
        return Failure("UNSUPPORTED", "no memory", no_memory=True)

    monkeypatch.setattr(Verification, "verify", full)
    found = []
    LocalExecutor(
        RunContext("run", cpu_machine(), 5), tmp_path, TimingBudget.quick(), SCREEN, found.append, capacity=WIDE
    ).run(plans())
    assert [trace.status for trace in found] == ["UNSUPPORTED"] * 16
    assert set(Counter(asked).values()) == {2}


def test_memory_is_left_for_the_measuring_process_itself():
    h100 = Machine("cuda:0", "h100-sxm", "NVIDIA H100 80GB HBM3", "sm_90", memory_bytes=79 << 30)
    found = Capacity.of(h100, 128 << 30)
    assert found.contents_bytes + found.runners * GPU_RUNNER_BYTES <= h100.memory_bytes - SUPERVISOR_BYTES
    assert Capacity.of(Machine("cuda:0", "l4", "NVIDIA L4", "sm_89", memory_bytes=6 << 30), 64 << 30).runners == 1


@pytest.mark.turn("tilegym_db/measurement/local_executor.py")  # workers that are lost
def test_solution_whose_workers_had_no_memory_is_tried_again(plans, tmp_path, monkeypatch):
    """Let three workers in a row fail to start: as many deaths by the solution itself would end it."""
    refused, start = [], WorkerHandle.start

    def crowded(self: WorkerHandle) -> WorkerProcess:
        worker = start(self)
        if self.solution.name == "row_scale_kernel" and len(refused) < 4:
            refused.append(worker)

            def no_memory(timeout_s: float = 0.0) -> None:
                worker.kill()
                raise WorkerHasNoMemory("the GPU had no memory left for the worker to start")

            monkeypatch.setattr(worker, "wait_until_ready", no_memory)
        return worker

    monkeypatch.setattr(WorkerHandle, "start", crowded)
    traces = run(plans()[:1], tmp_path / "scratch", WIDE)
    assert [trace.status for trace in traces] == ["PASSED"] * 8, [trace.reason for trace in traces]
    assert len(refused) == 4


def test_a_runner_that_is_asked_and_compared_has_one_task():
    runner, other = object(), object()
    asked, compared = {1: (runner, ["a"])}, {1: (runner, ["b"]), 2: (other, ["a", "b"])}
    assert one_task_each(asked, compared) == ({1: (runner, ["a", "b"])}, {2: (other, ["a", "b"])})
    assert asked == {1: (runner, ["a"])}
