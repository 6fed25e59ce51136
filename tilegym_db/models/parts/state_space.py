"""State-space layers of Mamba-2: a function that a mixer's forward calls, over a sequence or for one token.

The inputs of the Definition of sequences are values [B, T, H, P], steps [B, T, H], rates [H], directions [B, T, G, N] of writing
and reading, weights and biases [H], the state before the first token and the smallest step. Its outputs are the values that are
read and the state after the last token. The Definition of one token overwrites its first input, the state, and has no axis of
tokens and no smallest step. Models spread its steps, rates, weights and biases over the values of a head.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
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
from tilegym_db.models.probe import Draw, Probe, are_close, device_of
from tilegym_db.models.upstream_code import of_models
from tilegym_db.records import Definition

KIND = "state_space"
SCAN, UPDATE = "mamba2_chunk_scan", "mamba2_selective_state_update"
SKIP, BIAS, SOFTPLUS, GATE = "D", "dt_bias", "dt_softplus", "z"
CHUNK, LIMITS, INITIAL, KEEPS = "chunk_size", "dt_limit", "initial_states", "return_final_states"
OF_UPDATE = frozenset({"state", SKIP, BIAS, SOFTPLUS, GATE})
OF_SCAN = frozenset({CHUNK, LIMITS, INITIAL, KEEPS, SKIP, BIAS, SOFTPLUS})
TENSORS = 5
"""Values, steps, rates and two directions: the first arguments, after the state if there is one."""
NO_SOFTPLUS = "its steps have no softplus"
NO_BIAS = "its steps have no bias, or its values no weight"
LARGEST_STEP = "its steps have a largest size"
NOT_SPREAD = "steps, rates, weights or biases differ within a head"
SIZES = {"B": 2, "T": 70, "H": 4, "G": 2, "P": 16, "N": 16}
"""Sizes of the probe: more tokens than two chunks of :data:`CHUNKS`."""
CHUNKS = 32
SMALLEST_STEP = 0.25
"""Smallest step of the probe; some of its steps are smaller."""
AGREES = are_close

_is_compiling = torch.compiler.is_compiling
Module = torch.nn.Module


def find(model: Module, known: KnownCode, others: Sequence[ModuleGroup]) -> Iterable[ModuleGroup]:
    """Return the modules whose forward scans a sequence or updates a state, once per function."""
    return itertools.chain(groups(KIND, model, (SCAN,)), groups(KIND, model, (UPDATE,)))


def candidates(found: ModuleGroup, known: KnownCode) -> MatchCandidates | str:
    """Look up the source of the function. One of another text must take the same arguments, and its probe decides."""
    function = plain_function(found)
    if isinstance(function, str):
        return function
    matches = known.look_up(KIND, function, function.__globals__, f"its {function.__name__}", {})
    names = set(inspect.signature(function).parameters)
    if isinstance(matches, str) and (names >= OF_SCAN or names >= OF_UPDATE):
        matches = [one for one in known.nominated(KIND) if updates(one.definition) == (CHUNK not in names)] or matches
    return matches if isinstance(matches, str) else MatchCandidates(matches)


def updates(definition: Definition) -> bool:
    """Return True for a Definition of one token, which overwrites the state."""
    return bool(definition.in_place)


def probe(found: ModuleGroup, module: Module, match: DefinitionMatch) -> Probe | str:
    """Run the function on random sequences or tokens."""
    function = plain_function(found)
    assert isinstance(function, FunctionType), "candidates have looked at it"
    try:
        return probe_function(function, match.definition, device_of(module))
    except of_models() as error:
        return f"it cannot be probed: {type(error).__name__}: {error}"


def probe_function(function: Callable[..., Any], definition: Definition, device: torch.device) -> Probe | str:
    """Probe the function itself. Without a state, a scan must compute what it computes with zeros."""
    draw = Draw(device)
    inputs: dict[str, Any] = {name: draw(*definition.shape_of(name, SIZES)) for name in definition.tensor_inputs}
    if updates(definition):
        state, _, _, rates = definition.tensor_inputs[:4]
        inputs[state], inputs[rates] = inputs[state].float(), -inputs[rates].float().abs()
        given = {name: value.clone() for name, value in inputs.items()}
        with torch.no_grad():
            out = function(*_spread(*given.values()), **{SOFTPLUS: True})
        return inputs, (out, given[state])
    *tensors, smallest = definition.inputs
    rates, state = tensors[2], tensors[-1]
    inputs[rates], inputs[state] = -inputs[rates].float().abs(), inputs[state].float()
    inputs[smallest] = SMALLEST_STEP
    returned = _scan(function, *inputs.values())
    *most, state_before, least = inputs.values()
    zeros, _ = _scan(function, *most, torch.zeros_like(state_before), least)
    alone = _scan(function, *most, None, least, keeps=False)
    if not isinstance(alone, torch.Tensor) or not are_close((alone,), (zeros,)):
        return "without a state it computes other values than with a state of zeros"
    return inputs, returned


def _scan(function: Callable[..., Any], *inputs: Any, keeps: bool = True) -> Any:
    *tensors, weights, biases, state, smallest = inputs
    options = {SKIP: weights, BIAS: biases, INITIAL: state, KEEPS: keeps, SOFTPLUS: True}
    with torch.no_grad():
        return function(*(one.clone() for one in tensors), **{CHUNK: CHUNKS, LIMITS: (smallest, math.inf)}, **options)


def _spread(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    rates: torch.Tensor,
    write: torch.Tensor,
    read: torch.Tensor,
    weights: torch.Tensor,
    biases: torch.Tensor,
) -> list[torch.Tensor]:
    """Return the inputs of one token as models pass them: spread over the values of a head, and rates over its state too."""
    *_, size, width = state.shape
    steps, weights, biases = (one[..., None].expand(*one.shape, size) for one in (dt, weights, biases))
    return [state, x, steps, rates[:, None, None].expand(-1, size, width), write, read, weights, biases]


def forward(stock: Any, calls: Sequence[PartCall]) -> FunctionOverrides:
    """Return the functions for a mixer's forward, in place of the original ones."""
    functions, rewrites = replacements(calls, _function_of)
    return FunctionOverrides(functions, {}, [site for _, site in calls], rewrites)


