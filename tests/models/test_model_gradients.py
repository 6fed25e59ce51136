"""The benchmark of the gradients of whole models: what of it can run on the CPU, with tiny models."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tilegym_db import Catalog
from tilegym_db.paths import shipped_root

pytestmark = [pytest.mark.slow, pytest.mark.sweep]

TINY = ["--tiny", "--device", "cpu", "--dtype", "float32", "--tokens", "12"]
# name -> backward Definitions with their calls in one step
BACKWARDS = {
    "llama": {"cross_entropy_backward": 1, "rms_norm_backward": 5, "swiglu_backward": 2, "rope_neox_backward": 2},
    "gemma3": {"cross_entropy_backward": 1, "rms_norm_gemma_backward": 13, "gelu_tanh_and_mul_backward": 2},
    "phi": {"cross_entropy_backward": 1, "layer_norm_backward": 3, "gelu_new_backward": 2},
    "gpt_oss": {"cross_entropy_backward": 1, "rms_norm_fp32_backward": 5},
}


@pytest.fixture
def model_gradients(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(shipped_root() / "benchmarks"))
    import model_gradients

    module: ModuleType = model_gradients
    return module


def run(model_gradients: ModuleType, out: Path, *models: str) -> tuple[int, Any]:
    code = model_gradients.main([*TINY, "--out", str(out), "--models", *models])
    return code, json.loads(out.read_text())


@pytest.mark.parametrize("name", BACKWARDS)
def test_gradients_of_kernels_are_as_exact_as_stock(
    name: str, model_gradients: ModuleType, training_kernels: Catalog, tmp_path: Path
) -> None:
    code, found = run(model_gradients, tmp_path / "gradients.json", name)
    (result,) = found["results"]
    assert (code, found["findings"], result["absent"]) == (0, [], [])
    assert {op: result["backward"][op] for op in BACKWARDS[name]} == BACKWARDS[name]
    # Far below float32's bound: the fp64 copy is no float32 in disguise, and neither is stock.
    assert all(1e-9 < one["stock"] < 1e-5 for one in result["weights"].values())


def test_a_gradient_that_is_a_little_off_is_a_finding(
    model_gradients: ModuleType, shop: Any, training_kernels: Catalog, tmp_path: Path
) -> None:
    scaled = "    gradients = grad_out.float()\n    for value in {outputs}:\n        value.copy_(gradients * 1.001)\n"
    shop.offer(scaled, ops=("gelu_new_backward",))
    code, found = run(model_gradients, tmp_path / "gradients.json", "phi")
    assert code == 1
    assert any(text.startswith("phi: model.layers.0.mlp.fc1.weight is ") for text in found["findings"])


def test_errors_are_relative_to_fp64(model_gradients: ModuleType) -> None:
    exact = torch.tensor([3.0, 4.0], dtype=torch.float64)
    stock, patched = exact.to(torch.bfloat16), torch.tensor([3.0, 4.5], dtype=torch.bfloat16)
    found = model_gradients.errors_of(patched, stock, exact)
    assert (found["stock"], found["patched"]) == (0.0, pytest.approx(0.1))
    assert found["allowed"] == 0.0
    assert model_gradients.errors_of(patched * float("nan"), stock, exact)["patched"] == float("inf")
    assert model_gradients.errors_of(None, stock, exact)["patched"] == float("inf")


def test_a_run_without_kernels_is_a_finding_on_a_gpu_alone(model_gradients: ModuleType) -> None:
    result = {"model": "m", "weights": {}, "absent": [], "failures": [], "forward": {}, "backward": {}}
    assert model_gradients.findings_of(result, is_gpu=False) == []
    assert len(model_gradients.findings_of(result, is_gpu=True)) == 1
