"""Runs of whole models: one file each under the home folder, and a table that is derived from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from tilegym_db.errors import RecordError
from tilegym_db.files import read_bytes, regular_files, write_atomically
from tilegym_db.folder_locks import writing
from tilegym_db.paths import home as default_home
from tilegym_db.records.model_run import ModelRun
from tilegym_db.store import statements
from tilegym_db.store.journal import RejectedLine
from tilegym_db.store.loading import IngestReport

if TYPE_CHECKING:
    from tilegym_db.store.database import Store

__all__ = ["load_model_runs", "save_model_run", "stored_model_runs"]

FOLDER = "model_runs"


def save_model_run(run: ModelRun, home: Path | None = None) -> Path:
    """Write a run to ``<home>/model_runs/<run_id>.json`` and return that path; the next ingest brings it in."""
    folder = home or default_home()
    path = folder / FOLDER / f"{run.run_id}.json"
    with writing(folder):
        write_atomically(path, (run.to_json(indent=2) + "\n").encode())
    return path


def stored_model_runs(home: Path) -> list[ModelRun]:
    """The runs in a home folder that can be read, in no particular order."""
    runs = []
    for path in regular_files(home / FOLDER, "*.json"):
        try:
            runs.append(ModelRun.from_json(read_bytes(path, "model run"), path))
        except RecordError:
            continue  # the next ingest names it
    return runs


def load_model_runs(store: Store, home: Path) -> IngestReport:
    """Insert the runs of a home folder that the database does not have yet. What is none is reported and left out."""
    known = {row["run_id"] for row in store.rows(statements.MODEL_RUN_IDS)}
    runs: list[ModelRun] = []
    rejected: list[RejectedLine] = []
    for path in regular_files(home / FOLDER, "*.json"):
        if path.stem in known:
            continue
        try:
            run = ModelRun.from_json(read_bytes(path, "model run"), path)
            if run.run_id != path.stem:
                raise RecordError(f"run_id '{run.run_id}' does not match the file's name.")
            runs.append(run)
        except RecordError as error:
            rejected.append(RejectedLine(path, 1, str(error).removeprefix(f"{path}: ")))
    if runs:
        payload = json.dumps([{"run_id": run.run_id, "record": run.model_dump(mode="json")} for run in runs])
        with store.transaction("ingest model runs into") as connection:
            connection.execute(statements.INSERT_MODEL_RUNS, {"records": payload})
    return IngestReport(rejected=tuple(rejected))
