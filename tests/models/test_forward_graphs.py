"""Forwards in graphs give what stock gives, or run as before and say why.

Without a GPU a graph is a forward that runs again, with its results in the memory of the first run.
"""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import pickle
import random
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import pytest
import torch
import transformers
from decoding_models import CONFIGS, made, prompt
from host_graphs import NoWaiting, capturing, deciding_as_now

from tilegym_db.models import forward_graphs
from tilegym_db.models.call_site import AUTOCAST, IN_TRAINING, NEEDS_GRAD, TRACED, UNPATCHED, change_class, subclass
from tilegym_db.models.decoding import Decoding
from tilegym_db.models.forward_graphs import (
    EAGER_RUNS,
    IN_USE,
    MAX_FAILURES,
    MAX_MS,
    MAX_UNPAID,
    ForwardGraphs,
    copied_outputs,
    why_not_copied,
    why_not_inputs,
)
from tilegym_db.models.graphs import MAX_EAGER_RUNS, GraphedCall, copied, masks_as_before, state_or_reason
from tilegym_db.models.next_inputs import CapturedForward
from tilegym_db.models.patch import PatchOptions

UNTIL_REPLAY = EAGER_RUNS + 2
"""Forwards of a form before the first one that is a replay: timed ones, that of the proof and that of the capture."""
ENCODER = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
ENCODERS: dict[str, Callable[[], Any]] = {
    "bert": lambda: transformers.BertModel(transformers.BertConfig(**ENCODER)),
    "bert_labels": lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**ENCODER, num_labels=3)),
    "roberta": lambda: transformers.RobertaForTokenClassification(transformers.RobertaConfig(**ENCODER)),
    "modernbert": lambda: transformers.ModernBertModel(
        transformers.ModernBertConfig(**ENCODER, pad_token_id=0, cls_token_id=1, sep_token_id=2, bos_token_id=1)
    ),
    "distilbert": lambda: transformers.DistilBertModel(
        transformers.DistilBertConfig(vocab_size=97, dim=64, hidden_dim=96, n_layers=2, n_heads=4)
    ),
}


def tensors_in(outputs: Any) -> list[torch.Tensor]:
    if isinstance(outputs, torch.Tensor):
        return [outputs]
    if isinstance(outputs, Mapping):
        return [one for value in outputs.values() for one in tensors_in(value)]
    if isinstance(outputs, list | tuple):
        return [one for value in outputs for one in tensors_in(value)]
    layers = getattr(outputs, "layers", [])
    return [one for layer in layers for one in tensors_in(list(vars(layer).values()))]


def again(forward: Any, inputs: Mapping[str, Any]) -> CapturedForward:
    kept: list[torch.Tensor] = []
    given = copied(dict(inputs), kept)
    decided = deciding_as_now()
    with NoWaiting(), capturing():
        outputs = forward(**given)
    for value in tensors_in(outputs):
        value.zero_()  # a capture computes nothing

    def replay() -> None:
        with NoWaiting(), capturing(), decided():
            found = forward(**given)
        for value, new in zip(tensors_in(outputs), tensors_in(found), strict=True):
            value.copy_(new)

    return CapturedForward(replay, kept, outputs)


def watch(*times: float) -> Any:
    left = list(times)

    def start(device: torch.device) -> Any:
        def stop() -> Any:
            time = left.pop(0) if left else 1.0
            return lambda: time

        return stop

    return start


def in_graphs(model: Any, *times: float) -> ForwardGraphs:
    graphs = ForwardGraphs(model, again, stopwatch=watch(*times))
    graphs.install()
    return graphs


def encoder(name: str = "bert") -> Any:
    torch.manual_seed(0)
    return ENCODERS[name]().eval()


