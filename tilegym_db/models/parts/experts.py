"""Experts of a mixture: the modules inside the one wrapper that transformers puts around every such class.

At each call the wrapper reads the implementation from the model's config: ``eager``, which is the loop of the class, or a
function in a registry. All known implementations compute the same, and the probe confirms it. So a kernel may serve any of them,
and unknown ones are left alone.

A class without that wrapper is found by its loop. Code between the two products that no Definition states is recognised by a
probe, if it reads nothing of the module but the activation, inputs of the Definition, and bounds that are infinite.

Some of the experts may return their input: those from the number of ``routed`` experts on. They have no part in the kernel, and
their share is added to its output.

The first three inputs of a Definition are the arguments of a call: hidden states [M, H], ids and weights [M, K]. Hidden states
[E, S, H] are the only argument, with the rows of all experts one after another. Every other input, and the ``activation``, is an
attribute of the module. It has the same name unless ``serving.code`` states another.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from tilegym_db.models.call_site import AUTOCAST, NOT_PLAIN, OTHER_ACTIVATION, CallSite, unpatched_class
from tilegym_db.models.found import (
    DefinitionMatch,
    KnownCode,
    MatchCandidates,
    ModuleGroup,
    ModuleOfPart,
    OwnCode,
    PartCall,
    grouped,
    is_plain,
    methods,
    names_in_code,
    of_class,
)
from tilegym_db.models.parts.mlp import ACTIVATION, is_as_probed, likeness, probed_activation
from tilegym_db.models.probe import (
    CODES,
    WEIGHT_SCALES,
    WEIGHTS,
    Draw,
    Probe,
    activation,
    choice,
    device_of,
    matching_definitions,
    single,
)
from tilegym_db.models.upstream_code import EAGER, fingerprint, implementations, of_models, way_of, wrapper_of
from tilegym_db.records import Definition
from tilegym_db.records.definition_parts import ModelCode

ROUTED, ALL = "routed", "all"
GATE, DOWN = "_apply_gate", "down_proj"
UNDESCRIBED = {
    "cf29a494b01fa9b9": "no definition describes experts with a soft cap",
    "67f4d3b10242b4b3": "no definition describes experts that every token uses",
    "1b022aa8ae57ce75": "no definition describes experts with a norm of their outputs",
    "bdc4d68b8c68d77a": "no definition describes gated experts with weights by column and no bias",
}
"""Known code that no Definition describes: Inkling 2, Inkling, Muse Spark, Aria."""
SHARDED = "its experts are distributed over several GPUs"
OWN_GATE = f"its {GATE} is replaced on the instance"
NO_CONFIG = "it has no config that states the implementation"
OTHER_GATE = "its code between the two products, {}, computes no definition of experts"
OTHER_IDENTITY = "in its probe, experts from {} on do not return their input"
CHANGED = "its bounds changed after the probe"
NOT_CALLED_SO = "its arguments are not just hidden states, or these with ids and weights, each a matrix"

_is_compiling = torch.compiler.is_compiling
Module = torch.nn.Module


def called_with(definition: Definition) -> int:
    """Return the number of a Definition's inputs that are arguments of a call; the module keeps the others."""
    return 1 if _has_rows_of_all(definition) else 3


def _has_rows_of_all(definition: Definition) -> bool:
    """Return True if the hidden states have a row of each expert for each token."""
    shape = next(iter(definition.inputs.values())).shape
    return shape is not None and len(shape) == 3


def find(model: Module, known: KnownCode, others: Sequence[ModuleGroup]) -> Iterable[ModuleGroup]:
    """Return the modules whose class has that wrapper around its forward, and those with a matrix of each expert."""
    is_wrapped = of_class(lambda cls: wrapper_of(cls.forward) is not None)
    return grouped(
        "experts",
        [
            ModuleOfPart(module, key=(id(probed_activation(module)), _unbounded(module)), detail=_detail(module))
            for module in model.modules()
            if is_wrapped(module) or _has_matrices(module)
        ],
    )


