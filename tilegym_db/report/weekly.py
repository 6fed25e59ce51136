"""The short form of a report in Markdown: where the field stands and what changed, from SQL alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from tilegym_db.store.queries import leaderboard_rows
from tilegym_db.store.queries import report_rows as queries

if TYPE_CHECKING:
    from tilegym_db.store.database import Store

__all__ = ["weekly"]

FURTHEST = 10
"""So many operators are named as furthest from the speed of light."""


def weekly(store: Store, since: datetime) -> str:
    """Changes and attempts since then (UTC), what leads each operator and how far it is from the speed of light, runs of
    models, and what is open, as Markdown."""
    parts = [f"# tilegym-db since {since.date().isoformat()}", "## Changes"]
    parts += [_kernels(store, since), _taken_back(store, since)]
    parts += ["## Attempts", _attempts(store, since), "## Leaders", _leaders(store)]
    parts += ["## Furthest from the speed of light", _furthest(store)]
    parts += ["## Models", _models(store, since), "## Open"]
    open_rows = queries.open_rows(store)
    parts.append(
        _table(
            ("what", "operator", "solution", "GPU"),
            [(row["kind"], row["definition"], row["solution"], row["gpu"]) for row in open_rows],
            "Nothing is open.",
        )
    )
    return "\n\n".join(parts) + "\n"


def _kernels(store: Store, since: datetime) -> str:
    """What kernels were verified, one line an operator."""
    header = ("operator", "GPU", "languages", "shapes verified", "promoted", "best ratio", "of")
    names = ("definition", "gpus", "languages", "shapes", "promoted", "ratio", "solution")
    rows = [tuple(row[name] for name in names) for row in queries.kernel_rows(store, since)]
    return _table(header, rows, "No kernel was verified or promoted.")


def _taken_back(store: Store, since: datetime) -> str:
    header = ("day", "what", "operator", "solution", "GPU", "cases", "times slower")
    names = ("day", "kind", "definition", "solution", "gpu", "cases", "ratio")
    rows = [
        tuple(row[name] for name in names)
        for row in queries.change_rows(store, since)
        if row["kind"] in ("regression", "revocation")
    ]
    return _table(header, rows, "No revocation or regression.")


def _leaders(store: Store) -> str:
    """The solution that is fastest on most shapes of each operator and GPU; rows come with most wins first."""
    first: dict[tuple[str, str], tuple[object, ...]] = {}
    for row in leaderboard_rows(store):
        wins, sol = f"{row['wins']} of {row['shapes']}", row["geomean_sol_ratio"]
        share = "" if sol is None else f"{sol:.0%}"
        cells = (row["definition"], row["gpu"], row["solution"], row["language"], wins, row["geomean_speedup"], share)
        first.setdefault((row["definition"], row["gpu"]), cells)
    header = ("operator", "GPU", "solution", "language", "fastest at", "speedup", "of the speed of light")
    return _table(header, first.values(), "Nothing is verified yet.")


def _attempts(store: Store, since: datetime) -> str:
    rows = [(row["verdict"], row["gate"], row["attempts"], row["tasks"]) for row in queries.attempt_rows(store, since)]
    return _table(("verdict", "gate", "attempts", "tasks"), rows, "No attempt was submitted in this time.")


def _furthest(store: Store) -> str:
    """Each operator at its shape with the most work, those first where most is left."""
    header = ("operator", "GPU", "solution", "shape", "us", "of the speed of light")
    rows = [
        (*(row[key] for key in ("definition", "gpu", "solution", "axes_key", "latency_us")), f"{row['sol_ratio']:.0%}")
        for row in queries.furthest_rows(store, FURTHEST)
    ]
    return _table(header, rows, "Nothing is verified yet.")


def _models(store: Store, since: datetime) -> str:
    rows = [row for row in queries.model_rows(store) if row["timestamp"] >= since]
    header = ("model", "GPU", "way", "tokens/s", "speedup", "GPU time in verified kernels")
    cells = [
        (
            *(row[key] for key in ("model", "gpu", "way", "tokens_per_s", "speedup")),
            None if row["gpu_share"] is None else f"{row['gpu_share']:.0%}",
        )
        for row in rows
    ]
    return _table(header, cells, "No model was measured in this time.")


def _table(header: Sequence[str], rows: Iterable[Sequence[object]], empty: str) -> str:
    lines = ["| " + " | ".join(_cell(value) for value in row) + " |" for row in rows]
    return "\n".join(["| " + " | ".join(header) + " |", "|---" * len(header) + "|", *lines]) if lines else empty


def _cell(value: object) -> str:
    """A value that can neither end its cell nor its row."""
    text = "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
    return " ".join(text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").split())
