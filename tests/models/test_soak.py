"""The soak on a tiny model with kernels for the CPU, and what it makes of figures that are not as they should be."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tilegym_db import Catalog
from tilegym_db.paths import shipped_root

# A script; decoding is tested elsewhere.
pytestmark = [pytest.mark.slow, pytest.mark.sweep, pytest.mark.turn("benchmarks/soak")]

MIB = 1 << 20


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(shipped_root() / "benchmarks"))
    import soak

    module: ModuleType = soak
    gc.freeze()  # the script collects after every episode, and would look through all that was imported for the other tests
    yield module
    gc.unfreeze()


def run(
    soak: ModuleType, monkeypatch: pytest.MonkeyPatch, out: Path, steps: int, *more: str
) -> tuple[int, dict[str, Any]]:
    sizes = ["--layers", "1", "--longest", "12", "--episode", "8", *more]
    monkeypatch.setattr(sys, "argv", ["soak.py", "--gpu", "cpu", "--steps", str(steps), "--out", str(out), *sizes])
    return soak.main(), json.loads(out.read_text())


def test_two_hundred_mixed_steps_are_stocks_and_keep_memory(
    soak: ModuleType, kernels: Catalog, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code, results = run(soak, monkeypatch, tmp_path / "soak.json", 200)
    assert results["violations"] == []
    assert code == 0
    assert results["run"]["steps"] == 200
    comparison = results["comparison"]
    assert comparison["tokens"] > 400
    assert comparison["wrong_tokens"] == []
    assert 0 < comparison["error_against_precise"]["patched"] == comparison["error_against_precise"]["stock"] < 1e-5
    assert results["hits"]["rms_norm"] == 2 * (200 + results["episodes"])
    assert results["hits"]["attention_prefill"] > 0  # some prompts have no padding
    assert results["memory_growth"].keys() == {"host"}


def test_a_wrong_kernel_is_found(soak: ModuleType, shop: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shop.offer("    for out in {outputs}:\n        out.copy_(-50 * stock.run({inputs}))\n", ops=("swiglu",))
    code, results = run(soak, monkeypatch, tmp_path / "soak.json", 60)
    assert code == 1
    assert results["comparison"]["wrong_tokens"]
    assert any(text.startswith("another token than stock, which could tell") for text in results["violations"])
    assert any(text.startswith("error against the precise model") for text in results["violations"])


@pytest.mark.parametrize("alone", [(), ("--alone",)])
def test_growth_of_the_control_is_allowed_to_the_run(
    alone: tuple[str, ...], soak: ModuleType, kernels: Catalog, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "control.json"
    code, control = run(soak, monkeypatch, file, 30, "--control", *alone)
    assert (code, control["control"], control["hits"]) == (0, True, {})
    assert control["comparison"] is None if alone else control["comparison"]["differing_tokens"] == 0
    control["memory_growth"]["host"]["bytes_per_1000_steps"] = 10**12
    file.write_text(json.dumps(control))
    code, results = run(soak, monkeypatch, tmp_path / "soak.json", 30, "--against", str(file), *alone)
    assert (code, results["control"], results["violations"]) == (0, False, [])
    assert results["memory_growth"]["host"]["limit"] > 10**10


def test_model_alone_runs_kernels_in_the_same_episodes(
    soak: ModuleType, kernels: Catalog, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code, beside = run(soak, monkeypatch, tmp_path / "beside.json", 30)
    models: list[Any] = []
    run_episode = soak.run_episode
    monkeypatch.setattr(soak, "run_episode", lambda given, *rest: models.append(given) or run_episode(given, *rest))
    code, results = run(soak, monkeypatch, tmp_path / "alone.json", 30, "--alone")
    assert (code, results["violations"], results["comparison"]) == (0, [], None)
    assert {len(given) for given in models} == {1}
    assert results["run"] == {**beside["run"], "alone": True}
    assert (results["episodes"], results["hits"]) == (beside["episodes"], beside["hits"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"run": {"alone": False}}, "alone False there and True here"),
        ({"run": {"seed": 1}}, "seed 1 there and 0 here"),
        ({"run": {"steps": 50}}, "steps 50 there and 60 here"),
        ({"run": {"dtype": "float16"}}, "dtype float16 there and float32 here"),
        ({"control": False}, "it is of no control"),
    ],
)
def test_a_run_is_not_held_against_the_control_of_another(
    changes: dict[str, Any],
    message: str,
    soak: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    same = asdict(soak.Run("cpu", "float32", 1, 60, 12, 8, 0, alone=True))
    control = {"control": True, "memory_growth": {"host": {"bytes_per_1000_steps": 7}}, **changes}
    file = tmp_path / "other.json"
    file.write_text(json.dumps({**control, "run": {**same, **changes.get("run", {})}}))
    with pytest.raises(SystemExit):
        run(soak, monkeypatch, tmp_path / "soak.json", 60, "--alone", "--against", str(file))
    assert message in capsys.readouterr().err


def test_without_kernels_nothing_was_tested(
    soak: ModuleType, home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code, results = run(soak, monkeypatch, tmp_path / "soak.json", 30)
    assert code == 1
    assert "no kernel ran: the report says why" in results["violations"]


def figures(soak: ModuleType, patched: list[float], stock: list[float], precise: list[float]) -> torch.Tensor:
    found: torch.Tensor = soak.compared(*(torch.tensor([row]) for row in (patched, stock, precise)))
    return found


@pytest.mark.parametrize(
    ("patched", "stock", "precise", "wrong"),
    [
        ([1.0, 2.0, 0.0], [1.0, 2.0, 0.0], [0.0, 3.0, 0.0], False),  # the same token, whatever the error
        ([2.0, 1.5, 0.0], [1.5, 2.0, 0.0], [1.5, 1.9, 0.0], True),  # a margin of 0.5 with an error of 0.1
        ([2.0, 1.5, 0.0], [1.5, 2.0, 0.0], [1.5, 1.8, 0.0], False),  # with one of 0.2
        ([2.0, 2.0, 0.0], [0.0, 2.0, 2.0], [0.0, 2.0, 2.0], False),  # two best that are equal
        ([float("nan"), 2.0, 0.0], [0.0, 2.0, 0.0], [0.0, 1.9, 0.0], True),
        ([1.0, 2.0, 0.0], [float("nan"), 2.0, 0.0], [0.0, 2.0, 0.0], True),
    ],
)
def test_other_token_is_allowed_only_if_stock_is_undecided(
    soak: ModuleType, patched: list[float], stock: list[float], precise: list[float], wrong: bool
) -> None:
    assert soak.wrong_rows(figures(soak, patched, stock, precise)).tolist() == [wrong]


COMPARISON: dict[str, Any] = {
    "wrong_tokens": [],
    "error_against_precise": {"patched": 0.01, "stock": 0.01},
}
GOOD: dict[str, Any] = {
    "comparison": COMPARISON,
    "memory_growth": {"host": {"bytes": 1000, "limit": 64 * MIB, "not_judged": ""}},
    "hits": {"rms_norm": 3, "attention_decode": 0},
    "failures": [],
}
GREW = {"bytes": 9 * MIB, "limit": 8 * MIB, "not_judged": ""}


@pytest.mark.parametrize(
    ("changes", "violation"),
    [
        ({"comparison": {**COMPARISON, "wrong_tokens": ["episode 3"] * 7}}, "and 2 tokens more"),
        (
            {"comparison": {**COMPARISON, "error_against_precise": {"patched": 0.013, "stock": 0.01}}},
            "0.013 patched, 0.01 stock",
        ),
        (
            {"comparison": {**COMPARISON, "error_against_precise": {"patched": float("nan"), "stock": 0.01}}},
            "nan patched",
        ),
        ({"memory_growth": {"gpu": GREW}}, "gpu memory grew by 9,437,184 bytes"),
        ({"memory_growth": {"host": GREW}, "comparison": None}, "host memory grew by 9,437,184 bytes"),
        ({"hits": {"rms_norm": 0}}, "no kernel ran"),
        ({"failures": ["a failed"]}, "a kernel failed: a failed"),
    ],
)
def test_each_thing_that_does_not_hold_is_a_violation(soak: ModuleType, changes: Any, violation: str) -> None:
    assert soak.violations(GOOD) == []
    assert violation in soak.violations({**GOOD, **changes})[-1]


@pytest.mark.parametrize(
    ("gpu", "alone", "judged"),
    [("cpu", False, True), ("cpu", True, True), ("h200", False, False), ("h200", True, True)],
)
def test_gpu_run_alone_has_its_host_memory_judged(soak: ModuleType, gpu: str, alone: bool, judged: bool) -> None:
    of = soak.Run(gpu, "bfloat16", 2, 1000, 12, 8, 0, alone)
    leaking = [soak.Sample(step, step * MIB, None if gpu == "cpu" else 7) for step in range(0, 1001, 10)]
    growth = soak.memory_growth(leaking, of)
    assert growth["host"]["bytes"] == 750 * MIB
    assert all(not found["not_judged"] for kind, found in growth.items() if kind == "gpu")
    found = soak.violations({**GOOD, "memory_growth": growth})
    assert [text.split(" by ")[0] for text in found] == (["host memory grew"] if judged else [])
    assert judged or "--alone" in growth["host"]["not_judged"]


def test_growth_is_a_slope_after_the_warm_up(soak: ModuleType) -> None:
    of = soak.Run("h200", "bfloat16", 2, 1000, 12, 8, 0, alone=True)
    warming = [soak.Sample(step, step * MIB, None) for step in range(0, 250, 10)]
    level = [soak.Sample(step, (250 + (step % 20)) * MIB, 7) for step in range(250, 1001, 10)]
    growth = soak.memory_growth([*warming, *level], of)
    assert abs(growth["host"]["bytes"]) < MIB
    assert growth["gpu"] == {"bytes": 0, "bytes_per_1000_steps": 0, "limit": 8 * MIB, "not_judged": ""}
    leaking = [soak.Sample(step, 100 * MIB, step * 20000) for step in range(0, 1001, 10)]
    found = soak.memory_growth(leaking, of, control=20_000_000)
    assert found["gpu"]["bytes_per_1000_steps"] == 20_000_000
    assert found["gpu"]["bytes"] == 15_000_000
    assert (found["gpu"]["limit"], found["host"]["limit"]) == (8 * MIB, 64 * MIB + 15_000_000)
    with pytest.raises(ValueError, match="needs three samples"):
        soak.growth_bytes([(0, 1), (1, 1)])


def test_episodes_have_the_requested_steps_and_all_shapes(soak: ModuleType) -> None:
    drawn = list(soak.episodes(2000, 64, 16, seed=1))
    assert drawn == list(soak.episodes(2000, 64, 16, seed=1))
    assert sum(episode.steps for episode in drawn) == 2000
    assert {len(episode.lengths) for episode in drawn} == {1, 2, 3, 4, 8}
    assert {len(set(episode.lengths)) == 1 for episode in drawn} == {True, False}


def test_padded_prompts_are_padded_on_the_left(soak: ModuleType) -> None:
    ids, mask = soak.tokens_of(soak.Episode((2, 4), 3), 50, 0, "cpu")
    assert ids.shape == (2, 7)
    assert mask.tolist() == [[0, 0, 1, 1, 1, 1, 1], [1] * 7]
    assert ids[0, :2].tolist() == [0, 0]
    assert (ids[mask.bool()] > 0).all()
