"""The bias of relative positions: kernels spread the bias of each distance, and models compute the bits of stock."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from tilegym_db import patched
from tilegym_db.models.parts import distance_bias
from tilegym_db.models.parts.distance_bias import HOOKED, METHOD

OP = "relative_bias"
TINY = {
    "vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "pad_token_id": 0,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12, "decoder_start_token_id": 0,
}  # fmt: skip
MODELS = {
    "t5": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**TINY)),
    "umt5": lambda: transformers.UMT5ForConditionalGeneration(transformers.UMT5Config(**TINY)),
    "switch": lambda: transformers.SwitchTransformersForConditionalGeneration(
        transformers.SwitchTransformersConfig(**TINY, num_experts=2, num_sparse_encoder_layers=1)
    ),
}


def made(name: str = "t5", dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return MODELS[name]().to(dtype).eval()


def inputs(length: int = 17) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "input_ids": torch.randint(1, 96, (2, length), generator=generator),
        "decoder_input_ids": torch.randint(1, 96, (2, 6), generator=generator),
    }


def row(handle: Any) -> Any:
    (found,) = (one for one in handle.report().sites if one.kind == distance_bias.KIND)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_biases_by_distance_give_the_bits_of_stock(name: str, dtype: torch.dtype, shop: Any) -> None:
    model, given = made(name, dtype), inputs()
    with torch.no_grad():
        stock = model(**given).logits
        with patched(model, catalog=shop.offer(ops=(OP,)), ops=[OP]) as handle:
            assert torch.equal(model(**given).logits, stock)
    assert (row(handle).reason, dict(row(handle).bypassed)) == ("", {})
    # One encoder and one decoder, but for UMT5, in which each layer has a table.
    assert row(handle).counts.kernel_calls == (4 if name == "umt5" else 2)


def test_biases_and_their_attention_are_served_together(shop: Any) -> None:
    model, given, both = made(), inputs(), (OP, "attention_bias")
    with torch.no_grad():
        stock = model(**given).logits
        with patched(model, catalog=shop.offer(ops=both), ops=both) as handle:
            torch.testing.assert_close(model(**given).logits, stock)
    assert all(handle.report().hits()[name] for name in both)


def test_tokens_with_biases_by_distance_are_those_of_stock(shop: Any) -> None:
    model, ids = made(), inputs()["input_ids"]
    stock = model.generate(ids, max_new_tokens=5, do_sample=False)
    with patched(model, catalog=shop.offer(ops=(OP,)), ops=[OP]) as handle:
        assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False), stock)
    assert row(handle).counts.kernel_calls == 1  # of the encoder: single positions run stock code


def test_another_method_or_a_hook_leaves_biases_to_stock(shop: Any) -> None:
    model, given, calls = made(), inputs(), list[int]()
    attention = model.encoder.block[0].layer[0].SelfAttention
    own = getattr(attention, METHOD)
    with torch.no_grad(), patched(model, catalog=shop.offer(ops=(OP,)), ops=[OP]) as handle:
        setattr(attention, METHOD, lambda *some, **named: calls.append(1) or own(*some, **named))
        model.decoder.block[0].layer[0].SelfAttention.relative_attention_bias.register_forward_hook(lambda *_: None)
        model(**given)
    assert (calls, dict(row(handle).bypassed), row(handle).counts.kernel_calls) == ([1], {HOOKED: 1}, 0)


def test_gradients_of_biases_are_those_of_stock(shop: Any) -> None:
    model, given = made(), inputs()

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(**given).logits.square().sum().backward()
        return [one.grad.clone() for one in model.parameters() if one.grad is not None]

    stock = gradients()
    with patched(model, catalog=shop.offer(ops=(OP,)), ops=[OP]):
        assert all(map(torch.equal, gradients(), stock))
