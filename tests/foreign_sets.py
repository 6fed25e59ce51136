"""Small data sets of other projects, written here: records as they spell them, and a folder to put them in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SCALE = "import torch\n\ndef run(x, w, eps):\n    return x * w + eps\n"


def definition(**changes: Any) -> dict[str, Any]:
    """Return a Definition of ``x * w + eps``."""
    return {
        "name": "scale_n8",
        "op_type": "scale",
        "axes": {"M": {"type": "var"}, "N": {"type": "const", "value": 8}},
        "inputs": {
            "x": {"shape": ["M", "N"], "dtype": "float32"},
            "w": {"shape": ["N"], "dtype": "float32"},
            "eps": {"shape": None, "dtype": "float32"},
        },
        "outputs": {"out": {"shape": ["M", "N"], "dtype": "float32"}},
        "reference": SCALE,
    } | changes


def solution(name: str = "scale_torch", content: str = SCALE, **spec: Any) -> dict[str, Any]:
    """Return a Python Solution that returns its output."""
    return {
        "name": name,
        "definition": "scale_n8",
        "author": "someone",
        "sources": [{"path": "main.py", "content": content}],
        "spec": {
            "language": "python",
            "target_hardware": ["cpu"],
            "entry_point": "main.py::run",
            "destination_passing_style": False,
        }
        | spec,
    }


def workload(uuid: str = "w-1", m: int = 4, **inputs: Any) -> dict[str, Any]:
    """Return a call with M rows."""
    given = {"x": {"type": "random"}, "w": {"type": "random"}, "eps": {"type": "scalar", "value": 1e-06}}
    return {"axes": {"M": m}, "inputs": given | inputs, "uuid": uuid}


def trace(name: str = "scale_torch", status: str = "PASSED", of: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a measurement from another project."""
    evaluation: dict[str, Any] = {
        "status": status,
        "environment": {"hardware": "NVIDIA B200", "libs": {"torch": "2.9"}},
        "timestamp": "2026-01-02T03:04:05",
        "log": "",
        "correctness": None,
        "performance": None,
    }
    if status in ("PASSED", "INCORRECT_NUMERICAL"):
        evaluation["correctness"] = {"max_relative_error": "NaN", "max_absolute_error": 0.001, "extra": None}
    if status == "PASSED":
        evaluation["performance"] = {"latency_ms": 0.5, "reference_latency_ms": 0.0, "speedup_factor": 0.0}
    return {"definition": "scale_n8", "workload": of or workload(), "solution": name, "evaluation": evaluation}


def of_workload(item: dict[str, Any]) -> dict[str, Any]:
    """Return a line of ``workloads/``."""
    return {"definition": "scale_n8", "workload": item, "solution": None, "evaluation": None}


def lines(*records: dict[str, Any], end: str = "\n") -> str:
    """Compact JSON lines."""
    return "\n".join(json.dumps(record, separators=(",", ":")) for record in records) + end


class Tree:
    """A data set on disk."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, content: str | bytes | dict[str, Any]) -> Tree:
        """Put a file there; a record is spelled as FlashInfer-Bench spells it."""
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(content, indent=2) if isinstance(content, dict) else content
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        return self

    def bytes(self) -> dict[str, bytes]:
        """Path -> content of every file."""
        return {
            file.relative_to(self.root).as_posix(): file.read_bytes()
            for file in sorted(self.root.rglob("*"))
            if file.is_file()
        }


DEFINITION = "definitions/scale/scale_n8.json"
SOLUTION = "solutions/someone/scale/scale_n8/scale_torch.json"
WORKLOADS = "workloads/scale/scale_n8.jsonl"
TRACES = "traces/someone/scale/scale_n8.jsonl"
