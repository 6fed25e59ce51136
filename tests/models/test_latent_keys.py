"""Keys of latent attention: kernels put both parts together, and other code runs as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilegym_db import patched
from tilegym_db.models.call_site import IN_TRAINING, NEEDS_GRAD
from tilegym_db.models.parts import latent_keys

OP = "mla_expand_keys"
TOKENS = {"max_new_tokens": 6, "do_sample": False}


def row(handle: Any) -> Any:
    (found,) = (one for one in handle.report().sites if one.kind == latent_keys.KIND)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_latent_keys_give_the_bits_of_stock(
    name: str, dtype: torch.dtype, shop: Any, logits: Any, build: Any, prompt: Any
) -> None:
    model, ids = build(name, dtype), prompt(2, 12)
    stock = logits(model, ids)
    with patched(model, catalog=shop.offer(ops=(OP,)), ops=[OP]) as handle:
        assert torch.equal(logits(model, ids), stock)
    assert handle.report().hits() == {OP: model.config.num_hidden_layers}
    assert torch.equal(logits(model, ids), stock)


def test_tokens_with_latent_keys_are_those_of_stock(shop: Any, build: Any, left_padded: Any) -> None:
    model, inputs = build("deepseek_v3"), left_padded((9, 4, 7))
    stock = model.generate(**inputs, **TOKENS)
    with patched(model, catalog=shop.offer(ops=(OP,)), ops=[OP]) as handle:
        assert torch.equal(model.generate(**inputs, **TOKENS), stock)
    assert row(handle).counts.kernel_calls == TOKENS["max_new_tokens"] * model.config.num_hidden_layers
    assert not row(handle).bypassed


def test_gradients_with_latent_keys_are_those_of_stock(shop: Any, build: Any, prompt: Any, gradients: Any) -> None:
    model, ids = build("deepseek_v3"), prompt(2)
    stock = gradients(model, ids)
    with patched(model, catalog=shop.offer(ops=(OP,)), ops=[OP]) as handle:
        assert all(map(torch.equal, gradients(model, ids), stock))
    assert row(handle).bypassed.keys() <= {NEEDS_GRAD, IN_TRAINING}
    assert not handle.report().hits()[OP]


def test_only_a_trained_projection_leaves_keys_to_stock(shop: Any, build: Any, prompt: Any) -> None:
    model, ids = build("deepseek_v3").requires_grad_(False), prompt()
    model.model.layers[0].self_attn.kv_b_proj.weight.requires_grad_(True)

    def gradient() -> torch.Tensor:
        model.zero_grad()
        model(ids).logits.square().sum().backward()
        found: torch.Tensor = model.model.layers[0].self_attn.kv_b_proj.weight.grad.clone()
        return found

    stock = gradient()
    with patched(model, catalog=shop.offer(ops=(OP,)), ops=[OP]) as handle:
        assert torch.equal(gradient(), stock)
    assert NEEDS_GRAD in row(handle).bypassed


def test_a_method_of_the_instance_is_called(shop: Any, build: Any, prompt: Any) -> None:
    model, calls = build("deepseek_v3"), []
    attention = model.model.layers[0].self_attn
    own = attention.expand_kv
    with torch.no_grad(), patched(model, catalog=shop.offer(ops=(OP,)), ops=[OP]) as handle:
        attention.expand_kv = lambda *given: calls.append(1) or own(*given)
        model(prompt())
    assert calls == [1]
    assert handle.report().hits()[OP] == model.config.num_hidden_layers - 1


def test_attention_without_latents_has_no_such_row(shop: Any, build: Any) -> None:
    with patched(build("llama"), catalog=shop.offer(ops=(OP,))) as handle:
        assert latent_keys.KIND not in {one.kind for one in handle.report().sites}
