"""Prompts of ``generate`` in CUDA graphs: the host launches a forward of many small kernels once, and replays it later.

A short prompt takes the host longer than the GPU: each layer is dozens of launches. Prompts come in many lengths, so a graph is
for a size: the prompt is filled up with any tokens at its end, and what they leave in the cache is cut off. This needs a model in
which no token sees a later one. It is proven for each size before its capture: two forwards whose filling differs must agree in
every bit of the rest. Where a state or a window would see the filling, a graph is for one length, and nothing is filled up.

A size runs as before for its first prompts. Later ones are replays, unless they turn out to be slower than those first ones.
Proofs and captures take time too. If graphs are dropped before they have paid for that, later ones wait for more prompts.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tilegym_db.models.fixed_cache import bytes_of, first_line
from tilegym_db.models.graphs import (
    TIMED_REPLAYS,
    Capture,
    GraphedCall,
    Patience,
    Stopwatch,
    masks_as_before,
    numerics_now,
    stopwatch_of_events,
    undisturbed,
    why_changed,
)
from tilegym_db.models.next_inputs import CACHES, DECODER, RETURN, CapturedForward, cache_of
from tilegym_db.records.call import GRAPHED_TOKENS

MAX_HELD = 2 * GRAPHED_TOKENS
"""Maximum number of tokens in all graphs, whose memory grows with them; the least recently used graph is dropped."""
MIN_COUNTED = 256
"""Tokens that a smaller graph counts for, because each graph has memory that does not depend on them."""
MAX_SIZES = 1024
"""Maximum number of sizes that are remembered."""
MEMORY_SHARE = 0.1
"""Maximum share of the free memory of a GPU for the keys, values and states of one graph."""
MIN_STEP = 16
EAGER_RUNS = 2
"""Prompts of a size that run as before, and are timed. The first one also loads kernels."""
KEEP = "logits_to_keep"
KNOWN = frozenset((*DECODER, *CACHES, KEEP, "use_cache", RETURN))
"""Inputs of a prompt that are understood."""

IN_USE = "another generation has the graph of this size"

GROWING = (
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
)
"""Classes of layers of a cache that grow by concatenation."""
EMPTY = "DummyLayer"
"""Class of the layers of a cache that never have keys, because the model takes those of other layers."""
_MARK = "_tilegym_db_kind"


def size_of(tokens: int) -> int:
    """Return the length that a prompt is filled up to: at most an eighth longer, or a few tokens."""
    step = _step_of(tokens)
    return -(-tokens // step) * step


def shortest_of(size: int) -> int:
    """Return the length of the shortest prompt that is filled up to a size."""
    return max(2, size - _step_of(size - 1) + 1)


def _step_of(tokens: int) -> int:
    return max(MIN_STEP, 1 << max(0, tokens.bit_length() - 4))


@dataclass
class PromptSize(GraphedCall):
    """Prompts of one size."""

    batch: int = 0
    size: int = 0

    @property
    def counted(self) -> int:
        """Tokens that a graph of this size counts for."""
        return max(self.batch * self.size, MIN_COUNTED)


class PromptGraphs:
    """The graphs of the prompts of one model. Each thread may ask for them."""

    def __init__(
        self,
        capture: Capture,
        replayed: Callable[[], contextlib.AbstractContextManager[None]],
        stopwatch: Stopwatch | None = None,
    ) -> None:
        """Capture nothing yet.

        Args:
            replayed: the context of calls that a graph repeats.
            stopwatch: measures forwards without waiting for them; by default with events of CUDA.
        """
        self._capture, self._replayed = capture, replayed
        self._stopwatch = stopwatch or stopwatch_of_events
        self._sizes: OrderedDict[Any, PromptSize] = OrderedDict()
        self._patience = Patience(EAGER_RUNS)
        self._lock = threading.Lock()
        self._is_open = True
        self._others: Counter[str] = Counter()
        """Reasons of prompts that are not those of their size -> prompts."""
        self.captured = self.replayed = 0

    def clear(self) -> None:
        """Free all graphs."""
        with self._lock:
            self._patience.learn([one for one in self._sizes.values() if one.tried])
            self._sizes = OrderedDict()

    def close(self) -> None:
        """Free all graphs, and make no new ones."""
        self._is_open = False
        self.clear()

    @property
    def known(self) -> list[PromptSize]:
        """The sizes so far, the one used last at the end."""
        with self._lock:
            return [*self._sizes.values()]

    @property
    def bytes(self) -> int:
        """Memory of what the graphs leave: logits, keys, values and states. A forward needs more than that."""
        graphs = [one.graph for one in self.known]
        return sum(_bytes_of(graph.outputs) for graph in graphs if graph is not None)

    def reasons(self) -> Counter[str]:
        """Return how many prompts ran as before, by reason. If it is one of a size, it names the size."""
        found = Counter({f"prompts: {reason}": count for reason, count in self._others.items()})
        for one in self.known:
            if one.failed:
                found[f"prompts of {one.batch} x {one.size}: {one.failed}"] += one.refused
        return found

    def run(self, model: Any, inputs: dict[str, Any], why_not: Callable[[], str]) -> tuple[Any, PromptSize | None]:
        """Run the forward of a prompt.

        Args:
            inputs: of its forward, with an empty cache, which is filled.
            why_not: returns the reason if a graph would read what the model does not have any more. Asked only if needed.

        Returns:
            What the forward returns, and the size whose graph has the memory of the cache; None if no graph has it. The caller
            releases the lock of that size once nothing reads the cache.
        """
        if reason := why_not_prompt(inputs):
            self._others[reason] += 1
            return model(**inputs), None
        ids: torch.Tensor = inputs[DECODER.ids]
        batch, tokens = ids.shape
        fills = may_be_filled_up(inputs, size_of(tokens), limits_of(model.config))
        size = size_of(tokens) if fills else tokens
        if reason := f"more than {GRAPHED_TOKENS} tokens" if batch * size > GRAPHED_TOKENS else why_not():
            self._others[reason] += 1
            return model(**inputs), None
        with self._lock:
            known = self._of(inputs, batch, size, fills)
        if known.failed:
            known.refused += 1
            return model(**inputs), None
        if known.runs <= EAGER_RUNS:
            stop = self._stopwatch(ids.device)
            outputs = model(**inputs)
            known.times["eager"].append(stop())
            return outputs, None
        if known.graph is None and known.runs <= self._patience.runs:
            return model(**inputs), None
        stop = self._stopwatch(ids.device)  # with the look at the mask, which waits for the device
        sees_all = _sees_all(inputs)
        if not sees_all or not known.lock.acquire(blocking=False):
            self._others[IN_USE if sees_all else "tokens are hidden, or positions do not count from 0"] += 1
            return model(**inputs), None
        try:
            outputs = self._from_graph(known, model, inputs, fills, stop)
        except BaseException:
            known.lock.release()
            raise
        if outputs is None:
            known.lock.release()
            known.refused += bool(known.failed)
            return model(**inputs), None
        return outputs, known

    def _of(self, inputs: Mapping[str, Any], batch: int, size: int, fills: bool) -> PromptSize:
        """Return what is known about a size that has one prompt more, and forget the one used least if there are too many."""
        names = tuple(sorted(name for name, value in inputs.items() if value is not None))
        key = batch, size, fills, names, torch.is_inference_mode_enabled(), numerics_now()
        known = self._sizes.pop(key, None) or PromptSize(batch=batch, size=size)
        known.count()
        if self._is_open:
            self._sizes[key] = known
        if len(self._sizes) > MAX_SIZES:
            del self._sizes[next((other for other, one in self._sizes.items() if one.graph is None), key)]
        return known

    def _make_room(self, known: PromptSize) -> None:
        """Drop the graphs that were used least recently, if there would be too many with that of another size."""
        with self._lock:
            others = [one for one in self._sizes.values() if one.graph is not None and one is not known]
            held = known.counted + sum(one.counted for one in others)
            for one in others:
                if held > MAX_HELD and one.lock.acquire(blocking=False):  # else a generation reads its memory
                    held -= one.counted
                    self._patience.learn([one])
                    one.graph, one.replays, one.runs = None, 0, EAGER_RUNS
                    one.lock.release()

    def _from_graph(self, known: PromptSize, model: Any, inputs: dict[str, Any], fills: bool, stop: Any) -> Any:
        """Return the outputs of a replay, or None: the first call loads kernels and proves, the second captures."""
        if known.failed:  # by another thread
            return None
        if known.graph is not None and (slower := known.why_slower()):
            known.failed, known.graph = slower, None
            return None
        if known.graph is None:
            name = cache_of(inputs)
            own = {**inputs, name: begun_on(inputs[name], inputs[DECODER.ids].device)}
            forward = functools.partial(_forward, model, own)
            try:
                with undisturbed(inputs[DECODER.ids].device), self._replayed():
                    if not known.tried:
                        known.failed = why_changed(
                            model,
                            lambda: (
                                _why_mask_matters(model, own) or _why_not_proven(forward, inputs, known.size, fills)
                            ),
                        )
                        known.tried = True
                        return None
                    self._make_room(known)
                    with masks_as_before(has_positions=False):  # positions count from 0: see _sees_all
                        known.graph = self._capture(forward, _filled_up(inputs, known.size))
            except torch.OutOfMemoryError as error:
                known.fail_for_now(first_line(error))
                return None
            except Exception as error:  # a model may do anything in its forward, such as waiting for the device
                known.failed = first_line(error)
                return None
            self.captured += 1
        return self._replay(known.graph, known, inputs, stop)

    def _replay(self, graph: CapturedForward, known: PromptSize, inputs: dict[str, Any], stop: Any) -> Any:
        ids: torch.Tensor = inputs[DECODER.ids]
        graph.inputs[0][:, : ids.shape[1]].copy_(ids)
        if KEEP in inputs:
            graph.inputs[-1].fill_(ids.shape[1] - 1)
        graph.replay()
        if len(known.times["replay"]) < TIMED_REPLAYS:
            known.times["replay"].append(stop())
        known.replays += 1
        self.replayed += 1
        name = cache_of(inputs)
        cache: Any = inputs[name]
        cache.layers = _layers(graph.outputs, ids.shape[1])
        logits = graph.outputs["logits"] if KEEP in inputs else graph.outputs["logits"][:, : ids.shape[1]]
        return type(graph.outputs)(**{"logits": logits, name: cache})


# ---- decisions ------------------------------------------------------------------------------------


def why_not_prompt(inputs: Mapping[str, Any]) -> str:
    """Return the reason why no graph can serve a forward as that of a prompt; empty if one can."""
    from transformers import DynamicCache

    ids = inputs.get(DECODER.ids)
    cache: Any = inputs.get(cache_of(inputs))
    unknown = sorted(name for name, value in inputs.items() if not _is_empty(value) and name not in KNOWN)
    if unknown:
        return f"it has {', '.join(unknown)}"
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or ids.shape[1] < 2:
        return "it has not the tokens of a prompt"
    if type(cache) is not DynamicCache or any(_has_tokens(layer) for layer in cache.layers):
        return "it continues a cache, or has none"
    for name in (DECODER.mask, DECODER.positions):
        if inputs.get(name) is not None and getattr(inputs[name], "shape", None) != ids.shape:
            return f"{name} is not one number a token"
    return "" if inputs.get(KEEP, 1) == 1 and inputs.get(RETURN) is True else "it has other outputs"


def _is_empty(value: Any) -> bool:
    """Return True for None, and for a dict of None: the encodings of images and sounds in transformers if there are none."""
    return value is None or (isinstance(value, dict) and all(one is None for one in value.values()))


def _has_tokens(layer: Any) -> bool:
    """Return True if a layer of a cache has keys or a state."""
    if type(layer).__name__ == EMPTY:
        return False
    flags = [value for name, value in vars(layer).items() if name.startswith("is_") and name.endswith("initialized")]
    states = (value.values() if isinstance(value, dict) else value for value in flags)  # states may have one flag each
    return any(any(value) if isinstance(value, Iterable) else value for value in states)


def may_be_filled_up(inputs: Mapping[str, Any], size: int, limits: list[int]) -> bool:
    """Return True if the filling can change neither a state, nor a window, nor what a model does with a prompt of this length.

    Args:
        size: the length with the filling.
        limits: lengths beyond which the model computes something else.
    """
    cache: Any = inputs[cache_of(inputs)]
    tokens: int = inputs[DECODER.ids].shape[1]
    windows = [layer.sliding_window for layer in cache.layers if hasattr(layer, "sliding_window")]
    names = {type(layer).__name__ for layer in cache.layers} - {EMPTY}
    if not names or not names <= {*GROWING[:2]} or KEEP not in inputs or any(size >= window for window in windows):
        return False
    return not any(tokens <= limit < size for limit in limits)


def limits_of(config: Any) -> list[int]:
    """Return the lengths beyond which a model has other frequencies of its positions, or has no positions."""
    text = config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    by_layer = [one for one in rope.values() if isinstance(one, dict)]
    places = [vars(text), rope, *by_layer]
    names = "max_position_embeddings", "original_max_position_embeddings"
    found = [getattr(text, names[0], None), *(place.get(name) for place in places for name in names)]
    return [int(limit) for limit in found if isinstance(limit, int | float)]


def why_not_outputs(outputs: Any, unread: tuple[str, ...] = ()) -> str:
    """Return the reason why the outputs of a forward are not just logits and a cache; empty if they are."""
    more = {*outputs} - {"logits", cache_of(outputs), *unread}
    if more or "logits" not in outputs:
        return f"the model returns more than logits: {', '.join(sorted(more))}"
    return "" if outputs.get(cache_of(outputs)) is not None else "the model returns no cache"


def _sees_all(inputs: Mapping[str, Any]) -> bool:
    """Return True if no token is hidden, and positions count from 0. It waits for the device."""
    ids, mask, positions = (inputs.get(name) for name in DECODER)
    assert ids is not None
    checks = [] if mask is None else [(mask == 1).all()]  # some models multiply by it
    if positions is not None:
        checks.append((positions == torch.arange(ids.shape[1], device=ids.device)).all())
    return not checks or bool(torch.stack(checks).all())


# ---- forwards -------------------------------------------------------------------------------------


def _filled_up(inputs: Mapping[str, Any], size: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a forward over ``size`` tokens: the first is the prompt, the last the place of its last token."""
    ids: torch.Tensor = inputs[DECODER.ids]
    batch, tokens = ids.shape
    given = {DECODER.ids: torch.cat((ids, ids[:, -1:].expand(batch, size - tokens)), dim=1)}
    if inputs.get(DECODER.positions) is not None:
        places = torch.arange(size, device=ids.device, dtype=inputs[DECODER.positions].dtype)
        given[DECODER.positions] = places.expand(batch, size).contiguous()
    if KEEP in inputs:
        given[KEEP] = torch.full((1,), tokens - 1, device=ids.device, dtype=torch.int64)
    return given


