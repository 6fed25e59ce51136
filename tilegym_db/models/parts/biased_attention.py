"""The ``sdpa`` attention of models with a bias of scores by position, such as T5: the model's own function, or a kernel.

The forward of such a model passes the bias to its attention as an argument. The Definition takes the bias as it is and knows the
order of positions, so a call without a mask makes no copy of the bias. A mask is put into the bias first, as in stock code. If no
kernel serves the call, stock code gets the bias with the mask in it, so neither is read twice.
"""

from __future__ import annotations

import functools
import itertools
import math
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from tilegym_db.models.found import (
    WRAPPED,
    DefinitionMatch,
    FunctionOverrides,
    KnownCode,
    MatchCandidates,
    ModuleGroup,
    ModuleOfPart,
    PartCall,
    grouped,
    of_class,
)
from tilegym_db.models.parts.attention import (
    BIAS,
    SCALE,
    SDPA,
    SINKS,
    SIZES,
    Sdpa,
    Sites,
    answer,
    drawn_mask,
    other_options,
    passes_bias,
    sdpa_function,
    seen_registry,
    served_or_stock,
    states_causal,
    why_other_call,
    why_other_values,
)
from tilegym_db.models.probe import ROWS, Draw, Probe, device_of, drawn_inputs
from tilegym_db.models.upstream_code import fingerprint, of_models, undecorated
from tilegym_db.records.definition_parts import ModelCode

AFTER = ("rope",)
"""A forward calls its rotary function first."""
KIND = "biased_attention"
OTHER_BIAS = "its bias is not one of numbers for each head, [1 or batch, heads, positions, keys]"
OTHER_MASK = "its mask is not one for all heads of flags or of the bias's numbers, [batch, 1, positions, keys]"

Module = torch.nn.Module
Function = Callable[..., Any]


def find(model: Module, known: KnownCode, others: Sequence[ModuleGroup]) -> Iterable[ModuleGroup]:
    """Return the modules whose forward asks the registry and passes a bias of positions to what it gets."""
    asks = of_class(lambda cls: passes_bias(cls.forward))
    parts = [ModuleOfPart(module, detail=device_of(module)) for module in model.modules() if asks(module)]
    return grouped(KIND, parts if known.definitions(KIND) else ())


def candidates(found: ModuleGroup, known: KnownCode) -> MatchCandidates | str:
    """Judge the function that the forward's registry has for ``sdpa`` by its structure and by its bits."""
    forward: Any = undecorated(found.module_class.forward)
    if hasattr(forward, "__wrapped__"):
        return WRAPPED
    function, device = sdpa_function(forward), device_of(found.modules[0])
    options = other_options(function)
    reason = options if isinstance(options, str) else ""
    if not reason and device.type != "meta":  # a module without memory is left alone anyway
        reason = why_other_bits(function, device)
    if reason:
        return f"the sdpa attention in its registry is not known: {reason}"
    code = ModelCode(fingerprint=fingerprint(function) or "")
    return MatchCandidates([DefinitionMatch(one, code) for one in known.definitions(KIND)])


def why_other_bits(function: Function, device: torch.device) -> str:
    """Return the reason if a function computes other bits than PyTorch's with the bias as a mask; empty if the same.

    The calls have one or more positions, as many keys or more, and a module that is causal or not.
    """
    draw = Draw(device)
    for is_causal, queries, keys in itertools.product((True, False), (1, ROWS), (ROWS, 2 * ROWS)):
        query, bias = draw(2, 4, queries, SIZES["Dv"]), draw(1, 4, queries, keys)
        key, value = draw(2, 4, keys, SIZES["Dv"]), draw(2, 4, keys, SIZES["Dv"])
        flags = drawn_mask(query, key)
        numbers = torch.zeros_like(flags, dtype=bias.dtype).masked_fill(~flags, torch.finfo(bias.dtype).min)
        asked = functools.partial(function, _asking(is_causal), query, key, value)
        try:
            with torch.no_grad():
                out, _ = asked(None, **_options(bias))
                pairs = [
                    (asked(mask, **_options(bias))[0], asked(with_mask(bias, mask), **_options(None))[0])
                    for mask in (flags, numbers)
                ]
        except of_models() as error:
            return f"it raises {type(error).__name__} in a probe"
        if not all(torch.equal(*pair) for pair in pairs):
            return f"its bits for {queries} queries, {keys} keys, a bias and a mask are not those of both in one"
        if is_causal and queries > 1:
            key, value, bias = key[:, :, :queries], value[:, :, :queries], bias[..., :queries]
            bias = torch.where(torch.ones_like(bias, dtype=torch.bool).tril(), bias, torch.finfo(bias.dtype).min)
        if not torch.equal(out, Sdpa(query, key, value, attn_mask=bias.contiguous(), scale=SCALE).transpose(1, 2)):
            return f"its bits for {queries} queries, {keys} keys and a bias are not those of {Sdpa.__name__}"
    return ""


