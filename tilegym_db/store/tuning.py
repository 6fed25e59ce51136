"""The log of a config search: one line per step, ``<home>/tuning/<run_id>.jsonl``.

A search drops most configs after a few rounds, before a trace could hold a verdict. Its steps are logged here, so that
a killed search resumes where it stopped. Verdicts are traces, also those of failing configs. The steps that found the
published configs are published beside the traces of their GPU. They save others the search, and show that the defaults
were compared with other configs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import AwareDatetime, Field

from tilegym_db.catalog import Catalog
from tilegym_db.errors import RecordError, StoreError
from tilegym_db.files import read_bytes
from tilegym_db.published.input_files import own_tuning_files, published_tuning_files, read_lines
from tilegym_db.published.snapshot import read_published
from tilegym_db.records.base import Record
from tilegym_db.records.solution import Tunable, config_id
from tilegym_db.records.text import NAME_PATTERN
from tilegym_db.records.verdicts import Status
from tilegym_db.store import statements
from tilegym_db.store.journal import RunFile, numbered_lines
from tilegym_db.store.loading import grown_files, remember_files

if TYPE_CHECKING:
    from tilegym_db.store.database import Store

Outcome = Literal["leads", "slower", "tie", "compile", "failed"]
"""``leads``: the fastest so far. ``slower`` and ``tie``: dropped in favour of another config. ``compile``: does not
compile ahead of time. ``failed``: a wrong result, a crash or a timeout, at any stage.
"""


class TuningStep(Record):
    """The outcome of one config of one Solution on one Workload and GPU."""

    kind: ClassVar[str] = "tuning step"

    run_id: str
    timestamp: AwareDatetime
    gpu: str
    solution: str = Field(pattern=NAME_PATTERN)
    solution_digest: str
    definition_digest: str
    workload_uuid: str
    config: dict[str, Tunable]
    outcome: Outcome
    reason: str
    status: Status | None = None
    """The verdict of a config that ``failed``."""
    against: dict[str, Tunable] | None = None
    """The config that it lost to."""
    ratio: float | None = None
    """Time of ``against`` divided by its own, from paired rounds; below 1 it was slower."""

    @property
    def pair(self) -> tuple[str, str, str]:
        """Return (solution digest, definition digest, workload uuid)."""
        return self.solution_digest, self.definition_digest, self.workload_uuid


class TuningLog(RunFile):
    """The steps of one run; raises as :class:`~tilegym_db.store.journal.RunFile` does."""

    def __init__(self, run_id: str, home: Path | None = None) -> None:
        super().__init__("tuning", run_id, home)

    def append(self, step: TuningStep) -> None:
        """Write one step as one line and wait until it is on disk."""
        self.append_line((step.to_json() + "\n").encode())


def read_tuning_steps(home: Path, gpu: str, catalog: Catalog | None = None) -> list[TuningStep]:
    """Return every step of a GPU, oldest first. A config on an unreadable line, such as a torn one, is tried again.

    Args:
        home: the folder of the store.
        gpu: a slug.
        catalog: whose published steps count too; None for none.

    Raises:
        StoreError: a file cannot be read.
    """
    published = published_tuning_files(catalog) if catalog is not None else []
    trust = catalog is not None and catalog.trust_foreign
    found = [*(step for path in published for step in _published_steps(path, home, [], trust=trust))]
    found += [step for path in own_tuning_files(home) for step in _steps(path, _read(path))]
    steps = {step.to_json(): step for step in found}  # steps published from this machine are in two files
    return sorted((step for step in steps.values() if step.gpu == gpu), key=lambda step: step.timestamp)


def published_tuning_rows(catalog: Catalog, home: Path, refused: list[str]) -> list[dict[str, Any]]:
    """Return the table rows of a catalog's steps. An untrusted file is named in ``refused`` instead."""
    return [
        _row(step, step.run_id, is_own=False)
        for path in published_tuning_files(catalog)
        for step in _published_steps(path, home, refused)
    ]


def load_tuning(store: Store, home: Path) -> None:
    """Load the search logs that grew since the last time.

    Raises:
        StoreError: a file cannot be read, or the disk is full.
    """
    grown = grown_files(store, own_tuning_files(home))
    if not grown:
        return
    records = json.dumps([_row(step, path.stem, is_own=True) for path in grown for step in _steps(path, _read(path))])
    with store.transaction("ingest searches into") as connection:
        connection.execute(statements.FORGET_OWN_TUNING, {"runs": [path.stem for path in grown]})
        connection.execute(statements.INSERT_TUNING, {"records": records})
        remember_files(connection, grown)


def _row(step: TuningStep, run_id: str, *, is_own: bool) -> dict[str, Any]:
    keys = ("gpu", "solution", "solution_digest", "definition_digest", "workload_uuid", "outcome", "timestamp")
    record = step.to_dict()
    return {
        **{key: record[key] for key in keys},
        "is_own": is_own,
        "run_id": run_id,
        "config_key": config_id(step.config),
        "record": record,
    }


def _published_steps(path: Path, home: Path, refused: list[str], *, trust: bool = False) -> Iterator[TuningStep]:
    content = read_published(path, path.parents[2], home, refused, trust=trust)
    if content is None:
        return
    try:
        yield from [TuningStep.from_parsed(step, path) for step in read_lines(content, path)]
    except RecordError as error:
        refused.append(str(error))


def _read(path: Path) -> bytes:
    try:
        return read_bytes(path, "log of a search", limit=None)
    except RecordError as error:
        raise StoreError(str(error), code=error.code) from None


def _steps(path: Path, content: bytes) -> Iterator[TuningStep]:
    for number, line, _ in numbered_lines(content):
        try:
            yield TuningStep.from_json(line, f"{path}:{number}")
        except RecordError:
            continue
