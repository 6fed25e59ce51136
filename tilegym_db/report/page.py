"""One HTML page with everything in it: the data as JSON, the style and the script. It asks no network for anything."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib.resources import files
from typing import Any

import jinja2

from tilegym_db.report.data import ReportData

__all__ = ["page", "page_data"]

SHOWN = (
    "definition", "op_type", "gpu", "axes_key", "dtypes_key", "scalars_key", "layouts_key", "solution", "language", "role",
    "config_key", "latency_us", "ci_low_us", "ci_high_us", "samples", "speedup", "speedup_ci_low", "sol_us", "sol_ratio",
    "flops", "bytes", "is_fastest", "is_fastest_in_language", "trace_id", "timestamp", "origin", "gpu_name", "driver",
    "libs", "tier", "sandbox_level", "cases", "envelope_cases", "envelope_digest", "rel_fro", "max_abs", "timer",
    "clock_mhz", "command",
)  # fmt: skip
"""The columns of the evidence that the page carries."""

SCRIPTS = (("vendor", "d3.min.js"), ("plots.js",), ("page.js",))
"""In the order in which the page runs them: a library, the plots that call it, and the page that calls these."""

_IN_A_SCRIPT = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"})


def page(data: ReportData, *, version: str, title: str = "tilegym-db report") -> str:
    """The page as one text of HTML."""
    folder = files("tilegym_db.report")
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(
        folder.joinpath("page.html.j2").read_text("utf-8")
    )
    return template.render(
        title=title,
        version=version,
        newest=data.newest.strftime("%Y-%m-%d %H:%M UTC") if data.newest else "never",
        counts=_counts(data),
        style=folder.joinpath("page.css").read_text("utf-8"),
        scripts=[folder.joinpath(*path).read_text("utf-8") for path in SCRIPTS],
        data=as_script(page_data(data)),
    )


def page_data(data: ReportData) -> dict[str, Any]:
    """What the page's script reads: tables as columns and values, the sources by digest."""
    return {
        "evidence": _table(data.evidence, SHOWN),
        **{
            name: _table(getattr(data, name))
            for name in ("coverage", "open", "changes", "definitions", "solutions", "peaks", "models")
        },
        "sources": packed(data.sources),
        "files": data.files_of,
    }


def as_script(value: Any) -> str:
    """JSON that no parser of HTML can leave early: no text in it closes the element or opens a comment."""
    return json.dumps(value, default=_plain, separators=(",", ":"), ensure_ascii=False).translate(_IN_A_SCRIPT)


def packed(value: Any) -> str:
    """JSON as base64 of a zlib stream: sources are more than half of a page otherwise, and read one at a time."""
    return base64.b64encode(zlib.compress(json.dumps(value).encode(), 9)).decode("ascii")


def _table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | None = None) -> dict[str, Any]:
    """Columns, the different texts of each, and values; a column of texts holds indices, since most of them repeat."""
    names = list(columns or (rows[0] if rows else ()))
    texts: dict[str, list[str]] = {}
    values = []
    for name in names:
        column = [_flat(row[name]) for row in rows]
        if column and all(isinstance(item, str) for item in column):
            known = {text: index for index, text in enumerate(dict.fromkeys(column))}
            if len(known) <= 0.8 * len(column):
                texts[name] = list(known)
                column = [known[item] for item in column]
        values.append(column)
    return {"columns": names, "texts": texts, "values": values, "length": len(rows)}


def _flat(value: Any) -> Any:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {item}" for name, item in value.items())
    if isinstance(value, datetime):
        return _plain(value)
    return value


def _plain(value: Any) -> str:
    return value.strftime("%Y-%m-%dT%H:%M:%SZ") if isinstance(value, datetime) else str(value)


def _counts(data: ReportData) -> list[tuple[str, int]]:
    return [
        ("operators", len(data.definitions)),
        ("solutions", len(data.solutions)),
        ("verified cases", len(data.evidence)),
        ("measured GPUs", len({row["gpu"] for row in data.evidence})),
        ("open", len(data.open)),
    ]
