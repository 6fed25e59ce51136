"""The gated delta rule by flash-linear-attention, which transformers calls if it is installed."""

import torch
from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule


def run_chunk(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, initial_state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """q, k [B, T, Hk, K], v [B, T, Hv, V], g, beta [B, T, Hv], state [B, Hv, K, V] -> [B, T, Hv, V], [B, Hv, K, V]."""
    return chunk_gated_delta_rule(
        q, k, v, g=g, beta=beta, initial_state=initial_state, output_final_state=True, use_qk_l2norm_in_kernel=True
    )


def run_recurrent(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, initial_state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """q, k [B, 1, Hk, K], v [B, 1, Hv, V], g, beta [B, 1, Hv], state [B, Hv, K, V] -> [B, 1, Hv, V], [B, Hv, K, V]."""
    return fused_recurrent_gated_delta_rule(
        q, k, v, g=g, beta=beta, initial_state=initial_state, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
