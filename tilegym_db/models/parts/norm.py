"""Norms over the last axis: a module with a weight, called with the activation alone.

The first input of a Definition is the activation [M, N]. Every other input is an attribute of the module, of the same name
unless ``serving.code`` states another.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType
from typing import Any

import torch

from tilegym_db.models.call_site import AUTOCAST, NOT_ROWS, CallSite, Operator, are_rows, rows
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
    names_in_code,
    of_class,
)
from tilegym_db.models.probe import ROWS, Draw, Probe, device_of
from tilegym_db.records import Definition

NORM_CALLS = (torch.rsqrt.__name__, torch.nn.functional.rms_norm.__name__)
CAST_CALL = torch.nn.functional.layer_norm.__name__
"""The norm that autocast computes, and returns, in float32. Its stock code copies an input that is not contiguous."""
GATE = "gate"
"""The second argument of a norm with a gate."""

_is_compiling = torch.compiler.is_compiling
Module = torch.nn.Module


def find(model: Module, known: KnownCode, others: Sequence[ModuleGroup]) -> Iterable[ModuleGroup]:
    """Return the modules without submodules that have a vector as weight and normalise, or whose code a Definition states."""
    is_plain = of_class(lambda cls: normalises(cls) and not takes_gate(cls))
    is_stated = of_class(lambda cls: known.is_stated("norm", cls.forward))
    modules = []
    for module in model.modules():
        weight: Any = weight_of(module)
        if not module._modules and weight is not None and (is_plain(module) or is_stated(module)):
            detail = (weight.shape, weight.dtype, weight.device)
            modules.append(ModuleOfPart(module, key=parameters_of(module), detail=detail))
    return grouped("norm", modules)


def weight_of(module: Module) -> torch.Tensor | None:
    """Return the weight of a module if it is a vector."""
    weight = module._parameters.get("weight")
    return weight if weight is not None and weight.dim() == 1 else None


def parameters_of(module: Module) -> frozenset[str]:
    """Return the names of the parameters that a module has: torch.nn.LayerNorm has a bias or None in its place."""
    return frozenset(name for name, value in module._parameters.items() if value is not None)


def takes_gate(cls: type[Module]) -> bool:
    """Return True if the forward of a class takes an activation and its gate."""
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)
    return code is not None and code.co_varnames[2 : code.co_argcount] == (GATE,)


def normalises(cls: type[Module]) -> bool:
    """Return True if a method of a class calls a function of norms."""
    own = cls.__mro__[: cls.__mro__.index(Module)]
    functions = [value for owner in own for value in vars(owner).values() if isinstance(value, FunctionType)]
    return any(name in names_in_code(function) for function in functions for name in NORM_CALLS)


def candidates(found: ModuleGroup, known: KnownCode) -> MatchCandidates | str:
    """Look up the source of the forward. The bits must differ from those of all other norms with the same inputs."""
    cls = found.module_class
    if hasattr(cls.forward, "__wrapped__"):
        return WRAPPED
    matches = known.look_up("norm", cls.forward, methods(cls), "its norm forward", {})
    if isinstance(matches, str):
        return matches
    module = found.modules[0]
    matches = [match for match in matches if not _missing_weights(module, match)]
    if not matches:
        return f"no definition of this code takes just its parameters ({', '.join(sorted(parameters_of(module)))})"
    inputs = {tuple(match.definition.inputs) for match in matches}
    alternatives = [definition for definition in known.definitions("norm") if tuple(definition.inputs) in inputs]
    return MatchCandidates(matches, alternatives)


def probe(found: ModuleGroup, module: Module, match: DefinitionMatch) -> Probe | str:
    """Run a norm of any size on random rows with random weights."""
    weight: Any = module.weight
    if type(weight.data) is not torch.Tensor or not weight.dtype.is_floating_point:
        return f"its weight is a {type(weight.data).__name__} of {weight.dtype}, not plain floating point"
    missing = [name for name in attributes_of(match) if not hasattr(module, name)]
    if missing:
        return f"it has no {missing[0]}, which serving.code of {match.definition.name} names"
    twin, x, inputs = random_norm(module, match, Draw(device_of(module)))
    with torch.no_grad():
        out = type(module).forward(twin, x)
    return {next(iter(match.definition.inputs)): x, **inputs}, (out,)


def weights_of(definition: Definition) -> tuple[str, ...]:
    """Return the inputs of a norm that are tensors of its module: all tensors after the activation."""
    return definition.tensor_inputs[1:]


def _missing_weights(module: Module, match: DefinitionMatch) -> list[str]:
    """Return the weights of a Definition that a module declares and does not have, such as the bias of a norm without one."""
    names = [match.attribute(name) for name in weights_of(match.definition)]
    return [name for name in names if name in module._parameters and module._parameters[name] is None]


def attributes_of(match: DefinitionMatch, activations: int = 1) -> list[str]:
    """Return the attributes of a norm for the inputs of its Definition after the activations."""
    return [match.attribute(name) for name in list(match.definition.inputs)[activations:]]


def random_norm(
    module: Module, match: DefinitionMatch, draw: Draw, activations: int = 1
) -> tuple[Module, torch.Tensor, dict[str, Any]]:
    """Return a copy of the norm with random weights, random rows for it, and the inputs that it keeps."""
    weight: Any = module.weight
    x = draw(max(ROWS, 512 // weight.shape[0]), weight.shape[0])
    drawn = {name: draw(*value.shape) for name, value in module._parameters.items() if value is not None}
    twin = copy.copy(module)
    parameters = {name: torch.nn.Parameter(value, requires_grad=False) for name, value in drawn.items()}
    vars(twin)["_parameters"] = {**module._parameters, **parameters}
    names = list(match.definition.inputs)[activations:]
    kept = dict(zip(names, attributes_of(match, activations), strict=True))
    return twin, x, {name: drawn[at] if at in drawn else getattr(module, at) for name, at in kept.items()}


def forward(stock: Any, calls: Sequence[PartCall]) -> Callable[..., Any]:
    """Return the forward of a norm over the last axis: x [..., N] -> [..., N]."""
    ((found, site),) = calls
    assert found.match is not None, "only confirmed groups are patched"
    parameters = [found.match.attribute(name) for name in weights_of(found.match.definition)]
    return norm_forward(stock, site, attributes_of(found.match), parameters, is_cast=is_cast(found.module_class))


def is_cast(cls: type[Module]) -> bool:
    """Return True if autocast changes the dtype that the forward of a norm returns."""
    return CAST_CALL in names_in_code(cls.forward)


def norm_forward(
    stock: Callable[..., Any],
    site: CallSite,
    attributes: Sequence[str],
    weights: Sequence[str],
    *,
    is_cast: bool = False,
) -> Callable[..., Any]:
    """Return the forward of a norm.

    Args:
        stock: the forward of the class.
        site: the call site of the Definition.
        attributes: the attributes of the module for the inputs after x, in order.
        weights: those of them that are tensors.
        is_cast: True if autocast changes the dtype that stock code returns, so that such calls are left to it.
    """
    names = tuple(attributes)
    tensors = tuple(names.index(name) for name in weights)

    def serve(self: Any, x: torch.Tensor) -> torch.Tensor | None:
        operator = None
        kept = [getattr(self, name) for name in names]
        given = [kept[which] for which in tensors]
        if _is_compiling():
            operator = site.traced(self.training, x, *given)
            if operator is None or (is_cast and torch.is_autocast_enabled(x.device.type)):
                return None
        elif site.falls_back(self.training, x, *given):
            return None
        elif is_cast and torch.is_autocast_enabled(x.device.type):
            site.bypass(AUTOCAST)
            return None
        if x.dim() == 4 and not x.is_contiguous():
            # Heads before tokens in the shape, but behind them in memory: the rows are the same, and their order is irrelevant.
            heads_last = x.transpose(1, 2)
            if heads_last.is_contiguous():
                out = norm(self, heads_last, kept, operator)
                return None if out is None else out.transpose(1, 2)
        return norm(self, x, kept, operator)

    def norm(self: Any, x: torch.Tensor, kept: list[Any], operator: Operator | None) -> torch.Tensor | None:
        if operator is not None:
            traced: torch.Tensor | None = operator.call(x, *kept, operator.name) if are_rows(x) else None
            return traced
        matrix = rows(x)
        if matrix is None and is_cast and x.dim() > 2 and x.numel():
            matrix = x.reshape(-1, x.shape[-1])  # patches of an image, transposed: stock code copies them too
        if matrix is None:
            site.bypass(NOT_ROWS)
            return None
        out: torch.Tensor | None = site.ask(self.training, matrix, *kept)
        return out if out is None or matrix is x else out.view(x.shape)

    @functools.wraps(stock)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Models call norms by position. Parameter names differ between models, so a call by keyword goes to stock.
        out = serve(self, args[0]) if len(args) == 1 and not kwargs else None
        return stock(self, *args, **kwargs) if out is None else out

    return forward
