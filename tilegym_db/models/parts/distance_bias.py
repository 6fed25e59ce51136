"""The bias of relative positions of T5: a prompt has few distances, and positions at equal distances have equal biases.

An attention forward calls ``compute_bias`` of its module, which looks up the bias of each position and key. A patched forward
calls it for a single position that is at every distance from some key, and one call spreads the result over all positions.
"""

from __future__ import annotations

import ast
import copy
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from tilegym_db.models.call_site import CallSite, has_hooks
from tilegym_db.models.found import (
    WRAPPED,
    FunctionOverrides,
    KnownCode,
    MatchCandidates,
    ModuleGroup,
    ModuleOfPart,
    PartCall,
    grouped,
    methods,
    names_in_code,
    of_class,
)
from tilegym_db.models.found import DefinitionMatch as Match
from tilegym_db.models.probe import Draw, Probe, device_of
from tilegym_db.models.rewrite import is_name, method_calls
from tilegym_db.models.upstream_code import of_models, undecorated

KIND = "distance_bias"
AFTER = ("biased_attention", "cache")
"""The parts that count the calls of a forward in training, and that rewrite its other calls."""
METHOD, TABLE = "compute_bias", "relative_attention_bias"
"""The method of a module, and the embedding that it looks biases up in; a module may have none."""
PAST = "past_seen_tokens"
"""The argument with the number of positions before the first query."""
LENGTHS = ("query_length", "key_length")
CALL = "_tilegym_db_compute_bias"
POSITIONS, KEYS, EARLIER = 5, 9, 3
"""Sizes of the probe."""

OTHER_LENGTHS = "its lengths are no whole numbers"
HOOKED = "its table of biases has hooks or is another module"
NOT_BY_DISTANCE = "its biases depend on more than a distance"

_is_compiling = torch.compiler.is_compiling
Function = Callable[..., Any]
Module = torch.nn.Module


def find(model: Module, known: KnownCode, others: Sequence[ModuleGroup]) -> Iterable[ModuleGroup]:
    """Return the modules whose forward calls a method that computes the bias of positions and keys.

    Only the first layer has a table of biases. The other modules of its class are found as well, because all of them share one
    patched forward.
    """
    calls = of_class(lambda cls: METHOD in names_in_code(undecorated(cls.forward)) and hasattr(cls, METHOD))
    owners = {type(module) for module in model.modules() if calls(module) and _table(module) is not None}
    parts = [ModuleOfPart(module, detail=device_of(module)) for module in model.modules() if type(module) in owners]
    return grouped(KIND, parts if known.definitions(KIND) else ())


def _table(module: Module) -> Any:
    return module._modules.get(TABLE)


def candidates(found: ModuleGroup, known: KnownCode) -> MatchCandidates | str:
    """Look up the source of the method and of what it calls."""
    cls = found.module_class
    if hasattr(undecorated(cls.forward), "__wrapped__"):
        return WRAPPED
    own = {name: getattr(one, "__func__", one) for name, one in methods(cls).items()}
    matches = known.look_up(KIND, own[METHOD], own, f"its {METHOD}", {})
    return matches if isinstance(matches, str) else MatchCandidates(matches)


def probe(found: ModuleGroup, module: Module, match: Match) -> Probe | str:
    """Run the method on a few positions, and on the single one, with drawn biases."""
    owner = next(one for one in found.modules if _table(one) is not None)
    table, twin = _table(owner), copy.copy(owner)
    weight = Draw(device_of(module))(*table.weight.shape)
    drawn = torch.nn.Embedding(weight.shape[0], weight.shape[1], device="meta")
    drawn.weight = torch.nn.Parameter(weight, requires_grad=False)
    vars(twin)["_modules"] = {**owner._modules, TABLE: drawn}
    method = getattr(found.module_class, METHOD)
    try:
        with torch.no_grad():
            out = method(twin, POSITIONS, KEYS, device=weight.device, **{PAST: EARLIER})
            values = distances(method, twin, POSITIONS, KEYS, EARLIER, weight.device)
    except of_models() as error:
        return f"it cannot be probed: {type(error).__name__}: {error}"
    if values is None:
        return NOT_BY_DISTANCE
    first, second = match.definition.inputs
    return {first: values, second: POSITIONS}, (out,)


def distances(method: Function, module: Any, positions: int, keys: int, past: Any, device: Any) -> torch.Tensor | None:
    """Return the bias of each distance, [H, S + L - 1], as the method gives it to a single position; None for other shapes."""
    count = positions + keys - 1
    found = method(module, 1, count, device=device, **{PAST: past + positions - 1})
    return found[0, :, 0] if found.dim() == 4 and found.shape[0] == 1 and found.shape[2:] == (1, count) else None


def forward(stock: Any, calls: Sequence[PartCall]) -> FunctionOverrides:
    """Return the function that a forward calls in place of the method of its module."""
    ((found, site),) = calls
    return FunctionOverrides({CALL: bias_function(found, site)}, {}, [], [method_calls(_called)])


def _called(call: ast.Call, method: ast.Attribute) -> str | None:
    return CALL if method.attr == METHOD and is_name(method.value, "self") else None


def bias_function(found: ModuleGroup, site: CallSite) -> Function:
    """Return ``compute_bias(module, query_length, key_length, ...)``, which asks for a kernel first."""
    method: Any = getattr(found.module_class, METHOD)
    names = tuple(inspect.signature(method).parameters)[1:]

    def serve(module: Any, given: dict[str, Any]) -> torch.Tensor | None:
        table = _table(module)
        positions, keys = (given.get(name) for name in LENGTHS)
        if site.falls_back(module.training, table.weight.detach(), table.weight):
            return None
        if type(positions) is not int or type(keys) is not int:
            site.bypass(OTHER_LENGTHS)
            return None
        if type(table) is not torch.nn.Embedding or has_hooks(table):
            site.bypass(HOOKED)
            return None
        device = given.get("device") or table.weight.device
        values = distances(method, module, positions, keys, given.get(PAST, 0), device)
        return None if values is None else site.ask(False, values, positions)

    def compute_bias(module: Any, *args: Any, **kwargs: Any) -> Any:
        own, given = getattr(module, METHOD), {**dict(zip(names, args, strict=False)), **kwargs}
        is_own = METHOD not in vars(module) and len(args) <= len(names) and _table(module) is not None
        # A single position is at each distance from one key alone.
        if _is_compiling() or not is_own or given.get(LENGTHS[0]) == 1:
            return own(*args, **kwargs)
        served = serve(module, given)
        return own(*args, **kwargs) if served is None else served

    return compute_bias
