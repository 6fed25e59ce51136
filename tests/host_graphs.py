"""Graphs without a GPU: forwards that run again as a CUDA graph would, with what the host kept at capture."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import transformers
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from tilegym_db.models.graphs import copied
from tilegym_db.models.next_inputs import HELD, CapturedForward, cache_of
from tilegym_db.resolver.hot_path import is_replayed, replayed

__all__ = ["eager"]


def eager(model: Any, inputs: Mapping[str, Any]) -> CapturedForward:
    """Return the forward as a CUDA graph would run it.

    Its inputs are copies, all replays return one object, and what the host kept at capture stays as it was then. The capture
    itself runs on the host only. Replays choose kernels as the capture did.
    """
    kept: list[torch.Tensor] = []
    given = copied(dict(inputs), kept)
    held = {name: inputs[name] for name in HELD if name in inputs}
    name = cache_of(inputs)
    cache, outputs = inputs[name], transformers.modeling_outputs.CausalLMOutputWithPast()
    at_capture = host_state(cache)
    modes = _get_current_function_mode_stack()
    ways = [*([replayed] if is_replayed() else []), *((lambda mode=mode: mode) for mode in modes)]
    on_device = [(value, value.clone()) for _, _, value in tensors_of(cache)]

    def replay() -> None:
        before = host_state(cache)
        set_host_state(cache, at_capture)
        with contextlib.ExitStack() as again:
            for way in ways:
                again.enter_context(way())
            again.enter_context(capturing())
            found = model(**given, **held)
        set_host_state(cache, before)
        outputs["logits"], outputs[name] = found.logits, cache

    try:
        with NoWaiting(), capturing():
            model(**given, **held)
    finally:
        for value, was in on_device:
            value.copy_(was)
    return CapturedForward(replay, kept, outputs)


def deciding_as_now() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return what makes a context in which transformers decides about masks as it does now: a replay keeps those decisions."""
    masks = transformers.masking_utils
    names = "is_tracing", "find_packed_sequence_indices"
    now = [getattr(masks, name) for name in names]

    @contextlib.contextmanager
    def then() -> Iterator[None]:
        before = [getattr(masks, name) for name in names]
        try:
            for name, decide in zip(names, now, strict=True):
                setattr(masks, name, decide)
            yield
        finally:
            for name, decide in zip(names, before, strict=True):
                setattr(masks, name, decide)

    return then


_here = threading.local()


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """Tell transformers in this thread that a graph is captured, so that it does not read tensors."""
    _here.captures = True
    try:
        yield
    finally:
        _here.captures = False


transformers.utils.import_utils.is_cuda_stream_capturing = lambda: getattr(_here, "captures", False)


class NoWaiting(TorchFunctionMode):
    """A mode that refuses what a capture on a GPU refuses: copies of numbers to the device, and reads of them."""

    REFUSED = (
        torch.tensor,
        torch.as_tensor,
        torch.Tensor.item,
        torch.Tensor.tolist,
        torch.Tensor.__bool__,
        torch.nonzero,
    )

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in self.REFUSED:
            raise RuntimeError(f"{function} is not permitted when a stream is capturing")
        return function(*args, **(kwargs or {}))


def layers_of(cache: Any) -> list[Any]:
    parts = getattr(cache, "self_attention_cache", cache), getattr(cache, "cross_attention_cache", None)
    return [layer for part in parts if part is not None for layer in part.layers]


def tensors_of(cache: Any) -> list[tuple[Any, Any, torch.Tensor]]:
    layers = [vars(layer) for layer in layers_of(cache)]
    places = [*layers, *(value for layer in layers for value in layer.values() if isinstance(value, dict))]
    return [(place, name, value) for place in places for name, value in place.items() if torch.is_tensor(value)]


def host_state(cache: Any) -> list[dict[str, Any]]:
    return [
        {name: dict(value) if isinstance(value, dict) else value for name, value in vars(layer).items()}
        for layer in layers_of(cache)
    ]


def set_host_state(cache: Any, state: list[dict[str, Any]]) -> None:
    for layer, attributes in zip(layers_of(cache), state, strict=True):
        for name, value in attributes.items():
            setattr(layer, name, dict(value) if isinstance(value, dict) else value)
