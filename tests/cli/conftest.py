"""Runs the command line as a process would see it: arguments in; exit status, stdout and stderr out."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str
    cause: str = ""
    """The code of the error that ended the command."""

    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    def run(*arguments: object, stdin: str | None = None) -> Result:
        from tilegym_db.cli.app import main

        monkeypatch.setattr("sys.argv", ["tilegym-db", *map(str, arguments)])
        if stdin is not None:
            monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        monkeypatch.setattr(sys, "last_value", None, raising=False)
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main()
        captured = capsys.readouterr()
        code = stopped.value.code
        assert code is None or isinstance(code, int)
        cause = str(getattr(sys.last_value, "code", ""))
        sys.last_value = None  # it holds the frames of the command
        return Result(code or 0, captured.out, captured.err, cause)

    return run


@pytest.fixture
def snapshot() -> Callable[[Path], dict[str, bytes]]:
    """Return a function that gives every file under a folder with its content, to show that nothing was written."""

    def take(root: Path) -> dict[str, bytes]:
        return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}

    return take


@pytest.fixture
def journal_traces(row_scale: Path, home: Path) -> Callable[..., list[str]]:
    """Journal one trace of the stock solution on an H200 per latency given; returns their ids."""
    from datetime import UTC, datetime, timedelta

    from tilegym_db.catalog import Catalog
    from tilegym_db.records import Trace
    from tilegym_db.records.trace import new_trace_id
    from tilegym_db.store.journal import Journal

    def write(*latencies_us: float, **changes: Any) -> list[str]:
        catalog = Catalog.default()
        definition, solution = catalog.definition("row_scale"), catalog.solution("row_scale_stock")
        (workload,) = catalog.workloads_for("row_scale")
        written = []
        with Journal(f"run-{len(latencies_us)}") as journal:
            for attempt, latency in enumerate(latencies_us):
                tier, config = changes.get("tier", "promotion"), changes.get("config", {})
                content = {
                    "trace_id": new_trace_id("run", tier, attempt, solution.digest, config, workload.uuid),
                    "run_id": "run",
                    "timestamp": datetime(2026, 11, 1, tzinfo=UTC) + timedelta(minutes=attempt),
                    "definition": definition.name,
                    "definition_version": definition.version,
                    "definition_digest": definition.digest,
                    "op_type": definition.op_type,
                    "solution": solution.name,
                    "solution_digest": solution.digest,
                    "language": "python",
                    "role": "baseline",
                    "workload_uuid": workload.uuid,
                    "axes": workload.axes,
                    "dtypes": workload.dtypes,
                    "scalars": {"factor": 0.5},
                    "gpu": "h200",
                    "gpu_name": "NVIDIA H200",
                    "sm": "sm_90",
                    "tier": "promotion",
                    "sandbox_level": 3,
                    "attempt": attempt,
                    "status": "PASSED",
                    "correctness": {"rel_fro": 1e-7, "cases": 3},
                    "performance": {
                        "latency_us": latency,
                        "ci_low_us": latency * 0.99,
                        "ci_high_us": latency * 1.01,
                        "samples": 50,
                        "timer": "events",
                        "comparisons": [
                            {
                                "with": "row_scale_stock",
                                "provides": "stock",
                                "ratio": 1.5,
                                "ci_low": 1.4,
                                "ci_high": 1.6,
                            }
                        ],
                    },
                    **changes,
                }
                journal.append(Trace.from_dict(content))
                written.append(str(content["trace_id"]))
        return written

    return write
