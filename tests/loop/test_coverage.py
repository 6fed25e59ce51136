"""The calls of models that kernels answer on a GPU, and the points to measure so that they answer more."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from killed_process import killed
from published_tables import write_table
from raising import raises
from user_catalog import slow_stock

from tilegym_db.catalog import Catalog
from tilegym_db.errors import HardwareError, UsageError
from tilegym_db.loop import coverage
from tilegym_db.loop.coverage import ask, measure_next, plan_coverage, served_share
from tilegym_db.measurement.run_setup import Observer
from tilegym_db.published.table import load_table
from tilegym_db.records import Trace
from tilegym_db.scaffold.model_calls import (
    ASKED_STAGES,
    Costs,
    Question,
    Stage,
    Written,
    costs_of,
    known_models,
    published_costs,
    questions,
)
from tilegym_db.store import publish
from tilegym_db.store.journal import Journal, journal_files, read_journal

REAL = Path(__file__).resolve().parents[2]
LLAMA = questions([one for one in known_models() if one["name"] == "llama-3.1-70b"], ASKED_STAGES, (1,))
V3 = questions([one for one in known_models() if one["name"] == "deepseek-v3"], ASKED_STAGES, (1,))
COSTS = Costs("h200", setup_s=40.0, point_s=1.0, pair_s=0.5, calls=30.0, oracle_s=2.0, runs=9)


def test_plan_raises_the_share_by_what_its_points_answer() -> None:
    plan = plan_coverage(LLAMA, "h100")
    assert plan.gpu == "h100-sxm"
    assert plan.share == pytest.approx(served_share(plan.answers.elements()))
    assert plan.expected_share() > plan.share + 0.3
    gained = sum(point.answers for point in plan.points)
    assert plan.expected_share() == pytest.approx(plan.share + gained / len(LLAMA))
    assert plan.unsure == 0
    assert all(point.basis.startswith("h100-sxm ") for point in plan.points)
    assert plan.answers["unmeasured"] >= gained + plan.slower
    catalog = Catalog.default()
    for point in plan.points:
        assert {catalog.solution(name).record.definition for name in point.solutions} == {point.workload.definition}
        assert 1 <= len(point.solutions) <= 2


def test_plan_ends_at_the_goal_and_names_kernels_only() -> None:
    whole = plan_coverage(LLAMA, "h100")
    plan = plan_coverage(LLAMA, "h100", goal=0.4)
    assert 0.4 <= plan.expected_share() < whole.expected_share()
    assert plan.seconds < whole.seconds
    names = [point.workload.definition for point in plan.points]
    assert len(dict.fromkeys(names)) == len(
        [name for name, before in zip(names, ["", *names], strict=False) if name != before]
    )
    with raises(UsageError, "goal_invalid", "0"):
        plan_coverage(LLAMA, "h100", goal=0.0)


def test_measured_points_without_a_verdict_are_not_planned() -> None:
    first = plan_coverage(LLAMA, "h100", goal=0.5)
    done = {point.workload.uuid for point in first.points}
    again = plan_coverage(LLAMA, "h100", goal=0.5, done=done)
    assert not done & {point.workload.uuid for point in again.points}


def test_points_beyond_the_memory_give_way_to_slices() -> None:
    """A layer of DeepSeek-V3's experts has 22.5 GB of weights, and four contents of them are timed and compared."""
    plan = plan_coverage(V3, "h100")
    refused = [call for call in plan.refused if call.startswith("moe_experts E=256,H=7168,I=2048")]
    assert refused
    assert all("GB" in reason for reason in plan.refused.values())
    experts = [point for point in plan.points if point.workload.definition == "moe_experts"]
    assert experts
    assert all(point.workload.axes["I"] * point.workload.axes["E"] < 2048 * 256 for point in experts)
    assert sum(point.answers for point in experts) > 0


def test_gpu_without_traces_has_no_plan() -> None:
    with raises(HardwareError, "gpu_without_traces", "h20"):
        plan_coverage(LLAMA, "h20")


