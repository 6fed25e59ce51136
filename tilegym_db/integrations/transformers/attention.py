"""The attention call of a model: its own function, or a kernel where the call is exactly one that a Definition describes.

An attention forward asks transformers' registry for a function by the name that its config holds. A patched forward reads the
registry through :class:`Interfaces`, which finds the same functions and only wraps the one that was probed. So config, registry
and masks stay as they are: a mask is built for ``sdpa``, and its absence says that none is needed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tilegym_db.integrations.transformers.site import Site

__all__ = ["DECODE", "PREFILL", "REGISTRY", "Interfaces", "attention_function", "sdpa_function", "why_stock"]

REGISTRY = "ALL_ATTENTION_FUNCTIONS"
SDPA = "sdpa"
PREFILL, DECODE = "attention_prefill", "attention_decode"

MASKED = "it has a mask: padding, a window within the sequence, a static cache, or a prompt in chunks"
DROPOUT = "it drops weights at random"
WEIGHTS = "attention weights are asked for"
NOT_CAUSAL = "its positions may see later ones"
FEWER_KEYS = "it has fewer keys than queries"
NO_HEADS = "it is not given as batch, heads, positions and head size"
OTHER_HEADS = "its query heads are not the multiple of its key heads that the module states"
OTHER_VALUES = "its values are not as many as its keys"
AUTOCAST = "autocast picks the dtype that it computes in"
SCALE_IS_NO_NUMBER = "its scale is no number"
OTHER_MATHS = ("position_bias", "softcap", "s_aux", "cache")
"""Arguments that stock code takes from whoever calls the model, and that no Definition knows."""

_is_compiling = torch.compiler.is_compiling
Function = Callable[..., Any]


def sdpa_function(forward: Any) -> Any:
    """The function that an attention forward finds for ``sdpa`` in the registry it names; None where there is none."""
    registry = forward.__globals__.get(REGISTRY)
    if not hasattr(registry, "get_interface") or "get_interface" not in forward.__code__.co_names:
        return None
    return registry.get(SDPA)


class Interfaces:
    """What a patched forward sees as the registry: the same functions, and ``served`` in the place of ``stock``.

    While code is compiled, and for every other attention than the one that was probed, it is the registry.
    """

    def __init__(self, registry: Any, stock: Function, served: Function, bypass: Callable[[str], None]) -> None:
        """Wrap a registry.

        Args:
            registry: the one that the forward names.
            stock: the function that was probed.
            served: stands in for it.
            bypass: is told why another function runs.
        """
        self._registry = registry
        self._stock = stock
        self._served = served
        self._bypass = bypass

    def get_interface(self, attn_implementation: str, default: Function) -> Function:
        """As the registry's."""
        found: Function = self._registry.get_interface(attn_implementation, default)
        if _is_compiling():
            return found
        if found is self._stock:
            return self._served
        self._bypass(
            f"the model's attention is {attn_implementation!r}; only {SDPA!r} is known to compute a definition"
        )
        return found

    def __getitem__(self, name: str) -> Function:
        """As the registry's: a function that is looked up in another way is left alone."""
        function: Function = self._registry[name]
        return function

    def __getattr__(self, name: str) -> Any:
        """Everything else is the registry's."""
        return getattr(self._registry, name)


def attention_function(stock: Function, prefill: Site | None, decode: Site | None) -> Function:
    """``sdpa_attention_forward`` for query [B, Hq, Sq, D], key and value [B, Hkv, Skv, D] -> ([B, Sq, Hq, D], None).

    Args:
        stock: the function itself.
        prefill: serves whole prompts; None leaves them to stock.
        decode: serves single positions, likewise.
    """

    def serve(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Any) -> Any:
        is_one = query.dim() == 4 and query.shape[2] == 1
        site = decode if is_one else prefill
        if site is None or site.leaves(module.training, query, key, value):
            return None
        reason = why_stock(module, query, key, options) if value.shape[:3] == key.shape[:3] else OTHER_VALUES
        if reason:
            site.bypass(reason)
            return None
        if not is_one and key.shape[2] > query.shape[2]:
            # A static cache with nothing in it yet: causal from its start, so that stock cuts the rest off as well.
            key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
        scaling = options.get("scaling")
        out = site.serve(query, key, value, 1.0 / math.sqrt(query.shape[3]) if scaling is None else scaling)
        return None if out is None else out.transpose(1, 2).contiguous()

    @functools.wraps(stock)
    def attention(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        # The mask comes fourth or by its name; whoever passes more than that by position means another function.
        if len(args) <= 1:
            mask = {"attention_mask": args[0]} if args else {}
            out = serve(module, query, key, value, {**mask, **kwargs})
            if out is not None:
                return out, None
        return stock(module, query, key, value, *args, **kwargs)

    return attention


def why_stock(module: Any, query: torch.Tensor, key: torch.Tensor, options: Mapping[str, Any]) -> str:
    """Why a call of ``sdpa_attention_forward`` is none that a Definition describes; empty where it is one.

    Stock code ignores all options but those that are looked at here. A window or a cache shows in the mask alone: transformers
    passes none only where every query sees all keys, or all up to its own.

    Args:
        module: the attention module: how many query heads share a key head, and whether it is causal.
        query: [B, Hq, Sq, D].
        key: [B, Hkv, Skv, D].
        options: the other arguments by name, the mask among them.
    """
    if options.get("attention_mask") is not None:
        return MASKED
    if torch.is_autocast_enabled(query.device.type):
        return AUTOCAST
    if options.get("dropout"):
        return DROPOUT
    if options.get("output_attentions"):
        return WEIGHTS
    for name in OTHER_MATHS:
        if options.get(name) is not None:
            return f"it is given a {name}"
    if type(options.get("scaling")) not in (float, type(None)):
        return SCALE_IS_NO_NUMBER
    if query.dim() != 4 or key.dim() != 4:
        return NO_HEADS
    if query.shape[1] != key.shape[1] * getattr(module, "num_key_value_groups", 1):
        return OTHER_HEADS
    return _why_not_causal(module, query.shape[2], key.shape[2], options.get("is_causal"))


def _why_not_causal(module: Any, queries: int, keys: int, is_causal: Any) -> str:
    if queries == 1:  # sees every key, whatever is said of causality
        return ""
    if (getattr(module, "is_causal", True) if is_causal is None else is_causal) is not True:
        return NOT_CAUSAL
    return FEWER_KEYS if keys < queries else ""
