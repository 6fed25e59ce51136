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


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
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
