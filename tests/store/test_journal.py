from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from raising import raises

from tilegym_db.errors import RecordError, StoreError, UsageError
from tilegym_db.store.journal import Journal, journal_files, read_journal

WRITER = """
import sys
from pathlib import Path
from tilegym_db.records import Trace
from tilegym_db.store.journal import Journal

template = Trace.from_json(sys.stdin.read())
with Journal("killed", Path(sys.argv[1])) as journal:
    for number in range(100_000):
        journal.append(template.model_copy(update={"trace_id": str(number), "log": "x" * 3000}))
        print(number, flush=True)
"""


def test_a_trace_is_on_disk_once_append_returns(home, trace):
    first, second = trace(), trace(kind="tilelang", config={"BLOCK_M": 4, "fast": True, "mode": "a", "ratio": 0.5})
    with Journal("run-1", home) as journal:
        journal.append(first)
        assert read_journal(journal.path).traces == (first,)
        journal.append(second)
    assert journal_files(home) == [home / "runs" / "run-1.jsonl"]
    assert read_journal(home / "runs" / "run-1.jsonl").traces == (first, second)


def test_killing_the_writer_loses_no_acknowledged_trace(home, trace):
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(home)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert writer.stdin is not None
    assert writer.stdout is not None
    writer.stdin.write(trace().to_json())
    writer.stdin.close()
    for _ in range(20):
        writer.stdout.readline()
    writer.send_signal(signal.SIGKILL)
    acknowledged = [*range(20), *map(int, writer.stdout.read().split())]
    writer.wait()

    content = read_journal(home / "runs" / "killed.jsonl")
    found = [int(item.trace_id) for item in content.traces]
    assert found[: len(acknowledged)] == acknowledged
    assert found == list(range(len(found)))
    assert len(content.rejected) <= 1


def test_torn_last_line_is_reported_and_swallows_no_later_line(home, trace):
    first, second = trace(), trace()
    with Journal("run-1", home) as journal:
        journal.append(first)
    with journal.path.open("a") as file:
        file.write(second.to_json()[:100])

    content = read_journal(journal.path)
    assert content.torn
    assert content.traces == (first,)
    assert str(content.rejected[0]) == f"{journal.path}:2: cut off in mid write."

    with Journal("run-1", home) as journal:
        journal.append(second)
    assert read_journal(journal.path).traces == (first, second)


def test_a_line_that_is_no_trace_is_named_with_its_reason(tmp_path, trace):
    path = tmp_path / "runs.jsonl"
    path.write_text(f'{trace().to_json()}\n{{"wat": 1, {trace().to_json()[1:]}\n\n')
    (rejected,) = read_journal(path).rejected
    assert (rejected.path, rejected.line) == (path, 2)
    assert "unknown key 'wat'" in rejected.reason


def test_a_full_disk_leaves_the_journal_with_whole_lines(home, trace, file_size_limit):
    with Journal("run-1", home) as journal:
        journal.append(trace())
        size = journal.path.stat().st_size
        with file_size_limit(size + 100), raises(StoreError, "write_failed", "run-1.jsonl", "TILEGYM_DB_HOME"):
            journal.append(trace())
        assert journal.path.stat().st_size == size
        journal.append(trace())
    assert len(read_journal(journal.path).traces) == 2


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with raises(StoreError, "write_failed", "file/home/runs", "TILEGYM_DB_HOME"):
        Journal("run-1", tmp_path / "file" / "home")


def test_one_run_has_one_writer(home):
    with Journal("run-1", home), raises(StoreError, "journal_locked", "run-1.jsonl"):
        Journal("run-1", home)
    Journal("run-1", home).close()


def test_a_run_that_measured_nothing_leaves_no_journal(home):
    Journal("run-1", home).close()
    assert journal_files(home) == []


@pytest.mark.parametrize("run_id", ["", "../x", "a/b", ".hidden", "x" * 200])
def test_a_run_id_names_a_file_in_the_folder(home, run_id):
    with raises(UsageError, "run_id_invalid"):
        Journal(run_id, home)


def test_infinity_is_refused_before_anything_is_written(home, trace):
    good = trace()
    bad = good.model_copy(update={"correctness": good.correctness.model_copy(update={"max_abs": float("inf")})})
    with Journal("run-1", home) as journal:
        journal.append(good)
        with raises(RecordError, "json_unholdable", "scale_triton"):
            journal.append(bad)
    assert read_journal(journal.path).traces == (good,)


def test_an_unreadable_journal_is_a_store_error(tmp_path: Path):
    with raises(StoreError, "file_irregular", os.fspath(tmp_path)):
        read_journal(tmp_path)


def test_a_whole_line_that_is_no_trace_is_not_said_to_be_cut_off(tmp_path):
    path = tmp_path / "config.jsonl"
    path.write_text('{"model_type": "llama"}')  # no newline ends it, and nothing of it is missing
    content = read_journal(path)
    assert not content.torn
    assert "unknown key 'model_type'" in content.rejected[0].reason
