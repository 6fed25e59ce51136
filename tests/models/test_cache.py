"""Growing caches: kernels put new keys and values behind the earlier ones, and other caches run stock code."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from shipped_records import CATALOG
from transformers import DynamicCache, StaticCache, cache_utils

from tilegym_db import Catalog, patch, patched
from tilegym_db.models.call_site import IN_TRAINING, NEEDS_GRAD, CallSite
from tilegym_db.models.parts import cache as growing

pytestmark = pytest.mark.sweep

OP, FIRST = "kv_cache_concat", "kv_cache_prefill"
TINY = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 96, "bos_token_id": 1, "eos_token_id": None}
CONFIGS: dict[str, Callable[..., Any]] = {
    "llama": lambda: transformers.LlamaConfig(**TINY),
    "mistral with a window": lambda: transformers.MistralConfig(**TINY, sliding_window=6),
    "gemma3": lambda: transformers.Gemma3TextConfig(**TINY, head_dim=16, sliding_window=6),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **{**TINY, "num_key_value_heads": 4}, **LATENT, first_k_dense_replace=2
    ),
    "gpt2": lambda: transformers.GPT2Config(**GPT, pad_token_id=0),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**TINY),
}
TOKENS = {"max_new_tokens": 9, "do_sample": False}


def built(name: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(5)
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()).to(dtype).eval()


@pytest.fixture
def concats(shop: Any) -> Catalog:
    """Kernels of growing caches alone."""
    catalog: Catalog = shop.offer(ops=(OP,))
    return catalog


def row(handle: Any) -> Any:
    (found,) = (site for site in handle.report().sites if site.definition == OP)
    return found


# -- served, and served right -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_and_caches_are_those_of_stock(name: str, concats: Catalog, left_padded: Any) -> None:
    model, inputs = built(name), left_padded((9, 4, 7))
    options = {**TOKENS, "return_dict_in_generate": True, "use_cache": True}
    stock = model.generate(**inputs, **options)
    with patched(model, catalog=concats, ops=[OP], graphs=False) as handle:
        found = model.generate(**inputs, **options)
    assert torch.equal(found.sequences, stock.sequences)
    for ours, theirs in zip(found.past_key_values.layers, stock.past_key_values.layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.values, theirs.values)
    layers = len(stock.past_key_values.layers)
    assert handle.report().hits()[OP] == layers * (TOKENS["max_new_tokens"] - 1)
    assert row(handle).bypassed == {}  # the first positions are no growth


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_prompt_in_pieces_gives_the_bits_of_stock(
    name: str, dtype: torch.dtype, concats: Catalog, prompt: Any
) -> None:
    model, ids = built(name, dtype), prompt(2, 12)

    def run() -> list[torch.Tensor]:
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            pieces = (ids[:, :5], ids[:, 5:7], ids[:, 7:8], ids[:, 8:9], ids[:, 9:])
            return [model(piece, past_key_values=cache).logits for piece in pieces]

    stock = run()
    with patched(model, catalog=concats, ops=[OP]) as handle:
        assert all(map(torch.equal, run(), stock))
        assert handle.report().hits()[OP]
    assert all(map(torch.equal, run(), stock))


def test_kernels_are_what_answers(poison: Catalog, prompt: Any) -> None:
    model, cache = built("llama"), DynamicCache()
    with torch.no_grad(), patched(model, catalog=poison, ops=[OP]):
        first = model(prompt(), past_key_values=cache).logits
        second = model(prompt(1, 1), past_key_values=cache).logits
    assert not first.isnan().any()
    assert second.isnan().any()


def test_first_positions_are_those_of_stock(shop: Any, prompt: Any, left_padded: Any) -> None:
    first = shop.offer(ops=(FIRST,))
    for name in CONFIGS:
        model, inputs = built(name), left_padded((9, 4, 7))
        options = {**TOKENS, "return_dict_in_generate": True, "use_cache": True}
        stock = model.generate(**inputs, **options)
        with patched(model, catalog=first, ops=[FIRST], graphs=False) as handle:
            found = model.generate(**inputs, **options)
        assert torch.equal(found.sequences, stock.sequences)
        for ours, theirs in zip(found.past_key_values.layers, stock.past_key_values.layers, strict=True):
            assert torch.equal(ours.keys, theirs.keys)
            assert torch.equal(ours.values, theirs.values)
        assert handle.report().hits()[FIRST] == len(stock.past_key_values.layers)


def test_first_positions_share_no_memory_with_their_source(shop: Any) -> None:
    k, v = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    site = CallSite(lambda *given: tuple([one.transpose(1, 2).clone() for one in given]))
    cache = DynamicCache()
    with torch.no_grad():
        keys, values = growing.update_function(None, site)(cache, k, v, 0)
    assert torch.equal(keys, k)
    assert torch.equal(values, v)
    assert cache.layers[0].keys is keys
    assert site.bypassed == {}


@pytest.mark.parametrize("past", [torch.empty(0, dtype=torch.float64), torch.empty(1, 2, 0, 9)])
def test_an_empty_past_of_another_kind_runs_stock(past: torch.Tensor) -> None:
    k, v = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    site = CallSite(lambda *given: given)
    concat = growing.concat_function(None, site)
    with torch.no_grad(), contextlib.suppress(RuntimeError):  # torch refuses another width
        keys, _ = concat(past, k, torch.empty(0), v)
        assert keys.dtype == torch.float64
    assert site.bypassed == {growing.OTHER_SHAPES: 1}


def test_a_cache_goes_on_after_the_patch_is_undone(concats: Catalog, prompt: Any) -> None:
    model, ids = built("mistral with a window"), prompt(2, 9)
    whole, ours = DynamicCache(config=model.config), DynamicCache(config=model.config)
    with torch.no_grad():
        stock = [model(ids[:, at : at + 1], past_key_values=whole).logits for at in range(9)]
        handle = patch(model, catalog=concats, ops=[OP])
        found = [model(ids[:, at : at + 1], past_key_values=ours).logits for at in range(5)]
        handle.unpatch()
        found += [model(ids[:, at : at + 1], past_key_values=copy.deepcopy(ours)).logits for at in range(5, 6)]
    assert all(map(torch.equal, found, stock))


# -- left to stock code -----------------------------------------------------------------------------------------------


def test_a_cache_of_fixed_size_runs_its_own_update(concats: Catalog, prompt: Any) -> None:
    model, ids = built("llama"), prompt(1, 6)

    def run() -> torch.Tensor:
        cache = StaticCache(config=model.config, max_cache_len=16)
        with torch.no_grad():
            model(ids, past_key_values=cache)
            found: torch.Tensor = model(ids[:, :1], past_key_values=cache).logits
        return found

    stock = run()
    with patched(model, catalog=concats, ops=[OP]) as handle:
        assert torch.equal(run(), stock)
    assert not handle.report().hits()[OP]
    assert not row(handle).bypassed


def test_a_cache_with_an_update_of_its_own_is_asked(concats: Catalog, prompt: Any) -> None:
    calls = []

    class Watched(DynamicCache):  # type: ignore[misc]
        def update(self, *args: Any, **kwargs: Any) -> Any:
            calls.append(args[2])
            return super().update(*args, **kwargs)

    model, cache = built("llama"), Watched()
    with torch.no_grad(), patched(model, catalog=concats, ops=[OP]) as handle:
        model(prompt(), past_key_values=cache)
        model(prompt(1, 1), past_key_values=cache)
    assert calls == [0, 1, 0, 1]
    assert not handle.report().hits()[OP]


def test_gradients_are_those_of_stock(concats: Catalog, prompt: Any) -> None:
    model, ids = built("llama"), prompt(2, 8)

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        cache = DynamicCache()
        model(ids[:, :5], past_key_values=cache)
        model(ids[:, 5:], past_key_values=cache).logits.square().sum().backward()
        return [one.grad.clone() for one in model.parameters()]

    stock = gradients()
    with patched(model, catalog=concats, ops=[OP]) as handle:
        assert all(map(torch.equal, gradients(), stock))
        model.train()
        assert all(map(torch.equal, gradients(), stock))
    assert row(handle).bypassed.keys() == {NEEDS_GRAD, IN_TRAINING}


def test_a_forward_without_a_cache_asks_nothing(concats: Catalog, prompt: Any, logits: Any) -> None:
    model = built("llama")
    stock = logits(model, prompt())
    with patched(model, catalog=concats, ops=[OP]) as handle, torch.no_grad():
        assert torch.equal(model(prompt(), use_cache=False).logits, stock)
    assert not row(handle).bypassed


# -- what is understood -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_decoder", [True, False])
def test_an_encoder_has_no_cache_that_grows(is_decoder: bool) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = transformers.BertModel(transformers.BertConfig(**sizes, vocab_size=96, is_decoder=is_decoder)).eval()
    found = {site.definition for site in patch(model, dry_run=True).report().sites}
    assert (OP in found) == is_decoder


SIDES = {f"{side}_{what}": 2 for side in ("encoder", "decoder") for what in ("layers", "attention_heads")}
BOTH: dict[str, dict[str, Any]] = {
    "bart": {"d_model": 64},
    "t5": {"d_model": 64, "d_kv": 32, "d_ff": 48, "num_layers": 2, "num_heads": 2},
    "whisper": {"d_model": 64, "num_mel_bins": 8, "max_source_positions": 12},
}
"""Sizes of models with an encoder and two layers that decode."""


@pytest.mark.parametrize("name", BOTH)
def test_a_decoder_beside_an_encoder_is_served(name: str, shop: Any, prompt: Any) -> None:
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "decoder_start_token_id": 0}
    torch.manual_seed(5)
    config = transformers.CONFIG_MAPPING[name](**SIDES, **BOTH[name], **tokens, vocab_size=96)
    is_sound = name == "whisper"
    factory = transformers.AutoModelForSpeechSeq2Seq if is_sound else transformers.AutoModelForSeq2SeqLM
    model = factory.from_config(config).eval()
    given = torch.randn(1, 8, 24) if is_sound else prompt()
    stock = model.generate(given, **TOKENS)
    # Both parts are in the forwards of the same class, and so are the encoder's, which has no cache.
    catalog = shop.offer(ops=(OP, "attention_decode"))
    with patched(model, catalog=catalog, ops=[OP, "attention_decode"], graphs=False) as handle:
        assert torch.equal(model.generate(given, **TOKENS), stock)
    hits = handle.report().hits()
    assert hits[OP] == 2 * (TOKENS["max_new_tokens"] - 1)
    assert bool(hits.get("attention_decode")) == (name != "t5")  # T5 has another part, with a bias


def site_of(*answers: Any) -> CallSite:
    return CallSite(lambda *inputs: answers or None)


@pytest.mark.parametrize("layer", ["DynamicLayer", "DynamicSlidingWindowLayer"])
def test_the_layers_of_transformers_have_one_pair(layer: str) -> None:
    method = getattr(cache_utils, layer).update
    made = growing.copied(method, {growing.CALL: None, growing.CONCAT: None})
    assert made is not None
    assert growing.CONCAT in made.__code__.co_names
    assert "cat" not in made.__code__.co_names


def test_a_cache_of_fixed_size_has_no_pair() -> None:
    assert growing.copied(cache_utils.StaticLayer.update, {}) is None


def reads_the_first(self: Any, k: Any, v: Any) -> Any:
    self.keys = torch.cat([self.keys, k], dim=-2)
    self.values = torch.cat([self.keys, v], dim=-2)
    return self.keys, self.values


def along_heads(self: Any, k: Any, v: Any) -> Any:
    self.keys = torch.cat([self.keys, k], dim=1)
    self.values = torch.cat([self.values, v], dim=1)
    return self.keys, self.values


@pytest.mark.parametrize("method", [reads_the_first, along_heads])
def test_other_concatenations_are_left_alone(method: Any) -> None:
    assert growing.copied(method, {}) is None


@pytest.mark.parametrize(
    ("past", "new", "reason"),
    [
        ((0,), (2, 3, 1, 8), growing.OTHER_SHAPES),
        ((2, 3, 8), (2, 1, 8), growing.OTHER_SHAPES),
        ((2, 3, 4, 8), (1, 3, 1, 8), growing.OTHER_SHAPES),
        ((2, 3, 4, 8), (2, 3, 1, 8), ""),
    ],
)
def test_calls_of_other_shapes_are_counted(past: Any, new: Any, reason: str) -> None:
    assert growing.why_stock(torch.zeros(past), torch.zeros(new)) == reason


def test_keys_and_values_of_other_lengths_run_stock() -> None:
    site = site_of(torch.zeros(1), torch.zeros(1))
    past, one, two = torch.zeros(1, 1, 3, 4), torch.ones(1, 1, 1, 4), torch.ones(1, 1, 2, 4)
    with torch.no_grad():
        keys, values = growing.concat_function(site)(past, one, past, two)
    assert (keys.shape[2], values.shape[2]) == (4, 5)
    assert site.bypassed == {growing.OTHER_SHAPES: 1}


def test_the_operator_is_found_by_its_part() -> None:
    serving = CATALOG.definition(OP).serving
    assert serving is not None
    assert serving.part == growing.KIND
