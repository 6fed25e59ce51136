"""Eager attention with sinks in other words than gpt-oss: a probe in float32 decides, and kernels give the tokens of stock."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import transformers

from tilegym_db import patched
from tilegym_db.models.parts import attention_sink
from tilegym_db.models.parts.attention import OTHER_VALUES

OPS = (
    "attention_sink_prefill", "attention_sink_decode", "attention_sink_masked_prefill", "attention_sink_masked_decode",
)  # fmt: skip
LAYERS = 2
SIZES = {
    "hidden_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 96, "intermediate_size": 96, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
KINDS = ["sliding_attention", "full_attention"]


def built(name: str, **more: Any) -> Any:
    torch.manual_seed(2)
    config = transformers.CONFIG_MAPPING[name](**SIZES, layer_types=KINDS, sliding_window=6, **more)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    return model


def left(handle: Any) -> dict[str, dict[str, int]]:
    sites = [site for site in handle.report().sites if site.kind == "attention_sink"]
    assert {site.reason for site in sites} == {""}
    return {site.definition: dict(site.bypassed) for site in sites}


@pytest.mark.parametrize("is_padded", [False, True])
def test_sinks_in_other_words_give_the_tokens_of_stock(is_padded: bool, shop: Any, left_padded: Any) -> None:
    model, inputs = built("flint"), left_padded((9, 4, 7) if is_padded else (9, 9))
    options = {"max_new_tokens": 4, "do_sample": False}
    stock = model.generate(**inputs, **options)
    with torch.no_grad():
        wanted = model(**inputs).logits
    with patched(model, catalog=shop.offer(ops=OPS), ops=OPS) as handle:
        assert torch.equal(model.generate(**inputs, **options), stock)
        with torch.no_grad():
            seen = inputs["attention_mask"].bool()
            torch.testing.assert_close(model(**inputs).logits[seen], wanted[seen], atol=1e-4, rtol=1e-4)
    hits = handle.report().hits()
    assert sum(hits[name] for name in OPS if name in hits) == (4 + 1) * LAYERS
    assert not any(left(handle).values())


def test_narrow_values_and_missing_sinks_are_named(shop: Any, prompt: Any, logits: Any) -> None:
    model, ids = built("mimo_v2_flash", **EXPERTS), prompt()
    stock = logits(model, ids)
    with patched(model, catalog=shop.offer(ops=OPS), ops=OPS) as handle:
        assert torch.equal(logits(model, ids), stock)
    reasons = {reason for one in left(handle).values() for reason in one}
    assert reasons == {OTHER_VALUES, attention_sink.NO_SINKS}


def test_a_function_that_weighs_sinks_otherwise_is_refused(
    shop: Any, prompt: Any, logits: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = built("flint"), prompt()

    def eager_attention_forward(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: float, **options: Any
    ) -> Any:
        key, value = (one.repeat_interleave(module.num_key_value_groups, 1) for one in (key, value))
        sinks = 2 * module.sinks.reshape(1, -1, 1, 1).expand(*query.shape[:-1], 1)
        scores = torch.cat([query @ key.mT * scaling + attention_mask, sinks], -1)
        weights = torch.softmax(scores, -1)[..., :-1]
        return (weights @ value).transpose(1, 2).contiguous(), weights

    modeling = sys.modules[type(model.model).__module__]
    monkeypatch.setattr(modeling, "eager_attention_forward", eager_attention_forward)
    stock = logits(model, ids)
    with patched(model, catalog=shop.offer(ops=OPS), ops=OPS) as handle:
        assert torch.equal(logits(model, ids), stock)
    assert {site.reason for site in handle.report().sites if site.kind == "attention_sink"} == {
        f"the results of its probe are not the bits of {name}" for name in OPS
    }


@pytest.mark.parametrize("reads", ["an option", "the module"])
def test_what_no_probe_has_is_left_to_stock(
    reads: str, shop: Any, prompt: Any, logits: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = built("flint"), prompt()

    def by_option(
        module: Any,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any,
        scaling: float,
        s_aux: Any = None,
        **options: Any,
    ) -> Any:
        scaling = scaling if s_aux is None else 2 * scaling
        key, value = (one.repeat_interleave(module.num_key_value_groups, 1) for one in (key, value))
        sinks = module.sinks.reshape(1, -1, 1, 1).expand(*query.shape[:-1], 1)
        scores = torch.cat([query @ key.mT * scaling + attention_mask, sinks], -1)
        weights = torch.softmax(scores, -1)[..., :-1]
        return (weights @ value).transpose(1, 2).contiguous(), weights

    def by_module(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: float, **options: Any
    ) -> Any:
        scaling = scaling if getattr(module, "layer_idx", None) is None else 2 * scaling
        key, value = (one.repeat_interleave(module.num_key_value_groups, 1) for one in (key, value))
        sinks = module.sinks.reshape(1, -1, 1, 1).expand(*query.shape[:-1], 1)
        scores = torch.cat([query @ key.mT * scaling + attention_mask, sinks], -1)
        weights = torch.softmax(scores, -1)[..., :-1]
        return (weights @ value).transpose(1, 2).contiguous(), weights

    modeling = sys.modules[type(model.model).__module__]
    monkeypatch.setattr(modeling, "eager_attention_forward", by_option if reads == "an option" else by_module)
    stock = logits(model, ids)
    with patched(model, catalog=shop.offer(ops=OPS), ops=OPS) as handle:
        assert torch.equal(logits(model, ids), stock)
    sites = [site for site in handle.report().sites if site.kind == "attention_sink"]
    texts = {site.reason for site in sites} | {reason for site in sites for reason in site.bypassed}
    wanted = (
        "it has the argument s_aux" if reads == "an option" else "its eager attention is not known: it reads layer_idx"
    )
    assert any(text.startswith(wanted) for text in texts)
