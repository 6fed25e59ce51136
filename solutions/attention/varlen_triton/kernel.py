"""Attention within packed sequences, Triton: a block of queries a program, keys streamed once.

A head of 72, 80 or 96 is computed as 64 columns and a narrow rest, because a tile of 128 would do up to 1.8 times the work.
"""

import math

import torch
import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
MASSIVE = tl.constexpr(2.0**28)
"""Scaled scores beyond it differ by 8 or not at all, and a product is rounded by at most 8."""


@triton.jit
def _tile(
    base_ptr, rows, stride, cols, end, D: tl.constexpr, MASKED: tl.constexpr, WHOLE: tl.constexpr, UNIT: tl.constexpr,
    TRANSPOSED: tl.constexpr = False,
):  # fmt: skip
    """Load columns of some rows, or their transpose; zeros past D unless WHOLE, and past ``end`` if MASKED."""
    # A tile that is transposed after it was loaded is multiplied wrongly (Triton 3.6).
    if TRANSPOSED:
        row, col = rows[None, :], cols[:, None]
    else:
        row, col = rows[:, None], cols[None, :]
    ptrs = base_ptr + row.to(tl.int64) * stride * UNIT + col
    if MASKED:
        return tl.load(ptrs, mask=(row < end) & (col < D), other=0.0)
    elif WHOLE:
        return tl.load(ptrs)
    else:
        return tl.load(ptrs, mask=col < D, other=0.0)


