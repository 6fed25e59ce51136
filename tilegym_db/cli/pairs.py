"""One syntax for options that name things: ``--axes M=1,N=4096`` or ``--axes M=1 --axes N=4096``, in every command."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tilegym_db.records.dtypes import Scalar

__all__ = ["parse_axes", "parse_pairs", "parse_scalars", "parse_tunables"]

LARGEST_SIZE = (1 << 63) - 1


def parse_pairs(option: str, texts: Sequence[str] | None) -> dict[str, str]:
    """``["M=1,N=2"]`` or ``["M=1", "N=2"]`` -> ``{"M": "1", "N": "2"}``. A comma within brackets is part of a value.

    Raises:
        UsageError: a part is not ``name=value``, or a name is given twice.
    """
    from tilegym_db.errors import UsageError

    found: dict[str, str] = {}
    for part in (part.strip() for text in texts or () for part in _parts(text)):
        key, separator, value = (piece.strip() for piece in part.partition("="))
        if not (separator and key and value):
            raise UsageError(f"{option}: {part!r} must read name=value, as in M=4096.", code="pair_invalid")
        if key in found:
            raise UsageError(f"{option}: '{key}' is given twice.", code="pair_repeated")
        found[key] = value
    return found


def parse_axes(option: str, texts: Sequence[str] | None) -> dict[str, int]:
    """:func:`parse_pairs` of sizes.

    Raises:
        UsageError: a size is no whole number, or none that 64 bits hold.
    """
    return {axis: _size(option, axis, text) for axis, text in parse_pairs(option, texts).items()}


def parse_scalars(option: str, texts: Sequence[str] | None) -> dict[str, Scalar]:
    """:func:`parse_pairs` of scalars; NaN and infinity are refused."""
    import math

    from tilegym_db.errors import UsageError

    scalars = {name: parse_scalar(text) for name, text in parse_pairs(option, texts).items()}
    for name, value in scalars.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"{option}: {name} must be a finite number, not {value}.", code="number_not_finite")
        if isinstance(value, int) and not -LARGEST_SIZE <= value <= LARGEST_SIZE:
            raise UsageError(f"{option}: {name} does not fit in 64 bits.", code="number_too_large")
    return scalars


def parse_tunables(option: str, texts: Sequence[str] | None) -> dict[str, bool | int | float | str]:
    """:func:`parse_pairs` of a config's values, as JSON spells them; anything else is text."""
    return {name: _tunable(text) for name, text in parse_pairs(option, texts).items()}


def parse_scalar(text: str) -> Scalar:
    """``true``, ``false``, ``none``, a number, or the text itself."""
    words: dict[str, Scalar] = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def _parts(text: str) -> Iterator[str]:
    depth, start = 0, 0
    for index, character in enumerate(text):
        if character in "([":
            depth += 1
        elif character in ")]":
            depth = max(0, depth - 1)
        elif character == "," and depth == 0:
            yield text[start:index]
            start = index + 1
    yield text[start:]


def _size(option: str, axis: str, text: str) -> int:
    from tilegym_db.errors import UsageError

    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit()):
        raise UsageError(f"{option}: {axis} must be a whole number, not {text[:40]!r}.", code="number_not_whole")
    if len(digits) > 19 or abs(int(text)) > LARGEST_SIZE:
        raise UsageError(f"{option}: {axis} does not fit in 64 bits.", code="number_too_large")
    return int(text)


def _tunable(text: str) -> bool | int | float | str:
    import json

    try:
        value = json.loads(text.lower() if text in ("True", "False") else text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, bool | int | float | str) else text
