"""The next steps that an author gets: every id that is shown is one that the commands take."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from loop_authors import GOOD

from tilegym_db.cli.models import print_report
from tilegym_db.cli.task import _print_attempt
from tilegym_db.loop.fit import FitReport
from tilegym_db.loop.from_model import Piece
from tilegym_db.loop.submit import award_refusal, disturbed_at, screen_refusal, submit
from tilegym_db.loop.tasks import create_task, find_task, prompt_of
from tilegym_db.measurement.machine import cpu_machine
from tilegym_db.measurement.runner import MAX_WAITING
from tilegym_db.records.loop import Attempt, Task
from tilegym_db.records.verdicts import MACHINE_SLOW

HandIn = Callable[..., Path]
Said = Callable[..., tuple[int, str, str]]
LOOKS_AT_A_CLOCK = "import time\n\n\ndef run(x, weight, factor, out):\n    out.zero_()\n"


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Said:
    """Run the command line; exit status, stdout and stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        from tilegym_db.cli.app import main

        monkeypatch.setattr("sys.argv", ["tilegym-db", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main()
        captured = capsys.readouterr()
        return int(stopped.value.code or 0), captured.out, captured.err

    return run


def test_ids_of_the_table_of_tasks_are_taken_by_every_command(task: Task, said: Said) -> None:
    other = create_task("row_scale", language="python", gpu="cpu", workload="cpu", min_speedup=2.0)
    _, table, told = said("task", "status")
    shown = [line.split()[0] for line in table.splitlines()[2:]]
    assert {find_task(name).id for name in shown} == {task.id, other.id}
    assert all(len(name) < len(task.id) for name in shown)
    assert f"tilegym-db task status {shown[0]}" in told
    _, whole, _ = said("task", "status", "--wide")
    assert task.id in whole


def test_a_task_without_an_attempt_says_how_to_hand_one_in(task: Task, said: Said) -> None:
    code, table, told = said("task", "status", task.id[:8])
    assert (code, table) == (0, "")
    assert "no attempt yet" in told
    assert f"tilegym-db task submit {task.id[:8]} FOLDER" in told


def test_refusal_names_the_place_of_its_reason(task: Task, said: Said, hand_in: HandIn) -> None:
    code, _, told = said("task", "submit", task.id, hand_in(LOOKS_AT_A_CLOCK))
    assert code == 1
    assert f"tilegym-db task prompt {task.id} has this reason in section 9" in told
    _, prompt, _ = said("task", "prompt", task.id)
    assert "imports-clock" in prompt.partition("## 9.")[2]


def test_bars_without_a_measurement_say_what_none_means(task: Task, said: Said) -> None:
    _, prompt, _ = said("task", "prompt", task.id)
    objective = prompt.partition("## 4.")[2].partition("## 5.")[0]
    assert "none: nothing is verified there on cpu yet" in objective


def test_what_is_promoted_names_the_command_that_publishes_it(capsys: pytest.CaptureFixture[str]) -> None:
    content = {"task": "a" * 36, "number": 1, "solution": "x", "solution_digest": "a" * 64, "stage": "promoted"}
    content |= {"verdict": "promoted", "timestamp": "2026-11-01T00:00:00Z", "promotions": ("x_v1",)}
    _print_attempt(Attempt.from_dict(content), "h200")
    assert "Next: tilegym-db publish --gpu h200" in capsys.readouterr().err


def compared(low: float, high: float) -> Any:
    other = SimpleNamespace(provides="stock", other="row_scale_stock", ratio=(low + high) / 2, ci_low=low, ci_high=high)
    return SimpleNamespace(comparisons=(other,))


@pytest.mark.parametrize(("low", "high", "is_open"), [(0.4, 1.9, True), (0.9, 1.05, False)])
def test_a_kernel_that_was_too_short_to_tell_is_not_called_slow(
    low: float, high: float, is_open: bool, task: Task
) -> None:
    (item,) = task.workloads
    trace: Any = SimpleNamespace(
        workload_uuid=item.uuid,
        timestamp=0,
        status="PASSED",
        trace_id="t",
        axes=item.axes,
        performance=compared(low, high),
    )
    refusal = award_refusal(task, [trace], {"t": "the interval is this"})
    assert refusal is not None
    assert refusal.reason.startswith("at M=512,N=1024: the interval is this")
    assert ("may be fast enough" in refusal.reason) == is_open


def test_wrong_numbers_are_told_before_what_was_not_measured(task: Task) -> None:
    (item,) = task.workloads
    two: Any = SimpleNamespace(workloads=[item, item.model_copy(update={"uuid": "other"})], min_speedup=1.1)
    failure = SimpleNamespace(gate="elementwise", command="tilegym-db debug reproduce mine")
    common = {"timestamp": 0, "axes": item.axes, "correctness": None, "performance": None, "log": ""}
    traces: Any = [
        SimpleNamespace(workload_uuid=item.uuid, status="UNSUPPORTED", reason="no memory", failure=None, **common),
        SimpleNamespace(workload_uuid="other", status="INCORRECT_NUMERICAL", reason="off", failure=failure, **common),
    ]
    refusal = screen_refusal(two, traces)
    assert refusal is not None
    assert (refusal.gate, refusal.command) == ("elementwise", failure.command)


def test_what_a_busy_machine_disturbed_refuses_nothing(task: Task) -> None:
    (item,) = task.workloads
    common = {"timestamp": 0, "axes": item.axes, "correctness": None, "performance": None, "log": "", "failure": None}
    for reason, is_disturbed in ((f"{MACHINE_SLOW}: threads of a waited", True), ("no memory", False)):
        trace: Any = SimpleNamespace(
            workload_uuid=item.uuid, status="UNSUPPORTED", reason=reason, trace_id="t", **common
        )
        assert list(disturbed_at(task, [trace])) == ([item.uuid] if is_disturbed else [])
        assert (screen_refusal(task, [trace]) is None) == is_disturbed
        assert (award_refusal(task, [trace], {}) is None) == is_disturbed


@pytest.mark.turn("tilegym_db/loop/submit.py")  # two promotions; test_busy.py has the verdict daily
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_submission_on_a_busy_machine_is_judged_by_the_next_call(
    task: Task, hand_in: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = hand_in(GOOD)
    monkeypatch.setenv(MAX_WAITING, "-1")  # no share of waiting is small enough
    first = submit(task, folder)
    assert first.verdict == "pending"
    assert first.reason.startswith(MACHINE_SLOW)
    monkeypatch.setenv(MAX_WAITING, "inf")
    second = submit(task, folder)
    assert second.number == first.number
    assert len(second.trace_ids) > len(first.trace_ids)
    assert (second.verdict == "pending") == (MACHINE_SLOW in second.reason)  # by the audit of the clock, at times


def test_submission_that_leaves_out_a_workload_runs_nothing(task: Task, hand_in: Any) -> None:
    spec = {
        "language": "python",
        "entry_point": "kernel.py::run",
        "dtypes": {"T": ["float32"]},
        "constraints": ["N < 1024"],
    }
    attempt = submit(task, hand_in(GOOD, spec=spec))
    assert (attempt.verdict, attempt.gate, attempt.trace_ids) == ("refused", "received", ())
    assert "M=512,N=1024" in attempt.reason
    assert "N < 1024" in attempt.reason
    assert attempt.reason in prompt_of(task).replace("\n", " ")


def test_fit_names_each_reason_and_its_config_once(capsys: pytest.CaptureFixture[str]) -> None:
    pieces = [Piece("LlamaAttention", 0.4, 1, name) for name in ("rope_neox", "attention_prefill", "attention_decode")]
    report = FitReport("tiny", cpu_machine(), [], pieces=[*pieces, Piece("Linear", 0.2, 4)])
    print_report(report, Path("my models/config.json"))
    told = capsys.readouterr().err.splitlines()
    assert sum(line.startswith("40.0% LlamaAttention: ") for line in told) == 1
    assert "20.0% Linear: no definition describes it" in told
    assert told[-1] == "Next: tilegym-db task from-model 'my models/config.json'"
    print_report(report, Path("my models/config.json"), asked={"--dtype": "float32", "--layers": "2"})
    assert capsys.readouterr().err.splitlines()[-1] == f"{told[-1]} --dtype float32 --layers 2"
