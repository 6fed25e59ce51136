"""Confirms by running it that a piece of a model computes what its fingerprint says: bit for bit, on random bf16 data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tilegym_db.records import Definition
from tilegym_db.verify.reference import run_reference

__all__ = ["probe_mlp", "probe_norm", "probe_rope"]

ROWS = 3
SEED = 1234


def probe_norm(module: torch.nn.Module, definition: Definition, eps: float) -> str | None:
    """Why the norm does not compute ``definition``, or None where it does."""
    weight: torch.Tensor = module.weight  # type: ignore[assignment]
    x = _random((ROWS, weight.shape[0]), weight)
    with torch.no_grad():
        stock = type(module).forward(module, x)
    return _compare(stock, definition, {"x": x, "weight": weight.detach(), "eps": eps})


def probe_mlp(
    activation: Callable[[torch.Tensor], torch.Tensor], definition: Definition, like: torch.Tensor
) -> str | None:
    """Why ``activation(a) * b`` does not compute ``definition``, or None where it does."""
    a, b = _random((ROWS, 64), like), _random((ROWS, 64), like, seed=SEED + 1)
    with torch.no_grad():
        stock = activation(a) * b
    return _compare(stock, definition, {"a": a, "b": b})


def probe_rope(function: Callable[..., Any], definition: Definition, head_dim: int, like: torch.Tensor) -> str | None:
    """Why the function does not compute ``definition``, or None where it does."""
    q, k = _random((1, 2, ROWS, head_dim), like), _random((1, 1, ROWS, head_dim), like, seed=SEED + 1)
    angles = torch.linspace(0.0, 3.0, ROWS * head_dim, device=like.device).reshape(1, ROWS, head_dim)
    inputs = {"q": q, "k": k, "cos": angles.cos().to(q.dtype), "sin": angles.sin().to(q.dtype)}
    with torch.no_grad():
        stock = function(*inputs.values())
    return _compare(stock, definition, inputs)


def _random(shape: tuple[int, ...], like: torch.Tensor, seed: int = SEED) -> torch.Tensor:
    generator = torch.Generator(like.device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=like.device).to(like.dtype)


def _compare(stock: Any, definition: Definition, inputs: dict[str, Any]) -> str | None:
    expected = run_reference(definition, inputs)
    returned = stock if isinstance(stock, tuple) else (stock,)
    for (name, want), got in zip(expected.items(), returned, strict=True):
        if got.shape != want.shape or got.dtype != want.dtype or not torch.equal(got, want):
            return f"probed, it does not give the bits of {definition.name} ('{name}' differs)"
    return None
