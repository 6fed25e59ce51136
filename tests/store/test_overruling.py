"""A person overrules a failed trace."""

from __future__ import annotations

import getpass

import pytest
from raising import raises

from tilegym_db.errors import NotFoundError, UsageError
from tilegym_db.store.filling import ingest, overrule, rebuild
from tilegym_db.store.journal import read_journal
from tilegym_db.store.publish import publish
from tilegym_db.store.queries.measured import best_rows, find_traces

WRONG = "INCORRECT_NUMERICAL"


@pytest.mark.turn("tilegym_db/store/")  # fills databases
def test_passes_count_again_once_the_wrong_number_is_overruled(opened, write_traces, trace, tmp_path):
    failed, passed = trace(status=WRONG), trace()
    with opened() as store:
        ingest(store, [write_traces(failed, passed)])
        (refusal,) = publish(store, "h200", tmp_path).disagreements
        assert refusal.code == "attempts_disagree"
        assert failed.trace_id in refusal.reason
        assert passed.trace_id in refusal.reason
        assert "data overrule" in refusal.reason
        said = overrule(store, failed.trace_id[:8], " a loose cable ")
        assert [row["trace_id"] for row in best_rows(store)] == [passed.trace_id]
        (row,) = find_traces(store, failed.trace_id)
        assert (row["overruled"]["by"], row["overruled"]["reason"]) == (getpass.getuser(), "a loose cable")
        report = publish(store, "h200", tmp_path)
    assert (report.disagreements, report.traces) == ((), 1)
    published = read_journal(tmp_path / "traces/h200/norm/scale.jsonl.gz").traces
    assert sorted(published, key=lambda one: one.timestamp) == [passed, said]


@pytest.mark.turn("tilegym_db/store/")  # fills databases
def test_every_wrong_number_needs_its_own_overruling(opened, write_traces, trace):
    first, second, passed = trace(status=WRONG), trace(status=WRONG, m=1), trace()
    with opened() as store:
        ingest(store, [write_traces(first, second, passed)])
        overrule(store, second.trace_id, "a loose cable")
        assert best_rows(store) == []
        overrule(store, first.trace_id, "a loose cable")
        assert len(best_rows(store)) == 1


@pytest.mark.turn("tilegym_db/store/")  # fills databases
def test_overruling_is_journaled_and_survives_a_rebuild(opened, home, catalog, trace, write_traces):
    failed = trace(status=WRONG)
    with opened() as store:
        ingest(store, [write_traces(failed)])
        said = overrule(store, failed.trace_id, "a loose cable")
    rebuild(home, catalog=catalog)
    with opened() as store:
        (row,) = store.rows("SELECT origin, overrules FROM traces")
    assert (row["origin"], row["overrules"]["trace_id"]) == ("local", failed.trace_id)
    assert said.overrules is not None


def test_foreign_overruling_counts_only_if_trusted(opened, write_traces, trace, tmp_path):
    failed, passed = trace(status=WRONG), trace()
    forged = trace(status="OVERRULED", tier="untimed", overrules={"trace_id": failed.trace_id, "by": "mallory"})
    path = tmp_path / "forged.jsonl"
    path.write_text(forged.to_json() + "\n")
    with opened() as store:
        ingest(store, [write_traces(failed, passed), path])
        assert best_rows(store) == []
        ingest(store, [path], trust=True)
        assert len(best_rows(store)) == 1


@pytest.mark.parametrize(
    ("asked", "reason", "error", "code"),
    [
        ("{failed}", "  ", UsageError, "reason_missing"),
        ("{passed}", "why", UsageError, "trace_not_failed"),
        ("0000", "why", NotFoundError, "trace_unknown"),
        ("", "why", NotFoundError, "trace_unknown"),
    ],
)
def test_overruling_needs_a_failure_and_a_reason(opened, write_traces, trace, asked, reason, error, code):
    failed, passed = trace(status=WRONG), trace()
    with opened() as store:
        ingest(store, [write_traces(failed, passed)])
        with raises(error, code):
            overrule(store, asked.format(failed=failed.trace_id, passed=passed.trace_id), reason)
