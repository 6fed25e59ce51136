"""Is the database in step with what it is derived from? Each part has a fingerprint, kept in ``meta``."""

from __future__ import annotations

import stat
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from tilegym_db.records.base import length_prefixed_digest
from tilegym_db.store import statements
from tilegym_db.store.input_files import (
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

if TYPE_CHECKING:
    from tilegym_db.catalog import Catalog

__all__ = ["fingerprint", "fingerprints", "outdated"]


def fingerprints(catalog: Catalog, home: Path) -> dict[str, str]:
    """What a store in step with this package, this catalog and this home folder has in ``meta``.

    Reads names, sizes and times only.
    """
    locks = shipped_locks(catalog)
    return {
        "views": length_prefixed_digest([statements.views_sql().encode()]),
        "catalog": fingerprint(record_files(catalog)),
        "shipped_traces": fingerprint([*shipped_traces(catalog), *locks]),
        "peaks": fingerprint([*own_peaks_files(home), *published_peaks_files(catalog), *locks]),
        "searches": fingerprint([*published_tuning_files(catalog), *locks]),
        "model_runs": fingerprint([*published_model_files(catalog), *locks]),
        "imported": _with_text(statements.imported_sql(), imported_manifests(home)),
        "loop": _with_text(statements.loop_sql(), loop_files(home, catalog)),
    }


def outdated(meta: dict[str, str], wanted: dict[str, str]) -> list[str]:
    """Which parts of a store are behind, by their key in ``meta``."""
    return [key for key, value in wanted.items() if meta.get(key) != value]


def _with_text(text: str, paths: Iterable[Path]) -> str:
    return length_prefixed_digest([text.encode(), fingerprint(paths).encode()])


def fingerprint(paths: Iterable[Path]) -> str:
    """Names, sizes and times of those files that exist, in whatever order."""
    parts = []
    for path in sorted(paths):
        try:
            status = path.stat()
        except OSError:  # a link to nothing, or a file that was removed meanwhile
            continue
        if stat.S_ISREG(status.st_mode):
            parts.append(f"{path}|{status.st_size}|{status.st_mtime_ns}".encode(errors="surrogateescape"))
    return length_prefixed_digest(parts)