def test_costs_are_medians_of_times_between_traces() -> None:
    def run(start: float, definition: str) -> list[Written]:
        """Three points of four Solutions: 40 s until the first trace, 2 s between points, 0.5 s between Solutions."""
        return [
            Written(start + 40 + point * 3.5 + number * 0.5, definition, f"{definition}{point}", 10.0, 1e6)
            for point in range(3)
            for number in range(4)
        ]

    costs = costs_of("h200", {name: run(0.0, name) for name in "abcdef"})
    assert costs is not None
    assert (costs.setup_s, costs.point_s, costs.pair_s, costs.runs) == (40.0, 1.5, 0.5, 6)
    assert costs.of_point([100.0, 100.0], 1e6) == pytest.approx(2.5)
    assert costs_of("h200", {"a": run(0.0, "a")}) is None
    published = published_costs("h200", Catalog.default())
    assert published is not None
    assert published.runs > 50
    assert published.setup_s > published.pair_s > 0


# ---- measured here --------------------------------------------------------------------------------

KERNEL_TEXT = """import torch


def run(x, weight, eps, out):
    wide = x.float()
    scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    torch.mul(wide.mul_(scale).to(x.dtype), weight, out=out)
"""
ROWS = (64, 1024)
TINY = [
    Question(
        "tiny", 1, Stage(1, rows, rows), "norm", "rms_norm", {"M": rows, "N": 256}, {"T": "bfloat16"}, {}, {"eps": 1e-6}
    )
    for rows in ROWS
]


@pytest.fixture
def norm(checkout: Path, home: Path) -> Catalog:
    """A catalog of one norm, with stock code and a kernel in PyTorch that was measured on the CPU at one point."""
    slow_stock(checkout)
    (checkout / "definitions/norm").mkdir(parents=True, exist_ok=True)
    shutil.copy(REAL / "definitions/norm/rms_norm.json", checkout / "definitions/norm")
    kernel = checkout / "solutions/norm/rms_norm/rms_norm_in_place"
    kernel.mkdir(parents=True)
    (kernel / "kernel.py").write_text(KERNEL_TEXT)
    spec = {"language": "python", "entry_point": "kernel.py::run", "dtypes": {"T": ["bfloat16"]}}
    record = {"name": kernel.name, "definition": "rms_norm", "author": "tests", "spec": spec}
    (kernel / "solution.json").write_text(json.dumps({**record, "sources": [{"path": "kernel.py"}]}))
    catalog = Catalog.default()
    definition, files = catalog.definition("rms_norm"), catalog.solution(kernel.name)
    candidate: dict[str, Any] = {
        "solution": files.name, "solution_digest": files.digest, "language": "python", "role": "kernel", "tier": "promotion",
        "sandbox_level": 3, "latency_us": 50.0, "ci_low_us": 49.0, "ci_high_us": 51.0, "speedup": 1.5, "speedup_ci_low": 1.4,
        "envelope_cases": 4, "trace_id": "t", "scalar_ranges": {"eps": [1e-6, 1e-5]},
    }  # fmt: skip
    entry = {
        "definition": "rms_norm", "axes": {"M": 4096, "N": 4096}, "dtypes": {"T": "bfloat16"}, "scalars": {"eps": 1e-6},
        "definition_version": definition.version, "definition_digest": definition.digest, "op_type": "norm",
        "candidates": [candidate],
    }  # fmt: skip
    write_table(home / "published" / "cpu", [entry], home, sm="cpu")
    return catalog


def test_calls_that_no_gpu_measured_are_planned_apart(norm: Catalog, checkout: Path) -> None:
    """With another meaning, nothing is known about the speed of its kernels on any GPU."""
    path = checkout / "definitions/norm/rms_norm.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "version": "9.0.0", "constraints": [*record["constraints"], "N >= 2"]}))
    plan = plan_coverage(TINY, "cpu", catalog=Catalog.default(), costs=COSTS)
    assert plan.points
    assert not any(point.basis for point in plan.points)
    assert (plan.expected_share(), plan.unsure) == (plan.share, len(TINY))


