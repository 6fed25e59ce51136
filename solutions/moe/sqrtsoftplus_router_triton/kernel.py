"""Experts by the square root of softplus, or by a table, Triton: one launch."""

import torch
import triton
import triton.language as tl

# Values are ranked as integers that compare as they do: the largest of a warp is then one instruction.
LEAST = tl.constexpr(-(2**31))  # below the integer of every value


@triton.jit
def _ordered(values):
    """int32 of float32: equal for -0.0 and 0.0, above that of infinity for a NaN."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return tl.where(values != values, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def _exp(x):
    """e^x, x <= 0, to the last digits: 2^n times 2^r, r from 0 to 1, where x log2(e) alone would be rounded too much."""
    part = tl.minimum(tl.maximum(tl.fma(x, 0.0057249800302088260651, 0.5), 0.0), 1.0)
    n = tl.floor(part * 252.0) - 126.0
    r = tl.fma(x, 1.925963033500011079e-08, tl.fma(x, 1.4426950216293334961, -n))
    return tl.exp2(r) * ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _scores(logits, T: tl.constexpr):
    """The square root of log(1 + exp(x)), both rounded to T as eager code does: which scores are equal depends on it.

    The logarithm is the series of atanh, y <= 1/3, which keeps its digits where it is small.
    """
    t = _exp(-tl.abs(logits))
    y = tl.div_rn(t, 2.0 + t)
    z = y * y
    series = 1.0 / 15 + z * (1.0 / 17)
    series = 1.0 / 11 + z * (1.0 / 13 + z * series)
    series = 1.0 / 7 + z * (1.0 / 9 + z * series)
    series = 1.0 / 3 + z * (1.0 / 5 + z * series)
    soft = (tl.maximum(logits, 0.0) + 2.0 * y * (1.0 + z * series)).to(T).to(tl.float32)
    scores = tl.sqrt_rn(soft).to(T).to(tl.float32)
    return tl.where(logits != logits, float("nan"), scores)


@triton.jit
def _shares(scores, scale, T: tl.constexpr):
    """scores / (sum + 1e-20) * scale, every step of it rounded to T."""
    total = tl.sum(scores, axis=1, keep_dims=True).to(T).to(tl.float32)
    total = (total + 1e-20).to(T).to(tl.float32)
    shares = tl.div_rn(scores, tl.broadcast_to(total, scores.shape)).to(T).to(tl.float32)
    return (shares * scale).to(T)


@triton.jit(do_not_specialize=["M", "scale"])
def _choose(
    logits_ptr,
    bias_ptr,
    weights_ptr,
    ids_ptr,
    logits_stride,
    weights_stride,
    ids_stride,
    scale,
    M,
    E: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    T: tl.constexpr = logits_ptr.dtype.element_ty
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    experts = tl.arange(0, BLOCK_E)[None, :]
    # Rows past the last are read from it and not stored: reads need no mask where E is a power of two.
    row_ptrs = logits_ptr + tl.minimum(rows, M - 1) * logits_stride
    if E == BLOCK_E:
        logits = tl.load(row_ptrs + experts).to(tl.float32)
        bias = tl.load(bias_ptr + experts)
    else:
        logits = tl.load(row_ptrs + experts, mask=experts < E, other=0.0).to(tl.float32)
        bias = tl.load(bias_ptr + experts, mask=experts < E, other=0.0)
    # A NaN is above all, so that every id exists.
    ordered = tl.where(experts < E, _ordered(_scores(logits, T) + bias), LEAST)
    choices = tl.arange(0, BLOCK_K)[None, :]
    ids = tl.zeros([BLOCK_M, BLOCK_K], dtype=tl.int32)
    for k in range(K):
        best = tl.max(ordered, axis=1, keep_dims=True)
        first = tl.min(tl.where(ordered == best, experts, BLOCK_E), axis=1, keep_dims=True)
        ordered = tl.where(experts == first, LEAST, ordered)
        ids = tl.where(choices == k, first, ids)
    # The logits of the chosen are read once more: cheaper than a reduction for each of them.
    chosen = tl.load(row_ptrs + ids, mask=(choices < K) & (ids < E), other=0.0).to(tl.float32)
    weights = _shares(tl.where(choices < K, _scores(chosen, T), 0.0), scale, T)
    mask = (choices < K) & (rows < M)
    tl.store(weights_ptr + rows * weights_stride + choices, weights, mask=mask)
    tl.store(ids_ptr + rows * ids_stride + choices, ids.to(tl.int64), mask=mask)


@triton.jit(do_not_specialize=["M", "V", "scale"])
def _look_up(
    logits_ptr,
    token_ids_ptr,
    table_ptr,
    weights_ptr,
    ids_ptr,
    logits_stride,
    table_stride,
    weights_stride,
    ids_stride,
    scale,
    M,
    V,
    E: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    T: tl.constexpr = logits_ptr.dtype.element_ty
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    choices = tl.arange(0, BLOCK_K)[None, :]
    mask = (choices < K) & (rows < M)
    token = tl.load(token_ids_ptr + rows, mask=rows < M, other=0)
    # What no table has is read nowhere: an id that is out of range gives the experts 0, and such an expert a score of zero.
    ids = tl.load(table_ptr + token * table_stride + choices, mask=mask & (token >= 0) & (token < V), other=0)
    there = mask & (ids >= 0) & (ids < E)
    logits = tl.load(logits_ptr + rows * logits_stride + ids, mask=there, other=0.0).to(tl.float32)
    weights = _shares(tl.where(there, _scores(logits, T), 0.0), scale, T)
    tl.store(weights_ptr + rows * weights_stride + choices, weights, mask=mask)
    tl.store(ids_ptr + rows * ids_stride + choices, ids, mask=mask)


def _power_of_two(size):
    return 1 << (size - 1).bit_length()  # triton.next_power_of_2 costs microseconds a call


def run_topk_sqrtsoftplus_bias(
    logits: torch.Tensor,
    bias: torch.Tensor,
    top_k: int,
    scale: float,
    weights: torch.Tensor,
    ids: torch.Tensor,
    *,
    BLOCK_M=None,
    num_warps=None,
):
    """weights = scale * s / sum(s), s the square roots of softplus(logits)[ids]; ids are ranked with the bias added.

    Shapes: logits [M, E] and weights [M, K] of bfloat16 or float32; bias [E] float32; ids [M, K] int64. Rows have unit last
    stride and any row stride. A program keeps BLOCK_M rows in registers; None: 2048 programs where there are so many rows, of
    at most 1024 scores.
    """
    M, E = logits.shape
    if M == 0:
        return
    columns = _power_of_two(E)
    rows = BLOCK_M or max(1, min(1 << (max(1, M // 2048).bit_length() - 1), 1024 // columns))
    warps = num_warps or max(1, min(8, rows * columns // 512))
    _choose[((M + rows - 1) // rows,)](
        logits, bias, weights, ids, logits.stride(0), weights.stride(0), ids.stride(0), float(scale), M,
        E, top_k, rows, columns, _power_of_two(top_k), num_warps=warps,
    )  # fmt: skip


def run_table_router(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    table: torch.Tensor,
    scale: float,
    weights: torch.Tensor,
    ids: torch.Tensor,
    *,
    BLOCK_M=None,
    num_warps=None,
):
    """weights = scale * s / sum(s), s the square roots of softplus(logits)[ids]; ids = table[token_ids].

    Shapes: logits [M, E] and weights [M, K] of bfloat16 or float32; token_ids [M], table [V, K] and ids [M, K] int64.
    Rows have unit last stride and any row stride. A program has BLOCK_M rows; None: 8, and 32 of many.
    """
    M, E = logits.shape
    if M == 0:
        return
    K = ids.shape[1]
    rows = BLOCK_M or (32 if M >= 4096 else 8)
    _look_up[((M + rows - 1) // rows,)](
        logits, token_ids, table, weights, ids, logits.stride(0), table.stride(0), weights.stride(0), ids.stride(0),
        float(scale), M, table.shape[0], E, K, rows, _power_of_two(K), num_warps=num_warps or 4,
    )  # fmt: skip
