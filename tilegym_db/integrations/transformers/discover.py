"""Finds the call sites of a model that a Definition describes. Looks, never touches.

What a module may be is judged by what it holds and what its code calls; which variant it is, by the fingerprint of that code;
whether that is so, by a probe. No list of models is consulted.
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import torch

from tilegym_db.catalog import Catalog
from tilegym_db.integrations.transformers.attention import DECODE, PREFILL, REGISTRY, sdpa_function
from tilegym_db.integrations.transformers.fingerprint import fingerprint
from tilegym_db.integrations.transformers.fusion import fused_norms, plain_forward
from tilegym_db.integrations.transformers.probe import (
    ROWS,
    Probe,
    matches,
    probe_add_norm,
    probe_attention,
    probe_mlp,
    probe_norm,
    probe_rope,
)
from tilegym_db.integrations.transformers.variants import (
    ATTENTIONS,
    FUSED_WITH_ADD,
    MLPS,
    NORMS,
    ROPES,
    Variant,
    rivals,
)

__all__ = ["Found", "discover", "probed_activation"]

ROTARY = "apply_rotary"
ACTIVATIONS = ("act_fn", "activation_fn")
NORM_CALLS = ("rsqrt", "rms_norm")

REPLACED = "its forward is already replaced on the instance (accelerate, Liger or kernels?); left alone"
WRAPPED = "its forward is wrapped by a decorator, whose part is not known"
NOT_IN_MEMORY = "its weights are not in memory"


@dataclass(frozen=True)
class Found:
    """All modules of one class that play one part in the model.

    ``kind``: norm, mlp, rope, attention or add_norm; ``function`` names the rotary function of a rope, the norm that a layer
    calls with its residual sum, and the Definition that some calls of an attention are. ``reason`` says why the site stays
    stock; empty where it may be patched.
    """

    kind: str
    module_class: type[torch.nn.Module]
    modules: tuple[torch.nn.Module, ...]
    function: str = ""
    definition: str = ""
    variant: Variant | None = None
    reason: str = ""


def discover(model: torch.nn.Module, catalog: Catalog) -> list[Found]:
    """Every group of modules that looks like a norm, a gated MLP, attention (its rotary embedding, its prompts, its single
    positions), or a layer that norms its residual sum.
    """
    groups: dict[tuple[str, str, type[torch.nn.Module], int | None, bool], list[torch.nn.Module]] = {}
    for module in model.modules():
        for kind, function in _parts(module):
            activation = id(probed_activation(module)) if kind == "mlp" else None
            key = (kind, function, type(module), activation, "forward" in vars(module))
            groups.setdefault(key, []).append(module)
    found = [
        _judge(Found(kind, type(modules[0]), tuple(modules), function), catalog)
        for (kind, function, *_), modules in groups.items()
    ]
    return [*found, *_add_norms(model, found, catalog)]


def probed_activation(module: torch.nn.Module) -> Any:
    """What the activation of a gated MLP is known by: the class of a module, or the function itself."""
    activation: Any = next((getattr(module, name) for name in ACTIVATIONS if hasattr(module, name)), None)
    return type(activation) if isinstance(activation, torch.nn.Module) else activation


# -- what part a module may play --------------------------------------------------------------------------------------


def _parts(module: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """(kind, function) of every part that the module plays."""
    names = _names(type(module).forward)
    rotary = [name for name in names if name.startswith(ROTARY)]
    if rotary or REGISTRY in names:
        yield from (("rope", name) for name in rotary)
        yield from (("attention", name) for name in (PREFILL, DECODE) if REGISTRY in names)
    elif "down_proj" in {*module._modules, *module._parameters}:
        yield "mlp", ""
    elif not module._modules and _has_a_vector(module) and _normalises(type(module)):
        yield "norm", ""


def _has_a_vector(module: torch.nn.Module) -> bool:
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() == 1


def _names(function: Any) -> tuple[str, ...]:
    """The globals and attributes that a function's code names."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return () if code is None else tuple(code.co_names)


def _normalises(cls: type[torch.nn.Module]) -> bool:
    own = cls.__mro__[: cls.__mro__.index(torch.nn.Module)]
    methods = [value for owner in own for value in vars(owner).values() if isinstance(value, FunctionType)]
    return any(name in _names(method) for method in methods for name in NORM_CALLS)


# -- which variant it is, and whether it may be patched ---------------------------------------------------------------


def _judge(found: Found, catalog: Catalog) -> Found:
    if "forward" in vars(found.modules[0]):
        return replace(found, reason=REPLACED)
    variant = _nominate(found)
    if isinstance(variant, str):
        return replace(found, reason=variant)
    confirmed = {_confirm(found, module, variant, catalog) for module in _distinct(found)}
    refusals = sorted(reason for _, reason in confirmed if reason)
    definitions = sorted(name for name, _ in confirmed if name)
    unconfirmed = found.function if found.kind == "attention" else variant.definitions[0]
    definition = definitions[0] if definitions else unconfirmed
    reason = refusals[0] if refusals else ""
    if len(definitions) > 1:
        reason = f"its modules compute different definitions: {', '.join(definitions)}"
    return replace(found, definition=definition, variant=variant, reason=reason)


