"""An operator of the catalog and the operator of its gradients, as one differentiable function.

The two records define what the forward passes to the backward: a backward names inputs of the forward, outputs that are kept,
``grad_<output>`` and ``grad_<input>``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tilegym_db import ops
from tilegym_db.backends.torch_dtypes import storage_dtype
from tilegym_db.catalog import Catalog
from tilegym_db.records import Definition
from tilegym_db.records.definition_rules import GRADIENT
from tilegym_db.verification.oracle import Lifted, load_function

Function = Callable[..., Any]


def operator(name: str) -> Function:
    """Return ``function(*inputs)`` of a Definition, for any floating dtype.

    For a dtype that the Definition lists, it runs as in :mod:`tilegym_db.ops`. For another dtype, the reference runs in float64
    without the roundings that it states, so that gradients can be checked. The reference also runs if autograd records the call,
    because kernels have no derivative. Autocast has no effect, because an operator states
    its dtypes.
    """
    definition = Catalog.default(warns=False).definition(name)
    serve, reference = getattr(ops, name), load_function(definition.reference, name)
    listed = _dtypes_of(definition)

    def run(*inputs: Any) -> Any:
        dtypes = [value.dtype if isinstance(value, torch.Tensor) else None for value in inputs]
        where = next(value.device.type for value in inputs if isinstance(value, torch.Tensor))
        with torch.autocast(where, enabled=False):
            if torch.float64 in dtypes:
                with Lifted():
                    return _apart(reference(*inputs))
            if _is_recorded(inputs):
                return _apart(reference(*inputs))
            fits = all(dtype is None or dtype in known for dtype, known in zip(dtypes, listed, strict=True))
            return serve(*inputs) if fits else _apart(reference(*inputs))

    return run


def _is_recorded(inputs: tuple[Any, ...]) -> bool:
    """Return True if autograd records a call with these inputs; compiled code has no second derivative."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    return any(isinstance(value, torch.Tensor) and value.requires_grad for value in inputs)


def _apart(returned: Any) -> Any:
    """Copy what a reference returns; in a compiled graph, into tensors that no other step of the graph returned.

    The graph that PyTorch 2.11 makes of an autograd function also returns all its steps. If the last step is a cast that changes
    nothing, the output is the tensor of the step before. Autograd then gives the gradient to that step, and others become zero.
    """
    if not torch.compiler.is_compiling():
        return returned
    return tuple(value.clone() for value in returned) if isinstance(returned, tuple) else returned.clone()


def _dtypes_of(definition: Definition) -> list[frozenset[torch.dtype]]:
    """Return the dtypes that each input may have, in order; empty for a number."""
    return [
        frozenset()
        if spec.is_scalar
        else frozenset(map(storage_dtype, definition.dtypes.get(spec.dtype, (spec.dtype,))))
        for spec in definition.inputs.values()
    ]


def differentiable(forward: str, backward: str) -> Function:
    """Return ``function(*inputs)`` of one Definition whose gradients another Definition computes.

    Outputs that the backward takes as inputs have no gradient. Gradients can be differentiated again.
    """
    catalog = Catalog.default(warns=False)
    first, second = catalog.definition(forward), catalog.definition(backward)
    names, outputs = tuple(first.inputs), tuple(first.outputs)
    wanted = tuple(name for name in second.inputs if not name.startswith(GRADIENT))
    kept = tuple(name for name in wanted if name in outputs)
    given = tuple(name for name in wanted if name in names and not first.inputs[name].is_scalar)
    fixed = tuple(outputs.index(name) for name in outputs if GRADIENT + name not in second.inputs)
    lost = tuple(name for name in kept if outputs.index(name) in fixed)
    run, run_back = operator(forward), operator(backward)

    class Operator(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            returned = run(*inputs)
            found = returned if isinstance(returned, tuple) else (returned,)
            tensors = [inputs[names.index(name)] for name in given] + [found[outputs.index(name)] for name in kept]
            ctx.save_for_backward(*tensors)
            ctx.scalars = [None if isinstance(value, torch.Tensor) else value for value in inputs]
            ctx.mark_non_differentiable(*(found[place] for place in fixed))
            return found  # always a tuple, because compilers need one

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            known = dict(zip((*given, *kept), ctx.saved_tensors, strict=True))
            known |= {name: value for name, value in zip(names, ctx.scalars, strict=True) if value is not None}
            known |= {GRADIENT + name: grad.contiguous() for name, grad in zip(outputs, grads, strict=True)}
            if torch.is_grad_enabled() and lost and not torch.compiler.is_compiling():
                again = run(*(known[name] for name in names))  # the kept ones have no gradient, and these have
                known |= {name: again[outputs.index(name)] for name in lost}
            returned = run_back(*(known[name] for name in second.inputs))
            found = dict(zip(second.outputs, returned if isinstance(returned, tuple) else (returned,), strict=True))
            return tuple(found.get(GRADIENT + name) for name in names)

    def call(*inputs: Any) -> Any:
        found = Operator.apply(*inputs)
        return found if len(outputs) > 1 else found[0]

    call.__name__, call.__doc__ = forward, f"{first.description} Its gradients are those of {backward}."
    return call
