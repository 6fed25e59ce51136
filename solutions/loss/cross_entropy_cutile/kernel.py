"""Cross entropy of rows of logits and its gradient, cuTile: one read of the logits, then one read and one write."""

from typing import Annotated

import cuda.tile as ct
import torch

# The vocabulary is a compile-time constant, so that aligned rows are read 16 bytes at a time.
Rows = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1,))]
Int = ct.Constant[int]

FEW_ROWS = 256  # below about two a multiprocessor, rows are cut into pieces that several blocks read
MIN_PIECE = 16384  # columns
NAN = float("nan")


@ct.function
def _base(top):
    """Return what to subtract: 0 while all is -inf, as -inf - -inf would make a sum NaN before the row is known."""
    return ct.where(top == -float("inf"), 0.0, top)


@ct.function
def _store_row(logits, loss, row_max, log_sum, row, label, top, total):
    """Store what a row's maximum and sum give. Both terms of the loss are at least 0: nothing cancels."""
    # A row of -inf has the sum 0, and +inf or NaN in a row leave NaN in the sum.
    rest = ct.where(top == -float("inf"), NAN, ct.log(total))
    top = ct.where(ct.isnan(rest), rest, top)
    inside = (label >= 0) & (label < logits.shape[1])  # neither a column nor ignored is an error: its loss is NaN
    of_label = ct.gather(logits, (row, ct.where(inside, label, 0).astype(ct.int32))).astype(ct.float32)
    ct.scatter(loss, row, ct.where(inside, rest + (top - of_label), NAN))
    ct.scatter(row_max, row, top)
    ct.scatter(log_sum, row, rest)


@ct.kernel
def _cross_entropy(
    logits: Rows,
    labels,
    parts,
    loss,
    row_max,
    log_sum,
    ignore_index: int,
    PIECES: Int,
    STEPS: Int,
    REPEAT: Int,
    LANES: Int,
):
    """Read a row, or one of its PIECES pieces, in STEPS tiles of REPEAT * LANES columns."""
    n = logits.shape[1]
    row = ct.bid(0) // PIECES
    piece = ct.bid(0) % PIECES
    label = ct.gather(labels, row)
    if label == ignore_index:  # the row is not read
        if PIECES == 1:
            ct.scatter(loss, row, 0.0)
            ct.scatter(row_max, row, 0.0)
            ct.scatter(log_sum, row, 0.0)
    else:
        # Lanes share no maximum until the end of the row, so that warps do not wait for each other.
        top = ct.full((LANES,), -float("inf"), dtype=ct.float32)
        total = ct.zeros((LANES,), dtype=ct.float32)
        offsets = ct.arange(REPEAT, dtype=ct.int32)[:, None] * LANES + ct.arange(LANES, dtype=ct.int32)[None, :]
        for step in range(STEPS):
            cols = (piece * STEPS + step) * (REPEAT * LANES) + offsets
            x = ct.gather(logits, (row, cols), mask=cols < n, check_bounds=False, padding_value=-float("inf"))
            x = x.astype(ct.float32)
            new_top = ct.maximum(top, ct.max(x, axis=0))
            base = _base(new_top)
            total = total * ct.exp(top - base) + ct.sum(ct.exp(x - base[None, :]), axis=0)
            top = new_top
        row_top = ct.max(top)
        row_total = ct.sum(total * ct.exp(top - _base(row_top)))
        if PIECES == 1:
            _store_row(logits, loss, row_max, log_sum, row, label, row_top, row_total)
        else:
            ct.scatter(parts, (0, row, piece), row_top)
            ct.scatter(parts, (1, row, piece), row_total)


@ct.kernel
def _join_pieces(logits: Rows, labels, parts, loss, row_max, log_sum, ignore_index: int, PIECES: Int, TILE_PIECES: Int):
    row = ct.bid(0)
    label = ct.gather(labels, row)
    if label == ignore_index:
        ct.scatter(loss, row, 0.0)
        ct.scatter(row_max, row, 0.0)
        ct.scatter(log_sum, row, 0.0)
    else:
        pieces = ct.arange(TILE_PIECES, dtype=ct.int32)
        known = pieces < PIECES
        tops = ct.gather(parts, (0, row, pieces), mask=known, check_bounds=False, padding_value=-float("inf"))
        totals = ct.gather(parts, (1, row, pieces), mask=known, check_bounds=False, padding_value=0.0)
        top = ct.max(tops)
        total = ct.sum(totals * ct.exp(tops - _base(top)))
        _store_row(logits, loss, row_max, log_sum, row, label, top, total)


