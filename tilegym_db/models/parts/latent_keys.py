"""The keys of latent attention: a part of each head beside a rotated part that all heads share, in a new tensor.

An attention forward calls ``expand_kv`` of its module, which projects the latents of all positions and copies both parts of the
keys. A patched forward projects in the same way, and one call makes the keys. The values stay a view of the projection.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType
from typing import Any

import torch

from tilegym_db.models.call_site import NEEDS_GRAD, CallSite
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
    names_in_code,
    of_class,
)
from tilegym_db.models.probe import ROWS, Draw, Probe, device_of
from tilegym_db.models.rewrite import method_calls
from tilegym_db.models.upstream_code import fingerprint, of_models, undecorated
from tilegym_db.records.definition_parts import ModelCode

KIND = "latent_keys"
AFTER = ("attention", "cache")
"""The parts that count the calls of a forward in training, and that rewrite its other calls."""
EXPAND, PROJECTION = "expand_kv", "kv_b_proj"
"""The method of a module, and the layer that it calls."""
KEY, ROTATED, VALUE = "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"
"""Attributes of a module with the widths of both parts of a key, and of a value."""
CALL = "_tilegym_db_expand_kv"
"""The function that a rewritten forward calls in place of the method."""
BATCH, HEADS, WIDTHS = 2, 3, {KEY: 16, ROTATED: 8, VALUE: 24}
"""Sizes of the probe."""

OTHER_SHAPES = "its latents and the rotated parts of its keys are not of the same sequences and positions"
OTHER_VALUES = "its values are no part of its projection"

_is_compiling = torch.compiler.is_compiling
Function = Callable[..., Any]
Module = torch.nn.Module


def find(model: Module, known: KnownCode, others: Sequence[ModuleGroup]) -> Iterable[ModuleGroup]:
    """Return the modules whose forward calls a method that expands latents into keys and values."""
    expands = of_class(lambda cls: EXPAND in names_in_code(undecorated(cls.forward)) and hasattr(cls, EXPAND))
    parts = [ModuleOfPart(module, detail=device_of(module)) for module in model.modules() if expands(module)]
    return grouped(KIND, parts if known.definitions(KIND) else ())


def candidates(found: ModuleGroup, known: KnownCode) -> MatchCandidates | str:
    """Return the Definitions of the part; the bits of the method decide."""
    method = getattr(found.module_class, EXPAND)
    if hasattr(undecorated(found.module_class.forward), "__wrapped__") or not isinstance(method, FunctionType):
        return WRAPPED
    code = ModelCode(fingerprint=fingerprint(method) or "")
    return MatchCandidates([DefinitionMatch(one, code) for one in known.definitions(KIND)])


def probe(found: ModuleGroup, module: Module, match: DefinitionMatch) -> Probe | str:
    """Run the method with a projection that returns random numbers."""
    draw = Draw(device_of(module))
    projected = draw(BATCH, 1, ROWS, HEADS * (WIDTHS[KEY] + WIDTHS[VALUE]))
    latents, rotated = draw(BATCH, 1, ROWS, 4), draw(BATCH, 1, ROWS, WIDTHS[ROTATED])
    # An attribute of the module that is none of these raises if the method reads it.
    asking = types.SimpleNamespace(**{PROJECTION: lambda given: projected if given is latents else None}, **WIDTHS)
    try:
        with torch.no_grad():
            keys, values = getattr(found.module_class, EXPAND)(asking, latents, rotated)
    except of_models() as error:
        return f"it cannot be probed: {type(error).__name__}: {error}"
    own, wanted = parts_of(projected, ROWS, WIDTHS[KEY], WIDTHS[VALUE])
    if values.shape != wanted.shape or not torch.equal(values, wanted):
        return OTHER_VALUES
    return dict(zip(match.definition.inputs, (own, rotated), strict=True)), (keys,)


def parts_of(projected: torch.Tensor, length: int, key: int, value: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the parts of keys [B, H, L, key] and the values [B, H, L, value] of a projection, as views of it."""
    heads = projected.view(projected.shape[0], length, -1, key + value).transpose(1, 2)
    return heads[..., :key], heads[..., key:]


def forward(stock: Any, calls: Sequence[PartCall]) -> FunctionOverrides:
    """Return the function that a forward calls in place of the method of its module."""
    ((_, site),) = calls
    return FunctionOverrides({CALL: expand_function(site)}, {}, [], [method_calls(_called)])


def _called(call: ast.Call, method: ast.Attribute) -> str | None:
    return CALL if method.attr == EXPAND and len(call.args) == 2 and not call.keywords else None


def expand_function(site: CallSite) -> Function:
    """Return ``expand(module, latents [B, 1, L, R], rotated [B, 1, L, Dr])``, which asks for a kernel first.

    It returns keys [B, H, L, Dn + Dr] in a new tensor, and values [B, H, L, Dv].
    """

    def expand(module: Any, latents: torch.Tensor, rotated: torch.Tensor) -> Any:
        stock = getattr(module, EXPAND)
        if _is_compiling() or EXPAND in vars(module) or site.falls_back(module.training, latents, rotated):
            return stock(latents, rotated)
        if latents.dim() != 4 or rotated.shape[:3] != latents.shape[:3] or latents.shape[1] != 1:
            site.bypass(OTHER_SHAPES)
            return stock(latents, rotated)
        projected = getattr(module, PROJECTION)(latents)
        own, values = parts_of(projected, latents.shape[2], getattr(module, KEY), getattr(module, VALUE))
        keys = None
        if projected.requires_grad:
            site.bypass(NEEDS_GRAD)
        else:
            keys = site.ask(False, own, rotated)
        # The projection is not repeated if no kernel serves the call: both parts are copied, as stock code does.
        return torch.cat([own, rotated.expand(-1, own.shape[1], -1, -1)], dim=-1) if keys is None else keys, values

    return expand
