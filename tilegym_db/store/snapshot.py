"""What was published for one GPU, and who vouches for it: ``traces/<gpu>/`` with the digests of its files in a lock.

The lock of the package's own traces is part of the package. Any other lock counts only with the signature of this
installation: a folder from elsewhere is foreign, and is used only when the user says so. A file that is not what the lock says
is not used at all.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from tilegym_db.catalog import read_bytes, write_atomically
from tilegym_db.errors import RecordError
from tilegym_db.paths import shipped_root
from tilegym_db.records.base import NAME_PATTERN, Record, canonical_json
from tilegym_db.store.input_files import LOCK_NAME, OLD_TABLE_NAME
from tilegym_db.store.installation import Origin, is_signed, signature

__all__ = [
    "Snapshot",
    "TraceLock",
    "lock_folder",
    "lock_text",
    "open_snapshot",
    "read_published",
    "sha256",
    "signed_lock",
]

_SHA256 = r"^[0-9a-f]{64}$"


class TraceLock(Record):
    """The files of one GPU's published traces, and what they must be."""

    kind: ClassVar[str] = "trace lock"

    schema_version: Literal[1] = 1
    gpu: str = Field(pattern=NAME_PATTERN)
    sm: str = ""
    published: str
    """When one of the files last changed, in UTC."""
    files: dict[str, str]
    """Path below the GPU's folder -> sha256 of the content."""
    signature: str | None = Field(default=None, pattern=_SHA256)
    """Of the rest, by the installation that published; the package's own has none."""

    @property
    def signed_content(self) -> bytes:
        """What the signature covers."""
        content = self.to_dict()
        content.pop("signature", None)
        return canonical_json(content).encode()


@dataclass(frozen=True)
class Snapshot:
    """The published files of one GPU. ``files`` is empty where nobody says what they should be."""

    folder: Path
    gpu: str
    sm: str
    published: str
    origin: Origin
    files: Mapping[str, str] = field(default_factory=dict)

    def read(self, path: Path, what: str = "published file") -> bytes:
        """The content of a file of the folder.

        Raises:
            RecordError: it is not what the lock says, or cannot be read.
        """
        content = read_bytes(path, what)
        name = path.relative_to(self.folder).as_posix()
        if not self.files and self.origin == "foreign":
            return content
        if name not in self.files:
            raise RecordError(
                f"{path} is not used: {self.folder / LOCK_NAME} does not list it, so tilegym-db did not publish it. "
                "Delete it, or bring it in as a foreign file: tilegym-db ingest --trust FILE"
            )
        if sha256(content) != self.files[name]:
            raise RecordError(
                f"{path} is not used: it was changed after it was published (its sha256 is not the one in "
                f"{self.folder / LOCK_NAME}). Restore it, or publish again."
            )
        return content

    @property
    def how_to_trust(self) -> str:
        """Why a foreign folder is not used, and what to do about it."""
        why = "its lock is not signed by this installation" if self.files else f"it has no {LOCK_NAME}"
        return (
            f"{self.folder} is foreign: {why}. If you trust where it came from, bring it in with: "
            f"tilegym-db ingest --trust {self.folder}/*/*.jsonl, and publish again"
        )


def open_snapshot(folder: Path, home: Path) -> Snapshot:
    """The published files of ``traces/<gpu>``; the key is that of the home folder.

    Raises:
        RecordError: the lock is not valid, or of a newer version.
    """
    path = folder / LOCK_NAME
    if not path.is_file():
        old = _old_table_head(folder / OLD_TABLE_NAME)
        return Snapshot(folder, old.get("gpu", folder.name), old.get("sm", ""), old.get("published", ""), "foreign")
    lock = TraceLock.from_json(read_bytes(path, "trace lock"), path)
    return Snapshot(folder, lock.gpu, lock.sm, lock.published, _origin(folder, lock, home), lock.files)


def _origin(folder: Path, lock: TraceLock, home: Path) -> Origin:
    if folder.parent.resolve() == (shipped_root() / "traces").resolve():
        return "shipped"
    is_own = lock.signature is not None and is_signed(home, "lock", lock.signed_content, lock.signature)
    return "local" if is_own else "foreign"


def lock_text(folder: Path, gpu: str, sm: str, published: str, files: Mapping[str, str], home: Path) -> str:
    """The text of a lock; signed, unless the folder is the package's own."""
    lock = TraceLock(gpu=gpu, sm=sm, published=published, files=dict(sorted(files.items())))
    if folder.parent.resolve() != (shipped_root() / "traces").resolve():
        lock = signed_lock(lock, home)
    return lock.to_json(indent=1) + "\n"


def signed_lock(lock: TraceLock, home: Path) -> TraceLock:
    """The lock with the signature of this installation."""
    return lock.model_copy(update={"signature": signature(home, "lock", lock.signed_content)})


def sha256(content: bytes) -> str:
    """The digest that locks state."""
    return hashlib.sha256(content).hexdigest()


def read_published(path: Path, folder: Path, home: Path, refused: list[str], *, trust: bool = False) -> bytes | None:
    """The content of a file of ``traces/<gpu>`` that somebody vouches for; None, with the reason in ``refused``, for another."""
    try:
        snapshot = open_snapshot(folder, home)
        if snapshot.origin == "foreign" and not trust:
            raise RecordError(f"{path} is not used: {snapshot.how_to_trust}.")
        return snapshot.read(path)
    except RecordError as error:
        refused.append(str(error))
        return None


def lock_folder(folder: Path, home: Path, *, gpu: str, sm: str, published: str) -> None:
    """Write the lock of a folder as it lies: its owner vouches for every file of it.

    Raises:
        StoreError: the folder cannot be written.
    """
    files = {
        path.relative_to(folder).as_posix(): sha256(path.read_bytes())
        for path in folder.rglob("*.json*")
        if path.name != LOCK_NAME
    }
    write_atomically(folder / LOCK_NAME, lock_text(folder, gpu, sm, published, files, home).encode())


def _old_table_head(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    known = content if isinstance(content, dict) else {}
    return {key: known[key] for key in ("gpu", "sm", "published") if isinstance(known.get(key), str)}