def ids(seed: int, batch: int = 2, tokens: int = 7) -> torch.Tensor:
    return torch.randint(3, 97, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def same(one: Any, other: Any) -> bool:
    pairs = tensors_in(one), tensors_in(other)
    return len(pairs[0]) == len(pairs[1]) > 0 and all(map(torch.equal, *pairs))


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("masked", ["nothing", "ones", "hidden"])
def test_replays_of_encoders_are_forwards(name, masked):
    stock, model = encoder(name), encoder(name)
    graphs = in_graphs(model)
    for seed in range(UNTIL_REPLAY + 3):
        inputs = {"input_ids": ids(seed)}
        if masked != "nothing":
            inputs["attention_mask"] = torch.ones(2, 7, dtype=torch.long)
        if masked == "hidden":
            inputs["attention_mask"][0, 7 - 1 - seed % 4 :] = 0
        assert same(model(**inputs), stock(**inputs))
    report = graphs.report()
    assert (report.captured, report.replayed) == (1, 3), report.stock


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("use_cache", [True, False])
def test_replays_of_decoders_are_forwards(name, use_cache):
    stock, model = made(name), made(name)
    graphs = in_graphs(model)
    for seed in range(UNTIL_REPLAY + 2):
        given = prompt(2, 11, seed)
        found, expected = model(given, use_cache=use_cache), stock(given, use_cache=use_cache)
        assert same(found, expected)
        assert type(found) is type(expected)
    report = graphs.report()
    assert (report.captured, report.replayed) == (1, 2), report.stock


def test_a_cache_of_a_replay_goes_on_as_that_of_stock():
    stock, model = made(), made()
    in_graphs(model)
    for seed in range(UNTIL_REPLAY + 1):
        first, expected = (one(prompt(2, 11, seed)) for one in (model, stock))
    token = prompt(2, 1, 5)
    found = model(token, past_key_values=first.past_key_values)
    assert same(found, stock(token, past_key_values=expected.past_key_values))
    assert list(map(type, found.past_key_values.layers)) == list(map(type, expected.past_key_values.layers))


@pytest.mark.parametrize("name", ["bert", "llama"])
@pytest.mark.parametrize("masked", [False, True])
def test_a_capture_has_the_masks_of_a_forward(name, masked, monkeypatch):
    model = encoder() if name == "bert" else made("llama")
    in_graphs(model)
    attention, masks = torch.nn.functional.scaled_dot_product_attention, set()

    def seen(*args: Any, attn_mask: Any = None, **others: Any) -> Any:
        masks.add(attn_mask is not None)
        return attention(*args, attn_mask=attn_mask, **others)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", seen)
    given = {"attention_mask": torch.ones(2, 7, dtype=torch.int64)} if masked else {}
    for seed in range(UNTIL_REPLAY + 2):
        model(ids(seed), **given, **({} if name == "bert" else {"use_cache": False}))
    assert masks == {False}


def test_a_mask_that_hides_tokens_is_traced_in_a_capture():
    masks = transformers.masking_utils
    with capturing(), masks_as_before(has_positions=True):
        assert masks.is_tracing(torch.ones(1, 4))
        assert not masks.is_tracing(None)
        assert masks.find_packed_sequence_indices(torch.arange(4)[None]) is not None
    assert not masks.is_tracing(torch.ones(1, 4))


def test_two_captures_at_once_leave_no_decision_behind():
    masks, began, ended = transformers.masking_utils, threading.Event(), threading.Event()
    before = masks.is_tracing, masks.find_packed_sequence_indices

    def second() -> None:
        began.set()
        with masks_as_before(has_positions=False):
            ended.wait(0.2)

    other = threading.Thread(target=second)
    with masks_as_before(has_positions=False):
        other.start()
        began.wait()
        other.join(0.1)  # it waits, or has begun
    ended.set()
    other.join()
    assert (masks.is_tracing, masks.find_packed_sequence_indices) == before


@pytest.mark.parametrize("name", ["position_ids", "decoder_position_ids"])
def test_positions_of_a_caller_may_be_of_packed_sequences(name, monkeypatch):
    seen = []
    context = forward_graphs.masks_as_before
    monkeypatch.setattr(forward_graphs, "masks_as_before", lambda **given: seen.append(given) or context(**given))
    model = with_forward(encoder(), lambda self, forward, inputs: forward(input_ids=inputs["input_ids"]))
    in_graphs(model)
    for seed in range(UNTIL_REPLAY):
        model(input_ids=ids(seed), **{name: torch.arange(7).expand(2, 7).contiguous()})
    assert seen == [{"has_positions": True}]


def test_outputs_stay_as_they_were_after_later_replays():
    model = encoder()
    in_graphs(model)
    for seed in range(UNTIL_REPLAY):
        model(ids(seed))
    first = model(ids(0))
    kept = copied_outputs(first)
    model(ids(1))
    assert same(first, kept)


@pytest.mark.parametrize("change", ["data", "parameter", "setting", "hook", "in place"])
def test_a_changed_model_is_never_answered_by_an_old_graph(change):
    stock, model = encoder(), encoder()
    graphs = in_graphs(model)
    for seed in range(UNTIL_REPLAY + 1):
        model(ids(seed))
    assert graphs.report().replayed == 1
    for one in (stock, model):
        dense = one.encoder.layer[0].output.dense
        if change == "data":
            dense.weight.data = dense.weight.data * 2
        elif change == "parameter":
            dense.weight = torch.nn.Parameter(dense.weight * 2)
        elif change == "setting":
            one.encoder.layer[0].output.LayerNorm.eps = 0.5
        elif change == "hook":
            dense.register_forward_hook(lambda module, args, output: output * 2)
        else:
            dense.weight.mul_(2)
    assert same(model(ids(9)), stock(ids(9)))


def with_forward(model: Any, forward: Callable[..., Any]) -> Any:
    """Give a model the forward ``forward(model, stock forward, inputs)``."""
    stock = type(model)
    members = {"forward": lambda self, **inputs: forward(self, functools.partial(stock.forward, self), inputs)}
    model.__class__ = type(stock.__name__, (stock,), members)
    return model


def _transpose(model: Any) -> None:
    weight = model.encoder.layer[0].attention.self.query.weight
    weight.data = weight.data.t()


def _replace_scale(model: Any) -> None:
    model.scale = torch.full((), 2.0)


def _replace_scales(model: Any) -> None:
    model.scales["all"] = torch.full((), 2.0)


def _change_own_config(model: Any) -> None:
    model.pooler.config.chunk_size_feed_forward = 5


@pytest.mark.parametrize("change", [_transpose, _replace_scale, _replace_scales, _change_own_config])
def test_changes_that_keep_the_addresses_end_the_graph(change):
    model = encoder()
    model.scale, model.scales = torch.ones(()), {"all": torch.ones(())}
    model.pooler.config = copy.deepcopy(model.config)
    graphs = in_graphs(model)
    for seed in range(UNTIL_REPLAY + 1):
        model(ids(seed))
    change(model)
    model(ids(0))
    assert graphs.report().replayed == 1


def test_a_call_site_that_leaves_the_model_keeps_the_graph():
    model = encoder()
    stock = type(model.pooler)
    change_class(model.pooler, subclass(stock, lambda self, *args: stock.forward(self, *args)))
    graphs = in_graphs(model)
    for seed in range(UNTIL_REPLAY):
        model(ids(seed))
    change_class(model.pooler, stock)
    model(ids(0))
    model(ids(1))
    assert graphs.report().captured == 1
    assert graphs.report().replayed == 2


def test_a_forward_that_a_patched_class_gets_ends_the_graph():
    model = encoder()
    stock = type(model.pooler)
    change_class(model.pooler, subclass(stock, lambda self, *args: stock.forward(self, *args)))
    graphs = in_graphs(model)
    for seed in range(UNTIL_REPLAY + 1):
        model(ids(seed))
    type(model.pooler).forward = lambda self, *args: stock.forward(self, *args) * 2
    model(ids(0))
    assert graphs.report().replayed == 1


def test_a_weight_with_fewer_rows_is_another_state():
    model = encoder()
    before = state_or_reason(model, "cpu")
    assert before == state_or_reason(model, "cpu")
    weight = model.pooler.dense.weight
    weight.data = weight.data[:5]
    assert before != state_or_reason(model, "cpu")


def test_a_forward_that_a_class_gets_later_is_seen(monkeypatch):
    model = encoder()
    graphs = in_graphs(model)
    for seed in range(UNTIL_REPLAY + 1):
        model(ids(seed))
    for cls in (transformers.BertModel, type(model.pooler)):
        graphs._is_as_it_was(model, GraphedCall())
        forward = cls.forward
        monkeypatch.setattr(cls, "forward", lambda *args, forward=forward, **others: forward(*args, **others))
        assert not graphs._is_as_it_was(model, GraphedCall())


def test_a_forward_that_other_code_gave_a_class_keeps_running(monkeypatch):
    cls, seen = transformers.models.bert.modeling_bert.BertIntermediate, []
    own = cls.forward

    def keeping(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        seen.append(hidden_states.shape)
        return own(self, hidden_states)

    monkeypatch.setattr(cls, "forward", keeping)
    model = encoder()
    graphs = in_graphs(model)
    for seed in range(UNTIL_REPLAY + 2):
        model(ids(seed))
    assert len(seen) == 2 * (UNTIL_REPLAY + 2)
    assert list(graphs.report().stock) == [f"the forward of BertIntermediate was replaced by one of {__name__}"]


@pytest.mark.parametrize(
    ("chosen", "has"),
    [({}, True), ({"graphs": False}, False), ({"graph_forwards": False}, False), ({"graph_forwards": True}, True)],
)
def test_who_wants_no_graphs_has_none_of_forwards(chosen, has):
    assert PatchOptions(**chosen).has_forward_graphs == has


class Unreadable(torch.Tensor):
    def __tensor_flatten__(self) -> Any:
        raise RuntimeError("no parts")


def test_weights_that_cannot_be_read_run_as_before():
    stock, model = encoder(), encoder()
    model.note = torch.ones(2).as_subclass(Unreadable)
    graphs = in_graphs(model)
    for seed in range(UNTIL_REPLAY):
        assert same(model(ids(seed)), stock(ids(seed)))
    assert graphs.report().stock == {"its state cannot be read: RuntimeError: no parts": UNTIL_REPLAY - EAGER_RUNS}


def _counted(self: Any, forward: Any, inputs: Any) -> Any:
    self.seen.add_(1)
    return forward(**inputs)


def _listed(self: Any, forward: Any, inputs: Any) -> Any:
    self.calls.append(len(self.calls))
    self.by_name["last"] = inputs["input_ids"]
    return forward(**inputs)


@pytest.mark.parametrize("forward", [_counted, _listed])
def test_what_a_forward_leaves_is_that_of_stock(forward):
    stock, model = (with_forward(encoder(), forward) for _ in range(2))
    for one in (stock, model):
        one.register_buffer("seen", torch.zeros(()))
        one.calls, one.by_name = [], {}
    graphs = in_graphs(model)
    for seed in range(UNTIL_REPLAY + 2):
        for one in (stock, model):
            one(input_ids=ids(seed))
    assert torch.equal(model.seen, stock.seen)
    assert model.calls == stock.calls
    assert graphs.report().captured == 0


def _in_place(self: Any, forward: Any, inputs: Any) -> Any:
    inputs["inputs_embeds"].mul_(2)
    return forward(**inputs)


def test_inputs_that_a_forward_changes_are_those_of_stock():
    stock, model = (with_forward(encoder(), _in_place) for _ in range(2))
    graphs = in_graphs(model)
    for seed in range(UNTIL_REPLAY + 2):
        given = torch.randn(2, 7, 64, generator=torch.Generator().manual_seed(seed))
        own = given.clone()
        assert same(model(inputs_embeds=own), stock(inputs_embeds=given))
        assert torch.equal(own, given)
    assert list(graphs.report().stock) == ["its forward changes its inputs"]


def test_hooks_that_stay_cost_no_replays():
    """Transformers leaves hooks in a model that was once asked for its hidden states."""
    stock, model = encoder(), encoder()
    graphs = in_graphs(model)
    for seed in range(UNTIL_REPLAY + 1):
        model(ids(seed))
    model(ids(0), output_hidden_states=True)
    for seed in range(3):
        assert same(model(ids(seed)), stock(ids(seed)))
    assert all(one.graph is None for one in graphs._forms.values())
    assert graphs.report().stock == {"modules have hooks": 3}


def test_training_frees_the_graphs_and_evaluation_gets_new_ones():
    model = encoder()
    graphs = in_graphs(model)
    for seed in range(UNTIL_REPLAY):
        model(ids(seed))
    graph = weakref.ref(graphs._known()[0].graph)
    model.train()(ids(9))
    gc.collect()
    assert graph() is None
    model.eval()
    for seed in range(MAX_EAGER_RUNS):
        model(ids(seed))
    assert graphs.report().captured == 2


def test_hooks_that_were_removed_are_forgotten():
    model = encoder()
    graphs = in_graphs(model)
    for seed in range(UNTIL_REPLAY + 1):
        model(ids(seed))
    hook = model.pooler.register_forward_hook(lambda *_: None)
    model(ids(0))
    hook.remove()
    for seed in range(MAX_EAGER_RUNS + UNTIL_REPLAY):
        model(ids(seed))
    assert graphs.report().captured == 2


@pytest.mark.turn("tilegym_db/models/forward_graphs.py")  # collects all garbage
def test_a_model_that_is_dropped_takes_its_weights_along():
    model = encoder()
    graphs = in_graphs(model)
    for seed in range(UNTIL_REPLAY - 1):
        model(ids(seed))
    weight = weakref.ref(model.pooler.dense.weight)
    gc.collect()
    gc.disable()
    try:
        del model, graphs
        assert weight() is None
    finally:
        gc.enable()


def test_a_padding_token_that_is_set_late_keeps_the_mask():
    def forward(self: Any, forward: Any, inputs: Any) -> Any:
        found = forward(**inputs)
        if inputs.get("attention_mask") is None:
            found.last_hidden_state = found.last_hidden_state + (inputs["input_ids"] == self.config.pad_token_id).any()
        return found

    stock, model = (with_forward(encoder(), forward) for _ in range(2))
    for one in (stock, model):
        one.config.pad_token_id = None
    in_graphs(model)
    for one in (stock, model):
        one.config.pad_token_id = 2
    for seed in range(UNTIL_REPLAY + 2):
        given = ids(seed)
        given[0, 0] = 2 if seed >= UNTIL_REPLAY else 3
        inputs = {"input_ids": given, "attention_mask": torch.ones_like(given)}
        assert same(model(**inputs), stock(**inputs))


def test_an_interrupted_proof_leaves_no_graph():
    model = encoder()
    graphs = in_graphs(model)
    for seed in range(UNTIL_REPLAY - 1):
        model(ids(seed))
    replay = graphs._replay

    def interrupted(*args: Any) -> Any:
        replay(*args)
        raise KeyboardInterrupt

    graphs._replay = interrupted
    with pytest.raises(KeyboardInterrupt):
        model(ids(0))
    assert all(one.graph is None for one in graphs._forms.values())


def test_a_replay_without_memory_frees_the_graphs():
    stock, model = encoder(), encoder()
    graphs = in_graphs(model)
    for seed in range(UNTIL_REPLAY):
        model(ids(seed))
    (known,) = graphs._forms.values()

    def fails() -> None:
        raise torch.OutOfMemoryError("no memory")

    known.graph = CapturedForward(fails, known.graph.inputs, known.graph.outputs)
    assert same(model(ids(0)), stock(ids(0)))
    assert known.graph is None
    assert graphs.report().stock == {"OutOfMemoryError: no memory": 1}


@pytest.mark.parametrize("is_held", [False, True], ids=["once more", "with a cache"])
def test_a_forward_without_memory_gets_that_of_graphs(is_held, monkeypatch):
    stock, model = made("llama"), made("llama")
    graphs = in_graphs(model)
    for seed in range(UNTIL_REPLAY):
        model(ids(seed), use_cache=False)
    (known,) = graphs._forms.values()
    own, calls, expected = type(model).__mro__[1].forward, [], stock(ids(0, tokens=9)).logits

    def needs_room(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(known.graph is None)
        if known.graph is not None:
            raise torch.OutOfMemoryError("no memory")
        return own(self, *args, **kwargs)

    monkeypatch.setattr(type(model).__mro__[1], "forward", needs_room)
    cache = {"past_key_values": transformers.DynamicCache()} if is_held else {}
    if is_held:  # half of it may have been filled
        with pytest.raises(torch.OutOfMemoryError):
            model(ids(0, tokens=9), **cache)
    else:
        assert torch.equal(model(ids(0, tokens=9)).logits, expected)
    assert (calls, known.graph) == ([False] if is_held else [False, True], None)


def test_a_failed_form_does_not_wait_for_its_mask(monkeypatch):
    looks: list[bool] = []
    hides = forward_graphs._needs_mask
    monkeypatch.setattr(forward_graphs, "_needs_mask", lambda *args: looks.append(True) or hides(*args))
    model = encoder()
    graphs = in_graphs(model, MAX_MS + 1, MAX_MS + 1)
    for seed in range(MAX_EAGER_RUNS + UNTIL_REPLAY):
        model(ids(seed), torch.ones(2, 7, dtype=torch.long))
    assert len(looks) == UNTIL_REPLAY  # until it has failed, and one later
    assert sum(graphs.report().stock.values()) == MAX_EAGER_RUNS + UNTIL_REPLAY - EAGER_RUNS


def test_forms_that_do_not_come_again_are_not_proven():
    model = encoder()
    graphs = in_graphs(model)
    for tokens in range(1, 4 * MAX_UNPAID):
        for _ in range(EAGER_RUNS + 1):
            model(ids(0, 1, tokens))
    assert sum(one.tried for one in graphs._forms.values()) == MAX_UNPAID + 1


def test_a_changed_model_is_timed_again():
    model = encoder()
    graphs = in_graphs(model, 9.0, 9.0, 9.0, 9.0, 1.0, 1.0, 3.0, 3.0)
    for seed in range(UNTIL_REPLAY + 2):
        model(ids(seed))
    model.encoder.layer = model.encoder.layer[:1]
    for seed in range(3 * UNTIL_REPLAY):
        model(ids(seed))
    assert list(graphs.report().stock) == ["a replay takes 3.00 ms, and a forward took 1.00 ms"]


def memory(monkeypatch: Any, reserved: Any) -> None:
    """Give a GPU 1000 bytes, of which PyTorch holds so many, one number for each question."""
    left = iter(reserved)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: next(left))


def test_a_graph_that_would_hold_much_memory_is_freed(monkeypatch):
    stock, model = encoder(), encoder()
    graphs = in_graphs(model)
    graphs._capture = graphs._captured_in_pool
    memory(
        monkeypatch, [0, 50, *[50] * 5, 101]
    )  # before and after a capture, and two replays of it, and another capture
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: 0)
    monkeypatch.setattr(forward_graphs, "captured", lambda forward, inputs, pool: again(forward, inputs))
    for tokens in (5, 6):
        for seed in range(UNTIL_REPLAY):
            assert same(model(ids(seed, 2, tokens)), stock(ids(seed, 2, tokens)))
    assert graphs.report().captured == 1
    assert all(one.graph is None for one in graphs._forms.values())
    assert list(graphs.report().stock) == ["OutOfMemoryError: its graph takes 0 MiB of 0 MiB"]


def test_memory_of_dropped_or_failed_graphs_is_not_used_again(monkeypatch):
    """PyTorch refuses captures into a pool that no graph has any more, or in which one has failed."""
    pools: list[int] = []
    model = encoder()
    graphs = in_graphs(model)
    graphs._capture = graphs._captured_in_pool
    numbers = itertools.count()

    def capture(forward: Any, inputs: Any, pool: int) -> CapturedForward:
        pools.append(pool)
        if len(pools) == 3:
            raise RuntimeError("capture failed")
        return again(forward, inputs)

    memory(monkeypatch, itertools.repeat(0))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(numbers))
    monkeypatch.setattr(forward_graphs, "captured", capture)
    for tokens in (5, 6, 7, 8):
        for seed in range(UNTIL_REPLAY):
            model(ids(seed, 2, tokens))
    [*graphs._forms.values()][-1].graph = None
    for seed in range(UNTIL_REPLAY):
        model(ids(seed, 2, 9))
    model.pooler.dense.weight = torch.nn.Parameter(model.pooler.dense.weight * 2)
    for seed in range(2 * UNTIL_REPLAY):
        model(ids(seed, 2, 5))
    assert pools == [0, 0, 0, 1, 2, 3]