@pytest.mark.turn("tilegym_db/loop/coverage.py")  # two promotions; the plan is tested daily
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_points_are_measured_published_and_not_repeated(norm: Catalog, home: Path) -> None:
    def interrupt(trace: Trace) -> None:
        raise KeyboardInterrupt

    cut_off = measure_next(TINY, 1.0, devices="cpu", observer=Observer(traced=interrupt), costs=COSTS)
    assert cut_off.interrupted
    assert cut_off.plan.points
    whole = measure_next(TINY, 1.0, devices="cpu", costs=COSTS)
    assert cut_off.before["unmeasured"] == len(TINY)
    assert whole.before == cut_off.after
    assert whole.report is not None
    assert not whole.interrupted
    assert {trace.tier for trace in whole.report.traces} == {"promotion"}
    assert whole.published == str(home / "published" / "cpu")
    assert whole.after["unmeasured"] < len(TINY)
    table, catalog = load_table("cpu"), Catalog.default()
    assert Counter(ask(question, "cpu", catalog, table).kind for question in TINY) == whole.after
    measured = {trace.workload_uuid for report in (cut_off, whole) if report.report for trace in report.report.traces}
    after = measure_next(TINY, 1.0, devices="cpu", costs=COSTS)
    assert not measured & {point.workload.uuid for point in after.plan.points}


class EndsAt:
    """A function of another module whose call number ``call`` ends the process, before or after its work."""

    def __init__(self, owner: Any, name: str, call: int, *, after: bool) -> None:
        self.owner, self.name, self.real = owner, name, getattr(owner, name)
        self.left, self.after = call, after

    def __enter__(self) -> None:
        def deadly(*args: Any, **options: Any) -> Any:
            self.left -= 1
            if self.left == 0 and not self.after:
                os.kill(os.getpid(), signal.SIGKILL)
            found = self.real(*args, **options)
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return found

        setattr(self.owner, self.name, deadly)

    def __exit__(self, *exception: object) -> None:
        setattr(self.owner, self.name, self.real)


PHASES: dict[str, tuple[Any, str, int, bool, int]] = {
    "planned": (coverage, "plan_coverage", 1, True, 0),
    "workloads added": (Catalog, "add_workloads", 1, True, 0),
    "a trace to write": (Journal, "append", 1, False, 0),
    "a trace written": (Journal, "append", 1, True, 1),
    "all traces of a point written": (Journal, "append", 2, True, 2),
    "to publish": (publish, "publish", 1, False, 2),
    "published": (publish, "publish", 1, True, 2),
}
"""Phase -> the function at which the process ends, its call, whether after its work, and the whole traces then."""


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("phase", PHASES)
def test_a_killed_measurement_goes_on_where_it_was(phase: str, norm: Catalog, home: Path) -> None:
    owner, name, call, after, kept = PHASES[phase]
    one = TINY[:1]

    def traces() -> list[Trace]:
        return [trace for path in journal_files(home) for trace in read_journal(path).traces]

    def work() -> None:
        with EndsAt(owner, name, call, after=after):
            measure_next(one, 1.0, devices="cpu", costs=COSTS)

    killed(work)
    before = traces()
    assert len(before) == kept
    found = measure_next(one, 1.0, devices="cpu", costs=COSTS)
    whole = traces()
    assert {trace.trace_id for trace in before} <= {trace.trace_id for trace in whole}
    assert {trace.tier for trace in whole} == {"promotion"}
    judged = Counter(trace.solution for trace in whole if trace.solution == "rms_norm_in_place")
    assert judged == {"rms_norm_in_place": 1}  # no verdict is lost, and none is repeated
    assert found.left == 0
    assert found.published == str(home / "published" / "cpu")
    again = measure_next(one, 1.0, devices="cpu", costs=COSTS)
    assert not again.plan.points
    assert traces() == whole


def test_time_to_measure_must_be_positive() -> None:
    with raises(UsageError, "seconds_invalid", "0"):
        measure_next(TINY, 0.0, devices="cpu")
