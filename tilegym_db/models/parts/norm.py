"""Norms over the last axis: a module with at most a weight and a bias, called with the activation alone.

The first input of a Definition is the activation [M, N]. Every other input is an attribute of the module, of the same name
unless ``serving.code`` states another. A norm whose source is unknown is tried by its weights and the one number that it reads. A
norm without a weight computes a Definition whose ``serving.code`` states the weight as a constant.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable, Container, Iterable, Sequence
from types import FunctionType
from typing import Any

import torch

from tilegym_db.models.call_site import AUTOCAST, NOT_PLAIN, NOT_ROWS, CallSite, are_rows, is_autocast, rows
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
from tilegym_db.models.probe import ROWS, SIZE, Draw, Probe, device_of
from tilegym_db.models.upstream_code import NO_FINGERPRINT, fingerprint, of_models, why_not_plain
from tilegym_db.records import Definition
from tilegym_db.records.definition_parts import ModelCode

NORM_CALLS = (torch.rsqrt.__name__, torch.nn.functional.rms_norm.__name__, torch.nn.functional.layer_norm.__name__)
MEAN_CALL, POWER_CALL = torch.mean.__name__, torch.pow.__name__
"""Code that calls both may also be a norm: a power of -0.5 is an inverse root."""
PLAIN_WEIGHTS = (torch.nn.Parameter, torch.Tensor)
"""Types of a weight that is whole: ``fully_shard`` leaves one part in this process outside of its hooks."""
EPSILONS = (0.0, 1e-2)
"""A number between them in the code of a norm is its epsilon."""
SHAPE = "normalized_shape"
"""The attribute with the only size that a norm of torch.nn takes."""
CAST_CALLS = frozenset((torch.nn.functional.layer_norm.__name__, torch.nn.functional.rms_norm.__name__))
"""The norms that autocast on a GPU computes, and returns, in float32. Stock code copies an input that is not contiguous."""
GATE = "gate"
"""The second argument of a norm with a gate."""

_is_compiling = torch.compiler.is_compiling
Module = torch.nn.Module


def find(model: Module, known: KnownCode, others: Sequence[ModuleGroup]) -> Iterable[ModuleGroup]:
    """Return the modules without submodules that have at most vectors and normalise, or whose code a Definition states."""
    is_plain = of_class(lambda cls: normalises(cls) and takes_activation(cls))
    is_stated = of_class(lambda cls: known.is_stated("norm", cls.forward))
    modules = []
    for module in model.modules():
        if module._modules or not (is_plain(module) or is_stated(module)) or not _holds_vectors(module):
            continue
        weight: Any = weight_of(module)
        detail = None if weight is None else (weight.shape, weight.dtype, weight.device)
        modules.append(ModuleOfPart(module, key=(parameters_of(module), _choices(module)), detail=detail))
    return grouped("norm", modules)


def _holds_vectors(module: Module) -> bool:
    """Return True if all parameters of a module are vectors, and it has no buffer."""
    given = [value for value in module._parameters.values() if value is not None]
    return all(value.dim() == 1 for value in given) and len(given) <= 2 and not module._buffers


def _choices(module: Module) -> tuple[tuple[str, Any], ...]:
    """Return the public attributes that may select code: flags, names and None. Numbers count by their type alone."""
    own = [(name, value) for name, value in vars(module).items() if not name.startswith("_") and name != "training"]
    kept = bool | str | None
    return tuple((name, value if isinstance(value, kept) else type(value)) for name, value in sorted(own, key=_name))


def _name(item: tuple[str, Any]) -> str:
    return item[0]


def weight_of(module: Module) -> torch.Tensor | None:
    """Return the weight of a module if it is a vector."""
    weight = module._parameters.get("weight")
    return weight if weight is not None and weight.dim() == 1 else None


def parameters_of(module: Module) -> frozenset[str]:
    """Return the names of the parameters that a module has: torch.nn.LayerNorm has a bias or None in its place."""
    return frozenset(name for name, value in module._parameters.items() if value is not None)


def takes_gate(cls: type[Module]) -> bool:
    """Return True if the forward of a class takes an activation and its gate."""
    return _arguments(cls) == (GATE,)


def takes_activation(cls: type[Module]) -> bool:
    """Return True if the forward of a class takes an activation alone."""
    return _arguments(cls) == ()


def _arguments(cls: type[Module]) -> tuple[str, ...] | None:
    """Return the arguments of a forward after the activation; None if it has no Python code."""
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)
    return None if code is None else tuple(code.co_varnames[2 : code.co_argcount])


def normalises(cls: type[Module]) -> bool:
    """Return True if a method of a class calls a function of norms."""
    own = cls.__mro__[: cls.__mro__.index(Module)]
    functions = [value for owner in own for value in vars(owner).values() if isinstance(value, FunctionType)]
    names = {name for function in functions for name in names_in_code(function)}
    return not names.isdisjoint(NORM_CALLS) or {MEAN_CALL, POWER_CALL} <= names


def candidates(found: ModuleGroup, known: KnownCode) -> MatchCandidates | str:
    """Look up the source of the forward, or else describe the code; its bits must differ from those of all similar norms."""
    cls, module = found.module_class, found.modules[0]
    if hasattr(cls.forward, "__wrapped__"):
        return WRAPPED
    matches = known.look_up("norm", cls.forward, methods(cls), "its norm forward", {})
    if isinstance(matches, str):
        described = _of_structure(module, known)
        if isinstance(described, str):
            return f"{matches}: {described}"
        matches = described
    matches = [match for match in matches if not _missing_weights(module, match)]
    if not matches:
        own = _of_structure(module, known)
        if isinstance(own, str):
            return own
        matches = own
    # With a weight of ones, norms that round at different places agree.
    inputs = {tuple(match.definition.inputs) for match in matches} if parameters_of(module) else set()
    return MatchCandidates(matches, [one for one in known.definitions("norm") if tuple(one.inputs) in inputs])


def _of_structure(module: Module, known: KnownCode) -> list[DefinitionMatch] | str:
    """Return the Definitions that take the weights of a module and the number that its code reads, or the reason for none."""
    cls = type(module)
    called = _run_by_forward(cls)
    used = {name for function in called for name in names_in_code(function)}
    reason = why_not_plain(called)
    if reason:
        return reason
    names = sorted({name for name in used if type(getattr(module, name, None)) is float})
    numbers = {number for function in called for number in function.__code__.co_consts if type(number) is float}
    constants = [number for number in sorted(numbers) if EPSILONS[0] < number < EPSILONS[1]]
    if len(names) + len(constants) != 1:
        return f"its code reads {len(names) + len(constants)} numbers that may be its epsilon, and a norm has one"
    held = parameters_of(module)
    mark = fingerprint(cls.forward) or NO_FINGERPRINT
    matches = []
    for definition in known.definitions("norm"):
        weights, scalars = (
            weights_of(definition),
            [name for name in definition.inputs if definition.inputs[name].is_scalar],
        )
        fixed = {} if held else _stated_weights(definition)
        if len(scalars) != 1 or set(weights) != (set(fixed) if fixed else held):
            continue
        code = ModelCode(
            fingerprint=mark,
            attributes={scalars[0]: names[0]} if names else {},
            constants={**fixed, **({} if names else {scalars[0]: constants[0]})},
        )
        matches.append(DefinitionMatch(definition, code))
    what = f"{' and '.join(sorted(held))} alone" if held else "no weight"
    return matches or f"no definition of a norm takes {what}"


def _run_by_forward(cls: type[Module]) -> list[FunctionType]:
    """Return the forward of a class and the methods of the class that it calls, directly or not."""
    own, of_all = methods(cls), methods(Module)
    forward: Any = cls.forward
    called: list[FunctionType] = [forward]
    for function in called:
        for name in names_in_code(function):
            method = own.get(name)
            # Names of methods of every module are those of tensors here: ``x.float()``.
            if isinstance(method, FunctionType) and method is not of_all.get(name) and method not in called:
                called.append(method)
        if super.__name__ in names_in_code(function):
            called += [one for one in _overridden(cls, function) if one not in called]
    return called


def _overridden(cls: type[Module], function: FunctionType) -> list[FunctionType]:
    """Return the method of a base class that a method of a class overrides."""
    bases = (vars(base).get(function.__name__) for base in cls.__mro__ if base is not Module)
    methods_of_name = [one for one in bases if isinstance(one, FunctionType)]
    place = methods_of_name.index(function) + 1 if function in methods_of_name else 0
    return methods_of_name[place : place + 1]


def _stated_weights(definition: Definition) -> dict[str, float]:
    """Return the weights that an entry of ``serving.code`` states as constants, for code that has none."""
    weights = weights_of(definition)
    for code in definition.serving.code if definition.serving is not None else ():
        if weights and set(weights) <= set(code.constants):
            return {name: float(code.constants[name]) for name in weights}
    return {}


def probe(found: ModuleGroup, module: Module, match: DefinitionMatch) -> Probe | str:
    """Run a norm of any size on random rows with random weights."""
    weight: Any = weight_of(module)
    if weight is not None and not (_is_drawable(weight.data) and weight.dtype.is_floating_point):
        return f"its weight is a {type(weight.data).__name__} of {weight.dtype}, not plain floating point"
    missing = [name for name in attributes_of(match) if isinstance(name, str) and not hasattr(module, name)]
    if missing:
        return f"it has no {missing[0]}, which serving.code of {match.definition.name} names"
    twin, x, inputs = random_norm(module, match, Draw(device_of(module)))
    try:
        with torch.no_grad():
            out = type(module).forward(twin, x)
    except of_models() as error:
        return f"it cannot be probed: {type(error).__name__}: {error}"
    return {next(iter(match.definition.inputs)): x, **inputs}, (out,)


def _is_drawable(weight: torch.Tensor) -> bool:
    """Return True if random weights of its shape can stand in for a weight: a plain tensor, or one in parts on several GPUs.

    ``fully_shard`` leaves the parts in place between calls, and gathers plain weights for each call.
    """
    tensors = sys.modules.get("torch.distributed.tensor")
    return type(weight) is torch.Tensor or (tensors is not None and type(weight) is tensors.DTensor)


def weights_of(definition: Definition) -> tuple[str, ...]:
    """Return the inputs of a norm that are tensors of its module: all tensors after the activation."""
    return definition.tensor_inputs[1:]


def _missing_weights(module: Module, match: DefinitionMatch) -> list[str]:
    """Return the weights of a Definition that a module declares and does not have, such as the bias of a norm without one."""
    names = [match.attribute(name) for name in weights_of(match.definition) if name not in match.code.constants]
    return [name for name in names if name in module._parameters and module._parameters[name] is None]


def attributes_of(match: DefinitionMatch, activations: int = 1) -> list[str | float]:
    """Return the attributes of a norm for the inputs of its Definition after the activations, or their constant values."""
    names = list(match.definition.inputs)[activations:]
    return [match.code.constants.get(name, match.attribute(name)) for name in names]


def random_norm(
    module: Module, match: DefinitionMatch, draw: Draw, activations: int = 1
) -> tuple[Module, torch.Tensor, dict[str, Any]]:
    """Return a copy of the norm with random weights, random rows for it, and the inputs that it keeps."""
    weight: Any = weight_of(module)
    columns = getattr(module, SHAPE, (SIZE,))[-1] if weight is None else weight.shape[0]
    x = draw(max(ROWS, 512 // columns), columns)
    drawn = {name: draw(*value.shape) for name, value in module._parameters.items() if value is not None}
    twin = copy.copy(module)
    parameters = {name: torch.nn.Parameter(value, requires_grad=False) for name, value in drawn.items()}
    vars(twin)["_parameters"] = {**module._parameters, **parameters}
    tensors = weights_of(match.definition)
    inputs: dict[str, Any] = {}
    names = list(match.definition.inputs)[activations:]
    for name, at in zip(names, attributes_of(match, activations), strict=True):
        if not isinstance(at, str):
            inputs[name] = torch.full_like(x[0], at) if name in tensors else at
        else:
            inputs[name] = drawn[at] if at in drawn else getattr(module, at)
        if type(inputs[name]) is float and inputs[name] > 0:  # rows as small as the epsilon show it
            x[1::2] *= inputs[name] ** 0.5
    return twin, x, inputs


def forward(stock: Any, calls: Sequence[PartCall]) -> Callable[..., Any]:
    """Return the forward of a norm over the last axis: x [..., N] -> [..., N]."""
    ((found, site),) = calls
    assert found.match is not None, "only confirmed groups are patched"
    names = list(found.match.definition.inputs)[1:]
    places = [names.index(name) for name in weights_of(found.match.definition)]
    return norm_forward(stock, site, attributes_of(found.match), places, is_cast=is_cast(found.module_class))


def is_cast(cls: type[Module]) -> bool:
    """Return True if autocast changes the dtype that the forward of a norm returns."""
    return not CAST_CALLS.isdisjoint(names_in_code(cls.forward))


def norm_forward(
    stock: Callable[..., Any],
    site: CallSite,
    attributes: Sequence[str | float],
    weights: Sequence[int],
    *,
    is_cast: bool = False,
) -> Callable[..., Any]:
    """Return the forward of a norm.

    Args:
        attributes: the attributes of the module for the inputs after x, in order. A number in place of a name is the
            value of the input, or of every element of the weight.
        weights: the places in ``attributes`` of those that are tensors.
        is_cast: True if autocast changes the dtype that stock code returns, so that such calls are left to it.
    """
    tensors = tuple(weights)
    first = tensors[0] if tensors else None
    inputs_of = kept_by(tuple(attributes), tensors)

    def traced(self: Any, x: torch.Tensor) -> torch.Tensor | None:
        kept = inputs_of(self, x)
        operator = site.traced(self.training, x, *[kept[which] for which in tensors])
        if operator is None or (is_cast and torch.is_autocast_enabled(x.device.type)):
            return None
        heads_last = _heads_last(x)
        given = x if heads_last is None else heads_last
        if not are_rows(given):
            return None
        out: torch.Tensor = operator.call(given, *kept, operator.name)
        return out if heads_last is None else out.transpose(1, 2)

    def serve(self: Any, x: torch.Tensor) -> torch.Tensor | None:
        if _is_compiling():
            return traced(self, x)
        kept = inputs_of(self, x)
        if site.falls_back(self.training, x, *kept):
            return None
        if first is not None and type(kept[first]) not in PLAIN_WEIGHTS:
            site.bypass(NOT_PLAIN)
            return None
        if is_cast and is_autocast(x):
            site.bypass(AUTOCAST)
            return None
        heads_last = _heads_last(x)
        given = x if heads_last is None else heads_last
        matrix = rows(given)
        if matrix is None and is_cast and x.dim() > 2 and x.numel():
            matrix = x.reshape(-1, x.shape[-1])  # patches of an image, transposed: stock code copies them too
        if matrix is None:
            site.bypass(NOT_ROWS)
            return None
        out: torch.Tensor | None = site.ask(self.training, matrix, *kept)
        if out is None or matrix is x:
            return out
        out = out.view_as(x if heads_last is None else heads_last)
        return out if heads_last is None else out.transpose(1, 2)

    @functools.wraps(stock)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Models call norms by position. Parameter names differ between models, so a call by keyword goes to stock.
        out = serve(self, args[0]) if len(args) == 1 and not kwargs else None
        return stock(self, *args, **kwargs) if out is None else out

    return forward


def _heads_last(x: torch.Tensor) -> torch.Tensor | None:
    """Return [B, H, S, D] as [B, S, H, D] if memory has this order; None for other tensors.

    A norm takes rows, and both have the same ones.
    """
    if x.dim() != 4 or x.is_contiguous():
        return None
    heads_last = x.transpose(1, 2)
    return heads_last if heads_last.is_contiguous() else None


def kept_by(attributes: tuple[str | float, ...], tensors: Container[int]) -> Callable[[Any, torch.Tensor], list[Any]]:
    """Return ``kept(module, x)``, the inputs of a Definition after the activation."""
    names = tuple(name for name in attributes if isinstance(name, str))
    if len(names) == len(attributes):

        def kept_by_name(self: Any, x: torch.Tensor) -> list[Any]:
            if _is_compiling():
                return [getattr(self, name) for name in names]
            held = self._parameters  # torch looks for a parameter everywhere else first
            return [held[name] if name in held else getattr(self, name) for name in names]

        return kept_by_name

    def kept(self: Any, x: torch.Tensor) -> list[Any]:
        return [
            getattr(self, one) if isinstance(one, str) else _filled(x, one) if place in tensors else one
            for place, one in enumerate(attributes)
        ]

    return kept


_held: dict[tuple[int, float, torch.dtype, torch.device], torch.Tensor] = {}
"""Weights of norms that have none: (size, value, dtype, device) -> a vector. A model has a handful of sizes."""


def _filled(x: torch.Tensor, value: float) -> torch.Tensor:
    """Return a vector as long as the rows of ``x`` with one value in every place."""
    if _is_compiling() or type(x) is not torch.Tensor or x.dim() == 0:
        return x.new_full(x.shape[-1:], value)
    key = (x.shape[-1], value, x.dtype, x.device)
    found = _held.get(key)
    if found is None:
        # Saved for a backward, which an inference tensor cannot be; a parameter, because it needs no gradient.
        with torch.inference_mode(False), torch.no_grad():
            found = torch.nn.Parameter(torch.full(key[:1], value, dtype=x.dtype, device=x.device), requires_grad=False)
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            return found  # its memory is the graph's
        _held[key] = found
    return found
