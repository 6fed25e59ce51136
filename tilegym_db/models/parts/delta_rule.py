"""The gated delta rule: a function that a mixer's forward calls, over a sequence or for one token.

The inputs of a Definition are queries, keys, values, decays and rates [B, T, H, ...] and the state before the first token. A
head has one decay, or one for each row of its state. The outputs are the values and the state after the last token. In models,
the state may be missing at first, and unwanted after.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
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

KIND = "delta_rule"
NAMES = ("delta_rule", "delta_attention", "kda")
"""Parts of the names of such functions."""
TENSORS = 5
STATE, KEEPS, NORMALISES, CHUNK = "initial_state", "output_final_state", "use_qk_l2norm_in_kernel", "chunk_size"
OPTIONS = frozenset({STATE, KEEPS, NORMALISES})
NOT_NORMALISED = "its queries and keys are not normalised inside"
NOT_ONE_TOKEN = "it is the rule for one token, and the call has more"
OTHER_RATES = "its rates of writing may be up to two; kernels are verified up to one"
SIZES = {"B": 2, "T": 70, "H": 4, "Hk": 2, "Hv": 4, "K": 16, "V": 16}
"""Sizes of the probe: more tokens than a chunk of 64."""
AGREES = are_close

_is_compiling = torch.compiler.is_compiling
Module = torch.nn.Module


def find(model: Module, known: KnownCode, others: Sequence[ModuleGroup]) -> Iterable[ModuleGroup]:
    """Return the modules whose forward calls a gated delta rule, once per function."""
    return groups(KIND, model, NAMES)


def candidates(found: ModuleGroup, known: KnownCode) -> MatchCandidates | str:
    """Look up the source of the function. One of another text must take the same arguments, and its probes decide."""
    function = plain_function(found)
    if isinstance(function, str):
        return function
    if getattr(found.modules[0], "allow_neg_eigval", False):
        return OTHER_RATES
    matches = known.look_up(KIND, function, function.__globals__, f"its {function.__name__}", {})
    names = set(inspect.signature(function).parameters)
    if isinstance(matches, str) and names >= OPTIONS:
        one_token = CHUNK not in names
        device = device_of(found.modules[0])
        matches = [
            one
            for one in known.nominated(KIND)
            if is_of_one_token(one) == one_token and (device.type == "meta" or takes_inputs_of(function, one, device))
        ] or matches
    return matches if isinstance(matches, str) else MatchCandidates(matches)


def is_of_one_token(match: DefinitionMatch) -> bool:
    """Return True if a Definition is of single tokens."""
    return (next(iter(match.definition.inputs.values())).shape or ())[1] == 1


def takes_inputs_of(function: FunctionType, match: DefinitionMatch, device: torch.device) -> bool:
    """Return True if a function runs on inputs of a Definition, such as a decay of each row of the state."""
    try:
        return not isinstance(probe_function(function, match, device), str)
    except of_models():
        return False


def probe(found: ModuleGroup, module: Module, match: DefinitionMatch) -> Probe | str:
    """Run the function on random sequences, some with keys so short that the epsilon of their norm counts."""
    function = plain_function(found)
    assert isinstance(function, FunctionType), "candidates have looked at it"
    try:
        return probe_function(function, match, device_of(module))
    except of_models() as error:
        return f"it cannot be probed: {type(error).__name__}: {error}"


def probe_function(function: Callable[..., Any], match: DefinitionMatch, device: torch.device) -> Probe | str:
    """Probe the function itself with a state; the same call without a state must be the one with zeros."""
    draw, definition = Draw(device), match.definition
    sizes = {**SIZES, "T": 1} if is_of_one_token(match) else SIZES
    try:
        inputs = _drawn(draw, definition, sizes)
        returned = _run(function, *inputs.values())
    except of_models():  # older code repeats the heads of keys before the call
        inputs = _drawn(Draw(device), definition, {**sizes, "Hk": sizes["Hv"]})
        returned = _run(function, *inputs.values())
    *tensors, state = inputs.values()
    zeros = _run(function, *tensors, torch.zeros_like(state))
    out, nothing = _run(function, *tensors, None, keeps=False)
    if nothing is not None or not are_close((out,), zeros[:1]):
        return "without a state it computes other values than with a state of zeros"
    return inputs, returned


def _drawn(draw: Draw, definition: Any, sizes: dict[str, int]) -> dict[str, torch.Tensor]:
    inputs = {name: draw(*definition.shape_of(name, sizes)) for name in definition.tensor_inputs}
    _, keys, _, decays, rates, state = inputs
    inputs[keys] = torch.cat([1e-3 * inputs[keys][:1], inputs[keys][1:]])
    inputs[decays] = -torch.nn.functional.softplus(inputs[decays].float())
    inputs[rates] = inputs[rates].sigmoid()
    inputs[state] = inputs[state].float()
    return inputs


def _run(function: Callable[..., Any], *inputs: Any, keeps: bool = True) -> Any:
    *tensors, state = inputs
    options = {STATE: state, KEEPS: keeps, NORMALISES: True}
    query, key, value, g, beta = (None if one is None else one.clone() for one in tensors)
    with torch.no_grad():
        return function(query, key, value, g=g, beta=beta, **options)


def forward(stock: Any, calls: Sequence[PartCall]) -> FunctionOverrides:
    """Return the delta rules for a mixer's forward, in place of the original ones."""
    functions, rewrites = replacements(calls, _rule_of)
    return FunctionOverrides(functions, {}, [site for _, site in calls], rewrites)


