"""Manifold-constrained hyper-connections: C residual streams instead of one, mixed around every sublayer."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from tilegym_db.layers.differentiable import differentiable, operator

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