def _has_matrices(module: Module) -> bool:
    down = module._parameters.get(DOWN)
    return down is not None and down.dim() == 3


def _unbounded(module: Module) -> tuple[str, ...]:
    """Return the attributes that are infinite; layers of one class may have different bounds."""
    return tuple(name for name, value in vars(module).items() if type(value) is float and math.isinf(value))


def _detail(module: Module) -> Any:
    kept = [(name, type(value.data), value.dtype) for name, value in module._parameters.items() if value is not None]
    return likeness(module), GATE in vars(module), getattr(module, "_is_expert_parallel", False), tuple(kept)


def candidates(found: ModuleGroup, known: KnownCode) -> MatchCandidates | str:
    """Look up the source of the loop and of the code between the two products; the probe determines the activation."""
    cls = found.module_class
    wrapper = wrapper_of(cls.forward)
    loop: Any = cls.forward if wrapper is None else wrapper.eager
    own = methods(cls)
    callees = {**(loop.__globals__ if is_plain(loop) else {}), **own}
    matches = known.look_up("experts", loop, callees, "its loop over experts", UNDESCRIBED)
    if isinstance(matches, str) and known.is_stated("experts", loop) and is_plain(own.get(GATE)):
        match = nominated(found, loop, known)
        return OTHER_GATE.format(GATE) if match is None else MatchCandidates([match])
    return matches if isinstance(matches, str) else MatchCandidates(matches)


BOUND = 0.75
SMALL_NUMBERS = {-1, 0, 1, 2}
"""Numbers that code between the products may have without being an input: halves, axes, and sums with one."""


def nominated(found: ModuleGroup, loop: Any, known: KnownCode) -> DefinitionMatch | None:
    """Return the Definition that code of another text computes, with the attributes that are its numbers; None without one."""
    module, gate = found.samples[0], methods(found.module_class)[GATE]
    read = [name for name in names_in_code(gate) if name in vars(module) and name not in module._modules]
    numbers = [one for one in gate.__code__.co_consts if type(one) in (int, float) and one not in SMALL_NUMBERS]
    plain = [one for one in known.nominated("experts") if not _has_codes(one.definition)]
    bounded = [name for name in read if name not in _unbounded(module)]
    for match in () if numbers or device_of(module).type == "meta" else plain:
        scalars = [name for name in _kept(match) if match.definition.inputs[name].is_scalar]
        for names in itertools.permutations(bounded) if len(bounded) == len(scalars) else ():
            attributes = {**match.code.attributes, **dict(zip(scalars, names, strict=True))}
            mark = fingerprint(loop) or ""
            tried = DefinitionMatch(match.definition, ModelCode(fingerprint=mark, attributes=attributes))
            other = copy.copy(module)
            # Bounds are also probed with numbers so small that all of them show.
            vars(other).update({name: BOUND * (place + 1) for place, name in enumerate(names)})
            probes = [probe(found, one, tried) for one in (module, other)]
            if all(
                not isinstance(one, str) and matching_definitions(one, [match.definition], known.catalog)
                for one in probes
            ):
                return tried
    return None


def _has_codes(definition: Definition) -> bool:
    return any(_is_code(definition, name) for name in definition.inputs)


def probe(found: ModuleGroup, module: Module, match: DefinitionMatch) -> Probe | str:
    """Run every implementation with small weights; all must compute the same bits."""
    reason = _why_not(module, match)
    if reason:
        return reason
    names = list(match.definition.inputs)
    inputs = drawn_for(match.definition, list(_kept(match)), names[: called_with(match.definition)], device_of(module))
    results = {}
    for name in _implementations(type(module).forward):
        try:
            results[name] = _run(module, match, inputs, name)
        except of_models() as error:  # a model's code may raise anything for other sizes, or have no kernel here
            message = " ".join(str(error).split())
            return f"its {name} experts cannot be probed: {type(error).__name__}: {message}"
    first, *others = results
    for name in others:
        if not torch.equal(results[first], results[name]):
            return f"in its probe, the {name} experts compute other bits than the {first} experts"
    if ROUTED in match.code.attributes and not _returns_input(module, match, inputs):
        return OTHER_IDENTITY.format(match.attribute(ROUTED))
    kept = _kept(match)
    numbers = {name: match.value(module, name) for name in kept if name not in inputs}
    return {**inputs, **numbers}, (results[first],)


