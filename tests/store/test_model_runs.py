from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from model_runs import LIGER, model_run, speedups, timing, without_steps
from published_tables import lock_folder
from raising import raises

from tilegym_db.catalog import Catalog
from tilegym_db.errors import RecordError
from tilegym_db.published.input_files import LOCK_NAME, MODELS_SUFFIX
from tilegym_db.records.loop import Experiment, ModelRun
from tilegym_db.store.filling import ingest, rebuild
from tilegym_db.store.journal import IngestReport
from tilegym_db.store.publish import PublishReport, publish
from tilegym_db.store.side_files import append, read_model_run, save_model_run

TINY = f"tiny{MODELS_SUFFIX}"
SPEEDUPS = "SELECT run_id, speedup, patched_tpot_ms, stock_peak_memory_bytes FROM model_runs ORDER BY run_id"


def ingested(opened: Any) -> IngestReport:
    with opened() as store:
        return ingest(store)


def rows(opened: Any, sql: str = SPEEDUPS) -> list[Any]:
    with opened(read_only=True) as store:
        return list(store.rows(sql))


def test_a_saved_run_is_ingested_once_and_survives_a_rebuild(opened: Any, home: Path, catalog: Catalog) -> None:
    save_model_run(model_run(), home)
    ingested(opened)
    ingested(opened)
    want = [{"run_id": "one", "speedup": 2.0, "patched_tpot_ms": 1.0, "stock_peak_memory_bytes": 1 << 30}]
    assert rows(opened) == want
    rebuild(home, catalog=catalog)
    assert rows(opened) == want
    save_model_run(model_run(run_id="two"), home)
    ingested(opened)
    assert [row["run_id"] for row in rows(opened)] == ["one", "two"]


def test_file_that_is_no_run_is_named_and_others_are_ingested(opened: Any, home: Path) -> None:
    good = save_model_run(model_run(run_id="good"), home)
    (good.parent / "bad.json").write_text(json.dumps({**model_run().to_dict(), "baches": 3}))
    (good.parent / "renamed.json").write_text(model_run().to_json())
    assert [(line.path.name, line.reason) for line in ingested(opened).rejected] == [
        ("bad.json", "not a valid model_run: unknown key 'baches' (did you mean 'batch'?)."),
        ("renamed.json", "run_id 'one' does not match the file's name."),
    ]
    assert [row["run_id"] for row in rows(opened)] == ["good"]


def test_traces_and_runs_of_models_never_mix(opened: Any, home: Path, trace: Any, write_traces: Any) -> None:
    save_model_run(model_run(), home)
    with opened() as store:
        ingest(store, [write_traces(trace())])
        ingest(store)
    assert rows(opened, "SELECT evidence_level, count(*) AS n FROM model_runs GROUP BY ALL") == [
        {"evidence_level": "model", "n": 1}
    ]
    assert rows(opened, "SELECT evidence_level, count(*) AS n FROM traces GROUP BY ALL") == [
        {"evidence_level": "op", "n": 1}
    ]


WAYS = """
    SELECT way, ttft_ms, tpot_ms, tokens_per_s, prefill_tokens_per_s, speedup, equal_tokens, kernels, library, reason
    FROM model_ways ORDER BY ttft_ms DESC NULLS LAST
"""


def test_way_of_a_run_is_a_row_and_an_absent_one_has_a_reason(opened: Any, home: Path) -> None:
    given = {"ways": {"liger": LIGER}, "absent": {"tilegym": "it is not installed"}, "kernels": {"swiglu": 4}}
    save_model_run(model_run(**given), home)
    ingested(opened)
    found = {row.pop("way"): list(row.values()) for row in rows(opened, WAYS)}
    assert found == {
        "stock": [10.0, 2.0, 400.0, 800.0, None, None, None, "", ""],
        "liger": [8.0, 1.6, 500.0, 1000.0, 1.25, 11, {}, "liger-kernel 1.0", ""],
        "patched": [5.0, 1.0, 800.0, 1600.0, 2.0, 12, {"swiglu": 4}, "", ""],
        "tilegym": [None, None, None, None, None, None, None, "", "it is not installed"],
    }


