"""What is asked of the loop's commands is refused with 2 before a model is built, where nothing could come of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tilegym_db.catalog import Catalog
from tilegym_db.loop.auto import run_author
from tilegym_db.loop.from_model import tasks_from_model
from tilegym_db.models import random_model

Say = Callable[..., tuple[int, str, str]]
CONFIG = {
    "model_type": "qwen3", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 2048,
}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Say:
    """Run the command line; exit status, stdout and stderr. A model that is built is an error of the test."""

    def built(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was built")

    monkeypatch.setattr(random_model, "unchecked_model", built)

    def run(*arguments: object) -> tuple[int, str, str]:
        from tilegym_db.cli.app import main

        monkeypatch.setattr("sys.argv", ["tilegym-db", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            main()
        captured = capsys.readouterr()
        return int(stopped.value.code or 0), captured.out, captured.err

    return run


@pytest.mark.parametrize(
    ("author", "reason"),
    [
        ("", "--author '' is empty"),
        ("''", "is empty"),
        ('"', "No closing quotation"),
        ("no-such-author --fast", "the program 'no-such-author' does not exist"),
        (__file__, "test_requests.py' does not exist or is not executable"),
    ],
)
def test_author_that_is_no_command_is_refused_before_a_build(author: str, reason: str, said: Say, config: Path) -> None:
    status, _, error = said("task", "auto", config, "--gpu", "cpu", "--author", author)
    assert status == 2
    assert reason in error


def test_author_is_found_from_the_folder_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "author.sh"
    script.write_text(f"#!/bin/sh\nexec {sys.executable} -c \"open('kernel.py', 'w')\"\n")
    script.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    assert run_author("./author.sh", "", tmp_path / "work", Catalog.default(), 60.0) is None
    assert (tmp_path / "work" / "kernel.py").is_file()


@pytest.mark.parametrize("command", [("task", "from-model"), ("task", "auto")])
def test_unknown_language_is_refused_before_a_model_is_built(command: tuple[str, ...], said: Say, config: Path) -> None:
    status, _, error = said(*command, config, "--gpu", "cpu", "--language", "cuda")
    assert status == 2
    assert "unknown language 'cuda'; known: " in error


@pytest.mark.parametrize("budget", ["99999999999999999999h", "721h", "2592001s"])
def test_a_budget_of_more_than_30_days_is_refused(budget: str, said: Say, config: Path) -> None:
    status, _, error = said("task", "auto", config, "--gpu", "cpu", "--budget", budget)
    assert status == 2
    assert f"--budget {budget} is more than 30 days" in error


@pytest.mark.parametrize("bar", ["nan", "5000", "1.0", "-1", "inf"])
def test_a_bar_that_no_task_can_have_is_refused(bar: str, operator: Path, said: Say, home: Path) -> None:
    status, _, error = said("task", "create", "row_scale", "--gpu", "cpu", "--min-speedup", bar)
    assert status == 2
    assert f"--min-speedup {bar.removesuffix('.0')}: " in error
    assert "1.10" in error
    assert not (home / "loop" / "tasks.jsonl").exists()


def test_a_glob_that_fits_no_workload_is_named_as_it_was_typed(operator: Path, said: Say) -> None:
    asked = ("task", "create", "row_scale", "--gpu", "cpu", "--workload", "nomatch", "--workload", "M=7,*")
    status, _, error = said(*asked)
    assert status == 2
    assert "no workload of row_scale fits --workload nomatch or M=7,*. Try: tilegym-db list --workloads" in error


@pytest.mark.parametrize(("language", "told"), [("triton", True), ("python", False)])
def test_a_task_whose_kernels_nothing_can_verify_here_says_so(
    language: str, told: bool, operator: Path, said: Say
) -> None:
    status, out, error = said("task", "create", "row_scale", "--gpu", "cpu", "-l", language, "--workload", "cpu")
    assert (status, len(out.split())) == (0, 1)
    assert (f"{language} kernels are verified in an interpreter on a CPU" in error) == told


@pytest.mark.turn("tilegym_db/loop/from_model.py")  # a profile of a model
@pytest.mark.slow
def test_part_that_the_profiled_call_does_not_reach_is_named(config: Path) -> None:
    found = tasks_from_model(config, language="python", gpu="cpu", prompt=16, dtype="float32")
    outcomes = {piece.definition: piece.outcome for piece in found.pieces}
    assert outcomes["attention_decode"] == "no task: the profiled call does not call attention_decode"
    assert outcomes["rms_norm"].startswith("task ")
    assert not any("()" in piece.outcome for piece in found.pieces)
