"""Each row divided by its sum, which is added up in order; Triton."""

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["M"])
def _normalize_weight_tile(
    weights_ptr, denominator_ptr, out_ptr, M, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_K)[None, :]
    places = rows[:, None] * K + cols
    mask = (rows[:, None] < M) & (cols < K)
    weights = tl.load(weights_ptr + places, mask=mask, other=0.0)
    total = tl.full([BLOCK_M], 1e-20, tl.float32)
    # In order of the choices, as the Definition says: a tree sum would differ in the last bit. The columns come out of the
    # registers, for one addend of each sum is not zero.
    for choice in tl.static_range(K):
        total += tl.sum(tl.where(cols == choice, weights, 0.0), axis=1)
    tl.store(denominator_ptr + rows, total, mask=rows < M)
    tl.store(out_ptr + places, tl.div_rn(weights, tl.broadcast_to(total[:, None], weights.shape)), mask=mask)


def run(weights: torch.Tensor, denominator: torch.Tensor, out: torch.Tensor, *, BLOCK=512, num_warps=4):
    """denominator = 1e-20 + sum of the row, in order; out = weights / denominator, correctly rounded.

    Shapes: weights, out [M, K], denominator [M], all float32 and contiguous; K <= 64.
    Mapping: a program owns whole rows, about BLOCK values of them.
    """
    M, K = weights.shape
    if M == 0:
        return
    block_k = 1 << (K - 1).bit_length()
    block_m = max(1, BLOCK // block_k)
    grid = ((M + block_m - 1) // block_m,)
    _normalize_weight_tile[grid](weights, denominator, out, M, K, block_m, block_k, num_warps=num_warps)
