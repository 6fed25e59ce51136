"""The kinds of values that fields of records have: numbers that are numbers, and texts of bounded length.

JSON tells ``4``, ``"4"`` and ``true`` apart, and so do records.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import AfterValidator, Strict

from tilegym_db.errors import RecordError

__all__ = ["MAX_AXIS", "MAX_TEXT", "Flag", "Int64", "Line", "Prose", "Real", "longest_text", "shown"]

MAX_TEXT = 200_000
"""The most characters of any text in a record: sources and logs are the longest."""
MAX_LINE = 500
MAX_PROSE = 20_000
_CONTROL = frozenset(("Cc", "Cs", "Zl", "Zp"))  # control characters, halves of surrogate pairs, ends of lines
MAX_AXIS = 1 << 40
"""The largest size of an axis: no tensor of that many bytes fits into any GPU, nor into a hundred of them."""


def _in_64_bits(value: int) -> int:
    if not -(1 << 63) <= value < 1 << 63:
        raise RecordError("this whole number does not fit in 64 bits", code="number_out_of_range")
    return value


def _text(most: int, allowed: str) -> Callable[[str], str]:
    def check(value: str) -> str:
        if len(value) > most:
            raise RecordError(
                f"a text of {len(value)} characters; at most {most} are allowed here", code="text_too_long"
            )
        if value.isprintable():  # nearly every text, at once; what is printable is none of those
            return value
        for index, character in enumerate(value):
            if unicodedata.category(character) in _CONTROL and character not in allowed:
                raise RecordError(
                    f"the character {character!r} at position {index} is not allowed here", code="character_not_allowed"
                )
        return value

    return check


Int64 = Annotated[int, Strict(), AfterValidator(_in_64_bits)]
"""A whole number that the database can hold too; no text, no boolean."""
Real = Annotated[float, Strict()]
"""A finite number; no text, no boolean."""
Flag = Annotated[bool, Strict()]
"""``true`` or ``false``; no number, no text."""
Line = Annotated[str, AfterValidator(_text(MAX_LINE, "\t"))]
"""One short line: a tag, an author."""
Prose = Annotated[str, AfterValidator(_text(MAX_PROSE, "\n\t"))]
"""A description, which may have several lines."""


def shown(text: str, most: int = 120) -> str:
    """A text as a message may show it: on one line, and cut where it is long."""
    clean = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[: most + 1])
    return clean if len(text) <= most else f"{clean[:most]}..."


def longest_text(value: Any) -> tuple[str, int]:
    """Where the longest text in a JSON value stands, and how many characters it has; keys count too."""
    longest: tuple[Any, ...] = ()
    size = 0
    # An item, whether it is a key, and where it stands: its step and the place around it. A name costs more than the search.
    open_: list[tuple[Any, bool, tuple[Any, ...]]] = [(value, False, ())]
    while open_:
        item, is_key, place = open_.pop()
        if isinstance(item, str):
            if len(item) > size:
                longest, size = (is_key, place), len(item)
        elif isinstance(item, dict):
            for key, inner in item.items():
                open_.append((str(key), True, place))
                open_.append((inner, False, (str(key), place)))
        elif isinstance(item, list | tuple):
            open_ += [(inner, False, (index, place)) for index, inner in enumerate(item)]
    if not longest:
        return "", 0
    is_key, place = longest
    name = _spelled(place) or "it"
    return f"a key of {name}" if is_key else name, size


def _spelled(place: tuple[Any, ...]) -> str:
    steps = []
    while place:
        step, place = place
        steps.append(f"[{step}]" if isinstance(step, int) else f".{shown(step, 40)}")
    return "".join(reversed(steps)).lstrip(".")
