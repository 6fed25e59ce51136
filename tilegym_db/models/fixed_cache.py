"""Caches of fixed size for ``generate`` in graphs: copies of the caches of transformers, whose memory stays where it is.

A generation of an encoder-decoder model has two caches. The one of the decoder's tokens gets a fixed size. The one of the
encoder's outputs does not change after the first step. It and the outputs are copied at the start of each generation.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from tilegym_db.models.cache_writes import Writes, is_known, writing
from tilegym_db.models.next_inputs import (
    COUNTER,
    ENCODER,
    MASK,
    CapturedForward,
    own_layers,
)

BUCKET = 256
"""Lengths of caches are multiples of this, up to a sixteenth of their size more: a graph reads the whole cache in each step."""
READ = "count_was_read"
"""Attribute of a window: the forward that ran last has asked how many tokens there are, which a graph would not do."""
MEMORY_SHARE = 0.25
"""Maximum share of the free memory of a GPU for one cache."""
_FIXED = {
    "DynamicLayer": "StaticLayer",
    "DynamicSlidingWindowLayer": "StaticSlidingWindowLayer",
    "LinearAttentionLayer": "LinearAttentionLayer",
    "LinearAttentionAndFullAttentionLayer": "LinearAttentionAndStaticFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer": "LinearAttentionAndStaticSlidingWindowAttentionLayer",
    "DummyLayer": "DummyLayer",
}
"""Class of a cache's layer -> the class of a layer of fixed size that computes the same, both in transformers."""


