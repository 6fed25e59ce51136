"""The files of a data set on its way out, and what could not be said."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tilegym_db.integrations.interchange.declared_blobs import SIDE_FILE

__all__ = ["Export"]


@dataclass
class Export:
    """The files of a data set by path, and what could not be said, as (what, reason)."""

    files: dict[str, bytes] = field(default_factory=dict)
    blobs: dict[str, Path] = field(default_factory=dict)
    """Path there -> file to copy."""
    drawn: dict[str, Path] = field(default_factory=dict)
    """Path there -> file that was drawn for it, to be copied."""
    told_blobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Path there -> what the side file says of a drawn blob."""
    left_out: list[tuple[str, str]] = field(default_factory=list)
    definitions: dict[str, dict[str, Any]] = field(default_factory=dict)
    solutions: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("definition", "solution", "workload", "trace", "blob"), 0)
    )

    def leave_out(self, what: str, reason: str) -> None:
        """Remember why something is not there."""
        self.left_out.append((what, reason))

    def write_json(self, path: str, value: Any) -> None:
        """One record as a file."""
        self.files[path] = (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()

    def write_lines(self, path: str, values: Iterable[Any]) -> list[bytes]:
        """Records as lines, which are returned."""
        lines = [_compact(value) for value in values]
        if lines:
            self.files[path] = self.files.get(path, b"") + b"".join(line + b"\n" for line in lines)
        return lines

    def seal(self) -> None:
        """Write what was left out, and where everything came from."""
        self.counts["blob"] = len(self.blobs) + len(self.drawn)
        if self.told_blobs:
            about = "drawn by tilegym-db on the CPU, each from its seed; an import refuses a blob whose sha256 differs"
            self.write_json(SIDE_FILE, {"about": about, "blobs": self.told_blobs})
        self.write_json(
            "tilegym_db/export.json",
            {
                "counts": self.counts,
                "reference_latency_ms": "the time of the model's own code (stock), in the same rounds; 0 where there was none",
                "max_relative_error": "the norm of a row's error over that row's norm, the worst row; NaN where it was not taken",
                "definitions": self.definitions,
                "solutions": self.solutions,
                "notes": self.notes,
                "left_out": [{"what": what, "reason": reason} for what, reason in self.left_out],
            },
        )


def _compact(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
