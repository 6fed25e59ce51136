"""Inputs of a decoding step that follow from those of the step before: one token more, positions one higher, a mask that sees it.

Transformers prepares them anew for each token, with about twenty small launches, and the device waits for the host. A graph can
end with them at next to no cost. This holds for models whose steps transformers itself prepares, with masks of known kinds.

The inputs of a decoder behind an encoder have other names. What the encoder gives stays the same in all steps of a generation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

CACHES = ("past_key_values", "cache_params")
"""Names of a cache, among the inputs of a model and among its outputs. The second one is that of a cache of states."""
MASK = "attention_mask"
"""A mask of the tokens; behind an encoder, one of the encoder's outputs."""
ENCODER = "encoder_outputs"
HELD = (*CACHES, ENCODER)
"""Inputs in memory that stays where it is, so that a graph reads them there."""
RETURN = "return_dict"
COUNTER = "cumulative_length_int"
"""The count of tokens that a window of a cache keeps on the host."""
METHODS = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation")
"""The methods of a model that make the inputs of a step."""


class InputNames(NamedTuple):
    """Names of the inputs of a step that change with each token."""

    ids: str
    mask: str
    positions: str


DECODER = InputNames("input_ids", MASK, "position_ids")
BEHIND_ENCODER = InputNames(*(f"decoder_{name}" for name in DECODER))


def names_of(inputs: Mapping[str, Any]) -> InputNames:
    """Return the names of the inputs of a step."""
    return BEHIND_ENCODER if BEHIND_ENCODER.ids in inputs else DECODER


def cache_of(values: Mapping[str, Any]) -> str:
    """Return the name of the cache among inputs, arguments or outputs."""
    return next((name for name in CACHES if values.get(name) is not None), CACHES[0])


def own_layers(cache: Any) -> list[Any]:
    """Return the layers of a cache with what the decoder's own tokens left."""
    layers: list[Any] = getattr(cache, "self_attention_cache", cache).layers
    return layers


@dataclass(frozen=True)
class CapturedForward:
    """A forward that :attr:`replay` runs again: it reads :attr:`inputs`, and leaves :attr:`outputs` as a forward returns them.

    Attributes:
        following: inputs by name, except the cache, that a replay leaves as the next step needs them; empty if there are none.
    """

    replay: Callable[[], Any]
    inputs: list[torch.Tensor]
    outputs: Any
    following: dict[str, Any] = field(default_factory=dict)


class Advancing:
    """A forward that prepares its inputs for the next step, in place. A graph of this forward then does the same.

    Attributes:
        following: the prepared inputs, by name and without the cache; empty if the forward has inputs of unknown kinds.
    """

    def __init__(self, model: Callable[..., Any]) -> None:
        """Take the forward as it is."""
        self.following: dict[str, Any] = {}
        self._model = model

    def __call__(self, **inputs: Any) -> Any:
        """Run the forward, then change its inputs in place."""
        layers = own_layers(inputs[cache_of(inputs)])
        windows = [layer for layer in layers if hasattr(layer, COUNTER)]
        full = {layer.max_cache_len for layer in windows if getattr(layer, COUNTER) >= layer.max_cache_len}
        outputs = self._model(**inputs)
        if _are_known(inputs):
            _advance(inputs, layers, full)
            self.following.update((name, value) for name, value in inputs.items() if name not in (*CACHES, RETURN))
        return outputs


def _are_known(inputs: Mapping[str, Any]) -> bool:
    """Return True if the tensors of a step are one token a sequence, positions, and masks for each pair of tokens.

    Behind an encoder there are also its outputs and a mask of them, which stay.
    """
    names = names_of(inputs)
    ids = inputs.get(names.ids)
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or inputs.get(RETURN) is not True:
        return False
    if any(not isinstance(mask, torch.Tensor) or mask.ndim != 4 for mask in _masks(inputs)):
        return False
    explained = (*names, *HELD, MASK)
    others = [value for name, value in inputs.items() if name not in explained]
    return all(value is None or type(value) in (bool, int, str) for value in others)


