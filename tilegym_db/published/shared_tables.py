"""Resolver tables from a shared data set: ``<home>/shared/tables/<gpu>/<writer>-<lock>-<address>``.

Each folder has the layout of a published one (:mod:`tilegym_db.published.snapshot`): trace files by Definition, and the
lock with their digests and the writer's signature. A folder never changes; a newer table of the same writer is another
folder. The table of another installation is foreign. It serves if ``sync --trust`` trusted exactly this lock, which
this installation's key records. It also serves one command or call that trusts foreign traces.

The second part reads and writes the shared place itself, a folder or object store that several machines write to. A file
there is complete or absent. Credentials come from the environment, as for any S3 tool. They are not taken from an
address, not stored, and not part of a message.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tilegym_db.errors import RecordError, StoreError, UsageError
from tilegym_db.files import read_bytes, write_atomically
from tilegym_db.paths import remove_tree
from tilegym_db.published.input_files import FOLDER, LOCK_NAME
from tilegym_db.published.snapshot import Snapshot, is_signed, open_snapshot, signature
from tilegym_db.records.text import shown

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
        again = f"tilegym-db data sync {shlex.quote(self.address)} --tables"
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
    """Record that the user trusts the table in a folder, by its current lock."""
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


# ---- Shared places ---------------------------------------------------------------------------------------

SECRETS = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ACCESS_KEY_ID")
SCHEMES = ("s3", "file")
"""Tested schemes. PyArrow supports more, but retries some of them for a quarter of an hour."""


CONNECT_TIMEOUT_S, REQUEST_TIMEOUT_S = 5.0, 5.0
"""Seconds without a connection or a byte before an attempt counts as failed. A slow answer does not."""
ATTEMPTS = 3
ANSWER_TIMEOUT_S = 4.0
"""Seconds for the first byte of a service that has accepted a connection. Attempts and pauses come to 16 s otherwise."""


class SharedPlace:
    """A folder, or ``s3://bucket/folder`` as ``pyarrow.fs`` reads it.

    ``files`` is its file system and ``root`` its path there. ``is_local`` is True for a folder of this machine.
    """

    def __init__(self, uri: str) -> None:
        """Open the place without accessing the address.

        Raises:
            UsageError: no address, one with credentials or without a bucket, or of a kind that pyarrow does not know.
            StoreError: the region of the bucket cannot be asked for.
            ModuleNotFoundError: pyarrow is not installed.
        """
        from pyarrow import fs

        self.uri = uri
        parts = urlsplit(uri)
        if parts.username or parts.password or any(word in parts.query for word in ("access_key", "secret_key")):
            raise UsageError(
                "an address of a data set has no credentials in it: they come from the environment (AWS_ACCESS_KEY_ID, "
                "AWS_SECRET_ACCESS_KEY, AWS_PROFILE), as for any S3 tool.",
                code="address_with_credentials",
            )
        if not uri.strip():
            raise UsageError(
                "a data set is a folder or an address such as s3://bucket/folder, not ''.", code="address_empty"
            )
        if "://" in uri and parts.scheme not in SCHEMES:
            raise UsageError(
                f"'{hidden(uri)}' is not an address of a data set. Give a folder, or an address that starts with "
                f"{' or '.join(f'{scheme}://' for scheme in SCHEMES)}.",
                code="address_invalid",
            )
        if parts.scheme == "s3" and not parts.netloc:
            raise UsageError(
                f"'{hidden(uri)}' names no bucket: an address is s3://bucket/folder.", code="bucket_missing"
            )
        try:
            self.files, self.root = fs.FileSystem.from_uri(uri if "://" in uri else os.path.abspath(uri))
        except (ValueError, TypeError) as error:
            raise UsageError(
                f"'{uri}' is not an address of a data set: {hidden(str(error))}.", code="address_invalid"
            ) from None
        except OSError as error:  # pyarrow asks for the region of a bucket
            raise StoreError(f"cannot reach '{hidden(uri)}': {hidden(str(error))}.", code="place_unreachable") from None
        self._has_answered = False
        self.is_local = isinstance(self.files, fs.LocalFileSystem)
        if isinstance(self.files, fs.S3FileSystem):
            self.files = _not_too_patient(self.files)

    @property
    def shown(self) -> str:
        """Return the address for messages."""
        return self.uri.partition("?")[0]

    @property
    def identity(self) -> str:
        """Return the address in a form that does not depend on the current folder."""
        return self.root if self.is_local else self.shown

    def names(self, folder: str) -> list[str]:
        """Return the files below a folder of it, by name; an empty list if the folder does not exist."""
        from pyarrow import fs

        where = f"{self.root}/{folder}"
        self.refuse_silence("list")
        try:
            listed = self.files.get_file_info(fs.FileSelector(where, recursive=True))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self.refused("list", error) from None
        found = [os.path.relpath(info.path, where) for info in listed if info.type == fs.FileType.File]
        return sorted(name for name in found if not any(part.startswith(".") for part in name.split("/")))

    def read(self, name: str, limit: int) -> bytes | None:
        """Return the first ``limit`` bytes of a file, or None if it does not exist."""
        self.refuse_silence("read")
        try:
            with self.files.open_input_stream(f"{self.root}/{name}", compression=None) as stream:
                return bytes(stream.read(limit))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self.refused("read", error) from None

    def add(self, name: str, save: Callable[[Any], Any]) -> bool:
        """Let ``save`` write a file whole unless one of that name exists; return True if it was written."""
        from pyarrow import fs

        path = f"{self.root}/{name}"
        self.refuse_silence("read")
        if self._asked("read", lambda: self.files.get_file_info(path)).type == fs.FileType.File:
            return False
        self._asked("write to", lambda: self._write(path, save))
        return True

    def _write(self, path: str, save: Callable[[Any], Any]) -> None:
        if not self.is_local:
            # An object appears when its upload is complete. A writer that stops before that leaves nothing listed.
            with self.files.open_output_stream(path, compression=None) as stream:
                save(stream)
            return
        folder = os.path.dirname(path)
        os.makedirs(folder, exist_ok=True)
        beside = f"{folder}/.{secrets.token_hex(8)}.part"
        try:
            with open(beside, "wb") as file:
                save(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
        finally:
            if os.path.exists(beside):
                os.unlink(beside)

    def refuse_silence(self, what: str) -> None:
        """Ask a service of ``AWS_ENDPOINT_URL`` for anything once, and raise :class:`StoreError` if no byte comes back.

        Every other failure is left to the file system, which repeats and explains it.
        """
        url = (
            ""
            if self.is_local or self._has_answered
            else os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        )
        self._has_answered = True
        if url and not _answers(url):
            self._has_answered = False
            reason = f"{hidden(url)} accepts connections and has not answered for {ANSWER_TIMEOUT_S:g} s"
            raise self.refused(what, OSError(reason))

    def _asked(self, what: str, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except OSError as error:
            raise self.refused(what, error) from None

    def refused(self, what: str, error: OSError) -> StoreError:
        """Return the error for an operation that failed there, with what to check."""
        reason = hidden(str(error)).rstrip(".")
        if self.is_local:
            reason = hidden(error.strerror or str(error)).rstrip(".")
            return StoreError(
                f"cannot {what} {shown(self.shown, 400)}: {reason}. Nothing was changed here. Give a folder that can be read "
                "and, to share traces, written.",
                code="place_refused",
            )
        return StoreError(
            f"cannot {what} {self.shown}: {reason}. Nothing was changed here. Check that the address exists and that the "
            "environment has the credentials for it (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY or AWS_PROFILE; "
            "AWS_ENDPOINT_URL for another service).",
            code="place_refused",
        )


def _answers(url: str) -> bool:
    """Return False if a service takes a connection and sends nothing; True for any answer and any other failure."""
    from http.client import HTTPConnection, HTTPException, HTTPSConnection

    parts = urlsplit(url)
    if not parts.hostname or parts.scheme not in ("http", "https"):
        return True
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    connection = kind(parts.hostname, parts.port, timeout=ANSWER_TIMEOUT_S)
    is_connected = False
    try:
        connection.connect()
        is_connected = True
        connection.request("HEAD", "/")
        connection.getresponse().close()
    except TimeoutError:
        return not is_connected  # without a connection, a proxy may be needed
    except (OSError, HTTPException, ValueError):
        return True
    finally:
        connection.close()
    return True


def _not_too_patient(files: Any) -> Any:
    """Return the same file system with fewer attempts. By default a service that never answers is asked for 100 s in silence."""
    from pyarrow import fs

    rebuild, (options,) = files.__reduce__()
    patience = {
        "connect_timeout": CONNECT_TIMEOUT_S,
        "request_timeout": REQUEST_TIMEOUT_S,
        "retry_strategy": fs.AwsStandardS3RetryStrategy(max_attempts=ATTEMPTS),
    }
    return rebuild({**options, **patience})


def hidden(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return a message without the credentials of the environment, which a service may repeat in its answer."""
    for value in filter(None, (environment.get(name) for name in SECRETS)):
        text = text.replace(value, "***")
    return text
