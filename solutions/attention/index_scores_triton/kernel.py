"""Scores of a light indexer, Triton: products stay in registers, and heads are added up there.

Products of bfloat16 or float16 are exact in float32, so they run on tensor cores. A block of positions takes one head after the
other against the same keys. Single positions take all heads at once instead, as the rows of a product.
"""

import torch
import triton
import triton.language as tl

LEAST_ROWS = 16
"""Of a product on tensor cores."""


@triton.jit
def _positive(products):
    """Return products without those below zero; NaN stays."""
    return tl.where(products < 0, 0.0, products)


@triton.jit(do_not_specialize=["S", "L"])
def _scores_of_block(
    q_ptr, k_ptr, weights_ptr, out_ptr, q_b, q_s, q_h, k_b, k_l, w_b, w_s, w_h, out_b, out_s, scale, S, L, H,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(2).to(tl.int64)
    rows = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    keys = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    cols = tl.arange(0, BLOCK_D)
    k_ptrs = k_ptr + batch * k_b + keys[None, :] * k_l + cols[:, None]
    k = tl.load(k_ptrs, mask=(keys[None, :] < L) & (cols[:, None] < D), other=0.0)
    q_ptrs = q_ptr + batch * q_b + rows[:, None] * q_s + cols[None, :]
    w_ptrs = weights_ptr + batch * w_b + rows * w_s
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for head in range(0, H):
        q = tl.load(q_ptrs + head * q_h, mask=(rows[:, None] < S) & (cols[None, :] < D), other=0.0)
        weight = tl.load(w_ptrs + head * w_h, mask=rows < S, other=0.0) * scale
        total += weight[:, None] * _positive(tl.dot(q, k, input_precision="ieee"))
    out_ptrs = out_ptr + batch * out_b + rows[:, None] * out_s + keys[None, :]
    tl.store(out_ptrs, total, mask=(rows[:, None] < S) & (keys[None, :] < L))


@triton.jit(do_not_specialize=["L"])
def _scores_of_position(
    q_ptr, k_ptr, weights_ptr, out_ptr, q_b, q_s, q_h, k_b, k_l, w_b, w_s, w_h, out_b, out_s, scale, L, H,
    D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    batch, row = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
    keys = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    cols = tl.arange(0, BLOCK_D)
    k_ptrs = k_ptr + batch * k_b + keys[None, :] * k_l + cols[:, None]
    k = tl.load(k_ptrs, mask=(keys[None, :] < L) & (cols[:, None] < D), other=0.0)
    q_ptr += batch * q_b + row * q_s
    weights_ptr += batch * w_b + row * w_s
    total = tl.zeros([BLOCK_N], dtype=tl.float32)
    for start in range(0, H, BLOCK_H):
        heads = start + tl.arange(0, BLOCK_H)
        q = tl.load(
            q_ptr + heads[:, None] * q_h + cols[None, :], mask=(heads[:, None] < H) & (cols[None, :] < D), other=0.0
        )
        weight = tl.load(weights_ptr + heads * w_h, mask=heads < H, other=0.0) * scale
        products = weight[:, None] * _positive(tl.dot(q, k, input_precision="ieee"))
        total += tl.sum(tl.where(heads[:, None] < H, products, 0.0), 0)
    tl.store(out_ptr + batch * out_b + row * out_s + keys, total, mask=keys < L)


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    *,
    BLOCK_M=64,
    BLOCK_N=128,
    num_warps=4,
    num_stages=3,
):
    """out = sum over heads of weights * relu(scale * q k^T).

    Shapes: q [B, S, H, D], k [B, L, D], weights [B, S, H] float32, out [B, S, L] float32; unit last strides, any others.
    Products and sums are in fp32.
    Mapping: a program owns BLOCK_N keys, and BLOCK_M positions or a single one if there are few.
    """
    B, S, H, D = q.shape
    L = k.shape[1]
    if out.numel() == 0:
        return
    width = max(16, triton.next_power_of_2(D))
    strides = (*q.stride()[:3], *k.stride()[:2], *weights.stride(), *out.stride()[:2])
    if S >= LEAST_ROWS:
        _scores_of_block[(triton.cdiv(S, BLOCK_M), triton.cdiv(L, BLOCK_N), B)](
            q, k, weights, out, *strides, scale, S, L, H, D, BLOCK_M, BLOCK_N, width,
            num_warps=num_warps, num_stages=num_stages,
        )  # fmt: skip
    else:
        _scores_of_position[(triton.cdiv(L, BLOCK_N), S, B)](
            q, k, weights, out, *strides, scale, L, H, D, max(16, min(64, triton.next_power_of_2(H))), BLOCK_N, width,
            num_warps=num_warps, num_stages=num_stages,
        )  # fmt: skip
