"""Inputs that a graph leaves for the next step are those that transformers would prepare, or transformers prepares them."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import transformers
from decoding_models import CONFIGS, WINDOW, in_graphs, made, padded, prompt

from tilegym_db.models import next_inputs
from tilegym_db.models.decoding import _Generation
from tilegym_db.models.next_inputs import CACHES, DECODER, are_equal, are_same

pytestmark = pytest.mark.sweep

OWN_METHODS = {"falcon_h1", "bamba", "mamba", "mamba2", "falcon_mamba"}
"""Models that prepare their steps themselves."""
FOLLOWING = sorted({*CONFIGS} - OWN_METHODS)
OPTIONS: dict[str, Any] = {"max_new_tokens": 2 * WINDOW + 4, "do_sample": False}


@pytest.fixture
def model() -> Any:
    return made()


@pytest.fixture
def compared(monkeypatch) -> list[int]:
    """Compare the inputs of each step that follows with those of transformers; return the lengths so far."""
    prepare, lengths = _Generation.prepare, []

    def compare(self: Any, stock: Any, ids: torch.Tensor, arguments: dict[str, Any], **options: Any) -> Any:
        found = prepare(self, stock, ids, arguments, **options)
        if self.expected is not None:
            should = stock.prepare_inputs_for_generation(self.decoding.model, ids, **options, **arguments)
            assert are_equal(should, found)
            assert torch.equal(should[DECODER.ids], found[DECODER.ids])
            assert should[CACHES[0]] is found[CACHES[0]]
            lengths.append(ids.shape[1])
        return found

    monkeypatch.setattr(_Generation, "prepare", compare)
    return lengths


@pytest.mark.parametrize("length", [WINDOW // 2, WINDOW - 1, WINDOW, 3 * WINDOW])
@pytest.mark.parametrize("name", FOLLOWING)
def test_each_step_has_the_inputs_of_transformers(name, length, compared):
    model = made(name)
    decoding = in_graphs(model)
    for seed in range(2):
        model.generate(prompt(2, length, seed), **OPTIONS)
    assert len(compared) == decoding.report().followed > WINDOW  # some stop early


@pytest.mark.parametrize("name", FOLLOWING)
def test_each_step_after_left_padding_has_the_inputs_too(name, compared):
    model, options = made(name), padded()
    in_graphs(model)
    for _ in range(2):
        model.generate(**options, max_new_tokens=2 * WINDOW)
    assert len(compared) > 2 * WINDOW


def with_holes() -> dict[str, Any]:
    options = padded()
    options["attention_mask"][:, 8] = 0
    options["attention_mask"][0] = 1
    return options


GIVEN: dict[str, dict[str, Any]] = {
    "a mask with holes": with_holes(),
    "positions": {"inputs": prompt(2, 5), "position_ids": torch.arange(10, 15).expand(2, 5), "do_sample": False},
    "padding of one row": {**padded(), "repetition_penalty": 1.3},
    "sequences a prompt": {"inputs": prompt(2), "do_sample": True, "num_return_sequences": 3},
}


@pytest.mark.parametrize("name", GIVEN)
def test_what_the_caller_gives_is_followed(name, model, compared):
    options = {name: value.to(model.device) if torch.is_tensor(value) else value for name, value in GIVEN[name].items()}
    other = made()
    torch.manual_seed(3)
    stock = other.generate(**options, max_new_tokens=20)
    in_graphs(model)
    for _ in range(2):
        torch.manual_seed(3)
        assert torch.equal(model.generate(**options, max_new_tokens=20), stock)
    assert len(compared) > 30


def test_generations_of_other_forms_in_turn_are_those_of_stock(model, compared):
    stock, decoding = made(), in_graphs(model)
    for length, batch in ((9, 3), (4, 3), (60, 3), (9, 1), (31, 3)):
        for options in ({"inputs": prompt(batch, length)}, padded(), with_holes()):
            options = {**options, "max_new_tokens": 12, "do_sample": False}
            assert torch.equal(model.generate(**options), stock.generate(**options))
    assert len(compared) == decoding.report().followed > 60


class Sees(transformers.LogitsProcessor):
    """A processor that calls a function at one length."""

    def __init__(self, length: int, call: Any) -> None:
        self.length, self.call = length, call

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] == self.length:
            self.call()
        return scores


def processors(length: int, call: Any) -> dict[str, Any]:
    return {"logits_processor": transformers.LogitsProcessorList([Sees(length, call)])}


def test_an_error_in_the_middle_leaves_nothing_behind(model, compared):
    def stops() -> None:
        raise KeyboardInterrupt

    stock, decoding = made(), in_graphs(model)
    for length in (14, 15, 21):
        with pytest.raises(KeyboardInterrupt):
            model.generate(prompt(2), **OPTIONS, **processors(length, stops))
        ids = prompt(2, 5, length)
        assert torch.equal(model.generate(ids, **OPTIONS), stock.generate(ids, **OPTIONS))
    assert not decoding.report().stock


@pytest.mark.parametrize("inner", [7, 300])
def test_a_generation_inside_another_leaves_its_inputs_alone(inner, model, compared):
    found: list[torch.Tensor] = []
    stock = made()
    in_graphs(model)
    model.generate(prompt(1, inner, 1), **OPTIONS)
    options = processors(18, lambda: found.append(model.generate(prompt(1, inner, 1), **OPTIONS)))
    assert torch.equal(model.generate(prompt(), **OPTIONS, **options), stock.generate(prompt(), **OPTIONS))
    assert torch.equal(found[0], stock.generate(prompt(1, inner, 1), **OPTIONS))


def test_removal_in_the_middle_of_a_generation_keeps_its_tokens(model):
    stock, decoding = made("gemma3"), in_graphs(model := made("gemma3"))
    model.generate(prompt(2), **OPTIONS)
    found = model.generate(prompt(2), **OPTIONS, **processors(15, decoding.remove))
    assert torch.equal(found, stock.generate(prompt(2), **OPTIONS))


def test_two_threads_follow_their_own_inputs(model, compared):
    stock, decoding, found = made(), in_graphs(model), {}
    lengths = {seed: 4 + 257 * seed for seed in range(3)}

    def generate(seed: int) -> None:
        found[seed] = model.generate(prompt(2, lengths[seed], seed), **OPTIONS)

    for seed in lengths:
        generate(seed)
    threads = [threading.Thread(target=generate, args=(seed,)) for seed in lengths]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed, length in lengths.items():
        assert torch.equal(found[seed], stock.generate(prompt(2, length, seed), **OPTIONS))
    assert decoding.report().followed > 100


def test_a_streamer_gets_each_token_once(model):
    class Puts(transformers.generation.streamers.BaseStreamer):
        def __init__(self) -> None:
            self.tokens: list[int] = []

        def put(self, value: torch.Tensor) -> None:
            self.tokens += value.flatten().tolist()

        def end(self) -> None: ...

    in_graphs(model)
    for _ in range(2):
        streamer = Puts()
        assert model.generate(prompt(), **OPTIONS, streamer=streamer)[0].tolist() == streamer.tokens


# ---- transformers prepares ----------------------------------------------------------------------


def later(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Prepare positions three later than usual."""
    inputs = transformers.GenerationMixin.prepare_inputs_for_generation(self, *args, **kwargs)
    return {**inputs, "position_ids": inputs["position_ids"] + 3}


