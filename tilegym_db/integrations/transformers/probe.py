"""Confirms by running it that a piece of a model computes what its fingerprint says: bit for bit, on random bf16 data.

Always in bf16 and with random weights, whatever the model holds: in fp32, or with weights of one, variants that round at
different places agree. Nothing of the model is changed, none of its hooks runs, and the global random state is untouched.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from tilegym_db.records import Definition
from tilegym_db.verify.reference import run_reference

__all__ = ["probe_mlp", "probe_norm", "probe_rope"]

SHAPE = (5, 64)
SEED = 1234


def probe_norm(module: torch.nn.Module, definition: Definition, eps_attribute: str) -> str | None:
    """Why the norm does not compute ``definition``, or None where it does."""
    weight: torch.Tensor = module.weight  # type: ignore[assignment]
    draw = _Draw(weight.device)
    x, random_weight = draw(SHAPE[0], weight.shape[0]), draw(weight.shape[0])
    twin = copy.copy(module)
    vars(twin)["_parameters"] = {"weight": torch.nn.Parameter(random_weight, requires_grad=False)}
    with torch.no_grad():
        stock = type(module).forward(twin, x)
    eps = getattr(module, eps_attribute)
    return _compare(stock, definition, {"x": x, "weight": random_weight, "eps": eps})


def probe_mlp(activation: Callable[..., Any], definition: Definition, device: torch.device) -> str | None:
    """Why ``activation(a) * b`` does not compute ``definition``, or None where it does."""
    draw = _Draw(device)
    a, b = draw(*SHAPE), draw(*SHAPE)
    function = activation.forward if isinstance(activation, torch.nn.Module) else activation
    with torch.no_grad():
        stock = function(a) * b
    return _compare(stock, definition, {"a": a, "b": b})


def probe_rope(function: Callable[..., Any], definition: Definition, device: torch.device) -> str | None:
    """Why the function does not compute ``definition``, or None where it does."""
    draw = _Draw(device)
    length, dim = SHAPE
    # Tables whose halves differ: a variant that reads one half only is another one.
    shapes = {"q": (2, 4, length, dim), "k": (2, 2, length, dim), "cos": (2, length, dim), "sin": (2, length, dim)}
    inputs = {name: draw(*shape) for name, shape in shapes.items()}
    with torch.no_grad():
        stock = function(*inputs.values())
    return _compare(stock, definition, inputs)


class _Draw:
    """Random bf16 tensors on one device from a generator of their own."""

    def __init__(self, device: torch.device) -> None:
        self._generator = torch.Generator(device).manual_seed(SEED)

    def __call__(self, *shape: int) -> torch.Tensor:
        drawn = torch.randn(shape, generator=self._generator, device=self._generator.device)
        return drawn.to(torch.bfloat16)


def _compare(stock: Any, definition: Definition, inputs: dict[str, Any]) -> str | None:
    expected = run_reference(definition, inputs)
    returned = stock if isinstance(stock, tuple) else (stock,)
    for (name, want), got in zip(expected.items(), returned, strict=True):
        if got.shape != want.shape or got.dtype != want.dtype or not torch.equal(got, want):
            return f"probed, it does not give the bits of {definition.name} ('{name}' differs)"
    return None
