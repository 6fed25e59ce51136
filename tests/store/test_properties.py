"""Whatever the parser takes for a trace, the store takes too and gives back; and no text that a user types can write."""

from __future__ import annotations

import contextlib
import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tilegym_db.catalog import Catalog
from tilegym_db.errors import QueryError, RecordError
from tilegym_db.records import Trace
from tilegym_db.store.connection import Store
from tilegym_db.store.filling import ingest
from tilegym_db.store.opening import open_store, run_user_query
from tilegym_db.store.queries.measured import read_traces

# Drawn lines; test_ingest.py has a line of each fault daily.
pytestmark = pytest.mark.turn("tilegym_db/store/", "tilegym_db/records/")

EXAMPLES = settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])

TRACE: dict[str, Any] = {
    "trace_id": "t",
    "run_id": "r",
    "timestamp": "2026-11-01T00:00:00+02:00",
    "definition": "scale",
    "definition_version": "1.0.0",
    "definition_digest": "d",
    "op_type": "norm",
    "solution": "scale_triton",
    "solution_digest": "s",
    "language": "triton",
    "config": {"BLOCK_M": 4, "fast": True, "mode": "a", "ratio": 0.5},
    "workload_uuid": "w",
    "axes": {"M": 4},
    "dtypes": {"T": "bfloat16"},
    "scalars": {"eps": 1e-5, "window": None, "causal": False},
    "layouts": {"x": "row_contiguous"},
    "gpu": "h200",
    "gpu_name": "NVIDIA H200",
    "libs": {"torch": "2.13"},
    "tier": "promotion",
    "attempt": 1,
    "sandbox_level": 3,
    "envelope": {"cases": 24, "digest": "d", "seed": "7", "dropped": ["M=1"]},
    "status": "INCORRECT_NUMERICAL",
    "reason": "off",
    "log": "log",
    "correctness": {"rel_fro": 0.1, "max_abs": 1.0, "deterministic": True, "gate": "g", "cases": 3},
    "audit": {"wall_us": 1.5, "owned_share": 1.0, "profiled_us": 12.5, "kernels": ["k"], "notes": ["n"]},
    "failure": {
        "gate": "g",
        "axes": {"M": 4},
        "dtypes": {"T": "bfloat16"},
        "layouts": {"x": "contiguous"},
        "contents": "normal",
        "seed": "7",
        "offset": 1,
        "output": "out",
        "index": [1, 2],
        "expected": "1",
        "got": "2",
        "worst_row": 1,
        "command": "c",
    },
}
LIKE: dict[type, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: st.integers() | st.sampled_from([0, -1, 2**31, 2**63 - 1, -(2**63), 2**63, 10**400]),
    float: st.floats() | st.integers(),
    str: st.text(max_size=8)
    | st.sampled_from(["", "\x00", "0001-01-01T00:00:00Z", "9999-12-31T23:59:59.999999Z", "5"]),
    type(None): st.none() | st.booleans() | st.text(max_size=3),
}
names = st.text(max_size=5) | st.sampled_from(["M", "a b", "a=b", "a,b", "'", '"', "\x00"])


def _leaves(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return [path for key, item in items for path in _leaves(item, (*at, key))]
    return [at]


@st.composite
def traces(draw: st.DrawFn) -> dict[str, Any]:
    """The trace above with a few values changed to others of the same type, and names to other names."""
    trace = copy.deepcopy(TRACE)
    for path in draw(st.lists(st.sampled_from(_leaves(TRACE)), min_size=1, max_size=4, unique=True)):
        parent = trace
        for step in path[:-1]:
            parent = parent[step]
        parent[path[-1]] = draw(LIKE[type(parent[path[-1]])])
    for key, values in (("config", LIKE[int]), ("axes", st.integers(0, 9)), ("dtypes", names), ("libs", names)):
        trace[key] |= draw(st.dictionaries(names, values, max_size=2))
    return trace


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("properties")
    with open_store(folder / "home", catalog=Catalog((folder,))) as opened:
        yield opened


@EXAMPLES
@given(st.lists(traces(), min_size=1, max_size=8))
def test_what_is_a_trace_is_ingested_and_comes_back(
    store: Store, tmp_path: Path, contents: list[dict[str, Any]]
) -> None:
    accepted = {}
    for number, content in enumerate(contents):
        try:
            trace = Trace.from_dict(content | {"trace_id": f"{number}{content['trace_id']}"})
        except RecordError:
            continue
        accepted[trace.trace_id] = trace
    path = tmp_path / "traces.jsonl"
    path.write_text("".join(trace.to_json() + "\n" for trace in accepted.values()))
    with store.transaction("clear") as connection:
        connection.execute("DELETE FROM trace_records")
    report = ingest(store, [path])
    assert (report.added, report.rejected) == (len(accepted), ())
    assert read_traces(store, accepted) == accepted
    assert len(store.rows("FROM traces")) == len(accepted)


@EXAMPLES
@given(traces(), st.data())
def test_any_line_is_ingested_or_named(
    store: Store, tmp_path: Path, content: dict[str, Any], data: st.DataObject
) -> None:
    text = json.dumps(content)
    start = data.draw(st.integers(0, len(text)))
    piece = data.draw(st.text(max_size=3) | st.sampled_from(["NaN", "1e999", '"', "{}", "null", "[1]", '"M": 1,']))
    changed = (text[:start] + piece + text[data.draw(st.integers(start, min(len(text), start + 9))) :]).replace(
        "\n", " "
    )
    path = tmp_path / "traces.jsonl"
    path.write_text(f"{json.dumps(TRACE | {'trace_id': 'good'})}\n{changed}\n", errors="replace")
    with store.transaction("clear") as connection:
        connection.execute("DELETE FROM trace_records")
    report = ingest(store, [path])
    assert report.added + len(report.rejected) + report.known == 2 - (not changed.strip())
    assert {row["trace_id"] for row in store.rows("FROM traces")} >= {"good"}


WORDS = """
    SELECT FROM WHERE best traces meta trace_records * ( ) , ; 1 'a' INSERT INTO VALUES UPDATE SET DELETE DROP TABLE
    CREATE VIEW COPY TO '/tmp/x.csv' ATTACH EXPORT DATABASE PRAGMA WITH AS RETURNING count(*) read_csv( '/etc/passwd'
    getenv('HOME') glob('/*') -- /* */ $1 ? DESCRIBE SUMMARIZE EXPLAIN CALL LOAD INSTALL USE BEGIN COMMIT CHECKPOINT
    UNION ALL query( "x" = :: JSON axes['M'] nextval( range(10) latency_us
"""
words = st.sampled_from(WORDS.split())


@EXAMPLES
@given(st.lists(words, max_size=10).map(" ".join) | st.text(max_size=40))
def test_any_text_is_answered_or_refused_and_nothing_is_written(asked: tuple[Path, Catalog], text: str) -> None:
    home, catalog = asked
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in home.rglob("*")}
    with contextlib.suppress(QueryError):
        result = run_user_query(text, path=home, catalog=catalog, lock_timeout_s=0.3)
        assert len(result.columns) == len(result.types)
        assert all(len(row) == len(result.columns) for row in result.rows)
    assert {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in home.rglob("*")} == before