def test_a_model_with_its_own_method_prepares_each_step(model):
    stock = made()
    for one in (stock, model):
        one.__class__ = type("Later", (type(one),), {"prepare_inputs_for_generation": later})
    decoding = in_graphs(model)
    for _ in range(2):
        assert torch.equal(model.generate(prompt(2), **OPTIONS), stock.generate(prompt(2), **OPTIONS))
    assert decoding.report().replayed > 40
    assert decoding.report().followed == 0


@pytest.mark.parametrize("length", [0, 16])
def test_a_method_set_on_the_instance_is_asked_for_each_step(length, model):
    """At once, or in the middle of a generation by a processor."""
    stock, decoding = made(), in_graphs(model)

    def replace(one: Any) -> None:
        prepare = one.prepare_inputs_for_generation

        def later(*args: Any, **kwargs: Any) -> dict[str, Any]:
            inputs = prepare(*args, **kwargs)
            return {**inputs, "position_ids": inputs["position_ids"] + 3}

        one.prepare_inputs_for_generation = later

    model.generate(prompt(2), **OPTIONS)
    before = decoding.report().followed
    if not length:
        replace(stock)
        replace(model)
    expected = stock.generate(prompt(2), **OPTIONS, **processors(length, lambda: replace(stock)))
    found = model.generate(prompt(2), **OPTIONS, **processors(length, lambda: replace(model)))
    assert torch.equal(found, expected)
    assert decoding.report().followed - before < 10