def test_a_run_that_an_older_version_stored_has_its_two_ways(opened: Any, home: Path) -> None:
    content = model_run().to_dict()
    for name in ("ways", "absent"):
        content.pop(name, None)
    with opened() as store:
        insert = "INSERT INTO model_run_records VALUES ('old', true, 'local', false, $record)"
        store.connection.execute(insert, {"record": json.dumps(content)})
    assert [row["way"] for row in rows(opened, WAYS)] == ["stock", "patched"]
    assert rows(opened)[0]["speedup"] == 2.0


def test_a_prefill_alone_has_a_speed_of_its_own(opened: Any, home: Path) -> None:
    figures = {"stock": without_steps(1.0), "patched": without_steps(0.5), "tpot_speedup": None}
    run = model_run(new_tokens=0, equal_tokens=1, **figures)
    assert (run.compared_tokens, run.prefill_tokens_per_s(run.patched)) == (1, 1600.0)
    save_model_run(run, home)
    ingested(opened)
    asked = "SELECT stock_prefill_tokens_per_s AS stock, patched_prefill_tokens_per_s AS patched, tpot_speedup FROM model_runs"
    assert rows(opened, asked) == [{"stock": 800.0, "patched": 1600.0, "tpot_speedup": None}]
    assert [row["tokens_per_s"] for row in rows(opened, WAYS)] == [None, None]


def test_the_share_of_gpu_time_can_be_asked_for(opened: Any, home: Path) -> None:
    save_model_run(model_run(run_id="one", gpu_shares={"swiglu": 0.25, "rms_norm": 0.125}), home)
    save_model_run(model_run(run_id="two"), home)
    save_model_run(model_run(run_id="without-any", gpu_shares={}), home)
    ingested(opened)
    asked = "SELECT gpu_share, gpu_shares['swiglu'] AS swiglu FROM model_runs ORDER BY run_id"
    assert rows(opened, asked) == [
        {"gpu_share": 0.375, "swiglu": 0.25},
        {"gpu_share": None, "swiglu": None},
        {"gpu_share": 0, "swiglu": None},
    ]


# -- trust in runs -----------------------------------------------------------------------------------------------------

ORIGINS = "SELECT run_id, origin, trusted FROM model_runs ORDER BY run_id"


@pytest.mark.turn("tilegym_db/store/side_files.py", "tilegym_db/published/snapshot.py")  # fills databases
@pytest.mark.parametrize("edit", [('"layers": 2', '"layers": 3'), ('"signature": "', '"signature": "0')])
def test_edited_run_is_foreign_until_the_user_trusts_it(
    opened: Any, home: Path, catalog: Catalog, edit: tuple[str, str]
) -> None:
    save_model_run(model_run(), home)
    path = save_model_run(model_run(run_id="two", total_speedup={"median": 2.0}), home)
    path.write_text(path.read_text().replace(*edit))
    ingested(opened)
    assert rows(opened, ORIGINS) == [
        {"run_id": "one", "origin": "local", "trusted": False},
        {"run_id": "two", "origin": "foreign", "trusted": False},
    ]
    with opened() as store:
        ingest(store, trust=True)
    rebuild(home, catalog=catalog)
    assert [row["trusted"] for row in rows(opened, ORIGINS)] == [False, True]


def test_the_runs_of_another_home_are_foreign_here(opened: Any, home: Path, tmp_path: Path) -> None:
    theirs = save_model_run(model_run(), tmp_path / "theirs")
    here = home / "model_runs" / theirs.name
    here.parent.mkdir(parents=True)
    here.write_bytes(theirs.read_bytes())
    assert (read_model_run(theirs, tmp_path / "theirs")[1], read_model_run(here, home)[1]) == ("local", "foreign")
    ingested(opened)
    assert [row["origin"] for row in rows(opened, ORIGINS)] == ["foreign"]


# -- published ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def published(opened: Any, write_traces: Any, trace: Any, shipped: Path) -> Callable[..., PublishReport]:
    """``published(run, ...)``: what ``publish`` reports of the H200, into the package's own folder."""

    traces = write_traces(trace())

    def publish_now(*runs: ModelRun, home: Path) -> PublishReport:
        for run in runs:
            save_model_run(run, home)
        with opened() as store:
            ingest(store, [traces])
            ingest(store)
            return publish(store, "h200", shipped)

    return publish_now


