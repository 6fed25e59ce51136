"""Which sources the package ships, by their digests: those on its list of checked records, as they were when it was made.

A checkout holds a developer's own kernels too. They are on that list once ``tools/write_checked_records.py`` wrote it, which is
part of releasing them.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from tilegym_db.catalog import Catalog
from tilegym_db.store.checked import Checked, checked_file
from tilegym_db.store.confinement_rule import source_key

__all__ = ["shipped_keys"]


def shipped_keys(definitions: Iterable[str]) -> frozenset[str]:
    """The :func:`~tilegym_db.store.confinement_rule.source_key` of every shipped Solution of some Definitions, by their names."""
    path = checked_file()
    try:
        stamp = path.stat().st_mtime_ns
    except OSError:  # no list, no shipped source
        return frozenset()
    return frozenset().union(*(_keys(path, stamp, name) for name in definitions))


@lru_cache(maxsize=1024)
def _keys(path: Path, _stamp: int, definition: str) -> frozenset[str]:
    catalog = Catalog((path.parents[1],))
    checked = Checked(catalog)
    record = catalog.definitions.get(definition)
    if record is None:
        return frozenset()
    return frozenset(  # what is listed of a Solution covers the file of its Definition
        source_key(record.digest, files.digest)
        for files in catalog.solutions_for(definition)
        if checked.solution(catalog.solution_paths[files.name], files.record, files.sources)
    )
