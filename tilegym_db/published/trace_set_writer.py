"""Writes a trace set (:mod:`tilegym_db.published.trace_set`): repeated values go into tables, the rest into rows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

from tilegym_db.published.trace_set import (
    DIGEST_DIGITS,
    ERRORS,
    NANO,
    POINT_COLUMNS,
    RATIO,
    ROW_COLUMNS,
    SCHEMA_VERSION,
    Pieces,
    Point,
    assembled,
    inverse,
    shared_fields,
    spelled_time,
)

_TABLES = (
    "dtypes", "scalars", "layouts", "hosts", "runs", "solutions", "configs", "alternatives", "gpus", "setups", "facts", "clocks",
    "notes", "dropped", "launches",
)  # fmt: skip
_SHARED = ("gpu", "definition", "definition_version", "definition_digest", "op_type")
# Common prefixes of C++ kernel names: return type, namespaces, and a wrapper's first template argument.
_QUALIFIERS = re.compile(r"(?:void )?(?:\w+::)*(?:\w+<\d+, (?:\w+::)*)?")


def encode_traces(
    traces: Sequence[Mapping[str, Any]], provides: Mapping[str, str | None], foreign: Iterable[str] = ()
) -> str:
    """Return the text of the trace set of one Definition and GPU.

    Args:
        traces: as :meth:`Trace.to_dict` gives them, all of one Definition, meaning and GPU, in the order to keep; at least
            one.
        provides: what each Solution provides, by name.
        foreign: ids of runs that were not measured on the machine that publishes them.
    """
    return _Encoder([rounded(trace) for trace in traces], provides, frozenset(foreign)).text()


class _Table:
    """Distinct values in order of arrival."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._known: dict[str, int] = {}

    def index(self, value: Any) -> int:
        key = json.dumps(value, ensure_ascii=False)  # keeps the order of keys in traces
        if key not in self._known:
            self._known[key] = len(self.values)
            self.values.append(value)
        return self._known[key]


@dataclass(frozen=True)
class _Run:
    start: datetime
    seed: str | None


