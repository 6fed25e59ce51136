"""``generate`` of a patched model with its steps in graphs gives what stock ``generate`` gives, or runs stock and says why.

Without a GPU a graph is a forward that runs again on the same inputs: all but the capture itself is then tried.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import transformers
from decoding_models import CONFIGS, DEVICE, HYBRIDS, ON_GPU, WINDOW, in_graphs, made, padded, prompt
from host_graphs import eager

from tilegym_db.models.call_site import AUTOCAST
from tilegym_db.models.decoding import Decoding
from tilegym_db.models.fixed_cache import BUCKET, _copied, bucket_of
from tilegym_db.models.graphs import captured
from tilegym_db.models.next_inputs import CapturedForward

pytestmark = pytest.mark.sweep


@pytest.fixture
def model() -> Any:
    return made()


def stock_and_graphs(model: Any, ids: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor, Decoding]:
    torch.manual_seed(3)
    stock = model.generate(ids, **options)
    decoding = in_graphs(model)
    torch.manual_seed(3)
    model.generate(ids, **options)  # the first generation captures
    torch.manual_seed(3)
    return stock, model.generate(ids, **options), decoding


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_are_those_of_stock(name):
    stock, found, decoding = stock_and_graphs(made(name), prompt(2), max_new_tokens=24, do_sample=False)
    assert torch.equal(stock, found)
    assert decoding.report().replayed > 20
    assert not decoding.report().stock


OPTIONS: dict[str, dict[str, Any]] = {
    "left padding": padded(),
    "sampling": {"inputs": prompt(2), "do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9},
    "several sequences a prompt": {"inputs": prompt(2), "do_sample": True, "num_return_sequences": 3},
    "a processor": {"inputs": prompt(1), "do_sample": False, "repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
    "an early stop": {"inputs": prompt(4, seed=1), "do_sample": True, "eos_token_id": list(range(60, 97))},
    "a longer cache than a bucket": {"inputs": prompt(1, BUCKET + 3), "do_sample": False},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_what_generate_offers_stays_as_it_is(name, model):
    options = dict(OPTIONS[name])
    ids = options.pop("inputs")
    stock, found, decoding = stock_and_graphs(model, ids, max_new_tokens=20, **options)
    assert torch.equal(stock, found)
    assert decoding.report().captured == 1


PROMPTS = {"shorter": WINDOW // 2, "one less": WINDOW - 1, "full": WINDOW, "one more": WINDOW + 1, "longer": 3 * WINDOW}


@pytest.mark.sweep(22)
@pytest.mark.parametrize("length", PROMPTS.values(), ids=PROMPTS)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", HYBRIDS)
def test_windows_and_states_decode_as_in_stock(name, batch, length):
    ids = prompt(batch, length)
    stock, found, decoding = stock_and_graphs(made(name), ids, max_new_tokens=2 * WINDOW, do_sample=False)
    assert torch.equal(stock, found)
    report = decoding.report()
    assert report.replayed > 2 * WINDOW
    assert not report.stock


@pytest.mark.parametrize("name", HYBRIDS)
def test_left_padding_of_windows_and_states_is_that_of_stock(name):
    options = padded()
    ids = options.pop("inputs")
    stock, found, decoding = stock_and_graphs(made(name), ids, max_new_tokens=2 * WINDOW, **options)
    assert torch.equal(stock, found)
    assert decoding.report().replayed > 2 * WINDOW


@pytest.mark.parametrize("name", ["gemma3", "qwen3_5", "falcon_h1", "mamba", "mamba2"])
def test_a_shorter_prompt_after_a_longer_one_decodes_as_in_stock(name):
    stock, model = made(name), made(name)
    decoding = in_graphs(model)
    for length, seed in ((40, 1), (4, 2), (WINDOW + 3, 3), (WINDOW - 1, 4), (40, 5)):
        ids = prompt(2, length, seed)
        options = {"max_new_tokens": 16, "do_sample": False}
        assert torch.equal(model.generate(ids, **options), stock.generate(ids, **options))
    assert decoding.report().replayed > 40


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_5"])
def test_a_prompt_in_chunks_decodes_as_in_stock(name):
    options = {"max_new_tokens": 20, "do_sample": False, "prefill_chunk_size": 5}
    stock, found, decoding = stock_and_graphs(made(name), prompt(2, 17), **options)
    assert torch.equal(stock, found)
    assert decoding.report().replayed > 15


def test_a_window_has_one_graph_before_it_is_full_and_one_after():
    _, _, decoding = stock_and_graphs(made("gemma3"), prompt(1, 4), max_new_tokens=2 * WINDOW, do_sample=False)
    assert decoding.report().captured == 2


def test_states_in_lists_are_copied_to_one_place():
    found = [torch.ones(2), None, {"a": torch.ones(3), "b": 1}]
    kept = _copied(None, found)
    places = [kept[0].data_ptr(), kept[2]["a"].data_ptr()]
    again = _copied(kept, [torch.zeros(2), None, {"a": torch.zeros(3), "b": 2}])
    assert [again[0].data_ptr(), again[2]["a"].data_ptr()] == places
    assert again[2]["b"] == 2
    assert not again[0].any()


def test_graphs_of_other_memory_are_dropped(model):
    decoding = in_graphs(model)
    options = {"max_new_tokens": 20, "do_sample": False}
    stock = made().generate(prompt(), **options)
    assert torch.equal(model.generate(prompt(), **options), stock)
    (cache,) = decoding._caches.values()
    layer = cache.static.layers[0]
    layer.keys = layer.keys.clone()
    assert torch.equal(model.generate(prompt(), **options), stock)
    assert decoding.report().captured == 2


def test_a_capture_that_fails_leaves_the_cache_as_it_was(monkeypatch):
    model, calls = made("gemma3"), []
    last = model.model.layers[-1].mlp
    stock = model.generate(prompt(2), max_new_tokens=20, do_sample=False)
    decoding = in_graphs(model)

    def waits(x: torch.Tensor) -> torch.Tensor:
        calls.append(float(x[0, 0, 0]) if ON_GPU else x[0, 0, 0].item())  # no graph may contain it
        return type(last).forward(last, x)

    monkeypatch.setattr(last, "forward", waits)
    monkeypatch.setattr("tilegym_db.models.graphs.has_hooks", lambda module: False)
    assert torch.equal(model.generate(prompt(2), max_new_tokens=20, do_sample=False), stock)
    assert decoding.report().replayed == 0
    assert any("cannot be captured" in reason for reason in decoding.report().stock)


def test_a_cache_that_changes_on_the_host_runs_stock(monkeypatch):
    from transformers.cache_utils import StaticLayer

    update = StaticLayer.update

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls = getattr(self, "calls", 0) + 1
        return update(self, *args, **kwargs)

    monkeypatch.setattr(StaticLayer, "update", counting)
    stock, found, decoding = stock_and_graphs(made(), prompt(), max_new_tokens=20, do_sample=False)
    assert torch.equal(stock, found)
    assert decoding.report().replayed == 0
    assert any("changes calls on the host" in reason for reason in decoding.report().stock)


STOCK: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 2},
    "no cache": {"use_cache": False},
    "few tokens": {"max_new_tokens": 3},
    "a cache of the caller": {"past_key_values": "dynamic"},
    "a static cache": {"cache_implementation": "static", "disable_compile": True},
    "the cache is returned": {"return_dict_in_generate": True},
    "hidden states": {"return_dict_in_generate": True, "output_hidden_states": True},
}


@pytest.mark.parametrize("name", STOCK)
def test_what_is_not_understood_runs_stock_with_a_reason(name, model):
    decoding, options = in_graphs(model), dict(STOCK[name])
    if options.get("past_key_values"):
        options["past_key_values"] = transformers.DynamicCache(config=model.config)
    model.generate(prompt(), **{"max_new_tokens": 12, "do_sample": False, **options})
    report = decoding.report()
    assert report.replayed == 0
    assert len(report.stock) == 1


@pytest.mark.parametrize("new", [6, 12])
def test_few_tokens_over_states_alone_run_stock(new):
    stock, found, decoding = stock_and_graphs(made("mamba"), prompt(2, 20), max_new_tokens=new, do_sample=False)
    assert torch.equal(stock, found)
    assert bool(decoding.report().stock) == (new < 8)


def test_hooks_on_a_module_are_called_for_every_token(model):
    decoding, calls = in_graphs(model), []
    hook = model.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    model.generate(prompt(), max_new_tokens=12, do_sample=False)
    hook.remove()
    assert len(calls) == 12
    assert decoding.report().replayed == 0


def test_other_weights_are_never_answered_from_an_old_graph(model):
    decoding, other = in_graphs(model), made()
    ids, options = prompt(), {"max_new_tokens": 12, "do_sample": False}
    model.generate(ids, **options)
    with torch.no_grad():  # in place
        for parameter in (*model.parameters(), *other.parameters()):
            parameter.mul_(0.5)
    assert torch.equal(model.generate(ids, **options), other.generate(ids, **options))
    for one in (model, other):  # replaced
        torch.manual_seed(9)
        one.model.layers[0].mlp.up_proj = torch.nn.Linear(64, 96, bias=False).to(DEVICE)
    assert torch.equal(model.generate(ids, **options), other.generate(ids, **options))
    assert decoding.report().captured == 2


def test_hooks_of_all_modules_are_called_for_every_token(model):
    decoding, calls = in_graphs(model), []
    options = {"max_new_tokens": 12, "do_sample": False}
    model.generate(prompt(), **options)
    replayed = decoding.report().replayed
    hook = torch.nn.modules.module.register_module_forward_hook(lambda module, *_: calls.append(module))
    model.generate(prompt(), **options)
    hook.remove()
    assert calls.count(model.model.norm) == 12
    assert decoding.report().replayed == replayed


class Adapted(torch.nn.Module):
    """A product with one of several additions, as adapters are: the one in use is a setting, and all weights stay."""

    def __init__(self, inner: torch.nn.Linear) -> None:
        super().__init__()
        self.inner, self.active, self.scale = inner, ["first"], {"first": 0.5}
        self.added = torch.nn.ModuleDict({name: torch.nn.Linear(64, 96, bias=False) for name in ("first", "second")})
        self.function = torch.tanh

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added = [self.scale.get(name, 0.3) * self.function(self.added[name](x)) for name in self.active]
        return self.inner(x) + sum(added)


SETTINGS = {
    "another adapter": lambda one: setattr(one, "active", ["second"]),
    "no adapter": lambda one: one.active.clear(),
    "another scale": lambda one: one.scale.update(first=2.0),
    "another function": lambda one: setattr(one, "function", torch.sigmoid),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_changed_settings_of_modules_are_captured_again(name):
    models = made(), made()
    for one in models:
        torch.manual_seed(9)
        one.model.layers[0].mlp.up_proj = Adapted(one.model.layers[0].mlp.up_proj).to(DEVICE)
    stock, model = models
    decoding, options = in_graphs(model), {"max_new_tokens": 12, "do_sample": False}
    assert torch.equal(model.generate(prompt(), **options), stock.generate(prompt(), **options))
    for one in models:
        SETTINGS[name](one.model.layers[0].mlp.up_proj)
    assert torch.equal(model.generate(prompt(), **options), stock.generate(prompt(), **options))
    assert decoding.report().captured == 2
    assert not decoding.report().stock


def test_an_epsilon_changed_after_a_capture_counts(model):
    stock, decoding, options = made(), in_graphs(model), {"max_new_tokens": 12, "do_sample": False}
    model.generate(prompt(), **options)
    for one in (stock, model):
        one.model.norm.variance_epsilon = one.model.layers[0].input_layernorm.variance_epsilon = 50.0
    assert torch.equal(model.generate(prompt(), **options), stock.generate(prompt(), **options))
    assert decoding.report().captured == 2


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_that_did_not_change_is_captured_once(name):
    model = made(name)
    decoding, captured = in_graphs(model), []
    for _ in range(3):
        model.generate(prompt(2, 3 * WINDOW), max_new_tokens=12, do_sample=False)
        captured.append(decoding.report().captured)
    assert captured == [captured[0]] * 3


def test_autocast_runs_stock_between_graphs(model):
    stock, decoding, options = made(), in_graphs(model), {"max_new_tokens": 12, "do_sample": False}
    for enabled in (False, True, False, True):
        with torch.autocast(DEVICE, torch.bfloat16, enabled=enabled):
            assert torch.equal(model.generate(prompt(), **options), stock.generate(prompt(), **options))
    assert decoding.report().captured == 1
    assert decoding.report().stock == {AUTOCAST: 2}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_another_attention_is_captured_again(attention, model):
    decoding, options = in_graphs(model), {"max_new_tokens": 12, "do_sample": False}
    model.generate(prompt(), **options)
    model.set_attn_implementation(attention)
    model.generate(prompt(), **options)
    assert decoding.report().captured == (2 if attention == "eager" else 1)


def test_another_dtype_is_captured_again(model):
    stock, decoding, options = made(), in_graphs(model), {"max_new_tokens": 12, "do_sample": False}
    for dtype in (torch.bfloat16, torch.float16, torch.bfloat16, torch.float32):
        assert torch.equal(model.to(dtype).generate(prompt(), **options), stock.to(dtype).generate(prompt(), **options))
    assert decoding.report().captured == 4


def test_batches_in_turns_keep_their_graphs(model):
    stock, decoding, options = made(), in_graphs(model), {"max_new_tokens": 12, "do_sample": False}
    for batch in (1, 3, 1, 2, 3):
        assert torch.equal(model.generate(prompt(batch), **options), stock.generate(prompt(batch), **options))
    assert decoding.report().captured == 3


def test_a_mode_sees_the_operations_of_every_token(model):
    from torch.utils.flop_counter import FlopCounterMode

    stock, decoding, options = made(), in_graphs(model), {"max_new_tokens": 12, "do_sample": False}
    model.generate(prompt(), **options)
    counts = []
    for one in (stock, model):
        with FlopCounterMode(display=False) as counter:
            one.generate(prompt(), **options)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1]
    assert any("mode" in reason for reason in decoding.report().stock)


def test_a_default_device_keeps_the_graphs(model):
    decoding = in_graphs(model)
    with torch.device(DEVICE):
        model.generate(prompt(), max_new_tokens=12, do_sample=False)
    assert decoding.report().replayed > 0


def test_a_model_on_another_kind_of_device_runs_stock(model):
    decoding, options = in_graphs(model), {"max_new_tokens": 12, "do_sample": False}
    stock = made().generate(prompt(), **options)
    decoding.kind = "another"
    assert torch.equal(model.generate(prompt(), **options), stock)
    assert decoding.report().replayed == 0


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_5"])
def test_an_interruption_of_a_capture_leaves_nothing_behind(name):
    model, options = made(name), {"max_new_tokens": 20, "do_sample": False}
    stock = model.generate(prompt(2), **options)
    is_interrupted = [True]

    def interrupts(forward: Any, inputs: Mapping[str, Any]) -> CapturedForward:
        made_graph = (captured if ON_GPU else eager)(forward, inputs)
        if is_interrupted.pop():
            raise KeyboardInterrupt
        is_interrupted.append(False)
        return made_graph

    decoding = Decoding(model, interrupts)
    decoding.install()
    with pytest.raises(KeyboardInterrupt):
        model.generate(prompt(2), **options)
    is_interrupted.append(False)
    assert torch.equal(model.generate(prompt(2), **options), stock)
    assert torch.equal(model.generate(prompt(2), **options), stock)
    assert decoding.report().replayed > 20
    assert not decoding.report().stock


def test_a_shorter_prompt_after_a_longer_one_sees_nothing_of_it(model):
    stock = made()
    in_graphs(model)
    for length, seed in ((60, 1), (4, 2), (33, 3)):
        ids = prompt(2, length, seed)
        options = {"max_new_tokens": 16, "do_sample": False}
        assert torch.equal(model.generate(ids, **options), stock.generate(ids, **options))


@pytest.mark.skipif(ON_GPU, reason="two threads of one process would capture at the same time")
def test_two_threads_get_their_own_tokens(model):
    stock, decoding, found = made(), in_graphs(model), {}
    options = {"max_new_tokens": 20, "do_sample": False}

    def generate(seed: int) -> None:
        found[seed] = model.generate(prompt(1, 8, seed), **options)

    threads = [threading.Thread(target=generate, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[seed], stock.generate(prompt(1, 8, seed), **options)) for seed in range(4))
    assert decoding.report().replayed > 0


def test_an_error_in_the_middle_gives_the_cache_back(model):
    decoding = in_graphs(model)

    class Interrupts(transformers.LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if input_ids.shape[1] > 15:
                raise KeyboardInterrupt
            return scores

    with pytest.raises(KeyboardInterrupt):
        model.generate(
            prompt(),
            max_new_tokens=30,
            do_sample=False,
            logits_processor=transformers.LogitsProcessorList([Interrupts()]),
        )
    model.generate(prompt(), max_new_tokens=30, do_sample=False)
    assert not decoding.report().stock


@pytest.mark.parametrize(
    "error",
    [RuntimeError("operation not permitted when stream is capturing"), torch.OutOfMemoryError("Tried to allocate")],
)
def test_a_forward_that_cannot_be_captured_runs_stock(error, model):
    def fails(model: Any, inputs: Mapping[str, Any]) -> CapturedForward:
        raise error

    stock = model.generate(prompt(), max_new_tokens=12, do_sample=False)
    decoding = Decoding(model, fails)
    decoding.install()
    for _ in range(2):
        assert torch.equal(stock, model.generate(prompt(), max_new_tokens=12, do_sample=False))
    assert any(f"cannot be captured: {type(error).__name__}" in reason for reason in decoding.report().stock)
    assert decoding.report().cache_bytes == 0


def test_no_memory_for_a_fixed_cache_runs_stock(model, monkeypatch):
    from transformers.cache_utils import StaticLayer

    stock, decoding, initialise = made(), in_graphs(model), StaticLayer.lazy_initialization
    layers = []

    def fails(self: Any, *states: torch.Tensor) -> None:
        layers.append(self)
        if len(layers) > 1:
            raise torch.OutOfMemoryError("Tried to allocate")
        initialise(self, *states)

    monkeypatch.setattr(StaticLayer, "lazy_initialization", fails)
    options = {"max_new_tokens": 12, "do_sample": False}
    for _ in range(2):
        assert torch.equal(model.generate(prompt(), **options), stock.generate(prompt(), **options))
    assert len(layers) == 2  # it is not tried again
    assert decoding.report().cache_bytes == 0
    assert sum(decoding.report().stock.values()) == 2


def test_removing_gives_the_class_back_and_frees_the_caches(model):
    before = type(model)
    decoding = in_graphs(model)
    model.generate(prompt(), max_new_tokens=12, do_sample=False)
    assert decoding.report().cache_bytes > 0
    decoding.remove()
    assert type(model) is before
    assert decoding.report().cache_bytes == 0


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("token", range(4))
def test_removing_while_a_token_is_streamed_frees_all(token, name):
    class Removing(transformers.generation.streamers.BaseStreamer):
        seen = 0

        def put(self, value: torch.Tensor) -> None:
            if self.seen == token:
                decoding.remove()
            self.seen += 1

        def end(self) -> None:
            pass

    stock, model, options = made(name), made(name), {"max_new_tokens": 20, "do_sample": False}
    decoding = in_graphs(model)
    found = model.generate(prompt(1, WINDOW - 4), streamer=Removing(), **options)
    assert torch.equal(found, stock.generate(prompt(1, WINDOW - 4), **options))
    assert type(model) is type(stock)
    assert decoding.report().cache_bytes == 0
    assert (decoding.report().replayed > 0) == (token > 1)


def test_after_removal_below_another_class_generation_is_stock(model):
    decoding = in_graphs(model)
    model.__class__ = type("Wrapped", (type(model),), {})
    decoding.remove()
    model.generate(prompt(), max_new_tokens=12, do_sample=False)
    assert decoding.report().replayed == 0
    assert decoding.report().cache_bytes == 0


@pytest.mark.parametrize("length", [1, 255, 256, 257, 4000, 5000, 40_000])
def test_a_bucket_is_at_most_a_sixteenth_longer(length):
    assert length <= bucket_of(length) <= max(length * 17 // 16 + 1, length + BUCKET)


def test_a_count_of_a_window_that_is_read_leaves_steps_to_stock():
    stock, model = made("mistral with a window"), made("mistral with a window")
    kind = type(model.model.layers[0].self_attn)

    def counting(self: Any, *args: Any, past_key_values: Any = None, **others: Any) -> Any:
        tokens = past_key_values.get_seq_length(self.layer_idx)  # as attention does that biases by distance
        found, *more = kind.forward(self, *args, past_key_values=past_key_values, **others)
        return (found * (1 + tokens), *more)

    for one in (stock, model):
        one.model.layers[0].self_attn.__class__ = type(kind.__name__, (kind,), {"forward": counting})
    decoding = in_graphs(model)
    for seed in range(2):
        ids = prompt(1, 5, seed)
        options = {"max_new_tokens": 20, "do_sample": False}
        assert torch.equal(model.generate(ids, **options), stock.generate(ids, **options))
    assert decoding.report().replayed == 0
    assert any("how many tokens a window has" in reason for reason in decoding.report().stock)
