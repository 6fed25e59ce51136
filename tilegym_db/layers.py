"""Layers of models as modules over the catalog's operators, with gradients: hyper-connections and n-gram memory.

A layer runs the fastest verified kernels of the machine, forward and backward, or else the references of the Definitions. Its
parameters have the names that transformers uses, so checkpoints of transformers load. The records of a Definition and of its
gradients define what the forward passes to the backward: a backward names inputs of the forward, outputs that are kept,
``grad_<output>`` and ``grad_<input>``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from tilegym_db import ops
from tilegym_db.catalog import Catalog
from tilegym_db.records import Definition
from tilegym_db.records.definition_rules import GRADIENT
from tilegym_db.sandbox.shared_buffers import storage_dtype
from tilegym_db.verification.oracle import Lifted, load_function

__all__ = ["EngramGateLayer", "HyperConnection", "HyperHead", "MHCPipeline"]

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
    """Copy the outputs of a reference inside a compiled graph, so that no other step of the graph returns the same tensors.

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


# ---- Hyper-connections -----------------------------------------------------------------------------------


_expand = differentiable("mhc_expand", "mhc_expand_backward")
_norm_fn = differentiable("mhc_norm_fn", "mhc_norm_fn_backward")
_split_mixes = differentiable("mhc_pre_split_mixes", "mhc_pre_split_mixes_backward")
_sinkhorn = differentiable("mhc_sinkhorn", "mhc_sinkhorn_backward")
_apply_mix = differentiable("mhc_pre_apply_mix", "mhc_pre_apply_mix_backward")
_post = differentiable("mhc_post", "mhc_post_backward")
_head_mix = differentiable("mhc_head_compute_mix", "mhc_head_compute_mix_backward")
_pre_fused = operator("mhc_pre_fused")  # everything before a sublayer in one operator, without a gradient

Coefficients = tuple[torch.Tensor, torch.Tensor]


def _wide(parameter: torch.Tensor) -> torch.Tensor:
    """Return a parameter in float32, even if the model was cast to half precision; float64 stays."""
    return parameter if parameter.dtype == torch.float64 else parameter.float()


def _flat(streams: torch.Tensor) -> torch.Tensor:
    """Flatten [..., C, H] to [M, C, H], contiguous."""
    return streams.reshape(-1, *streams.shape[-2:])


class HyperConnection(nn.Module):
    """The code around one sublayer: streams -> coefficients and the sublayer's input, and the mixing of its output.

    ``fn``, ``base``, ``scale`` and the results of ``forward`` are those of DeepSeek-V4 and GLM-5-Next in transformers.
    """

    def __init__(
        self,
        num_connections: int,
        hidden_size: int,
        *,
        sinkhorn_steps: int = 20,
        post_mult: float = 2.0,
        norm_eps: float = 1e-6,
        eps: float = 1e-6,
    ) -> None:
        """Create the parameters in float32, in which they should stay.

        Args:
            num_connections: residual streams, C.
            hidden_size: values per stream, H.
            sinkhorn_steps: column steps that make the mixing matrix nearly doubly stochastic.
            post_mult: largest weight of the sublayer's output in a stream.
            norm_eps: added to the mean square of the streams.
            eps: added to the gates and to the entries and sums of the mixing matrix.
        """
        super().__init__()
        self.num_connections, self.hidden_size, self.sinkhorn_steps = num_connections, hidden_size, sinkhorn_steps
        self.post_mult, self.norm_eps, self.eps = post_mult, norm_eps, eps
        values = num_connections * (num_connections + 2)
        self.fn = nn.Parameter(torch.empty(values, num_connections * hidden_size))
        self.base = nn.Parameter(torch.empty(values))
        self.scale = nn.Parameter(torch.empty(3))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the parameters as transformers does: a small random projection, a base of zeros, scales of one."""
        nn.init.normal_(self.fn, std=0.02)
        nn.init.zeros_(self.base)
        nn.init.ones_(self.scale)

    def forward(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Map streams [..., C, H] to post [..., C] and comb [..., C, C] in float32, and the sublayer's input [..., H]."""
        flat, leading = _flat(streams), streams.shape[:-2]
        fn, base, scale = _wide(self.fn), _wide(self.base), _wide(self.scale)
        if torch.is_grad_enabled() and (streams.requires_grad or fn.requires_grad):
            mixes, _ = _norm_fn(flat, fn, self.norm_eps)
            pre, post, comb = _split_mixes(mixes, scale, base, self.num_connections, self.post_mult, self.eps)
            comb, collapsed = _sinkhorn(comb, self.sinkhorn_steps, self.eps), _apply_mix(flat, pre)
        else:
            post, comb, collapsed = _pre_fused(
                flat, fn, scale, base, self.norm_eps, self.eps, self.eps, self.post_mult, self.sinkhorn_steps
            )
        count = self.num_connections
        return (
            post.reshape(*leading, count),
            comb.reshape(*leading, count, count),
            collapsed.reshape(*leading, self.hidden_size),
        )

    def write_back(self, output: torch.Tensor, streams: torch.Tensor, coefficients: Coefficients) -> torch.Tensor:
        """Return the streams after a sublayer from its output [..., H] and the streams before; coefficients: (post, comb)."""
        post, comb = coefficients
        count = self.num_connections
        written: torch.Tensor = _post(
            output.reshape(-1, self.hidden_size).to(streams.dtype),
            _flat(streams),
            post.reshape(-1, count),
            comb.reshape(-1, count, count),
        )
        return written.reshape(streams.shape)

    def extra_repr(self) -> str:
        """Return the sizes for a printed model."""
        return f"num_connections={self.num_connections}, hidden_size={self.hidden_size}, steps={self.sinkhorn_steps}"


