"""Entries of ``resolver.json``, the one table for all Definitions of a GPU that was published before there were trace sets."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from tilegym_db.errors import RecordError
from tilegym_db.resolver.entries import Candidate, DtypesKey, Entry, MeasuredEntries, dtypes_key, scalar_hull

__all__ = ["measured_of_old", "parts_of_old"]

VERSION = 2

WRITE_ANEW = "Write it anew: tilegym-db publish --gpu GPU"


def parts_of_old(text: bytes, path: Path) -> tuple[str, str, str, list[dict[str, Any]]]:
    """GPU, target, date and entries of a file.

    Raises:
        RecordError: it is none, or was written by a newer version.
    """
    try:
        content = from_json(text, cache_strings="all")
    except ValueError as error:
        raise RecordError(
            f"{path}: cannot read this resolver table: {error}. {WRITE_ANEW}", code="table_unreadable"
        ) from None
    version = content.get("schema_version") if isinstance(content, dict) else None
    if isinstance(version, int) and version > VERSION:
        raise RecordError(
            f"{path}: schema_version {version} was written by a newer tilegym-db (this one reads {VERSION}). "
            "Upgrade tilegym-db, or publish again with this version.",
            code="version_newer",
        )
    try:
        return content["gpu"], content["sm"], content["published"], content["entries"]
    except (TypeError, KeyError) as error:
        raise RecordError(
            f"{path}: not a resolver table: {error} is missing or wrong. {WRITE_ANEW}", code="table_invalid"
        ) from None


def measured_of_old(raws: list[dict[str, Any]], source: str, origin: str) -> MeasuredEntries:
    """The entries of one Definition; ``source`` is the file, for error messages.

    Raises:
        RecordError: one is not valid.
    """
    return _old_entries([_old_entry(raw, source, origin) for raw in raws])


def _old_entries(entries: list[Entry]) -> MeasuredEntries:
    grouped: dict[DtypesKey, list[Entry]] = {}
    for entry in entries:
        grouped.setdefault(dtypes_key(entry.dtypes), []).append(entry)
    by_dtypes = {key: partial(tuple, found) for key, found in grouped.items()}
    return MeasuredEntries(by_dtypes, scalar_hull(entry.scalars for entry in entries))


def _old_entry(raw: dict[str, Any], source: str, origin: str) -> Entry:
    try:
        candidates = tuple(
            Candidate(**{"origin": origin, **candidate, "shipped_source": False}) for candidate in raw["candidates"]
        )
        return Entry(**{**raw, "candidates": candidates})
    except (TypeError, KeyError) as error:
        what = f"an entry of {raw.get('definition')} is not valid: {error}"
        raise RecordError(f"{source}: {what}. {WRITE_ANEW}", code="table_entry_invalid") from None