def ids(report: PublishReport) -> list[str]:
    return [json.loads(line)["run_id"] for line in (report.folder / TINY).read_text().splitlines()]


def test_the_newest_run_of_each_model_and_call_is_published(published: Any, home: Path) -> None:
    later = {"timestamp": "2026-11-22T10:00:00Z"}
    report = published(
        model_run(run_id="older"),
        model_run(run_id="newer", **later),
        model_run(run_id="larger-batch", batch=8),
        model_run(run_id="with-a-peer", ways={"liger": LIGER}),
        model_run(run_id="another-GPU", gpu="l4"),
        home=home,
    )
    assert sorted(ids(report)) == ["larger-batch", "newer", "with-a-peer"]
    assert report.model_runs == 3
    assert report.left_out == {}
    assert TINY in json.loads((report.folder / LOCK_NAME).read_text())["files"]


def test_each_model_has_a_file(published: Any, home: Path) -> None:
    report = published(model_run(), model_run(run_id="two", model="Some One/Model-8B", batch=2), home=home)
    assert {path.name for path in report.folder.glob(f"*{MODELS_SUFFIX}")} == {
        TINY,
        f"Some-One-Model-8B{MODELS_SUFFIX}",
    }


def test_a_run_that_says_nothing_is_left_out_with_the_reason(published: Any, home: Path) -> None:
    without = {"median": 1.0}
    discarded = Experiment.from_dict(
        {
            "id": "e1", "model": "tiny", "config_digest": "0" * 64, "gpu": "h200", "base": "0" * 64, "definition": "scale",
            "before": {"time_of": "gpu", "median": 0.1, "low": 0.1, "high": 0.1, "profiles": 5}, "runs": ["tried"],
            "decision": "discard", "reason": "slower",
            "seconds": 1.0, "timestamp": "2026-11-21T10:00:00Z",
        }
    )  # fmt: skip
    append(discarded, home)
    foreign = save_model_run(model_run(run_id="foreign"), home)
    foreign.write_text(foreign.read_text().replace('"batch": 1', '"batch": 64'))
    report = published(
        model_run(run_id="kept"),
        model_run(run_id="tried", batch=2),
        model_run(run_id="hot", batch=3, throttled=True),
        model_run(run_id="no-kernel", batch=4, total_speedup=without),
        home=home,
    )
    assert ids(report) == ["kept"]
    assert report.left_out == {
        "runs of models that this installation did not sign (--trust)": 1,
        "runs of models with a change that the loop discarded": 1,
        "runs of models on a GPU that was throttled during the run": 1,
        "runs of models without an interval (no kernel ran, or too few rounds)": 1,
    }


@pytest.mark.turn("tilegym_db/store/side_files.py", "tilegym_db/published/snapshot.py")  # fills databases
def test_published_runs_fill_a_fresh_store_with_one_row_each(
    published: Any, opened: Any, home: Path, tmp_path: Path
) -> None:
    report = published(model_run(ways={"liger": LIGER}), home=home)
    assert rows(opened, ORIGINS) == [{"run_id": "one", "origin": "shipped", "trusted": False}]
    assert published(home=home).written == ()
    home.rename(tmp_path / "elsewhere")
    assert rows(opened, ORIGINS) == [{"run_id": "one", "origin": "shipped", "trusted": False}]
    assert [row["way"] for row in rows(opened, WAYS)] == ["stock", "liger", "patched"]
    assert published(model_run(run_id="two", batch=2), home=home).model_runs == 2
    (report.folder / TINY).unlink()
    assert [row["run_id"] for row in rows(opened, ORIGINS)] == ["two"]  # it is in this home


