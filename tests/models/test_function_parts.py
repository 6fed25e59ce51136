"""Functions and statements that Definitions state by their code: tokens and logits are those of the stock model."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from tilegym_db import Catalog, patched
from tilegym_db.models.any_code import OTHER_DEFAULT
from tilegym_db.models.parts.inline import NO_WEIGHT, statements_of

pytestmark = pytest.mark.sweep

TINY = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}  # fmt: skip
GROWING = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0,
    "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3, "original_max_position_embeddings": 8,
}  # fmt: skip


def tiny(kind: str, name: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    cls = getattr(importlib.import_module(f"transformers.models.{kind}.modeling_{kind}"), name)
    return cls(CONFIG_MAPPING[kind](**{**TINY, "rope_parameters": dict(GROWING), **changes})).eval()


@pytest.mark.skipif("mistral4" not in CONFIG_MAPPING, reason="this transformers has not both of them")
@pytest.mark.parametrize(
    ("kind", "name", "changes"),
    [("ministral3", "Ministral3ForCausalLM", {}), ("mistral4", "Mistral4ForCausalLM", LATENT)],
)
def test_queries_grow_with_their_position_as_in_stock(
    kind: str, name: str, changes: dict[str, Any], kernels: Catalog
) -> None:
    model = tiny(kind, name, **changes)
    ids = torch.randint(1, 96, (2, 11), generator=torch.Generator().manual_seed(0))
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    with torch.no_grad():
        stock, tokens = model(ids).logits, model.generate(ids, **options)
        with patched(model, catalog=kernels, ops=["position_scale"]) as handle:
            assert torch.equal(model(ids).logits, stock)
            assert torch.equal(model.generate(ids, **options), tokens)
    (site,) = [one for one in handle.report().sites if one.definition == "position_scale"]
    assert (site.kind, dict(site.bypassed), site.counts.kernel_calls) == ("function", {}, 2 + 2 * 4)


@pytest.mark.skipif("mistral4" not in CONFIG_MAPPING, reason="this transformers has not both of them")
def test_a_quotient_in_another_default_dtype_is_that_of_stock(kernels: Catalog) -> None:
    model = tiny("ministral3", "Ministral3ForCausalLM").bfloat16()
    ids = torch.randint(1, 96, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), patched(model, catalog=kernels, ops=["position_scale"]) as handle:
        in_float32 = model(ids).logits
        torch.set_default_dtype(torch.bfloat16)
        try:
            served = model(ids).logits
            handle.unpatch()
            stock = model(ids).logits
        finally:
            torch.set_default_dtype(torch.float32)
    (site,) = [one for one in handle.report().sites if one.definition == "position_scale"]
    assert torch.equal(served, stock)
    assert not torch.equal(in_float32, stock)
    assert (dict(site.bypassed), site.counts.kernel_calls) == ({OTHER_DEFAULT: 2}, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["qwen2_moe", "qwen3_next"])
def test_a_gated_shared_expert_is_added_as_in_stock(
    name: str, dtype: torch.dtype, build: Callable[..., Any], prompt: Callable[..., torch.Tensor], kernels: Catalog
) -> None:
    model = build(name, dtype)
    with torch.no_grad():
        stock = model(prompt(2, 5)).logits
        with patched(model, catalog=kernels, ops=["shared_expert_gate"]) as handle:
            assert torch.equal(model(prompt(2, 5)).logits, stock)
        assert handle.report().hits() == {"shared_expert_gate": model.config.num_hidden_layers}
        assert torch.equal(model(prompt(2, 5)).logits, stock)


def test_a_linear_layer_with_a_hook_keeps_its_statements(
    build: Callable[..., Any], prompt: Callable[..., torch.Tensor], poison: Catalog
) -> None:
    model, calls = build("qwen2_moe"), []
    with torch.no_grad():
        stock = model(prompt()).logits
        with patched(model, catalog=poison, ops=["shared_expert_gate"]) as handle:
            for layer in model.model.layers:
                layer.mlp.shared_expert_gate.register_forward_hook(lambda *_: calls.append(1))
            assert torch.equal(model(prompt()).logits, stock)
    (site,) = [one for one in handle.report().sites if one.definition == "shared_expert_gate"]
    assert (dict(site.bypassed), len(calls)) == ({NO_WEIGHT: 2}, 2)


@pytest.mark.parametrize("name", ["qwen2_moe", "qwen3_next"])
def test_compiled_code_adds_a_gated_shared_expert(name: str, build: Callable[..., Any], shop: Any) -> None:
    block = build(name).model.layers[0].mlp
    block.experts, block.gate = Same(), Chosen()
    states = torch.randn(1, 6, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        stock = block(states)
        with patched(block, catalog=shop.offer(ops=("shared_expert_gate",))) as handle:
            found = torch.compile(block, backend="aot_eager", fullgraph=True)(states)
    torch.compiler.reset()
    torch.testing.assert_close(found, stock)
    assert handle.report().kernel_calls == 1


@pytest.mark.turn("tilegym_db/models/parts/")  # compilation; eager code is compared daily
def test_compiled_code_keeps_a_weight_of_another_class(build: Callable[..., Any], shop: Any) -> None:
    block = build("qwen2_moe").model.layers[0].mlp
    block.experts, block.gate = Same(), Chosen()
    states = torch.randn(1, 6, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        with patched(block, catalog=shop.offer(ops=("shared_expert_gate",))) as handle:
            block.shared_expert_gate.weight = torch.nn.Parameter(block.shared_expert_gate.weight.as_subclass(Doubled))
            found = torch.compile(block, backend="aot_eager")(states)
        stock = block(states)
    torch.compiler.reset()
    torch.testing.assert_close(found, stock)
    assert handle.report().kernel_calls == 0


class Doubled(torch.Tensor):
    """A weight whose product is twice that of its numbers, as those of quantised weights are other ones."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(function, types, args, kwargs or {})
        return 2 * result.as_subclass(torch.Tensor) if function is torch.nn.functional.linear else result


class Same(torch.nn.Module):
    def forward(self, states: torch.Tensor, *_: Any) -> torch.Tensor:
        return states


class Chosen(torch.nn.Module):
    def forward(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return states, states, states


def test_a_result_that_is_read_later_is_not_left_out() -> None:
    def kept(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        y = torch.sigmoid(x) * y
        x = x + y
        return x * y

    def grown(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = torch.sigmoid(x)
        y = z * y
        z += 1
        return y

    def closed_over(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        def later() -> torch.Tensor:
            return z

        z = torch.sigmoid(x)
        y = z * y
        return y + later()

    def passed_on(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = torch.sigmoid(x)
        y = z * y
        return y + x

    found = {
        own.__name__: any("between" in one.source for one in statements_of(own))
        for own in (kept, grown, closed_over, passed_on)
    }
    assert found == {"kept": False, "grown": False, "closed_over": False, "passed_on": True}
