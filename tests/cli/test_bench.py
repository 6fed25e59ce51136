from __future__ import annotations

import json

import pytest

from tilegym_db.measurement import machine
from tilegym_db.verification import admission

WRONG = 'def run(x, weight, factor, out):\n    raise ValueError("[/red] is no colour")\n'
CALL = ("--axes", "M=4,N=8", "--dtype", "T=float32", "--scalar", "factor=1")


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch):
    monkeypatch.setattr(machine, "_cuda_machine", lambda index: None)


@pytest.fixture
def wrong(cli, row_scale, tmp_path):
    path = tmp_path / "wrong.py"
    path.write_text(WRONG)
    assert cli("add-solution", path, "-d", "row_scale", "-l", "python", "--name", "row_scale_wrong").code == 0


def test_run_ends_with_a_summary_and_the_next_has_nothing_to_do(cli, row_scale, home):
    result = cli("bench", "--gpu", "cpu")
    assert result.code == 0
    assert "row_scale_stock" in result.out
    assert "1/1" in result.out
    assert 'traces: {"PASSED": 1}. Next: tilegym-db verify --gpu cpu' in result.out
    assert "1 (solution, workload) pairs on" in result.err
    again = cli("bench", "--gpu", "cpu")
    assert again.code == 0
    assert "1 not run: already measured (--force repeats it)" in again.out
    assert "traces: nothing new. Next: tilegym-db verify --gpu cpu" in again.out
    stored = cli("sql", "SELECT solution, status, gpu FROM traces", "--json").json()
    assert stored == [{"solution": "row_scale_stock", "status": "PASSED", "gpu": "cpu"}]


def test_traces_are_printed_as_json_lines_and_failure_exits_1(cli, wrong):
    result = cli("bench", "row_scale_wrong", "row_scale_stock", "--json")
    traces = {trace["solution"]: trace for trace in map(json.loads, result.out.splitlines())}
    assert result.code == 1
    assert traces["row_scale_stock"]["status"] == "PASSED"
    assert traces["row_scale_wrong"]["status"] == "RUNTIME_ERROR"


def test_failure_is_shown_with_its_reason_in_any_characters(cli, wrong):
    result = cli("bench", "row_scale_wrong")
    assert result.code == 1
    assert "row_scale_wrong RUNTIME_ERROR: raised at" in result.err
    assert "[/red] is no colour" in " ".join(result.err.split())
    assert "0/1" in result.out


@pytest.fixture
def spoil(row_scale, monkeypatch):
    """Change the operator's reference by hand, which no command for adding one allows."""
    monkeypatch.setattr(admission, "TRIAL_LIMIT_S", 1.0)

    def change(body):
        path = row_scale / "definitions" / "elementwise" / "row_scale.json"
        record = json.loads(path.read_text())
        record["reference"] = f"# Source: mine\ndef run(x, weight, factor):\n    {body}\n    return x\n"
        path.write_text(json.dumps(record))

    return change


# Four commands that each wait; test_admission.py has it daily.
@pytest.mark.turn("tilegym_db/verification/admission.py")
@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("while True: pass", "1 s"),
        ("raise ValueError(0)", "raises"),
        ("import os; os._exit(0)", "os-call"),
    ],
)
def test_reference_that_does_not_return_is_a_finding(body, message, cli, spoil):
    spoil(body)
    for arguments in (
        ["bench", "row_scale", "--gpu", "cpu"],
        ["bench", "--gpu", "cpu"],
        ["tune", "row_scale", "--gpu", "cpu"],
        ["debug", "reproduce", "row_scale_stock", *CALL, "--gpu", "cpu"],
    ):  # fmt: skip
        result = cli(*arguments)
        assert result.code == 1
        assert "row_scale" in result.err
        assert message in result.err


@pytest.mark.parametrize(
    ("arguments", "cause", "fact"),
    [
        (["--gpu", "h100"], "gpu_absent", "--gpu auto"),
        (["--gpu", "h20"], "gpu_absent", "--gpu auto"),
        (["--gpu", "x20"], "", "'x20'"),
        (["row_scal"], "name_unknown", "'row_scale'"),
        (["--language", "cuda"], "language_unknown", "python, triton, tilelang, cutile"),
        (["--workload", "M=5,*"], "workload_unmatched", "'M=5,*'"),
    ],
)
def test_what_cannot_be_run_is_wrong_usage_and_says_what_can(arguments, cause, fact, cli, row_scale, home):
    result = cli("bench", *arguments)
    assert (result.code, result.out) == (2, "")
    assert cause in ("", result.cause)
    assert fact in result.err
    assert not (home / "runs").exists()


@pytest.mark.parametrize("command", ["bench", "verify"])
def test_unwritable_times_are_refused_at_once(command, cli, row_scale, tmp_path):
    (tmp_path / "file").write_text("")
    for place in (tmp_path, tmp_path / "file" / "times.json", "/proc/times.json"):
        refused = cli(command, "--gpu", "cpu", "--times", str(place))
        assert (refused.code, refused.cause) == (2, "output_unwritable")
    assert cli("sql", "SELECT count(*) AS n FROM traces", "--json").json() == [{"n": 0}]


def test_times_go_into_a_folder_that_is_made(cli, row_scale, tmp_path):
    place = tmp_path / "new" / "times.json"
    assert cli("bench", "--gpu", "cpu", "--times", str(place)).code == 0
    assert json.loads(place.read_text())