def _nominate(found: Found) -> Variant | str:
    """The variant that the code looks like, or why there is none."""
    forward: Any = found.module_class.forward
    if hasattr(forward, "__wrapped__"):
        return WRAPPED
    if found.kind == "attention":
        sdpa = sdpa_function(forward)
        return _look_up(ATTENTIONS, sdpa, getattr(sdpa, "__globals__", {}), "the sdpa attention in its registry")
    if found.kind != "rope":
        table, what = (NORMS, "norm") if found.kind == "norm" else (MLPS, "mlp")
        return _look_up(table, forward, _methods(found.module_class), f"its {what} forward")
    function = forward.__globals__.get(found.function)
    if not isinstance(function, FunctionType):
        kind = type(function).__name__
        return f"its {found.function} is of type {kind}, not a plain function (replaced by the kernels package?)"
    return _look_up(ROPES, function, function.__globals__, f"its {found.function}")


def _methods(cls: type[torch.nn.Module]) -> Mapping[str, Any]:
    """The methods of a class and its bases, the class's own ones first."""
    return {name: value for owner in reversed(cls.__mro__) for name, value in vars(owner).items()}


def _look_up(table: Mapping[str, Variant], function: Any, callees: Mapping[str, Any], what: str) -> Variant | str:
    variant = table.get(fingerprint(function) or "")
    if variant is None:
        return f"{what} is no variant that is known"
    for name, known in variant.calls.items():
        if fingerprint(callees.get(name)) != known:
            return f"{what} relies on a {name} that is not the one known with it"
    return variant.reason or variant


def _confirm(found: Found, module: torch.nn.Module, variant: Variant, catalog: Catalog) -> tuple[str, str]:
    """(Definition, reason): one of them is empty."""
    if found.kind == "norm":
        weight: Any = module.weight
        if type(weight.data) is not torch.Tensor or not weight.dtype.is_floating_point:
            return "", f"its weight is a {type(weight.data).__name__} of {weight.dtype}, not plain floating point"
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    if device.type == "meta":
        return "", NOT_IN_MEMORY
    candidates = (found.function,) if found.kind == "attention" else variant.definitions
    missing = [name for name in candidates if name not in catalog.definitions]
    if missing:
        return "", f"the catalog has no definition {missing[0]}"
    # A norm must also differ from the norms that it is not: they take the same arguments.
    names = rivals(NORMS) if found.kind == "norm" else candidates
    matched = matches(_probe(found, module, variant, device), names, catalog)
    if len(matched) == 1 and matched[0] in candidates:
        return matched[0], ""
    expected = " or ".join(candidates)
    if not matched:
        return "", f"probed, it does not give the bits of {expected}"
    return "", f"probed, it gives the bits of {' and '.join(matched)}; expected were those of {expected} alone"


def _probe(found: Found, module: torch.nn.Module, variant: Variant, device: torch.device) -> Probe:
    if found.kind == "norm":
        return probe_norm(module, variant.eps_attribute)
    if found.kind == "mlp":
        activation: Any = getattr(module, variant.activation_attribute)
        return probe_mlp(activation, device, packed=variant.packed)
    forward: Any = type(module).forward
    if found.kind == "attention":
        return probe_attention(sdpa_function(forward), device, queries=ROWS if found.function == PREFILL else 1)
    return probe_rope(forward.__globals__[found.function], device, partial=variant.partial)


def _distinct(found: Found) -> Iterator[torch.nn.Module]:
    """The modules to probe: a norm speaks for its size, dtype and device, attention for its device, an MLP for itself."""
    seen = set()
    for module in found.modules:
        parameter = next(module.parameters(), None)
        detail: Hashable = None if parameter is None else parameter.device
        if found.kind == "norm" and parameter is not None:
            detail = (parameter.shape, parameter.dtype, parameter.device)
        if found.kind == "mlp" or detail not in seen:
            seen.add(detail)
            yield module


# -- a residual sum and its norm, which two modules compute -----------------------------------------------------------


def _add_norms(model: torch.nn.Module, found: list[Found], catalog: Catalog) -> Iterator[Found]:
    """The layers that add to their residual stream and norm the sum with a norm that was found."""
    norms = {id(module): index for index, group in enumerate(found) if group.kind == "norm" for module in group.modules}
    layers: dict[tuple[type[torch.nn.Module], str, int, bool], list[torch.nn.Module]] = {}
    for module in model.modules():
        called = {name: norms[id(child)] for name, child in module._modules.items() if id(child) in norms}
        forward = plain_forward(type(module)) if called else None
        name = next((name for name in fused_norms(forward) if name in called), None) if forward is not None else None
        if name is not None:
            layers.setdefault((type(module), name, called[name], "forward" in vars(module)), []).append(module)
    for (cls, name, index, _), modules in layers.items():
        yield _judge_add_norm(Found("add_norm", cls, tuple(modules), name), found[index], catalog)


def _judge_add_norm(found: Found, norm: Found, catalog: Catalog) -> Found:
    if "forward" in vars(found.modules[0]):
        return replace(found, reason=REPLACED)
    if norm.reason or norm.variant is None:
        return replace(found, reason=f"its {found.function} stays stock: {norm.reason}")
    definition = FUSED_WITH_ADD.get(norm.definition, "")
    if not definition:
        return replace(found, reason=f"no definition describes a residual sum and {norm.definition} of it")
    found = replace(found, definition=definition, variant=norm.variant)
    if definition not in catalog.definitions:
        return replace(found, reason=f"the catalog has no definition {definition}")
    probe = probe_add_norm(getattr(found.modules[0], found.function), norm.variant.eps_attribute)
    if not matches(probe, [definition], catalog):
        return replace(found, reason=f"probed, a sum and {found.function} do not give the bits of {definition}")
    return found
