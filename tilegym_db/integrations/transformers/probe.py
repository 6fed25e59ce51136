"""Confirms by running it which Definition a piece of a model computes: bit for bit, on random bf16 data.

Always in bf16 and with random weights, whatever the model holds: in fp32, or with weights of one, variants that round at
different places agree. What is compared with is the Definition's stock solution, the code that kernels are measured
against, else its reference. Nothing of the model is changed, none of its hooks runs, and the global random state is untouched.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilegym_db.catalog import Catalog
from tilegym_db.records import Definition
from tilegym_db.resolver.loader import load_verified
from tilegym_db.resolver.resolve import stock_solution
from tilegym_db.verify.reference import run_reference

__all__ = ["Probe", "matches", "probe_add_norm", "probe_attention", "probe_mlp", "probe_norm", "probe_rope"]

ROWS, SIZE = 5, 64
SEED = 1234
ATTENTION_SCALE = 0.3

Probe = tuple[dict[str, Any], tuple[torch.Tensor, ...]]
"""The inputs of a piece of a model by their names in the Definition, and what it returned for them."""


def probe_norm(module: torch.nn.Module, eps_attribute: str) -> Probe:
    """Run a norm of any size on random rows with a random weight."""
    twin, x, weight = _random_norm(module, _Draw(module.weight.device))  # type: ignore[arg-type]
    with torch.no_grad():
        out = type(module).forward(twin, x)
    return {"x": x, "weight": weight, "eps": getattr(module, eps_attribute)}, (out,)


def probe_add_norm(module: torch.nn.Module, eps_attribute: str) -> Probe:
    """Add random rows to a random residual and run a norm on the sum; returns the norm and the sum."""
    draw = _Draw(module.weight.device)  # type: ignore[arg-type]
    twin, x, weight = _random_norm(module, draw)
    residual = draw(*x.shape)
    with torch.no_grad():
        total = residual + x
        out = type(module).forward(twin, total)
    inputs = {"x": x, "residual": residual, "weight": weight, "eps": getattr(module, eps_attribute)}
    return inputs, (out, total)


def _random_norm(module: torch.nn.Module, draw: _Draw) -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    """(a copy of the norm with a random weight, random rows for it, the weight)."""
    size = module.weight.shape[0]  # type: ignore[index]
    x, weight = draw(max(ROWS, 512 // size), size), draw(size)  # type: ignore[arg-type]
    twin = copy.copy(module)
    vars(twin)["_parameters"] = {"weight": torch.nn.Parameter(weight, requires_grad=False)}
    return twin, x, weight


def probe_mlp(activation: Callable[..., Any], device: torch.device, *, packed: bool) -> Probe:
    """Run ``activation(gate) * up`` on a gate and an up projection, or on halves of a packed one."""
    function = activation.forward if isinstance(activation, torch.nn.Module) else activation
    both = _Draw(device)(ROWS, 2 * SIZE)
    gate, up = both.chunk(2, dim=-1)
    inputs = {"x": both} if packed else {"a": gate.contiguous(), "b": up.contiguous()}
    with torch.no_grad():
        return inputs, (up * function(gate),)


def probe_rope(function: Callable[..., Any], device: torch.device, *, partial: bool) -> Probe:
    """Run a rotary function on q and k, with tables of a head's width or of half of it."""
    draw, width = _Draw(device), SIZE // 2 if partial else SIZE
    # Tables whose halves differ: a variant that reads one half only is another one.
    shapes = {"q": (2, 4, ROWS, SIZE), "k": (2, 2, ROWS, SIZE), "cos": (2, ROWS, width), "sin": (2, ROWS, width)}
    inputs = {name: draw(*shape) for name, shape in shapes.items()}
    with torch.no_grad():
        return inputs, tuple(function(*inputs.values()))


def probe_attention(function: Callable[..., Any], device: torch.device, *, queries: int) -> Probe:
    """Run an attention function on the last so many positions of a few, with two query heads to a key head."""
    draw = _Draw(device)
    inputs: dict[str, Any] = {"q": draw(2, 4, queries, SIZE), "k": draw(2, 2, ROWS, SIZE), "v": draw(2, 2, ROWS, SIZE)}
    module = types.SimpleNamespace(num_key_value_groups=2, is_causal=True, training=False)
    with torch.no_grad():
        out, _ = function(module, *inputs.values(), None, dropout=0.0, scaling=ATTENTION_SCALE)
    return {**inputs, "scale": ATTENTION_SCALE}, (out.transpose(1, 2),)


def matches(probe: Probe, names: Sequence[str], catalog: Catalog) -> list[str]:
    """The Definitions among ``names`` whose bits the probe has."""
    inputs, returned = probe
    return [
        name
        for name in names
        if name in catalog.definitions and _same(returned, _expected(catalog.definition(name), inputs, catalog))
    ]


def _expected(definition: Definition, inputs: dict[str, Any], catalog: Catalog) -> tuple[torch.Tensor, ...]:
    solutions = {files.name: files for files in catalog.solutions_for(definition.name)}
    stock = stock_solution(solutions)
    if stock is None or stock.record.spec.destination_passing_style or definition.in_place:
        return tuple(run_reference(definition, inputs).values())
    with torch.no_grad():
        found = load_verified(stock, stock.digest)(*inputs.values())
    return found if isinstance(found, tuple) else (found,)


def _same(returned: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> bool:
    return len(returned) == len(expected) and all(
        got.shape == want.shape and got.dtype == want.dtype and torch.equal(got, want)
        for got, want in zip(returned, expected, strict=True)
    )


class _Draw:
    """Random bf16 tensors on one device from a generator of their own."""

    def __init__(self, device: torch.device) -> None:
        self._generator = torch.Generator(device).manual_seed(SEED)

    def __call__(self, *shape: int) -> torch.Tensor:
        drawn = torch.randn(shape, generator=self._generator, device=self._generator.device)
        return drawn.to(torch.bfloat16)
