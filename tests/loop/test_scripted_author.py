"""The loop from a task to a promotion with a scripted author: a wrong kernel, a slow one, a good one."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from loop_authors import GOOD, SLOW, WRONG

from tilegym_db.catalog import Catalog
from tilegym_db.loop.prompt import prompt_of
from tilegym_db.loop.status import attempts_of, tasks_table
from tilegym_db.loop.submit import submit
from tilegym_db.loop.tasks import create_task
from tilegym_db.records.loop import Task
from tilegym_db.report.weekly import weekly
from tilegym_db.store.connection import open_store
from tilegym_db.store.loop_queries import promotion_rows

pytestmark = pytest.mark.alone

HandIn = Callable[..., Path]


def test_a_wrong_kernel_a_slow_one_and_a_good_one(task: Task, hand_in: HandIn, home: Path) -> None:
    wrong = submit(task, hand_in(WRONG))
    assert (wrong.number, wrong.verdict, wrong.stage) == (1, "refused", "compiled")
    assert "INCORRECT_NUMERICAL" in wrong.reason
    assert wrong.command.startswith(f"tilegym-db reproduce {wrong.solution}")
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
        (row,) = promotion_rows(store)
        week = weekly(store, datetime.now(UTC).replace(tzinfo=None) - timedelta(days=1))
    assert "| refused | speed | 1 | 1 |" in week
    assert "| promoted |  | 1 | 1 |" in week
    assert (row["status"], row["solution_digest"], row["applied"]) == ("standing", good.solution_digest, False)
    assert row["ci_low"] >= 1.10
    assert [one["verdict"] for one in attempts_of(task)] == ["refused", "refused", "promoted"]
    assert [row["status"] for row in tasks_table()] == ["promoted"]
    assert submit(task, hand_in(GOOD)) == good


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
