"""Attention with a bias of its scores, Triton: scores stay in registers, and the bias is read where it lies.

The least number of the bias's dtype is so large that a score vanishes beside it, so a row whose keys all have it has equal
weights, as in PyTorch. A causal block of queries leaves out the tiles of keys behind it, unless it has such a row: later keys
have that number too, and so the same weight.
"""

import torch
import triton
import triton.language as tl
from _lib.triton.running_softmax import add_values, load_added, load_keys, load_queries, store_means

LEAST_ROWS = 16
"""Of a product on tensor cores."""


@triton.jit
def _add_tile(q, acc, sums, largest, k_ptr, v_ptr, bias_ptr, rows, cols, start, k_s, v_s, bias_q, bias_k, scale, least, S, L,
              D: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """Add BLOCK_N keys from ``start`` on to the running softmax."""
    keys = tl.cast(start, tl.int64) + tl.arange(0, BLOCK_N)
    k, v = load_keys(k_ptr, v_ptr, keys, cols, k_s, v_s, L, D)
    added = load_added(bias_ptr, rows, keys, bias_q, bias_k, S, L)
    if CAUSAL:
        added = tl.where((keys[None, :] > rows[:, None]) & (keys[None, :] < L), least, added)
    return add_values(tl.dot(q, k, input_precision="ieee") * scale + added, v, acc, sums, largest)


@triton.jit(do_not_specialize=["S", "L"])
def _biased_attention(
    q_ptr, k_ptr, v_ptr, bias_ptr, out_ptr,
    q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, bias_b, bias_h, bias_q, bias_k, out_b, out_h, out_s,
    scale, least, S, L, Hq, group,
    D: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    batch = (tl.program_id(0) // Hq).to(tl.int64)
    head = (tl.program_id(0) % Hq).to(tl.int64)
    rows = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    cols = tl.arange(0, BLOCK_D)
    q = load_queries(q_ptr + batch * q_b + head * q_h, rows, cols, q_s, S, D)
    k_ptr += batch * k_b + head // group * k_h
    v_ptr += batch * v_b + head // group * v_h
    bias_ptr += batch * bias_b + head * bias_h
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    sums = tl.zeros([BLOCK_M], dtype=tl.float32)
    largest = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    end = L
    if CAUSAL:
        end = tl.minimum(L, (tl.program_id(1) + 1) * BLOCK_M)
    for start in range(0, end, BLOCK_N):
        acc, sums, largest = _add_tile(
            q, acc, sums, largest, k_ptr, v_ptr, bias_ptr, rows, cols, start, k_s, v_s, bias_q, bias_k, scale, least, S, L,
            D, CAUSAL, BLOCK_N,
        )  # fmt: skip
    if CAUSAL:
        # A row that has seen nothing above the least number gives later keys, which have it, the same weight.
        lowest = tl.min(tl.where(rows < S, largest, 0.0), 0)
        last = tl.where(lowest <= least * 0.5, L, end)
        for start in range(tl.cdiv(end, BLOCK_N) * BLOCK_N, last, BLOCK_N):
            acc, sums, largest = _add_tile(
                q, acc, sums, largest, k_ptr, v_ptr, bias_ptr, rows, cols, start, k_s, v_s, bias_q, bias_k, scale, least,
                S, L, D, CAUSAL, BLOCK_N,
            )  # fmt: skip
    store_means(out_ptr + batch * out_b + head * out_h, rows, cols, out_s, acc, sums, S, D)


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor,
    causal: bool,
    scale: float,
    out: torch.Tensor,
    *,
    BLOCK_M=64,
    BLOCK_N=32,
    num_warps=4,
    num_stages=2,
):
    """out = T(w v), w = softmax of scale * q k^T + bias; with ``causal``, a position sees no later key.

    Shapes: q and out [B, Hq, S, D], k and v [B, Hkv, L, D], unit last strides, any others.
    bias [1 or B, Hq, S, L] T has any strides.
    Scores, softmax and sums are in fp32, weights are rounded to T for the second product.
    Mapping: a program owns BLOCK_M queries of a head, or 16 if there are no more, and streams the keys.
    """
    B, Hq, S, D = q.shape
    if q.numel() == 0:
        return
    block_m = BLOCK_M if S > LEAST_ROWS else LEAST_ROWS
    of_sequence = bias.stride(0) if bias.shape[0] > 1 else 0
    _biased_attention[(B * Hq, triton.cdiv(S, block_m))](
        q, k, v, bias, out,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], of_sequence, *bias.stride()[1:], *out.stride()[:3],
        scale, torch.finfo(bias.dtype).min, S, k.shape[2], Hq, Hq // k.shape[1],
        D, causal, block_m, BLOCK_N, max(16, triton.next_power_of_2(D)),
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