def begun_on(cache: Any, device: torch.device) -> Any:
    """Return a copy of an empty cache whose tensors are on the device: a capture cannot bring them there."""
    own = copy.deepcopy(cache)
    for layer in own.layers:
        for attribute, value in vars(layer).items():
            if isinstance(value, torch.Tensor):
                setattr(layer, attribute, value.to(device))
        if type(layer).__name__ in GROWING:
            kind: Any = type(layer)
            layer.__class__ = _beginning_on_device(kind)
    return own


def original_class(layer: Any) -> Any:
    """Return the class of a layer in transformers, whether :func:`begun_on` made it or not."""
    return getattr(layer, _MARK, type(layer))


@functools.cache
def _beginning_on_device(kind: Any) -> Any:
    """Return a subclass of a layer that begins without a copy from the host, which no capture may contain."""

    def lazy_initialization(self: Any, *states: Any, **others: Any) -> None:
        if len(states) != 2 or others:  # the states of linear attention
            kind.lazy_initialization(self, *states, **others)
            return
        keys, values = states
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        self.keys, self.values = keys.new_empty(0), values.new_empty(0)

    members = {"lazy_initialization": lazy_initialization, "__module__": kind.__module__, _MARK: kind}
    return type(kind.__name__, (kind,), members)


def _forward(model: Any, inputs: Mapping[str, Any], **given: torch.Tensor) -> Any:
    """Run a forward that fills a copy of its cache. It has no mask, because nothing is hidden."""
    name = cache_of(inputs)
    others = {key: value for key, value in inputs.items() if key not in (DECODER.mask, name)}
    return model(**{**others, **given, name: copy.deepcopy(inputs[name])})


