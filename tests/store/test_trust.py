"""Trust in traces: signatures, locks, and figures that cannot be true."""

from __future__ import annotations

import json
import re
import shutil
import stat

import pytest
from raising import raises

from tilegym_db.catalog import Catalog
from tilegym_db.errors import NotFoundError, RecordError
from tilegym_db.published.input_files import LOCK_NAME
from tilegym_db.published.snapshot import KEY_NAME, open_snapshot, signed_line, sorted_snapshots
from tilegym_db.published.table import load_table
from tilegym_db.records import Trace
from tilegym_db.store.filling import ingest, rebuild
from tilegym_db.store.journal import Journal, read_journal
from tilegym_db.store.opening import open_store
from tilegym_db.store.publish import publish
from tilegym_db.store.queries.measured import best_rows
from tilegym_db.store.queries.publishing import publishable_rows

ORIGINS = "SELECT origin, trusted, count(*) AS n FROM traces GROUP BY ALL ORDER BY ALL"


def by_hand(path, *traces: Trace):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(trace.to_json() + "\n" for trace in traces))
    return path


@pytest.fixture
def published(shipped, opened, write_traces, trace):
    """The folder of traces that came with the package: two Definitions on an H200."""
    with opened() as store:
        ingest(store, [write_traces(trace(), trace("shift"))])
        folder = publish(store, "h200", shipped).folder
        database = store.path
    database.unlink()
    return folder


def test_what_is_measured_here_is_signed_with_a_private_key(opened, home, trace):
    with Journal("run-1", home) as journal:
        journal.append(trace())
    assert stat.S_IMODE((home / KEY_NAME).stat().st_mode) == 0o600
    assert read_journal(journal.path).traces[0].solution == "scale_triton"
    with opened() as store:
        assert store.rows(ORIGINS) == [{"origin": "local", "trusted": False, "n": 1}]
        assert len(best_rows(store)) == 1


@pytest.mark.parametrize("find_and_put", [("10.0", "1.00"), ("triton", "tritom"), ('"h200"', '"b200"')])
def test_a_journal_that_was_edited_is_foreign(opened, home, trace, find_and_put):
    with Journal("run-1", home) as journal:
        journal.append(trace())
    journal.path.write_text(journal.path.read_text().replace(*find_and_put))
    with opened() as store:
        assert [row["origin"] for row in store.rows("SELECT origin FROM traces")] == ["foreign"]
        assert best_rows(store) == []


def test_signature_of_another_installation_or_line_is_invalid(opened, home, trace, tmp_path):
    first, second = trace(), trace()
    stranger = signed_line(tmp_path / "elsewhere", first.to_json())
    borrowed = signed_line(home, first.to_json()).rpartition(b", ")[2]
    path = tmp_path / "forged.jsonl"
    path.write_bytes(stranger + second.to_json()[:-1].encode() + b", " + borrowed)
    with opened() as store:
        ingest(store, [path])
        assert store.rows(ORIGINS) == [{"origin": "foreign", "trusted": False, "n": 2}]


def test_each_line_of_a_mixed_file_counts_once(opened, home, trace, tmp_path):
    path = tmp_path / "mixed.jsonl"
    path.write_bytes(
        signed_line(home, trace().to_json()) + b"".join(t.to_json().encode() + b"\n" for t in (trace(), trace()))
    )
    with opened() as store:
        report = ingest(store, [path])
        assert (report.added, report.known) == (3, 0)
        assert report.notes[0].startswith("2 traces were not signed")


def test_shipped_folder_makes_one_batch_without_foreign_lines(published, home):
    (batch,) = sorted_snapshots([published], home).batches
    assert (batch.origin, batch.lines, len(batch.texts)) == ("shipped", 2, 2)


def test_foreign_traces_are_shown_but_not_used_until_trusted(opened, trace, tmp_path, root):
    path = by_hand(tmp_path / "by_hand.jsonl", trace())
    with opened() as store:
        (note,) = ingest(store, [path]).notes
        assert "1 trace was not signed by this installation" in note
        assert best_rows(store) == publishable_rows(store, "h200") == []
        with raises(NotFoundError, "traces_missing", "'h200'"):
            publish(store, "h200", tmp_path)
    with open_store(store.path, read_only=True, catalog=Catalog((root,), trust_foreign=True)) as trusting:
        assert [row["origin"] for row in best_rows(trusting)] == ["foreign"]
    with opened() as store:
        assert best_rows(store) == []  # that was for one connection
        assert ingest(store, [path], trust=True).added == 1
        assert [row["origin"] for row in best_rows(store)] == ["foreign"]
        publish(store, "h200", tmp_path)


def test_foreign_failure_revokes_nothing_and_its_id_is_harmless(opened, write_traces, trace, tmp_path):
    own = trace()
    forged = Trace.from_dict(own.to_dict() | {"performance": {**own.to_dict()["performance"], "latency_us": 9.95}})
    with opened() as store:
        ingest(store, [by_hand(tmp_path / "f.jsonl", forged, trace(status="REJECTED"))])
        ingest(store, [write_traces(own)])
        assert [row["latency_us"] for row in best_rows(store)] == [10.0]


def test_journals_of_older_versions_are_trusted_once_and_stay_so(opened, home, root, trace):
    by_hand(home / "runs" / "old.jsonl", trace())
    with opened() as store:
        assert best_rows(store) == []
        ingest(store, trust=True)
        assert len(best_rows(store)) == 1
    rebuild(home, catalog=Catalog((root,)))
    with opened() as store:
        assert store.rows(ORIGINS) == [{"origin": "foreign", "trusted": True, "n": 1}]


