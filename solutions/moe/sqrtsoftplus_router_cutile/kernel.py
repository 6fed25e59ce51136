"""Experts by the square root of softplus, or by a table, cuTile: one launch."""

import functools
from typing import Annotated

import cuda.tile as ct
import torch

# The number of experts is a compile-time constant: masks vanish where it is a power of two.
Rows = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1,))]
Int = ct.Constant[int]

LOWEST = float("-inf")
HIGHEST = float("inf")


@ct.function
def _rounded(values, dtype):
    return values.astype(dtype).astype(ct.float32)


@ct.function
def _scores(logits, dtype):
    """The square root of log(1 + exp(x)), both rounded as eager code does: which scores are equal depends on it.

    The logarithm is the series of atanh, y <= 1/3, which keeps its digits where it is small.
    """
    t = ct.exp(-ct.abs(logits))
    y = t / (2.0 + t)
    z = y * y
    series = 1.0 / 15 + z * (1.0 / 17)
    series = 1.0 / 11 + z * (1.0 / 13 + z * series)
    series = 1.0 / 7 + z * (1.0 / 9 + z * series)
    series = 1.0 / 3 + z * (1.0 / 5 + z * series)
    soft = _rounded(ct.maximum(logits, 0.0) + 2.0 * y * (1.0 + z * series), dtype)
    return ct.where(ct.isnan(logits), float("nan"), _rounded(ct.sqrt(soft), dtype))


@ct.function
def _shares(scores, scale, dtype):
    """scores / (sum + 1e-20) * scale, every step of it rounded."""
    total = _rounded(_rounded(ct.sum(scores, axis=1, keepdims=True), dtype) + 1e-20, dtype)
    return (_rounded(ct.truediv(scores, total), dtype) * scale).astype(dtype)


@ct.kernel
def _choose(
    logits: Rows, bias: ct.Array, weights: Rows, ids: Rows, scale: float, TILE_M: Int, TILE_E: Int, TILE_K: Int
):
    m, count = logits.shape
    k = ids.shape[1]
    rows = ct.bid(0) * TILE_M + ct.arange(TILE_M, dtype=ct.int32)[:, None]
    experts = ct.arange(TILE_E, dtype=ct.int32)[None, :]
    choices = ct.arange(TILE_K, dtype=ct.int32)[None, :]
    left = (experts < count) & (rows < m)
    scores = _scores(ct.gather(logits, (rows, experts), mask=left, check_bounds=False).astype(ct.float32), logits.dtype)
    ranked = scores + ct.gather(bias, experts, mask=experts < count, check_bounds=False)
    ranked = ct.where(ct.isnan(ranked), HIGHEST, ranked)  # a NaN is above all, and every id exists
    chosen = ct.zeros((TILE_M, TILE_K), dtype=ct.float32)
    chosen_ids = ct.zeros((TILE_M, TILE_K), dtype=ct.int32)
    for choice in range(k):
        best = ct.max(ct.where(left, ranked, LOWEST), axis=1, keepdims=True)
        first = ct.min(ct.where(left & (ranked == best), experts, TILE_E), axis=1, keepdims=True)
        left = left & (experts != first)
        score = ct.sum(ct.where(experts == first, scores, 0.0), axis=1, keepdims=True)
        chosen = ct.where(choices == choice, score, chosen)
        chosen_ids = ct.where(choices == choice, first, chosen_ids)
    shares = _shares(chosen, scale, weights.dtype)
    inside = (choices < k) & (rows < m)
    ct.scatter(weights, (rows, choices), shares, mask=inside, check_bounds=False)
    ct.scatter(ids, (rows, choices), chosen_ids.astype(ct.int64), mask=inside, check_bounds=False)


@ct.kernel
def _look_up(
    logits: Rows, token_ids: ct.Array, table: Rows, weights: Rows, ids: Rows, scale: float, TILE_M: Int, TILE_K: Int
):
    m, count = logits.shape
    words, k = table.shape
    rows = ct.bid(0) * TILE_M + ct.arange(TILE_M, dtype=ct.int32)[:, None]
    choices = ct.arange(TILE_K, dtype=ct.int32)[None, :]
    inside = (choices < k) & (rows < m)
    token = ct.gather(token_ids, rows, mask=rows < m, check_bounds=False)
    # What no table has is read nowhere: an id that is out of range gives the experts 0, and such an expert a score of zero.
    known = inside & (token >= 0) & (token < words)
    found = ct.gather(table, (token, choices), mask=known, check_bounds=False)
    there = inside & (found >= 0) & (found < count)
    given = ct.gather(logits, (rows, found), mask=there, check_bounds=False).astype(ct.float32)
    shares = _shares(ct.where(there, _scores(given, logits.dtype), 0.0), scale, weights.dtype)
    ct.scatter(weights, (rows, choices), shares, mask=inside, check_bounds=False)
    ct.scatter(ids, (rows, choices), found, mask=inside, check_bounds=False)


@functools.lru_cache
def _with_warps(kernel: ct.kernel, warps: int) -> ct.kernel:
    return kernel.replace_hints(num_worker_warps=warps)


def _power_of_two(size):
    return 1 << (size - 1).bit_length()


def run_topk_sqrtsoftplus_bias(
    logits: torch.Tensor,
    bias: torch.Tensor,
    top_k: int,
    scale: float,
    weights: torch.Tensor,
    ids: torch.Tensor,
    *,
    TILE_M: int | None = None,
    WARPS: int | None = None,
) -> None:
    """weights = scale * s / sum(s), s the square roots of softplus(logits)[ids]; ids are ranked with the bias added.

    Shapes: logits [M, E] and weights [M, K] of bfloat16 or float32; bias [E] float32; ids [M, K] int64. Rows have unit last
    stride and any row stride. A block keeps TILE_M rows in registers; None: one of few, else as many as have 1024 scores.
    """
    M, E = logits.shape
    if M == 0:
        return
    tile_e = _power_of_two(E)
    rows = TILE_M or (1 if M <= 16 else max(1, 1024 // tile_e))
    warps = WARPS or (8 if rows * tile_e >= 2048 else 4)
    args = (logits, bias, weights, ids, float(scale), rows, tile_e, _power_of_two(top_k))
    ct.launch(torch.cuda.current_stream(), (-(-M // rows), 1, 1), _with_warps(_choose, warps), args)


def run_table_router(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    table: torch.Tensor,
    scale: float,
    weights: torch.Tensor,
    ids: torch.Tensor,
    *,
    TILE_M: int | None = None,
    WARPS: int | None = None,
) -> None:
    """weights = scale * s / sum(s), s the square roots of softplus(logits)[ids]; ids = table[token_ids].

    Shapes: logits [M, E] and weights [M, K] of bfloat16 or float32; token_ids [M], table [V, K] and ids [M, K] int64.
    Rows have unit last stride and any row stride. A block has TILE_M rows; None: 8, and 32 of many.
    """
    M = logits.shape[0]
    if M == 0:
        return
    rows = TILE_M or (32 if M >= 4096 else 8)
    args = (logits, token_ids, table, weights, ids, float(scale), rows, _power_of_two(ids.shape[1]))
    ct.launch(torch.cuda.current_stream(), (-(-M // rows), 1, 1), _with_warps(_look_up, WARPS or 4), args)
