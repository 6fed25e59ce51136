"""The wording of errors, which other tests do not compare: they assert codes."""

from __future__ import annotations

import re
from pathlib import Path

import messages
import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def found() -> list[tuple[str, str]]:
    """Return code and message of every error of the package, whose sources are parsed once."""
    return messages.messages(ROOT / "tilegym_db")


def test_messages_equal_the_snapshot(found: list[tuple[str, str]]):
    text = "".join(f"{code}\t{message}\n" for code, message in found)
    assert text == messages.SNAPSHOT.read_text(), "wording changed; python tools/messages.py --write, and read the diff"


def test_codes_are_short_lower_case_names(found: list[tuple[str, str]]):
    codes = {code for code, _ in found}
    assert [code for code in codes if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+){0,4}", code)] == []