def _returns_input(module: Module, match: DefinitionMatch, inputs: Mapping[str, torch.Tensor]) -> bool:
    """Return True if an expert without weights adds the token's hidden states times its share.

    It must do so alone and beside another expert.
    """
    x, ids, weights, *kept = inputs.values()
    ids = torch.cat([ids[:, :1], torch.full_like(ids[:, :1], EXPERTS)], dim=1)

    def run(shares: torch.Tensor) -> torch.Tensor:
        return _run(module, match, dict(zip(inputs, (x, ids, shares, *kept), strict=True)), EAGER)

    routed, other = (torch.where(ids < EXPERTS, weights, 0.0), torch.where(ids < EXPERTS, 0.0, weights))
    alone = unweighted(x, ids, other, EXPERTS)
    return torch.equal(run(other), alone) and torch.equal(run(weights), run(routed) + alone)


def unweighted(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, routed: int) -> torch.Tensor:
    """Return the share of experts that return their input: x [M, H], ids and weights [M, K] -> [M, H].

    Those are the experts from number ``routed`` on.
    """
    shares = weights.masked_fill(ids < routed, 0.0).sum(dim=-1, keepdim=True)
    return (x * shares).to(x.dtype)


def _implementations(forward: Any) -> Mapping[str, Any]:
    """Return implementation -> its function in the registry; a class without the wrapper has its loop alone."""
    return {EAGER: None} if wrapper_of(forward) is None else implementations(forward)


def _why_not(module: Module, match: DefinitionMatch) -> str:
    """Return the reason if a module cannot be served, whatever its code computes; empty if it can."""
    config = getattr(module, "config", None)
    if wrapper_of(unpatched_class(module).forward) is not None and not hasattr(config, "_experts_implementation"):
        return NO_CONFIG
    if GATE in vars(module):
        return OWN_GATE
    if getattr(module, "_is_expert_parallel", False):
        return SHARDED
    for name, attribute in _kept(match).items():
        if not hasattr(module, attribute):
            return f"it has no {attribute}, which serving.code of {match.definition.name} names"
        if match.definition.inputs[name].is_scalar:
            reason = match.why_no_number(module, name)
            if reason:
                return reason
            continue
        weight = module._parameters.get(attribute)
        if weight is None or type(weight.data) is not torch.Tensor or not weight.dtype.is_floating_point:
            kind = type(getattr(module, attribute)).__name__ if weight is None else type(weight.data).__name__
            dtype = "" if weight is None else f" of {weight.dtype}"
            return f"its {attribute} is a {kind}{dtype}, not a parameter of plain floating point"
        stated = match.definition.inputs[name].dtype
        if stated not in match.definition.dtypes and weight.dtype != getattr(torch, stated):
            return f"its {attribute} is a Tensor of {weight.dtype}; {match.definition.name} takes {stated}"
    return ""


def _kept(match: DefinitionMatch) -> dict[str, str]:
    """Return input of the Definition -> the module's attribute for it."""
    return {name: match.attribute(name) for name in list(match.definition.inputs)[called_with(match.definition) :]}


def _run(
    module: Module, match: DefinitionMatch, inputs: Mapping[str, torch.Tensor], implementation: str
) -> torch.Tensor:
    """Run one implementation with these weights; none of the module's submodules is called."""
    kept = {attribute: inputs[name] for name, attribute in _kept(match).items() if name in inputs}
    sizes = {"num_experts": EXPERTS, **_width(match, next(iter(inputs.values())))}
    if ROUTED in match.code.attributes:
        sizes = {match.attribute(ROUTED): EXPERTS, match.attribute(ALL): EXPERTS + 1}
    twin = _twin(module, kept, **sizes)
    vars(twin)["config"] = types.SimpleNamespace(_experts_implementation=implementation)
    name = match.attribute(ACTIVATION)
    activation = getattr(module, name, None)
    if isinstance(activation, Module):
        vars(twin)["_modules"] = {**module._modules, name: activation.forward}  # without its hooks
    with torch.no_grad():
        return _in_rows(type(module).forward, twin, list(inputs.values())[: called_with(match.definition)])


