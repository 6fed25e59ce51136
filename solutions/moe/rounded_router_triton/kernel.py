"""Routers that round each step to the dtype of their scores, Triton: one launch, rows in registers."""

import torch
import triton
import triton.language as tl


# Values are ranked as integers that compare as they do, so that a NaN is the largest, as in PyTorch.
LEAST = tl.constexpr(-(2**31))  # below the integer of every value
LOWEST = tl.constexpr(-0x7F800001)  # the integer of -inf


@triton.jit
def _ordered(values):
    """int32 of float32: equal for -0.0 and 0.0, above that of infinity for a NaN."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return tl.where(values != values, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def _first_of(ranks, experts, E: tl.constexpr):
    """The smallest expert of the highest rank."""
    best = tl.max(ranks, axis=1, keep_dims=True)
    return tl.min(tl.where(ranks == best, experts, E), axis=1, keep_dims=True)


@triton.jit
def _value_of(values, expert, experts):
    """The value of one expert of each row."""
    return tl.sum(tl.where(experts == expert, values, 0.0), axis=1, keep_dims=True)


@triton.jit
def _share(scores, left, best, limit, T: tl.constexpr):
    """The share of ``best`` in a softmax over what is left and close to it; every step of the distance is rounded to T."""
    gap = (best - scores).to(T).to(tl.float32)
    size = tl.maximum(tl.abs(scores), best)
    is_far = tl.div_rn(gap, size).to(T).to(tl.float32) > limit  # 0 / 0 is no number, and not far
    total = tl.sum(tl.where(is_far, 0.0, tl.exp(left - best)), axis=1, keep_dims=True)
    return tl.div_rn(tl.full(total.shape, 1.0, tl.float32), total).to(T)


@triton.jit(do_not_specialize=["M", "limit"])
def _mix(
    scores_ptr,
    weights_ptr,
    ids_ptr,
    scores_stride,
    weights_stride,
    ids_stride,
    limit,
    M,
    E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    T: tl.constexpr = scores_ptr.dtype.element_ty
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    experts = tl.arange(0, BLOCK_E)[None, :]
    mask = (rows < M) & (experts < E)
    # What no expert has is -inf, and adds nothing to a sum; a row past the last is all zeros.
    least = tl.where(experts < E, 0.0, float("-inf"))
    scores = tl.load(scores_ptr + rows * scores_stride + experts, mask=mask, other=0.0).to(tl.float32) + least
    # PyTorch compares with a number of the dtype of the scores.
    edge = tl.full([BLOCK_M, 1], limit, tl.float32).to(T).to(tl.float32)
    ranks = tl.where(experts < E, _ordered(scores), LEAST)
    first = _first_of(ranks, experts, E)
    best = _value_of(scores, first, experts)
    left = tl.where(experts == first, float("-inf"), scores)
    second = _first_of(tl.where(experts == first, LOWEST, ranks), experts, E)
    next_best = _value_of(left, second, experts)
    there = rows < M
    weights, ids = weights_ptr + rows * weights_stride, ids_ptr + rows * ids_stride
    tl.store(weights, _share(scores, scores, best, edge, T), mask=there)
    tl.store(weights + 1, _share(scores, left, next_best, edge, T), mask=there)
    tl.store(ids, first.to(tl.int64), mask=there)
    tl.store(ids + 1, second.to(tl.int64), mask=there)


@triton.jit(do_not_specialize=["M", "scale"])
def _choose(
    logits_ptr,
    weights_ptr,
    ids_ptr,
    logits_stride,
    weights_stride,
    ids_stride,
    scale,
    M,
    E: tl.constexpr,
    K: tl.constexpr,
    RENORMALISE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    T: tl.constexpr = logits_ptr.dtype.element_ty
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    experts = tl.arange(0, BLOCK_E)[None, :]
    mask = (rows < M) & (experts < E)
    logits = tl.load(logits_ptr + rows * logits_stride + experts, mask=mask, other=0.0).to(tl.float32)
    logits = tl.where(experts < E, logits, float("-inf"))
    terms = tl.exp(logits - tl.max(logits, axis=1, keep_dims=True))
    total = tl.broadcast_to(tl.sum(terms, axis=1, keep_dims=True), terms.shape)
    shares = tl.div_rn(terms, total).to(T).to(tl.float32)
    ranks = tl.where(experts < E, _ordered(shares), LEAST)
    choices = tl.arange(0, BLOCK_K)[None, :]
    ids = tl.zeros([BLOCK_M, BLOCK_K], dtype=tl.int32)
    chosen = tl.zeros([BLOCK_M, BLOCK_K], dtype=tl.float32)
    for k in range(K):
        first = _first_of(ranks, experts, E)
        ranks = tl.where(experts == first, LEAST, ranks)
        ids = tl.where(choices == k, first, ids)
        chosen = tl.where(choices == k, _value_of(shares, first, experts), chosen)
    if RENORMALISE:
        sums = tl.sum(chosen, axis=1, keep_dims=True).to(T).to(tl.float32)
        sums = (sums + 1e-20).to(T).to(tl.float32)
        chosen = tl.div_rn(chosen, tl.broadcast_to(sums, chosen.shape)).to(T).to(tl.float32)
    there = (rows < M) & (choices < K)
    tl.store(weights_ptr + rows * weights_stride + choices, (chosen * scale).to(T), mask=there)
    tl.store(ids_ptr + rows * ids_stride + choices, ids.to(tl.int64), mask=there)


def _power_of_two(size):
    return 1 << (size - 1).bit_length()  # triton.next_power_of_2 costs microseconds a call


def _tile(M, columns, BLOCK_M, num_warps):
    """Rows of a program and its warps: 2048 programs where there are so many rows, of at most 1024 scores."""
    rows = BLOCK_M or max(1, min(1 << (max(1, M // 2048).bit_length() - 1), 1024 // columns))
    return rows, num_warps or max(1, min(8, rows * columns // 512))


def run_sparsemixer_top2(
    scores: torch.Tensor,
    jitter_eps: float,
    weights: torch.Tensor,
    ids: torch.Tensor,
    *,
    BLOCK_M=None,
    num_warps=None,
):
    """weights = shares of the two best experts among those within 2 jitter_eps of them; ids = the two.

    Shapes: scores [M, E] and weights [M, 2] of one dtype; ids [M, 2] int64. Rows have unit last stride and any row stride.
    """
    M, E = scores.shape
    if M == 0:
        return
    columns = _power_of_two(E)
    rows, warps = _tile(M, columns, BLOCK_M, num_warps)
    _mix[((M + rows - 1) // rows,)](
        scores, weights, ids, scores.stride(0), weights.stride(0), ids.stride(0), 2.0 * jitter_eps, M,
        E, rows, columns, num_warps=warps,
    )  # fmt: skip


def run_topk_softmax_rounded(
    logits: torch.Tensor,
    top_k: int,
    renormalise: bool,
    scale: float,
    weights: torch.Tensor,
    ids: torch.Tensor,
    *,
    BLOCK_M=None,
    num_warps=None,
):
    """weights = scale * p[ids], p = softmax(logits), divided by their sum if ``renormalise``; ids are the largest of p.

    Shapes: logits [M, E] and weights [M, K] of one dtype; ids [M, K] int64. Rows have unit last stride and any row stride.
    """
    M, E = logits.shape
    if M == 0:
        return
    columns = _power_of_two(E)
    rows, warps = _tile(M, columns, BLOCK_M, num_warps)
    _choose[((M + rows - 1) // rows,)](
        logits, weights, ids, logits.stride(0), weights.stride(0), ids.stride(0), float(scale), M,
        E, top_k, bool(renormalise), rows, columns, _power_of_two(top_k), num_warps=warps,
    )  # fmt: skip