@triton.jit
def _add_keys(
    q, q_rest, acc, acc_rest, sums, offset, k_ptr, v_ptr, rows, start, L, k_s, v_s, scale, power,
    D: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, REST: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """Add BLOCK_N keys from ``start`` on to the running softmax. ``offset`` is the largest score so far, scaled.

    The difference of a score to it is one instruction, which does not round the product: the largest weight is 2**e, with e the
    rounding error of the offset. That factor is in the sums too. It is small unless scores are massive. Two massive ones that
    differ are so far apart that one weighs nothing: any slope will do, and by a power of two the offset is exact.
    """
    keys = start + tl.arange(0, BLOCK_N)
    cols = tl.arange(0, BLOCK_D)
    k = _tile(k_ptr, keys, k_s, cols, L, D, MASKED, BLOCK_D <= D, UNIT, True)
    scores = tl.dot(q, k)
    if REST > 0:
        rest = BLOCK_D + tl.arange(0, REST)
        k_rest = _tile(k_ptr, keys, k_s, rest, L, D, MASKED, BLOCK_D + REST <= D, UNIT, True)
        scores = tl.dot(q_rest, k_rest, scores)
    if MASKED:
        seen = keys[None, :] < L
        if CAUSAL:
            seen &= keys[None, :] <= rows[:, None]
        scores = tl.where(seen, scores, float("-inf"))
    found = tl.max(scores, 1)
    steep = tl.where(tl.abs(found) * scale > MASSIVE, power, scale)
    grown = tl.maximum(offset, found * steep)
    weights = tl.exp2(scores * steep[:, None] - grown[:, None])
    shrink = tl.exp2(offset - grown)
    sums = sums * shrink + tl.sum(weights, 1)
    v = _tile(v_ptr, keys, v_s, cols, L, D, MASKED, BLOCK_D <= D, UNIT)
    narrow = weights.to(v.dtype)
    acc = tl.dot(narrow, v, acc * shrink[:, None])
    if REST > 0:
        v_rest = _tile(v_ptr, keys, v_s, rest, L, D, MASKED, BLOCK_D + REST <= D, UNIT)
        acc_rest = tl.dot(narrow, v_rest, acc_rest * shrink[:, None])
    return acc, acc_rest, sums, grown


@triton.jit(do_not_specialize=["N", "M"])
def _packed_attention(
    q_ptr, k_ptr, v_ptr, offsets_ptr, out_ptr,
    q_s, q_h, k_s, k_h, v_s, v_h, out_s, out_h,
    scale, power, N, M, group,
    D: tl.constexpr, CAUSAL: tl.constexpr, NEGATIVE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, REST: tl.constexpr, UNIT: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    # 1. The sequence of this block: sequences before it have ``before`` blocks in all. Strides count UNIT elements.
    turn = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    sequence, before, total = 0, 0, 0
    for base in range(0, N, BLOCK_S):
        index = base + tl.arange(0, BLOCK_S)
        begin = tl.load(offsets_ptr + index, mask=index < N, other=0)
        end = tl.load(offsets_ptr + index + 1, mask=index < N, other=0)
        blocks = (end - begin + BLOCK_M - 1) // BLOCK_M
        ends = total + tl.cumsum(blocks, 0)
        is_before = (ends <= turn) & (index < N)
        sequence += tl.sum(is_before.to(tl.int32), 0)
        before += tl.sum(tl.where(is_before, blocks, 0), 0)
        total += tl.sum(blocks, 0)
    cols = tl.arange(0, BLOCK_D)
    if sequence == N:
        # 2. Behind the last sequence there are zeros.
        rows = tl.load(offsets_ptr + N) + (turn - total) * BLOCK_M + tl.arange(0, BLOCK_M)
        out_ptrs = out_ptr + (head * out_h + rows.to(tl.int64)[:, None] * out_s) * UNIT
        nothing = tl.zeros([BLOCK_M, BLOCK_D], dtype=out_ptr.dtype.element_ty)
        tl.store(out_ptrs + cols[None, :], nothing, mask=(rows[:, None] < M) & (cols[None, :] < D))
        if REST > 0:
            rest = BLOCK_D + tl.arange(0, REST)
            nothing = tl.zeros([BLOCK_M, REST], dtype=out_ptr.dtype.element_ty)
            tl.store(out_ptrs + rest[None, :], nothing, mask=(rows[:, None] < M) & (rest[None, :] < D))
        return
    # 3. The queries. Among those of a sequence the last ones see the most keys, and start first.
    begin = tl.load(offsets_ptr + sequence)
    L = tl.load(offsets_ptr + sequence + 1) - begin
    first = ((L + BLOCK_M - 1) // BLOCK_M - 1 - (turn - before)) * BLOCK_M
    rows = first + tl.arange(0, BLOCK_M)
    place = begin.to(tl.int64)
    q_ptr += (place * q_s + head * q_h) * UNIT
    k_ptr += (place * k_s + head // group * k_h) * UNIT
    v_ptr += (place * v_s + head // group * v_h) * UNIT
    q = _tile(q_ptr, rows, q_s, cols, L, D, True, False, UNIT)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    q_rest, acc_rest = q, acc
    if REST > 0:
        rest = BLOCK_D + tl.arange(0, REST)
        q_rest = _tile(q_ptr, rows, q_s, rest, L, D, True, False, UNIT)
        acc_rest = tl.zeros([BLOCK_M, REST], dtype=tl.float32)
    if NEGATIVE:
        q = -q
        q_rest = -q_rest
    sums = tl.zeros([BLOCK_M], dtype=tl.float32)
    offset = tl.full([BLOCK_M], -3.4028234663852886e38, dtype=tl.float32)
    # 4. Keys that every query of the block sees, then the others.
    whole, last = L // BLOCK_N * BLOCK_N, L
    if CAUSAL:
        whole, last = first // BLOCK_N * BLOCK_N, tl.minimum(first + BLOCK_M, L)
    for start in range(0, whole, BLOCK_N):
        acc, acc_rest, sums, offset = _add_keys(
            q, q_rest, acc, acc_rest, sums, offset, k_ptr, v_ptr, rows, start, L, k_s, v_s, scale, power,
            D, False, False, BLOCK_N, BLOCK_D, REST, UNIT,
        )  # fmt: skip
    for start in range(whole, last, BLOCK_N):
        acc, acc_rest, sums, offset = _add_keys(
            q, q_rest, acc, acc_rest, sums, offset, k_ptr, v_ptr, rows, start, L, k_s, v_s, scale, power,
            D, True, CAUSAL, BLOCK_N, BLOCK_D, REST, UNIT,
        )  # fmt: skip
    out_ptrs = out_ptr + ((place + rows.to(tl.int64)[:, None]) * out_s + head * out_h) * UNIT
    found = (acc / sums[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptrs + cols[None, :], found, mask=(rows[:, None] < L) & (cols[None, :] < D))
    if REST > 0:
        rest = BLOCK_D + tl.arange(0, REST)
        found = (acc_rest / sums[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptrs + rest[None, :], found, mask=(rows[:, None] < L) & (rest[None, :] < D))


def _widths(size: int) -> tuple[int, int]:
    """Return the columns of the first tile of a head, and those of a second one if that saves work; else 0."""
    whole = max(16, 1 << (size - 1).bit_length())
    rest = max(64, 1 << (size - whole // 2 - 1).bit_length()) if size > whole // 2 >= 64 else whole
    return (whole // 2, rest) if rest < whole // 2 else (whole, 0)


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    scale: float,
    causal: bool,
    out: torch.Tensor,
    *,
    BLOCK_M=128,
    BLOCK_N=64,
    num_stages=2,
):
    """out = T(softmax(scale * q k^T) v) within each sequence, zeros behind the last one.

    Shapes: q and out [M, Hq, D], k and v [M, Hkv, D], unit last strides, any others; cu_seqlens [N + 1] int32, from 0 up to M;
    T in bfloat16, float16. Scores, softmax and sums are in fp32, weights are rounded to T for the second product.
    Mapping: a program owns BLOCK_M queries of a head in one sequence, which it finds by the ends of all sequences, and streams
    the keys that they see. Nothing is read on the host: there are as many programs as any N sequences of M tokens may need.
    """
    M, Hq, D = q.shape
    sequences = cu_seqlens.shape[0] - 1
    if q.numel() == 0:
        return
    block_d, rest = _widths(D)
    block_m = 64 if 64 * sequences >= M or block_d > 128 else BLOCK_M
    block_n = 64 if D > 128 else BLOCK_N
    strides = [stride for x in (q, k, v, out) for stride in x.stride()[:2]]
    unit = 8 if all(stride % 8 == 0 for stride in strides) else 1
    steep = max(abs(scale) * LOG2_E, 1e-30)
    _packed_attention[((M + block_m - 1) // block_m + sequences, Hq)](
        q, k, v, cu_seqlens, out, *(stride // unit for stride in strides),
        steep, 2.0 ** math.ceil(math.log2(steep)), sequences, M, Hq // k.shape[1],
        D, causal, scale < 0, block_m, block_n, block_d, rest, unit, min(1024, max(16, 1 << (sequences - 1).bit_length())),
        num_warps=8 if block_m > 64 or block_d > 128 else 4, num_stages=num_stages,
    )  # fmt: skip