def bucket_of(length: int) -> int:
    """Return the size of the cache for a length: at most a sixteenth larger, or one bucket."""
    step = max(BUCKET, 1 << max(0, length.bit_length() - 5))
    return -(-length // step) * step


@dataclass
class FixedCache:
    """A cache of fixed size with its graphs. One generation uses it at a time."""

    static: Any
    writes: Writes = field(default_factory=Writes)
    """What the layers write in a step."""
    graphs: dict[Any, CapturedForward | None] = field(default_factory=dict)
    """Form of a step -> its graph; None after one eager step in this form, which compiles and loads what it needs."""
    failed: str = ""
    in_use: bool = False
    tokens: int = 0
    """Tokens in the cache, the count that the device has too."""
    filled: dict[Any, Any] = field(default_factory=dict)
    """The host state after the last copy from another cache."""
    last: CapturedForward | None = None
    """The graph of the last step; None if it was eager."""
    given: Any = None
    """The encoder's outputs in this generation; None without an encoder."""
    encoded: Any = None
    """Copies of them."""
    mask: Any = None
    """The mask of the encoder's outputs in this generation."""
    hides: bool = False
    """True if that mask hides an output; if not, the steps need none."""
    windows: list[Any] = field(init=False)
    """The layers that count on the host."""
    sizes: tuple[int, ...] = field(init=False)
    """The different sizes of the windows."""

    def __post_init__(self) -> None:
        for layer in own_layers(self.static):
            if hasattr(layer, "writes"):
                layer.writes = self.writes
        self.windows = [layer for layer in own_layers(self.static) if hasattr(layer, COUNTER)]
        self.sizes = tuple(sorted({layer.max_cache_len for layer in self.windows}))

    @property
    def bytes(self) -> int:
        """Its memory."""
        encoded = [] if self.encoded is None else [*self.encoded.values()]
        return bytes_of(self.static) + sum(value.nbytes for value in encoded if isinstance(value, torch.Tensor))

    @property
    def phase(self) -> tuple[bool, ...]:
        """The branches that the windows take on the host in the next step, one for each size: True if full."""
        return tuple([self.tokens >= size for size in self.sizes])

    def run(self, model: Any, /, **inputs: Any) -> Any:
        """Run the forward of a step. At its end the device counts what it has written."""
        for layer in self.windows:
            setattr(layer, READ, False)
        with self.writes:
            return model(**inputs)

    @property
    def reads_counts(self) -> bool:
        """True if the forward that ran last has asked a window how many tokens it has: a number on the host."""
        return any([getattr(layer, READ) for layer in self.windows])

    def count(self, tokens: int) -> None:
        """Set the counts on the host. The device counts when it runs a step."""
        self.tokens = tokens
        for layer in self.windows:
            setattr(layer, COUNTER, tokens)

    def free(self) -> None:
        """Free its memory, and keep the reason why it failed."""
        self.graphs.clear()
        self.last = self.given = self.encoded = self.mask = None
        self.windows = []
        for part in _parts(self.static):
            part.layers = []

    def fill_from(self, dynamic: Any, encoded: Any = None) -> None:
        """Copy the keys, values and states of the tokens so far, and clear what an earlier generation left behind them.

        Args:
            encoded: the encoder's outputs, for a model with an encoder.
        """
        tokens = tokens_in(dynamic)
        self.last = self.mask = None
        for layer, found in zip(own_layers(self.static), own_layers(dynamic), strict=True):
            if hasattr(layer, "conv_states"):
                _copy_states(layer, found)
            if isinstance(getattr(found, "keys", None), torch.Tensor):
                _copy_keys_and_values(layer, found, tokens)
        for layer, found in zip(_cross_layers(self.static), _cross_layers(dynamic), strict=True):
            for name, value in vars(found).items():
                setattr(layer, name, _copied(getattr(layer, name, None), value))
        if hasattr(dynamic, "is_updated"):
            self.static.is_updated = dict(dynamic.is_updated)
        self._copy_encoded(encoded)
        self.count(tokens)
        if self.graphs and self.filled != self.host_state():
            self.graphs.clear()  # they read other memory
        self.filled = self.host_state()

    def host_state(self) -> dict[Any, Any]:
        """Return what a graph takes from the host: addresses and settings of the layers, without the counts."""
        encoded = {} if self.encoded is None else {(ENCODER, name): value for name, value in self.encoded.items()}
        return {
            name: value.data_ptr() if isinstance(value, torch.Tensor) else value
            for name, value in (*_attributes(self.static), *encoded.items())
            if name[1] not in (COUNTER, READ)
        }

    def with_encoded(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the inputs of a step with the encoder's outputs in memory of this cache, without a mask that hides nothing."""
        given = inputs.get(ENCODER)
        if given is None or given is self.encoded:
            return inputs
        if given is not self.given:
            before = self.host_state()
            self._copy_encoded(given)
            if before != self.host_state():  # they have another size, so the graphs read other memory
                self.graphs.clear()
        found = {**inputs, ENCODER: self.encoded}
        mask = inputs.get(MASK)
        if isinstance(mask, torch.Tensor):
            if mask is not self.mask:
                self.mask, self.hides = mask, not bool(mask.all())  # waits for the device, once a generation
            if not self.hides:
                del found[MASK]
        return found

    def _copy_encoded(self, given: Any) -> None:
        kept = {} if self.encoded is None else self.encoded
        self.given = self.encoded = given
        if given is not None:
            self.encoded = type(given)(**{name: _copied(kept.get(name), value) for name, value in given.items()})


def _parts(cache: Any) -> list[Any]:
    """Return the caches of a decoder: one, or those of its tokens and of the encoder's outputs."""
    cross = getattr(cache, "cross_attention_cache", None)
    return [cache] if cross is None else [cache.self_attention_cache, cross]


def _cross_layers(cache: Any) -> list[Any]:
    """Return the layers with keys and values of the encoder's outputs."""
    return [layer for part in _parts(cache)[1:] for layer in part.layers]


def tokens_in(cache: Any) -> int:
    """Return the number of tokens in a cache; 0 if none of its layers keeps keys."""
    return int(cache.get_seq_length()) if keeps_keys(cache) else 0


def keeps_keys(cache: Any) -> bool:
    """Return True if a layer of a cache keeps keys, and so knows the number of tokens."""
    return any(hasattr(layer, "keys") for layer in own_layers(cache))


def encoded_tokens(cache: Any) -> int:
    """Return the number of the encoder's outputs in a cache; 0 without an encoder."""
    return max((layer.keys.shape[-2] for layer in _cross_layers(cache) if layer.is_initialized), default=0)


def _attributes(cache: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the attributes of each layer; those of a state have its index in their name."""
    for index, layer in enumerate([*own_layers(cache), *_cross_layers(cache)]):
        for name, value in vars(layer).items():
            if isinstance(value, dict | list):
                inner = value.items() if isinstance(value, dict) else enumerate(value)
                yield from (((index, name, key), one) for key, one in inner)
            else:
                yield (index, name), value
    yield from ((("cache", "is_updated", key), one) for key, one in getattr(cache, "is_updated", {}).items())


def bytes_of(cache: Any) -> int:
    """Return the memory of the keys, values and states of a cache."""
    return sum(value.nbytes for _, value in _attributes(cache) if isinstance(value, torch.Tensor))


def _copy_keys_and_values(layer: Any, found: Any, tokens: int) -> None:
    """Copy keys and values to their places: at the start, or at the end of a window that is full."""
    if not layer.is_initialized:
        layer.lazy_initialization(found.keys, found.values)
    size = layer.keys.shape[-2]
    is_full = tokens >= size
    length = min(found.keys.shape[-2], size - 1 if is_full else tokens)
    start = size - length if is_full else 0
    for kept, given in ((layer.keys, found.keys), (layer.values, found.values)):
        for unseen in (kept[..., :start, :], kept[..., start + length :, :]):
            if unseen.numel():
                unseen.zero_()  # masked, but 0 * NaN is NaN
        kept[..., start : start + length, :].copy_(given[..., given.shape[-2] - length :, :])
    layer.cumulative_length.fill_(min(tokens, size))


def _copy_states(layer: Any, found: Any) -> None:
    """Copy the states of linear attention, which have one size, and what the host knows about them."""
    for name in vars(found if type(found) is type(layer) else _linear_layer()()):
        setattr(layer, name, _copied(getattr(layer, name), getattr(found, name)))


def _copied(kept: Any, found: Any) -> Any:
    """Return a value of a layer: a tensor is copied into the one that is kept, if there is one."""
    if isinstance(found, torch.Tensor):
        if isinstance(kept, torch.Tensor) and kept.shape == found.shape and kept.dtype == found.dtype:
            return kept.copy_(found)
        return found.clone()
    if isinstance(found, dict):
        own = kept if isinstance(kept, dict) else {}
        return {key: _copied(own.get(key), value) for key, value in found.items()}
    if isinstance(found, list):
        own = dict(enumerate(kept)) if isinstance(kept, list) else {}
        return [_copied(own.get(index), value) for index, value in enumerate(found)]
    return found


@functools.cache
def _moving(window: Any) -> Any:
    """Return a subclass of a window's layer whose full window moves without a copy from the host, which no graph may contain.

    It also notes that its count is read.
    """

    def update(self: Any, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        tokens = getattr(self, COUNTER)
        if not self.is_initialized or tokens < self.max_cache_len or keys.shape[-2] != 1:
            return window.update(self, keys, values, *args, **kwargs)
        for kept, given in ((self.keys, keys), (self.values, values)):
            kept.copy_(torch.cat((kept[..., 1:, :], given), dim=-2))
        setattr(self, COUNTER, tokens + 1)
        return self.keys, self.values

    def get_seq_length(self: Any) -> Any:
        setattr(self, READ, True)
        return window.get_seq_length(self)

    def get_mask_sizes(self: Any, *args: Any) -> Any:
        setattr(self, READ, True)
        return window.get_mask_sizes(self, *args)

    members = {"update": update, "get_seq_length": get_seq_length, "get_mask_sizes": get_mask_sizes}
    return type(window.__name__, (window,), {**members, READ: False, "__module__": window.__module__})


@functools.cache
def _linear_layer() -> Any:
    from transformers.cache_utils import LinearAttentionLayer

    return LinearAttentionLayer


def why_not_layers(cache: Any) -> str:
    """Return the reason why the layers of a cache cannot have a fixed size; empty if they can."""
    from transformers import cache_utils

    known = [getattr(cache_utils, name, None) for name in _FIXED]
    for layer in own_layers(cache):
        if type(layer) not in known:
            return f"its cache has a {type(layer).__name__}, and no cache of fixed size that is known holds the same"
        if getattr(layer, "record_past", False):
            return "its cache records the past"
    for layer in _cross_layers(cache):
        if type(layer) is not cache_utils.DynamicLayer:
            return f"its cache has a {type(layer).__name__} for the outputs of the encoder"
    return ""


def why_not_encoded(encoded: Any) -> str:
    """Return the reason why the outputs of an encoder cannot be copied; empty if they can, or if there are none."""
    from transformers.utils import ModelOutput

    if encoded is None:
        return ""
    is_known = isinstance(encoded, ModelOutput) and all(isinstance(one, torch.Tensor) for one in encoded.values())
    return "" if is_known else "the outputs of its encoder are more than tensors"


def new_cache(model: Any, dynamic: Any, length: int) -> Any:
    """Return an empty cache of fixed size for the layers of another cache, or the reason for none."""
    from transformers import DynamicCache, EncoderDecoderCache, StaticCache
    from transformers.cache_utils import DynamicLayer

    if reason := why_not_layers(dynamic):
        return reason
    config = model.config.get_text_config(decoder=True)
    try:
        cache: Any = StaticCache(config=config, max_cache_len=length)
    except (KeyError, NotImplementedError, TypeError) as error:
        return f"transformers has no cache of fixed size for it: {first_line(error)}"
    fixed = [_FIXED[type(layer).__name__] for layer in own_layers(dynamic)]
    if [type(layer).__name__ for layer in cache.layers] != fixed:
        return "its cache of fixed size has other kinds of layers"
    for layer in cache.layers:
        counts_on_host = hasattr(layer, "cumulative_length") and not isinstance(layer.cumulative_length, torch.Tensor)
        if counts_on_host or (getattr(layer, "is_sliding", False) and not hasattr(layer, COUNTER)):
            return "this version of transformers counts the tokens of a cache on the host"
        if getattr(layer, "is_sliding", False) and layer.max_cache_len < 2:
            return "a window of its cache has one position"
        kind: Any = type(layer)
        moving: Any = _moving(kind) if getattr(layer, "is_sliding", False) else kind
        layer.__class__ = writing(moving) if is_known(kind) else moving
    if isinstance(dynamic, EncoderDecoderCache):
        cross: Any = DynamicCache()
        cross.layers = [DynamicLayer() for _ in _cross_layers(dynamic)]
        cache = EncoderDecoderCache(cache, cross)
    needed = _bytes_of_cache(dynamic, cache)
    free = torch.cuda.mem_get_info(model.device)[0] if model.device.type == "cuda" else needed
    if model.device.type == "cuda" and needed > MEMORY_SHARE * free:
        return f"a cache of fixed size would take {needed >> 20} MiB of {free >> 20} MiB free; lower max_new_tokens"
    return cache


def _bytes_of_cache(dynamic: Any, static: Any) -> int:
    """Return the bytes that a cache of fixed size needs for the layers of another cache."""
    needed = 0
    lengths = [getattr(layer, "max_cache_len", 0) for layer in own_layers(static)]
    for (index, name, *_), value in _attributes(dynamic):
        if isinstance(value, torch.Tensor):
            is_grown = name in ("keys", "values") and index < len(lengths)
            needed += value.nbytes // max(value.shape[-2], 1) * lengths[index] if is_grown else value.nbytes
    return needed


def first_line(error: BaseException) -> str:
    """Return the class and the first line of an error."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:160]}"
