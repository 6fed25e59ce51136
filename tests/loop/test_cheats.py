"""What fools the gates of others must be refused: an own reference, an edited bench, names, a slow baseline, a lucky run."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from loop_authors import GOOD
from raising import raises

from tilegym_db.catalog import Catalog
from tilegym_db.errors import ConflictError, HardwareError, UsageError
from tilegym_db.loop import submit as submit_module
from tilegym_db.loop.auto import run_author
from tilegym_db.loop.submit import submit
from tilegym_db.loop.tasks import create_task
from tilegym_db.models.call_site import CallSite
from tilegym_db.models.gpu_time import cpu_share, launched_us
from tilegym_db.records.loop import Attempt, Task
from tilegym_db.store.side_files import journaled

HandIn = Callable[..., Path]


@pytest.fixture(autouse=True)
def nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever these submissions are refused for is found before anything of them runs."""

    def run(*_: object, **__: object) -> None:
        raise AssertionError("a candidate was run")

    monkeypatch.setattr(submit_module, "bench", run)
    monkeypatch.setattr(submit_module, "verify", run)


@pytest.mark.parametrize(
    "name", ["reference.py", "bench.py", "test_correctness.py", "metadata.json", "workloads.jsonl"]
)
def test_an_own_reference_or_bench_is_refused_by_name(name: str, task: Task, hand_in: HandIn) -> None:
    attempt = submit(task, hand_in(GOOD, {name: "def run(x, weight, factor):\n    return x\n"}))
    assert (attempt.verdict, attempt.gate, attempt.stage) == ("refused", "received", "received")
    assert name in attempt.reason


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ("import tilegym_db.measurement.timing as b\nb.median = min\n" + GOOD, "scan"),
        ("import time\ntime.perf_counter = lambda: 0.0\n" + GOOD, "scan"),
        ("open('/tmp/edited', 'w')\n" + GOOD, "scan"),
    ],
)
def test_kernel_that_reaches_for_the_bench_is_refused_unrun(
    source: str, rule: str, task: Task, hand_in: HandIn
) -> None:
    attempt = submit(task, hand_in(source))
    assert (attempt.verdict, attempt.stage) == ("refused", "received")
    assert attempt.gate.startswith(rule)
    assert "kernel.py:" in attempt.reason


def test_a_submission_that_calls_itself_a_baseline_is_refused(task: Task, hand_in: HandIn) -> None:
    spec = {"language": "python", "entry_point": "kernel.py::run", "role": "baseline", "provides": "stock"}
    assert "role 'kernel'" in submit(task, hand_in(GOOD, spec=spec)).reason


def test_a_submission_that_omits_an_output_is_refused(task: Task, hand_in: HandIn) -> None:
    spec = {"language": "python", "entry_point": "kernel.py::run", "dtypes": {"T": ["float32"]}, "omits": ["out"]}
    attempt = submit(task, hand_in(GOOD, spec=spec))
    assert (attempt.verdict, attempt.stage) == ("refused", "received")
    assert "it omits out" in attempt.reason


def test_another_language_or_gpu_than_was_asked_for_is_refused(task: Task, hand_in: HandIn) -> None:
    spec = {"language": "triton", "entry_point": "kernel.py::run"}
    assert "it is triton for row_scale" in submit(task, hand_in(GOOD, spec=spec)).reason
    with raises(HardwareError, "gpu_of_task_differs", "h200", "cpu"):
        submit(task, hand_in(GOOD), gpu="h200")


def test_a_bar_below_that_of_awards_is_refused(operator: Path) -> None:
    with raises(UsageError, "bar_too_low", "1.10"):
        create_task("row_scale", language="python", gpu="cpu", min_speedup=1.0)


def test_same_source_is_judged_once_in_repeated_submissions(task: Task, hand_in: HandIn, home: Path) -> None:
    source = "import socket\n" + GOOD
    first = submit(task, hand_in(source))
    lines = len(journaled(Attempt, home))
    assert submit(task, hand_in(source, name="renamed")) == first
    assert len(journaled(Attempt, home)) == lines
    assert first.solution == submit(task, hand_in(source)).solution


def test_an_author_who_edits_what_judges_stops_the_loop(operator: Path, tmp_path: Path) -> None:
    (definition,) = operator.glob("definitions/*/row_scale.json")
    edited = definition.read_text().replace("* factor", "* 1.0")
    script = tmp_path / "author.py"
    script.write_text(f"import pathlib\npathlib.Path({str(definition)!r}).write_text({edited!r})\n")
    command = shlex.join([sys.executable, str(script)])
    with raises(ConflictError, "judge_changed"):
        run_author(command, "a prompt", tmp_path / "work", Catalog.default(), 60.0)


def test_fate_of_an_author_is_reported(operator: Path, tmp_path: Path) -> None:
    python = shlex.quote(sys.executable)
    catalog, folder = Catalog.default(), tmp_path / "work"
    assert run_author(f"{python} -c 'import time; time.sleep(60)'", "", folder, catalog, 0.2) == "timeout"
    ended = run_author(f"{python} -c 'import sys; sys.exit(sys.stdin.read())'", "no idea", folder, catalog, 60.0)
    assert ended == "the author ended with status 1: no idea"
    assert run_author(f"{python} -c pass", "", folder, catalog, 60.0) == "the author wrote no files"


# -- coverage ---------------------------------------------------------------------------------------------------------


def test_other_code_under_a_verified_kernels_name_is_not_covered() -> None:
    def stock(x: torch.Tensor) -> torch.Tensor:
        with torch.profiler.record_function("tilegym_db::rms_norm"):
            return x @ x

    site = CallSite(lambda x: None)

    def call() -> None:
        x = torch.ones(256, 256)
        if site.serve(x) is None:
            stock(x)

    assert cpu_share(call, [site]) == 0.0
    served = CallSite(lambda x: x @ x)
    assert cpu_share(lambda: served.serve(torch.ones(256, 256)), [served]) > 0.2


def test_gpu_work_counts_for_the_innermost_mark_of_its_launch() -> None:
    def mark(name: str, begin: float, end: float) -> dict[str, object]:
        return {"cat": "user_annotation", "name": name, "ts": begin, "dur": end - begin}

    def work(number: int, at: float, name: str) -> list[dict[str, object]]:
        args = {"correlation": number}
        return [
            {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": at, "dur": 1, "args": args},
            {"cat": "kernel", "name": name, "ts": at + 50, "dur": 10, "args": args},
        ]

    events = [
        mark("n:call", 0, 100), mark("n:0", 10, 60), mark("n:1", 20, 30), mark("other:1", 62, 70),
        *work(1, 15, "n:1"), *work(2, 25, "gemm"), *work(3, 65, "n:1"),
    ]  # fmt: skip
    assert launched_us(events, "n") == {"n:call": (1, 10.0), "n:0": (1, 10.0), "n:1": (1, 10.0)}


def test_a_damaged_record_is_refused_with_its_reason(task: Task, hand_in: HandIn) -> None:
    folder = hand_in(GOOD)
    (folder / "solution.json").write_text(json.dumps({"name": "mine"}))
    attempt = submit(task, folder)
    assert attempt.verdict == "refused"
    assert "missing key" in attempt.reason
