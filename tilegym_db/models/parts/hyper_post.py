"""The step of a layer after a sub-layer of hyper-connections, as one call: an expression of its forward is rewritten.

The expression has a separate fingerprint: that of a function whose parameters are its local variables, ``x0``, ``x1``, ... in
order of appearance. ``serving.code`` maps variables to inputs, and names the one with the ``dtype`` of the computation. Every
input and output of a Definition begins with the tokens [M, ...].
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch

from tilegym_db.models.call_site import AUTOCAST, NOT_ROWS, CallSite, shadow_function
from tilegym_db.models.found import (
    DefinitionMatch,
    KnownCode,
    MatchCandidates,
    ModuleGroup,
    ModuleOfPart,
    PartCall,
    grouped,
    of_class,
)
from tilegym_db.models.parts.add_norm import layer_forward
from tilegym_db.models.probe import ROWS, SIZE, Draw, Probe, device_of
from tilegym_db.models.rewrite import parsed, plain_forward, recompiled
from tilegym_db.models.upstream_code import (
    decorated_alike,
    once_per_function,
    source_fingerprint,
    without_checkpointing,
)
from tilegym_db.records import Definition

AFTER = ("hyper_connection",)
"""A layer is found by the hyper-connections in it."""
KIND = "hyper_post"
DTYPE = "dtype"
POST = "_tilegym_db_post"
"""The function that the rewritten forward calls: ``POST(self, x0, x1, ...)``, with the local variables of the expression."""
OTHER_DTYPE = "its layer computes in another dtype than that of its inputs"
FEWEST_LOCALS = 4
"""Fewest variables of the step: a sub-layer's output, the streams, and two coefficients, or one and a dtype."""
STREAMS = 4
"""Streams in a probe."""

Module = torch.nn.Module


class LayerStep(NamedTuple):
    """An expression of local variables: the source of a function of them, and their original names in order."""

    source: str
    variables: tuple[str, ...]


def find(model: Module, known: KnownCode, others: Sequence[ModuleGroup]) -> Iterable[ModuleGroup]:
    """Return the layers that call hyper-connections."""
    adds = of_class(_adds)
    connections = {id(module) for group in others if group.kind in AFTER for module in group.modules}
    return grouped(
        KIND,
        [
            ModuleOfPart(module, detail=device_of(module))
            for module in model.modules()
            if any(id(child) in connections for child in module._modules.values()) and adds(module)
        ],
    )


def _adds(cls: type[Module]) -> bool:
    forward = plain_forward(cls)
    return forward is not None and bool(steps(forward))


def candidates(found: ModuleGroup, known: KnownCode) -> MatchCandidates | str:
    """Look up the expressions in the source of the forward; one known expression is enough."""
    forward = plain_forward(found.module_class)
    assert forward is not None, "the group was found by its source"
    marks = [source_fingerprint(step.source) for step in steps(forward)]
    matches = [
        DefinitionMatch(definition, code)
        for definition in known.definitions(KIND)
        if definition.serving is not None
        for code in definition.serving.code
        if code.fingerprint in marks
    ]
    shown = ", ".join(dict.fromkeys(str(mark) for mark in marks))
    return (
        MatchCandidates(matches)
        if matches
        else f"no sum in its forward is a variant that is known (fingerprint {shown})"
    )


@once_per_function
def steps(forward: FunctionType) -> tuple[LayerStep, ...]:
    """Return the sums of local variables alone that a forward assigns or returns."""
    function = parsed(forward)
    if function is None:
        return ()
    return tuple(step for _, step in _sums(function, frozenset(forward.__code__.co_varnames)))


def _sums(function: ast.FunctionDef, names: frozenset[str]) -> Iterator[tuple[Any, LayerStep]]:
    """Yield (a statement whose value is a sum, the step)."""
    owner = function.args.args[0].arg
    for statement in ast.walk(function):
        if not isinstance(statement, ast.Assign | ast.Return) or statement.value is None:
            continue
        if not any(isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) for node in ast.walk(statement.value)):
            continue
        step = _step(statement.value, names)
        if len(step.variables) >= FEWEST_LOCALS and owner not in step.variables:
            yield statement, step


def _step(value: ast.expr, names: frozenset[str]) -> LayerStep:
    renamed = _Renamed(names)
    renamed.visit(value)
    text = ast.unparse(renamed.visit(ast.parse(ast.unparse(value), mode="eval").body))
    return LayerStep(f"def step({', '.join(renamed.new.values())}):\n    return {text}\n", tuple(renamed.new))


class _Renamed(ast.NodeTransformer):
    """A transformer that renames local variables to x0, x1, ... in order of appearance."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self.new: dict[str, str] = {}

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id not in self._names:
            return node
        return ast.Name(self.new.setdefault(node.id, f"x{len(self.new)}"), ctx=node.ctx)


def own_step(forward: FunctionType, match: DefinitionMatch) -> tuple[Callable[..., Any], LayerStep]:
    """Return the model's own code of the step, as a function of its variables."""
    step = next(step for step in steps(forward) if source_fingerprint(step.source) == match.code.fingerprint)
    scope = dict(forward.__globals__)
    exec(compile(step.source, forward.__code__.co_filename, "exec"), scope)
    own: Callable[..., Any] = scope["step"]
    return own, step


