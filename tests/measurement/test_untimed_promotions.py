"""Many promotions at a time: what compiles quickly comes first, processes compute in one thread, memory is shared."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from shipped_records import CATALOG

from benchmarks.in_processes import THREADS, run_parts
from benchmarks.untimed_promotions import compilation, in_turns, shares
from tilegym_db.verification import session
from tilegym_db.verification.worker_handle import RunnerLimits

NAMES = ("attention_prefill", "gemm", "rms_norm", "silu_and_mul")
SCRIPT = f"""
import os, sys
from pathlib import Path
part, out = (sys.argv[sys.argv.index(name) + 1] for name in ("--part", "--out"))
Path(out).write_text(part + " " + os.environ["{THREADS}"] + "\\n")
"""


def test_a_turn_has_each_definition_once_the_quick_ones_first() -> None:
    turn = [CATALOG.solution(work.solution) for work in in_turns(CATALOG, NAMES, "cuda:0")][: len(NAMES)]
    assert {one.record.definition for one in turn} == {*NAMES}
    assert [compilation(one) for one in turn] == sorted(map(compilation, turn))


def test_a_language_that_compiles_longer_counts_for_more() -> None:
    source = {"kernel.py": b"x" * 100}
    solutions = [
        SimpleNamespace(
            record=SimpleNamespace(spec=SimpleNamespace(language=one, entry_path="kernel.py")), sources=source
        )
        for one in ("python", "triton", "cutile")
    ]
    python, triton, cutile = map(compilation, solutions)  # type: ignore[arg-type]
    assert python == 0 < triton < cutile


@pytest.mark.parametrize(("asked", "threads"), [(None, "1"), ("3", "3")])
def test_parts_have_one_thread_unless_the_user_asks(
    asked: str | None, threads: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(THREADS, raising=False)
    if asked is not None:
        monkeypatch.setenv(THREADS, asked)
    script, out = tmp_path / "script.py", tmp_path / "out.jsonl"
    script.write_text(SCRIPT)
    assert run_parts(str(script), (), 2, out, deadline=60.0) == 0
    assert out.read_text() == f"0/2 {threads}\n1/2 {threads}\n"


def test_phases_are_shares_of_all_seconds_with_inner_ones_last() -> None:
    lines = [
        {"seconds": 6.0, "phases": {"first calls": 4.0, "fuzz cases": 5.0}},
        {"seconds": 4.0, "phases": {"sequences": 1.0}},
    ]
    assert shares(lines) == {"fuzz cases": 0.5, "sequences": 0.1, "first calls": 0.4}
    assert [*shares(lines)][-1] == "first calls"


def test_large_cases_take_a_part_of_a_shared_device(monkeypatch: pytest.MonkeyPatch) -> None:
    budgets: list[int] = []
    definition = CATALOG.definition("rms_norm")
    solution = next(one for one in CATALOG.solutions_for("rms_norm") if one.record.spec.language == "triton")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (960, 1000))
    monkeypatch.setattr(session, "large_cases", lambda *_, budget_bytes, **__: budgets.append(budget_bytes) or [])
    for share in (1, 16):
        limits = dataclasses.replace(RunnerLimits(), device_share=share)
        handle = SimpleNamespace(definition=definition, solution=solution, device="cuda:0", limits=limits)
        session._check_large_cases(handle, (), {}, {}, 1, SimpleNamespace(), None)  # type: ignore[arg-type]
    assert budgets == [160, 10]
