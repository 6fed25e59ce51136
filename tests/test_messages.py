"""The wording of errors, which other tests do not compare: they assert codes."""

from __future__ import annotations

import re
from pathlib import Path

import messages

ROOT = Path(__file__).parents[1]


def test_messages_equal_the_snapshot():
    found = "".join(f"{code}\t{message}\n" for code, message in messages.messages(ROOT / "tilegym_db"))
    assert found == messages.SNAPSHOT.read_text(), (
        "wording changed; python tools/messages.py --write, and read the diff"
    )


def test_codes_are_short_lower_case_names():
    codes = {code for code, _ in messages.messages(ROOT / "tilegym_db")}
    assert [code for code in codes if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+){0,4}", code)] == []
