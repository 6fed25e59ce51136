"""The clipped policy loss of tokens and its gradient, cuTile: one read of the logits, then one read and one write."""

import cuda.tile as ct
import torch
from _lib.cutile.vocabulary_rows import (
    LOWEST,
    Int,
    Rows,
    exp_over_line,
    expm1,
    grow,
    hinted,
    join,
    load_columns,
    row_blocks,
    row_steps,
    step_columns,
    store_columns,
)

NAN = float("nan")


@ct.kernel
def _statistics(
    logits: Rows,
    labels,
    parts,
    per_temperature: float,
    ignore_index: int,
    PIECES: Int,
    STEPS: Int,
    REPEAT: Int,
    LANES: Int,
):
    """Store maximum and sum of a row, or of one of its PIECES pieces, read in STEPS tiles of REPEAT * LANES columns."""
    row = ct.bid(0) // PIECES
    piece = ct.bid(0) % PIECES
    label = ct.gather(labels, row)
    if label != ignore_index:
        top = ct.full((LANES,), LOWEST, dtype=ct.float32)
        total = ct.zeros((LANES,), dtype=ct.float32)
        offsets = step_columns(REPEAT, LANES)
        for step in range(STEPS):
            cols = (piece * STEPS + step) * (REPEAT * LANES) + offsets
            top, total = grow(top, total, load_columns(logits, row, cols, LOWEST), per_temperature)
        top, total = join(top, total, per_temperature)
        ct.scatter(parts, (0, row, piece), top)
        ct.scatter(parts, (1, row, piece), total)


@ct.kernel
def _losses(
    logits: Rows, labels, parts, old_logp, ref_logp, advantages, loss, logp, row_max, log_sum,
    per_temperature: float, beta: float, least: float, most: float, ignore_index: int, PIECES: Int, TILE_PIECES: Int,
):  # fmt: skip
    """Join the pieces of a row and store what follows from them."""
    row = ct.bid(0)
    label = ct.gather(labels, row)
    if label == ignore_index:
        ct.scatter(loss, row, 0.0)
        ct.scatter(logp, row, 0.0)
        ct.scatter(row_max, row, 0.0)
        ct.scatter(log_sum, row, 0.0)
    else:
        pieces = ct.arange(TILE_PIECES, dtype=ct.int32)
        known = pieces < PIECES
        tops = ct.gather(parts, (0, row, pieces), mask=known, check_bounds=False, padding_value=LOWEST)
        totals = ct.gather(parts, (1, row, pieces), mask=known, check_bounds=False, padding_value=0.0)
        top, total = join(tops, totals, per_temperature)
        # A row of -inf has the sum 0, and +inf or NaN in a row leave NaN in the sum.
        rest = ct.where(top == LOWEST, NAN, ct.log(total))
        top = ct.where(ct.isnan(rest), rest, top)
        inside = (label >= 0) & (label < logits.shape[1])  # neither a column nor ignored is an error: its loss is NaN
        of_label = ct.gather(logits, (row, ct.where(inside, label, 0).astype(ct.int32))).astype(ct.float32)
        found = ct.where(inside, (of_label - top) * per_temperature - rest, NAN)
        ratio = ct.exp(found - ct.gather(old_logp, row))
        bounded = ct.where(ratio < least, least, ct.where(ratio > most, most, ratio))
        advantage = ct.gather(advantages, row)
        first = ratio * advantage
        second = bounded * advantage
        apart = ct.gather(ref_logp, row) - found
        divergence = ct.where(beta == 0.0, 0.0, beta * exp_over_line(apart))  # at beta 0, ref_logp is any numbers
        ct.scatter(loss, row, divergence - ct.where(second < first, second, first))
        ct.scatter(logp, row, found)
        ct.scatter(row_max, row, top)
        ct.scatter(log_sum, row, rest)


