"""What a later run of the loop asks for again: all that is not decided for its model, GPU and language."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tilegym_db.catalog import Catalog
from tilegym_db.loop.auto import auto_kernelize
from tilegym_db.loop.from_model import ModelPieces, Piece, coverage_of
from tilegym_db.loop.submit import submit
from tilegym_db.measurement.machine import cpu_machine
from tilegym_db.records.loop import Attempt, Coverage, Experiment, Task
from tilegym_db.store.side_files import journaled

AUTHOR = """#!/usr/bin/env python3
import json, pathlib, re, sys
language = re.search(r"Write a ([a-z]+) kernel", sys.stdin.read())[1]
with open("{asked}", "a") as file:
    file.write(language + "\\n")
spec = {{"language": language, "entry_point": "kernel.py::run", "dtypes": {{"T": ["float32"]}}}}
record = {{"name": "mine", "definition": "row_scale", "author": "x", "spec": spec, "sources": [{{"path": "kernel.py"}}]}}
pathlib.Path("kernel.py").write_text("import socket\\n\\n\\ndef run(x, weight, factor, out):\\n    out.zero_()\\n")
pathlib.Path("solution.json").write_text(json.dumps(record))
"""


class OnePart:
    """A model of which one operator is worth a kernel. It is never timed: no kernel here gets so far."""

    tag, digest, machine = "tiny", "0" * 64, cpu_machine()

    def pieces(self) -> ModelPieces:
        work = tuple(Catalog.default().workloads_for("row_scale"))
        return ModelPieces(self.tag, "cpu", 1.0, [Piece("Scale", 0.5, 1, "row_scale", "exact", work)])

    def coverage(self) -> Coverage:
        return coverage_of([0.0] * 5, "cpu")


@pytest.fixture
def run(operator: Path, home: Path) -> Callable[..., list[Experiment]]:
    def once(author: str | None, language: str = "python", **options: Any) -> list[Experiment]:
        settings: dict[str, Any] = {"author": author, "language": language, "home": home, "max_attempts": 1, **options}
        return auto_kernelize(OnePart(), **settings)[0]  # type: ignore[arg-type]

    return once


@pytest.fixture
def author(tmp_path: Path) -> tuple[str, Path]:
    """An author whose kernels the scan refuses, and the file in which it notes what it was asked for."""
    script, asked = tmp_path / "author.py", tmp_path / "asked"
    script.write_text(AUTHOR.format(asked=asked))
    script.chmod(0o755)
    return str(script), asked


def test_after_an_author_that_crashed_another_one_is_asked(
    run: Callable[..., list[Experiment]], author: tuple[str, Path], home: Path
) -> None:
    said: list[str] = []
    assert [one.decision for one in run("false", say=said.append)] == ["crash"]  # asked for once in one run
    assert any("row_scale, crash, another run asks again" in text for text in said)
    assert said[0].startswith("profiling the model")
    assert "attempt 1: the author ended with status 1, and said nothing" in said
    command, asked = author
    assert [one.decision for one in run(command)] == ["discard"]
    assert asked.read_text().split() == ["python"]
    assert run(command) == []
    assert [one.decision for one in journaled(Experiment, home)] == ["crash", "discard"]


def test_notes_of_an_author_are_no_part_of_its_submission(
    run: Callable[..., list[Experiment]], author: tuple[str, Path], home: Path
) -> None:
    said: list[str] = []
    script = Path(author[0])
    script.write_text(script.read_text() + "pathlib.Path('notes.md').write_text('an idea')\n")
    run(author[0], say=said.append)
    assert "not part of the submission: notes.md" in said
    (attempt,) = (one for one in journaled(Attempt, home) if one.verdict == "refused")
    assert attempt.gate.startswith("scan")  # of the kernel, which imports socket


def test_discard_in_one_language_leaves_the_others_to_ask_for(
    run: Callable[..., list[Experiment]], author: tuple[str, Path]
) -> None:
    command, asked = author
    for language in ("python", "triton", "python", "triton"):
        run(command, language)
    assert asked.read_text().split() == ["python", "triton"]


@pytest.mark.turn("tilegym_db/loop/")  # waits for a thread
def test_kernel_submitted_elsewhere_wakes_a_loop_that_waits(
    run: Callable[..., list[Experiment]], hand_in: Callable[..., Path], home: Path
) -> None:
    folder = hand_in("import socket\n\n\ndef run(x, weight, factor, out):\n    out.zero_()\n")
    submitted: list[Attempt] = []

    def person() -> None:
        until = time.monotonic() + 30
        while not (pages := list((home / "loop" / "work").glob("*/1.md"))):
            assert time.monotonic() < until
            time.sleep(0.05)
        (task,) = journaled(Task, home)
        assert pages[0].parent.name == task.id
        submitted.append(submit(task, folder))

    with ThreadPoolExecutor(1) as pool:
        at_work = pool.submit(person)
        (experiment,) = run(None, budget_s=60.0)
        at_work.result()
    assert (experiment.decision, experiment.task) == ("discard", submitted[0].task)
    assert "scan" in experiment.reason
    assert journaled(Attempt, home)[-1] == submitted[0]  # it was judged once
