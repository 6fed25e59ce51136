"""The benchmark of loss curves on real text: what of it can run on the CPU, with a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tilegym_db import Catalog
from tilegym_db.paths import shipped_root

# A script; test_training.py has the gradients daily.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.sweep,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.turn("benchmarks/loss_curves.py"),
]

STEPS, LAYERS = 10, 2
TINY = ["--tiny", "--device", "cpu", "--dtype", "float32", "--rows", "2", "--tokens", "16", "--steps", str(STEPS)]


@pytest.fixture
def loss_curves(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(shipped_root() / "benchmarks"))
    import loss_curves

    module: ModuleType = loss_curves
    return module


def run(loss_curves: ModuleType, out: Path, *arguments: str) -> tuple[int, Any]:
    code = loss_curves.main([*TINY, *arguments, "--out", str(out)])
    return code, json.loads(out.read_text())


def test_patched_curves_of_every_variant_are_in_the_spread(
    loss_curves: ModuleType, training_kernels: Catalog, tmp_path: Path
) -> None:
    code, found = run(loss_curves, tmp_path / "curves.json")
    assert (code, found["findings"]) == (0, [])
    weights, lora, last, parts = found["results"]
    assert last["trained"] == lora["trained"] < weights["trained"] == parts["trained"]
    for result in found["results"]:
        assert len(result["patched"]["held_out"]) == 10
        assert result["figures"]["distance"] < 1e-3 < result["figures"]["spread"]
        assert result["stock"][0]["held_out"][-1] < result["stock"][0]["losses"][0]
    assert weights["patched"]["backward"]["swiglu_backward"] == STEPS * LAYERS
    assert weights["patched"]["forward"]["swiglu"] == STEPS * LAYERS
    assert lora["patched"]["backward"]["rms_norm_backward_x"] > 0
    assert last["patched"]["backward"] == lora["patched"]["backward"]
    assert last["figures"]["spread"] == lora["figures"]["spread"]
    # Two parts, and each runs its forward again for the backward.
    assert parts["patched"]["backward"]["swiglu_backward"] == 2 * STEPS * LAYERS
    assert parts["patched"]["forward"]["swiglu"] == 2 * 2 * STEPS * LAYERS
    assert parts["figures"]["spread"] == weights["figures"]["spread"]


def test_a_wrong_gradient_leaves_the_spread(
    loss_curves: ModuleType, shop: Any, training_kernels: Catalog, tmp_path: Path
) -> None:
    shop.offer("    for value in {outputs}:\n        value.neg_()\n", ops=("swiglu_backward",))
    code, found = run(loss_curves, tmp_path / "curves.json", "--variants", "all weights")
    assert code == 1
    assert found["findings"]


def result_of(**patched: Any) -> dict[str, Any]:
    """Return curves that agree but for what a test changes of the patched one."""
    stock = {"order": 0, "losses": [2.0] * 20, "held_out": [1.0, 0.5]}
    calls = {"forward": {"swiglu": 1}, "backward": {"swiglu_backward": 1}, "failures": []}
    return {"variant": "v", "stock": [stock], "patched": {**stock, **calls, **patched}}


@pytest.mark.parametrize(
    ("patched", "count"),
    [
        ({}, 0),
        ({"held_out": [1.1, 0.6]}, 0),  # at the spread
        ({"held_out": [1.2, 0.6]}, 1),
        ({"losses": [2.01] + [2.0] * 19}, 1),
        ({"losses": [2.0] * 19 + [2.5]}, 0),  # by then the weights differ
        ({"losses": [2.0] * 19 + [float("nan")]}, 1),
        ({"backward": {}}, 1),
        ({"failures": ["boom"]}, 1),
    ],
)
def test_findings_are_what_the_statistic_says(patched: dict[str, Any], count: int, loss_curves: ModuleType) -> None:
    result = result_of(**patched)
    result["figures"] = loss_curves.compared(result["stock"], result["patched"], 0.1 + 1e-9)
    assert len(loss_curves.findings_of(result, is_gpu=True)) == count


def test_a_run_without_kernels_is_a_finding_on_a_gpu_alone(loss_curves: ModuleType) -> None:
    result = result_of(forward={}, backward={})
    result["figures"] = loss_curves.compared(result["stock"], result["patched"], 0.0)
    assert loss_curves.findings_of(result, is_gpu=False) == []
    assert len(loss_curves.findings_of(result, is_gpu=True)) == 1


def test_the_spread_is_the_largest_distance_of_two_orders(loss_curves: ModuleType) -> None:
    curves = [{"held_out": values} for values in ([1.0, 1.0], [1.0, 3.0], [2.0, 1.0])]
    assert loss_curves.spread_of(curves) == pytest.approx(2.5**0.5)
    assert loss_curves.spread_of(curves[:1]) == 0.0


def test_orders_share_the_rows_and_differ_in_their_order(loss_curves: ModuleType) -> None:
    import torch

    data = loss_curves.Data(torch.arange(12).view(6, 2), torch.zeros(0, 2), 0)

    def first_pass(order: int) -> list[int]:
        batches = data.batches(2, order)
        return [int(value) for _ in range(3) for value in next(batches)[:, 0]]

    assert first_pass(0) == first_pass(0) != first_pass(1)
    assert sorted(first_pass(1)) == [0, 2, 4, 6, 8, 10]


def test_text_becomes_tokens_of_the_vocabulary(loss_curves: ModuleType) -> None:
    texts = loss_curves.library_text(20_000)
    assert 19_000 < sum(map(len, texts)) <= 20_000
    ids = loss_curves.tokens_of(texts, 300)
    assert (int(ids.min()) >= 0, int(ids.max()) < 300) == (True, True)
    assert int((ids == 0).sum()) == len(texts)  # each ends with the first token
    assert len(ids) < sum(map(len, texts))