def _why_not_proven(forward: Callable[..., Any], inputs: Mapping[str, Any], size: int, fills: bool) -> str:
    """Return the reason why the graph of a size would not compute what a forward does; empty if it would.

    Two more forwards change the tokens at the end: once as many as the shortest prompt of this graph leaves to the filling, once
    the last token alone. Whatever lies before the changed tokens must stay the same in every bit.
    """
    given = _filled_up(inputs, size)
    ids = given[DECODER.ids]
    places = sorted({shortest_of(size), size - 1}) if fills else []
    if fills:
        given[KEEP] = torch.tensor([seen - 1 for seen in places], device=ids.device)
    first = forward(**given)
    if reason := why_not_outputs(first):
        return reason
    free = torch.cuda.mem_get_info(ids.device)[0] if ids.is_cuda else sys.maxsize
    if (needed := _bytes_of(first)) > MEMORY_SHARE * free:
        raise torch.OutOfMemoryError(f"its cache takes {needed >> 20} MiB of {free >> 20} MiB free")
    for row, seen in enumerate(places):
        others = ids.clone()
        others[:, seen:] = torch.where(ids[:, seen:] > 0, ids[:, seen:] - 1, ids[:, seen:] + 1)
        if not _are_same_before(seen, row, first, forward(**{**given, DECODER.ids: others})):
            return "its tokens see later ones, or its kernels are not deterministic"
    return ""


