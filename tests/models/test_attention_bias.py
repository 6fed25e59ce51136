"""Attention with a bias of positions: a kernel gives the bits and tokens of stock, and other calls run stock code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch.overrides import TorchFunctionMode

from tilegym_db import patched
from tilegym_db.models.parts import attention, biased_attention

OP = "attention_bias"
TOKENS = {"max_new_tokens": 6, "do_sample": False}
SIZES = {"d_model": 64, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 96}
LAYERS = 2


def built(name: str = "T5", dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(5)
    config = getattr(transformers, f"{name}Config")(
        **SIZES, pad_token_id=0, eos_token_id=None, decoder_start_token_id=0
    )
    return transformers.AutoModelForSeq2SeqLM.from_config(config).to(dtype).eval()


def row(handle: Any) -> Any:
    (found,) = (one for one in handle.report().sites if one.kind == biased_attention.KIND)
    return found


def logits(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=ids, decoder_input_ids=ids[:, :5], **options).logits
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["T5", "UMT5"])
def test_a_bias_gives_the_bits_of_stock(name: str, dtype: torch.dtype, shop: Any, prompt: Any) -> None:
    model, ids = built(name, dtype), prompt(2, 12)
    stock = logits(model, ids)
    with patched(model, catalog=shop.offer(ops=(OP,)), ops=[OP]) as handle:
        assert torch.equal(logits(model, ids), stock)
    # Each layer of the encoder, and each layer of the decoder for itself and for the encoder's output.
    assert handle.report().hits() == {OP: 3 * LAYERS}
    assert torch.equal(logits(model, ids), stock)


@pytest.mark.parametrize("cache", ["dynamic", "static", "none"])
def test_tokens_with_a_bias_are_those_of_stock(cache: str, shop: Any, left_padded: Any) -> None:
    model, inputs = built(), left_padded((9, 4, 7))
    options: dict[str, Any] = {**TOKENS, "use_cache": cache != "none"}
    if cache == "static":
        options |= {"cache_implementation": "static", "disable_compile": True}
    stock = model.generate(**inputs, **options)
    with patched(model, catalog=shop.offer(ops=(OP,)), ops=[OP]) as handle:
        assert torch.equal(model.generate(**inputs, **options), stock)
    assert row(handle).counts.kernel_calls
    assert row(handle).counts.stock_calls == 0
    assert not row(handle).bypassed


def test_a_bias_in_float16_is_left_to_stock(shop: Any, prompt: Any) -> None:
    model, ids = built(dtype=torch.float16), prompt()
    stock = logits(model, ids)
    with patched(model, catalog=shop.offer(ops=(OP,)), ops=[OP]) as handle:
        assert torch.equal(logits(model, ids), stock)
    assert not handle.report().hits().get(OP)


class Joins(TorchFunctionMode):
    """A mode that counts how often a mask is put into a bias."""

    count = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is torch.where and args[0].dim() == 4
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("smallest", [1, 4000])
def test_a_mask_is_put_into_a_bias_once(smallest: int, shop: Any, left_padded: Any) -> None:
    model, inputs = built(), left_padded((9, 4, 7))
    with Joins() as stock:
        tokens = model.generate(**inputs, **TOKENS)
    with patched(model, catalog=shop.offer(ops=(OP,), smallest=smallest), ops=[OP]) as handle, Joins() as found:
        assert torch.equal(model.generate(**inputs, **TOKENS), tokens)
    counts = row(handle).counts
    assert bool(counts.stock_calls) == (smallest > 1)
    assert counts.kernel_calls + counts.stock_calls > 0
    assert found.count == stock.count > 0


def test_gradients_with_a_bias_are_those_of_stock(shop: Any, prompt: Any) -> None:
    model, ids = built(), prompt(2)

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        return [one.grad.clone() for one in model.parameters() if one.grad is not None]

    stock = gradients()
    with patched(model, catalog=shop.offer(ops=(OP,)), ops=[OP]):
        assert all(map(torch.equal, gradients(), stock))


def test_attention_without_a_bias_has_the_usual_parts(shop: Any, build: Any) -> None:
    with patched(build("llama"), catalog=shop.offer(ops=(OP,))) as handle:
        assert biased_attention.KIND not in {one.kind for one in handle.report().sites}


def ignores_the_bias(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any) -> Any:
    out = attention.Sdpa(query, key, value, is_causal=module.is_causal, scale=options["scaling"])
    return out.transpose(1, 2), None


def ignores_a_mask(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any) -> Any:
    bias = options.get(attention.BIAS)
    mask = attention_mask if bias is None else None
    return transformers.integrations.sdpa_attention.sdpa_attention_forward(module, query, key, value, mask, **options)


@pytest.mark.parametrize("function", [ignores_the_bias, ignores_a_mask])
def test_a_function_of_other_bits_is_unknown(function: Any) -> None:
    assert biased_attention.why_other_bits(function, torch.device("cpu"))


@pytest.mark.parametrize(
    ("bias", "mask", "is_known"),
    [
        (torch.zeros(1, 4, 3, 5), None, True),
        (torch.zeros(2, 4, 3, 5), torch.ones(2, 1, 1, 5, dtype=torch.bool), True),
        (torch.zeros(1, 1, 3, 5), None, False),
        (torch.zeros(1, 4, 3, 5, dtype=torch.bfloat16), None, False),
        (torch.zeros(1, 4, 3, 5), torch.ones(2, 4, 3, 5, dtype=torch.bool), False),
        (torch.zeros(1, 4, 3, 5), torch.ones(2, 1, 3, 5, dtype=torch.int), False),
    ],
)
def test_a_bias_or_mask_of_other_shapes_is_unknown(bias: torch.Tensor, mask: Any, is_known: bool) -> None:
    query, key = torch.zeros(2, 4, 3, 8), torch.zeros(2, 4, 5, 8)
    reason = biased_attention.why_other_bias(bias, query, key) or biased_attention.why_other_mask(mask, bias, key)
    assert (not reason) == is_known