def _rule_of(
    found: ModuleGroup, site: CallSite, stock: Callable[..., Any], function: FunctionType
) -> Callable[..., Any]:
    assert found.match is not None, "only confirmed groups are patched"
    defaults = {one.name: one.default for one in inspect.signature(function).parameters.values()}
    return delta_rule(stock, site, arguments_of(function), defaults, one_token=is_of_one_token(found.match))


def delta_rule(
    stock: Callable[..., Any], site: CallSite, arguments: Arguments, default: Mapping[str, Any], *, one_token: bool
) -> Callable[..., Any]:
    """Return ``(q, k, v, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel) -> (out, state or None)``."""
    names = arguments.names[:TENSORS]
    chunk = default.get(CHUNK)

    def why_stock(given: dict[str, Any]) -> str:
        if not given.get(NORMALISES, default.get(NORMALISES, False)):
            return NOT_NORMALISED
        if one_token and given[names[0]].shape[1] != 1:
            return NOT_ONE_TOKEN
        if given.get(CHUNK, chunk) != chunk:
            return "the call sets the size of a chunk"
        others = sorted(set(given) - {*names, *OPTIONS, CHUNK})
        return f"the call has {', '.join(others)}" if others else ""

    def serve(given: dict[str, Any]) -> Any:
        if any(not isinstance(given.get(name), torch.Tensor) for name in names):
            return None
        q, k, v, g, beta = (given[name] for name in names)
        g = g.float()  # stock code does so too
        state = given.get(STATE)
        reason = why_stock(given)
        kept = () if state is None else (state,)
        operator = None
        if _is_compiling():
            needs_grad = torch.is_grad_enabled() and any(one.requires_grad for one in (g, *kept))
            operator = None if reason or needs_grad else site.traced(False, q, k, v, beta)
            if operator is None:
                return None
        elif site.falls_back(False, q, k, v, g, beta, *kept):
            return None
        elif reason:
            site.bypass(reason)
            return None
        if state is None:
            state = v.new_zeros((v.shape[0], v.shape[2], k.shape[3], v.shape[3]), dtype=torch.float32)
        if operator is not None:
            served = operator.call(q, k, v, g, beta, state, operator.name)
        else:
            served = site.ask(False, q, k, v, g, beta, state)
        if served is None:
            return None
        out, final = served
        return out, final if given.get(KEEPS, default.get(KEEPS, False)) else None

    @functools.wraps(stock)
    def rule(*args: Any, **kwargs: Any) -> Any:
        served = serve(arguments.bound(args, kwargs))
        return stock(*args, **kwargs) if served is None else served

    return rule
