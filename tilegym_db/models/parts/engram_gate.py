"""The gate of n-gram memory: the projections stay, and the code that computes the gated value from them becomes one call.

The inputs of a Definition are the residual streams [M, C, H], the keys, the values [M, H] and two weights [C, H], then numbers.
``serving.code`` maps roles to attributes: the projections of keys and values, the norms with the weights of the streams and of
the keys, and the number of ``streams``. A number is an attribute, a constant, or the ``eps`` of both norms.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch

from tilegym_db.models.call_site import (
    AUTOCAST,
    HAS_HOOKS,
    NOT_ROWS,
    CallSite,
    has_hooks,
    shadow_function,
    unpatched_class,
)
from tilegym_db.models.found import (
    WRAPPED,
    DefinitionMatch,
    KnownCode,
    MatchCandidates,
    ModuleGroup,
    ModuleOfPart,
    PartCall,
    grouped,
    methods,
    of_class,
)
from tilegym_db.models.parts.add_norm import layer_forward
from tilegym_db.models.parts.mlp import likeness
from tilegym_db.models.probe import ROWS, Draw, Probe, device_of
from tilegym_db.models.rewrite import parsed, recompiled
from tilegym_db.models.upstream_code import decorated_alike, undecorated

KIND = "engram_gate"
STREAMS, EPS, WEIGHT, GROUP = "streams", "eps", "weight", "group_size"
CHILDREN = frozenset({"key_proj", "value_proj", "norm_key", "norm_query"})
"""Attributes of the gates of transformers."""
GATE = "_tilegym_db_gate"
"""The function that the rewritten forward calls: ``GATE(self, keys, values, streams)`` returns the gated value."""
TENSORS = 5
LAST = "sigmoid"
"""The function that the last statement of the gate calls."""

Module = torch.nn.Module


class Gate(NamedTuple):
    """The statements of a forward that compute the gated value: their places, and the names of streams and result."""

    first: int
    last: int
    streams: str
    gated: str


def find(model: Module, known: KnownCode, others: Sequence[ModuleGroup]) -> Iterable[ModuleGroup]:
    """Return the modules with projections and norms of keys and values, or whose code a Definition states."""
    is_stated = of_class(lambda cls: known.is_stated(KIND, undecorated(cls.forward)))
    return grouped(
        KIND,
        [
            ModuleOfPart(module, detail=likeness(module))
            for module in model.modules()
            if is_stated(module) or set(module._modules) >= CHILDREN
        ],
    )


def candidates(found: ModuleGroup, known: KnownCode) -> MatchCandidates | str:
    """Look up the source of the forward and of the norms that it calls."""
    cls, module = found.module_class, found.modules[0]
    own: Any = undecorated(cls.forward)
    if hasattr(own, "__wrapped__"):
        return WRAPPED
    children = {name: unpatched_class(child).forward for name, child in module._modules.items() if child is not None}
    matches = known.look_up(KIND, own, {**methods(cls), **children}, "its n-gram forward", {})
    return matches if isinstance(matches, str) else MatchCandidates(matches)


def norms_of(match: DefinitionMatch) -> tuple[str, str]:
    """Return the attributes of the norms of the streams and of the keys."""
    hidden, embed = list(match.definition.inputs)[3:TENSORS]
    return match.attribute(hidden), match.attribute(embed)


def projections_of(match: DefinitionMatch) -> tuple[str, str]:
    """Return the attributes of the projections of the keys and of the values."""
    keys, values = list(match.definition.inputs)[1:3]
    return match.attribute(keys), match.attribute(values)


def numbers_of(module: Module, match: DefinitionMatch) -> list[Any] | str:
    """Return the inputs after the tensors, in order, or the reason if the module lacks one."""
    norms = [getattr(module, name) for name in norms_of(match)]
    found: list[Any] = []
    for name in list(match.definition.inputs)[TENSORS:]:
        if name == EPS:
            kept = {norm.eps for norm in norms}
            if len(kept) != 1:
                return "its norms have different eps"
            found.append(float(kept.pop()))
        else:
            found.append(match.value(module, name))
    return found


def probe(found: ModuleGroup, module: Module, match: DefinitionMatch) -> Probe | str:
    """Run the statements of the gate on random rows with random weights; the projections do not run."""
    definition, draw = match.definition, Draw(device_of(module))
    streams = getattr(module, match.attribute(STREAMS), None)
    norms, numbers = norms_of(match), numbers_of(module, match)
    if isinstance(numbers, str) or type(streams) is not int:
        return numbers if isinstance(numbers, str) else f"its {match.attribute(STREAMS)} is no valid number of streams"
    size = getattr(module, norms[0]).group_size
    tokens, of_streams, of_size = next(iter(definition.inputs.values())).shape or ()
    axes = {str(tokens): ROWS, str(of_streams): streams, str(of_size): size}
    inputs = {name: draw(*definition.shape_of(name, axes)) for name in list(definition.inputs)[:TENSORS]}
    hidden, keys, values, *weights = inputs.values()
    twin = copy.copy(module)
    kept = {name: _with_weight(getattr(module, name), value) for name, value in zip(norms, weights, strict=True)}
    vars(twin)["_modules"] = {**module._modules, **kept}
    plain: Any = undecorated(found.module_class.forward)
    try:
        with torch.no_grad():
            out = own_gate(plain, match)(twin, keys.flatten(1)[None], values[None], hidden.flatten(1)[None])
    except (
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:  # a model's code may raise for settings that do not fit together
        return f"it cannot be probed: {type(error).__name__}: {error}"
    named = dict(zip(list(definition.inputs)[TENSORS:], numbers, strict=True))
    return {**inputs, **named}, (out.squeeze(0),)


def _with_weight(norm: Module, weight: torch.Tensor) -> Module:
    twin = copy.copy(norm)
    parameter = torch.nn.Parameter(weight.flatten(), requires_grad=False)
    vars(twin)["_parameters"] = {**norm._parameters, WEIGHT: parameter}
    return twin


# -- statements of the gate -------------------------------------------------------------------------------------------


def gate_of(function: ast.FunctionDef, match: DefinitionMatch) -> Gate:
    """Return the statements from the call of the first projection up to the one that ends in a sigmoid."""
    keys, _ = projections_of(match)
    norm, _ = norms_of(match)
    body = function.body
    first = next(at for at, statement in enumerate(body) if _calls_of(statement, keys))
    last = next(at for at, statement in enumerate(body) if at > first and f".{LAST}(" in ast.unparse(statement))
    call = next(call for statement in body[first : last + 1] for call in _calls_of(statement, norm))
    assigned = body[last]
    assert isinstance(assigned, ast.Assign), "known by its fingerprint"
    return Gate(first, last, ast.unparse(call.args[0]), ast.unparse(assigned.targets[0]))


def _calls_of(statement: ast.stmt, attribute: str) -> list[ast.Call]:
    return [
        node
        for node in ast.walk(statement)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == attribute
    ]


def own_gate(forward: FunctionType, match: DefinitionMatch) -> Callable[..., Any]:
    """Return ``gate(self, keys, values, streams)``, the model's own statements on the results of the projections."""
    function = parsed(forward)
    assert function is not None, "known by its fingerprint"
    gate, owner = gate_of(function, match), function.args.args[0].arg
    lines = [
        ast.unparse(
            _ProjectionNames(dict(zip(projections_of(match), ("keys", "values"), strict=True))).visit(statement)
        )
        for statement in function.body[gate.first : gate.last + 1]
    ]
    source = [f"def gate({owner}, keys, values, {gate.streams}):", *lines, f"return {gate.gated}"]
    scope = dict(forward.__globals__)
    exec(compile("\n    ".join(source), forward.__code__.co_filename, "exec"), scope)
    own: Callable[..., Any] = scope["gate"]
    return own


