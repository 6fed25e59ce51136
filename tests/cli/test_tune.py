from __future__ import annotations

import json

import pytest

from tilegym_db.measurement import machine

BLOCKED = """def run(x, weight, factor, out, *, ROWS=1):
    if ROWS == 7:
        return
    blocks = -(-x.shape[0] // ROWS)
    for row in [start for start in range(0, x.shape[0], ROWS) for _ in range(blocks)]:
        out[row : row + ROWS] = (x[row : row + ROWS].float() * weight.float() * factor).to(x.dtype)
"""
"""Each block is written as often as there are blocks, so that small ones are slower whatever else the machine does."""


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch):
    monkeypatch.setattr(machine, "_cuda_machine", lambda index: None)


@pytest.fixture
def add_blocked(cli, row_scale, solution_record, tmp_path, write_json):
    def add(*rows):
        folder = tmp_path / "blocked"
        folder.mkdir()
        (folder / "kernel.py").write_text(BLOCKED)
        record = solution_record(name="row_scale_blocked", spec={"tunables": {"ROWS": list(rows)}})
        (folder / "solution.json").write_text(json.dumps(record))
        assert cli("add-solution", folder, "-d", "row_scale", "-l", "python").code == 0

    return add


def test_a_search_ends_with_a_table_and_the_next_step(cli, add_blocked, home):
    add_blocked(1, 4)
    result = cli("tune", "row_scale", "--gpu", "cpu", "--quick")
    assert result.code == 0, result.err
    assert "row_scale_blocked" in result.out
    assert "ROWS=4" in result.out
    assert "Next: tilegym-db verify row_scale --gpu cpu" in result.err
    stored = cli("sql", "SELECT DISTINCT config FROM traces WHERE solution = 'row_scale_blocked'", "--json").json()
    assert {"ROWS": 4} in [
        json.loads(row["config"]) if isinstance(row["config"], str) else row["config"] for row in stored
    ]


@pytest.mark.turn("tilegym_db/cli/bench.py", "tilegym_db/measurement/tune/")  # a search of configs
def test_a_config_that_is_wrong_is_a_finding_and_json_says_which(cli, add_blocked, home):
    add_blocked(7)
    result = cli("tune", "row_scale_blocked", "--gpu", "cpu", "--quick", "--json")
    assert result.code == 1
    report = result.json()
    assert report["results"][0]["config"] == {}
    failed = [step for step in report["steps"] if step["outcome"] == "failed"]
    assert [(step["config"], step["status"]) for step in failed] == [({"ROWS": 7}, "INCORRECT_NUMERICAL")]


@pytest.mark.parametrize(
    ("arguments", "cause", "fact"),
    [
        (["--gpu", "h100"], "gpu_absent", "--gpu auto"),
        (["row_scal"], "name_unknown", "'row_scale'"),
        (["--budget", "-1"], "", "-1"),
        (["--workload", "M=5,*"], "workload_unmatched", "'M=5,*'"),
    ],
)
def test_what_cannot_be_tuned_is_wrong_usage(arguments, cause, fact, cli, row_scale, home):
    result = cli("tune", *arguments)
    assert (result.code, result.out) == (2, "")
    assert cause in ("", result.cause)
    assert fact in result.err
    assert not (home / "tuning").exists()