class _Encoder:
    def __init__(
        self, traces: list[dict[str, Any]], provides: Mapping[str, str | None], foreign: frozenset[str]
    ) -> None:
        self.traces, self.provides, self.foreign = traces, provides, foreign
        self.tables = {name: _Table() for name in _TABLES}
        self.shared = SimpleNamespace(**{key: traces[0][key] for key in _SHARED})
        self.axes = tuple(traces[0]["axes"])
        self.runs = _runs(traces)
        self.kernels = _grouped({name for trace in traces for name in (trace.get("audit") or {}).get("kernels", ())})
        stems = [stem + rest for stem, *group in self.kernels for rest in group]
        self.kernel_index = {name: index for index, name in enumerate(stems)}
        # The row from which a mirrored comparison is read: the first of a run, point and Solution.
        self.peers: dict[tuple[str, str, str], dict[str, Any]] = {}
        for trace in traces:
            self.peers.setdefault((self._point_key(trace), trace["run_id"], trace["solution"]), trace)

    def text(self) -> str:
        points: dict[str, list[dict[str, Any]]] = {}
        for trace in self.traces:
            points.setdefault(self._point_key(trace), []).append(trace)
        firsts: dict[str, int] = {}
        texts = []
        for number, (key, traces) in enumerate(points.items()):
            place = compact(json.loads(key)[:-1])
            texts.append(self._point_text(key, traces, firsts.get(place)))
            firsts.setdefault(place, number)
        head = {
            "schema_version": SCHEMA_VERSION,
            "record": "trace set",
            **vars(self.shared),
            "point_columns": POINT_COLUMNS,
            "row_columns": ROW_COLUMNS,
            "axes": self.axes,
            **{name: table.values for name, table in self.tables.items()},
            "kernels": self.kernels,
        }
        return "\n".join([compact(head), *texts]) + "\n"

    def _point_text(self, key: str, traces: list[dict[str, Any]], same_as: int | None) -> str:
        point = point_of(traces[0])._replace(sol_us=_exact_sol_us(traces))
        rows, before = [], self.runs[traces[0]["run_id"]].start
        for trace in traces:
            after = round((time_of(trace) - before) / timedelta(microseconds=1))
            rows.append(self._row(trace, point, after))
            before = time_of(trace)
        place = json.loads(key)[:-1] if same_as is None else [same_as, None, None, None, None]
        return f"{compact([*place, point.sol_us])[:-1]},[{','.join(rows)}]]"

    def _point_key(self, trace: Mapping[str, Any]) -> str:
        point = point_of(trace)
        sizes = list(point.axes.values()) if tuple(point.axes) == self.axes else point.axes
        tables = [self.tables[name].index(trace.get(name, {})) for name in ("dtypes", "scalars", "layouts")]
        return compact([point.workload_uuid, sizes, *tables, point.sol_us])

    def _row(self, trace: dict[str, Any], point: Point, after_us: int) -> str:
        performance, audit = trace.get("performance") or {}, trace.get("audit") or {}
        comparisons = performance.get("comparisons", [])
        stated = self._all_stated(trace, comparisons)
        clock = [performance.get("clock_mhz"), performance.get("samples")]
        kernels = [self.kernel_index[name] for name in audit.get("kernels", ())]
        row = self._numbers(trace, after_us, clock, kernels)
        pieces = self._pieces(trace, clock, row)
        other = difference(assembled(shared_fields(self.shared, pieces), point, pieces), trace)
        facts = {**pieces.facts, **({"other": other} if other else {})}
        row[0] = self._setup(trace, facts, comparisons)
        for triple in stated:
            row += triple or [0]
        return "[" + ",".join(shortest_number(value) for value in row) + "]"

    def _numbers(self, trace: Mapping[str, Any], after_us: int, clock: list[Any], kernels: list[int]) -> list[Any]:
        performance, audit = trace.get("performance") or {}, trace.get("audit") or {}
        correctness, envelope = trace.get("correctness") or {}, trace.get("envelope") or {}
        latency = nanoseconds(performance.get("latency_us"))
        low, high = nanoseconds(performance.get("ci_low_us")), nanoseconds(performance.get("ci_high_us"))
        timed = latency is not None and low is not None and high is not None
        return [
            0,  # replaced by the setup later
            after_us,
            latency,
            latency - low if timed else None,  # type: ignore[operator]
            high - latency if timed else None,  # type: ignore[operator]
            nanoseconds(performance.get("host_us")),
            self.tables["clocks"].index(clock),
            *(correctness.get(name) for name in ERRORS),
            nanoseconds(audit.get("wall_us")),
            nanoseconds(audit.get("profiled_us")),
            self.tables["launches"].index(kernels) if kernels else None,
            envelope.get("cases", correctness.get("cases")),
            envelope.get("digest"),
        ]

    def _pieces(self, trace: Mapping[str, Any], clock: list[Any], row: list[Any]) -> Pieces:
        performance, audit = trace.get("performance") or {}, trace.get("audit") or {}
        notes, dropped = audit.get("notes", ()), (trace.get("envelope") or {}).get("dropped", ())
        facts = _facts(trace)
        ranges = (trace.get("envelope") or {}).get("scalars")
        if ranges:
            facts["scalars"] = ranges
        comparisons = performance.get("comparisons", [])
        run = self.runs[trace["run_id"]]
        return Pieces(
            run=[trace["run_id"], 0, run.start, run.seed],
            host=host_of(trace),
            solution=self._solution(trace),
            config=trace.get("config", {}),
            facts=facts,
            gpu=_gpu_of(trace),
            alternatives=[(item["with"], item.get("provides")) for item in comparisons],
            clock=clock,
            kernels=audit.get("kernels", ()),
            notes=notes,
            dropped=dropped,
            row=row,
            time=time_of(trace),
            comparisons=[triple_of(item) for item in comparisons],
        )

    def _setup(self, trace: Mapping[str, Any], facts: dict[str, Any], comparisons: list[dict[str, Any]]) -> int:
        run_id, tables = trace["run_id"], self.tables
        run = self.runs[run_id]
        origin = "foreign" if run_id in self.foreign else "local"
        host = tables["hosts"].index(host_of(trace))
        return tables["setups"].index(
            [
                tables["runs"].index([run_id, host, spelled_time(run.start), run.seed, origin]),
                tables["solutions"].index(self._solution(trace)),
                tables["configs"].index(trace.get("config", {})),
                tables["facts"].index(facts),
                [tables["alternatives"].index([item["with"], item.get("provides")]) for item in comparisons],
                tables["gpus"].index(_gpu_of(trace)),
                [tables["notes"].index(note) for note in (trace.get("audit") or {}).get("notes", ())],
                [tables["dropped"].index(case) for case in (trace.get("envelope") or {}).get("dropped", ())],
            ]
        )

    def _solution(self, trace: Mapping[str, Any]) -> list[Any]:
        role, name = trace.get("role", "kernel"), trace["solution"]
        return [name, trace["solution_digest"], trace["language"], role, self.provides.get(name)]

    def _all_stated(self, trace: dict[str, Any], comparisons: list[dict[str, Any]]) -> list[Triple | None]:
        said: dict[str, Triple] = {}
        found: list[Triple | None] = []
        for item in comparisons:
            triple = triple_of(item)
            is_known = said.get(item["with"]) == triple or (item["with"] not in said and self._mirrors(trace, item))
            found.append(None if is_known else triple)
            said.setdefault(item["with"], triple)
        return found

    def _mirrors(self, trace: dict[str, Any], comparison: Mapping[str, Any]) -> bool:
        """Return True if the alternative's row states the inverse comparison."""
        key = self._point_key(trace), trace["run_id"]
        peer = self.peers.get((*key, comparison["with"]))
        triple = triple_of(comparison)
        if peer is None or peer is trace or self.peers[*key, trace["solution"]] is not trace or triple[0] >= RATIO:
            return False
        for seen in (peer.get("performance") or {}).get("comparisons", []):
            if seen["with"] == trace["solution"]:  # the first one, as the reader does
                return triple_of(seen)[0] > RATIO and inverse(triple_of(seen)) == triple
        return False


