from __future__ import annotations

import json
import math
import os
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import pytest
from pydantic import BaseModel
from raising import raises

from tilegym_db.errors import StoreError
from tilegym_db.published.snapshot import Batch
from tilegym_db.records.workload import axes_key
from tilegym_db.store import journal as journals
from tilegym_db.store import opening
from tilegym_db.store.connection import writer_lock
from tilegym_db.store.filling import ingest, rebuild
from tilegym_db.store.journal import Journal, joined
from tilegym_db.store.queries.measured import count_traces, definition_by_digest, read_traces

INGESTER = """
import sys
import tempfile
from pathlib import Path
from tilegym_db.catalog import Catalog
from tilegym_db.store.opening import open_store
from tilegym_db.store.filling import ingest

home, root, file = map(Path, sys.argv[1:])
sys.stdin.readline()
with open_store(home, catalog=Catalog((root,)), lock_timeout_s=60) as store:
    print(ingest(store, [file]).added)
"""


KILLED = (
    INGESTER
    + """
    import os, signal
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""
)


def full_trace(trace):
    """A trace of a pass that uses every field."""
    return trace(
        m=4096,
        config={"num_warps": 8, "BLOCK_M": 4, "fast": True, "mode": "a b", "ratio": 0.1},
        attempt=2,
        sandbox_level=3,
        driver="580.1",
        cuda="13.0",
        libs={"triton": "3.9", "torch": "2.13"},
        gpu_uuid="GPU-1",
        host="vm",
        blobs={"ids": "a" * 64},
        scalars={"eps": 1e-5, "is_causal": True, "window": None},
        layouts={"x": "row_contiguous"},
        envelope={
            "cases": 24,
            "digest": "d" * 64,
            "seed": str(2**64 - 1),
            "dropped": ["M=1, \u00b1max/4"],
            "scalars": {"eps": [1e-12, 0.1 + 0.2], "scale": [-2.5, 3]},
            "largest": {"M": 65_536, "K": 2**40},
            "largest_elements": 2**31 + 1,
            "batch_slices": 8,
        },
        audit={
            "wall_us": 12.75,
            "owned_share": 1.0,
            "profiled_us": 12.5,
            "kernels": ["rms_norm", "k2"],
            "notes": ["kernel.py:3: try"],
        },
        log="two\nlines, a 'quote' and \u00fc",
        correctness={
            "rel_fro": 0.1 + 0.2,
            "worst_row_rel": 2e-300,
            "max_abs": 0.5,
            "matched_ratio": 1.0,
            "deterministic": False,
            "gate": "frobenius",
            "oracle": "fp32",
            "cases": 28,
        },
        performance={
            "latency_us": 12.5,
            "ci_low_us": 12.25,
            "ci_high_us": 12.75,
            "samples": 100,
            "host_us": 20.5,
            "cold_l2": True,
            "timer": "cupti",
            "comparisons": [
                {"with": "scale_stock", "provides": "stock", "ratio": 2.0, "ci_low": 1.9, "ci_high": 2.1},
                {"with": "incumbent", "ratio": 1.0, "ci_low": 0.9, "ci_high": 1.1},
            ],
            "sol_us": 6.25,
            "sol_ratio": 0.5,
            "clock_mhz": 1980,
            "throttled": False,
        },
    )


FAILURE = {
    "gate": "elementwise",
    "axes": {"M": 17, "N": 4096},
    "dtypes": {"T": "bfloat16"},
    "layouts": {"x": "strided(2 * N, 1)"},
    "contents": "outliers",
    "seed": str(2**64 - 1),
    "offset": 1,
    "output": "out",
    "index": [16, 4095],
    "expected": "1.5",
    "got": "nan",
    "worst_row": 16,
    "command": "tilegym-db debug reproduce scale_triton --axes M=17",
}


def unused_fields(record, of=""):
    """Yield the name of each field of a record, and of its parts, that has its default."""
    for name, field in type(record).model_fields.items():
        value = getattr(record, name)
        if not field.is_required() and value == field.get_default(call_default_factory=True):
            yield of + name
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, BaseModel):
                yield from unused_fields(part, f"{of}{name}.")


def test_the_full_traces_use_every_field_of_a_trace(trace):
    passed, failed = full_trace(trace), trace(kind="stock", status="TIMEOUT", failure=FAILURE)
    overruled = trace(status="OVERRULED", overrules={"trace_id": failed.trace_id, "by": passed.trace_id})
    unused = set(unused_fields(passed)) & set(unused_fields(failed)) & set(unused_fields(overruled))
    assert unused <= {"evidence_level"}  # it has one value
    assert {name for name in unused_fields(passed) if "." in name} <= {"performance.comparisons.provides"}
    assert {name for name in unused_fields(failed) if name.startswith("failure.")} == set()


def test_a_trace_comes_back_as_it_was_written(opened, write_traces, trace):
    written = [full_trace(trace), trace(), trace(status="UNSUPPORTED"), trace(status="INCORRECT_NUMERICAL")]
    written += [trace(status="TIMEOUT", failure=FAILURE)]
    written += [
        trace(status="TIMEOUT", failure={key: FAILURE[key] for key in ("gate", "axes", "contents", "seed", "command")})
    ]
    written += [trace(tier="interpreter", gpu="cpu")]
    with opened() as store:
        ingest(store, [write_traces(*written)])
        assert read_traces(store, [item.trace_id for item in written]) == {item.trace_id: item for item in written}


def test_metrics_are_columns_and_axes_are_a_map(opened, write_traces, trace):
    with opened() as store:
        ingest(store, [write_traces(full_trace(trace), trace(m=1))])
        (row,) = store.rows("FROM traces WHERE axes['M'] = 4096")
    assert row["axes_key"] == axes_key(row["axes"]) == "M=4096,N=4096"
    assert row["dtypes_key"] == "T=bfloat16"
    assert row["layouts_key"] == "x=row_contiguous"
    assert row["config_key"] == 'BLOCK_M=4,fast=true,mode="a b",num_warps=8,ratio=0.1'
    assert (row["latency_us"], row["speedup"], row["speedup_ci_low"], row["sol_ratio"]) == (12.5, 2.0, 1.9, 0.5)
    assert (row["rel_fro"], row["cases"], row["envelope_cases"]) == (0.1 + 0.2, 28, 24)
    assert [item["with"] for item in row["comparisons"]] == ["scale_stock", "incumbent"]
    assert (row["wall_us"], row["owned_share"], row["profiled_us"]) == (12.75, 1.0, 12.5)
    assert row["kernels"] == ["rms_norm", "k2"]
    assert (row["scan_notes"], row["envelope_dropped"]) == (["kernel.py:3: try"], ["M=1, \u00b1max/4"])
    assert (row["envelope_scalars"]["eps"], row["envelope_largest"]["M"]) == ([1e-12, 0.1 + 0.2], 65_536)
    assert (row["envelope_largest_elements"], row["envelope_batch_slices"]) == (2**31 + 1, 8)
    assert (row["failure"], row["failure_command"]) == (None, None)


def test_place_of_a_failure_is_a_struct_and_its_command_a_column(opened, write_traces, trace):
    with opened() as store:
        ingest(store, [write_traces(trace(status="TIMEOUT", failure=FAILURE))])
        (row,) = store.rows("""SELECT failure.gate, failure."index", failure."offset", failure.axes['M'] AS m,
            failure_command FROM traces""")
    assert row == {
        "gate": "elementwise",
        "index": [16, 4095],
        "offset": 1,
        "m": 17,
        "failure_command": FAILURE["command"],
    }


def test_times_are_utc_whatever_the_zone_they_were_written_in(opened, write_traces, trace):
    with opened() as store:
        ingest(store, [write_traces(trace(timestamp="2026-03-01T02:00:00+02:00"))])
        assert [str(row["timestamp"]) for row in store.rows("SELECT timestamp FROM traces")] == ["2026-03-01 00:00:00"]


def test_ingesting_again_adds_nothing(opened, write_traces, trace):
    first, second = trace(), trace()
    with opened() as store:
        report = ingest(store, [write_traces(first, first), write_traces(second, first)])
        assert (report.files, report.added, report.known) == (2, 2, 2)
        assert ingest(store, [write_traces(first, second)]).added == 0
        assert count_traces(store) == 2


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    "change",
    [
        {"timestamp": "9999-12-31T23:59:59Z"},
        {"timestamp": "0001-01-01T00:00:00Z"},
        {"timestamp": "1999-12-31T23:59:59Z"},
        {"gpu": "../../../x"},
        {"gpu": "H200 SXM"},
        {"gpu": ""},
        {"performance": {"latency_us": math.nan}},
        {"performance": {"latency_us": math.inf}},
        {"performance": {"ci_high_us": math.inf}},
        {"performance": {"host_us": math.nan}},
        {"performance": {"comparisons": [{"with": "a", "ratio": math.nan, "ci_low": 1.0, "ci_high": 1.0}]}},
        {"correctness": {"rel_fro": math.nan}},
    ],
    ids=str,
)
def test_trace_with_a_value_of_no_measurement_is_refused(opened, trace, tmp_path, change):
    record = json.loads(trace().to_json())
    for key, value in change.items():
        record[key] = {**record[key], **value} if isinstance(value, dict) else value
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps(record) + "\n")
    with opened() as store:
        report = ingest(store, [path], trust=True)
        assert (report.added, [line.line for line in report.rejected]) == (0, [1])
        assert count_traces(store) == 0


@pytest.mark.parametrize("version", ["'ten'", "''", None])
def test_store_without_a_version_is_named_and_made_anew(opened, home, catalog, version):
    with opened() as store, store.transaction("age") as connection:
        if version is None:
            connection.execute("DELETE FROM meta WHERE key = 'schema_version'")
        else:
            connection.execute(f"UPDATE meta SET value = {version} WHERE key = 'schema_version'")
    for read_only in (True, False):
        with raises(StoreError, "store_damaged", "--rebuild"), opened(read_only=read_only):
            pass
    assert rebuild(home, catalog=catalog).notes
    with opened() as store:
        assert count_traces(store) == 0


def test_only_journals_that_grew_are_read(opened, home, trace):
    with Journal("run-1", home) as journal:
        journal.append(trace())
        with opened() as store:
            assert ingest(store).files == 0  # a fresh store has them already
            journal.append(trace())
            assert (ingest(store).added, ingest(store).files) == (1, 0)


def test_a_bad_line_is_reported_and_costs_only_itself(opened, write_traces, trace, tmp_path):
    good = [trace() for _ in range(4)]
    lines = [item.to_json() for item in good]
    lines[1:1] = [
        '{"trace_id"}',
        json.dumps(json.loads(lines[0]) | {"status": "FINE"}),
        json.dumps({key: value for key, value in json.loads(lines[0]).items() if key != "performance"}),
        json.dumps(json.loads(lines[0]) | {"axes": {"M": "many"}}),
        json.dumps(json.loads(lines[0]) | {"failure": {"gate": "shape"}}),
        json.dumps(json.loads(lines[0]) | {"envelope": {"cases": 1}}),
        json.dumps(json.loads(lines[0]) | {"audit": {"owned_share": 1.5}}),
    ]
    path = tmp_path / "mixed[1].jsonl"
    path.write_text("\n".join(lines) + '\n{"trace_id": "torn')
    with opened() as store:
        report = ingest(store, [path, write_traces(good[0])])
        assert (report.added, report.known) == (4, 1)
        assert count_traces(store) == 4
    assert [line.line for line in report.rejected] == [2, 3, 4, 5, 6, 7, 8, 12]
    reasons = [line.reason for line in report.rejected]
    assert "not valid JSON" in reasons[0]
    assert "status" in reasons[1]
    assert "needs 'performance'" in reasons[2]
    assert "axes.M" in reasons[3]
    assert "missing key 'failure.axes'" in reasons[4]
    assert "missing key 'envelope.digest'" in reasons[5]
    assert "audit.owned_share" in reasons[6]
    assert "cut off" in reasons[7]


def test_a_folder_with_pattern_characters_is_read_literally(opened, write_traces, trace, tmp_path):
    folder = tmp_path / "a[b]*?"
    folder.mkdir()
    path = write_traces(trace()).rename(folder / "t.jsonl")
    with opened() as store:
        assert ingest(store, [path]).added == 1


def test_a_missing_file_is_named(opened):
    with opened() as store, raises(StoreError, "file_unreadable", "/nowhere.jsonl"):
        ingest(store, [Path("/nowhere.jsonl")])


@pytest.mark.turn("tilegym_db/store/journal.py", "tilegym_db/store/filling.py")  # fills databases
def test_two_ingests_at_once_both_land(home, root, write_traces, trace):
    files = [write_traces(*(trace() for _ in range(50))) for _ in range(2)]
    started = [
        subprocess.Popen(
            [sys.executable, "-c", INGESTER, str(home), str(root), str(file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for file in files
    ]
    for process in started:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    assert [process.communicate()[0].strip() for process in started] == ["50", "50"]


@pytest.mark.turn("tilegym_db/store/journal.py", "tilegym_db/store/filling.py")  # fills databases
def test_ingest_killed_afterwards_is_seen_by_readers_and_writers(opened, home, root, write_traces, trace):
    file = write_traces(*(trace() for _ in range(50)))
    command = [sys.executable, "-c", KILLED, str(home), str(root), str(file)]
    assert subprocess.run(command, input="\n", capture_output=True, text=True).stdout.strip() == "50"
    assert (home / "tilegym.duckdb.wal").exists()
    for read_only in (True, False):
        with opened(read_only=read_only) as store:
            assert count_traces(store) == 50


@pytest.mark.turn("tilegym_db/store/filling.py")  # a small disk
def test_a_full_disk_ingests_nothing_and_the_store_still_opens(opened, home, write_traces, trace, file_size_limit):
    before = trace()
    many = write_traces(*(trace(log="".join(chr(33 + i * j % 90) for j in range(3000))) for i in range(1, 1500)))
    with opened() as store:
        ingest(store, [write_traces(before)])
    limit = file_size_limit((home / "tilegym.duckdb").stat().st_size + 256 * 1024)
    with limit, raises(StoreError, "disk_full", "TILEGYM_DB_HOME"), opened() as store:
        ingest(store, [many])
    with opened() as store:
        assert list(read_traces(store, [before.trace_id])) == [before.trace_id]
        assert count_traces(store) == 1
        assert ingest(store, [many]).added == 1499


@pytest.mark.turn("tilegym_db/store/journal.py", "tilegym_db/store/filling.py")  # fills databases
def test_the_database_can_be_made_anew_from_journals(opened, home, root, trace, catalog):
    old_definition = catalog.definition("scale")
    kept = [trace(), trace(kind="tilelang")]
    with Journal("run-1", home) as journal:
        for item in kept:
            journal.append(item)
    with opened():
        pass
    path = root / "definitions" / "norm" / "scale.json"
    path.write_text(path.read_text().replace("1.0.0", "1.1.0"))
    with opened() as store, store.transaction("spoil") as connection:
        connection.execute("UPDATE trace_records SET status = 'TIMEOUT'")

    assert rebuild(home, catalog=type(catalog)((root,))).added == 2
    with opened() as store:
        assert read_traces(store, [item.trace_id for item in kept]) == {item.trace_id: item for item in kept}
        assert definition_by_digest(store, old_definition.digest) == old_definition.to_dict()
        assert ingest(store).files == 0


@pytest.mark.turn("tilegym_db/store/journal.py", "tilegym_db/store/filling.py")  # fills databases
def test_a_damaged_database_is_made_anew(opened, home, catalog, trace):
    with Journal("run-1", home) as journal:
        journal.append(trace())
    with opened():
        pass
    path = home / "tilegym.duckdb"
    path.write_bytes(b"x" * path.stat().st_size)
    report = rebuild(home, catalog=catalog)
    assert report.added == 1
    assert "damaged" in report.notes[0]
    with opened() as store:
        assert count_traces(store) == 1


def test_a_database_that_lost_its_end_is_made_anew(opened, home, catalog, trace):
    with Journal("run-1", home) as journal:
        journal.append(trace())
    with opened():
        pass
    path = home / "tilegym.duckdb"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    report = rebuild(home, catalog=catalog)
    assert report.added == 1
    assert "damaged" in report.notes[0]
    with opened() as store:
        assert count_traces(store) == 1


def test_a_database_of_another_program_is_left_alone(opened, home, catalog):
    home.mkdir()
    path = home / "tilegym.duckdb"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE mine (a)")
    before = path.read_bytes()
    for read_only in (True, False):
        with raises(StoreError, "store_foreign", "tilegym.duckdb"), opened(read_only=read_only):
            pass
    with raises(StoreError, "store_foreign", "tilegym.duckdb"):
        rebuild(home, catalog=catalog)
    assert path.read_bytes() == before


def test_a_rebuild_leaves_a_newer_store_and_an_open_one_alone(opened, home, catalog):
    with opened() as store:
        with raises(StoreError, "store_open_here", "tilegym.duckdb"):
            rebuild(home, catalog=catalog, lock_timeout_s=0.1)
        with store.transaction("age") as connection:
            connection.execute("UPDATE meta SET value = '99' WHERE key = 'schema_version'")
    before = (home / "tilegym.duckdb").read_bytes()
    with raises(StoreError, "version_newer", "pip install --upgrade tilegym-db"):
        rebuild(home, catalog=catalog)
    assert (home / "tilegym.duckdb").read_bytes() == before


def test_fifo_among_journals_is_skipped_and_a_named_one_refused(opened, home):
    (home / "runs").mkdir(parents=True)
    for folder, name in (("runs", "run.jsonl"), ("tuning", "run.jsonl"), ("peaks", "a.json"), ("model_runs", "a.json")):
        (home / folder).mkdir(exist_ok=True)
        os.mkfifo(home / folder / name)
    with opened() as store:
        assert ingest(store).files == 0
        with raises(StoreError, "file_irregular", "run.jsonl"):
            ingest(store, [home / "runs" / "run.jsonl"])
    with raises(StoreError, "write_failed", "run.jsonl"):
        Journal("run", home)


@pytest.mark.turn("tilegym_db/store/journal.py", "tilegym_db/store/filling.py")  # fills databases
def test_reader_sees_what_a_killed_run_journaled(opened, home, trace):
    with opened(), Journal("first", home) as journal:
        journal.append(trace())
    with opened(read_only=True) as store:
        assert count_traces(store) == 1
        assert store.stale is None
    with Journal("first", home) as journal:
        journal.append(trace())
        with opened(read_only=True) as store:  # the run is still at work
            assert count_traces(store) == 2


def test_reader_beside_a_reader_reports_journals_not_read(opened, home, trace):
    with opened():
        pass
    with opened(read_only=True), Journal("first", home) as journal:
        journal.append(trace())
        with opened(read_only=True) as store:
            assert "journals changed" in (store.stale or "")


def test_emptied_journal_is_nothing_to_ingest(opened, home, trace):
    with opened(), Journal("first", home) as journal:
        journal.append(trace())
    with opened(read_only=True):
        pass
    journal.path.write_bytes(b"")
    with writer_lock(home / "tilegym.duckdb", 1.0), opened(read_only=True) as store:
        assert store.stale is None


def test_reader_that_finds_it_done_is_not_stale(opened, home, trace, monkeypatch):
    with opened(), Journal("first", home) as journal:
        journal.append(trace())
    open_writer = opening._open_writer

    def another_is_first(*given):
        with open_writer(*given) as store:
            ingest(store)
        raise StoreError("another process has it", code="store_locked")

    monkeypatch.setattr(opening, "_open_writer", another_is_first)
    with opened(read_only=True) as store:
        assert count_traces(store) == 1
        assert store.stale is None


def test_reader_names_lines_of_journals_that_it_leaves_out(opened, home, trace, caplog):
    with opened(), Journal("first", home) as journal:
        journal.append(trace())
        journal.append_line(b'{"trace_id": 7}\n')
        journal.append_line(b'{"trace_id": "cut o')
    with opened(read_only=True) as store:
        assert count_traces(store) == 1
    assert [record.getMessage().partition(": ")[0] for record in caplog.records] == [f"{journal.path}:2"]


def test_reader_says_that_it_ingests_a_large_journal(opened, home, trace, caplog, monkeypatch):
    with opened(), Journal("first", home) as journal:
        journal.append(trace())
    monkeypatch.setattr(journals, "LARGE", journal.path.stat().st_size)
    with opened(read_only=True), opened(read_only=True):
        assert len(caplog.records) == 1
    assert "MB of journals" in caplog.text


def test_missing_temporary_folder_is_named(opened, write_traces, trace, tmp_path, monkeypatch):
    traces = write_traces(trace())
    with opened() as store:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
        with raises(StoreError, "write_failed", "TMPDIR"):
            ingest(store, [traces])


def test_small_files_reach_duckdb_as_one_and_large_ones_alone(tmp_path):
    contents = {"a.jsonl": "{}\n{}\n", "b.jsonl": "{}", "large.jsonl": '{"a": "long"}\n', "other.json": "{}\n"}
    for name, text in contents.items():
        (tmp_path / name).write_text(text)
    files = [tmp_path / name for name in contents]
    gone = tmp_path / "gone.jsonl"
    batch = Batch("local", False, 6, (*files, gone), ((tmp_path / "packed.jsonl.gz", b"\n[]"),))
    first, *others = joined(batch, tmp_path / "whole", small_bytes=8)
    assert first.read_text() == "\n[]\n" + "{}\n" * 3
    assert others == [*files[2:], gone]  # reading it reports the fault


def test_no_room_for_the_joined_lines_is_named(tmp_path):
    batch = Batch("shipped", False, 1, texts=((tmp_path / "packed.jsonl.gz", b"{}\n"),))
    with raises(StoreError, "write_failed", "nowhere"):
        joined(batch, tmp_path / "nowhere" / "whole")


def test_what_is_no_trace_is_not_called_a_foreign_one(opened, tmp_path, trace):
    file = tmp_path / "mixed.jsonl"
    file.write_text("hello\n" + trace().to_json() + "\n[]\n")
    with opened() as store:
        report = ingest(store, [file])
    assert (report.added, len(report.rejected)) == (1, 2)
    assert [note.split(":")[0] for note in report.notes] == ["1 trace was not signed by this installation"]
    junk = tmp_path / "junk.jsonl"
    junk.write_text("hello\n")
    with opened() as store:
        assert ingest(store, [junk]).notes == ()


def test_a_published_file_that_is_cut_off_is_rejected(opened, tmp_path):
    file = tmp_path / "rms_norm.jsonl.gz"
    shipped = Path(__file__).parents[2] / "traces" / "h200" / "norm" / "rms_norm.jsonl.gz"
    file.write_bytes(shipped.read_bytes()[:200])
    with opened() as store:
        report = ingest(store, [file])
    assert [str(line).startswith(f"{file}:1: not a valid file of published traces") for line in report.rejected] == [
        True
    ]


def test_journal_with_a_name_outside_utf_8_is_named_and_skipped(opened, home, catalog, trace):
    with Journal("run-1", home) as journal:
        journal.append(trace())
    odd = home / "runs" / os.fsdecode(b"\xff.jsonl")
    odd.write_bytes((home / "runs" / "run-1.jsonl").read_bytes())
    with opened() as store:
        report = ingest(store)
        assert count_traces(store) == 1
    assert [line.path for line in report.rejected] == [odd]
    assert "its name is not UTF-8" in report.rejected[0].reason
    assert rebuild(home, catalog=catalog).added == 1
