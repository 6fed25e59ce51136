"""One line of what ``tilegym-db doctor`` found, and how it is printed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "missing", "problem"]
MARKS: dict[State, str] = {"ok": "ok     ", "missing": "missing", "problem": "PROBLEM"}


@dataclass(frozen=True)
class Check:
    """One line of the report. ``missing`` is something optional that is not here, ``problem`` something broken."""

    what: str
    state: State
    detail: str
    fix: str = ""


def check_lines(check: Check, width: int | None) -> list[str]:
    """A check in lines of ``width`` characters; None: one line each for what it found and for its fix."""
    import textwrap

    head = f"{MARKS[check.state]}  {check.what:<11}  "
    given = [(head, check.detail), (" " * len(head) + "fix: ", check.fix)]
    lines = []
    for first, text in given:
        if text and width is None:
            lines.append(first + text)
        elif text and width is not None:
            wrapper = textwrap.TextWrapper(width, initial_indent=first, subsequent_indent=" " * len(head))
            wrapper.break_long_words = wrapper.break_on_hyphens = False
            lines += wrapper.wrap(text)
    return lines