def _grouped(names: Iterable[str]) -> list[list[str]]:
    """Return names of kernels in groups. Each group states its common qualifiers once, as its first element."""
    groups: dict[str, list[str]] = {}
    for name in sorted(names):
        groups.setdefault(_QUALIFIERS.match(name)[0], []).append(name)  # type: ignore[index]
    alone = [name for group in groups.values() if len(group) == 1 for name in group]
    shared = [[stem, *(name[len(stem) :] for name in group)] for stem, group in groups.items() if len(group) > 1]
    return [*shared, ["", *alone]] if alone else shared


def _exact_sol_us(traces: Iterable[Mapping[str, Any]]) -> float | None:
    """Return a speed of light that rounds to the stated one of a point's traces and gives each of their ratios."""
    timed = [trace["performance"] for trace in traces if (trace.get("performance") or {}).get("sol_us") is not None]
    if not timed:
        return None
    stated = timed[0]["sol_us"]
    low, high = stated - 5e-5, stated + 5e-5
    for performance in timed:
        if performance.get("sol_ratio") is not None:
            low = max(low, (performance["sol_ratio"] - 5e-5) * performance["latency_us"])
            high = min(high, (performance["sol_ratio"] + 5e-5) * performance["latency_us"])
    if low > high:
        return float(stated)
    candidates = (round((low + high) / 2, digits) for digits in range(4, 12))
    return next((value for value in (float(stated), *candidates) if low < value < high), float(stated))


def _runs(traces: Iterable[Mapping[str, Any]]) -> dict[str, _Run]:
    found: dict[str, _Run] = {}
    for trace in traces:
        known, time = found.get(trace["run_id"]), time_of(trace)
        seed = (known.seed if known else None) or (trace.get("envelope") or {}).get("seed")
        found[trace["run_id"]] = _Run(min(known.start, time) if known else time, seed)
    return found


def _gpu_of(trace: Mapping[str, Any]) -> list[str | None]:
    return [trace.get("gpu_uuid"), trace.get("host")]


