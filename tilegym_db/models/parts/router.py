"""Routers of mixtures: the product stays, and the code that chooses experts from its scores becomes one call.

The first input of a Definition is the scores [M, E], and its outputs are the weights and the ids [M, K]. A tensor with one value
per token, [M, ...], is an argument of the forward after the hidden states. Every other input is an attribute of the module. It
has the same name unless ``serving.code`` states another, or states a constant.

Code that no ``serving.code`` states is recognised by its structure (:func:`choices`) and a probe. A kernel
makes the choice, and the model's own code goes on with its weights. An input may also be an argument of the forward.
"""

from __future__ import annotations

import ast
import copy
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch

from tilegym_db.models.call_site import (
    AUTOCAST,
    IN_TRAINING,
    NOT_PLAIN,
    NOT_ROWS,
    CallSite,
    has_hooks,
    shadow_function,
    unpatched_class,
)
from tilegym_db.models.found import (
    CONFIG,
    FLOATS,
    OF_CONFIG,
    DefinitionMatch,
    KnownCode,
    MatchCandidates,
    ModuleGroup,
    ModuleOfPart,
    PartCall,
    grouped,
    is_plain,
    methods,
    names_in_code,
    of_class,
    setting,
)
from tilegym_db.models.parts.mlp import likeness
from tilegym_db.models.probe import ROWS, Draw, Probe, device_of, matching_definitions
from tilegym_db.models.rewrite import ROUTE, is_name, is_routing, parsed, recompiled, with_route
from tilegym_db.models.upstream_code import fingerprint, of_models, once_per_function
from tilegym_db.records import Definition
from tilegym_db.records.definition_parts import ModelCode
from tilegym_db.records.dtypes import INTEGER_DTYPES

WEIGHT = "weight"
RANKS = "topk"
"""Name in the code of every choice of experts."""
HIDDEN = "hidden_dim"
"""Attribute of every router of transformers with the size of its hidden states."""
SPACING = 1 / 32
"""Step of the scores in the probe. They are different multiples of it, which bf16 holds exactly up to 512 experts."""
BIAS = 0.1
WORDS = 8
"""Tokens in the vocabulary of the probe; each has a row in a table."""
CUT, WIDENED, ROUNDED, WIDE_BIAS = "cut", "widened", "rounded", "wide_bias"
"""Constants of code that was recognised by its structure: the number of its choice, and 1 if scores are widened to float32 first,
if weights are rounded to the dtype of the hidden states, or if only a bias in float32 is widened by the code as well."""
NO_CHOICE = "no definition computes its choice of experts"
UNDESCRIBED = {
    "e2f6bd664e82c954": "no definition adds a bias to scores before their sigmoid",
    "8990a5f32a9e98a5": "no definition ranks sigmoids without a bias",
    "3ec8d8d5fbd3de9e": "its score function is a module, which may have hooks",
    "a4ce3525a9b15fc5": "its score function is a module, which may have hooks",
    "7de8fb037d883b26": "no definition ranks sigmoids with a bias in groups without a factor",
}
"""Known code that no Definition describes: Kolibri 1, Flint, Inkling 2, Muse Spark, Beam."""
CHANGED = "its settings changed after the probe"
OTHER_BIAS = "its bias is not in float32"

_is_compiling = torch.compiler.is_compiling
Module = torch.nn.Module


def find(model: Module, known: KnownCode, others: Sequence[ModuleGroup]) -> Iterable[ModuleGroup]:
    """Return the modules with a matrix of weights whose code computes scores and returns them with two more results."""
    routes, has_choice = of_class(_routes), of_class(_has_choice)
    modules = []
    for module in model.modules():
        weight: torch.Tensor | None = module._parameters.get(WEIGHT)
        if weight is None or weight.dim() != 2 or not routes(module):
            weight = product_of(module) if has_choice(module) else None
        if weight is not None:
            modules.append(ModuleOfPart(module, detail=(likeness(module), weight.shape)))
    return grouped("router", modules)


def _routes(cls: type[Module]) -> bool:
    forward: Any = cls.forward
    return is_plain(forward) and not forward.__code__.co_freevars and is_routing(forward)


def _has_choice(cls: type[Module]) -> bool:
    forward: Any = cls.forward
    if not is_plain(forward) or forward.__code__.co_freevars or not choices(forward):
        return False
    called = {name: one for name, one in methods(cls).items() if name in names_in_code(forward)}
    return any(RANKS in names_in_code(one) for one in (forward, *called.values()) if callable(one))


