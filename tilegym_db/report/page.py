"""Builds one offline HTML page that holds the data as JSON, the style and the script."""

from __future__ import annotations

import base64
import hashlib
import json
import shlex
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import jinja2

from tilegym_db.catalog.record_files import keeping_parsed_sources
from tilegym_db.errors import RecordError
from tilegym_db.records import Definition
from tilegym_db.records.roofline import share_of_stated_light
from tilegym_db.store.queries import report_rows as queries

if TYPE_CHECKING:
    from tilegym_db.catalog import Catalog
    from tilegym_db.store.connection import Store


SHOWN = (
    "definition", "op_type", "gpu", "axes_key", "dtypes_key", "scalars_key", "layouts_key", "solution", "language", "role",
    "config_key", "latency_us", "ci_low_us", "ci_high_us", "samples", "profiled_us", "speedup", "speedup_ci_low",
    "strongest_baseline", "strongest_ratio", "sol_us", "sol_ratio", "flops", "bytes",
    "is_fastest", "is_fastest_in_language", "trace_id", "timestamp", "origin", "gpu_name", "driver",
    "libs", "tier", "sandbox_level", "cases", "envelope_cases", "envelope_digest", "rel_fro", "max_abs", "timer",
    "clock_mhz", "command",
)  # fmt: skip
"""Columns of the evidence on the page."""

SCRIPTS = (("vendor", "d3.min.js"), ("plots.js",), ("page.js",))
"""Script files in loading order: a library, the plots that call it, and the page that calls these."""

_IN_A_SCRIPT = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def page(data: ReportData, *, version: str, title: str = "tilegym-db report") -> str:
    """Return the page as HTML text."""
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
    """Return the input of the page's script: tables as columns and values, and sources by digest."""
    return {
        "evidence": _table(data.evidence, SHOWN),
        **{
            name: _table(getattr(data, name))
            for name in ("history", "coverage", "open", "changes", "definitions", "solutions", "peaks", "models")
        },
        "sources": packed(data.sources),
        "files": data.files_of,
    }


def as_script(value: Any) -> str:
    """Return JSON in which no text can close the script element or open an HTML comment."""
    text = json.dumps(value, default=_plain, separators=(",", ":"), ensure_ascii=False)
    for character, escaped in _IN_A_SCRIPT.items():  # several times quicker than str.translate
        text = text.replace(character, escaped)
    return text


def packed(value: Any) -> str:
    """Return JSON as base64 of a zlib stream. Sources would otherwise take more than half of the page."""
    return base64.b64encode(zlib.compress(json.dumps(value).encode(), 9)).decode("ascii")