def _masks(inputs: Mapping[str, Any]) -> list[Any]:
    given = inputs.get(names_of(inputs).mask)
    return [mask for mask in (given.values() if isinstance(given, dict) else [given]) if mask is not None]


def _advance(inputs: Mapping[str, Any], layers: list[Any], full: set[int]) -> None:
    """Make the inputs of a step those of the next one: the new token is visible, and a full window moves with its keys."""
    names = names_of(inputs)
    if isinstance(positions := inputs.get(names.positions), torch.Tensor):
        positions.add_(1)
    device = inputs[names.ids].device  # a layer that is not in use has its count on the CPU
    counts = [
        layer.cumulative_length
        for layer in layers
        if hasattr(layer, "cumulative_length") and not (hasattr(layer, COUNTER) and layer.max_cache_len in full)
    ]
    counts = [count for count in counts if count.device == device]
    for mask in _masks(inputs):
        size, visible = mask.shape[-1], True if mask.dtype == torch.bool else 0.0
        if size in full:
            mask.copy_(torch.cat((mask[..., 1:], torch.full_like(mask[..., :1], visible)), dim=-1))
        elif counts:
            # A window that has just become full has no such place. Its next step is another graph, which reads other inputs.
            mask.index_fill_(-1, torch.remainder(counts[0], size).view(1), visible)


def prepares_as_transformers(base: Any) -> bool:
    """Return True if a class makes the inputs of its steps with the methods that transformers' models share."""
    from transformers import GenerationMixin

    shared: list[Any] = [getattr(GenerationMixin, name) for name in METHODS]
    return all(
        method.__module__ == GenerationMixin.__module__ and getattr(base, name, None) is method
        for name, method in zip(METHODS, shared, strict=True)
    )


def inputs_follow(model: Any, ours: Any) -> bool:
    """Return True if transformers itself makes the masks of a model, all of known kinds, by the methods of the class ``ours``."""
    from transformers import masking_utils
    from transformers.generation import utils

    if any(getattr(getattr(model, name), "__func__", None) is not vars(ours).get(name, model) for name in METHODS):
        return False
    if hasattr(model, "create_masks_for_generate"):
        return False
    config = model.config.get_text_config()
    kind = config._attn_implementation
    makes = {"sdpa": masking_utils.sdpa_mask, "eager": masking_utils.eager_mask}
    if kind not in makes or masking_utils.ALL_MASK_ATTENTION_FUNCTIONS[kind] is not makes[kind]:
        return False
    if utils.create_masks_for_generate is not masking_utils.create_masks_for_generate:
        return False
    if not getattr(config, "is_causal", True) or getattr(config, "attention_chunk_size", None) is not None:
        return False
    by_layer = masking_utils.LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING
    known = (
        masking_utils.create_causal_mask,
        masking_utils.create_sliding_window_causal_mask,
        masking_utils.create_recurrent_attention_mask,
    )
    return all(by_layer.get(layer) in known for layer in set(getattr(config, "layer_types", None) or ()))


def are_same(inputs: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    """Return True if two mappings hold the same objects under the same names. It runs for each token."""
    return len(inputs) == len(others) and all(value is others.get(name, others) for name, value in inputs.items())


def are_equal(prepared: Mapping[str, Any], following: Mapping[str, Any]) -> bool:
    """Return True if inputs that transformers prepared equal others in all but the cache and the new token.

    It waits for the device.
    """
    if {*prepared} - {*CACHES} != {*following} - {*CACHES}:
        return False
    ids = names_of(prepared).ids
    return all(_is_equal(value, following[name], name == ids) for name, value in prepared.items() if name not in CACHES)


def _is_equal(value: Any, other: Any, has_other_values: bool = False) -> bool:
    if value is other:
        return True
    if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
        is_like = (value.shape, value.dtype, value.device) == (other.shape, other.dtype, other.device)
        return is_like and (has_other_values or torch.equal(value, other))
    if isinstance(value, dict) and isinstance(other, dict):
        return {*value} == {*other} and all(_is_equal(one, other[name]) for name, one in value.items())
    return type(value) is type(other) and bool(value == other)
