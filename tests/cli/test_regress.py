from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tilegym_db.measurement import machine, regress
from tilegym_db.measurement.regress import Bars

SLOW = (
    "def run(x, weight, factor, out):\n"
    "    for _ in range(50):\n"
    "        out.copy_((x.float() * weight.float() * factor).to(x.dtype))\n"
)


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch):
    monkeypatch.setattr(machine, "_cuda_machine", lambda index: None)


@pytest.fixture
def slower(row_scale: Path, monkeypatch) -> Path:
    """The small operator in a repository, whose stock code was made slower since its only commit."""
    for arguments in (("init", "-q"), ("add", "-A"), ("commit", "-qm", "first")):
        identity = ["-c", "user.name=tests", "-c", "user.email=tests@example.org"]
        subprocess.run(["git", "-C", str(row_scale), *identity, *arguments], check=True)
    (row_scale / "solutions/elementwise/row_scale/row_scale_stock/kernel.py").write_text(SLOW)
    monkeypatch.setitem(regress._BARS, "cpu", Bars(control_shift=0.5))  # the tests' machine may be busy
    return row_scale


def test_a_regression_is_a_table_and_exit_status_1(cli, slower):
    result = cli("regress", "--against", "HEAD", "--gpu", "cpu")
    assert result.code == 1
    lines = result.out.splitlines()
    (index,) = [index for index, line in enumerate(lines) if line.startswith("row_scale_stock")]
    assert "M=4,N=8, float32" in lines[index]
    assert "regression" in lines[index]
    assert "the rounds agree" in lines[index + 1]
    assert "1 regressions against HEAD on " in result.err


@pytest.mark.turn("tilegym_db/measurement/regress.py")  # times two versions
def test_a_void_session_has_an_exit_status_of_its_own(cli, slower, monkeypatch):
    monkeypatch.setitem(regress._BARS, "cpu", Bars(control_shift=-1.0, floor_us=-1.0))
    result = cli("regress", "--against", "HEAD", "--gpu", "cpu", "--json")
    assert result.code == 4
    (reason,) = result.json()["void"]
    assert "row_scale M=4,N=8, float32: the control differs from itself by" in reason
    (row,) = result.json()["rows"]
    assert (row["verdict"], row["change"]["threshold"] >= 0.03) == ("regression", True)


def test_nothing_changed_is_no_finding(cli, slower):
    subprocess.run(["git", "-C", str(slower), "checkout", "-q", "."], check=True)
    result = cli("regress", "--against", "HEAD", "--gpu", "cpu")
    assert (result.code, result.out) == (0, "")
    assert "1 solutions are the same as in HEAD" in result.err


@pytest.mark.parametrize(
    ("arguments", "cause", "fact"),
    [
        (["--against", "v9"], "run_unknown", "'v9'"),
        (["--against", "HEAD", "row_scal"], "name_unknown", "'row_scale'"),
        (["--against", "HEAD", "--gpu", "h100"], "gpu_absent", "--gpu h100"),
        ([], "2", "--against"),
    ],
)
def test_what_cannot_be_compared_is_wrong_usage(arguments, cause, fact, cli, slower):
    result = cli("regress", *arguments)
    assert (result.code, result.out) == (2, "")
    assert (cause in (result.cause, str(result.code)), fact in result.err) == (True, True)