def _facts(trace: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that rarely differ between traces, without those that have a column."""
    facts = {key: trace[key] for key in ("tier", "attempt", "sandbox_level", "status") if key in trace}
    columns = {
        "correctness": {*ERRORS, "cases"},
        "performance": {
            "latency_us", "ci_low_us", "ci_high_us", "samples", "host_us", "comparisons", "sol_us", "sol_ratio", "clock_mhz"
        },
        "audit": {"wall_us", "profiled_us", "kernels", "notes"},
    }  # fmt: skip
    for name, own in columns.items():
        if trace.get(name) is not None:
            facts[name] = {key: value for key, value in trace[name].items() if key not in own}
    return facts


# ---- trace figures --------------------------------------------------------------------------------
# Rounds a trace's fields for a trace set: whole numbers, fewer digits, compact JSON.

_TIMES = ("latency_us", "ci_low_us", "ci_high_us", "host_us", "wall_us", "profiled_us")

Triple = tuple[int, int, int]
"""A ratio, and its distances to both ends of its interval, in hundred thousandths."""


def rounded(trace: Mapping[str, Any]) -> dict[str, Any]:
    """Return a trace's fields (:meth:`Trace.to_dict`) with the digits that a trace set keeps."""
    result = dict(trace)
    correctness = result.get("correctness")
    if correctness is not None:
        errors = {name: float(f"{correctness[name]:.2e}") for name in ERRORS if correctness.get(name) is not None}
        result["correctness"] = {**correctness, **errors}
    if result.get("performance") is not None:
        result["performance"] = {**result["performance"], **_whole_nanoseconds(result["performance"], _TIMES)}
    if result.get("audit") is not None:
        result["audit"] = {**result["audit"], **_whole_nanoseconds(result["audit"], _TIMES)}
    if result.get("envelope") is not None:
        result["envelope"] = {**result["envelope"], "digest": result["envelope"]["digest"][:DIGEST_DIGITS]}
    return result


def _whole_nanoseconds(part: Mapping[str, Any], names: Iterable[str]) -> dict[str, float]:
    """Return times of a microsecond or more in whole nanoseconds; shorter ones would lose significant digits."""
    return {name: round(part[name], 3) for name in names if (part.get(name) or 0) >= 1}


def difference(decoded: Mapping[str, Any], trace: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that the columns do not reproduce, unchanged; null for a field that is absent."""
    keys = [*trace, *(key for key in decoded if key not in trace)]
    return {key: trace.get(key) for key in keys if decoded.get(key) != trace.get(key)}


def point_of(trace: Mapping[str, Any]) -> Point:
    """Return the point at which a trace was measured."""
    dtypes, scalars, layouts = (trace.get(name, {}) for name in ("dtypes", "scalars", "layouts"))
    sol_us = (trace.get("performance") or {}).get("sol_us")
    return Point(trace["workload_uuid"], trace["axes"], dtypes, scalars, layouts, sol_us)


def host_of(trace: Mapping[str, Any]) -> list[Any]:
    """Return the GPU's name by the driver, compile target, driver, CUDA, and versions of libraries."""
    return [trace["gpu_name"], *(trace.get(key, "") for key in ("sm", "driver", "cuda")), trace.get("libs", {})]


def triple_of(comparison: Mapping[str, Any]) -> Triple:
    """Return a ratio, and its distances to both ends of its interval, in hundred thousandths."""
    ratio, low, high = (round(comparison[key] * RATIO) for key in ("ratio", "ci_low", "ci_high"))
    return ratio, ratio - low, high - ratio


def nanoseconds(microseconds: float | None) -> int | None:
    """Return whole nanoseconds."""
    return None if microseconds is None else round(microseconds * NANO)


def time_of(trace: Mapping[str, Any]) -> datetime:
    """Return when a trace was taken, in UTC."""
    return datetime.fromisoformat(trace["timestamp"]).astimezone(UTC)


def compact(value: Any) -> str:
    """Return JSON without white space."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def shortest_number(value: Any) -> str:
    """Return JSON with a float in its shortest spelling: 206e-5 for 0.00206."""
    text = compact(value)
    if not isinstance(value, float) or value == 0:
        return text
    digits, _, exponent = f"{value!r}e0".lower().partition("e")
    whole, _, fraction = digits.partition(".")
    shifted = f"{int(whole + fraction)}e{int(exponent.partition('e')[0]) - len(fraction)}"
    return min(text, shifted, key=len) if float(shifted) == value else text