def _table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the columns, the distinct texts of each, and the values. A text column holds indices, since most texts
    repeat.
    """
    names = list(columns or (rows[0] if rows else ()))
    texts: dict[str, list[str]] = {}
    values = []
    for name in names:
        column = [row[name] for row in rows]
        kinds = {*map(type, column)}
        if not kinds <= _PLAIN:
            column = list(map(_flat, column))
            kinds = {*map(type, column)}
        if kinds == {str}:
            known = {text: index for index, text in enumerate(dict.fromkeys(column))}
            if len(known) <= 0.8 * len(column):
                texts[name] = list(known)
                column = [known[item] for item in column]
        values.append(column)
    return {"columns": names, "texts": texts, "values": values, "length": len(rows)}


_PLAIN = frozenset({str, int, float, bool, type(None)})


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


# ---- data -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReportData:
    """The parts of a report. Each part is a list of rows, which is empty if the store has no such data.

    ``newest`` is when the newest trace was measured (UTC). ``sources`` maps a digest to the text of a file, and
    ``files_of`` a solution to its (path, digest) pairs.
    """

    newest: datetime | None
    evidence: list[dict[str, Any]]
    history: list[dict[str, Any]]
    coverage: list[dict[str, Any]]
    open: list[dict[str, Any]]
    changes: list[dict[str, Any]]
    definitions: list[dict[str, Any]]
    solutions: list[dict[str, Any]]
    peaks: list[dict[str, Any]]
    models: list[dict[str, Any]]
    sources: dict[str, str]
    files_of: dict[str, list[tuple[str, str]]]


def read_report(store: Store, catalog: Catalog, since: datetime | None = None) -> ReportData:
    """Read every part of a report. Changes are those since ``since`` (UTC), or all of them."""
    definitions = queries.definition_rows(store)
    with keeping_parsed_sources(store.home):
        sources, files_of = _sources(catalog)
    return ReportData(
        newest=queries.newest_trace_time(store),
        evidence=_with_work(queries.evidence_rows(store), definitions),
        history=[_with_files(row) for row in queries.history_rows(store)],
        coverage=queries.coverage_rows(store),
        open=queries.open_rows(store),
        changes=queries.change_rows(store, since),
        definitions=[{key: value for key, value in row.items() if key != "record"} for row in definitions],
        solutions=queries.solution_rows(store),
        peaks=queries.peak_rows(store),
        models=queries.model_rows(store),
        sources=sources,
        files_of=files_of,
    )


def reproduce_command(row: Mapping[str, Any], quote: Callable[[str], str] = shlex.quote) -> str:
    """Return the shell command that verifies the case of a trace again, without empty values.

    For a case measured on an input file, return the command that measures it again.
    """
    if row["blobs_key"]:
        words = ["tilegym-db", "bench", row["solution"], "--workload", row["workload_uuid"], "--force"]
        return " ".join(map(quote, words))
    options = (
        ("--axes", "axes_key"),
        ("--dtype", "dtypes_key"),
        ("--scalar", "scalars_key"),
        ("--layout", "layouts_key"),
    )
    parts = ["tilegym-db", "debug", "reproduce", row["solution"]]
    for option, key in options:
        parts += [option, row[key]] if row[key] else []
    for name, value in json.loads(row["config"]).items() if row["config"] != "{}" else ():
        parts += ["--config", f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
    return " ".join(map(quote, parts))


def _with_work(rows: list[dict[str, Any]], definitions: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add ``flops`` and ``bytes`` of a call to the rows, by the Definition's cost; None if it states no cost.

    Shares of light become those of the stated peaks of the GPU, whatever run measured the row.
    """
    records = {row["name"]: Definition.from_json(row["record"], f"definition {row['name']}") for row in definitions}
    known: dict[tuple[str, str, str], tuple[float, float] | None] = {}
    lights: dict[tuple[str, str, str, str], float | None] = {}
    quote = cache(shlex.quote)
    for row in rows:
        key = (row["definition"], row["axes_key"], row["dtypes_key"])
        if key not in known:
            axes = {name: int(size) for name, size in _pairs(row["axes_key"])}
            known[key] = _work(records[row["definition"]], axes, dict(_pairs(row["dtypes_key"])))
        work = known[key]
        row |= {"flops": work and work[0], "bytes": work and work[1], "command": reproduce_command(row, quote)}
        place = *key, row["gpu"]
        if row["sol_us"] is not None and place not in lights:
            lights[place] = _stated_light_us(records[row["definition"]], row)
        if row["sol_us"] is not None and (light_us := lights[place]) is not None:
            row |= {"sol_us": round(light_us, 4), "sol_ratio": round(light_us / row["latency_us"], 4)}
        _with_files(row)
    return rows


def _with_files(row: dict[str, Any]) -> dict[str, Any]:
    """Add the input files to the scalars of a row. The page shows the scalars, so cases of one shape stay distinct."""
    if row["blobs_key"]:
        files = ",".join(f"{name}={sha256[:12]}" for name, sha256 in _pairs(row["blobs_key"]))
        row["scalars_key"] = ",".join(part for part in (row["scalars_key"], files) if part)
    return row


def _pairs(key: str) -> list[tuple[str, str]]:
    """Return the names and values of a key, ``M=4096,N=4096``."""
    return [(name, value) for name, _, value in (part.partition("=") for part in key.split(",") if part)]


def _stated_light_us(definition: Definition, row: Mapping[str, Any]) -> float | None:
    """Return the time of a row's call at the stated peaks of its GPU, in microseconds; None if it is not known."""
    axes = {name: int(size) for name, size in _pairs(row["axes_key"])}
    try:
        found = share_of_stated_light(definition, axes, dict(_pairs(row["dtypes_key"])), row["gpu"], row["latency_us"])
    except RecordError:  # an older version took this shape
        return None
    return None if found is None else found[0]


def _work(definition: Definition, axes: Mapping[str, int], dtypes: Mapping[str, str]) -> tuple[float, float] | None:
    try:
        work = definition.cost_of(definition.bind_axes(axes), definition.bind_dtypes(dtypes))
    except RecordError:  # an older version took this shape: show it without flops and bytes
        return None
    return work if max(work) > 0 else None


def _sources(catalog: Catalog) -> tuple[dict[str, str], dict[str, list[tuple[str, str]]]]:
    """Return each source text once by its digest, and the (path, digest) pairs of each solution."""
    texts: dict[str, str] = {}
    files_of: dict[str, list[tuple[str, str]]] = {}
    for name, solution in catalog.solutions.items():
        files_of[name] = []
        for path, content in solution.sources.items():
            digest = hashlib.sha256(content).hexdigest()[:16]
            texts[digest] = content.decode("utf-8", errors="replace")
            files_of[name].append((path, digest))
    return texts, files_of
