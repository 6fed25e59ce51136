"""Detects whether the database is in step with its sources. ``meta`` keeps a fingerprint of each part."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilegym_db.errors import TilegymDBError
from tilegym_db.files import read_bytes, write_atomically
from tilegym_db.published.input_files import (
    imported_manifests,
    loop_files,
    own_peaks_files,
    published_model_files,
    published_peaks_files,
    published_tuning_files,
    record_files,
    shipped_locks,
    shipped_traces,
)
from tilegym_db.records.text import length_prefixed_digest
from tilegym_db.store import statements

if TYPE_CHECKING:
    from tilegym_db.catalog import Catalog


def fingerprints(catalog: Catalog, home: Path) -> dict[str, str]:
    """Return the ``meta`` of a store in step with this package, this catalog and this home folder.

    Reads names, sizes and times only.
    """
    locks = shipped_locks(catalog)
    return {
        "views": views_fingerprint(),
        "catalog": fingerprint(record_files(catalog)),
        "shipped_traces": fingerprint([*shipped_traces(catalog), *locks]),
        "peaks": fingerprint([*own_peaks_files(home), *published_peaks_files(catalog), *locks]),
        "searches": fingerprint([*published_tuning_files(catalog), *locks]),
        "model_runs": fingerprint([*published_model_files(catalog), *locks]),
        "imported": fingerprint(imported_manifests(home)),
        "loop": fingerprint(loop_files(home, catalog)),
    }


def views_fingerprint() -> str:
    """Return the ``meta`` of the views of this package."""
    return length_prefixed_digest([statements.tables_and_views_sql().encode()])


def outdated(meta: dict[str, str], wanted: dict[str, str]) -> list[str]:
    """Return the outdated parts of a store, by their key in ``meta``."""
    return [key for key, value in wanted.items() if meta.get(key) != value]


def fingerprint(paths: Iterable[Path]) -> str:
    """Return a digest of the names, sizes and times of the files that exist, in any order."""
    parts = []
    for path in sorted(paths):
        try:
            status = path.stat()
        except OSError:  # a link to nothing, or a file removed since
            continue
        if stat.S_ISREG(status.st_mode):
            parts.append(f"{path}|{status.st_size}|{status.st_mtime_ns}".encode(errors="surrogateescape"))
    return length_prefixed_digest(parts)


# ---- listed ---------------------------------------------------------------------------------------
# Caches the output of ``tilegym-db list`` in the home folder until the catalog's files or this package change, since
# reading a catalog takes most of the time of ``list``. A catalog with left-out records is read every time, so that the
# warning is repeated. A fault of the cache file costs only time.

FILE_NAME = "listed.json"
MAX_BYTES = 8 << 20


def state_of(catalog: Catalog) -> str:
    """Return the state behind the rows: names, sizes and times of the records and of the modules that validate them."""
    package = Path(__file__).parents[1]
    modules = [path for name in ("catalog", "records") for path in package.glob(f"{name}/*.py")]
    return fingerprint([*record_files(catalog), *modules, package / "cli" / "list.py"])


def kept_rows(home: Path, state: str) -> list[dict[str, Any]] | None:
    """Return the rows cached at this state, or None."""
    with suppress(TilegymDBError, ValueError, LookupError, TypeError, RecursionError):
        content = json.loads(read_bytes(home / FILE_NAME, "list of the catalog", MAX_BYTES))
        if content["state"] == state and all(isinstance(row, dict) for row in content["rows"]):
            return list(content["rows"])
    return None


def keep_rows(home: Path, state: str, rows: list[dict[str, Any]]) -> None:
    """Cache rows; ``state`` is the state before the catalog was read."""
    with suppress(TilegymDBError):
        write_atomically(home / FILE_NAME, json.dumps({"state": state, "rows": rows}).encode())
