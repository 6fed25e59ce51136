"""JSON as records are written in: UTF-8, no NaN, and no key twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from tilegym_db.errors import RecordError
from tilegym_db.files import decode
from tilegym_db.records.fields import shown

__all__ = ["parse_object"]


class _RepeatedKeyError(Exception):
    """A key that one object has twice."""


def parse_object(text: str | bytes, kind: str, source: str | Path) -> Any:
    """The value of a JSON text.

    Args:
        text: the whole of a file, or a line of one.
        kind: what it should be, for the message.
        source: where it came from (a path, or ``path:line``), for the message.

    Raises:
        RecordError: it is not UTF-8 or not JSON, or an object has a key twice.
    """
    if isinstance(text, bytes):
        text = decode(text, source)
    try:
        # Stricter than the json module: no NaN, no half of a surrogate pair, no number that takes forever to read.
        value = from_json(text, allow_inf_nan=False)
    except (ValueError, TypeError) as error:  # TypeError: a str that no encoding can hold
        raise RecordError(
            f"{source}: not valid JSON: {error}. Fix the file and run the command again.", code="json_syntax"
        ) from None
    try:
        json.loads(text, object_pairs_hook=_distinct, parse_int=len, parse_float=len)
    except _RepeatedKeyError as repeated:
        raise RecordError(
            f"{source}: not a valid {kind}: the key '{repeated}' occurs twice in one object. Remove one of them.",
            code="key_repeated",
        ) from None
    return value


def _distinct(pairs: list[tuple[str, Any]]) -> None:
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            raise _RepeatedKeyError(shown(name))
        seen.add(name)