def test_graphs_hold_little_memory(monkeypatch):
    model = encoder()
    graphs = in_graphs(model)
    model(ids(0))
    size = ids(0).nbytes + sum(one.nbytes for one in tensors_in(model(ids(0))))
    monkeypatch.setattr(forward_graphs, "MAX_OUTPUT_BYTES", 2 * size)
    monkeypatch.setattr(forward_graphs, "MAX_HELD_BYTES", 4 * size)
    for tokens in (4, 5, 6, 7):
        for seed in range(UNTIL_REPLAY):
            model(ids(seed, 2, tokens))
    kept = [one for one in graphs._forms.values() if one.graph is not None]
    assert len(kept) == 3


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (torch.ones(2).to_sparse(), "given is nested or sparse"),
        (torch.ones(2, device="meta"), "given is on another device, or needs a gradient"),
        (torch.ones(2), ""),
    ],
)
def test_inputs_of_a_graph_are_plain_tensors(value, reason):
    assert why_not_inputs({"given": value}, torch.device("cpu")) == reason


def test_outputs_on_another_device_have_no_graph():
    outputs = {"one": torch.ones(2), "other": torch.ones(2, device="meta")}
    assert why_not_copied(outputs, torch.device("cpu")) == "it returns a tensor on another device"


def test_newer_names_of_precision_are_settings_of_a_form():
    model = encoder()
    graphs = in_graphs(model)
    matmul = torch.backends.cuda.matmul
    try:
        for precision in ("tf32", "ieee"):
            matmul.fp32_precision = precision
            model(ids(0))
    finally:
        matmul.fp32_precision = "none"
    assert len(graphs._forms) == 2


