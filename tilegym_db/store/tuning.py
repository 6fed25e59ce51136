"""What a search over configs has tried: one line a step, ``<home>/tuning/<run_id>.jsonl``.

A search gives up most configs after a few rounds, before there is a verdict that a trace could hold. Its steps are kept
here, so that one that was killed goes on where it stopped. Verdicts, also of configs that fail, are traces.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from tilegym_db.errors import RecordError, StoreError
from tilegym_db.records.base import NAME_PATTERN, Record
from tilegym_db.records.solution import Tunable
from tilegym_db.records.trace import Status
from tilegym_db.store.journal import RunFile, numbered_lines

__all__ = ["Outcome", "TuningLog", "TuningStep", "read_tuning_steps"]

Outcome = Literal["leads", "slower", "tie", "compile", "failed"]
"""``leads``: the fastest so far. ``slower`` and ``tie``: given up against another config. ``compile``: does not compile ahead
of time. ``failed``: a wrong result, a crash or a timeout, at any stage."""


class TuningStep(Record):
    """What became of one config of one Solution on one Workload and GPU."""

    kind: ClassVar[str] = "tuning step"

    run_id: str
    timestamp: datetime
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
    """Time of ``against`` over its own, from paired rounds; below 1 it was slower."""

    @property
    def pair(self) -> tuple[str, str, str]:
        """Solution digest, definition digest, workload uuid."""
        return self.solution_digest, self.definition_digest, self.workload_uuid


class TuningLog(RunFile):
    """The steps of one run; raises as :class:`~tilegym_db.store.journal.RunFile` does."""

    def __init__(self, run_id: str, home: Path | None = None) -> None:
        super().__init__("tuning", run_id, home)

    def append(self, step: TuningStep) -> None:
        """Write one step as one line and wait until it is on disk."""
        self.append_line((step.to_json() + "\n").encode())


def read_tuning_steps(home: Path, gpu: str) -> list[TuningStep]:
    """Every step of a GPU, oldest first. A line that cannot be read, such as a torn one, is a config to be tried again.

    Raises:
        StoreError: a file cannot be read.
    """
    steps = [step for path in sorted((home / "tuning").glob("*.jsonl")) for step in _steps(path) if step.gpu == gpu]
    return sorted(steps, key=lambda step: step.timestamp)


def _steps(path: Path) -> Iterator[TuningStep]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}.") from None
    for number, line, _ in numbered_lines(content):
        try:
            yield TuningStep.from_json(line, f"{path}:{number}")
        except RecordError:
            continue
