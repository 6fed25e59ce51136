"""Attention that a module computes itself: kernels serve it with the tokens of stock, and other calls run stock code."""

from __future__ import annotations

from types import MethodType
from typing import Any

import pytest
import torch
import transformers as hf

from tilegym_db import patched
from tilegym_db.models.parts import own_attention
from tilegym_db.models.parts.attention import DROPOUT, WEIGHTS

OP = "attention_bias"
TOKENS = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
COMMON = {"vocab_size": 96, "bos_token_id": 1, "eos_token_id": 2}
HEADS, LAYERS, WINDOW = 8, 2, 4
DROPS = ("attn_dropout", "attention_dropout")
GPT = {"n_embd": 64, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 64, **COMMON}
WIDE = {"hidden_size": 64, "max_position_embeddings": 64, **COMMON}
CONFIGS = {
    "gptj": lambda: hf.GPTJConfig(rotary_dim=8, **GPT),
    "codegen": lambda: hf.CodeGenConfig(rotary_dim=8, **GPT),
    "gpt_neo": lambda: hf.GPTNeoConfig(
        num_layers=LAYERS, attention_types=[[["global", "local"], 1]], num_heads=HEADS, window_size=WINDOW, **WIDE
    ),
    "gpt_neox_japanese": lambda: hf.GPTNeoXJapaneseConfig(num_hidden_layers=LAYERS, num_attention_heads=HEADS, **WIDE),
    "bloom": lambda: hf.BloomConfig(hidden_size=64, n_layer=LAYERS, n_head=HEADS, **COMMON),
}


def built(name: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(3)
    model = hf.AutoModelForCausalLM.from_config(CONFIGS[name]()).to(dtype).eval()
    with torch.no_grad():  # scores that differ, so that a mask or a scale shows
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.dim() == 2 else 1)
    return model


def row(handle: Any) -> Any:
    (found,) = (one for one in handle.report().sites if one.kind == own_attention.KIND)
    return found


