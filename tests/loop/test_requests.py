"""What is asked of the loop's commands is refused with 2 before a model is built, where nothing could come of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tilegym_db.catalog import Catalog
from tilegym_db.integrations.transformers import random_model
from tilegym_db.loop.author import run_author

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
        ("", "--author '' is no command"),
        ("''", "is no command"),
        ('"', "No closing quotation"),
        ("no-such-author --fast", "there is no program 'no-such-author'"),
        (__file__, "test_requests.py', or it may not be run"),
    ],
)
def test_an_author_that_is_no_command_is_refused_before_a_model_is_built(
    author: str, reason: str, said: Say, config: Path
) -> None:
    status, _, error = said("auto-kernelize", config, "--gpu", "cpu", "--author", author)
    assert status == 2
    assert reason in error


def test_an_author_is_found_from_the_folder_in_which_the_command_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "author.sh"
    script.write_text(f"#!/bin/sh\nexec {sys.executable} -c \"open('kernel.py', 'w')\"\n")
    script.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    assert run_author("./author.sh", "", tmp_path / "work", Catalog.default(), 60.0) is None
    assert (tmp_path / "work" / "kernel.py").is_file()


@pytest.mark.parametrize("command", [("task", "from-model"), ("auto-kernelize",)])
def test_a_language_that_is_none_is_refused_before_a_model_is_built(
    command: tuple[str, ...], said: Say, config: Path
) -> None:
    status, _, error = said(*command, config, "--gpu", "cpu", "--language", "cuda")
    assert status == 2
    assert "unknown language 'cuda'; known: " in error