def _why_mask_matters(model: Any, inputs: Mapping[str, Any]) -> str:
    """Return the reason if a forward without the mask, which hides nothing, is another one; empty if it has the same bits."""
    if inputs.get(DECODER.mask) is None:
        return ""
    name, tokens = cache_of(inputs), inputs[DECODER.ids].shape[1]
    one, other = (
        model(**{**inputs, DECODER.mask: mask, name: copy.deepcopy(inputs[name])})
        for mask in (inputs[DECODER.mask], None)
    )
    if reason := why_not_outputs(one):
        return reason
    return "" if _are_same_before(tokens, -1, one, other) else "it computes something else without a mask"


def _are_same_before(seen: int, row: int, one: Any, other: Any) -> bool:
    """Return True if the first tokens left the same keys and values, and the logits of one of them are the same."""
    pairs = [(one["logits"][:, row], other["logits"][:, row])]
    for layer, second in zip(_layers(one, seen), _layers(other, seen), strict=True):
        if isinstance(layer.keys, torch.Tensor):
            pairs += (layer.keys, second.keys), (layer.values, second.values)
    return all(torch.equal(kept, found) for kept, found in pairs)


def _bytes_of(outputs: Any) -> int:
    """Return the memory of the logits and the cache that a forward returns."""
    logits: torch.Tensor = outputs["logits"]
    return logits.nbytes + bytes_of(outputs[cache_of(outputs)])


def _layers(outputs: Any, tokens: int) -> list[Any]:
    """Return the layers of the cache of a forward with their first tokens: views of keys and values."""
    return [_first_tokens(layer, tokens) for layer in outputs[cache_of(outputs)].layers]


def _first_tokens(layer: Any, tokens: int) -> Any:
    own = copy.copy(layer)
    own.__class__ = original_class(layer)
    for name, value in vars(layer).items():
        if isinstance(value, dict | list):
            setattr(own, name, copy.copy(value))  # a generation puts other tensors into it
    if isinstance(getattr(layer, "keys", None), torch.Tensor):
        own.keys, own.values = layer.keys[..., :tokens, :], layer.values[..., :tokens, :]
        if isinstance(getattr(layer, "cumulative_length", None), int):
            own.cumulative_length = tokens
    return own
