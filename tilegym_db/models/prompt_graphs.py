"""Prompts of ``generate`` in CUDA graphs: the host launches a forward of many small kernels once, and replays it later.

A short prompt takes the host longer than the GPU: each layer is dozens of launches. Prompts come in many lengths, so a graph is
for a size: the prompt is filled up with any tokens at its end, and what they leave in the cache is cut off. This needs a model in
which no token sees a later one. It is proven for each size before its capture: two forwards whose filling differs must agree in
every bit of the rest. Where a state or a window would see the filling, a graph is for one length, and nothing is filled up.

A size runs as before for its first prompts. Later ones are replays, unless they turn out to be slower than those first ones.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tilegym_db.models.next_inputs import CACHES, DECODER, RETURN, CapturedForward, cache_of

MAX_TOKENS = 4096
"""Maximum number of tokens, of all sequences together, for which the host may be what takes the time."""
MAX_HELD = 2 * MAX_TOKENS
"""Maximum number of tokens in all graphs, whose memory grows with them; the least recently used graph is dropped."""
MEMORY_SHARE = 0.1
"""Maximum share of the free memory of a GPU for the keys, values and states of one graph."""
MIN_STEP = 16
EAGER_RUNS = 2
"""Prompts of a size that run as before, and are timed. The first one also loads kernels."""
TIMED_REPLAYS = 2
KEEP = "logits_to_keep"
KNOWN = frozenset((*DECODER, *CACHES, KEEP, "use_cache", RETURN))
"""Inputs of a prompt that are understood."""

GROWING = (
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
)
"""Classes of layers of a cache that grow by concatenation."""
_MARK = "_tilegym_db_kind"

Capture = Callable[[Any, Mapping[str, Any]], CapturedForward]
"""(forward, tensors by name) -> the forward, captured."""

Stopwatch = Callable[[torch.device], Callable[[], Callable[[], float | None]]]
"""``stopwatch(device)`` starts one, and its result stops it. That returns a function: milliseconds, or None if unknown yet."""


def size_of(tokens: int) -> int:
    """Return the length that a prompt is filled up to: at most an eighth longer, or a few tokens."""
    step = max(MIN_STEP, 1 << max(0, tokens.bit_length() - 4))
    return -(-tokens // step) * step


@dataclass
class PromptSize:
    """Prompts of one size: how they have run so far, and their graph."""

    batch: int
    size: int
    runs: int = 0
    failed: str = ""
    """The reason why this size runs as before for good."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held from a replay to the end of the generation, which reads the memory of the graph."""
    graph: CapturedForward | None = None
    times: dict[str, list[Callable[[], float | None]]] = field(default_factory=lambda: {"eager": [], "replay": []})

    def best(self, way: str) -> float | None:
        """Return the shortest time of a way, in milliseconds; None if none is known."""
        return min((time for stopped in self.times[way] if (time := stopped()) is not None), default=None)

    def why_slower(self) -> str:
        """Return the reason if replays are slower than forwards were before; empty if not, or if it is not known yet."""
        before, now = self.best("eager"), self.best("replay")
        if before is None or now is None or len(self.times["replay"]) < TIMED_REPLAYS or now <= before:
            return ""
        return f"a replay takes {now:.2f} ms, and a forward took {before:.2f} ms"


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
            capture: makes a graph of a forward.
            replayed: the context of calls that a graph repeats.
            stopwatch: measures forwards without waiting for them; by default with events of CUDA.
        """
        self._capture, self._replayed = capture, replayed
        self._stopwatch = stopwatch or stopwatch_of_events
        self._sizes: OrderedDict[Any, PromptSize] = OrderedDict()
        self._lock = threading.Lock()
        self.captured = self.replayed = 0

    def clear(self) -> None:
        """Free all graphs."""
        self._sizes = OrderedDict()

    @property
    def bytes(self) -> int:
        """Memory of what the graphs leave: logits, keys, values and states. A forward needs more while it runs."""
        graphs = [one.graph for one in list(self._sizes.values())]
        return sum(_bytes_of(graph.outputs) for graph in graphs if graph is not None)

    def reasons(self) -> list[str]:
        """Return why sizes run as before, one line a size."""
        return [f"prompts of {one.batch} x {one.size}: {one.failed}" for one in self._sizes.values() if one.failed]

    def run(self, model: Any, inputs: dict[str, Any], why_not: Callable[[], str]) -> tuple[Any, PromptSize | None]:
        """Run the forward of a prompt.

        Args:
            model: of transformers.
            inputs: of its forward, with an empty cache, which is filled.
            why_not: returns the reason if a graph would read what the model does not have any more. Asked only if needed.

        Returns:
            What the forward returns, and the size whose graph has the memory of the cache; None if no graph has it. The caller
            releases the lock of that size once nothing reads the cache.
        """
        if why_not_prompt(inputs):
            return model(**inputs), None
        batch, tokens = inputs[DECODER.ids].shape
        fills = may_be_filled_up(inputs, size_of(tokens))
        size = size_of(tokens) if fills else tokens
        if batch * size > MAX_TOKENS or why_not():
            return model(**inputs), None
        with self._lock:
            known = self._of(inputs, batch, size)
            known.runs += 1
        if known.failed or (known.runs > EAGER_RUNS and not _sees_all(inputs)):
            return model(**inputs), None
        if known.runs <= EAGER_RUNS:
            stop = self._stopwatch(inputs[DECODER.ids].device)
            outputs = model(**inputs)
            known.times["eager"].append(stop())
            return outputs, None
        if not known.lock.acquire(blocking=False):
            return model(**inputs), None
        try:
            outputs = self._from_graph(known, model, inputs, fills)
        except BaseException:
            known.lock.release()
            raise
        if outputs is None:
            known.lock.release()
            return model(**inputs), None
        return outputs, known

    def _of(self, inputs: Mapping[str, Any], batch: int, size: int) -> PromptSize:
        """Return what is known about a size, and drop graphs that are used least if there are too many."""
        numerics = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
        names = tuple(sorted(name for name, value in inputs.items() if value is not None))
        key = batch, size, names, torch.is_inference_mode_enabled(), numerics
        known = self._sizes.pop(key, None) or PromptSize(batch, size)
        self._sizes[key] = known
        with_graphs = [one for one in self._sizes.values() if one.graph is not None]
        held = sum(one.batch * one.size for one in with_graphs)
        for one in with_graphs:
            if held > MAX_HELD and one is not known and not one.lock.locked():
                held -= one.batch * one.size
                one.graph, one.runs = None, EAGER_RUNS
        return known

    def _from_graph(self, known: PromptSize, model: Any, inputs: dict[str, Any], fills: bool) -> Any:
        """Return the outputs of a replay, or None: the first call loads kernels and proves, the second captures."""
        if known.failed:  # by another thread
            return None
        if known.graph is not None and (slower := known.why_slower()):
            known.failed, known.graph = slower, None
            return None
        if known.graph is None:
            forward = functools.partial(_forward, model, _with_own_cache(inputs))
            try:
                with self._replayed():
                    if known.runs == EAGER_RUNS + 1:
                        known.failed = _why_not_proven(forward, inputs, known.size, fills)
                        return None
                    known.graph = self._capture(forward, _filled_up(inputs, known.size))
            except Exception as error:  # a model may do anything in its forward, such as waiting for the device
                known.failed = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:160]}"
                return None
            self.captured += 1
        return self._replay(known.graph, known, inputs)

    def _replay(self, graph: CapturedForward, known: PromptSize, inputs: dict[str, Any]) -> Any:
        ids: torch.Tensor = inputs[DECODER.ids]
        stop = self._stopwatch(ids.device)
        graph.inputs[0][:, : ids.shape[1]].copy_(ids)
        if KEEP in inputs:
            graph.inputs[-1].fill_(ids.shape[1] - 1)
        graph.replay()
        if len(known.times["replay"]) < TIMED_REPLAYS:
            known.times["replay"].append(stop())
        self.replayed += 1
        name = cache_of(inputs)
        cache: Any = inputs[name]
        cache.layers = _layers(graph.outputs, ids.shape[1])
        logits = graph.outputs["logits"] if KEEP in inputs else graph.outputs["logits"][:, : ids.shape[1]]
        return type(graph.outputs)(**{"logits": logits, name: cache})


# ---- decisions ------------------------------------------------------------------------------------


def why_not_prompt(inputs: Mapping[str, Any]) -> str:
    """Return the reason why a forward is not that of a prompt that a graph can have; empty if it is."""
    from transformers import DynamicCache

    ids = inputs.get(DECODER.ids)
    cache: Any = inputs.get(cache_of(inputs))
    unknown = sorted(name for name, value in inputs.items() if value is not None and name not in KNOWN)
    if unknown:
        return f"it has {', '.join(unknown)}"
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or ids.shape[1] < 2:
        return "it has not the tokens of a prompt"
    if type(cache) is not DynamicCache or any(_has_tokens(layer) for layer in cache.layers):
        return "it continues a cache, or has none"
    for name in (DECODER.mask, DECODER.positions):
        if inputs.get(name) is not None and inputs[name].shape != ids.shape:
            return f"{name} is not one number a token"
    return "" if inputs.get(KEEP, 1) == 1 and inputs.get(RETURN) is True else "it has other outputs"


def _has_tokens(layer: Any) -> bool:
    """Return True if a layer of a cache has keys or a state."""
    flags = [value for name, value in vars(layer).items() if name.startswith("is_") and name.endswith("initialized")]
    return any(one for value in flags for one in _each(value))


def _each(value: Any) -> list[Any]:
    """Return the members of a container, or the value itself: states may have one tensor and one flag each."""
    return [*value.values()] if isinstance(value, dict) else value if isinstance(value, list) else [value]


def may_be_filled_up(inputs: Mapping[str, Any], size: int) -> bool:
    """Return True if no layer keeps a state, or a window that would lose tokens of the prompt to the filling."""
    cache: Any = inputs[cache_of(inputs)]
    layers = cache.layers
    windows = [layer.sliding_window for layer in layers if hasattr(layer, "sliding_window")]
    names = {type(layer).__name__ for layer in layers}
    grows = bool(names) and names <= {*GROWING[:2]}
    return grows and KEEP in inputs and all(size < window for window in windows)


def _sees_all(inputs: Mapping[str, Any]) -> bool:
    """Return True if no token is hidden, and positions count from 0. It waits for the device."""
    ids, mask, positions = (inputs.get(name) for name in DECODER)
    assert ids is not None
    checks = [] if mask is None else [(mask != 0).all()]
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


def _with_own_cache(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs with a copy of the empty cache, whose tensors are on the device: a capture cannot bring them there."""
    name, device = cache_of(inputs), inputs[DECODER.ids].device
    cache: Any = copy.deepcopy(inputs[name])
    for layer in cache.layers:
        for attribute, value in vars(layer).items():
            if isinstance(value, torch.Tensor):
                setattr(layer, attribute, value.to(device))
        if type(layer).__name__ in GROWING:
            kind: Any = type(layer)
            layer.__class__ = _beginning_on_device(kind)
    return {**inputs, name: cache}


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

    A second forward has other tokens at the end, in the place of the filling. What was before must be the same in every bit.
    """
    given = _filled_up(inputs, size)
    seen = min(inputs[DECODER.ids].shape[1], size - 1)
    if fills:
        given[KEEP].fill_(seen - 1)
    first = forward(**given)
    more = {*first} - {"logits", cache_of(first)}
    if more or "logits" not in first:
        return f"the model returns more than logits: {', '.join(sorted(more))}"
    free = torch.cuda.mem_get_info(given[DECODER.ids].device)[0] if given[DECODER.ids].is_cuda else sys.maxsize
    if (needed := _bytes_of(first)) > MEMORY_SHARE * free:
        return f"its cache takes {needed >> 20} MiB of {free >> 20} MiB free"
    if not fills:
        return ""
    ids = given[DECODER.ids].clone()
    end = ids[:, seen:]
    ids[:, seen:] = torch.where(end > 0, end - 1, end + 1)
    second = forward(**{**given, DECODER.ids: ids})
    pairs = [(first["logits"], second["logits"])]
    for one, other in zip(_layers(first, seen), _layers(second, seen), strict=True):
        pairs += (one.keys, other.keys), (one.values, other.values)
    if all(torch.equal(one, other) for one, other in pairs):
        return ""
    return "its tokens see later ones, or its kernels are not deterministic"


def _bytes_of(outputs: Any) -> int:
    """Return the memory of the logits and the cache that a forward returns."""
    values = [outputs["logits"]]
    for layer in outputs[cache_of(outputs)].layers:
        for value in vars(layer).values():
            values += _each(value)
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))


def _layers(outputs: Any, tokens: int) -> list[Any]:
    """Return the layers of the cache of a forward with their first tokens: views of keys and values."""
    return [_first_tokens(layer, tokens) for layer in outputs[cache_of(outputs)].layers]


def _first_tokens(layer: Any, tokens: int) -> Any:
    own = copy.copy(layer)
    own.__class__ = getattr(layer, _MARK, type(layer))
    for name, value in vars(layer).items():
        if isinstance(value, dict | list):
            setattr(own, name, copy.copy(value))  # a generation puts other tensors into it
    if isinstance(getattr(layer, "keys", None), torch.Tensor):
        own.keys, own.values = layer.keys[..., :tokens, :], layer.values[..., :tokens, :]
    if isinstance(getattr(layer, "cumulative_length", None), int):
        own.cumulative_length = tokens
    return own


def stopwatch_of_events(device: torch.device) -> Callable[[], Callable[[], float | None]]:
    """Measure what is launched on a GPU until the result is called. See :data:`Stopwatch`."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    stream = torch.cuda.current_stream(device)
    begin.record(stream)

    def stop() -> Callable[[], float | None]:
        end.record(stream)
        return lambda: begin.elapsed_time(end) if end.query() else None  # type: ignore[no-untyped-call]

    return stop