def test_masks_of_a_registered_function_are_made_for_each_step(model, monkeypatch):
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

    def near(*args: Any, **kwargs: Any) -> Any:
        mask = sdpa_mask(*args, **kwargs)
        return mask if mask is None or mask.shape[-2] > 1 else mask & (torch.arange(mask.shape[-1]) % 7 != 5)

    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._local_mapping, "sdpa", near)
    decoding = in_graphs(model)
    for _ in range(2):
        model.generate(prompt(2), **OPTIONS)
    assert decoding.report().replayed > 40
    assert decoding.report().followed == 0


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_inputs_that_follow_wrongly_are_not_used(name, monkeypatch):
    def advance(inputs: dict[str, Any], layers: Any, full: Any) -> None:
        inputs["position_ids"].add_(2)

    monkeypatch.setattr(next_inputs, "_advance", advance)
    model, stock = made(name), made(name)
    decoding = in_graphs(model)
    for _ in range(2):
        assert torch.equal(model.generate(prompt(2), **OPTIONS), stock.generate(prompt(2), **OPTIONS))
    assert decoding.report().replayed > 40
    assert decoding.report().followed == 0


def test_inputs_of_a_kind_that_is_not_known_are_left_alone():
    ids, cache = torch.ones(1, 1, dtype=torch.long), transformers.DynamicCache()
    for other in ({"token_type_ids": ids}, {"attention_mask": torch.ones(1, 5)}, {"return_dict": False}):
        positions = torch.zeros(1, 1, dtype=torch.long)
        forward = next_inputs.Advancing(lambda **inputs: None)
        forward(**{"return_dict": True, "input_ids": ids, "position_ids": positions, CACHES[0]: cache, **other})
        assert not forward.following
        assert not positions.any()


def test_same_means_the_same_objects():
    one, other = torch.ones(1), torch.ones(1)
    assert are_same({"a": one, "b": None}, {"b": None, "a": one})
    assert not are_same({"a": one}, {"a": other})
    assert not are_same({"a": None}, {"b": None})
    assert not are_same({"a": one}, {"a": one, "b": one})


DIFFERENT: dict[str, dict[str, Any]] = {
    "a value": {"position_ids": torch.tensor([[3]])},
    "a dtype": {"position_ids": torch.tensor([[2.0]])},
    "a shape": {"position_ids": torch.tensor([[2, 2]])},
    "a mask less": {"attention_mask": {"full_attention": torch.ones(1, 1, 1, 4), "sliding_attention": None}},
    "a number": {"logits_to_keep": 0},
    "a name more": {"use_cache": True},
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_equal_means_all_but_the_new_token(name):
    masks = {"full_attention": torch.ones(1, 1, 1, 4), "sliding_attention": torch.ones(1, 1, 1, 2)}
    inputs = {"position_ids": torch.tensor([[2]]), "attention_mask": masks, "logits_to_keep": 1}
    assert are_equal({**inputs, DECODER.ids: torch.tensor([[5]])}, {**inputs, DECODER.ids: torch.tensor([[7]])})
    assert not are_equal(
        {**inputs, DECODER.ids: torch.tensor([[5]])}, {**inputs, **DIFFERENT[name], DECODER.ids: torch.tensor([[5]])}
    )
