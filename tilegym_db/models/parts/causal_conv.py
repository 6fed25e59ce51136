"""Depthwise causal convolutions: a function that a mixer's forward calls, over a sequence or for one position.

The inputs of a Definition are the activation [B, D, S], the state of the convolution if there is one, the weights [D, W] and a
bias if there is one. SiLU follows.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType
from typing import Any

import torch

from tilegym_db.models.call_site import CallSite
from tilegym_db.models.called_functions import Arguments, arguments_of, groups, plain_function, replacements
from tilegym_db.models.found import (
    DefinitionMatch,
    FunctionOverrides,
    KnownCode,
    MatchCandidates,
    ModuleGroup,
    PartCall,
)
from tilegym_db.models.probe import ROWS, Draw, Probe, are_close, device_of
from tilegym_db.models.upstream_code import of_models
from tilegym_db.records import Definition

KIND = "causal_conv"
NAME = "causal_conv"
WEIGHT, BIAS, ACTIVATION, STATE = "weight", "bias", "activation", "conv_state"
SILU = ("silu", "swish")
OTHER_ACTIVATION = "its activation is not SiLU"
OTHER_BIAS = "the call has a bias, or lacks one, unlike the module"
MORE_POSITIONS = "it is the convolution of one position, and the call has more"
SIZES = {"B": 2, "D": 16, "S": ROWS}
AGREES = are_close

_is_compiling = torch.compiler.is_compiling
Module = torch.nn.Module


def find(model: Module, known: KnownCode, others: Sequence[ModuleGroup]) -> Iterable[ModuleGroup]:
    """Return the modules whose forward calls a causal convolution, once per function."""
    return groups(KIND, model, (NAME,), lambda module: (device_of(module), has_bias(module)))


def has_bias(module: Module) -> bool:
    """Return True if a convolution inside a module has a bias."""
    return any(isinstance(child, torch.nn.Conv1d) and child.bias is not None for child in module.children())


def candidates(found: ModuleGroup, known: KnownCode) -> MatchCandidates | str:
    """Look up the source of the function. One of another text must take the same arguments, and its probe decides."""
    function = plain_function(found)
    if isinstance(function, str):
        return function
    matches = known.look_up(KIND, function, function.__globals__, f"its {function.__name__}", {})
    names = set(inspect.signature(function).parameters)
    if isinstance(matches, str) and names >= {WEIGHT, BIAS, ACTIVATION}:
        matches = known.nominated(KIND) or matches
    if isinstance(matches, str):
        return matches
    fitting = [
        match
        for match in matches
        if (BIAS in match.definition.inputs) == has_bias(found.modules[0])
        and (STATE in match.definition.inputs) == (STATE in names)
    ]
    if not fitting:
        return f"no definition describes {function.__name__} with{'' if has_bias(found.modules[0]) else 'out'} a bias"
    return MatchCandidates(fitting)


def probe(found: ModuleGroup, module: Module, match: DefinitionMatch) -> Probe | str:
    """Run the function on random sequences."""
    function = plain_function(found)
    assert isinstance(function, FunctionType), "candidates have looked at it"
    try:
        return probe_function(function, match.definition, device_of(module))
    except of_models() as error:
        return f"it cannot be probed: {type(error).__name__}: {error}"


def probe_function(function: Callable[..., Any], definition: Definition, device: torch.device) -> Probe:
    """Probe the function itself; the state that it overwrites is a result."""
    draw = Draw(device)
    width = {name: axis.value for name, axis in definition.axes.items() if axis.value is not None}
    inputs = {name: draw(*definition.shape_of(name, {**SIZES, **width})) for name in definition.tensor_inputs}
    given = {name: value.clone() for name, value in inputs.items()}
    x, *others = given.values()
    options = {BIAS: given.get(BIAS), ACTIVATION: SILU[0]}
    with torch.no_grad():
        out = function(x, *[value for value in others if value is not options[BIAS]], **options)
    return dict(inputs), (out, *(given[name] for name in definition.in_place))


def forward(stock: Any, calls: Sequence[PartCall]) -> FunctionOverrides:
    """Return the convolutions for a mixer's forward, in place of the original ones."""
    functions, rewrites = replacements(calls, _convolution_of)
    return FunctionOverrides(functions, {}, [site for _, site in calls], rewrites)


def _convolution_of(
    found: ModuleGroup, site: CallSite, stock: Callable[..., Any], function: FunctionType
) -> Callable[..., Any]:
    assert found.match is not None, "only confirmed groups are patched"
    return convolution(stock, site, arguments_of(function), found.match.definition)


def convolution(
    stock: Callable[..., Any], site: CallSite, arguments: Arguments, definition: Definition
) -> Callable[..., Any]:
    """Return a convolution with SiLU: ``(x [B, D, S], [conv_state,] weight [D, W], bias, activation) -> [B, D, S]``."""
    names = arguments.names
    has_own_bias, has_state = BIAS in definition.inputs, STATE in definition.inputs
    inputs = (names[0], *list(definition.tensor_inputs)[1:])
    width = (definition.inputs[WEIGHT].shape or ())[-1]
    positions = definition.axes[width].value if isinstance(width, str) and width in definition.axes else width

    def why_stock(given: dict[str, Any]) -> str:
        if given.get(ACTIVATION) not in SILU:
            return OTHER_ACTIVATION
        if (BIAS in given) != has_own_bias:
            return OTHER_BIAS
        if has_state and given[names[0]].shape[-1] != 1:
            return MORE_POSITIONS
        if positions is not None and given[WEIGHT].shape[-1] != positions:
            return f"its window has {given[WEIGHT].shape[-1]} positions, not {positions}"
        others = sorted(set(given) - {*inputs, ACTIVATION})
        return f"the call has {', '.join(others)}" if others else ""

    def serve(given: dict[str, Any]) -> Any:
        if any(not isinstance(given.get(name), torch.Tensor) for name in (names[0], WEIGHT)):
            return None
        reason = why_stock(given)
        if any(not isinstance(given.get(name), torch.Tensor) for name in inputs):
            reason = reason or OTHER_BIAS
        tensors = [given[name] for name in inputs if name in given]
        if _is_compiling():
            operator = None if reason else site.traced(False, *tensors)
            return None if operator is None else operator.call(*tensors, operator.name)
        if site.falls_back(False, *tensors):
            return None
        if reason:
            site.bypass(reason)
            return None
        return site.ask(False, *tensors)

    @functools.wraps(stock)
    def convolve(*args: Any, **kwargs: Any) -> Any:
        served = serve(arguments.bound(args, kwargs))
        return stock(*args, **kwargs) if served is None else served

    return convolve
