"""Attention with a soft cap of its scores and a mask of numbers, Triton: scores stay in registers.

The mask is added to the capped scores in float32. The least number of its dtype is so large that a score vanishes beside it, so a
row that sees no key has equal weights, as in PyTorch. For that reason no tile of keys is left out.
"""

import torch
import triton
import triton.language as tl
from _lib.triton.running_softmax import add_values, load_added, load_keys, load_queries, store_means

LEAST_ROWS = 16
"""Of a product on tensor cores."""


@triton.jit(do_not_specialize=["S", "L"])
def _capped_attention(
    q_ptr, k_ptr, v_ptr, mask_ptr, out_ptr,
    q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, mask_b, mask_q, mask_k, out_b, out_h, out_s,
    softcap, scale, S, L, Hq, group,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    batch = (tl.program_id(0) // Hq).to(tl.int64)
    head = (tl.program_id(0) % Hq).to(tl.int64)
    rows = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    cols = tl.arange(0, BLOCK_D)
    q = load_queries(q_ptr + batch * q_b + head * q_h, rows, cols, q_s, S, D)
    k_ptr += batch * k_b + head // group * k_h
    v_ptr += batch * v_b + head // group * v_h
    mask_ptr += batch * mask_b
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    sums = tl.zeros([BLOCK_M], dtype=tl.float32)
    largest = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    for start in range(0, L, BLOCK_N):
        keys = tl.cast(start, tl.int64) + tl.arange(0, BLOCK_N)
        k, v = load_keys(k_ptr, v_ptr, keys, cols, k_s, v_s, L, D)
        numbers = load_added(mask_ptr, rows, keys, mask_q, mask_k, S, L)
        scores = tl.dot(q, k, input_precision="ieee") * (scale / softcap)
        # tanh(x) = 2 sigmoid(2 x) - 1
        scores = (2.0 * tl.sigmoid(2.0 * scores) - 1.0) * softcap + numbers
        acc, sums, largest = add_values(scores, v, acc, sums, largest)
    store_means(out_ptr + batch * out_b + head * out_h, rows, cols, out_s, acc, sums, S, D)


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    softcap: float,
    scale: float,
    out: torch.Tensor,
    *,
    BLOCK_M=64,
    BLOCK_N=32,
    num_warps=4,
    num_stages=2,
):
    """out = T(w v), w = softmax of softcap * tanh(scale * q k^T / softcap) + mask.

    Shapes: q and out [B, Hq, S, D], k and v [B, Hkv, L, D], unit last strides, any others; mask [B, 1, S, L] T, any strides.
    Scores, softmax and sums are in fp32, weights are rounded to T for the second product.
    Mapping: a program owns BLOCK_M queries of a head, or 16 if there are no more, and streams all keys.
    """
    B, Hq, S, D = q.shape
    if q.numel() == 0:
        return
    block_m = BLOCK_M if S > LEAST_ROWS else LEAST_ROWS
    _capped_attention[(B * Hq, triton.cdiv(S, block_m))](
        q, k, v, mask, out,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], mask.stride(0), mask.stride(2), mask.stride(3), *out.stride()[:3],
        softcap, scale, S, k.shape[2], Hq, Hq // k.shape[1],
        D, block_m, BLOCK_N, max(16, triton.next_power_of_2(D)),
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
