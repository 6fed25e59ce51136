"""The norms of the heads of queries and keys, and the rotary embedding behind them, as one call in an attention forward.

The forward norms two variables, each on one line, and later passes both to a rotary function. Its copy keeps both variables as
they are before their norms. The call of the rotary function becomes one that asks for a kernel, and otherwise runs the norms and
the rotary function, as they are served. Norms of all heads at once end before the heads are apart: such forwards do not match.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import FunctionType
from typing import Any, NamedTuple

import torch

from tilegym_db.models.call_site import AUTOCAST, HAS_HOOKS, CallSite, has_hooks, is_autocast, unpatched_class
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
from tilegym_db.models.parts import norm as norm_part
from tilegym_db.models.parts.rope import NARROW, ROTARY
from tilegym_db.models.probe import ROWS, Draw, Probe, device_of
from tilegym_db.models.rewrite import is_name, parsed
from tilegym_db.models.upstream_code import NO_FINGERPRINT, fingerprint, of_models, once_per_function, undecorated
from tilegym_db.records.definition_parts import ModelCode

KIND = "normed_rope"
AFTER = ("norm", "rope")
CALL = "_tilegym_db_normed_rope"
"""The function that the rewritten forward calls: ``q, k = CALL(self, q, k, cos, sin, rotary)``."""
HEADS = {"B": 2, "S": ROWS, "Hq": 4, "Hkv": 2}
"""Sizes of the probe."""
OTHER_NORMS = "its norms of queries and keys are no two of one kind with one epsilon"
OTHER_SHAPES = "its tensors are not heads [B, S, H, D] and tables [B, S, D]"

_is_compiling = torch.compiler.is_compiling
Module = torch.nn.Module


class NormedRope(NamedTuple):
    """The place of the norms and of the rotary function in a forward.

    Attributes:
        norms: the attributes of the norms of queries and of keys.
        rotary: the name of the rotary function.
        is_turned: True if the heads come before the positions only after the norms.
    """

    norms: tuple[str, str]
    rotary: str
    is_turned: bool


def find(model: Module, known: KnownCode, others: Sequence[ModuleGroup]) -> Iterable[ModuleGroup]:
    """Return the modules with a rotary function that was found, behind two norms that were found and are alike."""
    included = {one.serving.includes for one in known.definitions(KIND) if one.serving is not None}
    norms = {
        id(module): index
        for index, group in enumerate(others)
        if group.kind == "norm" and group.definition in included
        for module in group.modules
    }
    rotary = {(id(module), group.function) for group in others if _turns_whole_heads(group) for module in group.modules}
    place_of = of_class(lambda cls: _place_in(undecorated(cls.forward)))
    modules = []
    for module in model.modules() if norms else ():
        place = place_of(module)
        if place is None or (id(module), place.rotary) not in rotary:
            continue
        kinds = {norms.get(id(module._modules.get(name))) for name in place.norms}
        if len(kinds) == 1 and None not in kinds:
            modules.append(ModuleOfPart(module, place.rotary, (*kinds,), device_of(module)))
    groups = []
    for found in grouped(KIND, modules):
        norm = others[norms[id(getattr(found.modules[0], _place_of(found).norms[0]))]]
        turned = [one for one in others if one.kind == "rope" and one.function == found.function]
        reasons = [one.reason for one in (norm, *turned) if one is norm or found.modules[0] in one.modules]
        reason = next(filter(None, reasons), "")
        groups.append(replace(found, norm=norm, reason=found.reason or (reason and f"one of its parts: {reason}")))
    return groups


def _turns_whole_heads(found: ModuleGroup) -> bool:
    """Return True if a group has a rotary function whose tables are as wide as heads."""
    return found.kind == "rope" and found.match is not None and NARROW.isdisjoint(found.match.definition.axes)


def _place_of(found: ModuleGroup) -> NormedRope:
    place = _place_in(undecorated(found.module_class.forward))
    assert place is not None, "the group was found by its source"
    return place


def candidates(found: ModuleGroup, known: KnownCode) -> MatchCandidates | str:
    """Return the Definitions that include the norm that was found."""
    forward: Any = undecorated(found.module_class.forward)
    if hasattr(forward, "__wrapped__"):
        return WRAPPED
    norm = found.norm
    assert norm is not None, "the group was found by its norm"
    assert norm.match is not None, "norms that stay stock give the group their reason"
    fused = [
        one for one in known.definitions(KIND) if one.serving is not None and one.serving.includes == norm.definition
    ]
    code = ModelCode(fingerprint=fingerprint(forward) or NO_FINGERPRINT, attributes=norm.match.code.attributes)
    return MatchCandidates([DefinitionMatch(one, code) for one in fused])


def probe(found: ModuleGroup, module: Module, match: DefinitionMatch) -> Probe | str:
    """Run copies of the norms with random weights on random heads, and then the rotary function."""
    assert found.norm is not None, "candidates have looked at it"
    assert found.norm.match is not None, "candidates have looked at it"
    place, draw = _place_of(found), Draw(device_of(module))
    norms, kept = [], []
    for name in place.norms:
        twin, rows, inputs = norm_part.random_norm(getattr(module, name), found.norm.match, draw)
        norms.append(twin)
        kept.append(list(inputs.values()))
    if len(kept[0]) != 2 or kept[0][1] != kept[1][1] or rows.shape[-1] % 2:
        return OTHER_NORMS
    size = rows.shape[-1]
    heads = [draw(HEADS["B"], HEADS["S"], HEADS[count], size) for count in ("Hq", "Hkv")]
    for one in heads:  # rows as small as the epsilon show it
        one[:, 1::2] *= kept[0][1] ** 0.5
    tables = [draw(HEADS["B"], HEADS["S"], size) for _ in range(2)]
    rotary = undecorated(type(module).forward).__globals__[place.rotary]
    try:
        with torch.no_grad():
            normed = [type(twin).forward(twin, one).transpose(1, 2) for twin, one in zip(norms, heads, strict=True)]
            turned = [one.transpose(1, 2) for one in rotary(*normed, *tables)]
    except of_models() as error:
        return f"it cannot be probed: {type(error).__name__}: {error}"
    values = (*heads, kept[0][0], kept[1][0], *tables, kept[0][1])
    return dict(zip(match.definition.inputs, values, strict=True)), tuple(turned)


def forward(stock: Any, calls: Sequence[PartCall]) -> FunctionOverrides:
    """Return the function that an attention forward calls in place of its rotary function, and the rewrite of the forward."""
    ((found, site),) = calls
    assert found.norm is not None, "only confirmed groups are patched"
    assert found.norm.match is not None, "only confirmed groups are patched"
    place = _place_of(found)
    kept = norm_part.kept_by(tuple(norm_part.attributes_of(found.norm.match)), (0,))
    fused = normed_rope_function(site, place, found.norm.module_class, kept)
    return FunctionOverrides({CALL: fused}, {}, [], [_rewrite])


def normed_rope_function(
    site: CallSite, place: NormedRope, norm_class: type, kept: Callable[[Any, torch.Tensor], list[Any]]
) -> Callable[..., Any]:
    """Return ``(self, q, k, cos, sin, rotary) -> (q, k)``; both results are heads [B, H, S, D], as after the rotary function.

    Args:
        place: where the forward has its norms; q and k are [B, S, H, D] if it turns them after their norms.
        norm_class: the class of the norms that were probed, without a patch.
    """
    of_queries, of_keys = place.norms
    is_cast = norm_part.is_cast(norm_class)

    def serve(self: Any, q: Any, k: Any, cos: Any, sin: Any) -> Any:
        norms = getattr(self, of_queries), getattr(self, of_keys)
        (q_weight, eps), (k_weight, other) = kept(norms[0], q), kept(norms[1], k)
        if site.falls_back(self.training, q, k, cos, sin, q_weight, k_weight):
            return None
        if any(unpatched_class(norm) is not norm_class or has_hooks(norm) for norm in norms):
            site.bypass(HAS_HOOKS)
        elif is_cast and is_autocast(q):
            site.bypass(AUTOCAST)
        elif eps != other:
            site.bypass(OTHER_NORMS)
        elif q.dim() != 4 or k.dim() != 4 or cos.dim() != 3 or sin.dim() != 3:
            site.bypass(OTHER_SHAPES)
        else:
            heads = (q, k) if place.is_turned else (q.transpose(1, 2), k.transpose(1, 2))
            return site.ask(False, *heads, q_weight, k_weight, cos, sin, eps)
        return None

    def normed_rope(self: Any, q: Any, k: Any, cos: Any, sin: Any, rotary: Callable[..., Any]) -> Any:
        served = None if _is_compiling() else serve(self, q, k, cos, sin)
        if served is not None:
            return served[0].transpose(1, 2), served[1].transpose(1, 2)
        q, k = getattr(self, of_queries)(q), getattr(self, of_keys)(k)
        if place.is_turned:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        return rotary(q, k, cos, sin)

    return normed_rope


# ---- the source of a forward ----------------------------------------------------------------------


def _place_in(forward: Any) -> NormedRope | None:
    return _place_in_source(forward) if isinstance(forward, FunctionType) else None


@once_per_function
def _place_in_source(forward: FunctionType) -> NormedRope | None:
    tree = parsed(forward)
    found = None if tree is None else _found_in(tree)
    return None if found is None else found[0]


def _found_in(tree: ast.FunctionDef) -> tuple[NormedRope, tuple[ast.Assign, ast.Assign, ast.Assign]] | None:
    """Return where a forward norms two variables and then turns both, and these statements.

    Returns None if it does not, or if it reads one of the variables in between.
    """
    found = [one for at, line in enumerate(tree.body) if (one := _turning(at, line))]
    if len(found) != 1:
        return None
    at, rotary, names = found[0]
    norms = [_norm_of(tree.body[:at], name) for name in names]
    if norms[0] is None or norms[1] is None or norms[0][0] == norms[1][0]:
        return None
    (q_at, of_queries, is_turned), (k_at, of_keys, is_other_turned) = norms[0], norms[1]
    for line, name in ((q_at, names[0]), (k_at, names[1])):
        between = [node for one in tree.body[line + 1 : at] for node in ast.walk(one)]
        if is_turned != is_other_turned or any(is_name(node, name) for node in between):
            return None
    statements: Any = (tree.body[q_at], tree.body[k_at], tree.body[at])
    return NormedRope((of_queries, of_keys), rotary, is_turned), statements


def _turning(at: int, statement: ast.stmt) -> tuple[int, str, tuple[str, str]] | None:
    """Match ``q, k = apply_rotary...(q, k, cos, sin)``."""
    match statement:
        case ast.Assign(
            targets=[ast.Tuple(elts=[ast.Name(id=q), ast.Name(id=k)])],
            value=ast.Call(
                func=ast.Name(id=rotary),
                args=[ast.Name(id=first), ast.Name(id=second), ast.Name(), ast.Name()],
                keywords=[],
            ),
        ) if rotary.startswith(ROTARY) and (q, k) == (first, second) and q != k:
            return at, rotary, (q, k)
    return None


def _norm_of(before: Sequence[ast.stmt], name: str) -> tuple[int, str, bool] | None:
    """Return (number, norm, is turned) of the last statement that assigns a variable, if it norms that variable."""
    stores = [at for at, one in enumerate(before) if any(_is_store(node, name) for node in ast.walk(one))]
    match before[stores[-1]] if stores else None:
        case ast.Assign(targets=[ast.Name()], value=value):
            called = _normed(value)
            return None if called is None else (stores[-1], called[0], called[2])
    return None


def _is_store(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store)


def _normed(value: ast.expr) -> tuple[str, ast.expr, bool] | None:
    """Match ``self.norm(heads)`` or ``self.norm(heads).transpose(1, 2)``; return the norm, the heads and if they are turned."""
    match value:
        case ast.Call(
            func=ast.Attribute(value=ast.Call() as inner, attr="transpose"),
            args=[ast.Constant(value=1), ast.Constant(value=2)],
            keywords=[],
        ):
            called = _normed(inner)
            return None if called is None or called[2] else (called[0], called[1], True)
        case ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=norm), args=[heads], keywords=[]):
            return norm, heads, False
    return None


def _rewrite(function: ast.FunctionDef) -> None:
    """Leave both variables as they are before their norms, and call :data:`CALL` in place of the rotary function."""
    found = _found_in(function)
    assert found is not None, "the group was found by its source"
    place, (*normed, at) = found
    for statement in normed:
        called = _normed(statement.value)
        assert called is not None, "it was matched"
        statement.value = called[1]
    assert isinstance(at.value, ast.Call), "it was matched"
    names = [ast.copy_location(ast.Name(name, ctx=ast.Load()), at) for name in (CALL, "self", place.rotary)]
    at.value = ast.copy_location(ast.Call(names[0], [names[1], *at.value.args, names[2]], []), at)