def _function_of(
    found: ModuleGroup, site: CallSite, stock: Callable[..., Any], function: FunctionType
) -> Callable[..., Any]:
    assert found.match is not None, "only confirmed groups are patched"
    make = update if updates(found.match.definition) else scan
    return make(stock, site, arguments_of(function))


def _why_stock(given: dict[str, Any], taken: Iterable[str]) -> str:
    """Return the reason against a kernel that scans and updates share; empty if there is none."""
    if not given.get(SOFTPLUS, False):
        return NO_SOFTPLUS
    if any(not isinstance(given.get(name), torch.Tensor) for name in (SKIP, BIAS)):
        return NO_BIAS
    others = sorted(set(given) - set(taken))
    return f"the call has {', '.join(others)}" if others else ""


def scan(stock: Callable[..., Any], site: CallSite, arguments: Arguments) -> Callable[..., Any]:
    """Return ``(x, dt, A, B, C, chunk_size, D, dt_bias, initial_states, ...) -> out``, or also the state after it.

    The size of a chunk changes the order of additions only.
    """
    names = arguments.names[:TENSORS]

    def why_stock(given: dict[str, Any]) -> str:
        if given.get(LIMITS, (0.0, math.inf))[1] != math.inf:
            return LARGEST_STEP
        return _why_stock(given, {*names, *OF_SCAN})

    def serve(given: dict[str, Any]) -> Any:
        if any(not isinstance(given.get(name), torch.Tensor) for name in names):
            return None
        x, dt, rates, write, read = (given[name] for name in names)
        weights, biases, state = (given.get(name) for name in (SKIP, BIAS, INITIAL))
        reason = why_stock(given)
        of_gradients = [one for one in (x, dt, rates, write, read, weights, biases, state) if one is not None]
        operator = None
        if _is_compiling():
            if not reason and not (torch.is_grad_enabled() and any(one.requires_grad for one in of_gradients)):
                operator = site.traced(False, x, dt, write, read, weights, biases)
            if operator is None:
                return None
        elif site.falls_back(False, *of_gradients):
            return None
        elif reason:
            site.bypass(reason)
            return None
        if state is None:
            state = x.new_zeros((x.shape[0], *x.shape[2:], write.shape[3]), dtype=torch.float32)
        smallest = float(given.get(LIMITS, (0.0,))[0])
        inputs = (x, dt, rates, write, read, weights, biases, state, smallest)
        served = operator.call(*inputs, operator.name) if operator is not None else site.ask(False, *inputs)
        if served is None:
            return None
        out, final = served
        return (out, final) if given.get(KEEPS, False) else out

    @functools.wraps(stock)
    def scan_chunks(*args: Any, **kwargs: Any) -> Any:
        served = serve(arguments.bound(args, kwargs))
        return stock(*args, **kwargs) if served is None else served

    return scan_chunks


def update(stock: Callable[..., Any], site: CallSite, arguments: Arguments) -> Callable[..., Any]:
    """Return ``(state, x, dt, A, B, C, D, dt_bias, dt_softplus, z) -> out``; it overwrites the state.

    A gate ``z`` opens the output after the kernel, as in stock code. Compiled code keeps stock code, which writes in place.
    """
    names = arguments.names[: 1 + TENSORS]

    def serve(given: dict[str, Any]) -> Any:
        if _is_compiling() or any(not isinstance(given.get(name), torch.Tensor) for name in names):
            return None
        state, x, dt, rates, write, read = (given[name] for name in names)
        weights, biases, gate = (given.get(name) for name in (SKIP, BIAS, GATE))
        tensors = [one for one in (x, state, dt, rates, write, read, weights, biases, gate) if one is not None]
        if site.falls_back(False, *tensors):
            return None
        reason = _why_stock(given, {*names, *OF_UPDATE})
        if not reason and not (_are_spread(dt, weights, biases) and _are_spread(rates[..., 0], rates[:, 0])):
            reason = NOT_SPREAD
        if reason:
            site.bypass(reason)
            return None
        of_heads = (given[name][..., 0] for name in (SKIP, BIAS))
        out = site.ask(False, state, x, dt[..., 0], rates[:, 0, 0], write, read, *of_heads)
        return out if out is None or gate is None else out * torch.nn.functional.silu(gate)

    @functools.wraps(stock)
    def update_state(*args: Any, **kwargs: Any) -> Any:
        served = serve(arguments.bound(args, kwargs))
        return stock(*args, **kwargs) if served is None else served

    return update_state


def _are_spread(*tensors: Any) -> bool:
    """Return True if each tensor repeats one number along its last axis without a copy."""
    return all(one.dim() > 1 and (one.stride(-1) == 0 or one.shape[-1] == 1) for one in tensors)
