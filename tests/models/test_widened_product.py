"""Products in float32 of half precision operands: kernels read both as they are, and other code runs as before."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilegym_db import patched
from tilegym_db.models.call_site import AUTOCAST, IN_TRAINING, NEEDS_GRAD
from tilegym_db.models.parts import widened_product

OP = "gemm_widened"
ROUTER = "topk_sigmoid_bias_groups"
TOKENS = {"max_new_tokens": 4, "do_sample": False}


def row(handle: Any) -> Any:
    (found,) = (one for one in handle.report().sites if one.kind == widened_product.KIND)
    return found


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "glm_moe_dsa"])
def test_scores_of_a_router_give_the_bits_of_stock(name: str, shop: Any, logits: Any, build: Any, prompt: Any) -> None:
    model, ids = build(name, torch.bfloat16), prompt(2, 12)
    stock = logits(model, ids)
    with patched(model, catalog=shop.offer(ops=(OP,)), ops=[OP]) as handle:
        assert torch.equal(logits(model, ids), stock)
    assert handle.report().hits()[OP] == row(handle).modules > 0
    assert not row(handle).bypassed
    assert torch.equal(logits(model, ids), stock)


def router_of(model: Any) -> Any:
    return next(module for module in model.modules() if type(module).__name__ == "DeepseekV3TopkRouter")


def test_a_product_and_the_choice_after_it_are_both_served(shop: Any, logits: Any, build: Any, prompt: Any) -> None:
    model, ids = build("deepseek_v3", torch.bfloat16), prompt(2, 12)
    router = router_of(model)
    router.e_score_correction_bias = router.e_score_correction_bias.float()
    stock = logits(model, ids)
    with patched(model, catalog=shop.offer(ops=(OP, ROUTER)), ops=[OP, ROUTER]) as handle:
        assert torch.equal(logits(model, ids), stock)
    assert handle.report().hits() == {OP: 1, ROUTER: 1}


def test_operands_of_two_dtypes_keep_the_product_of_stock(shop: Any, logits: Any, build: Any, prompt: Any) -> None:
    model, ids = build("deepseek_v3", torch.bfloat16), prompt(2, 12)
    router_of(model).float()
    stock = logits(model, ids)
    router_of(model).to(torch.bfloat16)
    with patched(model, catalog=shop.offer(ops=(OP,)), ops=[OP]) as handle:
        router_of(model).float()
        assert torch.equal(logits(model, ids), stock)
    assert row(handle).bypassed == {widened_product.OTHER_DTYPES: 1}


def test_gradients_of_a_router_are_those_of_stock(shop: Any, build: Any, prompt: Any, gradients: Any) -> None:
    model, ids = build("deepseek_v3", torch.bfloat16), prompt(2)
    stock = gradients(model, ids)
    with patched(model, catalog=shop.offer(ops=(OP,)), ops=[OP]) as handle:
        assert all(map(torch.equal, gradients(model, ids), stock))
    assert row(handle).bypassed.keys() <= {NEEDS_GRAD, IN_TRAINING}
    assert not handle.report().hits()[OP]


def test_autocast_chooses_the_dtype_of_a_product(shop: Any, build: Any, prompt: Any) -> None:
    model, ids = build("deepseek_v3", torch.bfloat16), prompt()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        stock = model(ids).logits
        with patched(model, catalog=shop.offer(ops=(OP,)), ops=[OP]) as handle:
            assert torch.equal(model(ids).logits, stock)
    assert row(handle).bypassed.keys() == {AUTOCAST}


def test_tokens_of_a_patched_mixture_are_those_of_stock(shop: Any, build: Any, prompt: Any) -> None:
    model, ids = build("deepseek_v3", torch.bfloat16), prompt()
    stock = model.generate(ids, **TOKENS)
    with patched(model, catalog=shop.offer(ops=(OP,)), ops=[OP]) as handle:
        assert torch.equal(model.generate(ids, **TOKENS), stock)
    assert handle.report().hits()[OP] == TOKENS["max_new_tokens"] * row(handle).modules


def other_products(self: Any, x: torch.Tensor) -> torch.Tensor:
    wide = torch.nn.functional.linear(x.float(), self.weight.float())
    return wide + torch.nn.functional.linear(x.float(), self.other.float())


def product_of_a_call(self: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(self.norm(x).float(), self.weight.float())


def product_of_doubles(self: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(x.to(torch.float64), self.weight.to(torch.float64))


@pytest.mark.parametrize("forward", [other_products, product_of_a_call, product_of_doubles])
def test_other_products_are_no_part(forward: Any) -> None:
    assert widened_product.product_of(forward) is None
