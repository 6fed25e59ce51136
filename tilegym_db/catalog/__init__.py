"""The catalog: folders of records on disk, read into validated records with their digests and checked against the lock.

Roots, nearest first: the shipped catalog (the checkout this package runs from, else the package data of an installed
wheel) and the user's overlay (``$TILEGYM_DB_HOME/catalog``). A name may live in one root only: an overlay record never
shadows a shipped one. A record that cannot be read is left out and named once; it stops only what is about it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tilegym_db.catalog.reader import CatalogReader
from tilegym_db.catalog.record_files import Broken
from tilegym_db.files import read_bytes, write_atomically
from tilegym_db.lazy import loader
from tilegym_db.paths import home, shipped_root

if TYPE_CHECKING:
    from tilegym_db.catalog.record_files import SolutionFiles, check_entry_point, stock_of
    from tilegym_db.records import Definition, Solution, Workload

__all__ = ["Broken", "Catalog", "SolutionFiles", "check_entry_point", "read_bytes", "stock_of", "write_atomically"]

# What reads and writes records loads them, which takes as long as all else of a command that only asks for the roots.
_HOMES = {
    "SolutionFiles": "tilegym_db.catalog.record_files",
    "check_entry_point": "tilegym_db.catalog.record_files",
    "stock_of": "tilegym_db.catalog.record_files",
}
__getattr__ = loader(__name__, _HOMES)


class Catalog(CatalogReader):
    """Every record under a list of roots, to read and to add to."""

    @classmethod
    def default(cls, *, warns: bool = True, trust_foreign: bool = False) -> Catalog:
        """Return the shipped catalog and the user's overlay, where it exists."""
        overlay = home() / "catalog"
        return cls((shipped_root(), overlay) if overlay.is_dir() else (shipped_root(),), warns, trust_foreign)

    # -- the lock -----------------------------------------------------------------------------------------------------

    def lock_findings(self) -> list[str]:
        """What disagrees between the Definitions and ``definitions.lock.json``; empty if all is well."""
        from tilegym_db.catalog import writers

        return writers.findings(self)

    def update_lock(self, root: Path) -> list[str]:
        """Add the versions that the lock does not know yet; never changes a locked digest. Returns what was added.

        Raises:
            RecordError: the lock is damaged.
            StoreError: it cannot be written.
        """
        from tilegym_db.catalog import writers

        return writers.update(self, root)

    # -- adding -------------------------------------------------------------------------------------------------------

    @property
    def write_root(self) -> Path:
        """Where ``add-*`` writes: the shipped catalog if it is a writable checkout, else the user's overlay."""
        shipped = shipped_root()
        if (shipped / "pyproject.toml").is_file() and os.access(shipped, os.W_OK):
            return shipped
        return home() / "catalog"

    def add_definition(self, record: Definition) -> Path:
        """Write a new Definition, or a new version of one, and lock it.

        Raises:
            ConflictError: the same version exists with another meaning, or is not newer than the one that exists.
            StoreError: it cannot be written, or another process holds the catalog's lock.
        """
        from tilegym_db.catalog import writers

        return writers.add_definition(self, record, self.write_root)

    def add_solution(self, record: Solution, sources: Mapping[str, bytes]) -> Path:
        """Write a new Solution folder in one step: it appears whole or not at all. What is there already is never touched.

        Raises:
            ConflictError: a Solution, a folder or a file of that name exists.
            StoreError: it cannot be written, or another process holds the catalog's lock.
        """
        from tilegym_db.catalog import writers

        return writers.add_solution(self, record, sources, self.write_root)

    def add_workloads(
        self, workloads: Iterable[Workload], root: Path | None = None, blobs_from: Path | None = None
    ) -> list[tuple[Path, Workload]]:
        """Append new Workloads to their files; one that exists already is left alone and not returned.

        ``root`` is the catalog to write to, by default :attr:`write_root`. Files that hold inputs are copied from below
        ``blobs_from``; without it, they lie in the catalog already.

        Raises:
            RecordError: one does not fit its Definition, or a file is missing or another one; then none is added.
            ConflictError: the catalog has another file of that name.
            StoreError: it cannot be written, or another process holds the catalog's lock.
        """
        from tilegym_db.catalog import writers

        return writers.add_workloads(self, workloads, root or self.write_root, blobs_from)
