"""Routers that rank with a bias added and weigh without it, Triton: one launch, rows in registers."""

import torch
import triton
import triton.language as tl

BELOW = tl.constexpr(float("-inf"))  # of an expert that was chosen, or that does not exist


@triton.jit(do_not_specialize=["M", "least", "scale"])
def _choose(
    logits_ptr,
    bias_ptr,
    weights_ptr,
    ids_ptr,
    logits_stride,
    weights_stride,
    ids_stride,
    least,
    scale,
    M,
    E: tl.constexpr,
    K: tl.constexpr,
    SIGMOID: tl.constexpr,
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
    bias = tl.load(bias_ptr + experts, mask=experts < E, other=0.0)
    if SIGMOID:  # rounded to the dtype of the scores
        below = 1.0 + tl.exp(-logits)
        shares = tl.div_rn(tl.full(below.shape, 1.0, tl.float32), below).to(T).to(tl.float32)
    else:
        logits = tl.where(experts < E, logits, BELOW)
        terms = tl.exp(logits - tl.max(logits, axis=1, keep_dims=True))
        shares = tl.div_rn(terms, tl.broadcast_to(tl.sum(terms, axis=1, keep_dims=True), terms.shape))
    left = tl.where(experts < E, shares + bias, BELOW)
    is_broken = tl.max((left != left).to(tl.int32), axis=1, keep_dims=True) > 0
    choices = tl.arange(0, BLOCK_K)[None, :]
    ids = tl.zeros([BLOCK_M, BLOCK_K], dtype=tl.int32)
    chosen = tl.zeros([BLOCK_M, BLOCK_K], dtype=tl.float32)
    for k in range(K):
        best = tl.max(left, axis=1, keep_dims=True)
        first = tl.min(tl.where(left == best, experts, BLOCK_E), axis=1, keep_dims=True)
        share = tl.sum(tl.where(experts == first, shares, 0.0), axis=1, keep_dims=True)
        left = tl.where(experts == first, BELOW, left)
        ids = tl.where(choices == k, first, ids)
        chosen = tl.where(choices == k, share, chosen)
    if RENORMALISE:
        sums = tl.sum(chosen, axis=1, keep_dims=True)
        sums = (sums.to(T).to(tl.float32) + 1e-6).to(T).to(tl.float32) if SIGMOID else tl.maximum(sums, least)
        chosen = tl.div_rn(chosen, tl.broadcast_to(sums, chosen.shape)).to(T).to(tl.float32)
    # A row with a NaN has NaN for weights, and ids that exist and differ.
    chosen = tl.where(is_broken, float("nan"), chosen)
    ids = tl.where(is_broken, choices, ids)
    there = (rows < M) & (choices < K)
    tl.store(weights_ptr + rows * weights_stride + choices, (chosen * scale).to(T), mask=there)
    tl.store(ids_ptr + rows * ids_stride + choices, ids.to(tl.int64), mask=there)


def _power_of_two(size):
    return 1 << (size - 1).bit_length()  # triton.next_power_of_2 costs microseconds a call


def _launch(logits, bias, top_k, renormalise, least, scale, weights, ids, sigmoid, BLOCK_M, num_warps):
    M, E = logits.shape
    if M == 0:
        return
    columns = _power_of_two(E)
    # 2048 programs where there are so many rows, of at most 1024 scores.
    rows = BLOCK_M or max(1, min(1 << (max(1, M // 2048).bit_length() - 1), 1024 // columns))
    warps = num_warps or max(1, min(8, rows * columns // 512))
    _choose[((M + rows - 1) // rows,)](
        logits, bias, weights, ids, logits.stride(0), weights.stride(0), ids.stride(0), float(least), float(scale), M,
        E, top_k, sigmoid, bool(renormalise), rows, columns, _power_of_two(top_k), num_warps=warps,
    )  # fmt: skip


def run_topk_softmax_bias(
    logits: torch.Tensor,
    bias: torch.Tensor,
    top_k: int,
    renormalise: bool,
    least: float,
    scale: float,
    weights: torch.Tensor,
    ids: torch.Tensor,
    *,
    BLOCK_M=None,
    num_warps=None,
):
    """weights = scale * p[ids], p = softmax(logits), divided by max(their sum, least) if ``renormalise``; ids: largest p + bias.

    Shapes: logits [M, E], bias [E] and weights [M, K] float32; ids [M, K] int64. Rows have unit last stride and any row stride.
    """
    _launch(logits, bias, top_k, renormalise, least, scale, weights, ids, False, BLOCK_M, num_warps)


def run_topk_sigmoid_bias_rounded(
    logits: torch.Tensor,
    bias: torch.Tensor,
    top_k: int,
    renormalise: bool,
    scale: float,
    weights: torch.Tensor,
    ids: torch.Tensor,
    *,
    BLOCK_M=None,
    num_warps=None,
):
    """weights = scale * p[ids], p = T(sigmoid(logits)), divided by their sum + 1e-6 if ``renormalise``; ids: largest p + bias.

    Shapes: logits [M, E] and weights [M, K] of one dtype T, bias [E] float32; ids [M, K] int64. Each step is rounded to T.
    """
    _launch(logits, bias, top_k, renormalise, 0.0, scale, weights, ids, True, BLOCK_M, num_warps)
