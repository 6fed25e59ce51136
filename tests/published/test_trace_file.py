"""Files of published traces: what goes in comes out, and other tools read them."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import duckdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises
from shipped_records import CATALOG

from tilegym_db.errors import RecordError
from tilegym_db.paths import shipped_root
from tilegym_db.published import input_files
from tilegym_db.published.input_files import (
    definition_of,
    packed,
    read_lines,
    read_traces,
    rounded,
    shipped_traces,
    trace_lines,
    unpacked,
)
from tilegym_db.records import Trace

FILES = shipped_traces(CATALOG)
NORM = shipped_root() / "traces/h200/norm/rms_norm.jsonl.gz"


def shipped(path: Path = NORM) -> list[dict[str, Any]]:
    return [trace.to_dict() for trace in read_traces(path.read_bytes(), path)]


@pytest.mark.records("path")
@pytest.mark.parametrize("path", FILES, ids=definition_of)
def test_shipped_file_written_again_has_the_same_lines(path: Path) -> None:
    lines = read_lines(path.read_bytes(), path)
    traces = read_traces(path.read_bytes(), path)
    assert traces
    provides = {line["solution"]: line.get("provides") for line in lines}
    foreign = {line["run_id"] for line in lines if line.get("origin") == "foreign"}
    again = trace_lines((trace.to_dict() for trace in traces), provides, foreign)
    assert again == unpacked(path.read_bytes(), path)


# Each is a change of a trace that passed; two of them on one trace need not make a valid one.
ODD: list[dict[str, Any]] = [
    {"trace_id": "by hand"},
    {"attempt": 3},
    {"config": {"BLOCK_M": 4, "fast": True}},
    {"layouts": {"x": "row_contiguous"}},
    {"scalars": {"eps": 2, "flag": False, "none": None}},
    {"axes": {"Z": 7}},
    {"envelope": None},
    {"audit": {"kernels": ["k", "k", "void at::native::x<4, at::y>"], "notes": ["n", "n", "a|b\n\u2028"]}},
    {"performance": None, "status": "TIMEOUT", "correctness": None, "reason": "slow {x}", "audit": None},
    {"performance": {"latency_us": 0.0123456, "ci_low_us": 0.01, "ci_high_us": 0.02, "samples": 3, "timer": "wall"}},
    {"timestamp": "2000-01-01T00:00:00Z"},
]
SOME = list(itertools.islice(shipped(), 48))
CHANGES = st.lists(
    st.tuples(st.integers(0, len(SOME) - 1), st.sampled_from(ODD)),
    min_size=1,
    max_size=6,
    unique_by=lambda item: item[0],
)


@pytest.mark.turn("tilegym_db/published/snapshot.py")  # every shipped trace
@settings(max_examples=40, deadline=None)
@given(CHANGES)
def test_no_trace_loses_anything_but_digits(changes: list[tuple[int, dict[str, Any]]]) -> None:
    traces = list(SOME)
    for index, change in changes:
        changed = {key: value for key, value in (traces[index] | change).items() if value is not None}
        traces[index] = Trace.from_dict(changed).to_dict()
    content = packed(trace_lines(traces, {"rms_norm_stock": "stock"}, [traces[0]["run_id"]]))
    assert [trace.to_dict() for trace in read_traces(content, "a file")] == [rounded(trace) for trace in traces]


def test_rounding_keeps_what_was_measured() -> None:
    (trace, *_) = shipped()
    trace["performance"] = trace["performance"] | {"latency_us": 6701.1039, "ci_low_us": 0.00012}
    trace["correctness"] = trace["correctness"] | {"rel_fro": 1.2799918e-05}
    kept = rounded(trace)
    assert kept["performance"]["latency_us"] == 6701.104
    assert kept["performance"]["ci_low_us"] == 0.00012
    assert kept["correctness"]["rel_fro"] == 1.28e-05
    assert rounded(kept) == kept


def test_equal_lines_make_an_equal_file() -> None:
    assert packed(b"{}\n") == packed(b"{}\n")


def test_duckdb_reads_every_file_in_one_line() -> None:
    found = duckdb.sql(
        f"SELECT definition, count(*) FROM '{shipped_root()}/traces/*/*/*.jsonl.gz' GROUP BY ALL"
    ).fetchall()
    counts: dict[str, int] = {}
    for path in FILES:
        counts[definition_of(path)] = counts.get(definition_of(path), 0) + len(read_lines(path.read_bytes(), path))
    assert dict(found) == counts


def test_duckdb_ranks_solutions_without_this_package() -> None:
    query = f"SELECT solution, performance.latency_us, axes.M FROM '{NORM}' WHERE status = 'PASSED' ORDER BY ALL"
    expected = [(one["solution"], one["performance"]["latency_us"], one["axes"]["M"]) for one in shipped()]
    assert duckdb.sql(query).fetchall() == sorted(expected)


def test_pandas_reads_a_file_in_one_line() -> None:
    pandas = pytest.importorskip("pandas")
    assert len(pandas.read_json(NORM, lines=True)) == len(shipped())


@pytest.mark.parametrize("content", [b"{}\n", packed(b"{")[:-1], packed(b"[]\n"), packed(b"{\n"), packed(b"\xff\n")])
def test_damaged_file_is_named(content: bytes) -> None:
    with raises(RecordError, "trace_file_damaged", "a file"):
        read_traces(content, "a file")


def test_file_that_unpacks_to_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_files, "MAX_BYTES", 1000)
    with raises(RecordError, "file_too_large", "a file"):
        read_traces(packed(b" " * 1001), "a file")
