from __future__ import annotations

import shlex

import pytest

from tilegym_db.measurement import machine

WRONG = "def run(x, weight, factor, out):\n    out.copy_(x * weight * factor)\n    out[-1:] = 0\n"


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch):
    monkeypatch.setattr(machine, "_cuda_machine", lambda index: None)


def test_bench_screens_and_verify_verifies(cli, row_scale, home):
    screened = cli("bench", "--gpu", "cpu")
    assert "Next: tilegym-db verify --gpu cpu" in screened.out
    result = cli("verify", "--gpu", "cpu")
    assert result.code == 0
    assert 'traces: {"PASSED": 1}. Next: tilegym-db best row_scale --gpu cpu' in result.out
    tiers = cli("sql", "SELECT tier, status, sandbox_level >= 2 AS confined FROM traces ORDER BY timestamp", "--json")
    assert tiers.json() == [
        {"tier": "screen", "status": "PASSED", "confined": True},
        {"tier": "promotion", "status": "PASSED", "confined": True},
    ]


# A promotion; the test before has one daily.
@pytest.mark.turn("tilegym_db/cli/bench.py", "tilegym_db/measurement/benchmark.py")
def test_bench_verifies_what_passed_if_asked(cli, row_scale, home):
    result = cli("bench", "--gpu", "cpu", "--verify")
    assert result.code == 0
    assert 'traces: {"PASSED": 2}' in result.out


@pytest.fixture
def failed(cli, row_scale, home, tmp_path):
    path = tmp_path / "wrong.py"
    path.write_text(WRONG)
    assert cli("add-solution", path, "-d", "row_scale", "-l", "python", "--name", "row_scale_wrong").code == 0
    assert cli("bench", "row_scale_wrong", "--gpu", "cpu").code == 1
    (row,) = cli("sql", "SELECT failure_command FROM traces WHERE status <> 'PASSED'", "--json").json()
    return shlex.split(row["failure_command"])


@pytest.mark.turn("tilegym_db/cli/bench.py", "tilegym_db/measurement/benchmark.py")  # a bench run each
def test_a_failure_names_the_command_that_shows_it_again(cli, failed):
    assert failed[:4] == ["tilegym-db", "debug", "reproduce", "row_scale_wrong"]
    result = cli(*failed[1:])
    assert result.code == 1
    assert "status: INCORRECT_NUMERICAL" in result.out
    assert "first wrong index: [" in result.out
    again = cli(*failed[1:], "--json").json()
    assert again["got"] == "0"


@pytest.mark.turn("tilegym_db/cli/bench.py", "tilegym_db/measurement/benchmark.py")  # a bench run each
def test_another_solution_passes_the_same_case(cli, failed):
    failed[3] = "row_scale_stock"
    result = cli(*failed[1:])
    assert result.code == 0
    assert "status: PASSED" in result.out


@pytest.mark.parametrize(
    ("arguments", "cause", "fact"),
    [
        (["--axes", "M=x"], "number_not_whole", "--axes: M"),
        (["--axes", "M"], "pair_invalid", "--axes: 'M'"),
        (["--axes", "M=2", "--axes", "M=3"], "pair_repeated", "--axes: 'M'"),
        (["--axes", "M=2", "--axes", "N=3"], "scalar_missing", "--scalar factor="),
        (["--distribution", "norml"], "contents_unknown", "'normal'"),
        (["--axes", "M=2", "--axes", "N=3", "--scalar", "factor=2", "--layout", "y=x"], "tensor_unknown", "'y'"),
    ],
)
def test_a_case_that_makes_no_sense_is_refused(cli, row_scale, home, arguments, cause, fact):
    result = cli("debug", "reproduce", "row_scale_stock", "--dtype", "T=float32", "--gpu", "cpu", *arguments)
    assert result.code in (1, 2)
    assert result.cause == cause
    assert fact in " ".join(result.err.split())
