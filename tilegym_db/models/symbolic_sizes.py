"""Sizes that a piece of code lets differ from each other, by a run on tensors without memory whose sizes are symbols.

PyTorch notes each condition on a size that the code checks, for example that two sizes are equal because two tensors are added.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch

from tilegym_db.models.upstream_code import of_models

Place = tuple[str, int]
"""A tensor and the number of a dimension."""


class SymbolicSizes(NamedTuple):
    """The symbol of each size, as text; equal symbols are sizes that the code needs to be equal."""

    inputs: Mapping[Place, str | None]
    results: Mapping[tuple[int, int], str | None]

    def of(self, name: str, place: int) -> str | None:
        """Return the symbol of a dimension of an input; None if the run had its number."""
        return self.inputs.get((name, place))

    def of_result(self, number: int, place: int) -> str | None:
        """Return the symbol of a dimension of a result; None if the run had its number."""
        return self.results.get((number, place))


def symbolic_sizes(
    run: Callable[[Mapping[str, Any]], Any], tensors: Mapping[str, torch.Tensor], known: Collection[Place]
) -> SymbolicSizes | None:
    """Run code once with symbols as sizes; None if it cannot be run so, for example because it reads contents.

    Args:
        run: ``run(tensors) -> results``.
        tensors: example inputs.
        known: the dimensions that keep their numbers.
    """
    from torch._dispatch.python import enable_python_dispatcher
    from torch._dynamo.source import ConstantSource
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    environment = ShapeEnv(duck_shape=False)
    mode = FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True)
    fakes = {}
    for name, tensor in tensors.items():
        sizes = [DimDynamic.STATIC if (name, place) in known else DimDynamic.DYNAMIC for place in range(tensor.dim())]
        context: Any = StatelessSymbolicContext(dynamic_sizes=sizes)
        plain = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        fakes[name] = mode.from_tensor(plain, source=ConstantSource(name), symbolic_context=context)
    try:
        with mode, enable_python_dispatcher(), torch.no_grad():
            returned = run(fakes)
    except of_models():
        return None
    results = returned if isinstance(returned, tuple | list) else (returned,)

    def symbol(size: Any) -> str | None:
        if not isinstance(size, torch.SymInt):
            return None
        found: Any = environment.simplify(size.node.expr)
        return None if found.is_number else str(found)

    return SymbolicSizes(
        {(name, place): symbol(size) for name, fake in fakes.items() for place, size in enumerate(fake.shape)},
        {
            (number, place): symbol(size)
            for number, value in enumerate(results)
            if isinstance(value, torch.Tensor)
            for place, size in enumerate(value.shape)
        },
    )
