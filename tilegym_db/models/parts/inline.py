"""Statements in the middle of a forward, such as a product with a sigmoid: they become one call.

The statements are found by their text. It is written as a function of the variables that the statements read, ``own(self, i0,
i1)``, and that function has a fingerprint. ``serving.code`` maps an input of the Definition to ``i0``, ``i1`` or to the attribute
of the module that keeps it. It maps an output to ``o0`` or ``o1``, the variables that the statements set. A variable that only
the next statement reads is no output. An attribute that is a linear layer without bias stands for its weight.
"""

from __future__ import annotations

import ast
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch

from tilegym_db.models.call_site import NOT_ROWS, CallSite, are_rows, has_hooks, rows
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
from tilegym_db.models.probe import ROWS, Probe, device_of, drawn_inputs
from tilegym_db.models.rewrite import parsed
from tilegym_db.models.upstream_code import once_per_function, source_fingerprint, undecorated

KIND = "inline"
LONGEST = 2
"""Statements that a Definition replaces, at most."""
BETWEEN = "between"
"""The result of a first statement that only the second one reads."""
NO_WEIGHT = "its linear layer has a bias or hooks, or is another module"
CALL = "_tilegym_db_inline_"
"""Beginning of the function that a rewritten forward calls; the fingerprint follows."""

_is_compiling = torch.compiler.is_compiling
Module = torch.nn.Module


class Statements(NamedTuple):
    """Some statements of a forward: their place, the variables that they read and set, and the source as a function."""

    first: int
    length: int
    reads: tuple[str, ...]
    sets: tuple[str, ...]
    source: str
    fingerprint: str


def find(model: Module, known: KnownCode, others: Sequence[ModuleGroup]) -> Iterable[ModuleGroup]:
    """Return the modules whose forward has statements that a Definition states, once per group of statements."""
    stated = of_class(lambda cls: tuple(one.fingerprint for one in _stated(undecorated(cls.forward), known)))
    return grouped(
        KIND,
        [ModuleOfPart(module, mark, detail=device_of(module)) for module in model.modules() for mark in stated(module)],
    )


def _stated(forward: Any, known: KnownCode) -> list[Statements]:
    if not isinstance(forward, FunctionType) or hasattr(forward, "__wrapped__") or forward.__code__.co_freevars:
        return []
    codes = known.fingerprints(KIND)
    found = [one for one in statements_of(forward) if one.fingerprint in codes]
    marks = [one.fingerprint for one in found]
    return [one for one in found if marks.count(one.fingerprint) == 1]  # the same statements twice are not understood


@once_per_function
def statements_of(forward: FunctionType) -> tuple[Statements, ...]:
    """Return every run of assignments in a forward's body, of up to :data:`LONGEST` statements."""
    function = parsed(forward)
    return () if function is None else tuple(_runs(function))


def _runs(function: ast.FunctionDef) -> Iterator[Statements]:
    local = _names_set_in(function)
    for first in range(len(function.body)):
        for count in range(1, LONGEST + 1):
            run = function.body[first : first + count]
            assignments = [found for found in map(_assignment, run) if found is not None]
            if len(assignments) < count:
                break
            found = _as_function(function, first, run, assignments, local)
            if found is not None:
                yield found


def _as_function(
    function: ast.FunctionDef,
    first: int,
    run: Sequence[ast.stmt],
    assignments: Sequence[tuple[str, str]],
    local: frozenset[str],
) -> Statements | None:
    """Return a run of assignments as a function of the variables that it reads; None if it has no single result for each.

    If the second assignment reads the result of the first, that result is no output: no later code may read it.
    """
    reads: dict[str, str] = {}
    sets, count = tuple(target for target, _ in assignments), len(assignments)
    if len(set(sets)) < count:
        return None
    lines = [ast.unparse(_Renamed(reads, local).visit(ast.parse(value))) for _, value in assignments]
    names = [f"o{index}" for index in range(count)]
    if count > 1 and sets[0] in _names_read(run[1]):
        if sets[0] in _names_read(*function.body[first + count :]) | _names_read(*_functions_in(function)):
            return None
        reads.clear()
        lines = [ast.unparse(_Renamed(reads, local).visit(ast.parse(assignments[0][1])))]
        inner = _Renamed({sets[0]: BETWEEN}, frozenset({sets[0]})).visit(ast.parse(assignments[1][1]))
        lines.append(ast.unparse(_Renamed(reads, local - {BETWEEN}).visit(inner)))
        names, sets = [BETWEEN, "o0"], sets[1:]
    body = "".join(f"    {name} = {line}\n" for name, line in zip(names, lines, strict=True))
    outputs = [name for name in names if name != BETWEEN]
    source = f"def own({', '.join(['self', *reads.values()])}):\n{body}    return {', '.join(outputs)}\n"
    return Statements(first, count, tuple(reads), sets, source, source_fingerprint(source) or "")


def _names_read(*among: ast.AST) -> set[str]:
    nodes = [node for one in among for node in ast.walk(one)]
    grown = {node.target.id for node in nodes if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name)}
    return grown | {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store)}


