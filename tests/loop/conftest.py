"""Scripted authors on this machine's processor: what they write, and the command line that judges it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tilegym_db.catalog import Catalog, writers
from tilegym_db.measurement import machine
from tilegym_db.records import Workload
from tilegym_db.records.loop import Task

ROWS = {"axes": {"M": 512, "N": 1024}, "tags": ["cpu"]}


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_cuda_machine", lambda index: None)


@pytest.fixture
def operator(row_scale: Path, workload_record: Callable[..., dict[str, Any]]) -> Path:
    """Return the small operator, with a workload that is worth timing."""
    writers.add_workloads(Catalog.default(), [Workload.from_dict(workload_record(**ROWS))])
    return row_scale


@pytest.fixture
def task(operator: Path) -> Task:
    from tilegym_db.loop.tasks import create_task

    return create_task("row_scale", language="python", gpu="cpu", workload="cpu")


@pytest.fixture
def hand_in(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes an author's folder: ``hand_in(source, {"extra.py": "..."}, name=...)``."""

    def write(source: str, others: dict[str, str] | None = None, **changes: Any) -> Path:
        folder = tmp_path / f"submission-{len(list(tmp_path.glob('submission-*')))}"
        folder.mkdir()
        record = {
            "name": "mine",
            "definition": "row_scale",
            "author": "a script",
            "spec": {"language": "python", "entry_point": "kernel.py::run", "dtypes": {"T": ["float32"]}},
            "sources": [{"path": "kernel.py"}],
            **changes,
        }
        files = {"kernel.py": source, "solution.json": json.dumps(record), **(others or {})}
        for name, text in files.items():
            (folder / name).write_text(text)
        return folder

    return write