def test_copies_of_a_model_that_also_decodes_are_stock():
    model = made()
    in_graphs(model)
    Decoding(model).install()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other) is type(made())


def test_other_shapes_and_options_have_their_own_graphs():
    stock, model = encoder(), encoder()
    graphs = in_graphs(model)
    calls = [{"input_ids": ids(1)}, {"input_ids": ids(2, 1, 5)}, {"input_ids": ids(3), "return_dict": False}]
    for _ in range(UNTIL_REPLAY + 1):
        for inputs in calls:
            assert same(model(**inputs), stock(**inputs))
    assert graphs.report().captured == len(calls)


def test_positional_and_named_inputs_are_one_form():
    model = encoder()
    graphs = in_graphs(model)
    for seed in range(UNTIL_REPLAY + 2):
        model(ids(seed)) if seed % 2 else model(input_ids=ids(seed))
    assert (graphs.report().captured, graphs.report().replayed) == (1, 2)


def test_padding_without_a_hiding_mask_keeps_the_mask():
    """A model may find padding in the tokens if it has no mask."""
    stock, model = encoder("roberta"), encoder("roberta")
    graphs = in_graphs(model)
    for seed in range(UNTIL_REPLAY + 2):
        given = ids(seed)
        given[0, -2:] = model.config.pad_token_id
        inputs = {"input_ids": given, "attention_mask": torch.ones_like(given)}
        assert same(model(**inputs), stock(**inputs))
    assert graphs.report().replayed in (0, 2)


