"""Training a mixture of experts: its router and its experts by kernels forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilegym_db import Catalog, patched


def gradients(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}


def assert_close(found: dict[str, torch.Tensor], stock: dict[str, torch.Tensor], tolerance: float) -> None:
    assert found.keys() == stock.keys()
    for name, want in stock.items():
        error = (found[name].double() - want.double()).norm() / want.double().norm().clamp_min(1e-30)
        assert error <= tolerance, f"{name}: relative error {float(error):.2g}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["qwen3_moe", "olmoe"])
def test_a_router_trains_with_the_gradients_of_stock(
    name: str, dtype: torch.dtype, training_kernels: Catalog, build: Any, prompt: Any
) -> None:
    model, ids = build(name, dtype).train(), prompt(2)
    stock = gradients(model, ids)
    with patched(model, catalog=training_kernels, ops=["topk_softmax"]) as handle:
        assert_close(gradients(model, ids), stock, 2e-5 if dtype == torch.float32 else 3e-2)
    hits = handle.report().hits()
    assert (hits["topk_softmax"], hits["topk_softmax_backward"]) == (2, 2)


@pytest.mark.parametrize(
    ("name", "experts"), [("qwen3_moe", "moe_experts"), ("olmoe", "moe_experts"), ("gpt_oss", "moe_experts_oai")]
)
def test_experts_train_with_the_gradients_of_stock(
    name: str, experts: str, training_kernels: Catalog, build: Any, prompt: Any
) -> None:
    model, ids = build(name, torch.bfloat16).train(), prompt(2)
    stock = gradients(model, ids)
    with patched(model, catalog=training_kernels, ops=[experts]) as handle:
        assert_close(gradients(model, ids), stock, 3e-2)
    hits = handle.report().hits()
    assert (hits[experts], hits[f"{experts}_backward"]) == (2, 2)


def test_frozen_experts_and_routers_train_on_stock(training_kernels: Catalog, build: Any, prompt: Any) -> None:
    model, ids = build("qwen3_moe", torch.bfloat16).train(), prompt(2)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("experts" not in name)
    stock = gradients(model, ids)
    with patched(model, catalog=training_kernels, ops=["moe_experts"]) as handle:
        assert_close(gradients(model, ids), stock, 0.0)
    assert handle.report().hits()["moe_experts"] == 0
