"""Reads regular files of bounded size and writes files atomically.

A writer holds the lock of the folder that it changes (``writing``), writes beside the target, waits until that is on disk,
and renames it. A killed process leaves the old content or the new one. It leaves at most a file or folder named
``.tilegym-db-*.new``, which a later writer removes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tilegym_db.errors import ConflictError, RecordError, StoreError, UsageError

MiB = 1 << 20
RECORD_BYTES = 16 * MiB
"""Largest file of one record or of one Solution's sources, in bytes; the largest today has 60 KB."""

_PREFIX, _SUFFIX = ".tilegym-db-", ".new"
_LEFTOVER_AGE_S = 3600.0
_FEW, _AT_ONCE = 32, 32

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
_MARKS = (
    (b"\xff\xfe\x00\x00", "UTF-32"),
    (b"\x00\x00\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
    (b"\xef\xbb\xbf", "UTF-8 with a byte order mark"),
)
_SAVE = "Save it as plain UTF-8."


# -- reading ----------------------------------------------------------------------------------------------------------


def read_bytes(path: Path, what: str, limit: int | None = RECORD_BYTES) -> bytes:
    """Return the content of a regular file of at most ``limit`` bytes, if any; never wait for a writer of a FIFO."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except (OSError, ValueError) as error:  # ValueError: the path contains a NUL
        raise _unreadable(path, what, error) from None
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise RecordError(
                f"{path}: cannot read this {what}: it is {_kind_of(mode)}. Give the path of a regular file.",
                code="file_irregular",
            )
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            content = file.read() if limit is None else file.read(limit + 1)
        if content is None:  # a file of /proc that has no line yet
            raise BlockingIOError(errno.EAGAIN, "it has nothing to read now")
    except OSError as error:
        raise _unreadable(path, what, error) from None
    finally:
        os.close(descriptor)
    if limit is not None and len(content) > limit:
        raise RecordError(
            f"{path}: this {what} holds more than {limit / MiB:g} MiB, which is the most that is read.",
            code="file_too_large",
        )
    return content


def _kind_of(mode: int) -> str:
    return next((name for test, name in _KINDS if test(mode)), "no file")


def _unreadable(path: Path, what: str, error: OSError | ValueError) -> RecordError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else error
    return RecordError(f"{path}: cannot read this {what}: {reason}.", code="file_unreadable")


def decode(content: bytes, where: str | Path) -> str:
    """Return the text of a record or source: UTF-8 without a byte order mark and without NUL."""
    for mark, encoding in _MARKS:
        if content.startswith(mark):
            raise RecordError(f"{where}: line 1, column 1: this is {encoding}. {_SAVE}", code="text_encoding")
    nul = content.find(b"\0")
    if nul >= 0:
        raise RecordError(
            f"{where}: {_position(content, nul)}: a NUL byte, as in a binary file or UTF-16. {_SAVE}",
            code="text_nul",
        )
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        place, byte = _position(content, error.start), content[error.start]
        raise RecordError(
            f"{where}: {place}: byte 0x{byte:02x} is not valid UTF-8. {_SAVE}", code="text_not_utf8"
        ) from None


def _position(content: bytes, index: int) -> str:
    line = content.count(b"\n", 0, index) + 1
    column = index - content.rfind(b"\n", 0, index)
    return f"line {line}, column {column}"


def regular_files(folder: Path, pattern: str) -> list[Path]:
    """Return the regular files under ``folder`` that match, sorted by name; a FIFO or folder is skipped."""
    try:
        return sorted(path for path in folder.glob(pattern) if path.is_file())
    except OSError:  # a loop of links, or a folder that cannot be entered
        return []


# -- writing ----------------------------------------------------------------------------------------------------------


def write_atomically(path: Path, content: bytes) -> None:
    """Replace ``path`` in one step, so that a reader never sees half a file. Follow a link and keep the mode.

    Raises:
        StoreError: the path is no file, or the write failed; the old content stays.
    """
    staged: str | None = None
    try:
        path = Path(os.path.realpath(path))
        if os.path.lexists(path) and not path.is_file():
            raise FileExistsError(0, f"it is {_kind_of(path.lstat().st_mode)}, and only a regular file is replaced")
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(path.parent)
        staged = _staged_name(path.parent)
        mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else None
        _write_synced(staged, content, mode)
        os.replace(staged, path)
        staged = None
        sync_folder(path.parent)
    except FileExistsError as error:
        raise StoreError(
            f"cannot write {path}: {reason_of(error)}. Nothing was changed.", code="file_irregular"
        ) from None
    except (OSError, ValueError) as error:
        raise StoreError(
            f"cannot write {path}: {reason_of(error)}. Nothing was changed.", code="write_failed"
        ) from None
    finally:
        if staged is not None:
            with contextlib.suppress(OSError):
                os.unlink(staged)


def refuse_unwritable(path: Path, what: str) -> None:
    """Raise if a file could not be written: for a command that writes ``what`` only after minutes of measuring."""
    if path.is_dir():
        raise UsageError(
            f"{path}: {what} is a file, and a folder is at this path. Give a path of a file.", code="output_unwritable"
        )
    folder = next(one for one in path.absolute().parents if one.exists())
    try:
        with tempfile.TemporaryFile(dir=folder):  # permissions alone do not tell: root has all of them in /proc
            pass
    except OSError as error:
        raise UsageError(
            f"{path}: {what} cannot be written there: {reason_of(error)}. Choose another folder.",
            code="output_unwritable",
        ) from None


def write_exclusively(path: Path, content: bytes) -> None:
    """Create a new file in one step: it appears whole or not at all. If several writers try at once, one succeeds.

    Raises:
        ConflictError: the path exists; it stays unchanged.
        StoreError: the file cannot be written; nothing was added.
    """
    staged: str | None = None
    try:
        if os.path.lexists(path):
            raise FileExistsError
        path.parent.mkdir(parents=True, exist_ok=True)
        staged = _staged_name(path.parent)
        _write_synced(staged, content)
        os.link(staged, path)
        sync_folder(path.parent)
    except FileExistsError:
        raise ConflictError(
            f"{path} exists already, and is left as it is. Choose another with --output.", code="file_exists"
        ) from None
    except (OSError, ValueError) as error:
        raise StoreError(f"cannot write {path}: {reason_of(error)}. Nothing was added.", code="write_failed") from None
    finally:
        if staged is not None:
            with contextlib.suppress(OSError):
                os.unlink(staged)


def write_folder(
    folder: Path, files: Mapping[str, bytes], copies: Mapping[str, Path] | None = None, *, may_be_empty: bool = False
) -> None:
    """Create a new folder of files in one step: it appears whole or not at all. An existing one is never changed.

    Args:
        folder: must not exist. If several writers try at once, one succeeds.
        may_be_empty: accept an existing empty folder.
    """
    staged: str | None = None
    try:
        folder = Path(os.path.realpath(folder)) if may_be_empty else folder
        if os.path.lexists(folder) and not (may_be_empty and folder.is_dir()):
            raise FileExistsError(0, "it exists already")
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(folder.parent)
        staged = _staged_name(folder.parent)
        os.mkdir(staged)
        _fill_folder(Path(staged), {**files, **(copies or {})}, are_many=len(files) >= _FEW)
        try:
            os.rename(staged, folder)  # fails if another process has filled the folder since
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            raise FileExistsError(0, "it exists already") from None
        staged = None
        sync_folder(folder.parent)
    except FileExistsError as error:
        raise StoreError(
            f"cannot write {folder}: {reason_of(error)}. Nothing was added.", code="folder_exists"
        ) from None
    except (OSError, ValueError) as error:
        raise StoreError(
            f"cannot write {folder}: {reason_of(error)}. Nothing was added.", code="write_failed"
        ) from None
    finally:
        if staged is not None:
            shutil.rmtree(staged, ignore_errors=True)


def replace_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    """Replace a folder and everything in it. Readers see the old folder or the new one, if the file system can exchange names."""
    staged = _staged_name(folder.parent)
    try:
        os.mkdir(staged)
        _fill_folder(Path(staged), files, are_many=len(files) >= _FEW)
        _exchange(staged, str(folder))
        sync_folder(folder.parent)
    except (OSError, ValueError) as error:
        raise StoreError(
            f"cannot write {folder}: {reason_of(error)}. Nothing was changed.", code="write_failed"
        ) from None
    finally:
        shutil.rmtree(staged, ignore_errors=True)  # the new folder before the exchange, the old one after it


def remove_folder(folder: Path) -> None:
    """Remove a folder in one step: readers see all of it or nothing."""
    staged = _staged_name(folder.parent)
    try:
        os.rename(folder, staged)
        sync_folder(folder.parent)
    except OSError as error:
        raise StoreError(
            f"cannot remove {folder}: {reason_of(error)}. Nothing was changed.", code="write_failed"
        ) from None
    shutil.rmtree(staged, ignore_errors=True)


_AT_WORKING_FOLDER = -100
_RENAME_EXCHANGE = 2


def _exchange(first: str, second: str) -> None:
    """Exchange the names of two folders, in one step if the system can."""
    import ctypes  # only this function needs it

    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    names = (os.fsencode(first), os.fsencode(second))
    if rename is not None:
        place = ctypes.c_int(_AT_WORKING_FOLDER)
        if rename(place, names[0], place, names[1], ctypes.c_uint(_RENAME_EXCHANGE)) == 0:
            return
        number = ctypes.get_errno()
        if number not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise OSError(number, os.strerror(number))
    before = f"{first}.before"  # a process that is killed here leaves both versions under other names
    os.rename(second, before)
    os.rename(first, second)
    os.rename(before, first)


def _fill_folder(folder: Path, contents: Mapping[str, bytes | Path], *, are_many: bool) -> None:
    """Write and copy files into a folder, and wait until the files and their names are on disk."""
    inner, written = {folder}, []
    for name, content in contents.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        inner.update(parent for parent in target.parents if parent.is_relative_to(folder))
        if isinstance(content, bytes) and not are_many:
            _write_synced(str(target), content)
            continue
        shutil.copyfile(content, target) if isinstance(content, Path) else target.write_bytes(content)
        written.append(target)
    _sync_files(written)
    for made in sorted(inner, reverse=True):
        sync_folder(made)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on disk; a new file survives a power cut only after that."""
    with contextlib.suppress(OSError):  # some network file systems do not support it; the rename stays done
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _sync_files(paths: Sequence[Path]) -> None:
    """Wait until files are on disk. Threads share the cost: a file system commits its journal once for all waiting calls."""
    if not paths:
        return
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(_AT_ONCE) as threads:
        for _ in threads.map(_sync_file, paths):
            pass


def _sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _staged_name(folder: Path) -> str:
    return str(folder / f"{_PREFIX}{secrets.token_hex(8)}{_SUFFIX}")


def _write_synced(path: str, content: bytes, mode: int | None = None) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(descriptor)
        if mode is not None:
            os.fchmod(descriptor, mode)


def _remove_leftovers(folder: Path) -> None:
    """Remove files that a killed writer left beside its target; a live writer takes less than an hour."""
    for path in folder.glob(f"{_PREFIX}*{_SUFFIX}"):
        with contextlib.suppress(OSError):
            if time.time() - path.lstat().st_mtime > _LEFTOVER_AGE_S:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink()


def reason_of(error: OSError | ValueError) -> str:
    """Return the system's text for an error, without its number and the path."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


# ---- folder locks ---------------------------------------------------------------------------------
# Locks of folders that several processes write to. The kernel releases a lock when its process ends.

LOCK_NAME = ".tilegym-db.lock"
LOCK_TIMEOUT_S = 60.0
POLL_S = 0.02


@contextlib.contextmanager
def writing(folder: Path, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[None]:
    """Hold the lock ``<folder>/.tilegym-db.lock`` of a folder that several processes write to; create the file if needed.

    Raises:
        StoreError: another process holds it for ``timeout_s`` seconds, or the folder cannot be written.
    """
    with hold_lock(folder / LOCK_NAME, folder, timeout_s, "Nothing was changed."):
        yield


@contextlib.contextmanager
def hold_lock(path: Path, what: Path, timeout_s: float, consequence: str) -> Iterator[None]:
    """Hold a lock file. The kernel releases it when the process ends, even if it crashes.

    Args:
        path: the lock file; it stays, because removing it would let two processes in at once.
        consequence: the effect of not getting the lock, for the message.
    """
    from filelock import FileLock, Timeout

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # If a file can never be created, as in /proc, filelock would try until its timeout; this call fails at once.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o644))
        # not thread-local: the thread that closes a store may differ from the one that opened it
        lock = FileLock(path, timeout=timeout_s, poll_interval=POLL_S, thread_local=False)
        lock.acquire()
    except Timeout:
        raise StoreError(
            f"{what} is locked: {_holder(path)} is writing it. Wait for that to finish or stop it, and try again. "
            f"{consequence}",
            code="store_locked",
        ) from None
    except (OSError, ValueError) as error:
        raise StoreError(
            f"cannot write the folder {path.parent}: {reason_of(error)}. {consequence} Make it writable, "
            "or set TILEGYM_DB_HOME to a folder on a local disk that is.",
            code="folder_unwritable",
        ) from None
    try:
        yield
    finally:
        lock.release()


def _holder(path: Path) -> str:
    pid = lock_holder(path)
    if pid is None:
        return "another process"
    return "another part of this process" if pid == os.getpid() else f"another process (PID {pid})"


def lock_holder(path: Path) -> int | None:
    """Return the process that holds a lock file, if the kernel lists it. This neither takes the lock nor delays its holder."""
    try:
        inode = str(path.stat().st_ino)
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        fields = line.split()
        if "->" not in fields and len(fields) > 5 and fields[5].rpartition(":")[2] == inode and int(fields[4]) > 0:
            return int(fields[4])
    return None
