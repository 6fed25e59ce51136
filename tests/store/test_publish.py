from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
from raising import raises

from tilegym_db.errors import NotFoundError, StoreError
from tilegym_db.published.input_files import LOCK_NAME
from tilegym_db.published.table import ResolverTable, load_table
from tilegym_db.store.filling import ingest
from tilegym_db.store.journal import read_journal
from tilegym_db.store.publish import publish, published_folder
from tilegym_db.store.queries.publishing import publishable_rows


@pytest.fixture
def traces(trace):
    """Two shapes of ``scale`` and one of ``shift``; the slower of two configs and the others are not to be published."""
    return {
        "decode": trace(m=1, kind="triton", latency_us=2.0, speedup=1.5, config={"BLOCK_M": 4}),
        "prefill": trace(kind="triton", latency_us=9.0),
        "prefill stock": trace(kind="stock", latency_us=12.0),
        "shift": trace("shift", kind="tilelang", latency_us=3.0),
        "slower config": trace(m=1, kind="triton", latency_us=2.5),
        "failure": trace("shift", kind="triton", status="INCORRECT_NUMERICAL"),
        "screened": trace("shift", kind="stock", tier="screen", latency_us=1.0),
        "unconfined": trace("shift", kind="stock", latency_us=2.0, sandbox_level=1, config={"BLOCK_M": 8}),
        "other gpu": trace("shift", kind="triton", gpu="l4"),
    }


def test_snapshot_holds_the_best_trace_per_solution_and_shape(opened, write_traces, traces, tmp_path):
    with opened() as store:
        ingest(store, [write_traces(*traces.values())])
        report = publish(store, "h200", tmp_path / "out")
    folder = tmp_path / "out" / "traces" / "h200"
    assert (report.folder, report.entries, report.traces, report.revocations) == (folder, 3, 4, 0)
    assert report.left_out == {
        "the worker was not confined (sandbox level below 2)": 1,
        "passed a screen only (tilegym-db verify)": 1,
    }
    assert sorted(report.written) == sorted(path for path in folder.rglob("*") if path.is_file())
    scale = read_journal(folder / "norm" / "scale.jsonl.gz").traces
    assert scale == (traces["decode"], traces["prefill stock"], traces["prefill"])
    assert read_journal(folder / "activation" / "shift.jsonl.gz").traces == (traces["shift"],)


@pytest.mark.turn("tilegym_db/store/publish.py")  # publishes twice
def test_named_solution_is_left_out_and_published_again_later(opened, write_traces, traces, tmp_path):
    with opened() as store:
        ingest(store, [write_traces(*traces.values())])
        without = {traces["prefill"].solution_digest}
        folder = publish(store, "h200", tmp_path / "out", without=without).folder
        left = read_journal(folder / "norm" / "scale.jsonl.gz").traces
        publish(store, "h200", tmp_path / "out")
    assert left == (traces["prefill stock"],)
    assert traces["prefill"] in read_journal(folder / "norm" / "scale.jsonl.gz").traces


def table_of(root: Path, ship) -> ResolverTable:
    """Return what the resolver reads of a folder that was published to."""
    ship(root)
    table = load_table("h200")
    assert table is not None
    return table


