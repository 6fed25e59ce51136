"""The key of this installation, which signs measured and published data.

It lies in ``<home>/installation.key``, readable by its owner only, and is made when first needed. A signature states
that a tilegym-db with access to this key wrote a line. It does not identify a person: any process that can read the key
can sign.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import re
import secrets
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from tilegym_db.errors import RecordError, StoreError
from tilegym_db.files import read_bytes

KEY_NAME = "installation.key"
KEY_BYTES = 32
MAX_KEY_BYTES = 1 << 20
"""Maximum number of bytes read from the key file, so that an error can state its length."""

Origin = Literal["shipped", "local", "foreign"]
"""Origin of a trace: the package, a measurement by this installation, or an unknown source."""

Purpose = Literal["trace", "lock", "model run", "trusted table", "writer"]

_SIGNATURE = re.compile(rb', "signature": "([0-9a-f]{64})"\}\s*$')


def signature(home: Path, purpose: Purpose, content: bytes) -> str:
    """Return the signature of some content by the key of a home folder, which is made if it is missing.

    Raises:
        StoreError: the key cannot be read or written.
    """
    key = _read_key(home) or _make_key(home)
    return _hmac(key, purpose, content)


def is_signed(home: Path, purpose: Purpose, content: bytes, claimed: str) -> bool:
    """Return True if ``claimed`` is the result of :func:`signature` for this content."""
    key = _read_key(home)
    return key is not None and hmac.compare_digest(_hmac(key, purpose, content), claimed)


def signed_line(home: Path, text: str) -> bytes:
    """Return a line of a journal: one JSON object with its signature as the last key."""
    content = text.encode()
    return content[:-1] + f', "signature": "{signature(home, "trace", content)}"}}\n'.encode()


def split_line(line: bytes) -> tuple[bytes, str | None]:
    """Return the object of a line as it was before signing, and its signature or None."""
    found = _SIGNATURE.search(line)
    return (line, None) if found is None else (line[: found.start()] + b"}", found[1].decode())


def _hmac(key: bytes, purpose: Purpose, content: bytes) -> str:
    return hmac.digest(key, purpose.encode() + b"\0" + content, "sha256").hex()


def _read_key(home: Path) -> bytes | None:
    path = home / KEY_NAME
    try:
        stat = path.stat()
        return _cached_key(path, stat.st_mtime_ns, stat.st_ino)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(
            f"cannot read the key of this installation, {path}: {error.strerror or error}.", code="file_unreadable"
        ) from None


@lru_cache(maxsize=8)
def _cached_key(path: Path, _mtime_ns: int, _inode: int) -> bytes:
    try:
        key = read_bytes(path, "key of this installation", MAX_KEY_BYTES)
    except RecordError as error:
        raise StoreError(str(error), code=error.code) from None
    if len(key) != KEY_BYTES:
        raise StoreError(
            f"{path} is damaged: it has {len(key)} bytes and not {KEY_BYTES}. Restore it, or delete it: then what was "
            "measured here before counts as foreign (tilegym-db data ingest --trust).",
            code="key_damaged",
        )
    return key


def _make_key(home: Path) -> bytes:
    """Return a new key, or the key that another process made at the same moment."""
    path = home / KEY_NAME
    try:
        home.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=home, prefix=f".{KEY_NAME}.")  # mode 0600
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(secrets.token_bytes(KEY_BYTES))
                file.flush()
                os.fsync(file.fileno())
            with contextlib.suppress(FileExistsError):  # the other process was first: use its key
                os.link(temporary, path)
        finally:
            Path(temporary).unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(
            f"cannot write the key of this installation, {path}: {error.strerror or error}. "
            "Make its folder writable, or set TILEGYM_DB_HOME to one that is.",
            code="write_failed",
        ) from None
    key = _read_key(home)
    if key is None:
        raise StoreError(
            f"the key of this installation, {path}, went away while it was made. Run the command again.",
            code="key_gone",
        )
    return key


@dataclass(frozen=True)
class RejectedLine:
    """A journal line that is not a trace. ``line`` counts from 1."""

    path: Path
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.reason}"
