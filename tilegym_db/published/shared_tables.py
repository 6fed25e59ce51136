"""Resolver tables that came from a shared data set: ``<home>/shared/tables/<gpu>/<writer>-<lock>-<address>``.

Each folder is laid out as a published one (:mod:`tilegym_db.published.snapshot`): trace sets by Definition, and the lock with
their digests as its writer signed it. It never changes; a newer table of the same writer is another folder. The table of another
installation is foreign: it serves where ``sync --trust`` said so, which is remembered for exactly that lock under the key of this
installation, or where one command or call trusts what is foreign.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tilegym_db.errors import RecordError
from tilegym_db.files import read_bytes, write_atomically
from tilegym_db.paths import remove_tree
from tilegym_db.published.input_files import FOLDER, LOCK_NAME
from tilegym_db.published.installation import is_signed, signature
from tilegym_db.published.snapshot import Snapshot, open_snapshot

SOURCE_NAME, TRUST_NAME = "source.json", "trusted"
_FOLDER = re.compile(r"([0-9a-f]{16})-[0-9a-f]{16}-[0-9a-f]{8}")


@dataclass(frozen=True)
class SharedTable:
    """A table as it lies in the home folder: who wrote it, where it came from, and whether it was trusted by name."""

    snapshot: Snapshot
    writer: str
    address: str
    is_trusted: bool
    problem: str = ""
    """Why it is of no use, such as a lock that was changed."""

    @property
    def gpu(self) -> str:
        """The slug of its GPU."""
        return self.snapshot.folder.parent.name

    @property
    def counts(self) -> bool:
        """Whether it may serve without a further word of the user: this installation wrote it, or was told to trust it."""
        return not self.problem and (self.snapshot.origin == "local" or self.is_trusted)

    @property
    def standing(self) -> str:
        """One of ``local`` (this installation wrote it), ``trusted``, ``foreign`` and ``damaged``."""
        if self.problem:
            return "damaged"
        return "local" if self.snapshot.origin == "local" else "trusted" if self.is_trusted else "foreign"

    @property
    def why_unused(self) -> str:
        """Why it serves nothing, and what to do about it."""
        again = f"tilegym-db sync {self.address} --tables"
        if self.problem:
            return f"a damaged table of a team: {self.problem.rstrip('.')}. Fetch it again: {again}"
        which = f"the table of {self.gpu} that came from {self.address} ({self.snapshot.published})"
        if self.counts:
            return f"{which}: the same writer published a newer one"
        return f"{which} is foreign: another installation wrote it. To use what you trust: {again} --trust"


def tables_folder(home: Path) -> Path:
    """Where they lie."""
    return home / FOLDER / "tables"


def folder_of(home: Path, gpu: str, writer: str, lock_digest: str, address: str) -> Path:
    """Where one lies."""
    return tables_folder(home) / gpu / f"{writer}-{lock_digest[:16]}-{address_digest(address)}"


def address_digest(address: str) -> str:
    """What stands for an address in the name of a folder."""
    return hashlib.sha256(address.encode()).hexdigest()[:8]


def tables_in(home: Path, gpu: str | None = None) -> list[SharedTable]:
    """Return every table of one GPU slug, or of all, by folder; those that cannot be read say why."""
    try:
        folders = sorted(tables_folder(home).glob(f"{gpu or '*'}/*"))
    except OSError:
        return []
    return [_read(path, found[1], home) for path in folders if (found := _FOLDER.fullmatch(path.name)) is not None]


def serving(tables: Iterable[SharedTable], *, trust: bool = False) -> list[SharedTable]:
    """Of each writer at each address the newest table that may serve; with ``trust`` also what is foreign. Newest first."""
    newest: dict[tuple[str, str, str], SharedTable] = {}
    for table in tables:
        key = table.gpu, table.writer, table.address
        if (table.counts or (trust and not table.problem)) and (key not in newest or _age(newest[key]) < _age(table)):
            newest[key] = table
    return sorted(newest.values(), key=_age, reverse=True)


def damage_of(table: SharedTable) -> str:
    """Return why a table or a file of it is not what its lock says; reads all of them. Empty where it is whole."""
    try:
        for name in table.snapshot.files:
            table.snapshot.read(table.snapshot.folder / name)
    except RecordError as error:
        return str(error)
    return table.problem


def trust_table(folder: Path, home: Path) -> None:
    """Remember that the user trusts the table in a folder, by its lock as it is now.

    Raises:
        RecordError: it has no lock that can be read.
        StoreError: that cannot be written.
    """
    lock = read_bytes(folder / LOCK_NAME, "trace lock")
    write_atomically(folder / TRUST_NAME, signature(home, "trusted table", lock).encode())


def remove_superseded(home: Path, address: str, writers: Iterable[tuple[str, str]]) -> None:
    """Remove what no longer serves of an address: all of writers (GPU, writer) that are not there any more, else what is older.

    The newest table that counts stays beside a newer one that does not.
    """
    present = set(writers)
    of_address = [table for table in tables_in(home) if table.address == address]
    newest = serving(of_address, trust=True) + serving(of_address)
    kept = {table.snapshot.folder for table in newest if (table.gpu, table.writer) in present}
    for table in of_address:
        if table.snapshot.folder not in kept:
            remove_tree(table.snapshot.folder)


def _age(table: SharedTable) -> tuple[str, str]:
    return table.snapshot.published, table.snapshot.folder.name


def _read(folder: Path, writer: str, home: Path) -> SharedTable:
    address = ""
    try:
        address = _address(folder)
        snapshot = open_snapshot(folder, home)
        if snapshot.gpu != folder.parent.name or not snapshot.files:
            raise RecordError(
                f"{folder / LOCK_NAME}: not the lock of a table of {folder.parent.name}.", code="lock_of_other_table"
            )
        return SharedTable(snapshot, writer, address, _is_trusted(folder, home))
    except RecordError as error:
        return SharedTable(Snapshot(folder, folder.parent.name, "", "", "foreign"), writer, address, False, str(error))


def _address(folder: Path) -> str:
    path = folder / SOURCE_NAME
    try:
        return str(json.loads(read_bytes(path, "source of a shared table"))["address"])
    except (ValueError, LookupError, TypeError) as error:
        raise RecordError(
            f"{path}: it does not say where this table came from: {error}.", code="table_source_unknown"
        ) from None


def _is_trusted(folder: Path, home: Path) -> bool:
    path = folder / TRUST_NAME
    if not path.is_file():
        return False
    claimed = read_bytes(path, "trust in a shared table").decode(errors="replace").strip()
    return is_signed(home, "trusted table", read_bytes(folder / LOCK_NAME, "trace lock"), claimed)
