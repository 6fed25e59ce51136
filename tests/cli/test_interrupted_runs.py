"""Ctrl-C in a run: the exit status is 130, and the last line says what was kept and that the command continues."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import typer

from tilegym_db.cli.bench import finish
from tilegym_db.measurement.plan import BenchReport, Plan


@pytest.mark.parametrize("traced", [0, 2])
def test_interrupted_bench_promises_no_ranking(traced: int, capsys: pytest.CaptureFixture[str]) -> None:
    machine: Any = SimpleNamespace(gpu="cpu", gpu_name="a processor")
    trace: Any = SimpleNamespace(
        solution="a", language="python", status="UNSUPPORTED", reason="", tier="screen", performance=None,
        workload_uuid="w", config={},
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
