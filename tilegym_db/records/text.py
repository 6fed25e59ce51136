"""Texts of records: names, keys, canonical JSON, digests and parsing. Reading a database needs them, and no record class."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tilegym_db.errors import RecordError
from tilegym_db.files import decode

NAME_PATTERN = r"^[a-z0-9][a-z0-9_.-]{0,127}$"
FIRST_YEAR, LAST_YEAR = 2000, 2199
"""Years of a record. Beyond them a clock was wrong, and time zones and plots would leave the calendar."""
_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def binding_key(values: Mapping[str, object]) -> str:
    """Return a binding of names as canonical text, ``M=4096,N=4096``, for grouping, joining and command lines."""
    return ",".join(f"{name}={values[name]}" for name in sorted(values))


def explain_command(definition: str, axes_key: str, dtypes_key: str, gpu: str) -> str:
    """Return the command that explains one call: ``tilegym-db explain rms_norm --axes M=1,N=2048 --dtype T=bfloat16``."""
    options = (("--axes", axes_key), ("--dtype", dtypes_key), ("--gpu", gpu))
    return " ".join(["tilegym-db", "explain", definition, *(f"{name} {value}" for name, value in options if value)])


def canonical_json(value: Any) -> str:
    """Return the canonical JSON text of a value, which digests and ids are computed from."""
    return _CANONICAL.encode(value)


def length_prefixed_digest(parts: Iterable[bytes]) -> str:
    """Return the sha256 of the parts, each preceded by its length, so that different lists of parts have different digests."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def shown(text: str, most: int = 120) -> str:
    """Return a text for a message: on one line, and cut to ``most`` characters."""
    clean = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[: most + 1])
    return clean if len(text) <= most else f"{clean[:most]}..."


# ---- parsing --------------------------------------------------------------------------------------
# JSON of records is UTF-8, without NaN and without repeated keys.


class _RepeatedKeyError(Exception):
    """A key that occurs twice in one object."""


def parse_object(text: str | bytes, kind: str, source: str | Path) -> Any:
    """Parse a JSON text and return its value.

    Args:
        source: its origin (a path, or ``path:line``), for the message.

    Raises:
        RecordError: the text is not UTF-8 or not JSON, or an object has a key twice.
    """
    if isinstance(text, bytes):
        text = decode(text, source)
    from pydantic_core import from_json  # its import takes a third of the time of a short command

    try:
        # Stricter than the json module: refuses NaN, half of a surrogate pair, and numbers that take very long to parse.
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