def test_changed_byte_in_a_shipped_set_makes_the_set_unusable(published, opened, caplog):
    path = published / "norm" / "scale.jsonl.gz"
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)
    with opened(read_only=True) as store:
        assert {row["definition"] for row in store.rows("FROM traces")} == {"shift"}
    assert f"{path} is not used: it was changed after it was published" in caplog.text


def test_a_damaged_lock_is_named_once_for_all_its_files(published, opened, caplog):
    (published / LOCK_NAME).write_text("{")
    with opened() as store:
        assert store.rows(ORIGINS) == []
    assert caplog.text.count(f"{published / LOCK_NAME}: not valid JSON") == 1


def test_a_set_that_no_lock_lists_is_not_used(published, opened, caplog):
    path = published / "norm" / "other.jsonl.gz"
    shutil.copy(published / "norm" / "scale.jsonl.gz", path)
    with opened() as store:
        assert store.rows(ORIGINS) == [{"origin": "shipped", "trusted": False, "n": 2}]
    assert f"{path} is not used" in caplog.text


def test_resolver_reads_a_requested_set_and_refuses_edited_ones(published, ship, monkeypatch, tmp_path):
    monkeypatch.setenv("TILEGYM_DB_HOME", str(tmp_path / "empty"))
    ship(published.parent.parent)
    (published / "activation" / "shift.jsonl.gz").write_text("{}")
    table = load_table("h200")
    assert table is not None
    (entry,) = table.entries("scale", {"T": "bfloat16"})
    assert [candidate.origin for candidate in entry.candidates] == ["shipped"]
    with raises(RecordError, "file_changed", "shift.jsonl"):
        table.entries("shift", {"T": "bfloat16"})


def test_published_folder_from_elsewhere_serves_once_trusted(published, opened, ship, monkeypatch, tmp_path, caplog):
    ship(tmp_path / "nothing")
    monkeypatch.setenv("TILEGYM_DB_HOME", str(tmp_path / "mine"))
    target = tmp_path / "mine" / "published" / "h200"
    shutil.copytree(published, target)
    assert open_snapshot(target, tmp_path / "mine").origin == "foreign"
    assert load_table("h200") is None
    assert "is foreign: its lock is not signed by this installation" in caplog.text
    trusted = load_table("h200", trust=True)
    assert trusted is not None
    assert {candidate.origin for entry in trusted for candidate in entry.candidates} == {"foreign"}


@pytest.mark.parametrize(
    ("changes", "doubt"),
    [
        ({"latency_us": 0.001}, "below the physics floor"),
        ({"rel_fro": 0.5}, "rel_fro 0.5 exceeds"),
        ({"matched_ratio": 0.5}, "only 0.5 of the elements match"),
        ({"ci_low_us": 11.0, "ci_high_us": 12.0}, "outside its own interval"),
    ],
)
def test_impossible_figures_do_not_count_even_if_trusted(calibrated, opened, trace, tmp_path, changes, doubt):
    record = trace().to_dict()
    for part in ("performance", "correctness"):
        keys = ("rel_fro", "matched_ratio") if part == "correctness" else ("latency_us", "ci_low_us", "ci_high_us")
        record[part] |= {key: value for key, value in changes.items() if key in keys}
    if "latency_us" in changes:
        record["performance"] |= {"ci_low_us": 0.0009, "ci_high_us": 0.0011}
    with opened() as store:
        ingest(store, [by_hand(tmp_path / "f.jsonl", Trace.from_dict(record))], trust=True)
        assert best_rows(store) == []
        (row,) = store.rows("SELECT doubt FROM traces")
        assert doubt in row["doubt"]
        with raises(NotFoundError, "nothing_to_publish", "WHERE doubt IS NOT NULL") as raised:
            publish(store, "h200", tmp_path)
        (command,) = re.findall(r"tilegym-db sql '(.*)'", str(raised.value))
        (shown,) = store.rows(command)
    assert (shown["gpu"], shown["doubt"]) == ("h200", row["doubt"])


@pytest.fixture
def calibrated(root, home):
    """Peaks of an H200 measured here, and an operator that states what it must move."""
    from tilegym_db.paths import shipped_root
    from tilegym_db.records.roofline import GpuPeaks
    from tilegym_db.store.side_files import save_peaks

    save_peaks(GpuPeaks.from_json((shipped_root() / "traces" / "h200" / "peaks.json").read_bytes()), home)
    path = root / "definitions" / "norm" / "scale.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"cost": {"flops": "M*N", "bytes": "4*M*N"}}))


def test_rebuild_keeps_traces_that_no_journal_has(opened, home, root, trace, tmp_path):
    trusted, shown = trace(), trace(kind="tilelang")
    with opened() as store:
        ingest(store, [by_hand(tmp_path / "trusted.jsonl", trusted)], trust=True)
        ingest(store, [by_hand(tmp_path / "shown.jsonl", shown)])
        before = store.rows("SELECT trace_id, origin, trusted FROM trace_records ORDER BY trace_id")
        best = [row["trace_id"] for row in best_rows(store)]
    report = rebuild(home, catalog=Catalog((root,)))
    assert any(note.startswith("2 traces") for note in report.notes)
    with opened() as store:
        assert store.rows("SELECT trace_id, origin, trusted FROM trace_records ORDER BY trace_id") == before
        assert [row["trace_id"] for row in best_rows(store)] == best


def test_rebuild_says_how_many_traces_are_in_no_journal(opened, home, root, trace):
    with Journal("run-1", home) as journal:
        journal.append(trace())
    with opened():
        pass
    (home / "runs" / "run-1.jsonl").unlink()
    report = rebuild(home, catalog=Catalog((root,)))
    assert [note.partition(" ")[0] for note in report.notes] == ["1"]
    with opened() as store:
        assert store.rows("FROM trace_records") == []