class _ProjectionNames(ast.NodeTransformer):
    """A transformer that replaces calls of projections by names."""

    def __init__(self, names: dict[str, str]) -> None:
        self._names = names

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Attribute) and node.func.attr in self._names:
            return ast.Name(self._names[node.func.attr], ctx=ast.Load())
        return self.generic_visit(node)


def rewritten(forward: FunctionType, match: DefinitionMatch) -> FunctionType:
    """Return the function with one change: a call of :data:`GATE` on the projections' results computes the gate."""
    function = parsed(forward)
    assert function is not None, "known by its fingerprint"
    gate, owner = gate_of(function, match), function.args.args[0].arg
    statements = function.body[gate.first : gate.last + 1]
    calls = [ast.unparse(_calls_of_any(statements, name)) for name in projections_of(match)]
    (call,) = ast.parse(f"{gate.gated} = {GATE}({owner}, {', '.join(calls)}, {gate.streams})").body
    for node in ast.walk(call):
        ast.copy_location(node, statements[0])
    function.body[gate.first : gate.last + 1] = [call]
    return recompiled(forward, function)


def _calls_of_any(statements: Sequence[ast.stmt], attribute: str) -> ast.Call:
    return next(call for statement in statements for call in _calls_of(statement, attribute))


# -- serving ----------------------------------------------------------------------------------------------------------


