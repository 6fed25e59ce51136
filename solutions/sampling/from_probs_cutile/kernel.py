"""Draw one index of each row of probabilities, cuTile: a block a row, one launch, no sort.

What is kept are the probabilities from a threshold up. Numbers that are not negative are ordered as the integers that have their
bits, so the threshold is found from its highest bits down, two of them in a pass over the row: it is the largest one with enough
probabilities, or enough of their sum, at or above it. A row is read from memory once and then from the cache.
"""

from typing import Annotated

import cuda.tile as ct
import torch

# The row length is a compile-time constant, as a vocabulary is of a model. The number of rows is dynamic.
Rows = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1,))]
Int = ct.Constant[int]

MOST = 0x7FFFFFFF  # a NaN's bits, which no probability has; and more than there are columns
BY_RANK, BY_MASS, BY_LARGEST = 1, 2, 4


@ct.function
def _piece(probs, row, piece, TILE):
    """The columns of one piece of a row, and what is there; zeros beyond the row."""
    cols = piece * TILE + ct.arange(TILE, dtype=ct.int32)
    return cols, ct.gather(probs, (row, cols), mask=cols < probs.shape[1], check_bounds=False, padding_value=0.0)


@ct.function
def _threshold(probs, row, floor, least, COUNT, TILE):
    """The largest bits at or above which there are at least so many values, or so much, and something.

    What has fewer bits than floor is no part of it. Counts are float32 too: a row has fewer than 2 ** 24 columns.
    """
    found = ct.full((), 0, dtype=ct.int32)
    for step in range(16):
        # Bit 31 is the sign: the first pass has one bit to decide, and thresholds beside it that nothing reaches.
        shift = 30 - 2 * step
        low = found | (1 << shift)
        middle = ct.where(step == 0, MOST, found | (1 << (shift + 1)))
        high = ct.where(step == 0, MOST, low | middle)
        # Added up column by column, so that a pass ends in three sums and not each of its pieces.
        at_low = ct.full((TILE,), 0.0, dtype=ct.float32)
        at_middle = ct.full((TILE,), 0.0, dtype=ct.float32)
        at_high = ct.full((TILE,), 0.0, dtype=ct.float32)
        for piece in range(ct.cdiv(probs.shape[1], TILE)):
            _cols, values = _piece(probs, row, piece, TILE)
            bits = ct.bitcast(values, ct.int32)
            if COUNT:
                values = ct.full((TILE,), 1.0, dtype=ct.float32)
            values = ct.where(bits >= floor, values, 0.0)
            at_low = at_low + ct.where(bits >= low, values, 0.0)
            at_middle = at_middle + ct.where(bits >= middle, values, 0.0)
            at_high = at_high + ct.where(bits >= high, values, 0.0)
        low_sum = ct.sum(at_low)
        middle_sum = ct.sum(at_middle)
        high_sum = ct.sum(at_high)
        found = ct.where((low_sum >= least) & (low_sum > 0.0), low, found)
        found = ct.where((middle_sum >= least) & (middle_sum > 0.0), middle, found)
        found = ct.where((high_sum >= least) & (high_sum > 0.0), high, found)
    return found


@ct.function
def _total(probs, row, threshold, TILE):
    total = ct.full((TILE,), 0.0, dtype=ct.float32)
    for piece in range(ct.cdiv(probs.shape[1], TILE)):
        _cols, values = _piece(probs, row, piece, TILE)
        total = total + ct.where(ct.bitcast(values, ct.int32) >= threshold, values, 0.0)
    return ct.sum(total)


@ct.function
def _largest(probs, row, TILE):
    largest = ct.full((TILE,), 0.0, dtype=ct.float32)
    for piece in range(ct.cdiv(probs.shape[1], TILE)):
        _cols, values = _piece(probs, row, piece, TILE)
        largest = ct.maximum(largest, values)
    return ct.max(largest)


@ct.function
def _pick(probs, row, threshold, target, TILE):
    """The first kept index up to which more than target lies; the last one where rounding leaves none."""
    before = ct.full((), 0.0, dtype=ct.float32)
    first = ct.full((), MOST, dtype=ct.int32)
    last = ct.full((), 0, dtype=ct.int32)
    for piece in range(ct.cdiv(probs.shape[1], TILE)):
        cols, values = _piece(probs, row, piece, TILE)
        kept = (ct.bitcast(values, ct.int32) >= threshold) & (values > 0.0)
        values = ct.where(kept, values, 0.0)
        mass = before + ct.cumsum(values, axis=0)
        first = ct.minimum(first, ct.min(ct.where(kept & (mass > target), cols, MOST)))
        last = ct.maximum(last, ct.max(ct.where(kept, cols, 0)))
        before = before + ct.sum(values)
    return ct.where(first < MOST, first, last)


