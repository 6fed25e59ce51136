"""Every command that a message, a help text or a page names exists, with these options and a value for each that takes one."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

import tilegym_db
from tilegym_db.cli.commands import every_command

PACKAGE = Path(tilegym_db.__file__).parent
COMMANDS = every_command()
GROUPS = {name.split()[0] for name in COMMANDS if " " in name}
COMMAND = re.compile(r"(?P<before>: |'|`|run |\$ |^)tilegym-db (?P<words>[a-z][^\n;()`]*)", re.MULTILINE)
SENTENCE_END = re.compile(r"[.,:]( |$)|'( |$)")
PROSE = {"judges", "cannot"}
"""What follows the name of the program at the start of a sentence."""
STANDS_FOR = "X"
"""Stands for what is filled into an f-string."""


def texts() -> Iterator[tuple[str, str]]:
    """Yield the place and the text of every literal of the package; values of f-strings are left out."""
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else STANDS_FOR for part in node.values]
                yield f"{path.relative_to(PACKAGE)}:{node.lineno}", "".join(map(str, parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
                yield f"{path.relative_to(PACKAGE)}:{node.lineno}", node.value


def named() -> list[tuple[str, str]]:
    """Return the place and the words of every command that the package names."""
    return [
        (place, SENTENCE_END.split(match["words"])[0].strip())
        for place, text in texts()
        for match in COMMAND.finditer(text)
    ]


def problem(words: str) -> str | None:
    """Return what is wrong with the words after ``tilegym-db``, or None. A sentence may go on after them."""
    try:
        given = shlex.split(words)
    except ValueError:
        given = words.replace("'", "").split()  # a quotation goes on after the command
    if given[0] == STANDS_FOR or given[0].startswith("-"):
        return None
    name = " ".join(given[:2]) if given[0] in GROUPS and len(given) > 1 else given[0]
    if name not in COMMANDS:
        name = given[0]
    if name not in COMMANDS:
        return (
            None if given[0] in PROSE or (name in GROUPS and len(given) == 1) else f"no command '{' '.join(given[:2])}'"
        )
    options = {text: one for one in COMMANDS[name].params for text in (*one.opts, *one.secondary_opts)}
    for word in given:
        option = word.partition("=")[0]
        if not re.fullmatch(r"--?[a-z][a-z-]*", option):
            continue
        if option not in options and option != "--help":
            return f"{name} has no option {option}"
    return None


def test_every_named_command_and_option_exists() -> None:
    found = named()
    assert len(found) > 100
    assert [(place, words, said) for place, words in found if (said := problem(words))] == []


@pytest.mark.parametrize("words", ["bench X --gpu X", "task prompt X > prompt.md", 'sql "SELECT 1"', "check"])
def test_right_command_is_no_problem(words: str) -> None:
    assert problem(words) is None


@pytest.mark.parametrize("words", ["recommend", "bench X --no-such-option", "task promp X"])
def test_wrong_command_or_option_is_a_problem(words: str) -> None:
    assert problem(words) is not None