def forward(stock: Any, calls: Sequence[PartCall]) -> Callable[..., Any]:
    """Return the forward of a module with its gate as one call, or ``stock`` itself."""
    ((found, site),) = calls
    match = found.match
    assert match is not None, "only confirmed groups are patched"
    module, own = found.modules[0], undecorated(stock)
    classes = {name: unpatched_class(getattr(module, name)) for name in norms_of(match)}
    served = gate_function(site, match, own_gate(own, match), classes)
    rewrote, forget = shadow_function(rewritten(own, match), {GATE: served})
    site.shadows.append(forget)
    return layer_forward(stock, decorated_alike(stock, rewrote), [site])


def gate_function(
    site: CallSite, match: DefinitionMatch, own: Callable[..., Any], classes: dict[str, type[Module]]
) -> Callable[..., Any]:
    """Return ``gate(module, keys, values, streams)``, which runs a kernel, or ``own`` if no kernel serves the call.

    Args:
        own: the model's own code.
        classes: the classes of the norms that were probed, without a patch.
    """
    names, count = norms_of(match), match.attribute(STREAMS)

    def why_stock(module: Any, norms: Sequence[Any], tensors: Sequence[torch.Tensor]) -> str:
        if any(
            unpatched_class(norm) is not cls or has_hooks(norm)
            for norm, cls in zip(norms, classes.values(), strict=True)
        ):
            return HAS_HOOKS
        if torch.is_autocast_enabled(tensors[0].device.type):
            return AUTOCAST
        return "" if all(one.is_contiguous() and one.numel() > 0 for one in tensors) else NOT_ROWS

    def served(module: Any, keys: torch.Tensor, values: torch.Tensor, streams: torch.Tensor) -> torch.Tensor | None:
        norms = [getattr(module, name) for name in names]
        weights = [norm.weight for norm in norms]
        if site.falls_back(module.training, streams, keys, values, *weights):
            return None
        numbers = numbers_of(module, match)
        reason = numbers if isinstance(numbers, str) else why_stock(module, norms, (streams, keys, values))
        if reason or isinstance(numbers, str):
            site.bypass(reason)
            return None
        shape = (getattr(module, count), norms[0].group_size)
        copies = [value.view(-1, *shape) for value in (streams, keys)]
        flat = values.view(-1, values.shape[-1])
        out = site.ask(module.training, *copies, flat, *(weight.view(shape) for weight in weights), *numbers)
        return None if out is None else out.view(*streams.shape[:-1], *shape)

    def gate(module: Any, keys: torch.Tensor, values: torch.Tensor, streams: torch.Tensor) -> Any:
        out = served(module, keys, values, streams)
        return own(module, keys, values, streams) if out is None else out

    return gate
