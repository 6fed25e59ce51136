"""Trace sets: what goes in comes out, and a reader without this package finds its way."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import duckdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises

from tilegym_db.errors import RecordError
from tilegym_db.paths import shipped_root
from tilegym_db.published.trace_set import ROW_COLUMNS, TraceSet, is_trace_set
from tilegym_db.published.trace_set_writer import encode_traces, rounded
from tilegym_db.records import Trace

SETS = sorted(path for path in shipped_root().glob("traces/*/*/*.jsonl") if not path.name.endswith(".tuning.jsonl"))
NORM = shipped_root() / "traces/h200/norm/rms_norm.jsonl"


def shipped(path: Path = NORM) -> list[dict[str, Any]]:
    return list(TraceSet.parse(path.read_bytes(), path).traces())


def by_id(traces: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {trace["trace_id"]: trace for trace in traces}


@pytest.mark.records("path")
@pytest.mark.parametrize("path", SETS, ids=lambda path: path.stem)
def test_every_shipped_trace_is_valid_and_encodes_to_the_same_text(path: Path) -> None:
    parsed = TraceSet.parse(path.read_bytes(), path)
    traces = list(parsed.traces())
    assert traces
    for trace in traces:
        assert Trace.from_dict(trace, path).to_dict() == trace
    assert encode_traces(traces, parsed.provides) == path.read_text()


def test_a_set_of_version_2_is_still_read() -> None:
    """It had notes, dropped cases and the GPU among the facts of a setup."""
    traces = shipped(shipped_root() / "traces/h200/moe/moe_experts.jsonl")
    first, *lines = encode_traces(traces, {}).splitlines()
    header = json.loads(first)
    facts, setups = [], []
    for run, solution, config, said, alternatives, gpu, notes, dropped in header["setups"]:
        other = dict(zip(("gpu_uuid", "host"), header["gpus"][gpu], strict=True))
        lists = {name: found for name, found in (("notes", notes), ("dropped", dropped)) if found}
        facts.append({**header["facts"][said], **lists, "other": other})
        setups.append([run, solution, config, len(facts) - 1, alternatives])
    del header["gpus"]
    older = json.dumps({**header, "schema_version": 2, "facts": facts, "setups": setups}, separators=(",", ":"))
    parsed = TraceSet.parse("\n".join([older, *lines]).encode())
    assert list(parsed.traces()) == traces


# Whatever the columns were not made for stands beside them. Each is a change of a trace that passed; two of them on one trace
# need not make a valid one.
ODD: list[dict[str, Any]] = [
    {"trace_id": "by hand"},
    {"attempt": 3},
    {"config": {"BLOCK_M": 4, "fast": True}},
    {"layouts": {"x": "row_contiguous"}},
    {"scalars": {"eps": 2, "flag": False, "name": "a|b\n", "none": None}},
    {"dtypes": {}},
    {"axes": {"Z": 7}},
    {"definition_digest": "other"},
    {"gpu_name": "another"},
    {"envelope": None},
    {"audit": None},
    {"audit": {"kernels": ["k", "k", "void at::native::x<4, at::y>"], "notes": ["n", "n"]}},
    {"performance": None, "status": "TIMEOUT", "correctness": None, "reason": "slow {x}", "audit": None},
    {"status": "INCORRECT_NUMERICAL", "performance": None, "reason": "off", "log": "a\nb",
     "failure": {"gate": "g", "axes": {"M": 4}, "contents": "normal", "seed": "7", "command": "c", "index": [1, 2]}},
    {"performance": {"latency_us": 0.0123456, "ci_low_us": 0.01, "ci_high_us": 0.02, "samples": 3, "timer": "wall"}},
    {"timestamp": "1999-01-01T00:00:00Z"},
]  # fmt: skip


SOME = list(itertools.islice(shipped(), 48))
CHANGES = st.lists(
    st.tuples(st.integers(0, len(SOME) - 1), st.sampled_from(ODD)),
    min_size=1,
    max_size=6,
    unique_by=lambda item: item[0],
)


@settings(max_examples=60, deadline=None)
@given(CHANGES)
def test_no_trace_loses_anything_but_digits(changes: list[tuple[int, dict[str, Any]]]) -> None:
    traces = list(SOME)
    for index, change in changes:
        changed = {key: value for key, value in (traces[index] | change).items() if value is not None}
        traces[index] = Trace.from_dict(changed).to_dict()
    wanted = [rounded(trace) for trace in traces]
    back = list(TraceSet.parse(encode_traces(traces, {}).encode()).traces())
    key = lambda trace: json.dumps(trace, sort_keys=True)  # noqa: E731
    assert sorted(back, key=key) == sorted(wanted, key=key)


def test_rounding_keeps_what_was_measured() -> None:
    (trace, *_) = shipped()
    trace["performance"] = trace["performance"] | {"latency_us": 6701.1039, "ci_low_us": 0.00012}
    trace["correctness"] = trace["correctness"] | {"rel_fro": 1.2799918e-05}
    kept = rounded(trace)
    assert kept["performance"]["latency_us"] == 6701.104
    assert kept["performance"]["ci_low_us"] == 0.00012
    assert kept["correctness"]["rel_fro"] == 1.28e-05
    assert rounded(kept) == kept


def test_duckdb_reads_a_set_without_this_package() -> None:
    latency = ROW_COLUMNS.index("latency_ns")
    query = f"""
        WITH lines AS (SELECT json AS line FROM read_json('{NORM}', format = 'newline_delimited', records = false)),
        head AS (SELECT line FROM lines WHERE line->>'record' = 'trace set'),
        points AS (SELECT unnest(json_extract(line, '$[6][*]')) AS row FROM lines WHERE json_type(line) = 'ARRAY')
        SELECT head.line->'solutions'->((head.line->'setups'->((row->>0)::INT)->>1)::INT)->>0 AS solution,
            (row->>{latency})::BIGINT / 1000 AS latency_us
        FROM points, head
    """
    found = duckdb.sql(query).fetchall()
    assert sorted(found) == sorted((trace["solution"], trace["performance"]["latency_us"]) for trace in shipped())


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (lambda text: text.replace('"schema_version":3', '"schema_version":4', 1), "version_newer"),
        (lambda text: text.replace('"hosts"', '"hosst"', 1), "key_unknown"),
        (lambda text: text.split("\n", 1)[0] + '\n["x"]\n', "trace_set_damaged"),
        (lambda text: text.replace("[[0,", "[[999,", 1), "trace_set_damaged"),
        (lambda text: text[: len(text) // 2], "trace_set_damaged"),
    ],
)
def test_a_damaged_set_is_named(damage: Any, code: str) -> None:
    with raises(RecordError, code, str(NORM)):
        list(TraceSet.parse(damage(NORM.read_text()).encode(), NORM).traces())


def test_a_set_is_told_from_whole_traces() -> None:
    assert is_trace_set(NORM.read_bytes())
    assert not is_trace_set(Trace.from_dict(shipped()[0]).to_json().encode())
