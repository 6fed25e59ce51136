"""Rows of the database as Python values."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["parsed"]


def parsed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """``config`` and ``scalars`` come as JSON text."""
    for row in rows:
        row["config"], row["scalars"] = json.loads(row["config"]), json.loads(row["scalars"])
    return rows
