from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tilegym_db.catalog import Catalog
from tilegym_db.errors import RecordError
from tilegym_db.records.model_run import ModelRun
from tilegym_db.store.ingest import ingest, rebuild
from tilegym_db.store.loading import IngestReport
from tilegym_db.store.model_runs import save_model_run


def estimate(value: float) -> dict[str, float]:
    return {"median": value, "ci_low": value * 0.9, "ci_high": value * 1.1}


def timing(factor: float) -> dict[str, Any]:
    return {
        "ttft_ms": estimate(10 * factor),
        "tpot_ms": estimate(2 * factor),
        "total_ms": estimate(30 * factor),
        "tokens_per_s": 400 / factor,
        "peak_memory_bytes": 1 << 30,
    }


def model_run(**changes: Any) -> ModelRun:
    record = {
        "run_id": "one",
        "timestamp": "2026-11-21T10:00:00Z",
        "model": "tiny",
        "model_class": "LlamaForCausalLM",
        "config_digest": "0" * 64,
        "layers": 2,
        "parameters": 100,
        "dtype": "bfloat16",
        "batch": 1,
        "prompt_tokens": 8,
        "new_tokens": 12,
        "rounds": 10,
        "gpu": "h200",
        "gpu_name": "NVIDIA H200",
        "timer": "events",
        "stock": timing(1.0),
        "patched": timing(0.5),
        "ttft_speedup": estimate(2.0),
        "tpot_speedup": estimate(2.0),
        "total_speedup": estimate(2.0),
        "equal_tokens": 12,
    }
    return ModelRun.from_dict({**record, **changes})


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


def test_a_file_that_is_no_run_is_named_and_the_others_are_ingested(opened: Any, home: Path) -> None:
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


def without_steps(factor: float) -> dict[str, Any]:
    """Of a prefill alone."""
    return {**timing(factor), "tpot_ms": None, "tokens_per_s": None}


def speedups(value: float) -> dict[str, Any]:
    return {name: estimate(value) for name in ("ttft", "tpot", "total")}


LIGER = {
    "timing": timing(0.8),
    "against": {"stock": speedups(1.25), "patched": speedups(0.625)},
    "equal_tokens": 11,
    "library": "liger-kernel 1.0",
}
WAYS = """
    SELECT way, ttft_ms, tpot_ms, tokens_per_s, prefill_tokens_per_s, speedup, equal_tokens, kernels, library, reason
    FROM model_ways ORDER BY ttft_ms DESC NULLS LAST
"""


def test_every_way_of_a_run_is_a_row_and_one_that_was_absent_has_a_reason(opened: Any, home: Path) -> None:
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
        insert = "INSERT INTO model_run_records VALUES ('old', $record)"
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


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gpu_shares": {"swiglu": 0.6, "rms_norm": 0.5}}, "are no parts of one time"),
        ({"new_tokens": 0, "equal_tokens": 1}, "stock.tpot_ms is there from two new tokens on"),
        ({"stock": {**timing(1.0), "tokens_per_s": None}}, "stock.tokens_per_s is there from one new token on"),
        ({"tpot_speedup": None}, "tpot_speedup is there from two new tokens on"),
        ({"ways": {"liger": {**LIGER, "timing": without_steps(1.0)}}}, "liger.tpot_ms is there from two"),
        ({"ways": {"liger": {**LIGER, "equal_tokens": 13}}}, "equal_tokens 13 of liger are more than"),
        ({"ways": {"liger": {**LIGER, "against": {"tilegym": speedups(1.0)}}}}, "'tilegym', which is no other way"),
        ({"ways": {"liger": {**LIGER, "against": {"liger": speedups(1.0)}}}}, "'liger', which is no other way"),
        ({"ways": {"liger": {**LIGER, "against": {}}}}, "against"),
        ({"ways": {"stock": LIGER}}, "ways.stock is one of the two that every run has"),
        ({"ways": {"liger": LIGER}, "absent": {"liger": "gone"}}, "or absent as well"),
        ({"evidence_level": "op"}, "evidence_level"),
        ({"new_tokens": 1}, "new_tokens"),
        ({"equal_tokens": 13}, "are more than batch"),
        ({"timestamp": "2026-11-21T10:00:00"}, "needs a time zone"),
        ({"total_speedup": {"median": 2, "ci_low": 2.5, "ci_high": 3}}, "must lie in its interval"),
    ],
)
def test_a_run_that_cannot_be_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(RecordError, match=reason):
        model_run(**changes)
