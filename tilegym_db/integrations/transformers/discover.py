"""Finds the call sites of a model that a Definition describes. Looks, never touches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch

from tilegym_db.catalog import Catalog
from tilegym_db.integrations.transformers.fingerprint import fingerprint
from tilegym_db.integrations.transformers.probe import probe_mlp, probe_norm, probe_rope
from tilegym_db.integrations.transformers.variants import MLPS, NORMS, ROPES, ROTATE_HALF, Variant

__all__ = ["Found", "discover"]

ROPE_FUNCTION = "apply_rotary_pos_emb"


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
    groups: dict[tuple[str, type[torch.nn.Module], Any], list[torch.nn.Module]] = {}
    for module in model.modules():
        kind = _kind(module)
        if kind is not None:
            detail = _act_class(module) if kind == "mlp" else None
            groups.setdefault((kind, type(module), detail), []).append(module)
    return [_judge(kind, cls, tuple(modules), catalog) for (kind, cls, _), modules in groups.items()]


def _kind(module: torch.nn.Module) -> str | None:
    """What part a module may play, judged by what it holds."""
    if isinstance(getattr(module, "weight", None), torch.nn.Parameter) and "RMSNorm" in type(module).__name__:
        return "norm"
    children = dict(module.named_children())
    if {"gate_proj", "up_proj", "down_proj"} <= set(children) and hasattr(module, "act_fn"):
        return "mlp"
    if "q_proj" in children and _global(type(module).forward, ROPE_FUNCTION) is not None:
        return "rope"
    return None


def _act_class(module: torch.nn.Module) -> Any:
    activation = module.act_fn
    return type(activation) if isinstance(activation, torch.nn.Module) else activation


def _judge(kind: str, cls: type[torch.nn.Module], modules: tuple[torch.nn.Module, ...], catalog: Catalog) -> Found:
    overridden = [module for module in modules if "forward" in vars(module)]
    if overridden:
        reason = "its forward is already replaced on the instance (accelerate, Liger or kernels?); left alone"
        return Found(kind, cls, modules, reason=reason)
    variant = _nominate(kind, cls)
    if isinstance(variant, str):
        return Found(kind, cls, modules, reason=variant)
    refusals = (_probe(kind, module, variant, catalog) for module in _distinct(kind, modules))
    refusal = next((text for text in refusals if text), "")
    return Found(kind, cls, modules, variant.definition, variant.eps_attribute, refusal)


def _nominate(kind: str, cls: type[torch.nn.Module]) -> Variant | str:
    forward: Any = cls.forward
    if kind == "rope":
        function = _global(forward, ROPE_FUNCTION)
        half = _global(function, "rotate_half") if function is not None else None
        if function is None or half is None or fingerprint(half) not in ROTATE_HALF:
            return "its rotary function is no variant that is known"
        return ROPES.get(fingerprint(function) or "", f"its {ROPE_FUNCTION} is no variant that is known")
    table = NORMS if kind == "norm" else MLPS
    return table.get(fingerprint(forward) or "", f"its {kind} forward is no variant that is known")


def _probe(kind: str, module: torch.nn.Module, variant: Variant, catalog: Catalog) -> str | None:
    definition = catalog.definition(variant.definition)
    parameter = next(module.parameters(), None)
    if parameter is None or parameter.device.type == "meta" or not parameter.dtype.is_floating_point:
        return "its weights are not in memory, or not plain floating point"
    if type(parameter.data) is not torch.Tensor:
        return f"its weights are {type(parameter.data).__name__}, not plain tensors"
    if kind == "norm":
        return probe_norm(module, definition, getattr(module, variant.eps_attribute))
    if kind == "mlp":
        return probe_mlp(module.act_fn, definition, parameter)  # type: ignore[arg-type]
    function = _global(type(module).forward, ROPE_FUNCTION)
    assert function is not None
    return probe_rope(function, definition, int(module.head_dim), parameter)  # type: ignore[arg-type]


def _distinct(kind: str, modules: tuple[torch.nn.Module, ...]) -> Iterator[torch.nn.Module]:
    """One module per distinct size, dtype and device: the probe of one speaks for its likes."""
    seen = set()
    for module in modules:
        parameter = next(module.parameters(), None)
        detail = None if parameter is None else (tuple(parameter.shape), parameter.dtype, parameter.device)
        if detail not in seen:
            seen.add(detail)
            yield module


def _global(function: Any, name: str) -> Callable[..., Any] | None:
    """The plain Python function that ``function`` calls by this global name, or None."""
    function = _unwrapped(function)
    if function is None or name not in function.__code__.co_names:
        return None
    found = function.__globals__.get(name)
    return found if isinstance(found, FunctionType) else None


def _unwrapped(function: Any) -> FunctionType | None:
    """The function whose code runs, where nothing is wrapped around it."""
    return function if isinstance(function, FunctionType) and function.__module__ in sys.modules else None
