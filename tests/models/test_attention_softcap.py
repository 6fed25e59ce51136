"""Eager attention with a soft cap: a kernel gives the bits and tokens of stock, and other calls run stock code."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilegym_db import patched

pytestmark = pytest.mark.sweep

OP = "attention_softcap"
MODELS = ("gemma2", "vaultgemma")
TOKENS = {"max_new_tokens": 8, "do_sample": False}
WAYS: dict[str, dict[str, Any]] = {
    "dynamic cache": {},
    "static cache": {"cache_implementation": "static", "disable_compile": True},
    "chunked prefill": {"prefill_chunk_size": 4},
    "no cache": {"use_cache": False},
}


def site(handle: Any) -> Any:
    (found,) = (one for one in handle.report().sites if one.kind == "capped_attention")
    return found


@pytest.mark.parametrize("way", WAYS)
def test_tokens_with_a_soft_cap_are_those_of_stock(way: str, shop: Any, build: Any, left_padded: Any) -> None:
    model, options = build("gemma2"), {**TOKENS, **WAYS[way]}
    inputs = left_padded((9, 4, 7))
    stock = model.generate(**inputs, **options)
    with patched(model, catalog=shop.offer(ops=(OP,)), ops=[OP]) as handle:
        assert torch.equal(model.generate(**inputs, **options), stock)
    assert site(handle).counts.kernel_calls
    assert site(handle).counts.stock_calls == 0
    assert not site(handle).bypassed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_soft_cap_gives_the_bits_of_stock(
    name: str, dtype: torch.dtype, shop: Any, logits: Any, build: Any, prompt: Any
) -> None:
    model, ids = build(name, dtype), prompt(2, 12)  # more than a window of 6
    stock = logits(model, ids)
    with patched(model, catalog=shop.offer(ops=(OP,)), ops=[OP]) as handle:
        assert torch.equal(logits(model, ids), stock)
    assert handle.report().hits() == {OP: model.config.num_hidden_layers}
    assert torch.equal(logits(model, ids), stock)


def test_soft_cap_in_float16_is_left_to_stock(shop: Any, logits: Any, build: Any, prompt: Any) -> None:
    model, ids = build("gemma2", torch.float16), prompt()
    stock = logits(model, ids)
    with patched(model, catalog=shop.offer(ops=(OP,)), ops=[OP]) as handle:
        assert torch.equal(logits(model, ids), stock)
    assert not handle.report().hits().get(OP)


def test_gradients_with_a_soft_cap_are_those_of_stock(shop: Any, build: Any, prompt: Any, gradients: Any) -> None:
    model, ids = build("gemma2"), prompt(2)
    stock = gradients(model, ids)
    with patched(model, catalog=shop.offer(ops=(OP,)), ops=[OP]):
        assert all(map(torch.equal, gradients(model, ids), stock))


def test_model_without_a_soft_cap_has_other_attention(shop: Any, build: Any, prompt: Any) -> None:
    model = build("gemma2", attn_logit_softcapping=None)
    with patched(model, catalog=shop.offer()) as handle:
        kinds = {one.kind for one in handle.report().sites}
        assert ("attention" in kinds, OP in kinds) == (True, False)
        model(prompt())


def test_caller_who_wants_weights_gets_those_of_stock(shop: Any, build: Any, prompt: Any) -> None:
    model, ids = build("gemma2"), prompt()
    with torch.no_grad(), patched(model, catalog=shop.offer(ops=(OP,)), ops=[OP]) as handle:
        weights = model(ids, output_attentions=True).attentions
    assert weights[0].shape == (1, 4, 9, 9)
    assert handle.report().hits()[OP] == 0