@ct.function
def _expm1(x):
    """Return exp(x) - 1 for x <= 0, near 0 by its series: the difference would have no correct digit there."""
    series = x * (1 / 8) + 1.0
    series = x * (1 / 7) * series + 1.0
    series = x * (1 / 6) * series + 1.0
    series = x * (1 / 5) * series + 1.0
    series = x * (1 / 4) * series + 1.0
    series = x * (1 / 3) * series + 1.0
    series = x * (1 / 2) * series + 1.0
    return ct.where(x > -0.4, x * series, ct.exp(x) - 1.0)


@ct.kernel
def _cross_entropy_backward(
    logits: Rows, labels, row_max, log_sum, grad_loss, grad_logits: Rows, ignore_index: int, BLOCKS: Int, TILE_N: Int
):
    n = logits.shape[1]
    row = ct.bid(0) // BLOCKS
    cols = ct.bid(0) % BLOCKS * TILE_N + ct.arange(TILE_N, dtype=ct.int32)
    inside = cols < n
    label = ct.gather(labels, row)
    if label == ignore_index:
        zeros = ct.zeros((TILE_N,), dtype=grad_logits.dtype)
        ct.scatter(grad_logits, (row, cols), zeros, mask=inside, check_bounds=False)
    else:
        top = ct.gather(row_max, row)
        rest = ct.gather(log_sum, row)
        factor = ct.gather(grad_loss, row)
        x = ct.gather(logits, (row, cols), mask=inside, check_bounds=False).astype(ct.float32)
        is_label = cols == label
        of_label = ct.sum(ct.where(is_label, x, 0.0))
        off = ct.where(is_label, _expm1((of_label - top) - rest), ct.exp((x - top) - rest))
        ct.scatter(grad_logits, (row, cols), (off * factor).astype(grad_logits.dtype), mask=inside, check_bounds=False)


_FORWARD = {warps: _cross_entropy.replace_hints(num_worker_warps=warps) for warps in (4, 8)}
_BACKWARD = {warps: _cross_entropy_backward.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


def run(
    logits: torch.Tensor,
    labels: torch.Tensor,
    ignore_index: int,
    loss: torch.Tensor,
    row_max: torch.Tensor,
    log_sum: torch.Tensor,
    *,
    REPEAT: int = 8,
    WARPS: int = 8,
) -> None:
    """Write loss = log_sum + row_max - logits[label], row_max and log_sum, all [M] in float32; 0 for ignored rows.

    logits [M, V] with unit last stride and any row stride, in bfloat16, float16 or float32; labels [M] int64. A block of
    WARPS (4 or 8) warps reads a row once, REPEAT vectors of 16 bytes a thread at a time. Few rows are cut into pieces, and a
    second kernel joins these.
    """
    m, n = logits.shape
    if m == 0:
        return
    lanes = 32 * WARPS * (16 // logits.element_size())
    while lanes > 64 and REPEAT * lanes > 2 * n:
        REPEAT, lanes = (REPEAT // 2, lanes) if REPEAT > 1 else (1, lanes // 2)
    pieces = 1 if m >= FEW_ROWS else max(1, min(FEW_ROWS // m, n // MIN_PIECE))
    steps = -(-n // (pieces * REPEAT * lanes))
    parts = torch.empty((2, m, pieces), dtype=torch.float32, device=logits.device)  # not used by rows in one piece
    stream = torch.cuda.current_stream()
    tensors = (logits, labels, parts, loss, row_max, log_sum, ignore_index, pieces)
    ct.launch(stream, (m * pieces, 1, 1), _FORWARD[WARPS], (*tensors, steps, REPEAT, lanes))
    if pieces > 1:
        ct.launch(stream, (m, 1, 1), _join_pieces, (*tensors, 1 << (pieces - 1).bit_length()))


def run_backward(
    logits: torch.Tensor,
    labels: torch.Tensor,
    row_max: torch.Tensor,
    log_sum: torch.Tensor,
    grad_loss: torch.Tensor,
    ignore_index: int,
    grad_logits: torch.Tensor,
    *,
    TILE_N: int = 4096,
    WARPS: int = 4,
) -> None:
    """Write grad_logits [M, V] = T((exp(logits - row_max - log_sum) - (1 at the label)) * grad_loss); 0 for ignored rows.

    logits and grad_logits with unit last stride and any row stride; labels [M] int64; row_max, log_sum and grad_loss [M]
    float32. A block of WARPS (4 or 8) warps has TILE_N columns of a row.
    """
    m, n = logits.shape
    if m == 0:
        return
    tile = min(TILE_N, max(32, 1 << (n - 1).bit_length()))
    blocks = -(-n // tile)
    arguments = (logits, labels, row_max, log_sum, grad_loss, grad_logits, ignore_index, blocks, tile)
    ct.launch(torch.cuda.current_stream(), (m * blocks, 1, 1), _BACKWARD[WARPS], arguments)
