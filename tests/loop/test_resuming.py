"""A loop that was killed or interrupted goes on where it was: steps are journaled, and nothing is measured twice."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from killed_process import killed
from loop_authors import GOOD
from raising import raises

from tilegym_db.errors import HardwareError, RecordError, StoreError
from tilegym_db.files import hold_lock
from tilegym_db.loop import submit as submit_module
from tilegym_db.loop.submit import submit
from tilegym_db.loop.tasks import tasks_table
from tilegym_db.published.input_files import loop_folder
from tilegym_db.records.loop import Attempt, Task
from tilegym_db.store import side_files
from tilegym_db.store.opening import open_store
from tilegym_db.store.side_files import append, journaled, loop_lock

HandIn = Callable[..., Path]


@pytest.mark.parametrize("step", ["received", "scanned", "compiled"])
def test_killed_attempt_resumes_after_the_step_that_it_passed(
    step: str, task: Task, hand_in: HandIn, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, written = hand_in(GOOD), []

    def append_and_die(record: Any, where: Path) -> None:
        append(record, where)
        if record.stage == step:
            os.kill(os.getpid(), signal.SIGKILL)

    def note_and_stop(*_: object, **__: object) -> None:
        raise HardwareError("this machine has no such GPU")

    monkeypatch.setattr(submit_module, "append", append_and_die)
    killed(lambda: submit(task, folder))
    monkeypatch.setattr(
        submit_module, "append", lambda record, where: (written.append(record.stage), append(record, where))
    )
    monkeypatch.setattr(submit_module, "select_machine", note_and_stop)
    attempt = submit(task, folder)
    assert (attempt.number, attempt.stage, attempt.verdict) == (1, "compiled", "no_gpu")
    missing = {"received": ["scanned", "compiled"], "scanned": ["compiled"], "compiled": []}[step]
    assert written == [*missing, "compiled"]  # the last line says that there is no GPU
    assert {one.number for one in journaled(Attempt, home)} == {1}


def test_what_was_screened_is_not_screened_again(
    task: Task, hand_in: HandIn, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, screened = hand_in(GOOD), []
    monkeypatch.setattr(
        submit_module, "_screen", lambda submission, *_: screened.append(submission.passed("screened")) or None
    )

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(submit_module, "verify", interrupted)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            submit(task, folder)
    assert len(screened) == 1
    (newest,) = side_files.latest(journaled(Attempt, home)).values()
    assert (newest.number, newest.stage, newest.verdict) == (1, "screened", "pending")


def test_line_that_was_cut_off_is_skipped_and_the_next_is_whole(task: Task, home: Path) -> None:
    path = loop_folder(home) / "tasks.jsonl"
    with path.open("ab") as file:
        file.write(b'{"schema_version": 1, "id": "cut o')
    assert [one.id for one in journaled(Task, home)] == [task.id]
    other = Task.from_dict({**task.model_dump(mode="json"), "id": "", "min_speedup": 1.5})
    with loop_lock(home):
        append(other, home)
    assert [one.id for one in journaled(Task, home)] == [task.id, other.id]
    with open_store(read_only=True) as store:
        assert {row["id"] for row in store.rows("SELECT id FROM tasks")} == {task.id, other.id}


def test_a_line_at_the_end_that_was_cut_off_is_named_once(
    home: Path, row_scale: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = loop_folder(home) / "tasks.jsonl"
    path.parent.mkdir(parents=True)
    path.write_bytes(b'{"schema_version": 1, "id": "cut o')
    assert tasks_table() == []
    assert journaled(Task, home) == []
    told = [record.getMessage() for record in caplog.records]
    (line,) = told
    assert line.startswith(f"{path}:1: cut off")


def test_two_processes_do_not_judge_one_task_at_once(task: Task, hand_in: HandIn, home: Path) -> None:
    lock = loop_folder(home) / f"{task.id}.lock"
    with hold_lock(lock, lock, 1.0, ""), raises(StoreError, "store_locked", lock.name):
        submit(task, hand_in(GOOD))


def test_a_task_whose_content_was_edited_is_no_task(task: Task) -> None:
    with raises(RecordError, "id_differs", task.id):
        Task.from_dict({**task.model_dump(mode="json"), "language": "triton"})
