"""Draw one index of each row of probabilities, Triton: one launch, no sort.

What is kept are the probabilities from a threshold up. Numbers that are not negative are ordered as the integers that have their
bits, so the threshold is found from its highest bits down, two of them in a pass over the row: it is the largest one with enough
probabilities, or enough of their sum, at or above it. A row is read from memory once and then from the cache.
"""

import torch
import triton
import triton.language as tl

_MOST: tl.constexpr = tl.constexpr(0x7FFFFFFF)  # a NaN's bits, which no probability has


@triton.jit
def _threshold(
    row_ptrs, rows_there, V, floor, least, COUNT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr
):
    """The largest bits at or above which there are at least so many values, or so much, and something.

    What has fewer bits than floor is no part of it.
    """
    found = floor * 0
    for step in range(16):
        # Bit 31 is the sign: the first pass has one bit to decide, and thresholds beside it that nothing reaches.
        shift = 30 - 2 * step
        low = found | (1 << shift)
        middle = tl.where(step == 0, _MOST, found | (2 << (shift % 30)))
        high = tl.where(step == 0, _MOST, found | (3 << (shift % 30)))
        # Added up column by column, so that a pass ends in three sums and not each of its tiles.
        a = tl.zeros([BLOCK_M, BLOCK_V], dtype=least.dtype)
        b, c = a, a
        for start in range(0, V, BLOCK_V):
            cols = start + tl.arange(0, BLOCK_V)[None, :]
            x = tl.load(row_ptrs + cols, mask=rows_there & (cols < V), other=0.0)
            bits = x.to(tl.int32, bitcast=True)
            # No column beyond the row reaches a threshold, which is above zero.
            x = (bits >= floor).to(tl.int32) if COUNT else tl.where(bits >= floor, x, 0.0)
            a += tl.where(bits >= low, x, 0)
            b += tl.where(bits >= middle, x, 0)
            c += tl.where(bits >= high, x, 0)
        at_low = tl.sum(a, axis=1, keep_dims=True)
        at_middle = tl.sum(b, axis=1, keep_dims=True)
        at_high = tl.sum(c, axis=1, keep_dims=True)
        found = tl.where((at_low >= least) & (at_low > 0), low, found)
        found = tl.where((at_middle >= least) & (at_middle > 0), middle, found)
        found = tl.where((at_high >= least) & (at_high > 0), high, found)
    return found


@triton.jit
def _total(row_ptrs, rows_there, V, threshold, BLOCK_V: tl.constexpr):
    total = (threshold * 0).to(tl.float32)
    for start in range(0, V, BLOCK_V):
        cols = start + tl.arange(0, BLOCK_V)[None, :]
        x = tl.load(row_ptrs + cols, mask=rows_there & (cols < V), other=0.0)
        total += tl.sum(tl.where(x.to(tl.int32, bitcast=True) >= threshold, x, 0.0), axis=1, keep_dims=True)
    return total


@triton.jit
def _pick(row_ptrs, rows_there, V, threshold, uniform, BLOCK_V: tl.constexpr):
    """The first kept index up to which more than a share of the kept sum lies; the last one where rounding leaves none."""
    target = uniform * _total(row_ptrs, rows_there, V, threshold, BLOCK_V)
    before = target * 0
    found = threshold * 0 + _MOST
    last = threshold * 0
    for start in range(0, V, BLOCK_V):
        cols = start + tl.arange(0, BLOCK_V)[None, :]
        x = tl.load(row_ptrs + cols, mask=rows_there & (cols < V), other=0.0)
        kept = (x.to(tl.int32, bitcast=True) >= threshold) & (x > 0)
        x = tl.where(kept, x, 0.0)
        mass = before + tl.cumsum(x, axis=1)
        found = tl.minimum(found, tl.min(tl.where(kept & (mass > target), cols, _MOST), axis=1, keep_dims=True))
        last = tl.maximum(last, tl.max(tl.where(kept, cols, 0), axis=1, keep_dims=True))
        before += tl.sum(x, axis=1, keep_dims=True)
    return tl.where(found < _MOST, found, last)


