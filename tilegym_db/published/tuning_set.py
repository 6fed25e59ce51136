"""The published steps of the searches of one Definition on one GPU, in one small file of JSON lines.

The layout follows a trace set (:mod:`tilegym_db.published.trace_set`). The first line is an object with tables of
repeated values and the names of the columns (``row_columns``). Every other line is an array, one step, whose indices
count from 0 and point into the tables.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic_core import from_json

from tilegym_db.errors import RecordError
from tilegym_db.records.base import Record

SCHEMA_VERSION = 2
"""Version of the layout. Version 1 was one whole step per line for all Definitions of a GPU, and is still read."""

ROW_COLUMNS = ("run", "after_us", "solution", "workload", "config", "against", "ratio", "outcome", "reason")
"""Columns of a step. ``after_us`` is the time since the step before, or since the run's start for the first."""
_RATIO = "{ratio:.2f}"
_MARK = b'{"schema_version":'


class TuningSetHeader(Record):
    """The first line of a set of steps."""

    kind: ClassVar[str] = "tuning set"

    schema_version: Literal[2] = 2
    record: Literal["tuning set"] = "tuning set"
    gpu: str
    definition: str
    definition_digest: str
    row_columns: tuple[str, ...] = ROW_COLUMNS
    runs: tuple[tuple[str, datetime], ...] = ()
    """Run id, and the time of its first step here."""
    solutions: tuple[tuple[str, str], ...] = ()
    """Name and digest."""
    workloads: tuple[str, ...] = ()
    configs: tuple[dict[str, Any], ...] = ()
    outcomes: tuple[tuple[str, str | None], ...] = ()
    """Outcome, and the verdict of a failed step."""
    reasons: tuple[str, ...] = ()
    """Reasons, in which ``{ratio:.2f}`` stands for the step's own ratio."""


def encode_steps(definition: str, steps: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of a set of at least one step (:meth:`TuningStep.to_dict`), all of one GPU and Definition."""
    tables: dict[str, list[Any]] = {
        name: [] for name in ("runs", "solutions", "workloads", "configs", "outcomes", "reasons")
    }

    def index(name: str, value: Any) -> int:
        if value not in tables[name]:
            tables[name].append(value)
        return tables[name].index(value)

    starts: dict[str, datetime] = {}
    for step in steps:
        starts[step["run_id"]] = min(_time(step), starts.get(step["run_id"], _time(step)))
    rows = []
    before = starts[steps[0]["run_id"]]
    for step in steps:
        start, against, ratio = starts[step["run_id"]], step.get("against"), step.get("ratio")
        reason = step["reason"].replace("{", "{{").replace("}", "}}")
        if ratio is not None and reason.startswith(f"{ratio:.2f}x"):
            reason = reason.replace(f"{ratio:.2f}", _RATIO, 1)
        row = [
            index("runs", [step["run_id"], _spelled(start)]),
            round((_time(step) - before) / timedelta(microseconds=1)),
            index("solutions", [step["solution"], step["solution_digest"]]),
            index("workloads", step["workload_uuid"]),
            index("configs", step["config"]),
            None if against is None else index("configs", against),
            ratio,
            index("outcomes", [step["outcome"], step.get("status")]),
            index("reasons", reason),
        ]
        rows.append(_compact(row))
        before = _time(step)
    head = {
        "schema_version": SCHEMA_VERSION,
        "record": "tuning set",
        "gpu": steps[0]["gpu"],
        "definition": definition,
        "definition_digest": steps[0]["definition_digest"],
        "row_columns": ROW_COLUMNS,
        **tables,
    }
    return "\n".join([_compact(head), *rows]) + "\n"


def is_tuning_set(content: bytes) -> bool:
    """Return True if the content of a file is a set, by its start; otherwise it holds one whole step per line."""
    return content.startswith(_MARK)


def decode_steps(content: bytes, source: Path) -> Iterator[dict[str, Any]]:
    """Yield every step of a set as :meth:`TuningStep.to_dict` gives it.

    Raises:
        RecordError: not such a set, or damaged.
    """
    first, *lines = content.splitlines()
    head = TuningSetHeader.from_json(first, f"{source}:1")
    time: datetime | None = None
    for number, line in enumerate(lines, start=2):
        try:
            row = from_json(line)
            time = (time or head.runs[row[0]][1].astimezone(UTC)) + timedelta(microseconds=row[1])
            yield _decoded(head, row, time)
        except (ValueError, TypeError, LookupError, OverflowError) as error:
            raise RecordError(
                f"{source}:{number}: not a step: {error}. Publish it again.", code="step_invalid"
            ) from None


def _decoded(head: TuningSetHeader, row: list[Any], time: datetime) -> dict[str, Any]:
    run, _, solution, workload, config, against, ratio, outcome, reason = row
    name, digest = head.solutions[solution]
    said, status = head.outcomes[outcome]
    return {
        "run_id": head.runs[run][0],
        "timestamp": _spelled(time),
        "gpu": head.gpu,
        "solution": name,
        "solution_digest": digest,
        "definition_digest": head.definition_digest,
        "workload_uuid": head.workloads[workload],
        "config": dict(head.configs[config]),
        "outcome": said,
        "reason": head.reasons[reason].format(ratio=ratio),
        **({} if status is None else {"status": status}),
        **({} if against is None else {"against": dict(head.configs[against])}),
        **({} if ratio is None else {"ratio": ratio}),
    }


def _time(step: Mapping[str, Any]) -> datetime:
    return datetime.fromisoformat(step["timestamp"]).astimezone(UTC)


def _spelled(time: datetime) -> str:
    return time.isoformat().replace("+00:00", "Z")


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
