"""``generate`` of encoder-decoder models in graphs gives the tokens of stock, from the encoder outputs of this generation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from decoding_models import ENCODER_DECODERS, SPEECH, encoded, in_graphs, made_with_encoder, padded

from tilegym_db.models.fixed_cache import FixedCache

pytestmark = pytest.mark.sweep

GREEDY: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False}
TEXT = sorted({*ENCODER_DECODERS} - {*SPEECH})
OWN_METHODS = {"whisper"}
"""Models that prepare their steps themselves."""


def run(model: Any, inputs: dict[str, Any], seed: int = 3, **options: Any) -> torch.Tensor:
    torch.manual_seed(seed)
    tokens: torch.Tensor = model.generate(**inputs, **{**GREEDY, **options})
    return tokens


def encoder_masks() -> dict[str, Any]:
    inputs = padded()
    return {"input_ids": inputs["inputs"], "attention_mask": inputs["attention_mask"]}


@pytest.mark.parametrize("sampled", [{}, {"do_sample": True, "num_return_sequences": 2}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_tokens_after_an_encoder_are_those_of_stock(name: str, sampled: dict[str, Any]) -> None:
    model, inputs = made_with_encoder(name), encoded(name, 2)
    stock = run(model, inputs, **sampled)
    decoding = in_graphs(model)
    for _ in range(2):
        assert torch.equal(run(model, inputs, **sampled), stock)
    report = decoding.report()
    assert (report.captured, report.replayed > 30, report.stock) == (1, True, {})
    assert (report.followed > 30) == (name not in OWN_METHODS)


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_other_encoder_inputs_have_their_own_tokens(name: str) -> None:
    model, pieces = made_with_encoder(name), [encoded(name, 2, seed=seed) for seed in (0, 1, 0, 2)]
    stock = [run(model, piece) for piece in pieces]
    assert not torch.equal(stock[0], stock[1])
    decoding = in_graphs(model)
    assert all(torch.equal(run(model, piece), want) for piece, want in zip(pieces, stock, strict=True))
    assert decoding.report().captured == 1


@pytest.mark.parametrize("name", TEXT)
def test_encoder_padding_of_one_call_stays_in_it(name: str) -> None:
    model, left, whole = made_with_encoder(name), encoder_masks(), encoded(name, 3, 9)
    right = {key: value.flip(1) for key, value in left.items()}
    calls = [left, whole, right, {**whole, "attention_mask": torch.ones_like(whole["input_ids"])}, left]
    stock = [run(model, inputs) for inputs in calls]
    decoding = in_graphs(model)
    assert all(torch.equal(run(model, inputs), want) for inputs, want in zip(calls, stock, strict=True))
    assert decoding.report().captured == 2  # with a mask and without one
    assert not decoding.report().stock


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_a_shorter_encoder_input_after_a_longer_one(name: str) -> None:
    model = made_with_encoder(name)
    calls = [encoded(name, 2, length, seed) for length, seed in ((40, 1), (4, 2), (40, 3), (5, 4))]
    stock = [run(model, inputs) for inputs in calls]
    decoding = in_graphs(model)
    assert all(torch.equal(run(model, inputs), want) for inputs, want in zip(calls, stock, strict=True))
    assert decoding.report().captured == 3  # one for each length


def test_encoder_outputs_changed_in_place_count_in_the_next_call() -> None:
    model = made_with_encoder("bart")
    with torch.no_grad():
        outputs = model.get_encoder()(**encoded("bart", 2))
        other = model.get_encoder()(**encoded("bart", 2, seed=1)).last_hidden_state
    inputs = {"encoder_outputs": outputs, "decoder_input_ids": torch.ones_like(encoded("bart", 2)["input_ids"][:, :1])}
    first = outputs.last_hidden_state.clone()
    stock = []
    for value in (first, other):
        outputs.last_hidden_state.copy_(value)
        stock.append(run(model, inputs))
    assert not torch.equal(*stock)
    decoding = in_graphs(model)
    for value, want in ((first, stock[0]), (other, stock[1])):
        outputs.last_hidden_state.copy_(value)
        assert torch.equal(run(model, inputs), want)
    assert decoding.report().captured == 1


def test_other_encoder_outputs_within_a_generation_are_copied() -> None:
    outputs = transformers.modeling_outputs.BaseModelOutput(last_hidden_state=torch.ones(1, 3, 4))
    cache = transformers.EncoderDecoderCache(transformers.DynamicCache(), transformers.DynamicCache())
    fixed = FixedCache(cache)
    fixed.fill_from(cache, outputs)
    fixed.graphs["one"] = None
    kept = fixed.encoded.last_hidden_state
    same = fixed.with_encoded({"encoder_outputs": outputs})["encoder_outputs"].last_hidden_state
    assert same is kept is not outputs.last_hidden_state
    for length, is_kept in ((3, True), (5, False)):
        other = transformers.modeling_outputs.BaseModelOutput(last_hidden_state=torch.full((1, length, 4), 7.0))
        found = fixed.with_encoded({"encoder_outputs": other})["encoder_outputs"].last_hidden_state
        assert torch.equal(found, other.last_hidden_state)
        assert (found is kept) == bool(fixed.graphs) == is_kept


def test_pieces_of_long_audio_are_decoded_in_graphs_each() -> None:
    model, stock = made_with_encoder("whisper"), made_with_encoder("whisper")
    for one in (model, stock):
        one.generation_config.no_timestamps_token_id = 90
    audio = torch.randn(1, 8, 180, generator=torch.Generator().manual_seed(1))
    long = {"input_features": audio.to(model.device), "attention_mask": torch.ones(1, 180, dtype=torch.long)}
    decoding = in_graphs(model)
    options = {"return_timestamps": True}
    assert torch.equal(run(model, long, **options), run(stock, long, **options))
    report = decoding.report()
    assert report.captured == 1
    assert report.replayed > 30
    assert not report.stock


def test_changed_weights_of_cross_attention_are_captured_again() -> None:
    model, other = made_with_encoder("t5"), made_with_encoder("t5")
    inputs, decoding = encoded("t5", 2), in_graphs(model)
    run(model, inputs)
    for one in (model, other):
        torch.manual_seed(9)
        product = torch.nn.Linear(64, 64, bias=False).to(one.device)
        one.decoder.block[1].layer[1].EncDecAttention.q = product
    assert torch.equal(run(model, inputs), run(other, inputs))
    assert decoding.report().captured == 2


STOCK: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 2},
    "no cache": {"use_cache": False},
    "few tokens": {"max_new_tokens": 3},
    "the cache is returned": {"return_dict_in_generate": True},
    "a static cache": {"cache_implementation": "static", "disable_compile": True},
}


@pytest.mark.parametrize("name", STOCK)
def test_what_is_not_understood_after_an_encoder_runs_stock(name: str) -> None:
    model = made_with_encoder("t5")
    decoding = in_graphs(model)
    model.generate(**encoded("t5", 2), **{**GREEDY, **STOCK[name]})
    assert decoding.report().replayed == 0
    assert len(decoding.report().stock) == 1


def test_encoder_outputs_that_are_no_tensors_run_stock() -> None:
    model = made_with_encoder("bart")
    with torch.no_grad():
        outputs = model.get_encoder()(**encoded("bart", 2), output_hidden_states=True)
    start = torch.ones_like(encoded("bart", 2)["input_ids"][:, :1])
    decoding = in_graphs(model)
    run(model, {"encoder_outputs": outputs, "decoder_input_ids": start})
    assert decoding.report().replayed == 0
    assert sum(decoding.report().stock.values()) == 1


def test_removing_graphs_frees_the_copies_of_an_encoder() -> None:
    model = made_with_encoder("whisper")
    decoding = in_graphs(model)
    run(model, encoded("whisper"))
    held = decoding.report().cache_bytes
    assert held > 2 * 2 * 64 * 4 * 256  # the decoder's tokens alone
    decoding.remove()
    assert decoding.report().cache_bytes == 0
