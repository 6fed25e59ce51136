"""The end of a run: Ctrl-C gives status 130 and says what was kept, and the next step is one that works."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from tilegym_db.cli.bench import finish, spelled_words
from tilegym_db.measurement.plan import BenchReport, Plan
from tilegym_db.records.verdicts import MACHINE_SLOW


@pytest.mark.parametrize("traced", [0, 2])
def test_interrupted_bench_promises_no_ranking(traced: int, capsys: pytest.CaptureFixture[str]) -> None:
    machine: Any = SimpleNamespace(gpu="cpu", gpu_name="a processor")
    trace: Any = SimpleNamespace(
        solution="a", language="python", status="UNSUPPORTED", reason="", tier="screen", performance=None,
        workload_uuid="w", config={}, failure=None,
    )  # fmt: skip
    report = BenchReport("run", machine, Plan(), traces=[trace] * traced, interrupted=True)
    with pytest.raises(typer.Exit) as stopped:
        finish(report, as_json=False)
    assert stopped.value.exit_code == 130
    shown = capsys.readouterr().out
    assert "Next: tilegym-db" not in shown
    assert "nothing new" not in shown


def test_interrupted_fit_ends_with_130(monkeypatch: pytest.MonkeyPatch, tmp_path: Any, cli: Any) -> None:
    from tilegym_db.loop import fit

    machine: Any = SimpleNamespace(gpu="cpu", gpu_name="a processor")
    measured = BenchReport("run", machine, Plan(), interrupted=True)
    report = fit.FitReport("model", machine, [], measured=measured)
    monkeypatch.setattr(fit, "fit_config", lambda *_: report)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert cli("fit", tmp_path / "config.json", "--gpu", "cpu").code == 130

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fit, "fit_config", stop)
    stopped = cli("fit", tmp_path / "config.json", "--gpu", "cpu")
    assert (stopped.code, stopped.err.splitlines()[-1].split(":")[0]) == (130, "interrupted")


@pytest.mark.parametrize(
    "traces",
    [
        [("screen", "RUNTIME_ERROR", "b")],
        [("screen", "UNSUPPORTED", "b")],
        [("screen", "PASSED", "a"), ("promotion", "UNSUPPORTED", "b")],
        [("screen", "UNSUPPORTED", "a"), ("screen", "TIMEOUT", "b")],
        [("screen", "PASSED", "stock"), ("screen", "INCORRECT_NUMERICAL", "b")],
        [("screen", "PASSED", "a"), ("screen", "INCORRECT_NUMERICAL", "b")],
    ],
    ids=str,
)
def test_run_without_a_pass_shows_the_trace_that_says_why(
    traces: list[tuple[str, str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    machine: Any = SimpleNamespace(gpu="cpu", gpu_name="a processor")
    made: list[Any] = [
        SimpleNamespace(
            solution="a", language="python", status=status, reason="why", tier=tier, performance=None,
            workload_uuid="w", config={}, failure=None, trace_id=8 * name,
            role="baseline" if name == "stock" else "kernel",
        )
        for tier, status, name in traces
    ]  # fmt: skip
    with suppress(typer.Exit):
        finish(BenchReport("run", machine, Plan(), traces=made), as_json=False)
    shown = capsys.readouterr().out
    assert "Next: tilegym-db show bbbbbbbb" in shown
    assert "PASSED: " not in shown


@pytest.mark.parametrize(("statuses", "expected"), [(("UNSUPPORTED",) * 2, True), (("UNSUPPORTED", "TIMEOUT"), False)])
def test_after_a_busy_machine_the_same_command_is_next(
    statuses: tuple[str, ...], expected: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    machine: Any = SimpleNamespace(gpu="cpu", gpu_name="a processor")
    made: list[Any] = [
        SimpleNamespace(
            solution="a", language="python", status=status, reason=f"{MACHINE_SLOW}: threads of a waited", tier="screen",
            performance=None, workload_uuid="w", config={}, failure=None, trace_id=8 * "b", role="kernel",
        )
        for status in statuses
    ]  # fmt: skip
    with suppress(typer.Exit):
        finish(BenchReport("run", machine, Plan(), traces=made), as_json=False, again="bench 'a b' --gpu cpu --quick")
    shown = capsys.readouterr().out
    assert ("tilegym-db bench 'a b' --gpu cpu --quick" in shown, "tilegym-db show" in shown) == (expected, not expected)


@pytest.mark.parametrize(
    ("tier", "asked", "next_step"),
    [
        ("screen", " a --workload tiny", "verify a --workload tiny --gpu cpu"),
        ("promotion", " a", "best d --gpu cpu"),
        ("interpreter", " d", "compile a, then on a machine with a GPU: tilegym-db bench a"),
    ],
    ids=str,
)
def test_next_step_of_a_run_keeps_to_what_was_asked(
    tier: str, asked: str, next_step: str, capsys: pytest.CaptureFixture[str]
) -> None:
    machine: Any = SimpleNamespace(gpu="cpu", gpu_name="a processor")
    stock: Any = SimpleNamespace(
        solution="stock", definition="d", language="python", status="PASSED", reason="", performance=None,
        tier="screen" if tier == "interpreter" else tier, workload_uuid="w", config={}, failure=None, role="baseline",
    )  # fmt: skip
    kernel: Any = SimpleNamespace(**{**vars(stock), "solution": "a", "tier": tier, "role": "kernel"})
    finish(BenchReport("run", machine, Plan(), traces=[stock, kernel]), as_json=False, asked=asked, screens=True)
    assert capsys.readouterr().out.endswith(f"Next: tilegym-db {next_step}\n")


def test_words_that_chose_a_run_are_quoted_for_a_shell() -> None:
    assert spelled_words(["a b"], language=None, workload="M=1,*") == " 'a b' --workload 'M=1,*'"
