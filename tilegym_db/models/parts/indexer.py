"""Scores of a light indexer, by which sparse attention chooses keys: products of heads that are not negative, weighed and added.

A forward multiplies queries [B, S, H, D] with the keys of all positions [B, L, D] in float32, drops negative products, and adds
those of a position's heads with their weights [B, S, H]. The products are H times as large as the scores. The statements become
one call, and those between them that compute the weights come before it. The first inputs of a Definition are queries, keys and
weights, and the last one is the number that products are multiplied by.
"""

from __future__ import annotations

import ast
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch

from tilegym_db.models.call_site import AUTOCAST, CallSite, is_autocast
from tilegym_db.models.found import (
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
from tilegym_db.models.probe import Draw, Probe, are_close, device_of
from tilegym_db.models.rewrite import parsed
from tilegym_db.models.upstream_code import of_models, once_per_function, source_fingerprint, undecorated
from tilegym_db.records.definition_parts import ModelCode

KIND = "indexer"
AGREES = are_close
PRODUCT, DROPS = "torch.matmul", "relu"
"""The call that a first statement has, and the name of the function that drops negative products."""
SCALE = "scale"
"""The input that products are multiplied by; an attribute of the module keeps it, or there is none."""
CALL = "_tilegym_db_index_scores"
OPERANDS = 3
"""Queries, keys and weights."""
PURE = {"float", "matmul", "relu", "squeeze", "sum", "transpose", "unsqueeze"}
"""The functions and methods that the statements may call."""
SIZES = {"B": 2, "S": 5, "H": 3, "L": 7, "D": 16}
"""Sizes of the probe."""

NOT_POSITIVE = "its products are multiplied by no positive number"
OTHER_SHAPES = "its queries, keys and weights are not [B, S, H, D], [B, L, D] and [B, S, H]"
OTHER_DTYPES = "its queries and keys have two dtypes, or its weights are not in float32"

_is_compiling = torch.compiler.is_compiling
Module = torch.nn.Module


class Statements(NamedTuple):
    """The statements of the scores, by their places in a forward, and their source as ``own(self, queries, keys, weights)``.

    ``attribute`` is that of the module with the number that products are multiplied by; empty if there is none. ``sets`` is the
    variable of the scores; empty if the last statement returns them.
    """

    places: tuple[int, ...]
    operands: tuple[str, ...]
    attribute: str
    sets: str
    source: str


def find(model: Module, known: KnownCode, others: Sequence[ModuleGroup]) -> Iterable[ModuleGroup]:
    """Return the modules whose forward has such statements."""
    has = of_class(lambda cls: statements_in(cls) is not None)
    parts = [
        ModuleOfPart(module, detail=(device_of(module), _scale(module))) for module in model.modules() if has(module)
    ]
    return grouped(KIND, parts if known.definitions(KIND) else ())


def statements_in(cls: type[Module]) -> Statements | None:
    """Return the statements of the forward of a class; None if it has none, or if a decorator is around it."""
    forward: Any = undecorated(cls.forward)
    if not isinstance(forward, FunctionType) or hasattr(forward, "__wrapped__") or forward.__code__.co_freevars:
        return None
    return statements_of(forward)


def _scale(module: Module) -> Any:
    found = statements_in(type(module))
    assert found is not None, "the module was found by its statements"
    return getattr(module, found.attribute, None) if found.attribute else 1.0


@once_per_function
def statements_of(forward: FunctionType) -> Statements | None:
    """Return the statements of a forward that compute scores, if exactly one run of them does."""
    function = parsed(forward)
    found = [] if function is None else list(_runs(function))
    return found[0] if len(found) == 1 else None


def _runs(function: ast.FunctionDef) -> Iterator[Statements]:
    local, owner = _names_set_in(function), function.args.args[0].arg
    for first, statement in enumerate(function.body):
        if isinstance(statement, ast.Assign) and PRODUCT in ast.unparse(statement.value):
            found = _run(function.body, first, local, owner)
            if found is not None:
                yield found


def _run(body: Sequence[ast.stmt], first: int, local: frozenset[str], owner: str) -> Statements | None:
    """Return the statements from a product on, up to the one that reads the weights; None if they are other code."""
    made: set[str] = set()
    operands: list[str] = []
    places, moved = list[int](), set[str]()
    for place in range(first, len(body)):
        statement = body[place]
        target = _target(statement)
        if target is None:
            return None
        read = _read(statement)
        if made and not made & set(read):  # computes the weights, and comes before the call
            if target in (*made, *operands, ""):
                return None
            moved.add(target)
            continue
        operands += [name for name in read if name in local - made and name not in (*operands, owner)]
        places.append(place)
        if len(operands) < OPERANDS and target:
            made.add(target)
            continue
        is_kept = bool({*_read(*body[place + 1 :])} & (made - {target}))
        is_right = len(operands) == OPERANDS and not is_kept and not moved & set(operands[:2])
        return _described([body[one] for one in places], places, operands, owner) if is_right else None
    return None


def _described(
    run: Sequence[ast.stmt], places: Sequence[int], operands: Sequence[str], owner: str
) -> Statements | None:
    nodes = [node for one in run for node in ast.walk(one)]
    attributes = {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == owner
    }
    called = [getattr(node.func, "attr", "") for node in nodes if isinstance(node, ast.Call)]
    if len(attributes) > 1 or DROPS not in called or not set(called) <= PURE:
        return None
    sets = _target(run[-1]) or ""
    lines = [ast.unparse(one) for one in run] + ([f"return {sets}"] if sets else [])
    body = "".join(f"    {line}\n" for line in lines)
    source = f"def own({', '.join((owner, *operands))}):\n{body}"
    return Statements(tuple(places), tuple(operands), next(iter(attributes), ""), sets, source)


def _target(statement: ast.stmt) -> str | None:
    """Return the variable that a statement sets, empty for one that returns a value; None for any other statement."""
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)]):
            return name
        case ast.Return(value=ast.expr()):
            return ""
    return None


