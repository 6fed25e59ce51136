"""What the package ships has awards in any home: derived in SQL, by the rule that `verify` applies."""

from __future__ import annotations

from pathlib import Path

import pytest

from tilegym_db.catalog import Catalog
from tilegym_db.measurement.awards import _prefix, claim_of, record_awards
from tilegym_db.records import Trace
from tilegym_db.records.loop import Award
from tilegym_db.store.connection import Store
from tilegym_db.store.opening import open_store
from tilegym_db.store.queries.loop import award_rows, verified_baselines
from tilegym_db.store.side_files import journaled

KERNELS = """
    SELECT trace_id FROM verified WHERE origin = 'shipped' AND role = 'kernel' AND definition IN ('attention_decode', 'softmax')
    ORDER BY trace_id
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def store(home: Path):
    with open_store(home, catalog=Catalog.default()) as found:
        yield found


def kernel_traces(store: Store) -> list[Trace]:
    from tilegym_db.store.queries.measured import read_traces

    return list(read_traces(store, [row["trace_id"] for row in store.rows(KERNELS)]).values())


@pytest.mark.turn("tilegym_db/measurement/awards.py", "traces/")  # of all shipped traces
def test_shipped_passes_that_earn_an_award_have_exactly_one(store: Store) -> None:
    rows = {row["trace_id"]: row for row in award_rows(store)}
    seen = kernel_traces(store)
    assert len(seen) > 100
    baselines = verified_baselines(store, {trace.definition_digest for trace in seen})
    for trace in seen:
        verified = baselines.get((trace.definition_digest, trace.workload_uuid, trace.gpu), {})
        claim, row = claim_of(trace, verified), rows.get(trace.trace_id)
        assert (claim.baseline is None) == (row is None), (trace.solution, trace.axes, claim.reason)
        if claim.baseline is not None and row is not None:
            record = Award.from_json(row["record"])
            assert record.prefix == _prefix(trace)
            assert (row["baseline"], row["ci_low"]) == (claim.baseline.other, claim.baseline.ci_low)
            assert (record.trace_id, record.solution_digest) == (trace.trace_id, trace.solution_digest)
            assert row["status"] == "standing"
    assert len({row["id"] for row in rows.values()}) == len(rows)


def test_awarded_source_gets_no_second_award_and_others_the_next(store: Store, home: Path) -> None:
    shipped = {row["trace_id"]: row["id"] for row in award_rows(store)}
    trace = next(one for one in kernel_traces(store) if one.trace_id in shipped)
    found, _ = record_awards(store, [trace], home)
    assert [one.id for one in found] == [shipped[trace.trace_id]]
    assert journaled(Award, home) == []
    other = Trace.from_dict(trace.to_dict() | {"solution_digest": "0" * 64, "trace_id": "of another source"})
    (one,), _ = record_awards(store, [other], home)
    assert one.prefix == _prefix(trace)
    taken = [number for number in shipped.values() if number.rpartition("_v")[0] == one.prefix]
    assert one.id == f"{one.prefix}_v{len(taken) + 1}"