def _width(match: DefinitionMatch, states: torch.Tensor) -> dict[str, int]:
    """Return the attribute with the width of a token, if the code views its argument as a row per expert and token."""
    return {"hidden_size": states.shape[-1]} if _has_rows_of_all(match.definition) else {}


def _in_rows(forward: Callable[..., torch.Tensor], module: Module, given: Sequence[torch.Tensor]) -> torch.Tensor:
    """Run a forward of experts, which has hidden states and outputs as rows, on hidden states [M, H] or [E, S, H]."""
    states, *others = given
    return forward(module, states.reshape(-1, states.shape[-1]), *others).view(states.shape)


def _twin(module: Module, weights: Mapping[str, torch.Tensor], **changed: Any) -> Module:
    """Return a copy of a module with other weights and attributes; it shares everything else."""
    twin = copy.copy(module)
    vars(twin).update(changed)
    vars(twin)["_parameters"] = {**module._parameters, **weights}
    return twin


def own_code(found: ModuleGroup) -> OwnCode:
    """Return the current implementation, and the module's own code on the inputs of the Definition."""
    module = found.modules[0]
    way = EAGER if wrapper_of(unpatched_class(module).forward) is None else way_of(module)
    is_own = found.match is not None and ROUTED not in found.match.code.attributes
    return OwnCode(way, None if found.match is None or not is_own else _own_call(module, found.match))


def _own_call(module: Module, match: DefinitionMatch) -> Callable[..., Any]:
    """Return a call for every module of the site, with weights, limits and the number of experts as arguments."""
    kept, cls, count = _kept(match), unpatched_class(module), called_with(match.definition)
    bare = copy.copy(module)
    vars(bare)["_parameters"] = {}  # without weights: the call passes them

    def call(*inputs: Any) -> Any:
        weights, numbers = {}, {}
        for (name, attribute), value in zip(kept.items(), inputs[count:], strict=True):
            if not match.definition.inputs[name].is_scalar:
                weights[attribute] = value
            elif name not in match.code.constants:
                numbers[attribute] = value
        experts = next(iter(weights.values())).shape[0]
        sizes = {"num_experts": experts, **_width(match, inputs[0])}
        return _in_rows(cls.forward, _twin(bare, weights, **sizes, **numbers), inputs[:count])

    return call


def forward(stock: Any, calls: Sequence[PartCall]) -> Callable[..., Any]:
    """Return the forward of experts: hidden states [M, H], ids and weights [M, K] -> [M, H]."""
    ((found, site),) = calls
    match, module, wrapper = found.match, found.modules[0], wrapper_of(stock)
    assert match is not None, "only confirmed groups are patched"
    tensors = [name for name in _kept(match) if not match.definition.inputs[name].is_scalar]
    name = match.attribute(ACTIVATION)
    activation = (name, probed_activation(module, [name])) if hasattr(module, name) else None
    registry = None if wrapper is None else wrapper.registry
    own = ProbedExperts(
        registry, _implementations(stock), activation, _unbounded(module), match.code.attributes.get(ROUTED, "")
    )
    return experts_forward(stock, site, own, match, [match.attribute(one) for one in tensors])


