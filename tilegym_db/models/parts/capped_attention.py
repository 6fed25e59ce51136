"""The eager attention of models with a soft cap of their scores, such as Gemma-2: the model's own function, or a kernel.

Such models have no ``sdpa`` attention. The Definition takes the mask of numbers as it is, for prompts and for single positions.
So the mask is never read on the host.
"""

from __future__ import annotations

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
    PartCall,
)
from tilegym_db.models.parts.attention import (
    DROPOUT,
    EAGER,
    MASK,
    SCALE,
    SIZES,
    SOFTCAP,
    Sites,
    answer,
    attention_modules,
    drawn_mask,
    eager_function,
    seen_registry,
    served_or_stock,
    softcap_of,
    whole_mask,
)
from tilegym_db.models.parts.attention_sink import why_other_numbers, why_stock
from tilegym_db.models.probe import Probe, device_of, drawn_inputs
from tilegym_db.models.upstream_code import NO_FINGERPRINT, fingerprint, of_models, undecorated
from tilegym_db.records.definition_parts import ModelCode

AFTER = ("rope",)
"""A forward calls its rotary function first."""
KIND = "capped_attention"
CAP = 1.5
"""Cap of the probe, which most of its scores exceed."""
OTHER_CAP = "its soft cap is no number above zero"

Module = torch.nn.Module
Function = Callable[..., Any]


def find(model: Module, known: KnownCode, others: Sequence[ModuleGroup]) -> Iterable[ModuleGroup]:
    """Return the modules whose forward asks the registry and states a soft cap of its scores."""
    return attention_modules(KIND, model, known, lambda module: softcap_of(module) is not None)


def candidates(found: ModuleGroup, known: KnownCode) -> MatchCandidates | str:
    """Return the Definition of the group, or the reason for none; a probe of the eager function confirms it."""
    forward: Any = undecorated(found.module_class.forward)
    if hasattr(forward, "__wrapped__"):
        return WRAPPED
    eager = eager_function(forward)
    if eager is None:
        return "its forward names no eager attention"
    code = ModelCode(fingerprint=fingerprint(eager) or NO_FINGERPRINT)
    return MatchCandidates(
        [DefinitionMatch(one, code) for one in known.definitions(KIND) if one.name == found.function]
    )


def probe(found: ModuleGroup, module: Module, match: DefinitionMatch) -> Probe | str:
    """Run the eager function on some of the last positions, with two query heads per key head and a mask."""
    eager = eager_function(undecorated(type(module).forward))
    inputs: dict[str, Any] = {**drawn_inputs(match.definition, SIZES, device_of(module))}
    q, k, v = (inputs[name] for name in ("q", "k", "v"))
    seen = drawn_mask(q, k)
    mask = inputs[MASK] = torch.zeros_like(seen, dtype=q.dtype).masked_fill_(~seen, torch.finfo(q.dtype).min)
    # An attribute of the module that is none of these raises if the function reads it.
    asking = types.SimpleNamespace(num_key_value_groups=SIZES["Hq"] // SIZES["Hkv"], training=False)
    try:
        with torch.no_grad():
            out, _ = eager(asking, q, k, v, mask, dropout=0.0, scaling=SCALE, softcap=CAP)
    except of_models() as error:
        return f"it cannot be probed: {type(error).__name__}: {error}"
    return {**inputs, SOFTCAP: CAP, "scale": SCALE}, (out.transpose(1, 2),)


def forward(stock: Any, calls: Sequence[PartCall]) -> FunctionOverrides:
    """Return the registry of attention functions for an attention forward, in place of the registry of transformers."""
    return seen_registry(stock, calls, EAGER, eager_function(undecorated(stock)), attention_function)


def attention_function(stock: Function, sites: Sites) -> Function:
    """Return ``eager_attention_forward``: query [B, Hq, Sq, D], key and value [B, Hkv, Skv, D] -> ([B, Sq, Hq, D], None)."""
    site = sites.masked_prefill

    def serve(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Any) -> Any:
        if site is None or site.falls_back(module.training, query, key, value):
            return None
        cap, mask = options.get(SOFTCAP), options.get("attention_mask")
        reason = why_stock(module, query, key, value, options)
        if not reason and options.get("dropout"):
            reason = DROPOUT
        if not reason and (type(cap) is not float or cap <= 0):
            reason = OTHER_CAP
        if not reason and mask is None:  # every position sees all keys
            mask = query.new_zeros(1, 1, 1, key.shape[2])
        reason = reason or why_other_numbers(mask, query, key)
        if reason:
            site.bypass(reason)
            return None
        return answer(
            site, module.training, query, key, value, whole_mask(mask, query, key), cap, options.get("scaling")
        )

    return served_or_stock(stock, serve)
