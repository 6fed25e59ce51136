"""The loop from a task to an award with a scripted author: a wrong kernel, a slow one, a good one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from loop_authors import GOOD, SLOW, TRITON, WRONG

from tilegym_db.catalog import Catalog
from tilegym_db.loop.submit import submit
from tilegym_db.loop.tasks import attempts_of, create_task, prompt_of, tasks_table
from tilegym_db.records.loop import Task
from tilegym_db.report.weekly import weekly
from tilegym_db.store.opening import open_store
from tilegym_db.store.queries.loop import award_rows

HandIn = Callable[..., Path]


def test_wrong_kernel_is_refused_and_its_author_gets_the_reason(task: Task, hand_in: HandIn) -> None:
    wrong = submit(task, hand_in(WRONG))
    assert (wrong.number, wrong.verdict, wrong.stage) == (1, "refused", "compiled")
    assert "INCORRECT_NUMERICAL" in wrong.reason
    assert "INCORRECT_NUMERICAL" in prompt_of(task)
    assert [one["verdict"] for one in attempts_of(task)] == ["refused"]


@pytest.mark.alone
def test_a_wrong_kernel_a_slow_one_and_a_good_one(task: Task, hand_in: HandIn, home: Path) -> None:
    wrong = submit(task, hand_in(WRONG))
    assert (wrong.number, wrong.verdict, wrong.stage) == (1, "refused", "compiled")
    assert "INCORRECT_NUMERICAL" in wrong.reason
    assert wrong.command.startswith(f"tilegym-db debug reproduce {wrong.solution}")
    slow = submit(task, hand_in(SLOW))
    assert (slow.number, slow.verdict, slow.gate) == (2, "refused", "speed")
    assert "over row_scale_stock" in slow.reason
    page = prompt_of(task)
    assert "INCORRECT_NUMERICAL" in page
    assert "--seed" not in page
    assert "rtol" not in page
    good = submit(task, hand_in(GOOD))
    assert (good.number, good.verdict, good.stage) == (3, "promoted", "promoted"), good.reason
    assert good.promotions == ("python_row_scale_cpu_float32_M512-N1024_v1",)
    assert good.solution in Catalog.default().solutions
    assert not list((home / "loop" / "candidates").rglob(good.solution))
    with open_store(read_only=True) as store:
        (row,) = award_rows(store)
        week = weekly(store, datetime.now(UTC).replace(tzinfo=None) - timedelta(days=1))
    assert "| refused | speed | 1 | 1 |" in week
    assert "| promoted |  | 1 | 1 |" in week
    assert (row["status"], row["solution_digest"], row["applied"]) == ("standing", good.solution_digest, False)
    assert row["ci_low"] >= 1.10
    assert [one["verdict"] for one in attempts_of(task)] == ["refused", "refused", "promoted"]
    assert [row["status"] for row in tasks_table()] == ["promoted"]
    assert submit(task, hand_in(GOOD)) == good


@pytest.mark.turn("tilegym_db/loop/auto.py")  # loads an interpreter
@pytest.mark.slow
def test_triton_kernel_is_judged_interpreted_and_waits_for_a_gpu(operator: Path, hand_in: HandIn) -> None:
    task = create_task("row_scale", language="triton", gpu="cpu", workload="tiny")
    spec = {
        "language": "triton", "entry_point": "kernel.py::run", "dtypes": {"T": ["float32"]},
        "layouts": {name: "row_contiguous" for name in ("x", "out")},
    }  # fmt: skip
    wrong = submit(task, hand_in(TRITON.replace("value * factor", "value"), spec=spec))
    assert (wrong.verdict, wrong.stage) == ("refused", "compiled"), wrong.reason
    assert "INCORRECT_NUMERICAL" in wrong.reason
    good = submit(task, hand_in(TRITON, spec=spec))
    assert (good.verdict, good.stage) == ("no_gpu", "compiled"), good.reason
    assert good.reason == "verified in the interpreter; triton kernels are timed on a GPU only."
    with open_store(read_only=True) as store:
        tiers = store.rows("SELECT DISTINCT tier, status FROM traces WHERE solution = $name", {"name": good.solution})
    assert tiers == [{"tier": "interpreter", "status": "PASSED"}]


def test_the_same_task_gives_the_same_prompt_bytes(task: Task, operator: Path) -> None:
    again = create_task("row_scale", language="python", gpu="cpu", workload="cpu")
    assert again == task
    page = prompt_of(task)
    assert page == prompt_of(again)
    assert [line[3:].partition(".")[0] for line in page.splitlines() if line.startswith("## ")] == [
        *map(str, range(1, 11))
    ]
    assert "(x.float() * weight.float() * factor).to(x.dtype)" in page
    assert not any(word in page for word in ("rtol", "atol", str(task.created.year) + "-"))


@pytest.mark.nightly  # the test before it asks twice on one machine
@pytest.mark.slow
def test_two_machines_write_the_same_prompt_bytes(tmp_path: Path) -> None:
    """Another home, folder, order of hashes, zone and language of the user: as far as one machine can stand for two."""
    told = []
    for number, (seed, zone, language) in enumerate((("1", "UTC", "C"), ("2", "Asia/Tokyo", "de_DE.UTF-8"))):
        folder = tmp_path / str(number)
        folder.mkdir()
        environment = {
            **os.environ, "TILEGYM_DB_HOME": str(folder / "home"), "PYTHONHASHSEED": seed, "TZ": zone, "LANG": language,
            "PYTHONPATH": str(Path(__file__).resolve().parents[2]), "CUDA_VISIBLE_DEVICES": "",
        }  # fmt: skip

        def asked(*arguments: str, folder: Path = folder, environment: dict[str, str] = environment) -> bytes:
            command = [sys.executable, "-m", "tilegym_db", "task", *arguments]
            return subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True).stdout

        task = asked("create", "rms_norm", "--language", "triton", "--gpu", "h200", "--workload", "M=4096,N=4096")
        told.append((task, asked("prompt", task.decode().strip())))
    assert told[0] == told[1]
    assert b"Write a triton kernel for `rms_norm`" in told[0][1]
