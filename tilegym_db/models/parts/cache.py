"""The growth of a cache: new keys and values are put behind those of earlier positions, in new tensors, or are the first ones.

An attention forward calls ``update`` of a cache, and that calls ``update`` of a layer of it. The classes are those of the caller,
and known only at a call. So a patched forward runs copies of these methods, made from their source at the first call. In a copy,
two concatenations in a row, such as those of keys and of values, are one call that asks for a kernel first. A method without such
statements, as of a cache of fixed size, runs as it is.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FunctionType
from typing import Any

import torch

from tilegym_db.models.call_site import CallSite
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
from tilegym_db.models.parts.attention import states_causal
from tilegym_db.models.probe import ROWS, Probe, device_of, drawn_inputs
from tilegym_db.models.rewrite import method_calls, parsed, recompiled
from tilegym_db.models.upstream_code import fingerprint, of_models, undecorated
from tilegym_db.records import Definition
from tilegym_db.records.definition_parts import ModelCode

KIND = "cache"
AFTER = ("attention", "attention_sink", "biased_attention")
"""The parts that count the calls of a forward in training."""
UPDATE = "update"
CALL, CONCAT = "_tilegym_db_update", "_tilegym_db_concat"
"""The functions that copied code calls in place of ``cache.update`` and of two concatenations."""
POSITIONS = "-2"
"""The dimension of positions in keys and values, as the source of a cache states it."""
FIRST_INPUTS = 2
ARGUMENTS = 3
"""Arguments of an update of a cache, at least: keys, values and the index of the layer."""
SIZES = {"B": 2, "H": 3, "L": ROWS, "S": 2, "Dv": 32}

OTHER_SHAPES = "its tensors are not batch, heads, positions and head size"
NO_CACHE = "no module of transformers with caches is loaded"

_is_compiling = torch.compiler.is_compiling
Function = Callable[..., Any]
Module = torch.nn.Module


def find(model: Module, known: KnownCode, others: Sequence[ModuleGroup]) -> Iterable[ModuleGroup]:
    """Return the modules whose forward gets keys and values from the update of a cache that may grow.

    A class without causal modules is left out: an encoder has no cache. Of a class with causal modules every module is
    returned, because all of them share one patched forward. In cross attention, the cache is filled once.
    """
    updates = of_class(lambda cls: UPDATE in names_in_code(cls.forward) and _gets_two(undecorated(cls.forward)))
    modules = [module for module in model.modules() if updates(module)]
    growing = {type(module) for module in modules if states_causal(module)}
    definitions = known.definitions(KIND)
    return grouped(
        KIND,
        [
            ModuleOfPart(module, definition.name, detail=device_of(module))
            for module in modules
            if type(module) in growing
            for definition in definitions
        ],
    )


def is_first(definition: Definition) -> bool:
    """Return True if a Definition is of the first positions of a cache: it has no inputs of earlier ones."""
    return len(definition.inputs) == FIRST_INPUTS


def _gets_two(forward: Any) -> bool:
    tree = parsed(forward) if isinstance(forward, FunctionType) and not forward.__code__.co_freevars else None
    return tree is not None and any(
        isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Tuple)
        and len(node.targets[0].elts) == 2
        and _is_update(node.value, ARGUMENTS)
        for node in ast.walk(tree)
    )


def _is_update(node: ast.AST, arguments: int) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(attr=name), args=given):
            return name == UPDATE and len(given) >= arguments
    return False


def candidates(found: ModuleGroup, known: KnownCode) -> MatchCandidates | str:
    """Return the Definition of a group, with the code of the cache that models make by default."""
    if hasattr(undecorated(found.module_class.forward), "__wrapped__"):
        return WRAPPED
    cache = _new_cache()
    if cache is None:
        return NO_CACHE
    code = ModelCode(fingerprint=fingerprint(type(cache).update) or "")
    return MatchCandidates(
        [DefinitionMatch(one, code) for one in known.definitions(KIND) if one.name == found.function]
    )


def _new_cache() -> Any:
    """Return an empty cache of the kind that models make if the caller has none; None without transformers."""
    make = getattr(sys.modules.get("transformers.cache_utils"), "DynamicCache", None)
    return None if make is None else make()


def probe(found: ModuleGroup, module: Module, match: DefinitionMatch) -> Probe | str:
    """Fill a cache once or twice, with keys and values of different widths."""
    inputs = drawn_inputs(match.definition, SIZES, device_of(module))
    *past, k, v = inputs.values()
    cache = _new_cache()
    try:
        with torch.no_grad():
            if past:
                cache.update(*past, 0)
            given = (k, v) if past else (k.transpose(1, 2), v.transpose(1, 2))
            return dict(inputs), tuple(cache.update(*given, 0))
    except of_models() as error:
        return f"it cannot be probed: {type(error).__name__}: {error}"


def forward(stock: Any, calls: Sequence[PartCall]) -> FunctionOverrides:
    """Return the function that a forward calls in place of the update of its cache."""
    sites: dict[bool, CallSite] = {}
    for found, site in calls:
        assert found.match is not None, "only confirmed groups are patched"
        sites[is_first(found.match.definition)] = site
    return FunctionOverrides({CALL: update_function(sites.get(False), sites.get(True))}, {}, [], [_call_update])


def _called(call: ast.Call, method: ast.Attribute) -> str | None:
    return CALL if _is_update(call, 2) else None


_call_update = method_calls(_called)


def update_function(site: CallSite | None, first: CallSite | None = None) -> Function:
    """Return ``update(cache, k, v, ...)``, which runs a copy of the cache's own method, or the method itself.

    The results and what the cache keeps are those of the method: keys and values of all positions.

    Args:
        site: the call site of growth; None leaves it to stock code.
        first: the call site of first positions.
    """
    copies: dict[Function, Function | None] = {}

    def update(cache: Any, *args: Any, **kwargs: Any) -> Any:
        own = cache.update
        if _is_compiling():
            return own(*args, **kwargs)
        method = getattr(own, "__func__", None)
        if not isinstance(method, FunctionType) or own.__self__ is not cache:
            return own(*args, **kwargs)
        if method not in copies:
            copies[method] = copied(method, {CALL: update, CONCAT: concat_function(site, first)})
        copy = copies[method]
        return own(*args, **kwargs) if copy is None else copy(cache, *args, **kwargs)

    return update


def copied(method: FunctionType, replacements: dict[str, Any]) -> FunctionType | None:
    """Return a copy of a method of a cache that calls the replacements; None if it has no statement that they replace."""
    tree = None if hasattr(method, "__wrapped__") or method.__code__.co_freevars else parsed(method)
    if tree is None:
        return None
    pairs = [pair for block in _blocks(tree) for pair in _join(block)] if _has_torch(method) else []
    if not pairs and not any(_is_update(node, 2) for node in ast.walk(tree)):
        return None
    _call_update(tree)
    made = recompiled(method, tree)
    copy = FunctionType(made.__code__, {**method.__globals__, **replacements}, method.__name__, method.__defaults__)
    copy.__kwdefaults__ = method.__kwdefaults__
    return copy


def _has_torch(method: FunctionType) -> bool:
    return method.__globals__.get("torch") is torch


def _blocks(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                yield block


def _join(block: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Make one call of each two concatenations in a row, and yield the statements of these calls."""
    for at in range(len(block) - 2, -1, -1):
        first, second = (_concatenation(one) for one in block[at : at + 2])
        if first is None or second is None or any(first[0] in one for one in second[1:]):
            continue
        text = f"{first[0]}, {second[0]} = {CONCAT}({', '.join((*first[1:], *second[1:]))})"
        (statement,) = ast.parse(text).body
        for node in ast.walk(statement):
            ast.copy_location(node, block[at])
        block[at : at + 2] = [statement]
        yield statement


