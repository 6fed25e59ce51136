"""Prompts of ``generate`` in graphs give what stock gives, or run as before and say why.

Without a GPU a graph is a forward that runs again, with its results in the memory of the first run.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
import transformers
from decoding_models import CONFIGS, TINY, WINDOW, made, padded, prompt
from host_graphs import NoWaiting, capturing, deciding_as_now, eager

from tilegym_db.models import patch
from tilegym_db.models.bench.model_bench import WARM_UP_ROUNDS
from tilegym_db.models.decoding import Decoding, why_stock
from tilegym_db.models.graphs import MAX_EAGER_RUNS, PAYS, copied
from tilegym_db.models.next_inputs import CapturedForward, cache_of
from tilegym_db.models.prompt_graphs import (
    EAGER_RUNS,
    MAX_HELD,
    MIN_COUNTED,
    PromptGraphs,
    limits_of,
    may_be_filled_up,
    shortest_of,
    size_of,
    why_not_prompt,
)
from tilegym_db.resolver.hot_path import replayed

UNTIL_REPLAY = EAGER_RUNS + 1
"""Generations with prompts of a size before the first one that is a replay."""


def tensors_of(outputs: Any) -> list[torch.Tensor]:
    found = [outputs["logits"]]
    for layer in outputs[cache_of(outputs)].layers:
        for value in vars(layer).values():
            inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
            found += [one for one in inner if isinstance(one, torch.Tensor)]
    return found


def again(forward: Any, inputs: Mapping[str, Any]) -> CapturedForward:
    kept: list[torch.Tensor] = []
    given = copied(dict(inputs), kept)
    decided = deciding_as_now()
    with NoWaiting(), capturing():
        outputs = forward(**given)
    for value in tensors_of(outputs):
        value.zero_()  # a capture computes nothing

    def replay() -> None:
        with NoWaiting(), capturing(), decided():
            found = forward(**given)
        for value, new in zip(tensors_of(outputs), tensors_of(found), strict=True):
            value.copy_(new)

    return CapturedForward(replay, kept, outputs)


def watch(*times: float) -> Callable[[torch.device], Callable[[], Callable[[], float | None]]]:
    """Return a stopwatch that shows the given milliseconds one after the other, and then 1."""
    left = list(times)

    def start(device: torch.device) -> Callable[[], Callable[[], float | None]]:
        def stop() -> Callable[[], float | None]:
            time = left.pop(0) if left else 1.0
            return lambda: time

        return stop

    return start


def in_graphs(model: Any, *times: float) -> Decoding:
    decoding = Decoding(model, eager, prompts=PromptGraphs(again, replayed, watch(*times)))
    decoding.install()
    return decoding


def raised(error: BaseException) -> Any:
    raise error


def inputs_of(model: Any, ids: torch.Tensor) -> dict[str, Any]:
    cache = transformers.DynamicCache(config=model.config)
    return {"input_ids": ids, "past_key_values": cache, "logits_to_keep": 1, "use_cache": True, "return_dict": True}


OPTIONS = {"max_new_tokens": 12, "do_sample": False}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_after_a_replayed_prompt_are_those_of_stock(name):
    stock, model = made(name), made(name)
    decoding = in_graphs(model)
    for seed in range(UNTIL_REPLAY + 3):
        ids = prompt(2, 11, seed)
        assert torch.equal(model.generate(ids, **OPTIONS), stock.generate(ids, **OPTIONS))
    report = decoding.report()
    assert (report.prompts, report.replayed_prompts) == (1, 3)
    assert not report.stock


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_one_graph_is_for_many_lengths(name):
    stock, model = made(name), made(name)
    decoding = in_graphs(model)
    lengths = [WINDOW - 1, 2, 3, 7, 5, WINDOW - 2, 4] if name == "gemma3" else [16, 9, 5, 16, 2, 11, 15]
    for seed, length in enumerate(lengths):
        ids = prompt(2, length, seed)
        assert torch.equal(model.generate(ids, **OPTIONS), stock.generate(ids, **OPTIONS))
    if name != "gemma3":  # its window is shorter than the smallest size
        assert decoding.report().prompts == 1
        assert decoding.report().replayed_prompts == len(lengths) - UNTIL_REPLAY


@pytest.mark.parametrize("tokens", [2, 15, 16, 17, 100, 127, 128, 129, 511, 1025, 4095])
def test_a_size_is_an_eighth_longer_at_most_or_a_few_tokens(tokens):
    assert tokens <= size_of(tokens) <= max(tokens + 15, tokens * 9 // 8)
    assert size_of(size_of(tokens)) == size_of(tokens)


def test_padding_runs_as_before():
    stock, model = made(), made()
    decoding = in_graphs(model)
    options = {**padded(), **OPTIONS}
    for _ in range(UNTIL_REPLAY + 2):
        assert torch.equal(model.generate(**options), stock.generate(**options))
    report = decoding.report()
    assert report.replayed_prompts == 0
    assert report.stock == {
        "prompts: tokens are hidden, or positions do not count from 0": UNTIL_REPLAY + 2 - EAGER_RUNS
    }


def looking_ahead() -> Any:
    """Return a model in which each token sees the next one."""
    model = made()
    kind = type(model.model.norm)
    looking = type(kind.__name__, (kind,), {"forward": lambda self, x: kind.forward(self, x + x.roll(-1, 1))})
    model.model.layers[0].input_layernorm.__class__ = looking
    return model


def test_a_model_that_looks_ahead_is_left_as_it_was():
    stock, model = looking_ahead(), looking_ahead()
    decoding = in_graphs(model)
    for seed in range(UNTIL_REPLAY + 2):
        ids = prompt(1, 9, seed)
        assert torch.equal(model.generate(ids, **OPTIONS), stock.generate(ids, **OPTIONS))
    assert decoding.report().prompts == 0
    assert any("see later ones" in reason for reason in decoding.report().stock)


def masked() -> Any:
    """Return a model in which a mask that hides nothing makes a difference."""
    model = made()
    inner = type(model.model)

    def forward(self: Any, *args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        found = inner.forward(self, *args, attention_mask=attention_mask, **kwargs)
        found.last_hidden_state = found.last_hidden_state.roll(3 * (attention_mask is not None), -1)
        return found

    model.model.__class__ = type(inner.__name__, (inner,), {"forward": forward})
    return model


def test_a_model_that_needs_its_mask_is_left_as_it_was():
    model = masked()
    graphs = PromptGraphs(again, replayed, watch())
    for seed in range(UNTIL_REPLAY + 2):
        ids = prompt(1, 9, seed)
        given = {"attention_mask": torch.ones_like(ids)}
        with torch.no_grad():
            found, _ = graphs.run(model, inputs_of(model, ids) | given, lambda: "")
            assert torch.equal(found.logits, model(**inputs_of(model, ids), **given).logits)
    assert graphs.captured == 0
    assert any("without a mask" in reason for reason in graphs.reasons())


def test_a_forward_that_waits_for_the_device_is_left_as_it_was():
    stock, model = made(), made()
    norm = model.model.norm
    forward = type(norm).forward
    norm.__class__ = type("Norm", (type(norm),), {"forward": lambda self, x: forward(self, x) if x.sum().item() else x})
    decoding = in_graphs(model)
    decoding._capture = lambda *_: pytest.fail("not asked for")  # steps are not what is tried here
    for seed in range(UNTIL_REPLAY + 2):
        ids = prompt(1, 9, seed)
        found = model.generate(ids, max_new_tokens=1, do_sample=False)
        assert torch.equal(found, stock.generate(ids, max_new_tokens=1, do_sample=False))
    assert decoding.report().prompts == 0
    assert any("capturing" in reason for reason in decoding.report().stock)


def test_replays_that_are_slower_end():
    stock, model = made(), made()
    decoding = in_graphs(model, 9.0, 5.0, 6.0, 5.5)
    for seed in range(UNTIL_REPLAY + 5):
        ids = prompt(1, 9, seed)
        assert torch.equal(model.generate(ids, **OPTIONS), stock.generate(ids, **OPTIONS))
    report = decoding.report()
    assert (report.prompts, report.replayed_prompts) == (1, 2)
    assert any("5.50 ms" in reason and "5.00 ms" in reason for reason in report.stock)


def test_new_weights_are_captured_again():
    stock, model = made(), made()
    decoding = in_graphs(model)
    for seed in range(UNTIL_REPLAY + 1):
        model.generate(prompt(1, 9, seed), **OPTIONS)
    for one in (stock, model):
        one.lm_head.weight = torch.nn.Parameter(one.lm_head.weight.detach() * -1.0)
    for seed in range(2 * EAGER_RUNS + 2):
        ids = prompt(1, 9, seed)
        assert torch.equal(model.generate(ids, **OPTIONS), stock.generate(ids, **OPTIONS))
    assert decoding.report().prompts == 2


def test_hooks_leave_prompts_to_stock():
    model, seen = made(), []
    decoding = in_graphs(model)
    for seed in range(UNTIL_REPLAY + 1):
        model.generate(prompt(1, 9, seed), **OPTIONS)
    model.model.layers[0].register_forward_hook(lambda *_: seen.append(1))
    model.generate(prompt(1, 9), **OPTIONS)
    assert len(seen) == OPTIONS["max_new_tokens"]
    assert decoding.report().replayed_prompts == 1


def test_a_loop_of_the_caller_keeps_its_cache():
    model = made()
    decoding = in_graphs(model)

    def loop(model: Any, ids: torch.Tensor, *, generation_config: Any, **others: Any) -> Any:
        for known in ("logits_processor", "stopping_criteria"):
            others.pop(known)
        return model._prefill(ids, generation_config, others).past_key_values

    for seed in range(UNTIL_REPLAY + 1):
        model.generate(prompt(1, 9, seed), **OPTIONS)
    cache = model.generate(prompt(1, 9, 1), custom_generate=loop, **OPTIONS)
    before = [layer.keys.clone() for layer in cache.layers]
    model.generate(prompt(1, 9, 2), **OPTIONS)
    assert all(torch.equal(was, layer.keys) for was, layer in zip(before, cache.layers, strict=True))
    assert decoding.report().replayed_prompts == 2
    assert any("custom_generate" in reason for reason in decoding.report().stock)


def test_a_setting_that_differs_in_steps_alone_keeps_all_graphs():
    stock, model = made(), made()

    @contextlib.contextmanager
    def for_steps(self: Any) -> Iterator[None]:
        self.config.way_of_experts = "batched"  # as transformers sets it on GPUs
        try:
            yield
        finally:
            self.config.way_of_experts = "grouped"

    kind = type(model)
    model.__class__ = type(kind.__name__, (kind,), {"_optimize_model_for_decode": for_steps})
    model.config.way_of_experts = "grouped"
    decoding = in_graphs(model)
    for seed in range(UNTIL_REPLAY + 3):
        ids = prompt(1, 9, seed)
        assert torch.equal(model.generate(ids, **OPTIONS), stock.generate(ids, **OPTIONS))
    report = decoding.report()
    assert (report.captured, report.prompts, report.replayed_prompts) == (1, 1, 3)


def test_a_graph_serves_one_generation_at_a_time():
    stock, model = made(), made()
    decoding = in_graphs(model)
    for seed in range(UNTIL_REPLAY):
        model.generate(prompt(1, 9, seed), **OPTIONS)
    inner: list[torch.Tensor] = []

    class Nested(transformers.StoppingCriteria):
        def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            if not inner:
                inner.append(ids)
                inner[0] = model.generate(prompt(1, 9, 7), **OPTIONS)
            return torch.zeros(ids.shape[0], dtype=torch.bool)

    ids = prompt(1, 9, 5)
    found = model.generate(ids, **OPTIONS, stopping_criteria=transformers.StoppingCriteriaList([Nested()]))
    assert torch.equal(found, stock.generate(ids, **OPTIONS))
    assert torch.equal(inner[0], stock.generate(prompt(1, 9, 7), **OPTIONS))
    assert decoding.report().replayed_prompts == 1


def test_threads_get_the_tokens_of_stock():
    stock, model = made(), made()
    in_graphs(model)
    wrong: list[int] = []

    def work(seed: int) -> None:
        for round_number in range(6):
            ids = prompt(1, 9 + seed, 10 * seed + round_number)
            if not torch.equal(model.generate(ids, **OPTIONS), expected[seed, round_number]):
                wrong.append(seed)

    expected = {
        (seed, number): stock.generate(prompt(1, 9 + seed, 10 * seed + number), **OPTIONS)
        for seed in range(3)
        for number in range(6)
    }
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.turn("tilegym_db/models/prompt_graphs.py")  # captures many graphs
def test_graphs_that_are_used_least_are_dropped(monkeypatch):
    monkeypatch.setattr("tilegym_db.models.prompt_graphs.MAX_HELD", 2 * MIN_COUNTED)
    stock, model = made(), made()
    decoding = in_graphs(model)
    for length in (10, 20, 40, 10):
        for seed in range(UNTIL_REPLAY + PAYS):
            ids = prompt(1, length, seed)
            assert torch.equal(model.generate(ids, **OPTIONS), stock.generate(ids, **OPTIONS))
    assert decoding.prompts is not None
    assert {one.size for one in decoding.prompts.known if one.graph is not None} == {size_of(40), size_of(10)}
    assert decoding.report().prompts == 4


def test_all_graphs_together_are_bounded():
    assert 16 * MIN_COUNTED <= MAX_HELD  # else a few short prompts would take turns


@pytest.mark.turn("tilegym_db/models/prompt_graphs.py")  # captures many graphs
def test_dropped_graphs_that_did_not_pay_make_the_next_ones_wait(monkeypatch):
    monkeypatch.setattr("tilegym_db.models.prompt_graphs.MAX_HELD", MIN_COUNTED)
    model = made()
    decoding = in_graphs(model)
    for turn in range(2 * MAX_EAGER_RUNS):
        for length in (10, 20):
            model.generate(prompt(1, length, turn), max_new_tokens=1, do_sample=False)
    report = decoding.report()
    assert report.replayed_prompts > 4 * report.prompts > 0  # a capture takes as long as about two forwards


def test_a_model_that_changes_often_is_not_captured_each_time():
    model = made()
    decoding = in_graphs(model)
    rounds = 20
    for turn in range(rounds):
        model.config.adapter = turn  # as an adapter that is switched
        for seed in range(UNTIL_REPLAY + 1):
            model.generate(prompt(1, 9, seed), max_new_tokens=1, do_sample=False)
    assert 1 <= decoding.report().prompts <= 2


def test_no_graph_is_captured_without_a_proof():
    stock, model = looking_ahead(), looking_ahead()
    decoding = in_graphs(model)
    hidden = torch.ones(1, 9, dtype=torch.long)
    hidden[:, :3] = 0
    for seed in range(UNTIL_REPLAY + 3):
        mask = hidden if seed == EAGER_RUNS else None  # the prompt whose turn it would be to be proven
        ids = prompt(1, 9, seed)
        found = model.generate(ids, attention_mask=mask, **OPTIONS)
        assert torch.equal(found, stock.generate(ids, attention_mask=mask, **OPTIONS))
    assert decoding.report().prompts == 0


def test_a_proof_that_was_interrupted_is_made_again():
    model = made()
    decoding = in_graphs(model)
    for seed in range(EAGER_RUNS):
        decoding.prompts.run(model, inputs_of(model, prompt(1, 9, seed)), lambda: "")
    norm = model.model.norm
    kind, looking = type(norm), type("Norm", (type(norm),), {"forward": lambda *_: raised(KeyboardInterrupt())})
    norm.__class__ = looking
    with pytest.raises(KeyboardInterrupt):
        decoding.prompts.run(model, inputs_of(model, prompt(1, 9)), lambda: "")
    norm.__class__ = kind
    (size,) = decoding.prompts.known
    assert not size.tried
    assert not size.lock.locked()


def test_tokens_in_blocks_that_see_each_other_get_no_graph():
    stock, model = made(), made()
    kind = type(stock.model.norm)

    def in_blocks(self: Any, x: torch.Tensor) -> torch.Tensor:
        """Let the tokens of each block of five see the last one of it."""
        last = torch.arange(x.shape[1], device=x.device) // 5 * 5 + 4
        return kind.forward(self, x + x[:, last.clamp(max=x.shape[1] - 1)])

    for one in (stock, model):
        one.model.layers[0].input_layernorm.__class__ = type(kind.__name__, (kind,), {"forward": in_blocks})
    decoding = in_graphs(model)
    for length in (16,) * UNTIL_REPLAY + (12, 11, 7):  # the last token of 16 is alone in its block
        ids = prompt(1, length, length)
        options = {"max_new_tokens": 1, "do_sample": False}
        assert torch.equal(model.generate(ids, **options), stock.generate(ids, **options))
    assert decoding.report().prompts == 0


def test_a_forward_that_leaves_something_in_the_model_stays():
    stock, model = made(), made()
    norm = model.model.norm
    forward = type(norm).forward

    def leaving(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.seen = x.shape[1] * torch.ones(1)
        return forward(self, x)

    norm.__class__ = type("Norm", (type(norm),), {"forward": leaving})
    decoding = in_graphs(model)
    for seed in range(UNTIL_REPLAY + 2):
        ids = prompt(1, 9, seed)
        found = model.generate(ids, max_new_tokens=1, do_sample=False)
        assert torch.equal(found, stock.generate(ids, max_new_tokens=1, do_sample=False))
        assert norm.seen.item() == 9  # not the size of the proof
    assert decoding.report().prompts == 0
    assert any("changes seen" in reason for reason in decoding.report().stock)


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_filling_does_not_cross_a_limit_of_positions(kind):
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 12}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 8, "long_factor": [9.0] * 8}
    config = transformers.LlamaConfig(**{**TINY, "max_position_embeddings": 12 if kind == "dynamic" else 96})
    config.rope_parameters = rope
    models = []
    for _ in range(2):
        torch.manual_seed(5)
        models.append(transformers.LlamaForCausalLM(copy.deepcopy(config)).eval())
    stock, model = models
    decoding = in_graphs(model)
    scores: list[torch.Tensor] = []
    for length in (15, 14, 15, 13, 14, 15, 5, 9, 5, 9, 5, 9, 5, 9, 5, 9):
        ids = prompt(1, length, length)
        options = {"max_new_tokens": 3, "do_sample": False, "return_dict_in_generate": False}
        for one in (stock, model):
            keep = transformers.LogitsProcessorList([lambda _, given: scores.append(given.clone()) or given])
            one.generate(ids, **options, logits_processor=keep)
        torch.testing.assert_close(torch.stack(scores[:3]), torch.stack(scores[3:]), rtol=1e-4, atol=1e-5)
        scores.clear()
    assert 12 in limits_of(config)
    assert {5, 9} <= {one.size for one in decoding.prompts.known} <= {5, 9, 16}


def test_a_table_of_positions_is_not_exceeded():
    given = inputs_of(made(), prompt(1, 9))
    assert may_be_filled_up(given, 16, [8, 16])
    assert not may_be_filled_up(given, 16, [10])
    assert limits_of(transformers.GPT2Config(n_positions=10)) == [10]


@pytest.mark.parametrize("others", [{"mm_encoder_outputs": {}}, {"mm_encoder_outputs": {"image": None}}])
def test_a_prompt_without_images_may_have_a_graph(others):
    assert not why_not_prompt({**inputs_of(made(), prompt(1, 9)), **others})


@pytest.mark.parametrize(
    ("others", "reason"),
    [
        ({"mm_encoder_outputs": {"image": torch.ones(1)}}, "mm_encoder_outputs"),
        ({"attention_mask": {"full_attention": None}}, "attention_mask"),
        ({"position_ids": torch.ones(3, 1, 9)}, "position_ids"),
        ({"logits_to_keep": 2}, "other outputs"),
    ],
)
def test_other_prompts_have_none(others, reason):
    assert reason in why_not_prompt({**inputs_of(made(), prompt(1, 9)), **others})


def test_a_mask_of_other_numbers_than_one_runs_as_before():
    model = made()
    decoding = in_graphs(model)
    for seed in range(UNTIL_REPLAY + 2):
        model.generate(prompt(1, 9, seed), attention_mask=torch.full((1, 9), 2), **OPTIONS)
    assert decoding.report().replayed_prompts == 0


def test_other_numerics_have_other_graphs():
    model = made()
    decoding = in_graphs(model)
    for seed in range(UNTIL_REPLAY + 1):
        model.generate(prompt(1, 9, seed), **OPTIONS)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        model.generate(prompt(1, 9), **OPTIONS)
    assert decoding.report().replayed_prompts == 1


def test_too_little_memory_is_not_for_good():
    model = made()
    decoding = in_graphs(model)
    capture, refusals = decoding.prompts._capture, [1]
    decoding.prompts._capture = lambda *of: raised(torch.OutOfMemoryError("full")) if refusals.pop() else capture(*of)
    refusals[:] = [0, 1]
    options = {"max_new_tokens": 1, "do_sample": False}
    for seed in range(UNTIL_REPLAY + 2):
        model.generate(prompt(1, 9, seed), **options)
    assert decoding.report().stock == {"prompts of 1 x 16: OutOfMemoryError: full": 2}
    for seed in range(MAX_EAGER_RUNS):
        model.generate(prompt(1, 9, seed), **options)
    assert decoding.report().prompts == 1
    assert not decoding.report().stock


def test_an_error_of_a_capture_leaves_the_size_free():
    model = made()
    decoding = in_graphs(model)
    decoding.prompts._capture = lambda *_: raised(KeyboardInterrupt())
    for seed in range(UNTIL_REPLAY):
        model.generate(prompt(1, 9, seed), **OPTIONS)
    with pytest.raises(KeyboardInterrupt):
        model.generate(prompt(1, 9), **OPTIONS)
    assert not any(one.lock.locked() for one in decoding.prompts.known)
    assert not decoding.generations


def test_a_model_without_a_cache_in_its_outputs_generates():
    config = transformers.BertConfig(**{**TINY, "is_decoder": False})
    torch.manual_seed(5)
    model = transformers.BertLMHeadModel(config).eval()
    stock = copy.deepcopy(model)
    decoding = in_graphs(model)
    for seed in range(UNTIL_REPLAY + 1):
        ids = prompt(1, 9, seed)
        assert torch.equal(model.generate(ids, **OPTIONS), stock.generate(ids, **OPTIONS))
    assert any("no cache" in reason for reason in decoding.report().stock)


@pytest.mark.parametrize("tokens", [2, 15, 16, 17, 100, 256, 257, 512, 513, 4095])
def test_the_shortest_prompt_of_a_size_has_that_size(tokens):
    size, shortest = size_of(tokens), shortest_of(size_of(tokens))
    assert size_of(shortest) == size
    assert shortest == 2 or size_of(shortest - 1) < size


def test_a_wrapper_around_a_model_has_no_graphs_of_its_own():
    class Wrapper:
        """Finds the methods of the model inside, as adapters do."""

        def __init__(self, model: Any) -> None:
            self.model = model

        def __getattr__(self, name: str) -> Any:
            return getattr(self.model, name)

        def parameters(self) -> list[Any]:
            return [types.SimpleNamespace(device=torch.device("cuda"))]

    assert not Decoding.fits(Wrapper(made()))


def test_a_comparison_of_models_begins_with_a_captured_prompt():
    assert WARM_UP_ROUNDS > UNTIL_REPLAY


def test_unpatching_frees_the_graphs():
    model = made()
    decoding = in_graphs(model)
    for seed in range(UNTIL_REPLAY + 1):
        model.generate(prompt(1, 9, seed), **OPTIONS)
    decoding.remove()
    assert decoding.prompts is not None
    assert not decoding.prompts.known


def test_no_graph_is_made_after_unpatching():
    model = made()
    decoding = in_graphs(model)
    for seed in range(UNTIL_REPLAY):
        model.generate(prompt(1, 9, seed), **OPTIONS)
    inputs = inputs_of(model, prompt(1, 9))
    decoding.prompts.run(model, inputs, lambda: decoding.remove() or "")  # unpatched by another thread in between
    assert not decoding.prompts.known
    assert decoding.report().prompts == 0


def test_an_offloaded_cache_is_left_to_transformers():
    model, cache = made(), transformers.DynamicCache()
    assert not why_stock(model, model.generation_config, {"past_key_values": cache}, "sample")
    cache.offloading = True
    assert "offloaded" in why_stock(model, model.generation_config, {"past_key_values": cache}, "sample")


def test_layers_that_share_keys_do_not_keep_prompts_out():
    layers = ["sliding_attention", "full_attention"]
    config = transformers.Gemma3nTextConfig(
        **{**TINY, "num_hidden_layers": 4},
        head_dim=16,
        num_kv_shared_layers=2,
        sliding_window=40,
        layer_types=2 * layers,
        vocab_size_per_layer_input=97,
        hidden_size_per_layer_input=16,
        laurel_rank=8,
        activation_sparsity_pattern=[0.0] * 4,
    )
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    stock = copy.deepcopy(model)
    decoding = in_graphs(model)
    for seed, length in enumerate([9] * UNTIL_REPLAY + [16, 2, 7]):
        ids = prompt(1, length, seed)
        assert torch.equal(model.generate(ids, **OPTIONS), stock.generate(ids, **OPTIONS))
    assert decoding.report().replayed_prompts == 3


# A capture refuses kernels of experts on a CPU, which read tensors.
@pytest.mark.filterwarnings("ignore:tilegym-db")
@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "qwen3_moe", "qwen3_5", "gpt_oss", "deepseek_v3"])
def test_prompts_of_a_patched_model_are_captured_with_kernels(name, shop, build, monkeypatch):
    monkeypatch.setattr(Decoding, "fits", staticmethod(lambda model: True))
    monkeypatch.setattr("tilegym_db.models.decoding.captured", eager)
    monkeypatch.setattr(
        "tilegym_db.models.decoding.PromptGraphs", lambda capture, replayed: PromptGraphs(again, replayed, watch())
    )
    shop.offer()
    stock, model = build(name), build(name)
    handle = patch(model)
    for seed in range(UNTIL_REPLAY + 2):
        ids = prompt(2, 9, seed)
        assert torch.equal(model.generate(ids, **OPTIONS), stock.generate(ids, **OPTIONS))
    report = handle.report()
    assert (report.decoding.prompts, report.decoding.replayed_prompts) == (1, 2)
    assert not any("prompt" in reason for reason in report.decoding.stock)
    assert sum(report.hits().values()) > 0
