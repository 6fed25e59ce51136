"""Decoding steps of ``generate`` in CUDA graphs: what the host does for each launch is then done once, at capture.

``generate`` itself stays stock, with its sampling, processors, stopping criteria and streamers. The prompt and the first new
token run with the cache that transformers makes (``prompt_graphs`` has graphs of prompts). Then its keys, values and states are
copied to a cache of fixed size, and each later forward of the model is a replay. A generation that is not understood runs stock,
and the report has the reason.

The step before a capture, and the capture, ask for kernels by device time alone: the host launches them once.

A graph repeats the branches that the host took at capture. A window of keys moves once it is full, and a cache counts its tokens
on the host for that. So there is one graph for a window that fills and one for a full window, and a replay counts on.

A graph ends with the positions and masks of the next step, written over its own inputs. In each generation they are compared
with those that transformers prepares. If they are the same, later steps copy only the new token.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from tilegym_db.models.cache_writes import Writes
from tilegym_db.models.call_site import AUTOCAST, UNPATCHED, CallSite, change_class, subclass
from tilegym_db.models.fixed_cache import (
    FixedCache,
    bucket_of,
    encoded_tokens,
    first_line,
    keeps_keys,
    new_cache,
    tokens_in,
    why_not_encoded,
    why_not_layers,
)
from tilegym_db.models.graphs import Capture, captured, has_modes, numerics_now, split, state_or_reason
from tilegym_db.models.next_inputs import (
    DECODER,
    ENCODER,
    METHODS,
    RETURN,
    Advancing,
    CapturedForward,
    are_equal,
    are_same,
    cache_of,
    inputs_follow,
    names_of,
    prepares_as_transformers,
)
from tilegym_db.models.prompt_graphs import PromptGraphs, PromptSize, why_not_outputs
from tilegym_db.resolver.hot_path import replayed

MIN_NEW_TOKENS = 8
"""Minimum new tokens for which a graph may pay off: a capture takes as long as about three steps."""
MAX_CACHES = 4
"""Maximum number of caches, each with its graphs; the least recently used one is dropped."""
UNREAD = ("encoder_last_hidden_state", "decoder_hidden_states")
"""Outputs that ``generate`` does not read, unless the caller wants hidden states."""


@dataclass(frozen=True)
class DecodingReport:
    """The graphs of ``generate``, their use, and the reasons for stock.

    Attributes:
        captured: graphs captured, each for one batch size, length of cache and form of inputs.
        replayed: forwards of the model that were replays.
        cache_bytes: memory of the caches of fixed size that exist now.
        stock: reason -> generations that ran without graphs, or steps or prompts if it names them.
        followed: replays that copied only the new token, because the replay before had left the other inputs.
        prompts: graphs captured of prompts, each for a batch size and a length.
        replayed_prompts: forwards of prompts that were replays.
        prompt_bytes: memory of what the graphs of prompts leave.
    """

    captured: int
    replayed: int
    cache_bytes: int
    stock: Mapping[str, int]
    followed: int = 0
    prompts: int = 0
    replayed_prompts: int = 0
    prompt_bytes: int = 0

    def summary(self) -> str:
        """Return the figures and reasons in words, one a line."""
        held = f"caches of fixed size hold {self.cache_bytes >> 20} MiB"
        only_token = f"{self.followed} copied only the new token"
        lines = [
            f"generate in CUDA graphs: {self.replayed} steps replayed from {self.captured} graphs, {only_token}; {held}"
        ]
        if self.prompts:
            held = f"they hold {self.prompt_bytes >> 20} MiB of caches"
            lines.append(f"prompts in CUDA graphs: {self.replayed_prompts} replayed from {self.prompts} graphs; {held}")
        return "\n".join(
            [*lines, *(f"without graphs, {count} times: {reason}" for reason, count in self.stock.items())]
        )


Use = Literal["prompt", "step"]
"""The forwards that a graph is for."""

Replays = Callable[[], contextlib.AbstractContextManager[None]]
"""Returns a context in which calls are made that a graph will repeat."""


class Decoding:
    """The graphs of one model. :meth:`install` makes ``generate`` use them; :meth:`remove` frees them."""

    def __init__(
        self,
        model: Any,
        capture: Capture | None = None,
        replayed: Replays = replayed,
        writes: CallSite | None = None,
        prompts: PromptGraphs | None = None,
    ) -> None:
        """Capture nothing yet.

        Args:
            capture: makes a graph of a forward; by default a CUDA graph.
            replayed: the context of a forward whose calls a graph repeats; by default it only chooses kernels for that.
            writes: the call site of writes into a cache; None if stock code writes.
            prompts: the graphs of prompts; None if prompts run as before.
        """
        self.prompts = prompts
        self._writes = writes
        self._model = weakref.ref(model)
        self._capture = _with_next_inputs(capture or captured)
        self._calls_are_replayed = replayed
        self.kind = next((parameter.device.type for parameter in model.parameters()), "")
        self._caches: OrderedDict[Any, FixedCache] = OrderedDict()
        self._states: dict[Use, Any] = {}
        self._lock = threading.RLock()
        self._here = threading.local()
        self._stock: Counter[str] = Counter()
        self._captured = self._replayed = self._followed = 0
        self.ours: Any = None
        """The class of the model while graphs are installed."""
        self.is_open = True

    @staticmethod
    def fits(model: Any) -> bool:
        """Return True if a model generates as in transformers, and all of it is on one GPU."""
        methods = ("generate", "_prepare_cache_for_generation", "_valid_auto_compile_criteria", "get_compiled_call")
        # The methods of its class: an adapter's wrapper finds those of the model inside it, but does not run them itself.
        if not all(callable(getattr(type(model), name, None)) for name in methods):
            return False
        devices = {parameter.device for parameter in model.parameters()}
        return len(devices) == 1 and next(iter(devices)).type == "cuda"

    @classmethod
    def of(cls, model: Any, replayed: Replays = replayed, writes: CallSite | None = None) -> Decoding | None:
        """Install graphs in a model that generates on a GPU, and return them; return None for other models."""
        if not cls.fits(model):
            return None
        decoding = cls(model, replayed=replayed, writes=writes, prompts=PromptGraphs(captured, replayed))
        decoding.install()
        return decoding

    @property
    def model(self) -> Any:
        """The model. Its class holds these graphs, and they refer to it weakly."""
        model = self._model()
        assert model is not None, "only asked by the model's own methods"
        return model

    def install(self) -> None:
        """Give the model a class whose generation asks for graphs."""
        base = type(self.model)
        methods = _methods(base, self)
        if prepares_as_transformers(base):
            methods |= _preparing_methods(base, self)
        self.ours = subclass(base, base.forward, methods)
        change_class(self.model, self.ours)

    def remove(self) -> None:
        """Give the model its class back, and free graphs and caches. Safe to call twice.

        If other code has changed the class since, the class stays, and generation is stock.
        """
        self.is_open = False
        model, ours = self._model(), self.ours
        if model is not None and ours is not None and type(model) is ours:
            change_class(model, ours.__mro__[1])
        self._caches.clear()
        if self.prompts is not None:
            self.prompts.close()

    def report(self) -> DecodingReport:
        """Return what the graphs have done so far."""
        cache_bytes = sum(cache.bytes for cache in self._caches.values())
        stock, prompts = dict(self._stock), (0, 0, 0)
        if self.prompts is not None:
            stock |= self.prompts.reasons()
            prompts = self.prompts.captured, self.prompts.replayed, self.prompts.bytes
        return DecodingReport(self._captured, self._replayed, cache_bytes, stock, self._followed, *prompts)

    @property
    def generations(self) -> list[_Generation]:
        """The generations of this thread, the innermost last: a criterion of one may start another."""
        found: list[_Generation] = self._here.__dict__.setdefault("generations", [])
        return found

    def count(self, reason: str) -> None:
        """Count a generation or a step that runs stock."""
        self._stock[reason] += 1

    # -- caches -------------------------------------------------------------------------------------------------------

    def why_not_now(self, use: Use) -> str:
        """Return the reason why the model cannot have graphs as it is; empty if it can.

        Graphs of the same use are dropped if the model has changed since. Transformers computes experts in one way for prompts
        and in another for steps, so a state is remembered for each use.
        """
        model = self.model
        with self._lock:
            state, reason = state_or_reason(model, self.kind)
            if reason:
                return reason
            if not self.is_open:  # graphs would outlive remove(), which has freed all there were
                return UNPATCHED
            if state != self._states.get(use):  # graphs would read weights that the model does not have any more
                self._states[use] = state
                if use == "step":
                    self._caches = OrderedDict()
                elif self.prompts is not None:
                    self.prompts.clear()
        return ""

    def lease(self, batch: int, length: int, dynamic: Any) -> FixedCache | str:
        """Return a cache for one generation, which gives it back at its end, or the reason for none.

        ``dynamic`` is the cache of transformers so far: it has the classes and sizes of the layers.
        """
        model = self.model
        with self._lock:
            if reason := self.why_not_now("step"):
                return reason
            length = bucket_of(length) if keeps_keys(dynamic) else 0  # states have one size
            key = batch, length, encoded_tokens(dynamic), torch.is_inference_mode_enabled(), numerics_now()
            cache = self._caches.pop(key, None)
            if cache is None:
                made = new_cache(model, dynamic, length)
                if isinstance(made, str):
                    return made
                cache = FixedCache(made, Writes(self._writes))
            self._caches[key] = cache
            while len(self._caches) > MAX_CACHES:
                self._caches.popitem(last=False)
            if cache.failed:
                return cache.failed
            if cache.in_use:
                return "another thread generates with the same batch size and length"
            cache.in_use = True
            return cache

    # -- steps --------------------------------------------------------------------------------------------------------

    def step(self, cache: FixedCache, inputs: dict[str, Any]) -> Any:
        """Run one forward over the cache of fixed size: eagerly the first time, then from a graph."""
        model, tokens = self.model, cache.tokens
        cache.last = None
        tensors, form = split(inputs)
        form = *form, cache.phase
        if cache.failed or form not in cache.graphs:
            if not cache.failed:
                cache.graphs[form] = None
                cache.failed = _why_not_inputs(inputs) if cache.windows else ""
            before = cache.host_state()
            binding = contextlib.nullcontext() if cache.failed else self._calls_are_replayed()
            with binding:  # a capture cannot load the kernels that it calls
                outputs = cache.run(model, **inputs)
            cache.count(tokens + 1)
            if not cache.failed and before != (after := cache.host_state()):
                changed = sorted({str(name[1]) for name in {*before, *after} if before.get(name) != after.get(name)})
                cache.failed = f"its cache changes {', '.join(changed)} on the host in each step"
                self.count(cache.failed)
            elif not cache.failed and cache.reads_counts:
                cache.failed = "its forward reads on the host how many tokens a window has"
                self.count(cache.failed)
            return outputs
        graph = cache.graphs[form]
        if graph is None:
            try:
                with self._calls_are_replayed():
                    graph = cache.graphs[form] = self._capture(functools.partial(cache.run, model), inputs)
                self._captured += 1
            except Exception as error:  # a model may do anything in its forward, such as waiting for the device
                cache.failed = f"its forward cannot be captured: {first_line(error)}"
                self.count(cache.failed)
                cache.count(tokens)  # the capture may have counted on the host, but the device has not run
                outputs = cache.run(model, **inputs)
                cache.count(tokens + 1)
                return outputs
        for kept, given in zip(graph.inputs, tensors, strict=True):
            kept.copy_(given)
        return self.replay(cache, graph)

    def follow(self, cache: FixedCache, graph: CapturedForward, ids: torch.Tensor) -> Any:
        """Run a graph again on the inputs that its last replay has left, with a new token."""
        graph.following[names_of(graph.following).ids].copy_(ids)
        self._followed += 1
        return self.replay(cache, graph)

    def replay(self, cache: FixedCache, graph: CapturedForward) -> Any:
        """Run a graph whose inputs are in place."""
        graph.replay()
        cache.count(cache.tokens + 1)
        cache.last = graph
        self._replayed += 1
        return graph.outputs


@dataclass
class _Generation:
    """One call of ``generate``: what it may use, and how far it is."""

    decoding: Decoding
    cache: FixedCache | None = None
    batch: int = 0
    length: int = 0
    """Maximum number of tokens."""
    prompt: int = 0
    """Tokens of the prompt, which a cache of states does not count."""
    is_custom: bool = False
    """The loop is the caller's. It may keep the cache, or read it after the end."""
    may_use_graphs: bool = False
    may_follow: bool = False
    """The next inputs follow from the last ones, as far as the model's methods and configuration say."""
    proven: CapturedForward | None = None
    """The graph whose inputs for the next step were those that transformers prepared."""
    phase: tuple[bool, ...] = ()
    """The phase of the cache in the last step that transformers prepared."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """The arguments of the model, from which transformers prepares the next step."""
    grown: dict[str, Any] = field(default_factory=dict)
    """The arguments that grow with each token, at the length of the whole generation."""
    expected: dict[str, Any] | None = None
    """The inputs of the next step, if all but the new token are those that the last replay left."""
    prompt_size: PromptSize | None = None
    """The size of the prompt, whose graph has the memory of the cache that transformers made."""

    def first(self, model: Any, inputs: dict[str, Any]) -> Any:
        """Run the forward of the prompt."""
        prompts = self.decoding.prompts
        if prompts is None or not self.may_use_graphs or self.prompt_size is not None:
            return model(**inputs)
        outputs, self.prompt_size = prompts.run(model, inputs, lambda: self.decoding.why_not_now("prompt"))
        return outputs

    def step(self, *_: Any, **inputs: Any) -> Any:
        """Run the forward of one new token."""
        name, ids = cache_of(inputs), names_of(inputs).ids
        if self.cache is not None and inputs.get(name) is self.cache.static:
            graph, expected, self.expected = self.proven, self.expected, None
            if graph is None or expected is None or not are_same(inputs, expected):
                if expected is not None:
                    self.proven = None  # the replay leaves what follows from inputs of other code
                return self.decoding.step(self.cache, self.cache.with_encoded(inputs))
            return self.decoding.follow(self.cache, graph, inputs[ids])
        model = self.decoding.model
        outputs = model(**inputs)
        tokens = inputs.get(ids)
        is_one_token = isinstance(tokens, torch.Tensor) and tokens.shape[-1] == 1  # else a part of the prompt
        if self.may_use_graphs and self.cache is None and is_one_token:
            self.may_use_graphs = False
            leased: FixedCache | str = why_not_outputs(outputs, UNREAD)
            if not leased and self.length - (tokens_in(outputs[name]) or self.prompt + 1) < MIN_NEW_TOKENS:
                leased = f"fewer than {MIN_NEW_TOKENS} new tokens are left"
            leased = leased or self.decoding.lease(self.batch, self.length, outputs[name])
            if isinstance(leased, str):
                self.decoding.count(leased)
            else:
                self.cache = leased
                try:
                    leased.fill_from(outputs[name], inputs.get(ENCODER))
                except torch.OutOfMemoryError:
                    leased.failed = "there was no memory for a cache of fixed size; lower max_new_tokens"
                    leased.free()
                    self.decoding.count(leased.failed)
                else:
                    outputs[name] = leased.static
                    self.may_follow = inputs_follow(model, self.decoding.ours)
        return outputs

    def prepare(self, stock: Any, ids: torch.Tensor, arguments: dict[str, Any], **options: Any) -> dict[str, Any]:
        """Return the inputs of the next step: as the last replay left them, or as transformers prepares them."""
        model, cache = self.decoding.model, self.cache
        assert cache is not None, "asked with the cache of this generation only"
        graph = cache.last if self.may_follow and options == {"next_sequence_length": 1} else None
        if graph is not None and (not graph.following or cache.phase != self.phase):
            graph = None
        if graph is not None and graph is self.proven and are_same(arguments, self.arguments):
            token, name = ids[:, -1:], names_of(graph.following).ids
            if token.shape == graph.following[name].shape:
                following = {**graph.following, name: token, cache_of(arguments): cache.static}
                self.expected = {**following, RETURN: True}
                return following
        self.arguments, self.phase, self.proven = arguments, cache.phase, None
        prepared: dict[str, Any] = stock.prepare_inputs_for_generation(model, ids, **options, **arguments)
        prepared = cache.with_encoded(prepared)
        if graph is not None:
            self.may_follow = are_equal(prepared, graph.following)
            self.proven = graph if self.may_follow else None
        return prepared

    def update(
        self,
        stock: Any,
        outputs: Any,
        arguments: dict[str, Any],
        is_encoder_decoder: bool = False,
        num_new_tokens: int = 1,
    ) -> dict[str, Any]:
        """Return the arguments of the model with one token more; they are views of longer ones while graphs follow."""
        more = functools.partial(stock._update_model_kwargs_for_generation, self.decoding.model)
        is_next = self.proven is not None and self.cache is not None and self.cache.last is self.proven
        if not is_next or num_new_tokens != 1 or not are_same(arguments, self.arguments):
            self.grown = {}
            updated: dict[str, Any] = more(outputs, arguments, is_encoder_decoder, num_new_tokens)
            return updated
        if not self.grown:
            longest = more({}, dict(arguments), is_encoder_decoder, bucket_of(self.length))
            self.grown = {name: value for name, value in longest.items() if value is not arguments[name]}
        for name, value in self.grown.items():
            arguments[name] = value[..., : arguments[name].shape[-1] + 1]
        self.arguments = dict(arguments)
        return arguments

    def restart(self) -> None:
        """Begin another generation inside the same call, such as that of the next piece of audio."""
        self.close()
        self.cache = self.proven = self.expected = None
        self.may_use_graphs, self.may_follow = False, False
        self.arguments, self.grown = {}, {}

    def close(self) -> None:
        """Give the caches back; one that failed is not used again."""
        if self.prompt_size is not None:
            self.prompt_size.lock.release()
            self.prompt_size = None
        if self.cache is not None:
            self.cache.given = self.cache.mask = None
            if self.cache.failed:
                self.cache.free()
            self.cache.in_use = False


class _Prompted:
    """The model for the method of transformers that runs the prompt: a call of it is a forward of the prompt."""

    def __init__(self, model: Any, generation: _Generation) -> None:
        self._model, self._generation = model, generation

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        return self._model(*args, **inputs) if args else self._generation.first(self._model, inputs)


def _methods(base: type, decoding: Decoding) -> dict[str, Callable[..., Any]]:
    """Return the methods of transformers' generation that ask for graphs, and otherwise do what they did."""
    stock: Any = base
    names = [*inspect.signature(stock.generate).parameters][1:]  # without self

    @functools.wraps(stock.generate)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = args[0] if args else kwargs.get("inputs", kwargs.get(DECODER.ids))
        tokens = given.shape[1] if isinstance(given, torch.Tensor) and given.ndim == 2 else 0
        loop = {**dict(zip(names, args, strict=False)), **kwargs}.get("custom_generate")
        generation = _Generation(decoding, prompt=tokens, is_custom=loop is not None)
        decoding.generations.append(generation)
        try:
            return stock.generate(self, *args, **kwargs)
        finally:
            decoding.generations.remove(generation)
            generation.close()

    @functools.wraps(stock._prepare_cache_for_generation)
    def prepare(
        self: Any, config: Any, kwargs: dict[str, Any], mode: Any, batch_size: int, length: int, *rest: Any
    ) -> Any:
        given = kwargs.get(cache_of(kwargs))
        prepared = stock._prepare_cache_for_generation(self, config, kwargs, mode, batch_size, length, *rest)
        if decoding.generations and decoding.is_open:
            generation = decoding.generations[-1]
            generation.restart()
            reason = "the caller gives a cache" if given is not None else why_stock(self, config, kwargs, mode)
            reason = "the caller has an own loop (custom_generate)" if generation.is_custom else reason
            generation.may_use_graphs = not reason
            generation.batch = batch_size * max(config.num_return_sequences or 1, 1)
            generation.length = length + 1
            if reason:
                decoding.count(reason)
        return prepared

    @functools.wraps(stock._valid_auto_compile_criteria)
    def may_compile(self: Any, *args: Any, **kwargs: Any) -> bool:
        ours = bool(decoding.generations) and decoding.generations[-1].may_use_graphs
        return ours or bool(stock._valid_auto_compile_criteria(self, *args, **kwargs))

    @functools.wraps(stock.get_compiled_call)
    def compiled_call(self: Any, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        if decoding.generations and decoding.generations[-1].may_use_graphs:
            return decoding.generations[-1].step
        found: Callable[..., Any] = stock.get_compiled_call(self, *args, **kwargs)
        return found

    @functools.wraps(stock._prefill)
    def prefill(self: Any, *args: Any, **kwargs: Any) -> Any:
        generation = decoding.generations[-1] if decoding.generations else None
        caller = self if generation is None or decoding.prompts is None else _Prompted(self, generation)
        return stock._prefill(caller, *args, **kwargs)

    return {
        "generate": generate,
        **({"_prefill": prefill} if _runs_prompts_as_transformers(stock) else {}),
        "_prepare_cache_for_generation": prepare,
        "_valid_auto_compile_criteria": may_compile,
        "get_compiled_call": compiled_call,
    }


def _runs_prompts_as_transformers(base: Any) -> bool:
    from transformers import GenerationMixin

    own = getattr(base, "_prefill", None)
    return own is not None and own is getattr(GenerationMixin, "_prefill", None)


def _preparing_methods(base: type, decoding: Decoding) -> dict[str, Callable[..., Any]]:
    """Return the methods that prepare each step; a generation in graphs asks transformers only if it has to."""
    stock: Any = base

    @functools.wraps(stock.prepare_inputs_for_generation)
    def prepare_inputs(self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        generation = decoding.generations[-1] if decoding.generations and not args else None
        cache = generation.cache if generation is not None else None
        if generation is None or cache is None or kwargs.get(cache_of(kwargs)) is not cache.static:
            return stock.prepare_inputs_for_generation(self, input_ids, *args, **kwargs)
        options = {name: kwargs.pop(name) for name in ("next_sequence_length", "is_first_iteration") if name in kwargs}
        return generation.prepare(stock, input_ids, kwargs, **options)

    @functools.wraps(stock._update_model_kwargs_for_generation)
    def update(self: Any, outputs: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        generation = decoding.generations[-1] if decoding.generations else None
        cache = generation.cache if generation is not None else None
        if generation is None or cache is None or model_kwargs.get(cache_of(model_kwargs)) is not cache.static:
            return stock._update_model_kwargs_for_generation(self, outputs, model_kwargs, *args, **kwargs)
        return generation.update(stock, outputs, model_kwargs, *args, **kwargs)

    return dict(zip(METHODS, (prepare_inputs, update), strict=True))


# ---- decisions ------------------------------------------------------------------------------------


def why_stock(model: Any, config: Any, kwargs: Mapping[str, Any], mode: Any) -> str:
    """Return the reason for a generation to run without graphs; empty if it may use them.

    Args:
        kwargs: arguments of the model, with the cache that transformers made.
    """
    from transformers import DynamicCache, EncoderDecoderCache

    cache: Any = kwargs.get(cache_of(kwargs))
    parts = [cache]
    if type(cache) is EncoderDecoderCache:
        parts = [cache.self_attention_cache, cache.cross_attention_cache]
    if has_modes():
        return "a mode must see each operation of PyTorch"
    if torch.is_autocast_enabled(model.device.type):
        return AUTOCAST
    if str(getattr(mode, "value", mode)) not in ("greedy_search", "sample"):
        return f"{getattr(mode, 'value', mode)} is left to transformers"
    if model.training:
        return "the model is in training mode"
    if any(type(part) is not DynamicCache for part in parts):
        return "it has no cache, or one that transformers does not make by default"
    if any(getattr(part, "offloading", False) for part in parts):
        return "its cache is offloaded to the host"
    if reason := why_not_layers(cache) or why_not_encoded(kwargs.get(ENCODER)):
        return reason
    if config.return_dict_in_generate:
        return "the caller wants the cache back (return_dict_in_generate)"
    if config.output_attentions or config.output_hidden_states:
        return "the caller wants attentions or hidden states"
    if model.config.get_text_config(decoder=True)._attn_implementation not in ("sdpa", "eager"):
        return "the attention is neither sdpa nor eager"
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        return "the model is spread over devices"
    return ""


def _why_not_inputs(inputs: Mapping[str, Any]) -> str:
    """Return the reason if the forward would derive positions or masks from counts on the host; empty if they are inputs."""
    names = names_of(inputs)
    if not isinstance(inputs.get(names.positions), torch.Tensor):
        return "its cache has a window, and the forward counts the positions itself"
    given = inputs.get(names.mask)
    masks = list(given.values()) if isinstance(given, dict) else [given]
    if isinstance(given, dict) or (isinstance(given, torch.Tensor) and given.ndim == 4):
        return (
            ""
            if all(mask is None or mask.ndim in (2, 4) for mask in masks)
            else "a mask is neither per token nor per pair of tokens"
        )
    return "its cache has a window, and the forward makes the mask itself"


def _with_next_inputs(capture: Capture) -> Capture:
    """Return a capture whose graphs end with the inputs of the next step."""

    def capture_both(model: Any, inputs: Mapping[str, Any]) -> CapturedForward:
        forward = Advancing(model)
        return replace(capture(forward, inputs), following=forward.following)

    return capture_both