@pytest.mark.turn("tilegym_db/store/side_files.py", "tilegym_db/published/snapshot.py")  # fills databases
@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (('"median": 2.0', '"median": 9.0'), "was changed after it was published"),
        (None, "does not list it"),
    ],
)
def test_published_file_that_differs_from_its_lock_is_not_used(
    published: Any, opened: Any, home: Path, tmp_path: Path, caplog: Any, edit: tuple[str, str] | None, said: str
) -> None:
    path = published(*([model_run()] if edit else []), home=home).folder / TINY
    path.write_text(path.read_text().replace(*edit) if edit else model_run().to_json() + "\n")
    home.rename(tmp_path / "elsewhere")
    assert rows(opened, ORIGINS) == []
    assert [str(path) in record.getMessage() and said in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.turn("tilegym_db/store/side_files.py", "tilegym_db/published/snapshot.py")  # fills databases
def test_line_that_is_no_run_of_its_gpu_is_named_and_left_out(
    published: Any, opened: Any, home: Path, tmp_path: Path, caplog: Any
) -> None:
    folder = published(model_run(), home=home).folder
    home.rename(tmp_path / "elsewhere")
    lines = [model_run().to_json(), model_run(run_id="l4", gpu="l4").to_json(), "{}", ""]
    (folder / TINY).write_text("\n".join(lines))
    lock_folder(folder, home, gpu="h200", sm="sm_90", published="2026")
    assert [row["run_id"] for row in rows(opened, ORIGINS)] == ["one"]
    said = "".join(record.getMessage() for record in caplog.records)
    assert f"{TINY}:2: not used: it is a run on 'l4'" in said
    assert f"{TINY}:3: not a valid model_run" in said


def test_the_users_own_folder_holds_no_runs_since_its_home_does(
    opened: Any, home: Path, write_traces: Any, trace: Any, monkeypatch: Any
) -> None:
    monkeypatch.setenv("TILEGYM_DB_HOME", str(home))
    save_model_run(model_run(), home)
    with opened() as store:
        ingest(store, [write_traces(trace())])
        ingest(store)
        report = publish(store, "h200", own=True)
    assert (report.model_runs, report.folder) == (0, home / "published" / "h200")
    assert not (report.folder / TINY).exists()


@pytest.mark.parametrize(
    ("changes", "code", "names"),
    [
        ({"gpu_shares": {"swiglu": 0.6, "rms_norm": 0.5}}, "gpu_shares_invalid", "gpu_shares"),
        ({"new_tokens": 0, "equal_tokens": 1}, "figure_unexpected", "stock.tpot_ms"),
        ({"stock": {**timing(1.0), "tokens_per_s": None}}, "figure_unexpected", "stock.tokens_per_s"),
        ({"tpot_speedup": None}, "figure_unexpected", "tpot_speedup"),
        ({"ways": {"liger": {**LIGER, "timing": without_steps(1.0)}}}, "figure_unexpected", "liger.tpot_ms"),
        ({"ways": {"liger": {**LIGER, "equal_tokens": 13}}}, "tokens_too_many", "equal_tokens 13 of liger"),
        ({"ways": {"liger": {**LIGER, "against": {"tilegym": speedups(1.0)}}}}, "way_unknown", "'tilegym'"),
        ({"ways": {"liger": {**LIGER, "against": {"liger": speedups(1.0)}}}}, "way_unknown", "'liger'"),
        ({"ways": {"liger": {**LIGER, "against": {}}}}, "list_too_short", "against"),
        ({"ways": {"stock": LIGER}}, "ways_incomplete", "ways.stock"),
        ({"ways": {"liger": LIGER}, "absent": {"liger": "gone"}}, "ways_incomplete", "ways.liger"),
        ({"evidence_level": "op"}, "value_unknown", "evidence_level"),
        ({"new_tokens": 1}, "tokens_too_many", "equal_tokens"),
        ({"equal_tokens": 13}, "tokens_too_many", "equal_tokens"),
        ({"timestamp": "2026-11-21T10:00:00"}, "time_zone_missing", "timestamp"),
        ({"total_speedup": {"median": 2, "ci_low": 2.5, "ci_high": 3}}, "median_outside", "total_speedup"),
    ],
)
def test_a_run_that_cannot_be_is_refused(changes: dict[str, Any], code: str, names: str) -> None:
    with raises(RecordError, code, names):
        model_run(**changes)