def candidates(found: ModuleGroup, known: KnownCode) -> MatchCandidates | str:
    """Look up the source of the forward, or else try each Definition on the choices in it."""
    cls = found.module_class
    matches = known.look_up("router", cls.forward, methods(cls), "its router forward", {})
    if not isinstance(matches, str):
        return MatchCandidates(matches)
    module = found.samples[0]
    if not _has_choice(cls):
        return matches
    if device_of(module).type == "meta":
        return MatchCandidates(known.nominated("router"))  # the probe says that nothing can be probed
    mark = fingerprint(cls.forward) or ""
    match = None if mark in UNDESCRIBED else nominated(module, known)
    return MatchCandidates([match]) if match is not None else UNDESCRIBED.get(mark, f"{NO_CHOICE} (fingerprint {mark})")


def probe(found: ModuleGroup, module: Module, match: DefinitionMatch) -> Probe | str:
    """Run a router with the same number of experts on the rows of a unit matrix, so that its scores are its weights."""
    if CUT in match.code.constants:
        return probed_choice(module, match)
    draw, twin = Draw(device_of(module)), copy.copy(module)
    experts = module._parameters[WEIGHT].shape[0]  # type: ignore[union-attr]
    inputs = _drawn(module, match, draw, experts)
    if isinstance(inputs, str):
        return inputs
    if not hasattr(module, HIDDEN):
        return f"it has no {HIDDEN}"
    ranks = torch.stack([draw(experts).float().argsort() for _ in range(ROWS)], dim=1)
    scores = (SPACING * (ranks - experts // 2)).to(torch.bfloat16)
    zeros = {name: scores.new_zeros(experts) for name in module._parameters if name != WEIGHT}
    passed = {name: inputs[name] for name in _passed(match.definition)}
    kept = {
        match.attribute(name): value
        for name, value in inputs.items()
        if isinstance(value, torch.Tensor) and name not in passed
    }
    vars(twin).update({HIDDEN: ROWS})
    vars(twin)["_parameters"] = {**module._parameters, **zeros, WEIGHT: scores}
    vars(twin)["_buffers"] = {**module._buffers, **kept}
    states = torch.eye(ROWS, dtype=torch.bfloat16, device=scores.device)
    try:
        with torch.no_grad():
            logits, weights, ids = type(module).forward(twin, states, *passed.values())
    except (
        IndexError,
        RuntimeError,
        TypeError,
    ) as error:  # a model's code may raise for settings that do not fit together
        return f"it cannot be probed: {type(error).__name__}: {error}"
    return {next(iter(match.definition.inputs)): logits, **inputs}, (weights, ids)


def _passed(definition: Definition) -> tuple[str, ...]:
    """Return the inputs that are arguments after the hidden states, in order: tensors with one value per token."""
    (_, scores), *others = definition.inputs.items()
    tokens = (scores.shape or ())[:1]
    return tuple(name for name, spec in others if spec.shape and spec.shape[:1] == tokens)


def _drawn(module: Module, match: DefinitionMatch, draw: Draw, experts: int) -> dict[str, Any] | str:
    """Return every input but the scores, with the module's settings and random tensors; or the reason if one is missing."""
    inputs: dict[str, Any] = {}
    passed = _passed(match.definition)
    for name, spec in list(match.definition.inputs.items())[1:]:
        kept = getattr(module, match.attribute(name), None)
        if spec.is_scalar:
            reason = match.why_no_number(module, name)
            if reason:
                return reason
            inputs[name] = match.value(module, name)
        elif name in passed:
            inputs[name] = draw(WORDS).float().argsort()[:ROWS]
        elif not isinstance(kept, torch.Tensor):
            return f"it has no {match.attribute(name)}"
        elif kept.dim() == 2:  # a table with the experts of each token
            rows = [draw(experts).float().argsort()[: kept.shape[1]] for _ in range(WORDS)]
            inputs[name] = torch.stack(rows).to(getattr(torch, spec.dtype))
        else:
            inputs[name] = BIAS * draw(experts).to(getattr(torch, spec.dtype))
    return inputs


def forward(stock: Any, calls: Sequence[PartCall]) -> Callable[..., Any]:
    """Return the forward of a router: hidden states [..., H] -> (scores [M, E], weights [M, K], ids [M, K])."""
    ((found, site),) = calls
    assert found.match is not None, "only confirmed groups are patched"
    if CUT in found.match.code.constants:
        choice = choice_of(stock, found.match)
        asked, forget = shadow_function(routed(stock, choice), {ROUTE: choice_function(site, found, choice)})
        site.shadows.append(forget)
        return routed_forward(stock, asked, site)
    asked, forget = shadow_function(with_route(stock), {ROUTE: route_function(site, found.match)})
    site.shadows.append(forget)
    return routed_forward(stock, asked, site)


def routed_forward(stock: Callable[..., Any], asked: FunctionType, site: CallSite) -> Callable[..., Any]:
    """Return the forward of a router: ``asked``, but ``stock`` in training if no Definition computes its gradients."""

    @functools.wraps(stock)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_untrained = self.training and site.training is None
        if is_untrained or not site.is_open:
            if not _is_compiling():
                site.bypass(IN_TRAINING if is_untrained else site.closed)
            return stock(self, *args, **kwargs)
        return asked(self, *args, **kwargs)

    return forward


def route_function(site: CallSite, match: DefinitionMatch) -> Callable[..., Any]:
    """Return ``route(module, scores [M, E], *others) -> (weights, ids)`` by a kernel, or None to go on in the model's code.

    ``others`` are the arguments of the forward after the hidden states.
    """
    definition = match.definition
    passed = _passed(definition)
    kept = [(name, spec) for name, spec in list(definition.inputs.items())[1:] if name not in passed]
    tensors = [match.attribute(name) for name, spec in kept if not spec.is_scalar and spec.dtype not in INTEGER_DTYPES]

    def inputs_of(module: Any, others: Sequence[Any]) -> list[Any]:
        values = {name: match.value(module, name) for name, _ in kept}
        values |= {name: tokens.reshape(-1) for name, tokens in zip(passed, others, strict=False)}
        return [values[name] for name in list(definition.inputs)[1:]]

    def route(module: Any, scores: torch.Tensor, *others: Any) -> Any:
        if type(scores) is torch.Tensor and not scores.is_meta and torch.is_autocast_enabled(scores.device.type):
            if not _is_compiling():
                site.bypass(AUTOCAST)
            return None
        plain = all(type(tokens) is torch.Tensor for tokens in others[: len(passed)])
        if _is_compiling():
            operator = site.traced(module.training, scores, *[getattr(module, name) for name in tensors])
            if operator is None or scores.dim() != 2 or not plain:
                return None
            return operator.call(scores, *inputs_of(module, others), operator.name)
        if site.falls_back(module.training, scores):
            return None
        if scores.dim() != 2 or not plain:
            site.bypass(NOT_ROWS if plain else NOT_PLAIN)
            return None
        return site.ask(module.training, scores, *inputs_of(module, others))

    return route


# ---- choices found by structure ---------------------------------------------------------------------
# A Definition is tried on each choice in a forward: with the module's settings, and with others. The model's code records scores,
# weights and ids after the choice, and the Definition must compute the same weights and ids from the scores.

TOKENS = 40
STEPS = 12
"""Number of different steps between drawn scores, each half of the one before. Small ones are equal if rounded to bf16."""
RANGE = 8.0
"""Largest drawn score. A probe in float32 also has a token with scores around minus :data:`FAR`."""
FAR = 40.0
SMALL_BIAS = 1 / 256
PLAIN = (bool, int, float, str, type(None), FunctionType)


def AGREES(returned: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> bool:
    """Return True if weights and ids have the same bits, in any order of a token's experts if the ids differ in order."""
    if (
        len(returned) != 2
        or len(expected) != 2
        or any(got.shape != want.shape for got, want in zip(returned, expected, strict=True))
    ):
        return False
    (weights, ids), (wanted, known) = returned, expected
    if ids.dtype != known.dtype or weights.dtype != wanted.dtype:
        return False
    if torch.equal(ids, known):
        return torch.equal(weights, wanted)
    order, other = ids.argsort(dim=-1), known.argsort(dim=-1)
    pairs = (ids, known), (weights, wanted)
    return all(torch.equal(got.gather(-1, order), want.gather(-1, other)) for got, want in pairs)


def product_of(module: Module) -> torch.Tensor | None:
    """Return the weight [E, H] of a router's product: its own, or that of its one linear layer; None if it has no such weight."""
    holder = _holder(module)
    return None if holder is None else holder._parameters[WEIGHT]


def _holder(module: Module) -> Module | None:
    layers = [module, *(one for one in module._modules.values() if type(one) is torch.nn.Linear)]
    found = [one for one in layers if (weight := one._parameters.get(WEIGHT)) is not None and weight.dim() == 2]
    return found[0] if len(found) == 1 else None


def choice_of(forward: Any, match: DefinitionMatch) -> Choice:
    """Return the choice of a forward that a match is about."""
    return choices(forward)[int(match.code.constants[CUT])]


def nominated(module: Module, known: KnownCode) -> DefinitionMatch | None:
    """Return the first Definition that makes a choice of a router's code, with its attributes; None if there is none."""
    forward: Any = type(module).forward
    for place, choice in enumerate(choices(forward)):
        recorded = _all_recorded(module, choice)
        matches = (
            DefinitionMatch(definition, code)
            for definition in known.definitions("router")
            for code in _codes(module, definition, choice, place)
        )
        for match in matches:
            if not _fits(module, match, recorded, known) or not _is_fixed(module, match, choice):
                continue
            other = _with_other_settings(module, match)
            changed = _all_recorded(other, choice)
            if _fits(other, match, changed, known):
                return _with_constants(other, match, changed, known)
    return None


def _with_constants(
    other: Module, match: DefinitionMatch, changed: Sequence[_Recorded | str], known: KnownCode
) -> DefinitionMatch:
    """Return a match with 1.0 for each number that the code does not depend on, such as the least divisor of no division."""
    for name in match.code.attributes:
        if match.definition.inputs[name].dtype not in FLOATS or not match.definition.inputs[name].is_scalar:
            continue
        attributes = {key: value for key, value in match.code.attributes.items() if key != name}
        code = match.code.model_copy(
            update={"attributes": attributes, "constants": {**match.code.constants, name: 1.0}}
        )
        if _fits(other, match._replace(code=code), changed, known):
            match = match._replace(code=code)
    return match


def _fits(module: Module, match: DefinitionMatch, recorded: Sequence[_Recorded | str], known: KnownCode) -> bool:
    """Return True if a Definition computes the recorded weights and ids from the scores, in bf16 and in float32."""
    for one in recorded:
        if match.code.constants[WIDE_BIAS] and not isinstance(one, str) and one.bias != torch.float32:
            continue
        inputs = one if isinstance(one, str) else _inputs_of(module, match, one)
        if isinstance(one, str) or isinstance(inputs, str):
            return False
        if match.code.constants[ROUNDED] and one.weights.dtype != one.states:
            return False
        agrees = _agrees_rounded if match.code.constants[ROUNDED] else AGREES
        if not matching_definitions((inputs, (one.weights, one.ids)), [match.definition], known.catalog, agrees):
            return False
    return True


def _agrees_rounded(returned: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> bool:
    return len(expected) == 2 and AGREES(returned, (expected[0].to(returned[0].dtype), expected[1]))


def _inputs_of(module: Module, match: DefinitionMatch, recorded: _Recorded) -> dict[str, Any] | str:
    """Return the inputs of a Definition for a probed call; or the reason if a setting is no number of its type."""
    scores, *others = match.definition.inputs
    inputs = {scores: recorded.scores.float() if match.code.constants[WIDENED] else recorded.scores}
    for name in others:
        if not match.definition.inputs[name].is_scalar:
            inputs[name] = recorded.arguments[match.attribute(name)].float().reshape(-1)
        elif reason := match.why_no_number(module, name):
            return reason
        else:
            inputs[name] = match.value(module, name)
    return inputs


def _with_other_settings(module: Module, match: DefinitionMatch) -> Module:
    """Return a copy of a router with other values of the attributes that are inputs of a Definition."""
    twin, weight = copy.copy(module), product_of(module)
    assert weight is not None, "the group was found by its product"
    for attribute in match.code.attributes.values():
        value = setting(module, attribute)
        changed: Any = None
        if type(value) is bool:
            changed = not value
        elif type(value) is int and value >= 1:
            changed = value - 1 if value > 1 else min(2, weight.shape[0])
        elif type(value) is float:
            changed = 1.5 * value + 0.25
        if changed is not None and attribute.startswith(OF_CONFIG):
            vars(twin)[CONFIG] = copy.copy(getattr(twin, CONFIG))
            setattr(getattr(twin, CONFIG), attribute.removeprefix(OF_CONFIG), changed)
        elif changed is not None:
            vars(twin)[attribute] = changed
    return twin


def _is_fixed(module: Module, match: DefinitionMatch, choice: Choice) -> bool:
    """Return True if everything else that a choice reads of a module can be compared at each call."""
    return all(isinstance(setting(module, name), PLAIN) for name in _others(module, match, choice))


def _others(module: Module, match: DefinitionMatch, choice: Choice) -> tuple[str, ...]:
    mapped = set(match.code.attributes.values())
    return tuple(name for name in _reads(module, choice) if name not in mapped)


def probed_choice(module: Module, match: DefinitionMatch) -> Probe | str:
    """Run a router's own code in float32 up to the end of its choice."""
    recorded = _recorded(module, choice_of(type(module).forward, match), torch.float32, torch.float32)
    inputs = recorded if isinstance(recorded, str) else _inputs_of(module, match, recorded)
    if isinstance(recorded, str) or isinstance(inputs, str):
        return inputs if isinstance(inputs, str) else NO_CHOICE
    return inputs, (recorded.weights, recorded.ids)


def choice_function(site: CallSite, found: ModuleGroup, choice: Choice) -> Callable[..., Any]:
    """Return ``route(module, scores [M, E], states, *others) -> (weights, ids)`` by a kernel, or None for the model's code."""
    match = found.match
    assert match is not None, "only confirmed groups are patched"
    definition, code = match.definition, match.code
    given = {name: place for place, name in enumerate(_parameters_of(unpatched_class(found.modules[0]).forward)[2:])}
    names = list(definition.inputs)[1:]
    passed = {name: given[match.attribute(name)] for name in names if match.attribute(name) in given}
    tensors = [place for place, name in enumerate(names) if not definition.inputs[name].is_scalar]
    held = [(place, match.attribute(names[place])) for place in tensors if names[place] not in passed]
    children = {source: type(child) for _, source in held if (child := found.modules[0]._modules.get(source))}
    fixed = _others(found.modules[0], match, choice)
    probed = {tuple(setting(module, name) for name in fixed) for module in found.modules}
    is_widened, is_rounded = bool(code.constants[WIDENED]), bool(code.constants[ROUNDED])
    has_wide_bias = bool(code.constants[WIDE_BIAS])

    def why_stock(module: Any, scores: torch.Tensor, others: Sequence[Any], biases: Sequence[Any]) -> str:
        if type(scores) is torch.Tensor and not scores.is_meta and torch.is_autocast_enabled(scores.device.type):
            return AUTOCAST
        if fixed and tuple([setting(module, name) for name in fixed]) not in probed:
            return CHANGED
        if any(type(child := module._modules[name]) is not cls or has_hooks(child) for name, cls in children.items()):
            return CHANGED
        if len(others) != len(given) or type(scores) is not torch.Tensor or scores.dim() != 2:
            return NOT_ROWS
        if any(not isinstance(bias, torch.Tensor) for bias in biases):
            return NOT_PLAIN
        return OTHER_BIAS if has_wide_bias and any(bias.dtype != torch.float32 for bias in biases) else ""

    def route(module: Any, scores: torch.Tensor, states: torch.Tensor, *others: Any) -> Any:
        is_compiling = _is_compiling()
        inputs = [others[passed[name]] if name in passed else match.value(module, name) for name in names]
        for place, source in held:
            inputs[place] = _held_tensor(module, source)
        reason = why_stock(module, scores, others, [inputs[place] for place in tensors])
        if reason or (not is_compiling and site.falls_back(module.training, scores)):
            if reason and not is_compiling:
                site.bypass(reason)
            return None
        wide = scores.float() if is_widened else scores
        for place in tensors:
            bias = inputs[place].float()  # a bias of lower precision was probed too
            inputs[place] = bias if bias.dim() == 1 else bias.reshape(-1)
        if is_compiling:
            operator = site.traced(module.training, wide, *[inputs[place] for place in tensors])
            if operator is None:
                return None
            weights, ids = operator.call(wide, *inputs, operator.name)
        else:
            served = site.ask(module.training, wide, *inputs)
            if served is None:
                return None
            weights, ids = served
        return (weights.to(states.dtype) if is_rounded else weights), ids

    return route


def _held_tensor(module: Any, source: str) -> Any:
    """Return the tensor that a module has as an attribute, or that a submodule of that name has; None if there is none."""
    value = getattr(module, source, None)
    return next(iter(_tensors_of(value).values()), None) if isinstance(value, Module) else value


class _Recorded(NamedTuple):
    """The arguments and biases of a probed forward, the dtypes of its states and biases, and scores, weights and ids after its
    choice."""

    states: torch.dtype
    bias: torch.dtype
    arguments: Mapping[str, Any]
    scores: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor


def _all_recorded(module: Module, choice: Choice) -> list[_Recorded | str]:
    """Return the probed calls of a router in bf16, in float32, and in bf16 with biases in float32."""
    return [
        _recorded(module, choice, dtype, bias)
        for dtype, bias in ((torch.bfloat16,) * 2, (torch.float32,) * 2, (torch.bfloat16, torch.float32))
    ]


def _recorded(module: Module, choice: Choice, dtype: torch.dtype, bias: torch.dtype) -> _Recorded | str:
    """Run a router's own code with drawn weights and biases of these dtypes, or return the reason if it fails."""
    weight = product_of(module)
    assert weight is not None, "the group was found by its product"
    experts = weight.shape[0]
    twin, draw = _twin(module, dtype, bias), Draw(device_of(module))
    scores = _probe_scores(draw, experts, dtype)
    holder = _holder(twin)
    assert holder is not None, "the group was found by its product"
    no_bias = torch.zeros(experts, dtype=dtype, device=scores.device)
    made = {name: None if value is None else no_bias.clone() for name, value in holder._parameters.items()}
    vars(holder)["_parameters"] = made | {WEIGHT: scores}
    forward: Any = type(module).forward
    extra = {name: _bias(draw, experts, bias) for name in _parameters_of(forward)[2:]}
    kept = {**twin._parameters, **twin._buffers}
    kept |= {name: _held_tensor(twin, name) for name in twin._modules}
    found: list[torch.Tensor] = []
    recorder, forget = shadow_function(
        recording(forward, choice), {RECORD: lambda *values: found.extend(map(torch.clone, values))}
    )
    states = torch.eye(TOKENS, dtype=dtype, device=scores.device)
    try:
        for shaped in (states, states.unsqueeze(0)):
            try:
                with torch.no_grad():
                    recorder(twin, shaped, *extra.values())
                break
            except of_models() as error:  # a model's code may raise for settings or shapes that do not fit together
                reason = f"it cannot be probed: {type(error).__name__}: {error}"
                found.clear()
    finally:
        forget()
    if len(found) != 6:
        return reason if not found else NO_CHOICE
    *before, scores, returned, weights, ids = found
    if not all(map(torch.equal, before, (scores, returned))):
        return NO_CHOICE  # it writes to its scores, which a kernel does not
    return _Recorded(dtype, bias, {**kept, **extra}, scores, weights, ids)


def _probe_scores(draw: Draw, experts: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight ``[experts, TOKENS]`` of a probe: scores in steps that the dtype holds, in another order per token.

    In float32 those of the last token are far below zero.
    """
    ranks = torch.stack([draw(experts).float().argsort() for _ in range(TOKENS)], dim=1) - experts // 2
    step = 2.0 ** math.floor(math.log2(RANGE / max(1, experts // 2)))
    scores = step * ranks.float() / 2.0 ** (torch.arange(TOKENS, device=ranks.device) % STEPS)
    if dtype == torch.float32:
        scores[:, -1] -= FAR
    return scores.to(dtype)


def _tensors_of(module: Module) -> dict[str, torch.Tensor]:
    tensors = {**module._parameters, **module._buffers}
    return {name: one for name, one in tensors.items() if one is not None}


def _twin(module: Module, dtype: torch.dtype, bias: torch.dtype) -> Module:
    """Return a copy of a router for hidden states of :data:`TOKENS` elements of a dtype, with drawn biases of another."""
    twin, weight = copy.copy(module), product_of(module)
    assert weight is not None, "the group was found by its product"
    experts, width = weight.shape
    sizes = {name: TOKENS for name, value in vars(module).items() if type(value) is int and value == width}
    vars(twin).update(sizes)
    draw = Draw(device_of(module))
    vars(twin)["_modules"] = {
        name: torch.nn.Linear(1, 1, bias=one.bias is not None, device="meta")
        if type(one) is torch.nn.Linear
        else _with_bias(one, draw, experts, bias)
        for name, one in module._modules.items()
    }
    for kept in ("_parameters", "_buffers"):
        vars(twin)[kept] = {
            name: value if value is None else _drawn_vector(value, draw, (experts, width), (bias, dtype))
            for name, value in getattr(module, kept).items()
        }
    return twin


def _drawn_vector(
    value: torch.Tensor, draw: Draw, sizes: tuple[int, int], dtypes: tuple[torch.dtype, torch.dtype]
) -> torch.Tensor:
    """Return a drawn bias in place of a number for each expert, and ones in place of one for each hidden channel."""
    (experts, width), (bias, dtype) = sizes, dtypes
    if value.shape == (experts,):
        return _bias(draw, experts, bias)
    return torch.ones(TOKENS, dtype=dtype, device=value.device) if value.shape == (width,) else value


def _with_bias(module: Any, draw: Draw, experts: int, bias: torch.dtype) -> Any:
    """Return a copy of a submodule with a drawn bias; the submodule itself if it has more than one number per expert."""
    name = _bias_of(module, experts)
    if not name:
        return module
    twin, drawn = copy.copy(module), _bias(draw, experts, bias).view(_tensors_of(module)[name].shape)
    for kept in ("_parameters", "_buffers"):
        values = getattr(module, kept)
        vars(twin)[kept] = {**values, name: drawn} if name in values else values
    return twin


def _bias_of(module: Any, experts: int) -> str:
    """Return the name of the tensor of a submodule that has only this, a number for each expert, and reads no setting."""
    if module is None or module._modules or not is_plain(type(module).forward):
        return ""
    tensors = _tensors_of(module)
    if len(tensors) != 1 or not vars(module).keys().isdisjoint(names_in_code(type(module).forward)):
        return ""
    ((name, tensor),) = tensors.items()
    return name if tensor.numel() == experts else ""


def _bias(draw: Draw, experts: int, dtype: torch.dtype) -> torch.Tensor:
    """Return different corrections of ranks, which decide between scores that are equal if rounded to bf16."""
    return (SMALL_BIAS * (draw(experts).float().argsort() - experts // 2) / experts).to(dtype)


def _parameters_of(forward: Any) -> tuple[str, ...]:
    code = forward.__code__
    return tuple(code.co_varnames[: code.co_argcount])


def _codes(module: Module, definition: Definition, choice: Choice, place: int) -> Iterator[ModelCode]:
    """Yield each combination of sources for the inputs of a Definition: attributes, arguments and constants of a choice."""
    (_, scores), *others = definition.inputs.items()
    if len(definition.outputs) != 2 or scores.shape is None or len(scores.shape) != 2:
        return
    options = {name: _options(module, definition, name, choice) for name, _ in others}
    stated = scores.dtype not in definition.dtypes
    for values in itertools.product(*options.values()):
        attributes = {name: value for name, value in zip(options, values, strict=True) if isinstance(value, str)}
        constants = {name: value for name, value in zip(options, values, strict=True) if not isinstance(value, str)}
        has_bias = any(not definition.inputs[name].is_scalar for name in attributes)
        for widened, rounded, wide_bias in itertools.product((0, 1), (0, 1), (0, 1)):
            if widened < stated or rounded > max(widened, stated) or wide_bias > has_bias:
                continue
            ways = {CUT: place, WIDENED: widened, ROUNDED: rounded, WIDE_BIAS: wide_bias}
            code = ModelCode(fingerprint=fingerprint(type(module).forward) or "", constants={**constants, **ways})
            yield code.model_copy(update={"attributes": attributes})  # a setting of a config is no identifier


def _options(module: Module, definition: Definition, name: str, choice: Choice) -> list[Any]:
    """Return the names of attributes and arguments, and the constants, that may be an input of a Definition."""
    spec, sized = definition.inputs[name], {axis.scalar for axis in definition.axes.values()}
    if not spec.is_scalar:
        given = _parameters_of(type(module).forward)[2:]
        names = _reads(module, choice)
        held = [one for one in names if isinstance(setting(module, one), torch.Tensor)]
        weight = product_of(module)
        experts = 0 if weight is None else weight.shape[0]
        held += [one for one in names if _bias_of(module._modules.get(one), experts)]
        return [*held, *given] if spec.shape is not None and len(spec.shape) == 1 else []
    read = {one: setting(module, one) for one in _reads(module, choice)}
    if spec.dtype == "bool":
        return [one for one, value in read.items() if type(value) is bool] + [False, True]
    if spec.dtype in FLOATS:
        return [one for one, value in read.items() if type(value) in (int, float)] + [1.0]
    is_count = name == next((axis.scalar for axis in definition.axes.values() if axis.scalar), None)
    whole = [one for one, value in read.items() if type(value) is int]
    return whole if is_count or name not in sized else [1]


def _reads(module: Module, choice: Choice) -> tuple[str, ...]:
    """Return the attributes that a choice reads, also in the methods that it calls."""
    own = methods(type(module))
    called = [own[name] for name in choice.reads if callable(own.get(name)) and not isinstance(own[name], type)]
    inner = [name for one in called for name in names_in_code(one) if hasattr(module, name) and name not in own]
    return tuple(dict.fromkeys([*(name for name in choice.reads if name not in own), *inner]))


# ---- code of a choice -----------------------------------------------------------------------------
# Recognise the forward of a router: scores, a choice of experts by them, and the rest, which may scale the weights.
#
# It looks for one shape of code in any class: ``return scores, weights, ids`` at the end. The statements after the last one that
# assigns the scores, up to any place at which only weights and ids are needed later, are a choice that a kernel may make.

PROBABILITIES = ("softmax", "sigmoid")
SERVED = "_tilegym_db_chosen"
RECORD = "_tilegym_db_record"
"""The function that :func:`recording` calls with tensors before and after a choice."""


class Choice(NamedTuple):
    """Statements ``start`` to ``stop`` of a block of code, the names that they define, and the attributes that they read.

    ``scores`` is the variable that a Definition ranks, and ``returned`` the one that the forward returns as scores.
    """

    start: int
    stop: int
    scores: str
    returned: str
    weights: str
    ids: str
    reads: tuple[str, ...]


class _Block(NamedTuple):
    """The block of statements that assigns the scores last, the place after that, and the statements after the block."""

    body: list[ast.stmt]
    start: int
    rest: list[ast.stmt]


@once_per_function
def choices(forward: FunctionType) -> tuple[Choice, ...]:
    """Return the statements of a router's forward that a kernel may replace, the longest first; empty for other code."""
    function = parsed(forward)
    names = None if function is None else _returned(function)
    if function is None or names is None or len(function.args.args) < 2:
        return ()
    scores, ids = names
    body, start, rest = _block(function.body, scores, [])
    last = next((place for place, one in enumerate(body) if isinstance(one, ast.Return)), len(body))
    found = []
    for ranked, stop in itertools.product((scores, *_behind(body[:start])), range(last, start, -1)):
        inside, later = body[start:stop], [*body[stop:], *rest]
        live = _names(inside, ast.Store) & _names(later, ast.Load)
        if len(live) == 2 and ids in live and ranked not in _names(inside, ast.Store) - {scores}:
            (weights,) = live - {ids}
            read = _attributes(inside, function.args.args[0].arg)
            found.append(Choice(start, stop, ranked, scores, weights, ids, read))
    return tuple(found)


def _behind(before: Sequence[ast.stmt]) -> tuple[str, ...]:
    """Return the variables of which the last statement computes probabilities; empty if it does something else.

    A router may return probabilities as its scores. Definitions take what is behind them.
    """
    if not before or not isinstance(before[-1], ast.Assign) or not isinstance(before[-1].value, ast.Call):
        return ()
    call = before[-1].value
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in PROBABILITIES:
        return ()
    return tuple(sorted(_names([before[-1]], ast.Load) & _names(before[:-1], ast.Store)))


def _returned(function: ast.FunctionDef) -> tuple[str, str] | None:
    """Return the names of the scores and of the ids if a function returns them at its end, with the weights between them."""
    returns = [node for node in ast.walk(function) if isinstance(node, ast.Return)]
    if len(returns) != 1 or returns[0] is not function.body[-1]:
        return None
    match returns[0].value:
        case ast.Tuple(elts=[ast.Name(id=scores), _, ast.Name(id=ids)]) if scores != ids:
            return scores, ids
    return None


def _block(body: list[ast.stmt], scores: str, rest: list[ast.stmt]) -> _Block:
    last = max((place for place, one in enumerate(body) if scores in _names([one], ast.Store)), default=len(body) - 1)
    last_one = body[last]
    if isinstance(last_one, ast.With):
        inner = _block(last_one.body, scores, [*body[last + 1 :], *rest])
        if inner.start < len(inner.body):
            return inner
    return _Block(body, last + 1, rest)


def _names(statements: Iterable[ast.stmt], kind: type[ast.expr_context]) -> set[str]:
    """Return the variables that statements assign or read; ``x /= y`` reads ``x`` too."""
    nodes = [node for one in statements for node in ast.walk(one)]
    found = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, kind)}
    if kind is ast.Load:
        found |= {one.target.id for one in nodes if isinstance(one, ast.AugAssign) and isinstance(one.target, ast.Name)}
    return found


def _attributes(statements: Iterable[ast.stmt], owner: str) -> tuple[str, ...]:
    """Return the attributes of a module that statements read, and the settings of its config."""
    nodes = [node for one in statements for node in ast.walk(one)]
    own = [node for node in nodes if isinstance(node, ast.Attribute) and is_name(node.value, owner)]
    settings = {id(node.value): node.attr for node in nodes if isinstance(node, ast.Attribute)}
    is_setting = {id(node): node.attr == CONFIG and id(node) in settings for node in own}
    return tuple(dict.fromkeys(OF_CONFIG + settings[id(node)] if is_setting[id(node)] else node.attr for node in own))


def routed(forward: FunctionType, choice: Choice) -> FunctionType:
    """Return a copy of the function that first asks :data:`ROUTE` for weights and ids, and chooses itself if that is None.

    It passes the module, the scores, the hidden states and all further arguments.
    """

    def change(function: ast.FunctionDef, body: list[ast.stmt]) -> None:
        given = [argument.arg for argument in function.args.args]
        call = ", ".join([given[0], choice.scores, *given[1:]])
        asked, chosen = ast.parse(f"{SERVED} = {ROUTE}({call})\n{choice.weights}, {choice.ids} = {SERVED} or ()").body
        assert isinstance(chosen, ast.Assign), "the text above has an assignment"
        chosen.value = ast.Name(SERVED, ast.Load())
        is_left = ast.Compare(ast.Name(SERVED, ast.Load()), [ast.Is()], [ast.Constant(None)])
        own = body[choice.start : choice.stop]
        body[choice.start : choice.stop] = [asked, ast.If(is_left, own, [chosen])]

    return _changed(forward, change)


def recording(forward: FunctionType, choice: Choice) -> FunctionType:
    """Return a copy of the function that also gives :data:`RECORD` its scores before a choice, and all results after it."""

    def change(function: ast.FunctionDef, body: list[ast.stmt]) -> None:
        held = f"{choice.scores}, {choice.returned}"
        body[choice.stop : choice.stop] = ast.parse(f"{RECORD}({held}, {choice.weights}, {choice.ids})").body
        body[choice.start : choice.start] = ast.parse(f"{RECORD}({held})").body

    return _changed(forward, change)


def _changed(forward: FunctionType, change: Callable[[ast.FunctionDef, list[ast.stmt]], Any]) -> FunctionType:
    function = parsed(forward)
    names = None if function is None else _returned(function)
    assert function is not None, "ask choices first"
    assert names is not None, "ask choices first"
    body = _block(function.body, names[0], []).body
    before = body[0]
    change(function, body)
    for statement in body:
        for node in ast.walk(statement):
            if not hasattr(node, "lineno") and isinstance(node, ast.stmt | ast.expr):
                ast.copy_location(node, before)
    return recompiled(forward, function)
