"""What the process that a tool attaches to is asked to call, as a file that it reads; and what it says about it on its output."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tilegym_db.records import Config
from tilegym_db.records.case import Case
from tilegym_db.records.workload import SafetensorsInput

__all__ = ["MARK", "SolutionCalls", "mark_of", "marked_line", "read_request", "write_request"]

MARK = "tilegym-db-call "
"""How a line of the process's own begins, among those of the tool and of the kernel."""


@dataclass(frozen=True)
class SolutionCalls:
    """One Solution of a request: its record, its source's digest, its config, and the cases to call it at."""

    name: str
    record: Path
    digest: str
    definition: str
    cases: Sequence[Case]
    config: Config = field(default_factory=dict)


def write_request(path: Path, device: str, calls: Sequence[SolutionCalls], *, profile: bool = False) -> None:
    """Write what :func:`read_request` reads."""
    pieces = [
        {**asdict(item), "record": str(item.record), "cases": [_case_content(case) for case in item.cases]}
        for item in calls
    ]
    path.write_text(json.dumps({"device": device, "profile": profile, "calls": pieces}))


def read_request(path: Path) -> tuple[str, list[SolutionCalls], bool]:
    """The device, the calls, and whether only the last call of each is to be profiled."""
    content = json.loads(path.read_text())
    calls = [
        SolutionCalls(**{**item, "record": Path(item["record"]), "cases": [_case_of(case) for case in item["cases"]]})
        for item in content["calls"]
    ]
    return content["device"], calls, content["profile"]


def _case_content(case: Case) -> dict[str, Any]:
    return {**vars(case), "files": {name: spec.model_dump(mode="json") for name, spec in case.files.items()}}


def _case_of(content: Mapping[str, Any]) -> Case:
    return Case(**{**content, "files": {name: SafetensorsInput(**spec) for name, spec in content["files"].items()}})


def marked_line(at: str, name: str, **more: object) -> str:
    """A line that says where the process is: at a ``case``, ``done`` with a Solution, or stopped by an ``error``."""
    return MARK + json.dumps({"at": at, "solution": name, **more})


def mark_of(line: str) -> Mapping[str, Any] | None:
    """What a line of the output says about the process; None for any other line."""
    if not line.startswith(MARK):
        return None
    content: Mapping[str, Any] = json.loads(line.removeprefix(MARK))
    return content