class HyperHead(nn.Module):
    """The weighted sum of the streams after the last sublayer; parameters as in DeepSeek-V4 of transformers."""

    def __init__(self, num_connections: int, hidden_size: int, *, norm_eps: float = 1e-6, eps: float = 1e-6) -> None:
        """Create the parameters in float32, in which they should stay; arguments as for :class:`HyperConnection`."""
        super().__init__()
        self.hidden_size, self.norm_eps, self.eps = hidden_size, norm_eps, eps
        self.hc_fn = nn.Parameter(torch.empty(num_connections, num_connections * hidden_size))
        self.hc_base = nn.Parameter(torch.empty(num_connections))
        self.hc_scale = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the parameters as transformers does."""
        nn.init.normal_(self.hc_fn, std=0.02)
        nn.init.zeros_(self.hc_base)
        nn.init.ones_(self.hc_scale)

    def forward(self, streams: torch.Tensor) -> torch.Tensor:
        """Map streams [..., C, H] to [..., H]."""
        flat = _flat(streams)
        mixes, _ = _norm_fn(flat, _wide(self.hc_fn), self.norm_eps)
        weights = _head_mix(mixes, _wide(self.hc_scale), _wide(self.hc_base), self.eps)
        collapsed: torch.Tensor = _apply_mix(flat, weights)
        return collapsed.reshape(*streams.shape[:-2], self.hidden_size)


class MHCPipeline(nn.Module):
    """Sublayers with hyper-connections around each. An activation goes in and comes out; inside are C residual streams."""

    def __init__(
        self,
        num_connections: int,
        hidden_size: int,
        sublayers: Iterable[nn.Module] | None = None,
        *,
        sinkhorn_steps: int = 20,
        post_mult: float = 2.0,
        norm_eps: float = 1e-6,
        eps: float = 1e-6,
    ) -> None:
        """Take sublayers that map [..., H] to [..., H], by default the identity; other arguments as for HyperConnection."""
        super().__init__()
        self.num_connections = num_connections
        self.sublayers = nn.ModuleList([nn.Identity()] if sublayers is None else sublayers)
        self.connections: Iterable[HyperConnection] = nn.ModuleList(  # type: ignore[assignment]
            HyperConnection(
                num_connections,
                hidden_size,
                sinkhorn_steps=sinkhorn_steps,
                post_mult=post_mult,
                norm_eps=norm_eps,
                eps=eps,
            )
            for _ in self.sublayers
        )
        self.head = HyperHead(num_connections, hidden_size, norm_eps=norm_eps, eps=eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map an activation [..., H] to [..., H]."""
        size = x.shape[-1]
        streams = _expand(x.reshape(-1, size), self.num_connections)
        streams = streams.reshape(*x.shape[:-1], self.num_connections, size)
        for connection, sublayer in zip(self.connections, self.sublayers, strict=True):
            post, comb, entering = connection(streams)
            streams = connection.write_back(sublayer(entering), streams, (post, comb))
        collapsed: torch.Tensor = self.head(streams)
        return collapsed


# ---- N-gram memory ---------------------------------------------------------------------------------------


_gate = differentiable("engram_gate_fwd_save", "engram_gate_backward_saved")
_gate_alone = operator("engram_gate_fwd")  # without the outputs that a gradient needs


class EngramGateLayer(nn.Module):
    """A layer for hidden + gate * value. The gate of a copy measures how well its hidden state and a looked-up key agree."""

    def __init__(self, hidden_size: int, num_copies: int = 4, *, clamp: float = 1e-6, eps: float = 1e-20) -> None:
        """Create the two norm weights, filled with ones.

        Args:
            hidden_size: H.
            num_copies: copies of the residual stream, C.
            clamp: smallest magnitude of a score under the root, which limits its slope.
            eps: added to the mean squares.
        """
        super().__init__()
        self.hidden_size, self.num_copies, self.clamp, self.eps = hidden_size, num_copies, clamp, eps
        self.weight_hidden = nn.Parameter(torch.ones(num_copies, hidden_size))
        self.weight_embed = nn.Parameter(torch.ones(num_copies, hidden_size))

    def reset_parameters(self) -> None:
        """Set the weights to one."""
        nn.init.ones_(self.weight_hidden)
        nn.init.ones_(self.weight_embed)

    def forward(self, hidden: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Map hidden and key [..., C, H] and value [..., H] to [..., C, H]; key and value in the dtype of hidden."""
        count, size, dtype = self.num_copies, self.hidden_size, hidden.dtype
        tensors = (
            hidden.reshape(-1, count, size),
            key.reshape(-1, count, size).to(dtype),
            value.reshape(-1, size).to(dtype),
            self.weight_hidden.to(dtype),
            self.weight_embed.to(dtype),
        )
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            out = _gate(*tensors, self.clamp, self.eps)[0]
        else:
            out = _gate_alone(*tensors, self.clamp, self.eps)
        gated: torch.Tensor = out.reshape(hidden.shape)
        return gated

    def extra_repr(self) -> str:
        """Return the sizes for a printed model."""
        return f"hidden_size={self.hidden_size}, num_copies={self.num_copies}"
