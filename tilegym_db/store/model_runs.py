"""Runs of whole models: one signed file each in the home folder, published ones in ``traces/<gpu>``, and a table of
both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilegym_db.catalog import Catalog
from tilegym_db.errors import RecordError
from tilegym_db.files import read_bytes, regular_files, write_atomically, writing
from tilegym_db.paths import home as default_home
from tilegym_db.published.input_files import MODELS_SUFFIX, published_model_files
from tilegym_db.published.snapshot import Origin, RejectedLine, is_signed, open_snapshot, read_published, signature
from tilegym_db.records.model_run import ModelRun
from tilegym_db.records.text import canonical_json, parse_object
from tilegym_db.store import statements
from tilegym_db.store.journal import numbered_lines
from tilegym_db.store.loading import IngestReport

if TYPE_CHECKING:
    from tilegym_db.store.database import Store

FOLDER = "model_runs"
_KEY = "signature"


# -- of this machine --------------------------------------------------------------------------------------------------


def save_model_run(run: ModelRun, home: Path | None = None) -> Path:
    """Write a signed run to ``<home>/model_runs/<run_id>.json`` and return that path. The next ingest loads it."""
    folder = home or default_home()
    path = folder / FOLDER / f"{run.run_id}.json"
    with writing(folder):
        content = json.loads(run.to_json())
        content[_KEY] = signature(folder, "model run", canonical_json(content).encode())
        write_atomically(path, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())
    return path


def read_model_run(path: Path, home: Path) -> tuple[ModelRun, Origin]:
    """Read the run in a file. Its origin is ``local`` if this installation signed it, else ``foreign``.

    Raises:
        RecordError: it is not a run, or cannot be read.
    """
    content = parse_object(read_bytes(path, "model run"), ModelRun.kind, path)
    claimed = content.pop(_KEY, None) if isinstance(content, dict) else None
    run = ModelRun.from_parsed(content, path)
    is_own = isinstance(claimed, str) and is_signed(home, "model run", canonical_json(content).encode(), claimed)
    return run, "local" if is_own else "foreign"


def stored_model_runs(home: Path) -> list[ModelRun]:
    """Return the readable runs in a home folder, in no particular order."""
    runs = []
    for path in regular_files(home / FOLDER, "*.json"):
        try:
            runs.append(read_model_run(path, home)[0])
        except RecordError:
            continue  # the next ingest names it
    return runs


def load_model_runs(store: Store, home: Path, *, trust: bool = False) -> IngestReport:
    """Insert new runs of a home folder into the database. Invalid files are reported and left out.

    With ``trust``, unsigned runs count from now on.
    """
    known = {row["run_id"] for row in store.rows(statements.OWN_MODEL_RUN_IDS)}
    rows: list[dict[str, Any]] = []
    rejected: list[RejectedLine] = []
    for path in regular_files(home / FOLDER, "*.json"):
        if path.stem in known:
            continue
        try:
            run, origin = read_model_run(path, home)
            if run.run_id != path.stem:
                raise RecordError(f"run_id '{run.run_id}' does not match the file's name.", code="record_misplaced")
            rows.append(_row(run, origin, is_own=True))
        except RecordError as error:
            rejected.append(RejectedLine(path, 1, str(error).removeprefix(f"{path}: ")))
    if rows or trust:
        with store.transaction("ingest model runs into") as connection:
            connection.execute(statements.INSERT_MODEL_RUNS, {"records": json.dumps(rows)})
            if trust:
                connection.execute(statements.TRUST_MODEL_RUNS)
    return IngestReport(rejected=tuple(rejected))


# -- published --------------------------------------------------------------------------------------------------------


def model_texts(runs: Iterable[ModelRun]) -> dict[str, str]:
    """Return name -> text of the files of published runs: one file per model, one run per line."""
    texts: dict[str, str] = {}
    for run in runs:
        name = re.sub(r"[^\w.-]", "-", run.model) + MODELS_SUFFIX
        texts[name] = texts.get(name, "") + run.to_json() + "\n"
    return texts


def published_model_rows(catalog: Catalog, home: Path, refused: list[str]) -> list[dict[str, Any]]:
    """Return the table rows of a catalog's runs. An unused file or line is named in ``refused`` instead."""
    return [row for path in published_model_files(catalog) for row in _published(path, home, refused)]


def _published(path: Path, home: Path, refused: list[str]) -> Iterator[dict[str, Any]]:
    content = read_published(path, path.parent, home, refused)
    if content is None:
        return
    origin = open_snapshot(path.parent, home).origin
    for number, line, _ in numbered_lines(content):
        try:
            run = ModelRun.from_json(line, f"{path}:{number}")
            if run.gpu != path.parent.name:
                raise RecordError(f"{path}:{number}: not used: it is a run on '{run.gpu}'.", code="record_misplaced")
            yield _row(run, origin, is_own=False)
        except RecordError as error:
            refused.append(str(error))


def _row(run: ModelRun, origin: Origin, *, is_own: bool) -> dict[str, Any]:
    return {"run_id": run.run_id, "is_own": is_own, "origin": origin, "record": run.model_dump(mode="json")}