def _concatenation(statement: ast.stmt) -> tuple[str, str, str] | None:
    """Return (target, first, second) of ``target = torch.cat([first, second], dim=-2)``; None for other statements."""
    match statement:
        case ast.Assign(
            targets=[ast.Name() | ast.Attribute(value=ast.Name()) as target],
            value=ast.Call(
                func=ast.Attribute(value=ast.Name(id="torch"), attr="cat"),
                args=[ast.List(elts=[first, second])],
                keywords=[ast.keyword(arg="dim", value=dimension)],
            ),
        ) if ast.unparse(dimension) == POSITIONS:
            return ast.unparse(target), ast.unparse(first), ast.unparse(second)
    return None


def concat_function(site: CallSite | None, first: CallSite | None = None) -> Function:
    """Return ``concat(past_k, k, past_v, v) -> (keys, values)``, which asks for a kernel first.

    past_k [B, H, L, D], k [B, H, S, D], past_v [B, H, L, Dv], v [B, H, S, Dv] -> [B, H, L + S, D] and [B, H, L + S, Dv].
    """

    def begin(past_k: torch.Tensor, k: torch.Tensor, past_v: torch.Tensor, v: torch.Tensor) -> Any:
        if first is None or first.falls_back(False, k, v):
            return None
        if not (_is_empty_like(past_k, k) and _is_empty_like(past_v, v) and k.shape[:3] == v.shape[:3] and k.numel()):
            first.bypass(OTHER_SHAPES)
            return None
        return first.ask(False, k.transpose(1, 2), v.transpose(1, 2))

    def serve(past_k: torch.Tensor, k: torch.Tensor, past_v: torch.Tensor, v: torch.Tensor) -> Any:
        if site is None or site.falls_back(False, k, v, past_k, past_v):
            return None
        reason = why_stock(past_k, k) or why_stock(past_v, v)
        if not reason and (k.shape[:3] != v.shape[:3] or past_k.shape[:3] != past_v.shape[:3]):
            reason = OTHER_SHAPES
        if reason:
            site.bypass(reason)
            return None
        return site.ask(False, past_k, past_v, k, v)

    def concat(past_k: torch.Tensor, k: torch.Tensor, past_v: torch.Tensor, v: torch.Tensor) -> Any:
        served = serve(past_k, k, past_v, v) if past_k.numel() else begin(past_k, k, past_v, v)
        return (torch.cat([past_k, k], dim=-2), torch.cat([past_v, v], dim=-2)) if served is None else served

    return concat


def _is_empty_like(past: torch.Tensor, new: torch.Tensor) -> bool:
    """Return True if a tensor of earlier positions has none, and leaves the dtype and the device of new ones as they are."""
    alike = past.dtype == new.dtype and past.device == new.device and new.dim() == 4
    return alike and (past.shape == (0,) or (past.dim() == 4 and past.shape[2] == 0 and not why_stock(past, new)))


def why_stock(past: torch.Tensor, new: torch.Tensor) -> str:
    """Return the reason if no Definition describes putting ``new`` behind ``past``; empty if one does."""
    if past.dim() != 4 or new.dim() != 4 or past.shape[:2] != new.shape[:2] or past.shape[3] != new.shape[3]:
        return OTHER_SHAPES
    return ""