def _functions_in(function: ast.FunctionDef) -> list[ast.AST]:
    """Return the functions inside of one, which may read its variables at any time."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda
    return [node for one in function.body for node in ast.walk(one) if isinstance(node, kinds)]


def _assignment(statement: ast.stmt) -> tuple[str, str] | None:
    """Return (variable, source of its value) of an assignment to one variable."""
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            return name, ast.unparse(value)
    return None


def _names_set_in(function: ast.FunctionDef) -> frozenset[str]:
    arguments = function.args
    given = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    names = {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return frozenset(names | {argument.arg for argument in given}) - {"self"}


class _Renamed(ast.NodeTransformer):
    """A transformer that gives local variables the names ``i0``, ``i1`` and so on, in the order in which they are read."""

    def __init__(self, reads: dict[str, str], local: frozenset[str]) -> None:
        self._reads, self._local = reads, local

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id not in self._local:
            return node
        return ast.Name(self._reads.setdefault(node.id, f"i{len(self._reads)}"), ctx=node.ctx)


def candidates(found: ModuleGroup, known: KnownCode) -> MatchCandidates | str:
    """Return the Definitions that state the statements."""
    matches = known.stating(KIND, found.function)
    return MatchCandidates(matches) if matches else "no definition states its statements"


def _statements(found: ModuleGroup) -> Statements:
    forward: Any = undecorated(found.module_class.forward)
    return next(one for one in statements_of(forward) if one.fingerprint == found.function)


def own_code_of(found: ModuleGroup) -> Callable[..., Any]:
    """Return ``own(self, *variables)``, the model's own statements."""
    forward: Any = undecorated(found.module_class.forward)
    scope = dict(forward.__globals__)
    exec(compile(_statements(found).source, forward.__code__.co_filename, "exec"), scope)
    own: Callable[..., Any] = scope["own"]
    return own


def probe(found: ModuleGroup, module: Module, match: DefinitionMatch) -> Probe | str:
    """Run the statements on random rows, with random tensors for the attributes of the module."""
    definition = match.definition
    inputs = drawn_inputs(definition, {str(definition.serving and definition.serving.rows): ROWS}, device_of(module))
    named: dict[str, Any] = {match.attribute(name): value for name, value in inputs.items()}
    variables = [named.pop(f"i{index}") for index in range(len(_statements(found).reads))]
    for name, value in named.items():
        if isinstance(module._modules.get(name), Module):
            if _kept(module, name) is None:
                return NO_WEIGHT
            named[name] = functools.partial(torch.nn.functional.linear, weight=value)
    with torch.no_grad():
        returned = own_code_of(found)(types.SimpleNamespace(**named), *variables)
    results = returned if isinstance(returned, tuple) else (returned,)
    return dict(inputs), tuple(results[index] for index in _places(match))


def _kept(module: Any, name: str) -> Any:
    """Return the tensor that a module keeps, or the weight of its linear layer; None if a call of that does something else."""
    value = getattr(module, name)
    if not isinstance(value, Module):
        return value
    is_plain = type(value) is torch.nn.Linear and value.bias is None and not has_hooks(value)
    return value.weight if is_plain else None


def _places(match: DefinitionMatch) -> list[int]:
    """Return the index of the statement that sets each output of the Definition."""
    return [int(match.attribute(name).removeprefix("o")) for name in match.definition.outputs]


def forward(stock: Any, calls: Sequence[PartCall]) -> FunctionOverrides:
    """Return the functions that a forward calls in place of its statements, and the rewrites that make it call them."""
    functions = {CALL + found.function: inline_function(found, site) for found, site in calls}
    found_here = sorted((_statements(found) for found, _ in calls), reverse=True)  # the last ones first: places stay
    rewrites = [functools.partial(_replace, which=which) for which in found_here]
    return FunctionOverrides(functions, {}, [site for _, site in calls], rewrites)


def _replace(function: ast.FunctionDef, which: Statements) -> None:
    arguments = ", ".join(["self", *which.reads])
    (call,) = ast.parse(f"{', '.join(which.sets)} = {CALL}{which.fingerprint}({arguments})").body
    for node in ast.walk(call):
        ast.copy_location(node, function.body[which.first])
    function.body[which.first : which.first + which.length] = [call]


def inline_function(found: ModuleGroup, site: CallSite) -> Callable[..., Any]:
    """Return ``inline(module, *variables)``, which runs a kernel, or the model's own statements."""
    match, own = found.match, own_code_of(found)
    assert match is not None, "only confirmed groups are patched"
    names = [match.attribute(name) for name in match.definition.inputs]
    order = _places(match)
    sources: list[int | str] = [int(name[1:]) if name[0] == "i" and name[1:].isdigit() else name for name in names]

    def serve(module: Any, variables: tuple[Any, ...]) -> Any:
        first = variables[0]
        kept = {name: _kept(module, name) for name in sources if isinstance(name, str)}
        given = (*variables, *kept.values())
        if any(one is None for one in given):
            if not _is_compiling():
                site.bypass(NO_WEIGHT)
            return None
        if _is_compiling():
            needs_grad = torch.is_grad_enabled() and any(one.requires_grad for one in given)
            weights = [kept[name] for name in kept if isinstance(module._modules.get(name), Module)]
            operator = None if needs_grad else site.traced(module.training, *variables, *weights)
            if operator is None or not all(are_rows(one) for one in variables):
                return None
            flat = [one.view(-1, one.shape[-1]) for one in variables]
            outputs = operator.call(*[flat[at] if isinstance(at, int) else kept[at] for at in sources], operator.name)
        elif site.falls_back(module.training, *given):
            return None
        else:
            matrices = [rows(one) for one in variables]
            if any(one is None for one in matrices) or any(one.shape[:-1] != first.shape[:-1] for one in variables):
                site.bypass(NOT_ROWS)
                return None
            outputs = site.ask(module.training, *[matrices[at] if isinstance(at, int) else kept[at] for at in sources])
        if outputs is None:
            return None
        results = outputs if isinstance(outputs, tuple) else (outputs,)
        shaped = [one.view(*first.shape[:-1], one.shape[-1]) for one in results]
        return shaped[0] if len(shaped) == 1 else tuple(shaped[order.index(at)] for at in range(len(shaped)))

    def inline(module: Any, *variables: Any) -> Any:
        served = serve(module, variables)
        return own(module, *variables) if served is None else served

    return inline