class ProbedExperts(NamedTuple):
    """The probed code of a module: implementation -> its function in the registry, and its activation by name.

    ``registry`` is None for a class without the wrapper. The bounds ``unbounded`` were infinite. ``routed`` is the attribute with
    the number of experts that have weights, if others return their input.
    """

    registry: Any
    implementations: Mapping[str, Any]
    activation: tuple[str, Any] | None
    unbounded: tuple[str, ...] = ()
    routed: str = ""

    def way(self, module: Any) -> str:
        """Return the implementation that a module is set to."""
        return EAGER if self.registry is None else module.config._experts_implementation

    def why_other(self, module: Any) -> str:
        """Return the reason if a module no longer computes what was probed; empty if it does."""
        implementation, known = self.way(module), self.implementations
        if self.unbounded and any([getattr(module, name) != math.inf for name in self.unbounded]):
            return CHANGED
        if self.registry is not None and (
            implementation not in known or self.registry.get(implementation) is not known[implementation]
        ):
            return (
                f"the model's experts are {implementation!r}; only {', '.join(known)} are known to compute a definition"
            )
        if GATE in module.__dict__:
            return OWN_GATE
        if self.activation is not None and not is_as_probed(getattr(module, self.activation[0]), self.activation[1]):
            return OTHER_ACTIVATION
        return ""


def experts_forward(
    stock: Callable[..., Any], site: CallSite, own: ProbedExperts, match: DefinitionMatch, weights: Sequence[str]
) -> Callable[..., Any]:
    """Return the forward of experts, as :func:`forward` describes it.

    Args:
        own: the probed code.
        weights: the attributes that are tensors.
    """
    attributes, definition = _kept(match), match.definition
    names, count, has_rows_of_all = tuple(attributes), called_with(definition), _has_rows_of_all(definition)
    places = [names.index(name) for name, attribute in attributes.items() if attribute in weights]
    # Codes and their scales; the model's code gives them no gradient either.
    frozen = [place for place in places if definition.inputs[names[place]].dtype not in definition.dtypes]

    def serve(self: Any, given: Sequence[torch.Tensor]) -> torch.Tensor | None:
        out: torch.Tensor | None
        kept = [match.value(self, name) for name in names]
        routed = getattr(self, own.routed) if own.routed else None
        if routed is not None and isinstance(kept[0], torch.Tensor):
            kept[0] = kept[0][:routed]  # the model also has weights, which it never reads, for the others
        for place in frozen if torch.is_grad_enabled() else ():
            kept[place] = kept[place].detach()
        parameters = [
            kept[place] for place in places
        ]  # read once: each read of a parametrized weight computes it again
        if _is_compiling():
            return traced(self, given, kept, parameters)
        site.count_own_mode(own.way(self))
        if site.falls_back(self.training, *given, *parameters):
            return None
        reason = why_stock(given, parameters) or own.why_other(self)
        if (
            has_rows_of_all
            and not reason
            and (not given[0].is_contiguous() or given[0].shape[0] % parameters[0].shape[0])
        ):
            reason = NOT_CALLED_SO
        if reason:
            site.bypass(reason)
            return None
        if has_rows_of_all:
            states = given[0].view(parameters[0].shape[0], -1, given[0].shape[1])
            out = site.ask(self.training, states, *kept)
            return None if out is None else out.view(given[0].shape)
        out = site.ask(self.training, *given, *kept)
        return out if out is None or routed is None else out + unweighted(given[0], given[1], given[2], routed)

    def traced(self: Any, given: Sequence[torch.Tensor], kept: list[Any], parameters: list[Any]) -> torch.Tensor | None:
        if own.way(self) == EAGER:
            return None  # a loop over the router's choice has no operation that a compiler could replace by a kernel
        operator = site.traced(self.training, given[0], *(kept[place] for place in places if place not in frozen))
        wants_gradient = torch.is_grad_enabled() and given[-1].requires_grad
        if operator is None or wants_gradient or why_stock(given, parameters) or own.why_other(self):
            return None
        return operator.call(*given, *kept, operator.name)  # type: ignore[no-any-return]

    @functools.wraps(stock)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Models call experts by position. Parameter names differ between models, so a call by keyword goes to stock.
        out = serve(self, args) if len(args) == count and not kwargs else None
        return stock(self, *args, **kwargs) if out is None else out

    return forward


