"""The wrapper that transformers puts around every class of experts, and the implementations that it chooses from.

At each call it looks up in the config of the module which of them runs: ``eager``, the loop of the class itself, or a function of
a registry.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch

from tilegym_db.integrations.transformers.decorators import wrapper_codes

__all__ = ["EAGER", "KNOWN", "Wrapper", "counted_ways", "implementations", "way_of", "wrapper_of"]

EAGER = "eager"
KNOWN = (EAGER, "batched_mm", "grouped_mm")
"""The implementations that are PyTorch operations. Those of the kernels hub are nobody's stock code."""


class Wrapper(NamedTuple):
    """What the wrapper around a forward chooses from: the loop of the class, and a registry of functions."""

    eager: Any
    registry: Any


def wrapper_of(forward: Any) -> Wrapper | None:
    """What transformers' wrapper of experts is around; None for any other forward.

    A quantiser puts the wrapper around its class again for every layer: the loop is what the innermost one is around.
    """
    found: Wrapper | None = None
    while getattr(forward, "__code__", None) in _wrapping_codes() and hasattr(forward, "__wrapped__"):
        held = [cell.cell_contents for cell in forward.__closure__ or ()]
        registry = next((value for value in held if hasattr(value, "get_interface")), None)
        if registry is None or (found is not None and registry is not found.registry):
            return None
        forward = forward.__wrapped__
        found = Wrapper(forward, registry)
    return found


@cache
def _wrapping_codes() -> frozenset[Any]:
    """The code of that wrapper."""
    try:
        from transformers.integrations.moe import use_experts_implementation as decorator
    except ImportError:
        return frozenset()
    return frozenset(code for code in wrapper_codes(decorator) if code.co_name == "forward")


def implementations(forward: Any) -> dict[str, Any]:
    """The known implementations that a wrapped forward can run -> the function in its registry; the loop itself has none."""
    wrapper = wrapper_of(forward)
    assert wrapper is not None, "found by it"
    return {name: wrapper.registry.get(name) for name in KNOWN if name == EAGER or name in wrapper.registry}


def way_of(module: torch.nn.Module) -> str:
    """The implementation that a module of experts is set to."""
    return str(getattr(getattr(module, "config", None), "_experts_implementation", None))


@contextlib.contextmanager
def counted_ways(model: torch.nn.Module) -> Iterator[Mapping[str, int]]:
    """Implementation -> calls of the model's experts in a ``with`` block; empty for a model without experts."""
    counts: Counter[str] = Counter()
    with contextlib.ExitStack() as undo:
        for module in model.modules():
            if wrapper_of(type(module).forward) is not None:
                hook = module.register_forward_pre_hook(lambda module, _: counts.update([way_of(module)]))
                undo.callback(hook.remove)
        yield counts