def _read(*among: ast.AST) -> list[str]:
    """Return the names that code reads, in order of appearance."""
    nodes = [node for one in among for node in _in_order(one)]
    return list(dict.fromkeys(one.id for one in nodes if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)))


def _in_order(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _in_order(child)


def _names_set_in(function: ast.FunctionDef) -> frozenset[str]:
    arguments = function.args
    given = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    names = {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return frozenset(names | {argument.arg for argument in given})


def candidates(found: ModuleGroup, known: KnownCode) -> MatchCandidates | str:
    """Return the Definitions of the part; the results of the statements decide."""
    statements = statements_in(found.module_class)
    assert statements is not None, "the group was found by its statements"
    attributes = {SCALE: statements.attribute} if statements.attribute else {}
    code = ModelCode(fingerprint=source_fingerprint(statements.source) or "", attributes=attributes)
    return MatchCandidates([DefinitionMatch(one, code) for one in known.definitions(KIND)])


def own_code_of(cls: type[Module]) -> Callable[..., Any]:
    """Return ``own(self, queries, keys, weights)``, the model's own statements."""
    statements, forward = statements_in(cls), undecorated(cls.forward)
    assert statements is not None, "the group was found by its statements"
    scope = dict(forward.__globals__)
    exec(compile(statements.source, forward.__code__.co_filename, "exec"), scope)
    own: Callable[..., Any] = scope["own"]
    return own


def probe(found: ModuleGroup, module: Module, match: DefinitionMatch) -> Probe | str:
    """Run the statements on random queries, keys and weights, with the number of the module."""
    draw, scale = Draw(device_of(module)), _scale(module)
    if not _is_positive(scale):
        return NOT_POSITIVE
    queries, keys, weights, number = match.definition.inputs
    shapes = (match.definition.shape_of(name, SIZES) for name in (queries, keys, weights))
    q, k, w = (draw(*shape) for shape in shapes)
    attribute = match.code.attributes.get(SCALE)
    asking = types.SimpleNamespace(**({attribute: scale} if attribute else {}))
    try:
        with torch.no_grad():
            scores = own_code_of(found.module_class)(asking, q, k, w.float())
    except of_models() as error:
        return f"it cannot be probed: {type(error).__name__}: {error}"
    return {queries: q, keys: k, weights: w.float(), number: scale}, (scores,)


def _is_positive(value: Any) -> bool:
    return type(value) is float and 0 < value < float("inf")


def forward(stock: Any, calls: Sequence[PartCall]) -> FunctionOverrides:
    """Return the function that a forward calls in place of the statements, and the rewrite that makes it call that."""
    ((found, site),) = calls
    statements = statements_in(found.module_class)
    assert statements is not None, "the group was found by its statements"
    rewrite = functools.partial(_replace, statements=statements)
    return FunctionOverrides({CALL: scores_function(found, site, statements.attribute)}, {}, [site], [rewrite])


def _replace(function: ast.FunctionDef, statements: Statements) -> None:
    """Put the call in the place of the last statement, and leave out the others."""
    *others, last = statements.places
    called = f"{CALL}({', '.join((function.args.args[0].arg, *statements.operands))})"
    (call,) = ast.parse(f"{statements.sets} = {called}" if statements.sets else f"return {called}").body
    for node in ast.walk(call):
        ast.copy_location(node, function.body[last])
    function.body[last] = call
    for place in reversed(others):
        del function.body[place]


def scores_function(found: ModuleGroup, site: CallSite, attribute: str) -> Callable[..., Any]:
    """Return ``scores(module, queries, keys, weights)``, which runs a kernel, or the model's own statements."""
    own = own_code_of(found.module_class)

    def why_stock(q: torch.Tensor, k: torch.Tensor, w: torch.Tensor, scale: Any) -> str:
        if is_autocast(q):
            return AUTOCAST
        if not _is_positive(scale):
            return NOT_POSITIVE
        if q.dtype != k.dtype or w.dtype != torch.float32:
            return OTHER_DTYPES
        fit = (
            q.dim() == 4 and k.dim() == 3 and w.shape == q.shape[:3] and k.shape == (q.shape[0], k.shape[1], q.shape[3])
        )
        return "" if fit and q.numel() and k.numel() else OTHER_SHAPES

    def scores(module: Any, q: torch.Tensor, k: torch.Tensor, w: torch.Tensor) -> Any:
        if _is_compiling() or site.falls_back(module.training, q, k, w):
            return own(module, q, k, w)
        scale = getattr(module, attribute, None) if attribute else 1.0
        reason = why_stock(q, k, w, scale)
        if reason:
            site.bypass(reason)
            return own(module, q, k, w)
        out = site.ask(module.training, q, k, w, scale)
        return own(module, q, k, w) if out is None else out

    return scores