def why_stock(given: Sequence[Any], weights: Sequence[Any]) -> str:
    """Return the reason if no kernel may be asked for a call; empty if one may.

    Args:
        weights: the module's weights; other kinds than plain tensors are quantised or distributed over several GPUs.
    """
    if any([type(value) is not torch.Tensor or value.dim() != 2 for value in given]):
        return NOT_CALLED_SO
    if any([type(weight) not in (torch.Tensor, torch.nn.Parameter) for weight in weights]):
        return NOT_PLAIN
    return AUTOCAST if not given[0].is_meta and torch.is_autocast_enabled(given[0].device.type) else ""


# ---- drawn experts --------------------------------------------------------------------------------
# Random inputs for probing experts. The order of additions does not change a bit of their results.

EXPERTS = 4
SIZES = {"M": 6, "K": 2, "E": EXPERTS, "H": 16, "I": 8}
"""Two choices per token, because the loop over experts rounds after each choice, and other implementations after all."""
SPREAD = 4.0
"""Standard deviation of the hidden states, so large that a clamp of gates shows."""
BLOCKS = 2
"""Blocks of FP8 codes, and so scales, in each direction."""
FIRST_SCALE = 2.0**-8
"""Scale of the codes of the first product, which makes gates as large."""
LAST_SCALES = (0.25, 0.5, 1.0, 2.0)
"""Scales of the second product. They are powers of two, because its inputs have scales of many bits and these must not round."""


def drawn_for(
    definition: Definition, kept: Sequence[str], names: Sequence[str], device: torch.device
) -> dict[str, torch.Tensor]:
    """Return every tensor of a Definition of experts, by name.

    Args:
        kept: the inputs that a module keeps.
        names: hidden states, or hidden states, ids and weights.
    """
    draw, sizes = Draw(device), {**dict.fromkeys(definition.axes, SIZES["H"]), **SIZES}
    x, *routing = names
    blocks = [axis.value for axis in definition.axes.values() if axis.value is not None]
    has_codes = any(_is_code(definition, name) for name in kept)
    if has_codes:
        sizes.update({name: axis.value for name, axis in definition.axes.items() if axis.value is not None})
        sizes.update(dict.fromkeys(("H", "I"), BLOCKS * max(blocks)))
        states = activation(draw, sizes["M"], sizes["H"], max(blocks))
    else:
        states = SPREAD * draw(*definition.shape_of(x, sizes))
    inputs = {x: states}
    if routing:
        ids, weights = routing
        inputs[ids] = draw(sizes["M"], sizes["E"]).float().argsort(dim=-1)[:, : sizes["K"]].contiguous()
        inputs[weights] = draw(sizes["M"], sizes["K"])
    tensors = [name for name in kept if not definition.inputs[name].is_scalar]
    return {**inputs, **(_codes if has_codes else _matrices)(definition, tensors, sizes, draw)}


def _is_code(definition: Definition, name: str) -> bool:
    return definition.inputs[name].dtype == str(CODES).removeprefix("torch.")


def _matrices(
    definition: Definition, names: Sequence[str], sizes: Mapping[str, int], draw: Draw
) -> dict[str, torch.Tensor]:
    """Draw weights for which every sum has two terms, so that the order of additions does not change its rounding."""
    found = {}
    for name in names:
        shape = definition.shape_of(name, sizes)
        matrices = [draw.mixing(*shape[1:]) for _ in range(shape[0])] if len(shape) == 3 else []
        found[name] = torch.stack(matrices) if matrices else draw(*shape)
    return found


def _codes(
    definition: Definition, names: Sequence[str], sizes: Mapping[str, int], draw: Draw
) -> dict[str, torch.Tensor]:
    """Draw codes with scales such that each output takes one code."""
    found, is_first = {}, True
    for name in names:
        shape = definition.shape_of(name, sizes)
        if _is_code(definition, name):
            matrices = [single(draw, *shape[1:]) for _ in range(shape[0])]
            found[name] = (torch.stack(matrices) * choice(draw, WEIGHTS, *shape)).to(CODES)
            scales, is_first = ([FIRST_SCALE * value for value in WEIGHT_SCALES] if is_first else LAST_SCALES), False
        else:
            found[name] = choice(draw, scales, *shape).float()
    return found