def places(match: DefinitionMatch) -> tuple[tuple[int, ...], int | None]:
    """Return the indices of the Definition's inputs among the variables, and the index of the dtype or None."""
    dtype = match.code.attributes.get(DTYPE)
    inputs = tuple(int(match.attribute(name).removeprefix("x")) for name in match.definition.inputs)
    return inputs, None if dtype is None else int(dtype.removeprefix("x"))


def probe(found: ModuleGroup, module: Module, match: DefinitionMatch) -> Probe | str:
    """Run the expression on random rows with one more leading axis than in the Definition."""
    forward = plain_forward(found.module_class)
    assert forward is not None, "the group was found by its source"
    own, step = own_step(forward, match)
    definition, draw = match.definition, Draw(device_of(module))
    order, dtype = places(match)
    inputs = {
        name: draw(*definition.shape_of(name, _axes(definition))).to(_fixed(definition, name))
        for name in definition.inputs
    }
    values: list[Any] = [torch.bfloat16] * len(step.variables)
    for place, value in zip(order, inputs.values(), strict=True):
        values[place] = value.unsqueeze(0)
    assert dtype is None or dtype not in order, "serving.code uses one variable twice"
    with torch.no_grad():
        return dict(inputs), (own(*values).squeeze(0),)


def _axes(definition: Definition) -> dict[str, int]:
    rows = next(iter(definition.inputs.values())).shape or ()
    sizes = {rows[0]: ROWS, rows[-1]: SIZE}
    return {name: axis.value or sizes.get(name, STREAMS) for name, axis in definition.axes.items()}


def _fixed(definition: Definition, name: str) -> torch.dtype:
    """Return the dtype that an input always has; bf16 if it may have several."""
    dtype = definition.inputs[name].dtype
    found: torch.dtype = torch.bfloat16 if dtype in definition.dtypes else getattr(torch, dtype)
    return found


def forward(stock: Any, calls: Sequence[PartCall]) -> Callable[..., Any]:
    """Return the forward of a layer with the step as one call, or ``stock`` itself."""
    ((found, site),) = calls
    plain, match = plain_forward(found.module_class), found.match
    assert plain is not None, "the group was found by its source"
    assert match is not None, "only confirmed groups are patched"
    own, _ = own_step(plain, match)
    rewrote, forget = shadow_function(rewritten(plain, match), {POST: post_function(site, match, own)})
    site.shadows.append(forget)
    return layer_forward(stock, decorated_alike(without_checkpointing(stock), rewrote), [site])


def rewritten(forward: FunctionType, match: DefinitionMatch) -> FunctionType:
    """Return the same function with each such expression as a call of :data:`POST`, and with the globals of ``forward``."""
    function = parsed(forward)
    assert function is not None, "the group was found by its source"
    for statement, step in _sums(function, frozenset(forward.__code__.co_varnames)):
        if source_fingerprint(step.source) == match.code.fingerprint:
            called = f"{POST}({', '.join((function.args.args[0].arg, *step.variables))})"
            call = ast.parse(called, mode="eval").body
            for node in ast.walk(call):
                ast.copy_location(node, statement.value)
            statement.value = call
    return recompiled(forward, function)


def post_function(site: CallSite, match: DefinitionMatch, own: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``post(layer, *variables)``, which runs a kernel, or ``own(*variables)`` if no kernel serves the call."""
    order, dtype = places(match)
    ranks = tuple(len(spec.shape or ()) for spec in match.definition.inputs.values())

    def served(layer: Any, values: Sequence[Any]) -> torch.Tensor | None:
        tensors = [values[place] for place in order]
        first = tensors[0]
        if site.falls_back(layer.training, *tensors):
            return None
        if torch.is_autocast_enabled(first.device.type):
            site.bypass(AUTOCAST)
            return None
        if dtype is not None and values[dtype] != first.dtype:
            site.bypass(OTHER_DTYPE)
            return None
        leading = first.shape[: first.dim() - ranks[0] + 1]
        flat = [tokens_first(value, leading, rank) for value, rank in zip(tensors, ranks, strict=True)]
        if any(value is None for value in flat):
            site.bypass(NOT_ROWS)
            return None
        out = site.ask(layer.training, *flat)
        return None if out is None else out.view(*leading, *out.shape[1:])

    def post(layer: Any, *values: Any) -> Any:
        out = served(layer, values)
        return own(*values) if out is None else out

    return post


def tokens_first(value: Any, leading: Sequence[int], rank: int) -> torch.Tensor | None:
    """View a tensor [*leading, ...] as [M, ...] of ``rank`` dimensions; return None if that is impossible."""
    if not isinstance(value, torch.Tensor) or value.dim() != len(leading) + rank - 1:
        return None
    if tuple(value.shape[: len(leading)]) != tuple(leading) or not value.is_contiguous() or value.numel() == 0:
        return None
    return value.view(-1, *value.shape[len(leading) :])
