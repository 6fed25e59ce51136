"""A decoding step writes its keys and values in few launches, and keeps what transformers keeps at every moment."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from decoding_models import DEVICE, ENCODER_DECODERS, ON_GPU, WINDOW, encoded, made, made_with_encoder, prompt
from host_graphs import eager
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import cache_utils

from tilegym_db import Catalog, patch
from tilegym_db.models import fixed_cache
from tilegym_db.models.cache_writes import Writes, is_known, writing
from tilegym_db.models.decoding import Decoding
from tilegym_db.models.fixed_cache import _moving
from tilegym_db.models.graphs import captured
from tilegym_db.models.next_inputs import CapturedForward
from tilegym_db.models.write_site import PROVED_EAGERLY
from tilegym_db.paths import shipped_root

GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}


class Launches(TorchDispatchMode):
    """A mode that counts the operations that a GPU would launch for a write and its count."""

    OPS = ("arange", "add", "add_", "_foreach_add_", "index_copy_")

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name.partition("::")[2]
        if name in self.OPS:
            self.counts[name] += 1
        return function(*args, **(kwargs or {}))


def launches(model: Any, inputs: dict[str, Any]) -> Counter[str]:
    """Return the operations of one captured step of a generation."""
    seen: list[Counter[str]] = []

    def counting(forward: Any, given: Mapping[str, Any]) -> CapturedForward:
        with Launches() as mode:
            graph = (captured if ON_GPU else eager)(forward, given)
        seen.append(mode.counts)
        return graph

    decoding = Decoding(model, counting)
    decoding.install()
    model.generate(**inputs, **GREEDY)
    decoding.remove()
    return seen[0]


LAYERS = {"llama": 2, "gemma3": 2, "gpt_oss": 2, "qwen3_5": 1, "falcon_h1": 2, "bamba": 1}
"""Model -> its layers that write keys in a step, while no window is full."""


@pytest.mark.parametrize("name", LAYERS)
def test_a_step_saves_three_launches_for_each_layer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = {"inputs": prompt(2, WINDOW // 2)}
    found = launches(made(name), inputs)
    monkeypatch.setattr(fixed_cache, "is_known", lambda layer: False)
    stock = launches(made(name), inputs)
    stock.subtract(found)
    count = LAYERS[name]
    assert stock == {"arange": count, "add": count, "add_": count, "_foreach_add_": -1, "index_copy_": 0}
    assert found["index_copy_"] == 2 * count


def test_a_decoder_behind_an_encoder_counts_once_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENCODER_DECODERS:
        found = launches(made_with_encoder(name), encoded(name, 2))
        assert (found["_foreach_add_"], found["index_copy_"]) == (1, 4)


def test_a_full_window_moves_and_only_full_layers_count() -> None:
    found = launches(made("gemma3"), {"inputs": prompt(2, 2 * WINDOW)})
    assert (found["_foreach_add_"], found["index_copy_"]) == (1, 2)


# ---- the same as a layer of transformers ------------------------------------------------------------------------


KINDS = {
    "full": lambda: cache_utils.StaticLayer(max_cache_len=24),
    "window": lambda: cache_utils.StaticSlidingWindowLayer(max_cache_len=24, sliding_window=6),
    "state": lambda: cache_utils.LinearAttentionAndStaticFullAttentionLayer(max_cache_len=24),
    "state and window": lambda: cache_utils.LinearAttentionAndStaticSlidingWindowAttentionLayer(
        max_cache_len=24, sliding_window=6
    ),
}


def twins(kind: str) -> tuple[Any, Any, Writes]:
    """Return a layer of transformers, the same one that writes in few launches, and what counts for it."""
    stock, ours, writes = KINDS[kind](), KINDS[kind](), Writes()
    own: Any = type(ours)
    ours.__class__ = writing(_moving(own) if stock.is_sliding else own)
    ours.writes = writes
    return stock, ours, writes


def assert_same(stock: Any, ours: Any) -> None:
    assert int(stock.get_seq_length()) == int(ours.get_seq_length())
    assert torch.equal(stock.keys, ours.keys)
    assert torch.equal(stock.values, ours.values)


STEPS = {
    "one each": [1] * 12,
    "several": [2, 1, 3, 1, 1, 4, 1],
    "many first": [5, 1, 1, 1],
    "too many first": [9, 1, 1],
}


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_keeps_what_transformers_keeps_at_every_moment(kind: str, steps: list[int]) -> None:
    stock, ours, writes = twins(kind)
    for index, count in enumerate(steps):
        k, v = torch.randn(2, 3, count, 4, device=DEVICE), torch.randn(2, 3, count, 5, device=DEVICE)
        want = stock.update(k, v)
        if index % 4 == 3:  # outside of a step
            found = ours.update(k, v)
        else:
            with writes:
                found = ours.update(k, v)
                assert_same(stock, ours)
        assert_same(stock, ours)
        assert all(torch.equal(one, other) for one, other in zip(want, found, strict=True))
        assert int(stock.cumulative_length) == int(ours.cumulative_length)


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_written_twice_in_a_forward_counts_twice(kind: str) -> None:
    stock, ours, writes = twins(kind)
    k, v = torch.randn(4, 2, 3, 1, 4, device=DEVICE), torch.randn(4, 2, 3, 1, 5, device=DEVICE)
    for layer in (stock, ours):
        layer.update(k[0], v[0])
    with writes:
        for index in (1, 2, 3):
            stock.update(k[index], v[index])
            ours.update(k[index], v[index])
            assert_same(stock, ours)
    assert int(stock.cumulative_length) == int(ours.cumulative_length) == 4


def test_only_layers_that_are_written_count() -> None:
    (_, one, writes), (_, other, _) = twins("full"), twins("full")
    other.writes = writes
    k, v = torch.randn(2, 3, 1, 4, device=DEVICE), torch.randn(2, 3, 1, 5, device=DEVICE)
    for layer in (one, other):
        layer.update(k, v)
    with writes:
        one.update(k, v)
    assert (int(one.cumulative_length), int(other.cumulative_length)) == (2, 1)


def test_a_forward_that_fails_counts_nothing_and_ends() -> None:
    _, ours, writes = twins("full")
    k, v = torch.randn(2, 3, 1, 4, device=DEVICE), torch.randn(2, 3, 1, 5, device=DEVICE)
    ours.update(k, v)

    def interrupted() -> None:
        with writes:
            ours.update(k, v)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (int(ours.get_seq_length()), writes.is_open, writes.has_uncounted(ours)) == (1, False, False)


# ---- code that is known -------------------------------------------------------------------------------------------


def test_layers_of_this_transformers_are_known_by_their_code() -> None:
    assert all(is_known(type(make())) for make in KINDS.values())
    assert not is_known(cache_utils.DynamicLayer)
    assert not is_known(cache_utils.LinearAttentionLayer)
    assert not is_known(cache_utils.DummyLayer)


def test_a_layer_with_other_code_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def update(self: Any, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        return stock(self, key_states, value_states, *args, **kwargs)

    stock, model, other = cache_utils.StaticLayer.update, made(), made()
    want = other.generate(prompt(2), **GREEDY)
    monkeypatch.setattr(cache_utils.StaticLayer, "update", update)
    assert not is_known(cache_utils.StaticLayer)
    decoding = Decoding(model, captured if ON_GPU else eager)
    decoding.install()
    assert torch.equal(model.generate(prompt(2), **GREEDY), want)
    (cache,) = decoding._caches.values()
    assert all(type(layer) is cache_utils.StaticLayer for layer in cache.static.layers)
    assert decoding.report().replayed > 5


def test_the_class_of_a_layer_looks_as_before() -> None:
    for make in KINDS.values():
        kind: Any = type(make())
        ours = writing(kind)
        assert (ours.__name__, ours.__module__) == (kind.__name__, kind.__module__)
        assert issubclass(ours, kind)


# ---- served by a kernel -------------------------------------------------------------------------------------------

NAME = "kv_cache_write"
STOCK = "for cache, new in ((k_cache, k), (v_cache, v)):\n        cache.index_copy_(2, start, new)"
REFUSED = {"a kernel that raises at its first call": "raise ValueError('no such size')", "none": None}


def offer_writes(shop: Any, body: str | None = STOCK) -> Catalog:
    """Publish a kernel of the write for the CPU, if it has a body; and one of norms, so that there is something to patch."""
    shop.offer(ops=("rms_norm",))
    if body is None:
        return Catalog((shipped_root(), shop.root))
    definition = Catalog((shipped_root(),)).definition(NAME)
    folder = shop.root / "solutions" / "attention" / NAME / f"{NAME}_cpu"
    folder.mkdir(parents=True)
    (folder / "kernel.py").write_text(f"def run({', '.join(definition.inputs)}):\n    {body}\n")
    record = {
        "name": f"{NAME}_cpu", "definition": NAME, "author": "tests", "sources": [{"path": "kernel.py"}],
        "spec": {
            "language": "python", "entry_point": "kernel.py::run", "destination_passing_style": True,
            "layouts": dict.fromkeys([*definition.inputs, *definition.outputs], "strided"),
        },
    }  # fmt: skip
    (folder / "solution.json").write_text(json.dumps(record))
    catalog = Catalog((shipped_root(), shop.root))
    shop.entries += shop._entries(catalog, NAME, 1)
    shop.republish()
    return catalog


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``patch`` run decoding steps in graphs on the CPU."""
    monkeypatch.setattr(Decoding, "fits", staticmethod(lambda model: True))
    monkeypatch.setattr("tilegym_db.models.decoding.captured", eager)


