"""Prompts of ``generate`` in graphs give what stock gives, or run as before and say why.

Without a GPU a graph is a forward that runs again, with its results in the memory of the first run.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import transformers
from decoding_models import CONFIGS, WINDOW, made, padded, prompt
from host_graphs import NoWaiting, capturing, eager

from tilegym_db.models.bench.model_bench import WARM_UP_ROUNDS
from tilegym_db.models.decoding import Decoding, copied
from tilegym_db.models.next_inputs import CapturedForward, cache_of
from tilegym_db.models.prompt_graphs import EAGER_RUNS, MAX_HELD, PromptGraphs, size_of
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
    with NoWaiting(), capturing():
        outputs = forward(**given)
    for value in tensors_of(outputs):
        value.zero_()  # a capture computes nothing

    def replay() -> None:
        with NoWaiting(), capturing():
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


OPTIONS = {"max_new_tokens": 12, "do_sample": False}


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
    assert decoding.report().replayed_prompts == 0


def test_a_model_that_looks_ahead_is_left_as_it_was():
    stock, model = made(), made()
    kind = type(stock.model.norm)
    looking = type(kind.__name__, (kind,), {"forward": lambda self, x: kind.forward(self, x + x.roll(-1, 1))})
    for one in (stock, model):
        one.model.layers[0].input_layernorm.__class__ = looking
    decoding = in_graphs(model)
    for seed in range(UNTIL_REPLAY + 2):
        ids = prompt(1, 9, seed)
        assert torch.equal(model.generate(ids, **OPTIONS), stock.generate(ids, **OPTIONS))
    assert decoding.report().prompts == 0
    assert any("see later ones" in reason for reason in decoding.report().stock)


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
    for seed in range(UNTIL_REPLAY + 1):
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


def test_graphs_that_are_used_least_are_dropped(monkeypatch):
    monkeypatch.setattr("tilegym_db.models.prompt_graphs.MAX_HELD", 40)
    stock, model = made(), made()
    decoding = in_graphs(model)
    for length in (10, 20, 40, 10):
        for seed in range(UNTIL_REPLAY + 1):
            ids = prompt(1, length, seed)
            assert torch.equal(model.generate(ids, **OPTIONS), stock.generate(ids, **OPTIONS))
    assert decoding.prompts is not None
    held = sum(one.batch * one.size for one in decoding.prompts._sizes.values() if one.graph is not None)
    assert held <= 40 + size_of(40) <= MAX_HELD


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
    assert not decoding.prompts._sizes
