"""Sampling by FlashInfer, which draws by rejection, without a sort.

It takes a seed for each row and makes its random numbers from that. The bits of the row's uniform number are the seed here, so
that a call with the same numbers draws the same indices.
"""

import torch
from flashinfer.sampling import (
    min_p_sampling_from_probs,
    top_k_renorm_probs,
    top_k_sampling_from_probs,
    top_p_sampling_from_probs,
)

ALIGNMENT = 4
"""Elements of 32 bits that a load of the library's kernels takes at once: rows must start at multiples of it."""
LEAST_SHARE = 1e-30
"""What FlashInfer keeps the likeliest index with; of a share of 0 it keeps none."""


def _aligned(x: torch.Tensor) -> torch.Tensor:
    return x if x.storage_offset() % ALIGNMENT == 0 else x.clone()


def _seeds(uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A seed and an offset for each row: the bits of its random number, and 0."""
    seed = uniform.contiguous().view(torch.int32).long()
    return seed, torch.zeros_like(seed)


def _ranks(top_k: torch.Tensor, columns: int) -> torch.Tensor:
    """How many are kept of each row; FlashInfer reads 0 as none, where it means all here."""
    return torch.where((top_k < 1) | (top_k > columns), columns, top_k)


def run_top_k(probs: torch.Tensor, top_k: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """probs [B, V], top_k [B], uniform [B] -> samples [B]."""
    seed, offset = _seeds(uniform)
    ranks = _ranks(top_k, probs.shape[-1])
    return top_k_sampling_from_probs(_aligned(probs), ranks, seed=seed, offset=offset).long()


def run_top_p(probs: torch.Tensor, top_p: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """probs [B, V], top_p [B], uniform [B] -> samples [B]."""
    seed, offset = _seeds(uniform)
    shares = top_p.clamp_min(LEAST_SHARE)
    of_one = probs / probs.sum(dim=-1, keepdim=True)  # FlashInfer takes the sum of a row for 1
    return top_p_sampling_from_probs(of_one, shares, seed=seed, offset=offset).long()


def run_top_k_top_p(
    probs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, uniform: torch.Tensor
) -> torch.Tensor:
    """probs [B, V], top_k [B], top_p [B], uniform [B] -> samples [B].

    The two calls are those of its top_k_top_p_sampling_from_probs with a rank for each row, where the first is not asked to be
    deterministic and may round otherwise in each call.
    """
    seed, offset = _seeds(uniform)
    kept = top_k_renorm_probs(_aligned(probs), _ranks(top_k, probs.shape[-1]), is_deterministic=True)
    return top_p_sampling_from_probs(kept, top_p.clamp_min(LEAST_SHARE), seed=seed, offset=offset).long()


def run_min_p(probs: torch.Tensor, min_p: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """probs [B, V], min_p [B], uniform [B] -> samples [B]."""
    seed, offset = _seeds(uniform)
    return min_p_sampling_from_probs(_aligned(probs), min_p.clamp_max(1.0), seed=seed, offset=offset).long()
