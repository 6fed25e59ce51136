"""What lies in a home folder where a file of this package belongs, and is none, makes no command wait."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from raising import raises

from tilegym_db.catalog import Catalog
from tilegym_db.errors import StoreError
from tilegym_db.published.input_files import imported_manifests, own_tuning_files
from tilegym_db.published.snapshot import KEY_NAME, signature
from tilegym_db.records.loop import Task
from tilegym_db.store import connection
from tilegym_db.store.connection import DATABASE_NAME, database_path, writer_lock
from tilegym_db.store.filling import rebuild
from tilegym_db.store.journal import read_journal
from tilegym_db.store.opening import open_store
from tilegym_db.store.side_files import journaled

PLACES: dict[str, Callable[[Path], object]] = {
    KEY_NAME: lambda home: signature(home, "trace", b"{}"),
    "loop/tasks.jsonl": lambda home: journaled(Task, home),
    "runs/x.jsonl": lambda home: read_journal(home / "runs" / "x.jsonl"),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_fifo_is_no_file_of_ours(tmp_path: Path, place: str) -> None:
    path = tmp_path / place
    path.parent.mkdir(exist_ok=True)
    os.mkfifo(path)
    with raises(StoreError, "file_irregular", path.name):
        PLACES[place](tmp_path)


def test_fifos_among_any_number_of_files_are_skipped(tmp_path: Path) -> None:
    for place in ("imported/flashinfer-trace/x/manifest.json", "tuning/x.jsonl"):
        (tmp_path / place).parent.mkdir(parents=True)
        os.mkfifo(tmp_path / place)
    assert imported_manifests(tmp_path) == own_tuning_files(tmp_path) == []


def test_first_reader_waits_for_the_maker_of_the_database(
    tmp_path: Path, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "LOCK_TIMEOUT_S", 0.01)
    found: list[bool] = []

    def read() -> None:
        with open_store(tmp_path, read_only=True, catalog=catalog, lock_timeout_s=0.01) as store:
            found.append(bool(store.rows("SELECT 1 AS one")))

    with writer_lock(database_path(tmp_path), 1.0):
        reader = threading.Thread(target=read)
        reader.start()
        reader.join(0.3)
        assert reader.is_alive()
    reader.join(60)
    assert found == [True]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["fifo", "folder"])
def test_other_things_in_place_of_the_database_are_named_at_once(make, tmp_path: Path, catalog: Catalog) -> None:
    make(tmp_path / DATABASE_NAME)
    opening = (
        lambda: open_store(tmp_path, read_only=True, catalog=catalog),
        lambda: open_store(tmp_path, catalog=catalog),
        lambda: rebuild(tmp_path, catalog=catalog),
    )
    for attempt in opening:
        with raises(StoreError, "file_irregular", DATABASE_NAME):
            attempt()


def test_a_journal_in_utf_16_was_not_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"trace_id": "x"}', encoding="utf-16")
    (line,) = read_journal(path).rejected
    assert "UTF-16" in line.reason


def test_path_that_duckdb_cuts_at_a_question_mark_is_refused(tmp_path: Path, catalog: Catalog) -> None:
    for home in (tmp_path / "what?", tmp_path / "what?" / "deeper"):
        with raises(StoreError, "path_unfit", "TILEGYM_DB_HOME"):
            open_store(home, catalog=catalog)
    assert not list(tmp_path.glob("what*"))