def logits(model: Any, **inputs: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(**inputs).logits
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_own_attention_is_served_as_in_stock(name: str, shop: Any, left_padded: Any) -> None:
    model, inputs = built(name), left_padded((12, 7, 9))
    stock, seen = logits(model, **inputs), inputs["attention_mask"].bool()
    with patched(model, catalog=shop.offer(ops=(OP,)), ops=[OP]) as handle:
        torch.testing.assert_close(logits(model, **inputs)[seen], stock[seen], atol=1e-4, rtol=1e-4)
    found = row(handle)
    assert (found.reason, dict(found.bypassed), found.counts.kernel_calls) == ("", {}, LAYERS)
    assert torch.equal(logits(model, **inputs), stock)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_of_own_attention_are_those_of_stock(name: str, cache: str, shop: Any, left_padded: Any) -> None:
    if cache == "static" and name == "gpt_neo":
        cache = "dynamic"  # its flags are those of the last positions, so it has no cache of fixed size
    model, inputs = built(name), left_padded((12, 7, 9))
    options = TOKENS | ({"cache_implementation": cache, "disable_compile": True} if cache == "static" else {})
    stock = model.generate(**inputs, **options)
    with patched(model, catalog=shop.offer(ops=(OP,)), ops=[OP]) as handle:
        assert torch.equal(model.generate(**inputs, **options), stock)
    found = row(handle)
    assert (dict(found.bypassed), found.counts.stock_calls, found.counts.kernel_calls) == ({}, 0, 6 * LAYERS)


@pytest.mark.parametrize("name", CONFIGS)
def test_bf16_is_as_near_to_float32_as_stock(name: str, shop: Any, prompt: Any) -> None:
    model, ids = built(name), prompt(2, 12)
    exact = logits(model, input_ids=ids)
    model.bfloat16()
    stock = (logits(model, input_ids=ids).float() - exact).norm()
    with patched(model, catalog=shop.offer(ops=(OP,)), ops=[OP]) as handle:
        found = (logits(model, input_ids=ids).float() - exact).norm()
    assert row(handle).counts.kernel_calls == LAYERS
    assert 0 < found <= 1.25 * stock


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_and_dropout_are_left_to_stock(name: str, shop: Any, prompt: Any) -> None:
    model, ids = built(name), prompt()
    with torch.no_grad():
        stock = model(ids, output_attentions=True).attentions
        with patched(model, catalog=shop.offer(ops=(OP,)), ops=[OP]) as handle:
            assert all(map(torch.equal, model(ids, output_attentions=True).attentions, stock))
            for drop in dropouts(model):
                drop.p = 0.5
                drop.train()
            model(ids)
    assert dict(row(handle).bypassed) == {WEIGHTS: LAYERS, DROPOUT: LAYERS}


def attentions(model: Any) -> list[Any]:
    """Return the modules that compute attention."""
    return [module for module in model.modules() if any(name in module._modules for name in DROPS)]


def dropouts(model: Any) -> list[torch.nn.Module]:
    """Return the dropouts of attention weights."""
    return [module._modules[name] for module in attentions(model) for name in DROPS if name in module._modules]


class Doubled(torch.nn.Module):
    """Something else in place of a dropout."""

    def forward(self, weights: torch.Tensor) -> torch.Tensor:
        return 2 * weights


@pytest.mark.parametrize("name", CONFIGS)
def test_what_reads_or_changes_weights_still_gets_them(name: str, shop: Any, prompt: Any) -> None:
    model, ids, seen = built(name), prompt(1, 9), list[Any]()
    with patched(model, catalog=shop.offer(ops=(OP,)), ops=[OP]) as handle:
        first, second = attentions(model)
        hooks = [
            first.register_forward_hook(lambda module, args, out: seen.append(out[1])),
            dropouts(model)[1].register_forward_hook(lambda module, args, out: seen.append(out)),
        ]
        logits(model, input_ids=ids)
        assert [weights.shape for weights in seen] == [(1, HEADS, 9, 9)] * 2
        for hook in hooks:
            hook.remove()
        (drop,) = (name for name in DROPS if name in second._modules)
        setattr(second, drop, Doubled())
        found = logits(model, input_ids=ids)
    torch.testing.assert_close(found, logits(model, input_ids=ids), atol=1e-4, rtol=1e-4)
    assert dict(row(handle).bypassed) == {own_attention.HOOKED: 1, own_attention.OTHER_DROPOUT: 2}
    assert row(handle).counts.kernel_calls == 1


@pytest.mark.parametrize(
    ("name", "attribute", "served"),
    [
        ("gptj", "scale_attn", True),
        ("codegen", "scale_attn", True),
        ("gpt_neox_japanese", "norm_factor", True),
        ("bloom", "inv_norm_factor", True),
        ("bloom", "beta", False),
    ],
)
def test_numbers_that_change_after_the_patch_are_used(
    name: str, attribute: str, served: bool, shop: Any, prompt: Any
) -> None:
    model, ids = built(name), prompt(2, 12)
    before = logits(model, input_ids=ids)
    with patched(model, catalog=shop.offer(ops=(OP,)), ops=[OP]) as handle:
        for module in attentions(model):
            setattr(module, attribute, 0.5 * getattr(module, attribute))
        found = logits(model, input_ids=ids)
    torch.testing.assert_close(found, logits(model, input_ids=ids), atol=1e-4, rtol=1e-4)
    assert (found - before).abs().max() > 1e-2
    assert row(handle).counts.kernel_calls == (LAYERS if served else 0)


def test_a_method_that_its_class_gets_later_is_called(shop: Any, prompt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = built("gptj"), prompt()
    with patched(model, catalog=shop.offer(ops=(OP,)), ops=[OP]) as handle:
        known = hf.models.gptj.modeling_gptj.GPTJAttention._attn
        monkeypatch.setattr(
            hf.models.gptj.modeling_gptj.GPTJAttention, "_attn", lambda self, q, k, v, mask: known(self, q, k, -v, mask)
        )
        found = logits(model, input_ids=ids)
    assert torch.equal(found, logits(model, input_ids=ids))
    assert dict(row(handle).bypassed) == {own_attention.OTHER_METHOD: LAYERS}


def test_a_mask_is_spread_once_for_a_size_without_a_kernel(
    shop: Any, prompt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids, spread = built("bloom"), prompt(2, 12), list[int]()
    stock, own = logits(model, input_ids=ids), own_attention.asked
    with patched(model, catalog=shop.offer(ops=(OP,), smallest=64), ops=[OP]) as handle:
        monkeypatch.setattr(own_attention, "asked", lambda *given: (spread.append(1), own(*given))[1])
        for _ in range(3):
            assert torch.equal(logits(model, input_ids=ids), stock)
    assert len(spread) == 1
    assert dict(row(handle).bypassed) == {own_attention.UNSERVED: 3 * LAYERS - 1}


def test_gradients_of_own_attention_are_those_of_stock(shop: Any, prompt: Any, gradients: Any) -> None:
    model, ids = built("bloom"), prompt(2)
    stock = gradients(model, ids)
    with patched(model, catalog=shop.offer(ops=(OP,)), ops=[OP]):
        assert all(map(torch.equal, gradients(model, ids), stock))


def test_a_method_of_the_instance_is_called(shop: Any, prompt: Any) -> None:
    model, ids, calls = built("gptj"), prompt(), list[int]()
    attention = model.transformer.h[0].attn
    own = attention._attn
    with patched(model, catalog=shop.offer(ops=(OP,)), ops=[OP]) as handle:
        attention._attn = MethodType(lambda self, *given: (calls.append(1), own(*given))[1], attention)
        logits(model, input_ids=ids)
    assert (len(calls), row(handle).counts.kernel_calls) == (1, LAYERS - 1)


def test_another_method_is_left_to_stock(shop: Any, prompt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = built("gptj"), prompt()

    def _attn(self: Any, query: Any, key: Any, value: Any, attention_mask: Any = None) -> Any:
        weights = torch.softmax(query @ key.mT / self.scale_attn + attention_mask, -1)
        return weights @ value.flip(-1), weights

    monkeypatch.setattr(type(model.transformer.h[0].attn), "_attn", _attn)
    stock = logits(model, input_ids=ids)
    with patched(model, catalog=shop.offer(ops=(OP,)), ops=[OP]) as handle:
        assert torch.equal(logits(model, input_ids=ids), stock)
    assert "no variant that is known" in row(handle).reason


@pytest.mark.parametrize("change", ["factor", "mask", "flags", "alibi"])
def test_a_probe_refuses_code_that_computes_something_else(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, changes = {
        "factor": ("gptj", {"divisor": ""}),
        "mask": ("codegen", {"divides_mask": False}),
        "flags": ("gpt_neo", {"has_flags": False}),
        "alibi": ("bloom", {"factor": ""}),
    }[change]
    model = built(name)
    mark, form = next(
        (own.mark, own.form)
        for module in model.modules()
        if own_attention._computes(type(module))
        for own in (own_attention.own_of(type(module)),)
    )
    known = dict(own_attention.FORMS)
    monkeypatch.setattr(own_attention, "FORMS", {**known, mark: form._replace(**changes)})
    with patched(model) as handle:
        assert row(handle).reason
    monkeypatch.setattr(own_attention, "FORMS", known)
    with patched(model) as handle:
        assert not row(handle).reason.startswith("the results")


@pytest.mark.parametrize("name", ["gpt_neo", "bloom"])
def test_compiled_code_keeps_its_own_attention(name: str, shop: Any, prompt: Any) -> None:
    model, ids = built(name), prompt(2, 12)
    stock = logits(model, input_ids=ids)
    with patched(model, catalog=shop.offer(ops=(OP,)), ops=[OP]) as handle:
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        torch.testing.assert_close(logits(compiled, input_ids=ids), stock, atol=1e-4, rtol=1e-4)
    assert (row(handle).counts.kernel_calls, dict(row(handle).bypassed)) == (0, {})
