from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tilegym_db.cli.commands import COMMANDS, OLD_NAMES
from tilegym_db.errors import NoSolutionError, NotFoundError, StoreError, TilegymDBError, UsageError

EVERY_COMMAND = [name for panel in COMMANDS.values() for name in panel]


def test_help_lists_every_command(cli):
    result = cli("--help")
    assert result.code == 0
    assert [name for name in EVERY_COMMAND if name not in result.out] == []


@pytest.mark.parametrize("name", EVERY_COMMAND)
def test_every_command_explains_itself(name, cli):
    result = cli(name, "--help")
    assert result.code == 0
    assert "Usage" in result.out


@pytest.mark.parametrize("name", sorted(OLD_NAMES))
def test_an_old_name_answers_with_the_new_one(name, cli):
    result = cli(name, "two words", "--gpu", "cpu")
    assert (result.code, result.cause, result.out) == (2, "command_renamed", "")
    said = " ".join(result.err.split())
    assert (
        said == f"error: '{name}' is now '{OLD_NAMES[name]}'. Try: tilegym-db {OLD_NAMES[name]} 'two words' --gpu cpu"
    )


@pytest.mark.parametrize("name", sorted(OLD_NAMES))
def test_a_new_name_is_a_command(name, cli):
    *words, last = OLD_NAMES[name].split()
    assert name not in EVERY_COMMAND
    if last.startswith("--"):
        assert last in cli(*words, "--help").out
    else:
        assert cli(*words, last, "--help").code == 0


@pytest.mark.parametrize("words", [("data", "imprt"), ("doctor", "calibrat"), ("task", "sumbit"), ("debug", "profil")])
def test_an_unknown_command_of_a_group_names_the_nearest(words, cli):
    result = cli(*words)
    assert (result.code, result.cause) == (2, "command_unknown")
    assert "Did you mean" in result.err
    assert f"Try: tilegym-db {words[0]} --help" in " ".join(result.err.split())


@pytest.mark.parametrize("words", [("doctor", "--json", "versions"), ("report", "--trust", "weekly")])
def test_an_option_before_the_command_of_a_group_is_refused(words, cli):
    result = cli(*words)
    assert (result.code, result.cause, result.out) == (2, "option_misplaced", "")
    assert words[1] in result.err


def test_an_unknown_command_is_wrong_usage(cli):
    result = cli("lsit")
    assert result.code == 2
    assert "lsit" in result.err


@pytest.mark.parametrize(
    ("error", "code"), [(StoreError, 1), (TilegymDBError, 1), (UsageError, 2), (NotFoundError, 2), (NoSolutionError, 3)]
)
def test_error_is_one_paragraph_on_stderr_with_its_exit_status(error, code, cli, monkeypatch):
    def fail(*arguments: object, **keywords: object) -> None:
        raise error("the disk is full. Free some space.")

    monkeypatch.setattr("tilegym_db.catalog.Catalog.default", fail)
    result = cli("list")
    assert (result.code, result.out, result.err) == (code, "", "error: the disk is full. Free some space.\n")


def test_an_interrupt_exits_130_without_a_traceback(home):
    # Standard input that never ends keeps the command waiting until it is interrupted.
    command = [sys.executable, "-m", "tilegym_db.cli.app", "sql", "-"]
    environment = {**os.environ, "TILEGYM_DB_HOME": str(home)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True
    ) as process:
        time.sleep(1.5)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        text = process.stderr.read()
        assert process.wait(timeout=20) == 130
    assert "Traceback" not in text


@pytest.mark.parametrize(("words", "meant"), [("task list", "task status"), ("ls", "list"), ("task stats", "--help")])
def test_word_of_another_tool_is_answered_with_the_command(cli, words, meant):
    result = cli(*words.split())
    assert (result.code, result.cause) == (2, "command_unknown")
    assert result.err.strip().endswith(meant)
