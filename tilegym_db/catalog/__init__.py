"""The catalog: folders of records, read into validated records with digests and checked against the lock.

The roots are, in this order, the shipped catalog (a checkout, or the data of an installed wheel) and the user's overlay
(``$TILEGYM_DB_HOME/catalog``). A name may exist in one root only: an overlay record never shadows a shipped one.
A broken record is left out and named once; only commands about that record fail.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tilegym_db.catalog.reader import CatalogReader
from tilegym_db.catalog.record_files import Broken
from tilegym_db.errors import NotFoundError, did_you_mean
from tilegym_db.lazy import loader
from tilegym_db.paths import home, shipped_root

if TYPE_CHECKING:
    from tilegym_db.catalog.record_files import SolutionFiles, check_entry_point, stock_of
    from tilegym_db.records import Definition, Solution, Workload

__all__ = ["Broken", "Catalog", "SolutionFiles", "check_entry_point", "stock_of"]

# These modules load the record classes, which take as long as the rest of a command that only needs the roots.
_HOMES = {
    "SolutionFiles": "tilegym_db.catalog.record_files",
    "check_entry_point": "tilegym_db.catalog.record_files",
    "stock_of": "tilegym_db.catalog.record_files",
}
__getattr__ = loader(__name__, _HOMES)


class Catalog(CatalogReader):
    """A catalog to read records from and add records to."""

    @classmethod
    def default(cls, *, warns: bool = True, trust_foreign: bool = False) -> Catalog:
        """Return the shipped catalog and, if it exists, the user's overlay."""
        overlay = home() / "catalog"
        return cls((shipped_root(), overlay) if overlay.is_dir() else (shipped_root(),), warns, trust_foreign)

    # -- the lock -----------------------------------------------------------------------------------------------------

    def lock_findings(self) -> list[str]:
        """Return the differences between the Definitions and ``definitions.lock.json``; empty if they agree."""
        from tilegym_db.catalog import writers

        return writers.findings(self)

    def update_lock(self, root: Path) -> list[str]:
        """Add versions that the lock does not have, and return them; never change a locked digest.

        Raises:
            RecordError: the lock is damaged.
            StoreError: the lock cannot be written.
        """
        from tilegym_db.catalog import writers

        return writers.update(self, root)

    # -- adding -------------------------------------------------------------------------------------------------------

    @property
    def write_root(self) -> Path:
        """The root that ``add-*`` writes to: the shipped catalog if it is a writable checkout, else the user's overlay."""
        shipped = shipped_root()
        if (shipped / "pyproject.toml").is_file() and os.access(shipped, os.W_OK):
            return shipped
        return home() / "catalog"

    def add_definition(self, record: Definition) -> Path:
        """Write a new Definition, or a new version of one, and lock it.

        Raises:
            ConflictError: the version exists with another meaning, or is not newer than the existing one.
            StoreError: the file cannot be written, or another process holds the catalog's lock.
        """
        from tilegym_db.catalog import writers

        return writers.add_definition(self, record, self.write_root)

    def add_solution(self, record: Solution, sources: Mapping[str, bytes], *, replace: bool = False) -> Path:
        """Write a new Solution folder in one step, and return it: it appears whole or not at all.

        A Solution that the catalog has with the same record and bytes is left as it is. ``replace`` allows to
        replace a Solution of the user's that has other content. Its traces then belong to a source that is not in the catalog.

        Raises:
            ConflictError: a Solution of that name exists with other content, or is shipped; or a folder or file is in the way.
            StoreError: the folder cannot be written, or another process holds the catalog's lock.
        """
        from tilegym_db.catalog import writers

        return writers.add_solution(self, record, sources, self.write_root, replace=replace)

    def remove(self, name: str) -> tuple[Path, ...]:
        """Remove a Solution or a Definition of the user's, and return the folder or files that are gone. Traces stay.

        A Definition goes with its Workloads and its versions in the lock. Make a new catalog to see the change.

        Raises:
            ConflictError: the record is shipped, is listed in the file of a family, or is a Definition that other records use.
            NotFoundError: there is no such record.
            StoreError: a file cannot be removed, or another process holds the catalog's lock.
        """
        from tilegym_db.catalog import writers

        known = {*self.definition_paths, *self.solution_paths}
        if name not in known:
            raise NotFoundError(
                f"'{name}' is not a definition or a solution.{did_you_mean(name, known)} Try: tilegym-db list",
                code="name_unknown",
            )
        if name in self.definition_paths:
            return writers.remove_definition(self, name, self.write_root)
        return writers.remove_solution(self, name, self.write_root)

    def add_workloads(
        self, workloads: Iterable[Workload], root: Path | None = None, blobs_from: Path | None = None
    ) -> list[tuple[Path, Workload]]:
        """Append new Workloads to their files and return them; existing ones are skipped.

        ``root`` is the catalog to write to, by default :attr:`write_root`. Files that hold inputs are copied from
        ``blobs_from``; without it, they must already be in the catalog.

        Raises:
            RecordError: a Workload does not fit its Definition, or a file is missing or differs; nothing is added.
            ConflictError: the catalog has a different file of that name.
            StoreError: a file cannot be written, or another process holds the catalog's lock.
        """
        from tilegym_db.catalog import writers

        return writers.add_workloads(self, workloads, root or self.write_root, blobs_from)