def test_the_resolver_table_lists_candidates_by_latency(opened, write_traces, traces, catalog, tmp_path, ship):
    with opened() as store:
        ingest(store, [write_traces(*traces.values())])
        publish(store, "h200", tmp_path)
    table = table_of(tmp_path, ship)
    assert table.published.endswith("Z")
    assert (table.gpu, table.sm) == ("h200", "sm_90")
    entries = [asdict(entry) for entry in table]
    assert [
        (entry["call"]["definition"], entry["call"]["axes"]["M"], len(entry["candidates"])) for entry in entries
    ] == [
        ("scale", 1, 1),
        ("scale", 4096, 2),
        ("shift", 4096, 1),
    ]
    decode, prefill, _ = entries
    (candidate,) = decode.pop("candidates")
    assert candidate.pop("figures") == {
        "rel_fro": 0.001,
        "worst_row_rel": None,
        "matched_ratio": None,
        "timer": "events",
    }
    assert decode == {
        "call": {
            "definition": "scale",
            "axes": {"M": 1, "N": 4096},
            "dtypes": {"T": "bfloat16"},
            "layouts": {},
            "scalars": {"eps": 1e-5},
        },
        "definition_version": "1.0.0",
        "definition_digest": catalog.definition("scale").digest,
        "op_type": "norm",
    }
    assert candidate == {
        "solution": "scale_triton",
        "solution_digest": catalog.solution("scale_triton").digest,
        "language": "triton",
        "role": "kernel",
        "provides": None,
        "config": {"BLOCK_M": 4},
        "latency_us": 2.0,
        "ci_low_us": 1.98,
        "ci_high_us": 2.02,
        "host_us": None,
        "speedup": 1.5,
        "speedup_ci_low": 1.35,
        "tier": "promotion",
        "sandbox_level": 3,
        "trace_id": traces["decode"].trace_id,
        "envelope_cases": 0,
        "scalar_ranges": None,
        "verified_sizes": {},
        "verified_elements": 0,
        "deterministic": False,
        "batch_slices": 0,
        "origin": "shipped",
        "of_files": False,
        "shipped_source": False,
        "libs": {},
    }
    assert [(item["solution"], item["role"], item["provides"]) for item in prefill["candidates"]] == [
        ("scale_triton", "kernel", None),
        ("scale_stock", "baseline", "stock"),
    ]


def test_published_table_keeps_the_verified_sizes_and_slices(opened, write_traces, trace, tmp_path, ship):
    envelope = {
        "cases": 24,
        "digest": "d" * 64,
        "seed": "1",
        "scalars": {"eps": [1e-12, 0.5]},
        "largest": {"M": 65_536},
    }
    envelope |= {"largest_elements": 2**31, "batch_slices": 8}
    with opened() as store:
        ingest(store, [write_traces(trace(envelope=envelope))])
        publish(store, "h200", tmp_path)
    ((candidate,),) = (entry.candidates for entry in table_of(tmp_path, ship))
    assert dict(candidate.scalar_ranges) == {"eps": (1e-12, 0.5)}
    assert (dict(candidate.verified_sizes), candidate.verified_elements) == ({"M": 65_536}, 2**31)
    assert candidate.batch_slices == 8


def test_publishing_again_changes_only_what_a_new_result_touches(opened, write_traces, traces, trace, tmp_path):
    with opened() as store:
        ingest(store, [write_traces(*traces.values())])
        publish(store, "h200", tmp_path)
        assert publish(store, "h200", tmp_path).written == ()
        ingest(store, [write_traces(trace("shift", kind="tilelang", latency_us=1.0))])
        written = publish(store, "h200", tmp_path).written
    assert [path.name for path in written] == ["shift.jsonl.gz", LOCK_NAME]


def test_what_was_published_fills_a_fresh_store(opened, write_traces, traces, root):
    with opened() as store:
        ingest(store, [write_traces(*traces.values())])
        publish(store, "h200", root)
        before = publishable_rows(store, "h200")
        database = store.path
    database.unlink()
    with opened(read_only=True) as store:
        assert publishable_rows(store, "h200") == before
        assert publish(store, "h200", root).written == ()


def test_file_without_verified_traces_is_reported_and_kept(opened, write_traces, traces, root, tmp_path):
    with opened() as store:
        ingest(store, [write_traces(*traces.values())])
        publish(store, "h200", tmp_path)
    shutil.rmtree(root / "solutions" / "activation" / "shift" / "shift_tilelang")
    with opened() as store:
        report = publish(store, "h200", tmp_path)
    (leftover,) = report.leftover
    assert leftover.name == "shift.jsonl.gz"
    assert leftover.is_file()


def test_what_a_later_failure_took_back_is_published_no_more(opened, write_traces, traces, trace, tmp_path, ship):
    with opened() as store:
        ingest(store, [write_traces(*traces.values())])
        publish(store, "h200", tmp_path)
        failure = trace("shift", kind="tilelang", tier="screen", status="REJECTED", m=1)
        ingest(store, [write_traces(failure)])
        report = publish(store, "h200", tmp_path)
    folder = tmp_path / "traces" / "h200"
    assert report.left_out["a failure took the pass back"] == 1
    assert (report.entries, report.revocations, report.leftover) == (2, 1, ())
    assert {entry.call.definition for entry in table_of(tmp_path, ship)} == {"scale"}
    assert read_journal(folder / "activation" / "shift.jsonl.gz").traces == (failure,)


