"""``tools/verify_in_order.py``: a plan is worked through in its order, and what the time did not allow is named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tilegym_db.paths import shipped_root

TOOL = shipped_root() / "tools" / "verify_in_order.py"


def run(tmp_path: Path, plan: str, seconds: int) -> subprocess.CompletedProcess[str]:
    (tmp_path / "plan.txt").write_text(plan)
    command = [TOOL, tmp_path / "plan.txt", "--out", tmp_path / "homes", "--seconds", seconds, "--gpu", "cpu"]
    return subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, check=False)


def test_lines_run_in_order_and_a_wrong_one_says_so(tmp_path):
    ran = run(tmp_path, "# nothing\nno_such_kernel  # the first\n\nnor_this --quick\n", seconds=120)
    first, second = ran.stdout.splitlines()
    assert "no_such_kernel: no new trace (exit 2)" in first
    assert "nor_this --quick: no new trace (exit 2)" in second
    log = (tmp_path / "homes" / "home-0" / "log.txt").read_text()
    assert "no_such_kernel" in log
    assert ran.returncode == 0


def test_lines_that_the_time_did_not_allow_are_named(tmp_path):
    ran = run(tmp_path, "rms_norm_stock --workload cpu\nswiglu_stock\n", seconds=11)
    assert "time ended" in ran.stdout
    assert ran.stdout.splitlines()[-2:] == ["left: rms_norm_stock --workload cpu", "left: swiglu_stock"]
    assert ran.returncode == 1
