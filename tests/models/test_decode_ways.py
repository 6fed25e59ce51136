"""The benchmark of ways to decode, and the soak of graphs: what of them can run on the CPU, with tiny models."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tilegym_db import Catalog
from tilegym_db.paths import shipped_root

pytestmark = pytest.mark.slow


@pytest.fixture
def decode_ways(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(shipped_root() / "benchmarks"))
    import decode_ways

    module: ModuleType = decode_ways
    return module


@pytest.fixture
def soak_graphs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(shipped_root() / "benchmarks"))
    import soak_graphs

    module: ModuleType = soak_graphs
    return module


def job(decode_ways: ModuleType) -> Any:
    return decode_ways.Job("llama-3.2-1b", None, "cpu", "float32", (1,), 4, 2, 6, tiny=True)


def way(pairs: dict[int, list[tuple[float, float]]], **attributes: Any) -> Any:
    fields = {"name": "stock", "status": "", "reason": "", "version": "1", "said": {}}
    tokens = {batch: [1, 2, 3] for batch in pairs}
    return SimpleNamespace(**{**fields, "pairs": pairs, "tokens": tokens, **attributes})


@pytest.mark.nightly  # the next test starts a way daily, and those after it ask what the times of ways become
def test_ways_answer_in_turns_within_the_limit(decode_ways: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "ways.jsonl"
    sizes = ["--prompt", "4", "--short", "2", "--long", "6", "--rounds", "1", "--time-limit", "500"]
    tiny = ["llama-3.2-1b", "--tiny", "--device", "cpu", "--dtype", "float32", *sizes]
    assert decode_ways.main([*tiny, "--ways", "stock", "patched", "--out", str(out)]) == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(one["way"], one["status"], one["ms"]["rounds"]) for one in records] == [
        ("stock", "measured", 1),
        ("patched", "measured", 1),
    ]
    assert [one["same_tokens_as_stock"] for one in records] == [1.0, 1.0]


def test_way_that_is_late_is_ended_with_the_reason(decode_ways: ModuleType) -> None:
    (record,) = decode_ways.measure(job(decode_ways), ["stock"], 1, 0.5)
    assert (record["status"], "ms" in record) == (decode_ways.LATE, False)


def test_token_time_is_the_difference_of_two_lengths(decode_ways: ModuleType) -> None:
    one = way({1: [(1.0, 1.4), (1.0, 1.8), (1.0, 1.2)]})
    record = decode_ways.record(job(decode_ways), 1, one, [one])
    assert record["ms"]["median"] == pytest.approx(100)
    assert (record["ms"]["least"], record["ms"]["most"]) == (pytest.approx(50), pytest.approx(200))
    assert record["tokens_per_second"] == pytest.approx(10)


def test_table_has_a_line_for_each_record(decode_ways: ModuleType) -> None:
    one, none = way({1: [(1.0, 1.4)]}), way({}, status="absent", reason="it is not installed")
    records = [decode_ways.record(job(decode_ways), 1, each, [one]) for each in (one, none)]
    _, measured, absent = decode_ways.table(records).splitlines()
    assert "10.0" in measured
    assert absent.endswith("it is not installed")


@pytest.mark.turn("benchmarks/decode_ways.py", "benchmarks/soak")  # a script; decoding is tested elsewhere
def test_soak_replays_graphs_with_stocks_sequences(soak_graphs: ModuleType, kernels: Catalog, tmp_path: Path) -> None:
    out = tmp_path / "soak.json"
    sizes = ["--steps", "120", "--longest", "6", "--episode", "24", "--models", "llama-3.2-1b"]
    code = soak_graphs.main(["--gpu", "cpu", *sizes, "--out", str(out)])
    found = json.loads(out.read_text())
    assert (code, found["violations"]) == (0, [])
    model = found["models"]["llama-3.2-1b"]
    assert model["graphs"]["replayed"] > 0
    assert model["comparison"]["tokens"] > 50


def test_soak_finds_another_sequence_and_a_larger_error(soak_graphs: ModuleType) -> None:
    errors = {"patched": 0.2, "stock": 0.1}
    model = {
        "other_sequences": ["episode 3"],
        "failures": [],
        "graphs": {"replayed": 1},
        "steps_after_prompt": 100,
        "has_experts": True,
        "comparison": {"error_against_precise": errors, "wrong_tokens": ["row 1"]},
    }
    growth = {"gpu": {"bytes": 5, "limit": 4}, "host": None}
    assert len(soak_graphs.violations({"models": {"one": model}, "memory_growth": growth})) == 4


def test_forced_rows_end_where_the_episode_says(soak_graphs: ModuleType) -> None:
    forced = soak_graphs.Forced(torch.tensor([[5, 6, 7], [5, 6, 7]]), soak_graphs.Stops((None, 1), 2))
    ids, scores = torch.zeros(2, 1, dtype=torch.long), torch.randn(2, 9)
    assert forced.process(ids, scores).argmax(-1).tolist() == [5, 5]
    assert not forced.stop(ids).any()
    assert forced.process(ids, scores).argmax(-1).tolist() == [6, soak_graphs.END]
    assert forced.stop(ids).all()