@pytest.mark.turn("tilegym_db/store/publish.py", "tilegym_db/published/")  # fills two stores
def test_store_with_an_older_snapshot_learns_what_was_taken_back(
    shipped, opened, write_traces, traces, trace, root, home
):
    with opened() as store:
        ingest(store, [write_traces(*traces.values())])
        publish(store, "h200", root)
    for file in home.iterdir():
        file.unlink()
    ids = "SELECT trace_id FROM verified WHERE definition = 'shift' AND gpu = 'h200'"
    with opened() as elsewhere:
        assert elsewhere.rows(ids) == [{"trace_id": traces["shift"].trace_id}]
        ingest(elsewhere, [write_traces(trace("shift", kind="tilelang", status="TIMEOUT"))])
        publish(elsewhere, "h200", root)
    for file in home.iterdir():
        file.unlink()
    with opened() as elsewhere:
        ingest(elsewhere, [write_traces(traces["shift"])])
        assert elsewhere.rows(ids) == []


def test_a_table_whose_last_pass_was_taken_back_is_emptied(opened, write_traces, trace, tmp_path, ship):
    with opened() as store:
        ingest(store, [write_traces(trace())])
        publish(store, "h200", tmp_path)
        ingest(store, [write_traces(trace(status="INCORRECT_NUMERICAL"))])
        publish(store, "h200", tmp_path)
        table = table_of(tmp_path, ship)
        assert (table.gpu, table.sm, list(table)) == ("h200", "sm_90", [])
        assert publish(store, "h200", tmp_path).written == ()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tier": "screen"}, "1: passed a screen only"),
        ({"sandbox_level": 1}, "1: the worker was not confined"),
    ],
)
def test_gpu_without_publishable_results_says_why(opened, write_traces, trace, tmp_path, changes, reason):
    with opened() as store:
        ingest(store, [write_traces(trace(**changes))])
        with raises(NotFoundError, "nothing_to_publish", "'h200'", reason):
            publish(store, "h200", tmp_path)
    assert list(tmp_path.glob("traces/*")) == []


def test_gpu_without_verified_traces_is_refused_with_others(opened, write_traces, traces, tmp_path):
    with opened() as store:
        ingest(store, [write_traces(*traces.values())])
        with raises(NotFoundError, "traces_missing", "'b200'", "h200, l4", "tilegym-db bench"):
            publish(store, "b200", tmp_path)
    assert list(tmp_path.glob("traces/*")) == []


def test_a_store_behind_the_catalog_is_not_published(opened, write_traces, traces, root, tmp_path):
    with opened() as store:
        ingest(store, [write_traces(*traces.values())])
    with opened(read_only=True):
        shutil.rmtree(root / "solutions" / "norm" / "scale" / "scale_tilelang")
        with opened(read_only=True) as outdated, raises(StoreError, "store_stale"):
            publish(outdated, "h200", tmp_path)


def test_a_failed_publish_keeps_the_table_that_was_there(
    opened, write_traces, traces, trace, tmp_path, file_size_limit
):
    with opened() as store:
        ingest(store, [write_traces(*traces.values())])
        publish(store, "h200", tmp_path)
        table = tmp_path / "traces" / "h200" / LOCK_NAME
        before = table.read_bytes()
        ingest(store, [write_traces(trace("shift", kind="tilelang", latency_us=1.0))])
        with file_size_limit(200), raises(StoreError, "write_failed", "shift.jsonl.gz"):
            publish(store, "h200", tmp_path)
    assert table.read_bytes() == before
    assert not [path for path in tmp_path.glob("traces/**/.*") if path.is_file()]


def test_without_a_checkout_the_users_folder_is_published_to(ship, monkeypatch, tmp_path):
    monkeypatch.setenv("TILEGYM_DB_HOME", str(tmp_path / "home"))
    ship(tmp_path / "installed" / "_data")
    assert published_folder("h200") == tmp_path / "home" / "published" / "h200"
    assert published_folder("h200", tmp_path) == tmp_path / "traces" / "h200"
