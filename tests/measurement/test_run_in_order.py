"""``tools/run_in_order.py``: a plan is worked through in its order, and what the time did not allow is named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tilegym_db.paths import shipped_root

TOOL = shipped_root() / "tools" / "run_in_order.py"


def run(tmp_path: Path, plan: str, seconds: int) -> subprocess.CompletedProcess[str]:
    (tmp_path / "plan.txt").write_text(plan)
    command = [TOOL, tmp_path / "plan.txt", "--out", tmp_path / "homes", "--seconds", seconds]
    return subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, check=False)


def test_lines_run_in_order_and_their_output_is_kept(tmp_path):
    plan = """# nothing
python -c 'import os; print(os.environ["TILEGYM_DB_HOME"])'  # the first

tilegym-db verify no_such_kernel --gpu cpu
python -c 'print("{\\"status\\": \\"PASSED\\"}\\nand more")'
"""
    ran = run(tmp_path, plan, seconds=120)
    first, second, third = ran.stdout.splitlines()
    assert first.endswith(f"{tmp_path / 'homes' / 'home-0'} (exit 0)")
    assert "no_such_kernel --gpu cpu: no output (exit 2)" in second
    assert third.endswith("1 PASSED (exit 0)")
    assert "no_such_kernel" in (tmp_path / "homes" / "line-2.log").read_text()
    assert "and more" in (tmp_path / "homes" / "line-3.txt").read_text()
    assert ran.returncode == 0


def test_lines_that_the_time_did_not_allow_are_named(tmp_path):
    waits = "python -c 'import time; time.sleep(60)'"
    ran = run(tmp_path, f"{waits}\npython -c pass\n", seconds=11)
    assert "time ended" in ran.stdout
    assert ran.stdout.splitlines()[-2:] == [f"left: {waits}", "left: python -c pass"]
    assert ran.returncode == 1
    assert (tmp_path / "homes" / "left.txt").read_text() == f"{waits}\npython -c pass\n"


@pytest.mark.turn("tools/run_in_order.py")  # separate processes
def test_a_plan_that_continues_keeps_the_output_before(tmp_path):
    run(tmp_path, "python -c 'print(1)'\n", seconds=60)
    run(tmp_path, "python -c 'print(2)'\n", seconds=60)
    assert [(tmp_path / "homes" / f"line-{number}.txt").read_text() for number in (1, 2)] == ["1\n", "2\n"]


def test_a_line_of_another_program_is_refused(tmp_path):
    ran = run(tmp_path, "rms_norm_stock\n", seconds=11)
    assert ran.returncode == 2
    assert "'rms_norm_stock' does not begin with tilegym-db or python" in ran.stderr