@ct.kernel
def _gradients(
    logits: Rows, labels, logp, row_max, log_sum, old_logp, ref_logp, advantages, grad_loss, grad: Rows,
    per_temperature: float, beta: float, least: float, most: float, ignore_index: int, BLOCKS: Int, TILE_N: Int,
):  # fmt: skip
    """Store a block of the gradient of a row; zeros if its token is masked."""
    row = ct.bid(0) // BLOCKS
    cols = ct.bid(0) % BLOCKS * TILE_N + ct.arange(TILE_N, dtype=ct.int32)
    label = ct.gather(labels, row)
    if label == ignore_index:
        store_columns(grad, row, cols, ct.zeros((TILE_N,), dtype=grad.dtype))
    else:
        found = ct.gather(logp, row)
        top = ct.gather(row_max, row)
        rest = ct.gather(log_sum, row)
        advantage = ct.gather(advantages, row)
        ratio = ct.exp(found - ct.gather(old_logp, row))
        clipped = ((advantage < 0.0) & (ratio < least)) | ((advantage > 0.0) & (ratio > most))
        pull = ct.where(beta == 0.0, 0.0, beta * expm1(ct.gather(ref_logp, row) - found))
        factor = ct.where(clipped, 0.0, ratio * advantage) + pull
        factor = factor * ct.gather(grad_loss, row) * per_temperature
        x = load_columns(logits, row, cols, LOWEST)
        off = ct.where(cols == label, expm1(found), ct.exp((x - top) * per_temperature - rest))
        store_columns(grad, row, cols, off * factor)


_STATISTICS, _BACKWARD = hinted(_statistics), hinted(_gradients)


def run(
    logits: torch.Tensor,
    labels: torch.Tensor,
    old_logp: torch.Tensor,
    ref_logp: torch.Tensor,
    advantages: torch.Tensor,
    temperature: float,
    beta: float,
    eps_low: float,
    eps_high: float,
    ignore_index: int,
    loss: torch.Tensor,
    logp: torch.Tensor,
    row_max: torch.Tensor,
    log_sum: torch.Tensor,
    *,
    REPEAT: int = 8,
    WARPS: int = 8,
) -> None:
    """Write loss = beta (exp(d) - d - 1) - min(r A, clip(r, 1 - eps_low, 1 + eps_high) A), r = exp(logp - old), d = ref - logp.

    logits [M, V] with unit last stride and any row stride, in bfloat16, float16 or float32; labels [M] int64; old_logp,
    ref_logp, advantages and all outputs [M] float32. A block of WARPS (4 or 8) warps reads a row, or a piece of it, once. A
    second kernel joins the pieces and computes the losses. The row of an ignored label is not read.
    """
    m = logits.shape[0]
    if m == 0:
        return
    steps = row_steps(logits, REPEAT, WARPS)
    pieces = steps[0]
    parts = torch.empty((2, m, pieces), dtype=torch.float32, device=logits.device)
    numbers = (1 / temperature, beta, 1 - eps_low, 1 + eps_high, ignore_index)
    stream = torch.cuda.current_stream()
    arguments = (logits, labels, parts, numbers[0], ignore_index, *steps)
    ct.launch(stream, (m * pieces, 1, 1), _STATISTICS[WARPS], arguments)
    tensors = (logits, labels, parts, old_logp, ref_logp, advantages, loss, logp, row_max, log_sum)
    ct.launch(stream, (m, 1, 1), _losses, (*tensors, *numbers, pieces, 1 << (pieces - 1).bit_length()))


def run_backward(
    logits: torch.Tensor,
    labels: torch.Tensor,
    logp: torch.Tensor,
    row_max: torch.Tensor,
    log_sum: torch.Tensor,
    old_logp: torch.Tensor,
    ref_logp: torch.Tensor,
    advantages: torch.Tensor,
    grad_loss: torch.Tensor,
    temperature: float,
    beta: float,
    eps_low: float,
    eps_high: float,
    ignore_index: int,
    grad_logits: torch.Tensor,
    *,
    TILE_N: int = 4096,
    WARPS: int = 4,
) -> None:
    """Write grad_logits [M, V] = T((p - (1 at the token)) * c * grad_loss / temperature); 0 for masked rows.

    c = r A, or 0 if r is clipped, plus beta (exp(ref - logp) - 1); p = exp((logits - row_max) / temperature - log_sum). logits
    and grad_logits with unit last stride and any row stride; labels [M] int64; all others [M] float32. A block of WARPS (4 or
    8) warps has TILE_N columns of a row.
    """
    m = logits.shape[0]
    if m == 0:
        return
    blocks = row_blocks(logits, TILE_N)
    numbers = (1 / temperature, beta, 1 - eps_low, 1 + eps_high, ignore_index)
    tensors = (logits, labels, logp, row_max, log_sum, old_logp, ref_logp, advantages, grad_loss, grad_logits)
    ct.launch(torch.cuda.current_stream(), (m * blocks[0], 1, 1), _BACKWARD[WARPS], (*tensors, *numbers, *blocks))