def test_positions_that_begin_anew_keep_the_mask():
    """Without a mask, transformers takes such positions for several sequences in one row."""
    stock, model = made(), made()
    graphs = in_graphs(model)
    mask, whole = torch.ones(2, 12, dtype=torch.long), torch.arange(12).expand(2, 12)
    for seed in range(2 * UNTIL_REPLAY + 2):
        positions = whole if seed <= UNTIL_REPLAY else whole % 6
        given = {"attention_mask": mask, "position_ids": positions, "use_cache": False}
        assert same(model(prompt(2, 12, seed), **given), stock(prompt(2, 12, seed), **given))
    assert graphs.report().replayed >= 1


def test_a_needs_mask_nothing_may_make_a_difference():
    stock, model = encoder(), encoder()
    for one in (stock, model):
        of_class = type(one)

        def forward(self: Any, input_ids: Any, attention_mask: Any = None, of_class: Any = of_class) -> Any:
            found = of_class.forward(self, input_ids, attention_mask)
            found.last_hidden_state += attention_mask is not None
            return found

        one.__class__ = type(of_class.__name__, (of_class,), {"forward": forward})
    graphs = in_graphs(model)
    for seed in range(UNTIL_REPLAY + 2):
        for more in ({}, {"attention_mask": torch.ones_like(ids(0))}):
            assert same(model(ids(seed), **more), stock(ids(seed), **more))
    assert graphs.report().replayed == 2