@triton.jit(do_not_specialize=["B"])
def _sample(
    probs_ptr,
    top_k_ptr,
    share_ptr,
    uniform_ptr,
    samples_ptr,
    stride,
    B,
    V,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    MIN_P: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    there = rows < B
    row_ptrs = probs_ptr + rows * stride
    threshold = (rows * 0).to(tl.int32)
    if TOP_K:
        count = tl.load(top_k_ptr + rows, mask=there, other=1)
        count = tl.where((count < 1) | (count > V), V, count)
        threshold = _threshold(row_ptrs, there, V, threshold, count, True, BLOCK_M, BLOCK_V)
    if TOP_P:
        share = tl.load(share_ptr + rows, mask=there, other=1.0)
        least = share * _total(row_ptrs, there, V, threshold, BLOCK_V)
        cut = _threshold(row_ptrs, there, V, threshold, least, False, BLOCK_M, BLOCK_V)
        threshold = tl.where(share < 1, tl.maximum(threshold, cut), threshold)
    if MIN_P:
        share = tl.minimum(tl.load(share_ptr + rows, mask=there, other=1.0), 1.0)
        largest = (rows * 0).to(tl.float32)
        for start in range(0, V, BLOCK_V):
            cols = start + tl.arange(0, BLOCK_V)[None, :]
            x = tl.load(row_ptrs + cols, mask=there & (cols < V), other=0.0)
            largest = tl.maximum(largest, tl.max(x, axis=1, keep_dims=True))
        threshold = tl.maximum(share * largest, 0.0).to(tl.int32, bitcast=True)
    uniform = tl.load(uniform_ptr + rows, mask=there, other=0.0)
    samples = _pick(row_ptrs, there, V, threshold, uniform, BLOCK_V)
    tl.store(samples_ptr + rows, samples.to(tl.int64), mask=there)


@triton.jit(do_not_specialize=["B"])
def _argmax(logits_ptr, ids_ptr, stride, B, V, BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    there = rows < B
    largest = (rows * 0).to(tl.float32) + float("-inf")
    first = (rows * 0).to(tl.int32)
    first_nan = first + 0x7FFFFFFF
    for start in range(0, V, BLOCK_V):
        cols = start + tl.arange(0, BLOCK_V)[None, :]
        inside = there & (cols < V)
        x = tl.load(logits_ptr + rows * stride + cols, mask=inside, other=float("-inf")).to(tl.float32)
        not_number = x != x
        first_nan = tl.minimum(first_nan, tl.min(tl.where(not_number, cols, 0x7FFFFFFF), axis=1, keep_dims=True))
        x = tl.where(not_number, float("-inf"), x)
        best = tl.max(x, axis=1, keep_dims=True)
        at = tl.min(tl.where(x == best, cols, 0x7FFFFFFF), axis=1, keep_dims=True)
        # Only a larger one replaces what came before, so that the first of equal ones stays.
        first = tl.where(best > largest, at, first)
        largest = tl.maximum(largest, best)
    tl.store(ids_ptr + rows, tl.where(first_nan < 0x7FFFFFFF, first_nan, first).to(tl.int64), mask=there)


def _shape(rows, columns, block_v, num_warps):
    """Columns of a tile, rows of a program, and warps: many short rows, or a part of one long row, of 16 values a thread."""
    width = min(block_v or 8192, 1 << (columns - 1).bit_length())
    height = max(1, min(8192 // width, 1 << (rows - 1).bit_length()))
    return width, height, num_warps or max(1, min(16, width * height // 512))


def _launch(probs, top_k, share, min_p, uniform, samples, block_v, num_warps):
    B, V = probs.shape
    if B == 0:
        return
    width, height, warps = _shape(B, V, block_v, num_warps)
    _sample[((B + height - 1) // height,)](
        probs, uniform if top_k is None else top_k, uniform if share is None else share, uniform, samples,
        probs.stride(0), B, V, top_k is not None, share is not None and not min_p, min_p, height, width,
        num_warps=warps,
    )  # fmt: skip


# Of all entry functions: probs [B, V] float32 has unit last stride and any row stride; uniform [B] float32 holds a random number
# from 0 to below 1 for each row, top_k [B] is int32, and samples [B] int64. BLOCK_V and num_warps: see _shape.


def run_top_k(
    probs: torch.Tensor,
    top_k: torch.Tensor,
    uniform: torch.Tensor,
    samples: torch.Tensor,
    *,
    BLOCK_V=None,
    num_warps=None,
):
    """samples [B]: drawn from the top_k largest probabilities of each row and those that tie with the last of them."""
    _launch(probs, top_k, None, False, uniform, samples, BLOCK_V, num_warps)


def run_top_p(
    probs: torch.Tensor,
    top_p: torch.Tensor,
    uniform: torch.Tensor,
    samples: torch.Tensor,
    *,
    BLOCK_V=None,
    num_warps=None,
):
    """samples [B]: drawn from the largest probabilities of each row that reach top_p of its sum, and ties with the last."""
    _launch(probs, None, top_p, False, uniform, samples, BLOCK_V, num_warps)


def run_top_k_top_p(
    probs: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    uniform: torch.Tensor,
    samples: torch.Tensor,
    *,
    BLOCK_V=None,
    num_warps=None,
):
    """samples [B]: drawn from what top-p keeps of what top-k keeps of each row."""
    _launch(probs, top_k, top_p, False, uniform, samples, BLOCK_V, num_warps)


def run_min_p(
    probs: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
    samples: torch.Tensor,
    *,
    BLOCK_V=None,
    num_warps=None,
):
    """samples [B]: drawn from the probabilities that are at least min_p times the largest of their row."""
    _launch(probs, None, min_p, True, uniform, samples, BLOCK_V, num_warps)


def run_greedy_argmax(logits: torch.Tensor, ids: torch.Tensor, *, BLOCK_V=None, num_warps=None):
    """ids [B]: the first index of the largest score of each row of logits [B, V], or of its first NaN."""
    B, V = logits.shape
    if B == 0:
        return
    width, height, warps = _shape(B, V, BLOCK_V, num_warps)
    grid = ((B + height - 1) // height,)
    _argmax[grid](logits, ids, logits.stride(0), B, V, height, width, num_warps=warps)