def _asking(is_causal: bool) -> Any:
    return types.SimpleNamespace(is_causal=is_causal, training=False, layer_idx=0)


def _options(bias: torch.Tensor | None) -> dict[str, Any]:
    return {"dropout": 0.0, "scaling": SCALE, BIAS: bias}


def probe(found: ModuleGroup, module: Module, match: DefinitionMatch) -> Probe | str:
    """Run the attention function on as many positions as keys, for a module that is causal."""
    sizes = {**SIZES, "Hkv": SIZES["Hq"], "Bb": 1}
    inputs = drawn_inputs(match.definition, sizes, device_of(module))
    q, k, v, bias = (inputs[name] for name in ("q", "k", "v", "bias"))
    function = sdpa_function(undecorated(type(module).forward))
    with torch.no_grad():
        out, _ = function(_asking(True), q, k, v, None, **_options(bias))
    return {**inputs, "causal": True, "scale": SCALE}, (out.transpose(1, 2),)


def forward(stock: Any, calls: Sequence[PartCall]) -> FunctionOverrides:
    """Return the registry of attention functions for an attention forward, in place of the registry of transformers."""
    return seen_registry(stock, calls, SDPA, sdpa_function(undecorated(stock)), attention_function)


def attention_function(stock: Function, sites: Sites) -> Function:
    """Return ``sdpa_attention_forward``: query [B, Hq, Sq, D], key and value [B, Hkv, Skv, D] -> ([B, Sq, Hq, D], None)."""
    site, read = sites.bidirectional, other_options(stock)
    others = (*sorted(read - {BIAS}), SINKS) if isinstance(read, frozenset) else (SINKS,)

    def serve(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Any) -> Any:
        bias, mask, is_causal = options.get(BIAS), options.get("attention_mask"), options.get("is_causal")
        tensors = (query, key, value) if bias is None else (query, key, value, bias)
        if site is None or site.falls_back(module.training, *tensors):
            return None
        reason = why_other_values(key, value) or why_other_call(module, query, key, options, others)
        reason = reason or why_other_bias(bias, query, key) or why_other_mask(mask, bias, key)
        if reason:
            site.bypass(reason)
            return None
        positions = query.shape[2]
        sees_no_later = states_causal(module) if is_causal is None else is_causal is not False
        hides_later = mask is None and positions > 1 and sees_no_later
        if hides_later and key.shape[2] > positions:
            # A static cache that is still empty: attention is causal from its start, so stock drops the other keys as well.
            key, value, bias = key[:, :, :positions], value[:, :, :positions], bias[..., :positions]
        if mask is not None:
            bias = with_mask(bias, mask)
        scaling = options.get("scaling")
        scale = 1.0 / math.sqrt(query.shape[3]) if scaling is None else scaling
        out = answer(site, module.training, query, key, value, bias, hides_later, scale)
        if out is None and mask is not None:
            rest = {name: option for name, option in options.items() if name not in ("attention_mask", BIAS)}
            out, _ = stock(module, query, key, value, bias, **rest)
        return out

    return served_or_stock(stock, serve)


def with_mask(bias: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return a contiguous bias that also hides what a mask hides. It is the mask that stock code makes of both."""
    joined = torch.where(mask, bias, torch.finfo(bias.dtype).min) if mask.dtype == torch.bool else bias + mask
    return joined.contiguous()


def why_other_bias(bias: Any, query: torch.Tensor, key: torch.Tensor) -> str:
    """Return the reason if a bias is not one of numbers [1 or B, Hq, Sq, Skv] in the dtype of the queries; empty if it is."""
    if type(bias) is not torch.Tensor or bias.dtype != query.dtype or bias.dim() != 4:
        return OTHER_BIAS
    is_known = bias.shape[0] in (1, query.shape[0]) and bias.shape[1:] == (*query.shape[1:3], key.shape[2])
    return "" if is_known else OTHER_BIAS


def why_other_mask(mask: Any, bias: torch.Tensor, key: torch.Tensor) -> str:
    """Return the reason if a mask cannot be put into a bias, [1 or B, 1, 1 or Sq, Skv]; empty if it can, or is None."""
    if mask is None:
        return ""
    if type(mask) is not torch.Tensor or mask.dtype not in (torch.bool, bias.dtype) or mask.dim() != 4:
        return OTHER_MASK
    wanted = (key.shape[0], 1, bias.shape[2])
    is_known = all(size in (1, want) for size, want in zip(mask.shape[:3], wanted, strict=True))
    return "" if is_known and mask.shape[3] == bias.shape[3] else OTHER_MASK
