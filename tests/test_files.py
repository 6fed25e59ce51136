from __future__ import annotations

import errno
import io
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from raising import raises

from tilegym_db.errors import ConflictError, RecordError, StoreError
from tilegym_db.files import decode, read_bytes, write_atomically, write_exclusively, write_folder, writing


def test_a_link_is_followed_and_a_mode_is_kept(tmp_path: Path):
    real, link = tmp_path / "elsewhere" / "real.json", tmp_path / "link.json"
    real.parent.mkdir()
    real.write_text("old")
    real.chmod(0o640)
    link.symlink_to(real)
    write_atomically(link, b"new")
    assert link.is_symlink()
    assert real.read_bytes() == b"new"
    assert real.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("there", ["an empty folder", "a folder", "a file", "a link to nowhere"])
def test_a_folder_is_never_written_over(there: str, tmp_path: Path):
    target = tmp_path / "draft"
    match there:
        case "a file":
            target.write_text("mine")
        case "a link to nowhere":
            target.symlink_to("nowhere")
        case _:
            target.mkdir()
    if there == "a folder":
        (target / "mine.py").write_text("mine")
    before = [(path, path.lstat().st_ino) for path in sorted(tmp_path.rglob("*"))]
    with raises(StoreError, "folder_exists", str(target)):
        write_folder(target, {"kernel.py": b"theirs"})
    assert [(path, path.lstat().st_ino) for path in sorted(tmp_path.rglob("*"))] == before


def test_only_old_leftovers_of_a_killed_writer_are_removed(tmp_path: Path):
    old, young, mine = (tmp_path / name for name in (".tilegym-db-aa.new", ".tilegym-db-bb.new", ".tilegym-db-notes"))
    for folder in (old, young, mine):
        folder.mkdir()
        (folder / "kernel.py").touch()
    os.utime(old, (time.time() - 7200,) * 2)
    os.utime(mine, (time.time() - 7200,) * 2)
    write_atomically(tmp_path / "record.json", b"{}")
    assert sorted(path.name for path in tmp_path.iterdir()) == [young.name, mine.name, "record.json"]


def test_folder_being_written_is_refused_with_the_process(tmp_path: Path):
    with (
        writing(tmp_path),
        raises(StoreError, "store_locked", str(tmp_path), "this process"),
        writing(tmp_path, timeout_s=0.1),
    ):
        pass
    with writing(tmp_path, timeout_s=0.1):
        pass


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "file").touch()
    with (
        raises(StoreError, "folder_unwritable", "file/root: ", os.strerror(errno.ENOTDIR)),
        writing(tmp_path / "file" / "root"),
    ):
        pass


@pytest.mark.parametrize(
    ("content", "code", "place", "name"),
    [
        ("{}".encode("utf-16"), "text_encoding", "line 1, column 1", "UTF-16"),
        ("{}".encode("utf-32"), "text_encoding", "line 1, column 1", "UTF-32"),
        ("{}".encode("utf-8-sig"), "text_encoding", "line 1, column 1", "byte order mark"),
        ("{}".encode("utf-16-le"), "text_nul", "line 1, column 2", "NUL"),
        (b"a\nb\xff", "text_not_utf8", "line 2, column 2", "0xff"),
        (b"\xed\xa0\x80", "text_not_utf8", "line 1, column 1", "0xed"),
    ],
)
def test_what_is_no_utf_8_is_named_with_its_place(content: bytes, code: str, place: str, name: str):
    with raises(RecordError, code, f"x.json: {place}: ", name):
        decode(content, "x.json")


def test_a_device_and_a_path_with_nul_are_no_records():
    with raises(RecordError, "file_irregular", "/dev/zero: ", "a device"):
        read_bytes(Path("/dev/zero"), "definition")
    with raises(RecordError, "file_unreadable"):
        read_bytes(Path("a\0b"), "definition")


def bound_socket(place: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(place))  # the address of a socket is short


@pytest.mark.parametrize(("kind", "make"), [("a FIFO", os.mkfifo), ("a folder", os.mkdir), ("a socket", bound_socket)])
def test_a_writer_replaces_regular_files_only(tmp_path: Path, kind: str, make: Callable[[Path], None]):
    place = tmp_path / "place"
    make(place)
    with raises(StoreError, "file_irregular", str(place), kind):
        write_atomically(place, b"content")
    assert not place.is_file()
    assert os.listdir(tmp_path) == ["place"]


def test_lock_in_an_unwritable_folder_is_refused_at_once():
    began = time.monotonic()
    with raises(StoreError, "folder_unwritable", "/proc: ", "TILEGYM_DB_HOME"), writing(Path("/proc")):
        pass
    assert time.monotonic() - began < 5


def test_new_file_appears_whole_and_an_existing_one_is_kept(tmp_path: Path):
    target = tmp_path / "sub" / "workloads.jsonl"
    write_exclusively(target, b"first")
    with raises(ConflictError, "file_exists", str(target), "--output"):
        write_exclusively(target, b"second")
    assert target.read_bytes() == b"first"
    assert [path.name for path in target.parent.iterdir()] == [target.name]
    (tmp_path / "link").symlink_to("nowhere")
    with raises(ConflictError, "file_exists", str(tmp_path / "link")):
        write_exclusively(tmp_path / "link", b"third")


def test_folder_made_by_another_process_first_exists_already(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    target = tmp_path / "draft"
    rename = os.rename

    def late(source: str, folder: Path) -> None:
        target.mkdir()
        (target / "mine.py").write_text("mine")
        rename(source, folder)

    monkeypatch.setattr(os, "rename", late)
    with raises(StoreError, "folder_exists", str(target)):
        write_folder(target, {"kernel.py": b"theirs"})
    assert [path.name for path in tmp_path.rglob("*")] == ["draft", "mine.py"]


def test_a_file_that_has_nothing_to_read_now_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Waiting(io.BytesIO):
        def read(self, size: int | None = -1) -> None:  # type: ignore[override]  # as /proc/kmsg, opened not to wait
            return None

    monkeypatch.setattr("tilegym_db.files.os.fdopen", lambda *_, **__: Waiting())
    (tmp_path / "x").touch()
    with raises(RecordError, "file_unreadable", str(tmp_path / "x")):
        read_bytes(tmp_path / "x", "record")