@ct.kernel
def _sample(probs: Rows, top_k, share, uniform, samples, FILTERS: Int, TILE: Int):
    row = ct.bid(0)
    columns = probs.shape[1]
    threshold = ct.full((), 0, dtype=ct.int32)
    if FILTERS & BY_RANK:
        rank = ct.gather(top_k, row)
        rank = ct.where((rank < 1) | (rank > columns), columns, rank)
        threshold = _threshold(probs, row, threshold, rank.astype(ct.float32), 1, TILE)
    if FILTERS & BY_MASS:
        kept_share = ct.gather(share, row)
        least = kept_share * _total(probs, row, threshold, TILE)
        cut = _threshold(probs, row, threshold, least, 0, TILE)
        threshold = ct.where(kept_share < 1.0, ct.maximum(threshold, cut), threshold)
    if FILTERS & BY_LARGEST:
        least = ct.minimum(ct.gather(share, row), 1.0) * _largest(probs, row, TILE)
        threshold = ct.bitcast(ct.maximum(least, 0.0), ct.int32)
    target = ct.gather(uniform, row) * _total(probs, row, threshold, TILE)
    ct.scatter(samples, row, _pick(probs, row, threshold, target, TILE).astype(ct.int64))


@ct.kernel
def _argmax(logits: Rows, ids, TILE: Int):
    row = ct.bid(0)
    columns = logits.shape[1]
    largest = ct.full((TILE,), -float("inf"), dtype=ct.float32)
    first = ct.full((TILE,), MOST, dtype=ct.int32)
    first_nan = ct.full((TILE,), MOST, dtype=ct.int32)
    for piece in range(ct.cdiv(columns, TILE)):
        cols = piece * TILE + ct.arange(TILE, dtype=ct.int32)
        inside = cols < columns
        values = ct.gather(logits, (row, cols), mask=inside, check_bounds=False, padding_value=-float("inf"))
        values = values.astype(ct.float32)
        first_nan = ct.where(values != values, ct.minimum(first_nan, cols), first_nan)
        # Of each lane the first column with its largest value: only a larger one replaces what came before.
        better = (values > largest) | (inside & (first == MOST))
        first = ct.where(better, cols, first)
        largest = ct.where(better & (values == values), values, largest)
    top = ct.max(largest)
    found = ct.min(ct.where(largest == top, first, MOST))
    not_a_number = ct.min(first_nan)
    ct.scatter(ids, row, ct.where(not_a_number < MOST, not_a_number, found).astype(ct.int64))


_SAMPLE = {warps: _sample.replace_hints(num_worker_warps=warps) for warps in (4, 8)}
_ARGMAX = {warps: _argmax.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


def _tile(columns, most):
    return min(most, 1 << (columns - 1).bit_length())


def _launch(probs, top_k, share, uniform, samples, filters, tile, warps):
    rows, columns = probs.shape
    if rows == 0:
        return
    # What a filter does not read stands for any tensor.
    args = (
        probs, samples if top_k is None else top_k, uniform if share is None else share, uniform, samples, filters,
        _tile(columns, tile),
    )  # fmt: skip
    ct.launch(torch.cuda.current_stream(), (rows, 1, 1), _SAMPLE[warps], args)


# Of all entry functions: probs [B, V] float32; uniform [B] float32 holds a random number from 0 to below 1 for each row, top_k
# [B] is int32, and samples [B] int64. TILE: columns of a piece. V < 2 ** 24.


def run_top_k(
    probs: torch.Tensor,
    top_k: torch.Tensor,
    uniform: torch.Tensor,
    samples: torch.Tensor,
    *,
    TILE: int = 4096,
    WARPS: int = 8,
) -> None:
    """samples [B]: drawn from the top_k largest probabilities of each row and those that tie with the last of them."""
    _launch(probs, top_k, None, uniform, samples, BY_RANK, TILE, WARPS)


def run_top_p(
    probs: torch.Tensor,
    top_p: torch.Tensor,
    uniform: torch.Tensor,
    samples: torch.Tensor,
    *,
    TILE: int = 4096,
    WARPS: int = 8,
) -> None:
    """samples [B]: drawn from the largest probabilities of each row that reach top_p of its sum, and ties with the last."""
    _launch(probs, None, top_p, uniform, samples, BY_MASS, TILE, WARPS)


def run_top_k_top_p(
    probs: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    uniform: torch.Tensor,
    samples: torch.Tensor,
    *,
    TILE: int = 4096,
    WARPS: int = 8,
) -> None:
    """samples [B]: drawn from what top-p keeps of what top-k keeps of each row."""
    _launch(probs, top_k, top_p, uniform, samples, BY_RANK | BY_MASS, TILE, WARPS)


def run_min_p(
    probs: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
    samples: torch.Tensor,
    *,
    TILE: int = 4096,
    WARPS: int = 8,
) -> None:
    """samples [B]: drawn from the probabilities that are at least min_p times the largest of their row."""
    _launch(probs, None, min_p, uniform, samples, BY_LARGEST, TILE, WARPS)


def run_greedy_argmax(logits: torch.Tensor, ids: torch.Tensor, *, TILE: int = 4096, WARPS: int = 8) -> None:
    """ids [B]: the first index of the largest score of each row of logits [B, V], or of its first NaN."""
    rows, columns = logits.shape
    if rows == 0:
        return
    ct.launch(torch.cuda.current_stream(), (rows, 1, 1), _ARGMAX[WARPS], (logits, ids, _tile(columns, TILE)))