def writes_of(handle: Any) -> Any:
    (row,) = [site for site in handle.report().sites if site.kind == "cache_write"]
    return row


@pytest.mark.sweep(2)
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(("name", "layers"), [("llama", 2), ("gemma3", 2), ("qwen3_5", 1), ("gpt_oss", 2)])
def test_a_kernel_writes_each_step_with_the_tokens_of_stock(name: str, layers: int, shop: Any) -> None:
    stock, model = made(name), made(name)
    handle = patch(model, catalog=offer_writes(shop))
    for ids in (prompt(1, WINDOW // 2), prompt(3, 2 * WINDOW), prompt(1, WINDOW - 1)):
        assert torch.equal(model.generate(ids, **GREEDY), stock.generate(ids, **GREEDY))
    report, row = handle.report(), writes_of(handle)
    assert report.decoding.replayed > 20
    assert not report.decoding.stock
    assert (row.module_class, row.modules, row.reason) == ("StaticLayer", layers, "")
    assert row.counts.kernel_calls == row.counts.calls > 25
    assert {key.axes["S"] for key in row.counts.keys} == {1}


@pytest.mark.usefixtures("on_cpu")
def test_a_kernel_writes_behind_an_encoder(shop: Any) -> None:
    stock, model, inputs = made_with_encoder("t5"), made_with_encoder("t5"), encoded("t5", 2)
    handle = patch(model, catalog=offer_writes(shop))
    assert torch.equal(model.generate(**inputs, **GREEDY), stock.generate(**inputs, **GREEDY))
    assert writes_of(handle).counts.kernel_calls > 15


@pytest.mark.usefixtures("on_cpu")
def test_a_kernel_writes_keys_and_values_of_other_widths(shop: Any, build: Callable[..., Any]) -> None:
    stock, model = build("deepseek_v3"), build("deepseek_v3")
    handle = patch(model, catalog=offer_writes(shop))
    assert torch.equal(model.generate(prompt(2), **GREEDY), stock.generate(prompt(2), **GREEDY))
    (key,) = writes_of(handle).counts.keys
    assert key.kernel_calls > 15
    assert key.axes["D"] != key.axes["Dv"]


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("name", REFUSED)
def test_without_a_kernel_stock_code_writes_with_a_reason(name: str, shop: Any) -> None:
    stock, model = made(), made()
    handle = patch(model, catalog=offer_writes(shop, REFUSED[name]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        assert torch.equal(model.generate(prompt(2), **GREEDY), stock.generate(prompt(2), **GREEDY))
    row = writes_of(handle)
    reasons = [row.reason] if row.counts is None else [key.reason for key in row.counts.keys]
    assert reasons
    assert all(reasons)
    assert handle.report().hits().get(NAME, 0) == 0
    assert handle.report().decoding.replayed > 5


@pytest.mark.usefixtures("on_cpu")
def test_verification_and_other_ops_leave_writes_to_stock(shop: Any) -> None:
    catalog = offer_writes(shop)
    for options, reason in (({"verify": True}, PROVED_EAGERLY), ({"ops": ["rms_norm"]}, "not among the ops asked for")):
        model = made()
        handle = patch(model, catalog=catalog, **options)
        model.generate(prompt(2), **GREEDY)
        assert (writes_of(handle).reason, writes_of(handle).counts) == (reason, None)


@pytest.mark.usefixtures("on_cpu")
def test_eager_steps_ask_for_no_kernel(shop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(model: Any, inputs: Mapping[str, Any]) -> CapturedForward:
        raise RuntimeError("operation not permitted when stream is capturing")

    stock, model = made(), made()
    monkeypatch.setattr("tilegym_db.models.decoding.captured", fails)
    handle = patch(model, catalog=offer_writes(shop))
    assert torch.equal(model.generate(prompt(2), **GREEDY), stock.generate(prompt(2), **GREEDY))
    assert writes_of(handle).counts.calls == 2  # the two layers in the step before the capture


@pytest.mark.usefixtures("on_cpu")
def test_a_kernel_that_fails_later_ends_graphs_not_tokens(shop: Any) -> None:
    body = f"global calls\n    calls = globals().get('calls', 0) + 1\n    if calls == 4:\n        raise ValueError\n    {STOCK}"
    stock, model = made(), made()
    handle = patch(model, catalog=offer_writes(shop, body))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        assert torch.equal(model.generate(prompt(2), **GREEDY), stock.generate(prompt(2), **GREEDY))
    assert handle.report().decoding.replayed == 0
    assert any("cannot be captured" in reason for reason in handle.report().decoding.stock)
