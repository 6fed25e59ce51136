"""Norms by FlashInfer, which multiplies by the weight before it rounds to the output."""

import torch
from flashinfer.norm import fused_add_rmsnorm, gemma_rmsnorm, rmsnorm

ALIGNMENT = 8
"""Elements of 16 bits that a load of the library's kernels takes at once: rows must start at multiples of it."""


def _aligned(x: torch.Tensor) -> torch.Tensor:
    if all(start % ALIGNMENT == 0 for start in (x.storage_offset(), *x.stride()[:-1])):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def run_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [M, N], weight [N] -> [M, N]."""
    return rmsnorm(_aligned(x), _aligned(weight), eps)


def run_rms_norm_gemma(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [M, N], weight [N] -> [M, N], with 1 + weight for a factor."""
    return gemma_rmsnorm(_aligned(x), _aligned(weight), eps)


def run_qk_rms_norm(
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [M, Hq, D], k [M, Hkv, D], weights [D] -> normalised q and k."""
    return rmsnorm(_aligned(q), _aligned(q_weight), eps), rmsnorm(_aligned(k), _aligned(k_weight), eps)


def run_fused_add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x, residual [M, N], weight [N] -> [M, N]; residual is overwritten with the sum.

    FlashInfer writes the result over x, which is an input here and must stay: it gets a copy.
    """
    out = x.clone(memory_format=torch.contiguous_format)
    total = _aligned(residual)
    fused_add_rmsnorm(out, total, _aligned(weight), eps)
    if total is not residual:
        residual.copy_(total)
    return out
