"""Finds the call sites of a model that a Definition describes. Looks, never touches.

What a module may be is judged by what it holds and what its code calls; which variant it is, by the fingerprint of that code;
whether that is so, by a probe. No list of models is consulted.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch

from tilegym_db.catalog import Catalog
from tilegym_db.integrations.transformers.fingerprint import fingerprint
from tilegym_db.integrations.transformers.probe import probe_mlp, probe_norm, probe_rope
from tilegym_db.integrations.transformers.variants import MLPS, NORMS, ROPES, ROTATE_HALF, Variant

__all__ = ["ROPE_FUNCTION", "Found", "discover", "probed_activation"]

ROPE_FUNCTION = "apply_rotary_pos_emb"
ACTIVATIONS = ("act_fn", "activation_fn")
NORM_CALLS = ("rsqrt", "rms_norm")

REPLACED = "its forward is already replaced on the instance (accelerate, Liger or kernels?); left alone"
NOT_IN_MEMORY = "its weights are not in memory"


@dataclass(frozen=True)
class Found:
    """All modules of one class that play one part in the model.

    ``kind``: norm, mlp or rope. ``reason`` says why the site stays stock; empty where it may be patched.
    """

    kind: str
    module_class: type[torch.nn.Module]
    modules: tuple[torch.nn.Module, ...]
    definition: str = ""
    eps_attribute: str = ""
    reason: str = ""


def discover(model: torch.nn.Module, catalog: Catalog) -> list[Found]:
    """Every group of modules that looks like a norm, a gated MLP, or attention with rotary embeddings."""
    groups: dict[tuple[str, type[torch.nn.Module], int | None, bool], list[torch.nn.Module]] = {}
    for module in model.modules():
        kind = _kind(module)
        if kind is not None:
            detail = id(probed_activation(module)) if kind == "mlp" else None
            groups.setdefault((kind, type(module), detail, "forward" in vars(module)), []).append(module)
    return [_judge(kind, tuple(modules), catalog) for (kind, *_), modules in groups.items()]


def probed_activation(module: torch.nn.Module) -> Any:
    """What the activation of a gated MLP is known by: the class of a module, or the function itself."""
    activation: Any = next((getattr(module, name) for name in ACTIVATIONS if hasattr(module, name)), None)
    return type(activation) if isinstance(activation, torch.nn.Module) else activation


# -- what part a module may play --------------------------------------------------------------------------------------


def _kind(module: torch.nn.Module) -> str | None:
    if _calls(type(module).forward, ROPE_FUNCTION):
        return "rope"
    if "down_proj" in {*module._modules, *module._parameters} and any(hasattr(module, name) for name in ACTIVATIONS):
        return "mlp"
    weight = module._parameters.get("weight")
    if weight is not None and weight.dim() == 1 and not module._modules and _normalises(type(module)):
        return "norm"
    return None


def _calls(function: Any, name: str) -> bool:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code is not None and name in code.co_names


def _normalises(cls: type[torch.nn.Module]) -> bool:
    own = cls.__mro__[: cls.__mro__.index(torch.nn.Module)]
    methods = [value for owner in own for value in vars(owner).values() if isinstance(value, FunctionType)]
    return any(_calls(method, name) for method in methods for name in NORM_CALLS)


# -- which variant it is, and whether it may be patched ---------------------------------------------------------------


def _judge(kind: str, modules: tuple[torch.nn.Module, ...], catalog: Catalog) -> Found:
    cls = type(modules[0])
    if "forward" in vars(modules[0]):
        return Found(kind, cls, modules, reason=REPLACED)
    variant = _nominate(kind, cls)
    if isinstance(variant, str):
        return Found(kind, cls, modules, reason=variant)
    refusals = (_probe(kind, module, variant, catalog) for module in _distinct(kind, modules))
    refusal = next((text for text in refusals if text), "")
    return Found(kind, cls, modules, variant.definition, variant.eps_attribute, refusal)


def _nominate(kind: str, cls: type[torch.nn.Module]) -> Variant | str:
    forward: Any = cls.forward
    if hasattr(forward, "__wrapped__"):
        return "its forward is wrapped by a decorator, whose part is not known"
    if kind == "rope":
        return _nominate_rope(forward.__globals__.get(ROPE_FUNCTION))
    table = NORMS if kind == "norm" else MLPS
    return table.get(fingerprint(forward) or "", f"its {kind} forward is no variant that is known")


def _nominate_rope(function: Any) -> Variant | str:
    if not isinstance(function, FunctionType):
        found = type(function).__name__
        return f"its {ROPE_FUNCTION} is of type {found}, not a plain function (replaced by the kernels package?)"
    if fingerprint(function.__globals__.get("rotate_half")) not in ROTATE_HALF:
        return f"its {ROPE_FUNCTION} rotates in no way that is known"
    return ROPES.get(fingerprint(function) or "", f"its {ROPE_FUNCTION} is no variant that is known")


def _probe(kind: str, module: torch.nn.Module, variant: Variant, catalog: Catalog) -> str | None:
    definition = catalog.definition(variant.definition)
    if kind == "norm":
        weight: Any = module.weight
        if type(weight.data) is not torch.Tensor or not weight.dtype.is_floating_point:
            return f"its weight is a {type(weight.data).__name__} of {weight.dtype}, not plain floating point"
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    if device.type == "meta":
        return NOT_IN_MEMORY
    if kind == "norm":
        return probe_norm(module, definition, variant.eps_attribute)
    if kind == "mlp":
        return probe_mlp(module.act_fn, definition, device)  # type: ignore[arg-type]
    forward: Any = type(module).forward
    rotate: Callable[..., Any] = forward.__globals__[ROPE_FUNCTION]
    return probe_rope(rotate, definition, device)


def _distinct(kind: str, modules: tuple[torch.nn.Module, ...]) -> Iterator[torch.nn.Module]:
    """The modules to probe: a norm speaks for its size, dtype and device, attention for its device, an MLP for itself."""
    seen = set()
    for module in modules:
        parameter = next(module.parameters(), None)
        detail: Hashable = None if parameter is None else parameter.device
        if kind == "norm" and parameter is not None:
            detail = (parameter.shape, parameter.dtype, parameter.device)
        if kind == "mlp" or detail not in seen:
            seen.add(detail)
            yield module
