"""The progress bar of runs with one plan or several."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tilegym_db.cli.kit.progress import Progress


def test_message_in_a_file_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    trace: Any = SimpleNamespace(status="REJECTED", solution="mine", reason="word " * 60 + "end")
    with Progress() as progress:
        progress.observer().traced(trace)
        progress.observer().starting(trace.reason)
    assert [line[-3:] for line in capfd.readouterr().err.splitlines()] == ["end", "end"]


def test_bar_of_a_second_plan_starts_at_zero() -> None:
    progress = Progress(quiet=True)
    observer = progress.observer()
    machine: Any = SimpleNamespace(gpu="cpu", gpu_name="a processor")
    trace: Any = SimpleNamespace(status="PASSED")
    shown = []
    for pairs in (6, 3):
        plan: Any = SimpleNamespace(pair_count=pairs)
        observer.planned(plan, machine)
        for _ in range(pairs):
            observer.traced(trace)
        shown.append(progress._bar.tasks[0].fields["done"])
    assert shown == ["6/6", "3/3"]
