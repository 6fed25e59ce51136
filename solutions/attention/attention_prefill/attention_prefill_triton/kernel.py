"""Causal attention with shared key heads, Triton: a block of queries a program, keys streamed once, softmax on the way."""

import torch
import triton
import triton.language as tl

LOG2_E = 1.4426950408889634


@triton.jit
def _add_keys(q, acc, sums, largest, k_ptrs, v_ptrs, rows, start, S, scale, D: tl.constexpr, MASKED: tl.constexpr,
              BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """One step of the running softmax: BLOCK_N keys from ``start`` on."""
    keys = start + tl.arange(0, BLOCK_N)
    cols = tl.arange(0, BLOCK_D)
    if MASKED:
        k = tl.load(k_ptrs, mask=(keys[None, :] < S) & (cols[:, None] < D), other=0.0)
    elif D < BLOCK_D:
        k = tl.load(k_ptrs, mask=cols[:, None] < D, other=0.0)
    else:
        k = tl.load(k_ptrs)
    scores = tl.dot(q, k) * scale
    if MASKED:
        scores = tl.where((keys[None, :] <= rows[:, None]) & (keys[None, :] < S), scores, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(scores, 1))
    weights = tl.exp2(scores - new_largest[:, None])
    shrink = tl.exp2(largest - new_largest)
    if MASKED:
        v = tl.load(v_ptrs, mask=(keys[:, None] < S) & (cols[None, :] < D), other=0.0)
    elif D < BLOCK_D:
        v = tl.load(v_ptrs, mask=cols[None, :] < D, other=0.0)
    else:
        v = tl.load(v_ptrs)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None])
    return acc, sums * shrink + tl.sum(weights, 1), new_largest


@triton.jit(do_not_specialize=["S"])
def _causal_attention(
    q_ptr, k_ptr, v_ptr, out_ptr,
    q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, out_b, out_h, out_s,
    scale, S, Hq, group,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # The last block of queries sees the most keys: it starts first, so that the short ones fill the gaps at the end.
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    batch = (tl.program_id(0) // Hq).to(tl.int64)
    head = (tl.program_id(0) % Hq).to(tl.int64)
    first = block * BLOCK_M
    rows = first + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_D)
    keys = tl.arange(0, BLOCK_N).to(tl.int64)
    k_ptrs = k_ptr + batch * k_b + head // group * k_h + keys[None, :] * k_s + cols[:, None]
    v_ptrs = v_ptr + batch * v_b + head // group * v_h + keys[:, None] * v_s + cols[None, :]
    k_step = BLOCK_N * tl.cast(k_s, tl.int64)
    v_step = BLOCK_N * tl.cast(v_s, tl.int64)
    inside = (rows[:, None] < S) & (cols[None, :] < D)
    offsets = rows.to(tl.int64)[:, None]
    q = tl.load(q_ptr + batch * q_b + head * q_h + offsets * q_s + cols[None, :], mask=inside, other=0.0)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    sums = tl.zeros([BLOCK_M], dtype=tl.float32)
    largest = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    # Keys before the block are seen by all of its queries; key 0 is seen by every query, so that no maximum stays infinite.
    common = first // BLOCK_N * BLOCK_N
    for start in range(0, common, BLOCK_N):
        acc, sums, largest = _add_keys(
            q, acc, sums, largest, k_ptrs, v_ptrs, rows, start, S, scale, D, False, BLOCK_N, BLOCK_D
        )
        k_ptrs += k_step
        v_ptrs += v_step
    for start in range(common, tl.minimum(first + BLOCK_M, S), BLOCK_N):
        acc, sums, largest = _add_keys(
            q, acc, sums, largest, k_ptrs, v_ptrs, rows, start, S, scale, D, True, BLOCK_N, BLOCK_D
        )
        k_ptrs += k_step
        v_ptrs += v_step
    out = (acc / sums[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + batch * out_b + head * out_h + offsets * out_s + cols[None, :], out, mask=inside)


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    *,
    BLOCK_M=None,
    BLOCK_N=None,
    num_warps=None,
    num_stages=None,
):
    """out = T(softmax(scale * q k^T, causal) v), scores, softmax and sums in fp32, weights rounded to T for the second product.

    Shapes: q and out [B, Hq, S, D], k and v [B, Hkv, S, D], unit last strides, any others; T in bfloat16, float16.
    Mapping: a program owns BLOCK_M queries of a head and streams the keys that they see. Blocks before the diagonal need no mask.
    """
    B, Hq, S, D = q.shape
    if q.numel() == 0:
        return
    block_m = BLOCK_M or (128 if S > 64 else 64)
    block_n = BLOCK_N or 64
    _causal_attention[(B * Hq, (S + block_m - 1) // block_m)](
        q, k, v, out,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3],
        scale * LOG2_E, S, Hq, Hq // k.shape[1],
        D, block_m, block_n, max(16, 1 << (D - 1).bit_length()),
        num_warps=num_warps or (8 if block_m > 64 else 4), num_stages=num_stages or 3,
    )  # fmt: skip
