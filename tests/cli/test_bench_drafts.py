"""``bench`` and ``debug reproduce`` of files that are not in the catalog."""

from __future__ import annotations

import json
import shlex

import pytest

from tilegym_db.catalog import Catalog
from tilegym_db.measurement import machine

RIGHT = "def run(x, weight, factor):\n    return (x.float() * weight.float() * factor).to(x.dtype)\n"
WRONG = "def run(x, weight, factor):\n    return (x.float() * weight.float()).to(x.dtype)\n"


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch):
    monkeypatch.setattr(machine, "_cuda_machine", lambda index: None)


@pytest.fixture
def kernel(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(RIGHT)
    return path


def test_file_is_screened_and_the_next_command_adds_it(cli, row_scale, home, kernel):
    result = cli("bench", kernel, "-d", "row_scale", "--gpu", "cpu", "--quick")
    assert result.code == 0
    assert "row_scale_python_mine" in result.out
    command = result.out.partition("Next: tilegym-db ")[2]
    assert "row_scale_python_mine" not in Catalog.default().solutions
    assert cli(*shlex.split(command)).code == 0
    assert "row_scale_python_mine" in Catalog.default().solutions
    again = cli("bench", kernel, "-d", "row_scale", "--gpu", "cpu", "--quick")
    assert "already measured" in again.out


def test_edited_file_of_an_added_solution_has_another_name(cli, row_scale, home, kernel):
    cli("add-solution", kernel, "-d", "row_scale", "-l", "python")
    kernel.write_text("# edited\n" + RIGHT)
    result = cli("bench", kernel, "-d", "row_scale", "--gpu", "cpu", "--quick")
    assert result.out.rstrip().endswith(f"add-solution {kernel} -d row_scale -l python --replace")
    names = {row["solution"] for row in cli("sql", "SELECT solution FROM traces", "--json").json()}
    assert any(name.startswith("row_scale_python_mine_draft_") for name in names)


def test_failing_draft_ends_with_a_command_that_shows_it_again(cli, row_scale, home, tmp_path, solution_record):
    folder = tmp_path / "draft"
    folder.mkdir()
    (folder / "kernel.py").write_text(WRONG)
    spec = {**solution_record()["spec"], "destination_passing_style": False}
    (folder / "solution.json").write_text(json.dumps(solution_record(name="row_scale_wrong", spec=spec)))
    result = cli("bench", folder, "--gpu", "cpu", "--quick")
    assert result.code == 1
    assert "Next: tilegym-db show " in result.out  # the stock code beside it passes
    said = result.err.splitlines()
    place = next(number for number, line in enumerate(said) if line.startswith("smallest failing case: "))
    command = shlex.split(said[place + 1])
    assert command[:4] == ["tilegym-db", "debug", "reproduce", str(folder)]
    again = cli(*command[1:])
    assert again.code == 1
    assert "INCORRECT_NUMERICAL" in again.out
    known = cli("bench", folder, "--gpu", "cpu", "--quick")
    assert known.out.rstrip().endswith(f"bench {folder} --gpu cpu --quick --force")  # and not: add it


def test_draft_that_nothing_measured_is_not_to_be_repeated(cli, row_scale, home, tmp_path, solution_record):
    folder = tmp_path / "draft"
    folder.mkdir()
    (folder / "kernel.py").write_text(RIGHT)
    spec = {**solution_record()["spec"], "destination_passing_style": False, "dependencies": ["no-such-package>=1"]}
    (folder / "solution.json").write_text(json.dumps(solution_record(name="row_scale_lacks", spec=spec)))
    result = cli("bench", folder, "--gpu", "cpu", "--quick")
    assert "no-such-package" in result.out
    assert "--force" not in result.out


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (["{kernel}"], "options_missing"),
        (["{kernel}", "-d", "row_scael"], "definition_unknown"),
        (["{kernel}", "-d", "row_scale", "--verify"], "draft_not_verified"),
        (["{kernel}.gone/", "-d", "row_scale"], "file_missing"),
        (["row_scale", "-d", "row_scale"], "definition_without_function"),
    ],
)
def test_wrong_requests_are_wrong_usage(arguments, cause, cli, row_scale, home, kernel):
    result = cli("bench", *(word.format(kernel=kernel) for word in arguments), "--gpu", "cpu")
    assert (result.code, result.cause) == (2, cause)
