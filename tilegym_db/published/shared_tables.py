"""Resolver tables from a shared data set: ``<home>/shared/tables/<gpu>/<writer>-<lock>-<address>``.

Each folder has the layout of a published one (:mod:`tilegym_db.published.snapshot`): trace files by Definition, and the
lock with their digests and the writer's signature. A folder never changes; a newer table of the same writer is another
folder. The table of another installation is foreign. It serves if ``sync --trust`` trusted exactly this lock, which
this installation's key records. It also serves one command or call that trusts foreign traces.
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
    """A table in the home folder with its writer, its address, and whether the user trusted it."""

    snapshot: Snapshot
    writer: str
    address: str
    is_trusted: bool
    problem: str = ""
    """Reason why it cannot be used, such as a changed lock."""

    @property
    def gpu(self) -> str:
        """Return the slug of its GPU."""
        return self.snapshot.folder.parent.name

    @property
    def counts(self) -> bool:
        """Return True if it may serve without further consent: this installation wrote it, or the user trusted it."""
        return not self.problem and (self.snapshot.origin == "local" or self.is_trusted)

    @property
    def standing(self) -> str:
        """Return ``local`` (this installation wrote it), ``trusted``, ``foreign`` or ``damaged``."""
        if self.problem:
            return "damaged"
        return "local" if self.snapshot.origin == "local" else "trusted" if self.is_trusted else "foreign"

    @property
    def why_unused(self) -> str:
        """Return the reason why it does not serve, and the next step."""
        again = f"tilegym-db data sync {self.address} --tables"
        if self.problem:
            return f"a damaged table of a team: {self.problem.rstrip('.')}. Fetch it again: {again}"
        which = f"the table of {self.gpu} that came from {self.address} ({self.snapshot.published})"
        if self.counts:
            return f"{which}: the same writer published a newer one"
        return f"{which} is foreign: another installation wrote it. To use what you trust: {again} --trust"


def tables_folder(home: Path) -> Path:
    """Return the folder of all tables."""
    return home / FOLDER / "tables"


def folder_of(home: Path, gpu: str, writer: str, lock_digest: str, address: str) -> Path:
    """Return the folder of one table."""
    return tables_folder(home) / gpu / f"{writer}-{lock_digest[:16]}-{address_digest(address)}"


def address_digest(address: str) -> str:
    """Return the digest that represents an address in a folder's name."""
    return hashlib.sha256(address.encode()).hexdigest()[:8]


def tables_in(home: Path, gpu: str | None = None) -> list[SharedTable]:
    """Return every table of one GPU slug, or of all, by folder. A table that cannot be read has a ``problem``."""
    try:
        folders = sorted(tables_folder(home).glob(f"{gpu or '*'}/*"))
    except OSError:
        return []
    return [_read(path, found[1], home) for path in folders if (found := _FOLDER.fullmatch(path.name)) is not None]


def serving(tables: Iterable[SharedTable], *, trust: bool = False) -> list[SharedTable]:
    """Return the newest table per writer and address that may serve, newest first; foreign ones only with ``trust``."""
    newest: dict[tuple[str, str, str], SharedTable] = {}
    for table in tables:
        key = table.gpu, table.writer, table.address
        if (table.counts or (trust and not table.problem)) and (key not in newest or _age(newest[key]) < _age(table)):
            newest[key] = table
    return sorted(newest.values(), key=_age, reverse=True)


def damage_of(table: SharedTable) -> str:
    """Return the first difference of a table or file from its lock, or "" if it is intact. Reads all files."""
    try:
        for name in table.snapshot.files:
            table.snapshot.read(table.snapshot.folder / name)
    except RecordError as error:
        return str(error)
    return table.problem


def trust_table(folder: Path, home: Path) -> None:
    """Record that the user trusts the table in a folder, by its current lock.

    Raises:
        RecordError: its lock is missing or cannot be read.
        StoreError: the record cannot be written.
    """
    lock = read_bytes(folder / LOCK_NAME, "trace lock")
    write_atomically(folder / TRUST_NAME, signature(home, "trusted table", lock).encode())


def remove_superseded(home: Path, address: str, writers: Iterable[tuple[str, str]]) -> None:
    """Remove tables of an address that no longer serve: all of writers (GPU, writer) that left it, else the older ones.

    The newest table that may serve stays, even beside a newer one that may not.
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
