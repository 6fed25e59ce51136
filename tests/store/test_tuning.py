"""The log of a search: whole lines, whatever happens to the process that writes it; and what is published of it."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from raising import raises

from tilegym_db.catalog import Catalog
from tilegym_db.errors import StoreError, UsageError
from tilegym_db.published.input_files import read_lines
from tilegym_db.store.filling import ingest
from tilegym_db.store.publish import publish
from tilegym_db.store.side_files import TuningLog, TuningStep, read_tuning_steps

START = datetime(2026, 1, 1, tzinfo=UTC)


def step(number: int, **changes: object) -> TuningStep:
    return TuningStep.from_dict(
        {
            "run_id": "run",
            "timestamp": (START + timedelta(seconds=number)).isoformat(),
            "gpu": "h200",
            "solution": "row_scale_triton",
            "solution_digest": "d",
            "definition_digest": "e",
            "workload_uuid": "w",
            "config": {"BLOCK": number, "FAST": True, "MODE": "a", "X": 0.5},
            "outcome": "slower",
            "reason": "0.50x as fast as the winner",
            "against": {},
            "ratio": 0.5,
            **changes,
        }
    )


def test_steps_come_back_unchanged_and_oldest_first_from_any_run(home):
    with TuningLog("b", home) as log:
        log.append(step(1))
        log.append(step(3, outcome="failed", status="TIMEOUT", against=None, ratio=None))
    with TuningLog("a", home) as log:
        log.append(step(2))
        log.append(step(4, gpu="l4"))
    found = read_tuning_steps(home, "h200")
    assert found == [step(1), step(2), step(3, outcome="failed", status="TIMEOUT", against=None, ratio=None)]
    assert found[0].pair == ("d", "e", "w")


def test_a_line_that_was_cut_off_is_a_config_to_be_tried_again(home):
    with TuningLog("a", home) as log:
        log.append(step(1))
        log.append(step(2))
        path = log.path
    path.write_bytes(path.read_bytes()[:-20])
    assert read_tuning_steps(home, "h200") == [step(1)]
    with TuningLog("a", home) as log:
        log.append(step(3))
    assert read_tuning_steps(home, "h200") == [step(1), step(3)]


def test_a_search_that_tried_nothing_leaves_no_file(home):
    with TuningLog("a", home):
        pass
    assert list((home / "tuning").iterdir()) == []
    assert read_tuning_steps(home, "h200") == []


def test_one_process_writes_a_run_and_its_name_is_a_file_name(home):
    with TuningLog("a", home), raises(StoreError, "journal_locked", "a.jsonl"):
        TuningLog("a", home)
    with raises(UsageError, "run_id_invalid", "'../a'"):
        TuningLog("../a", home)


# -- published ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def searched(catalog, home):
    """``searched(number, ...)``: logs a step of ``scale_triton`` at its larger shape, and gives it back."""

    def log(number: int, run: str = "run", **changes: object) -> TuningStep:
        solution = catalog.solution("scale_triton")
        made = step(
            number,
            run_id=run,
            solution=solution.name,
            solution_digest=solution.digest,
            definition_digest=catalog.definition("scale").digest,
            workload_uuid=catalog.workloads_for("scale")[1].uuid,
            **changes,
        )
        with TuningLog(run, home) as file:
            file.append(made)
        return made

    return log


@pytest.fixture
def published(opened, root, trace, write_traces):
    """``published()``: publishes with one promoted trace, and gives the steps in the file."""

    def now() -> list[TuningStep]:
        with opened() as store:
            ingest(store)
            ingest(store, [write_traces(trace())])
            publish(store, "h200", root)
        path = root / "traces" / "h200" / "norm" / "tuning" / "scale.jsonl.gz"
        return [TuningStep.from_dict(item) for item in read_lines(path.read_bytes(), path)]

    return now


def test_last_result_of_each_config_of_this_source_is_published(searched, published, home):
    searched(1, config={"BLOCK": 1}, outcome="leads")
    led = searched(2, config={"BLOCK": 2}, outcome="leads")
    lost = searched(3, config={"BLOCK": 1}, against={"BLOCK": 2})
    with TuningLog("other", home) as log:
        log.append(step(4))
    searched(5, run="elsewhere", gpu="l4")
    assert published() == [led, lost]


def test_publishing_keeps_others_work_and_then_changes_nothing(searched, published, opened, home, root):
    mine = searched(1, config={"BLOCK": 1})
    assert published() == [mine]
    (home / "tuning" / "run.jsonl").unlink()
    other = searched(2, config={"BLOCK": 2}, run="second")
    assert published() == [mine, other]
    with opened() as store:
        assert publish(store, "h200", root).written == ()


def test_a_search_that_was_published_counts_on_another_machine(shipped, searched, published, tmp_path, root):
    made = searched(1)
    published()
    elsewhere = tmp_path / "elsewhere"
    assert read_tuning_steps(elsewhere, "h200") == []
    assert read_tuning_steps(elsewhere, "h200", Catalog((root,))) == [made]
    assert read_tuning_steps(elsewhere, "l4", Catalog((root,))) == []


def test_sql_tells_how_far_a_search_went_and_what_leads(searched, opened, root):
    path = Path(root, "solutions", "norm", "scale", "scale_triton", "solution.json")
    record = json.loads(path.read_text())
    record["spec"]["tunables"] = {"BLOCK": [1, 2, 3], "num_warps": [4, 8]}
    path.write_text(json.dumps(record))
    path.with_name("kernel.py").write_text("def run(x, eps, out, *, BLOCK=1, num_warps=4):\n    pass\n")
    searched(1, config={}, outcome="leads")
    searched(2, config={"BLOCK": 1}, outcome="leads")
    searched(3, config={}, against={"BLOCK": 1})
    searched(4, config={"BLOCK": 2}, outcome="tie", against={"BLOCK": 1})
    searched(5, config={"BLOCK": 3}, outcome="failed", status="TIMEOUT", against=None, ratio=None)
    with opened() as store:
        ingest(store)
        (row,) = store.rows("SELECT * EXCLUDE (workload_uuid, searched_at, layouts) FROM searches")
    assert row == {
        "definition": "scale",
        "op_type": "norm",
        "gpu": "h200",
        "gpu_family": "h200",
        "solution": "scale_triton",
        "language": "triton",
        "origin": "local",
        "axes_key": "M=4096,N=4096",
        "dtypes_key": "T=bfloat16",
        "config": '{"BLOCK":1}',
        "tried": 4,
        "configs": 6,
        "slower": 1,
        "ties": 1,
        "not_compiled": 0,
        "failed": 1,
    }


def test_a_leader_that_fails_leads_no_more(searched, opened):
    searched(1, config={"BLOCK": 1}, outcome="leads")
    searched(2, config={"BLOCK": 1}, outcome="failed", status="TIMEOUT", against=None, ratio=None)
    with opened() as store:
        ingest(store)
        assert store.rows("SELECT config, tried, failed FROM searches") == [{"config": None, "tried": 1, "failed": 1}]


def test_search_under_way_leaves_readers_alone_until_an_ingest(searched, opened, home):
    with opened() as store:
        ingest(store)
    searched(1)
    with opened(read_only=True) as reader, opened(read_only=True) as another:
        assert (reader.stale, another.stale) == (None, None)
        assert reader.rows("SELECT tried FROM searches") == []
    for number in (2, 3):
        searched(number, config={"BLOCK": number})
        with opened() as store:
            ingest(store)
            ingest(store)
            assert store.rows("SELECT tried FROM searches") == [{"tried": number}]
            assert store.rows("SELECT count(*) AS steps FROM tuning_records") == [{"steps": number}]


def test_steps_of_a_changed_source_leave_the_view_and_the_file(searched, published, opened, root, trace, write_traces):
    searched(1)
    assert len(published()) == 1
    path = Path(root, "solutions", "norm", "scale", "scale_triton", "kernel.py")
    path.write_text(path.read_text() + "# another\n")
    with opened() as store:
        ingest(store, [write_traces(trace(kind="tilelang"))])
        assert store.rows("FROM searches") == []
        publish(store, "h200", root)
    assert not (root / "traces" / "h200" / "norm" / "tuning" / "scale.jsonl.gz").exists()
