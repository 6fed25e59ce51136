"""The paths of users on an empty home: each command ends as expected, and each next one that is printed runs as printed."""

from __future__ import annotations

from pathlib import Path

import pytest
from user_paths import PATHS, next_commands, walk

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

DAILY = "analyst"


@pytest.mark.turn("tilegym_db/cli/kit/")  # a page of the same commands is run daily
@pytest.mark.parametrize(
    "user", [pytest.param(user, marks=() if user == DAILY else pytest.mark.nightly) for user in PATHS]
)
def test_path_of_a_user_ends_as_expected(user: str, tmp_path: Path) -> None:
    lines, surprises = walk(user, tmp_path)
    assert surprises == 0, "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "commands"),
    [
        ("added. Next: tilegym-db dev 'a b/', then: tilegym-db list", ["tilegym-db dev 'a b/'", "tilegym-db list"]),
        ("Next: tilegym-db task prompt 1 > prompt.md", ["tilegym-db task prompt 1 > prompt.md"]),
        ("Why the first: tilegym-db explain a --axes M=1\n", ["tilegym-db explain a --axes M=1"]),
        (
            "To reproduce it: tilegym-db debug reproduce a --layout 'x=strided(1, 1)' --gpu cpu",
            ["tilegym-db debug reproduce a --layout 'x=strided(1, 1)' --gpu cpu"],
        ),
        (
            "To reproduce it: tilegym-db debug reproduce a --layout 'x=strided(1)@w+2145' --seed 3",
            ["tilegym-db debug reproduce a --layout 'x=strided(1)@w+2145' --seed 3"],
        ),
        ("(Next: tilegym-db list)", ["tilegym-db list"]),
        ("x. Next, once the machine is less busy: tilegym-db bench a --gpu cpu\n", ["tilegym-db bench a --gpu cpu"]),
        ("a table of tilegym-db", []),
    ],
)
def test_next_commands_are_found_as_they_are_printed(text: str, commands: list[str]) -> None:
    assert list(next_commands(text)) == commands