@pytest.mark.parametrize(
    ("reason", "way"),
    [
        (NEEDS_GRAD, lambda model: torch.enable_grad()(lambda: model(ids(0)))()),
        (IN_TRAINING, lambda model: model.train()(ids(0))),
        (AUTOCAST, lambda model: _autocast(model)),
        (TRACED, lambda model: torch.func.vmap(lambda one: model(one).last_hidden_state)(ids(0)[None])),
        ("it has past_key_values", lambda model: model(ids(0), past_key_values=transformers.DynamicCache())),
        ("it has no tensor", lambda model: _refused(model)),
    ],
)
def test_a_forward_without_a_graph_has_its_reason(reason, way):
    model = encoder()
    graphs = in_graphs(model)
    way(model)
    assert graphs.report().stock == {reason: 1}


def _refused(model: Any) -> None:
    with pytest.raises(ValueError, match="input_ids"):
        model()


def _autocast(model: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return model(ids(0))


def test_forwards_of_a_generation_are_left_out():
    model = made()
    graphs = in_graphs(model)
    graphs.is_left_out = lambda: True
    model.generate(prompt(1, 5), max_new_tokens=6)
    assert graphs.report().stock == {}
    assert not graphs._forms


def test_slow_replays_end_the_graph():
    stock, model = encoder(), encoder()
    graphs = in_graphs(model, 1.0, 1.0, 3.0, 3.0)
    for seed in range(UNTIL_REPLAY + 4):
        assert same(model(ids(seed)), stock(ids(seed)))
    assert graphs.report().replayed == 2
    assert list(graphs.report().stock) == ["a replay takes 3.00 ms, and a forward took 1.00 ms"]


def test_long_forwards_are_not_captured():
    model = encoder()
    graphs = in_graphs(model, MAX_MS + 1, MAX_MS + 2)
    for seed in range(UNTIL_REPLAY + 2):
        model(ids(seed))
    assert graphs.report().captured == 0
    assert sum(graphs.report().stock.values()) == 4


def test_what_reads_tensors_on_the_host_runs_as_before():
    stock, model = encoder(), encoder()
    for one in (stock, model):
        of_class = type(one.encoder)
        one.encoder.__class__ = type("Reading", (of_class,), {"forward": _reading(of_class.forward)})
    graphs = in_graphs(model)
    for seed in range(UNTIL_REPLAY + 2):
        assert same(model(ids(seed)), stock(ids(seed)))
    assert graphs.report().captured == graphs.report().replayed == 0


def _reading(forward: Any) -> Any:
    def read(self: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return forward(self, hidden if hidden.sum().item() > 0 else hidden * 2, *args, **kwargs)

    return read


def noisy() -> Any:
    """Return an encoder whose forward draws random numbers."""
    model = encoder()
    of_class = type(model.encoder)

    def forward(self: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return of_class.forward(self, hidden + torch.rand_like(hidden), *args, **kwargs)

    model.encoder.__class__ = type("Noisy", (of_class,), {"forward": forward})
    return model


def test_random_numbers_are_those_of_stock():
    def found(model: Any) -> list[torch.Tensor]:
        torch.manual_seed(7)
        return [model(ids(0)).last_hidden_state for _ in range(UNTIL_REPLAY + 2)]

    model = noisy()
    graphs = in_graphs(model)
    assert all(map(torch.equal, found(model), found(noisy())))
    assert graphs.report().captured == 0


def test_proofs_take_no_numbers_of_python_and_numpy():
    def forward(self: Any, forward: Any, inputs: Any) -> Any:
        found = forward(**inputs)
        found.last_hidden_state = found.last_hidden_state + random.random() + numpy.random.rand()
        return found

    def found(model: Any) -> list[torch.Tensor]:
        random.seed(7)
        numpy.random.seed(7)
        return [model(input_ids=ids(0)).last_hidden_state for _ in range(UNTIL_REPLAY + 2)]

    stock, model = (with_forward(encoder(), forward) for _ in range(2))
    graphs = in_graphs(model)
    assert all(map(torch.equal, found(model), found(stock)))
    assert graphs.report().captured == 0


def test_after_some_failures_no_form_is_tried():
    model = encoder()
    graphs = ForwardGraphs(model, lambda *_: pytest.fail("no capture"), stopwatch=watch(*[MAX_MS + 1] * 99))
    graphs.install()
    for tokens in range(5, 5 + MAX_FAILURES + 1):
        for _ in range(UNTIL_REPLAY):
            model(ids(0, 1, tokens))
    assert graphs.report().stock[f"the first {MAX_FAILURES} forms of inputs had no graph"] > 0


def test_a_second_thread_runs_as_before_while_a_replay_runs():
    stock, model = encoder(), encoder()
    graphs = in_graphs(model)
    for seed in range(UNTIL_REPLAY):
        model(ids(seed))
    with graphs._running:
        found: list[Any] = []

        def other() -> None:
            with torch.no_grad():
                found.append(model(ids(8)))

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert same(found[0], stock(ids(8)))
    assert graphs.report().stock == {IN_USE: 1}


def test_copies_and_removal_run_as_before():
    stock, model = encoder(), encoder()
    graphs = in_graphs(model)
    for seed in range(UNTIL_REPLAY + 1):
        model(ids(seed))
    other = copy.deepcopy(model)
    assert type(other) is type(stock)
    kept = type(model).forward
    graphs.remove()
    assert type(model) is type(stock)
    assert same(kept(model, ids(3)), stock(ids(3)))
    assert graphs.report().stock == {UNPATCHED: 1}


@pytest.mark.turn("tilegym_db/models/forward_graphs.py")  # compilation; eager code is compared daily
def test_compiled_code_has_the_own_forward():
    stock, model = encoder(), encoder()
    graphs = in_graphs(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for _ in range(UNTIL_REPLAY + 1):
        assert same(compiled(ids(0)), stock(ids(0)))
    assert graphs.report().captured == 0


def test_one_tensor_twice_in_outputs_is_one_in_the_copy():
    value = torch.ones(3)
    found = copied_outputs({"one": value, "both": (value, value)})
    assert found["one"] is found["both"][0] is found["both"][1]
    assert found["one"] is not value


def test_interrupted_capture_is_tried_again():
    model, stock = encoder(), encoder()
    graphs = in_graphs(model)
    capture, left = graphs._capture, [KeyboardInterrupt()]

    def interrupted(*args: Any) -> Any:
        if left:
            raise left.pop()
        return capture(*args)

    graphs._capture = interrupted
    for seed in range(UNTIL_REPLAY - 1):
        model(ids(seed))
    with pytest.raises(KeyboardInterrupt):
        model(ids(3))
    for seed in range(3):
        assert same(model(ids(seed)), stock(ids(seed)))
    assert graphs.report().replayed == 2


# ---- on a GPU -------------------------------------------------------------------------------------


def _waits(self: Any, *args: Any, **kwargs: Any) -> Any:
    found = transformers.BertModel.forward(self, *args, **kwargs)
    assert found.last_hidden_state.isfinite().all().item()
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["bert", "roberta", "modernbert"])
def test_graphs_on_a_gpu_have_the_bits_of_forwards(name):
    model = encoder(name).to("cuda", torch.bfloat16)
    waiting = type("Waits", (transformers.BertModel,), {"forward": _waits})(transformers.BertConfig(**ENCODER))
    failing = ForwardGraphs(waiting.to("cuda").eval())
    failing.install()
    graphs = ForwardGraphs(model)
    graphs.install()
    for seed in range(UNTIL_REPLAY + 4):
        given = ids(seed).cuda()
        waiting(given)
        found = model(given)
        assert same(found, type(model).__mro__[1].forward(model, given))
    assert failing.report().captured == 0
    report = graphs.report()
    assert (report.captured, report.replayed) == (1, 4), report.stock
