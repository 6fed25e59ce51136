"""The clipped policy loss of tokens and its gradient, cuTile: one read of the logits, then one read and one write."""

from typing import Annotated

import cuda.tile as ct
import torch

# The vocabulary is a compile-time constant, so that aligned rows are read 16 bytes at a time.
Rows = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1,))]
Int = ct.Constant[int]

FEW_ROWS = 256  # below about two a multiprocessor, rows are cut into pieces that several blocks read
MIN_PIECE = 8192  # columns
NAN = float("nan")


@ct.function
def _base(top):
    """Return what to subtract: 0 while all is -inf, as -inf - -inf would make a sum NaN before the row is known."""
    return ct.where(top == -float("inf"), 0.0, top)


@ct.function
def _series(x):
    """Return (exp(x) - 1 - x) / x^2 near 0."""
    series = x * (1 / 40320) + 1 / 5040
    series = x * series + 1 / 720
    series = x * series + 1 / 120
    series = x * series + 1 / 24
    series = x * series + 1 / 6
    return x * series + 1 / 2


@ct.function
def _expm1(x):
    """Return exp(x) - 1, near 0 by its series: the difference would have no correct digit there."""
    return ct.where((x < 0.4) & (x > -0.4), x * (x * _series(x) + 1.0), ct.exp(x) - 1.0)


@ct.function
def _over_one(x):
    """Return exp(x) - x - 1, near 0 by its series."""
    return ct.where((x < 0.4) & (x > -0.4), x * x * _series(x), ct.exp(x) - x - 1.0)


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
    n = logits.shape[1]
    row = ct.bid(0) // PIECES
    piece = ct.bid(0) % PIECES
    label = ct.gather(labels, row)
    if label != ignore_index:
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
            added = ct.sum(ct.exp((x - base[None, :]) * per_temperature), axis=0)
            total = total * ct.exp((top - base) * per_temperature) + added
            top = new_top
        row_top = ct.max(top)
        ct.scatter(parts, (0, row, piece), row_top)
        ct.scatter(parts, (1, row, piece), ct.sum(total * ct.exp((top - _base(row_top)) * per_temperature)))


@ct.kernel
def _losses(
    logits: Rows,
    labels,
    parts,
    old_logp,
    ref_logp,
    advantages,
    loss,
    logp,
    row_max,
    log_sum,
    per_temperature: float,
    beta: float,
    least: float,
    most: float,
    ignore_index: int,
    PIECES: Int,
    TILE_PIECES: Int,
):
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
        tops = ct.gather(parts, (0, row, pieces), mask=known, check_bounds=False, padding_value=-float("inf"))
        totals = ct.gather(parts, (1, row, pieces), mask=known, check_bounds=False, padding_value=0.0)
        top = ct.max(tops)
        total = ct.sum(totals * ct.exp((tops - _base(top)) * per_temperature))
        # A row of -inf has the sum 0, and +inf or NaN in a row leave NaN in the sum.
        rest = ct.where(top == -float("inf"), NAN, ct.log(total))
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
        divergence = ct.where(beta == 0.0, 0.0, beta * _over_one(apart))  # at beta 0, ref_logp is any numbers
        ct.scatter(loss, row, divergence - ct.where(second < first, second, first))
        ct.scatter(logp, row, found)
        ct.scatter(row_max, row, top)
        ct.scatter(log_sum, row, rest)


@ct.kernel
def _gradients(
    logits: Rows,
    labels,
    logp,
    row_max,
    log_sum,
    old_logp,
    ref_logp,
    advantages,
    grad_loss,
    grad: Rows,
    per_temperature: float,
    beta: float,
    least: float,
    most: float,
    ignore_index: int,
    BLOCKS: Int,
    TILE_N: Int,
):
    row = ct.bid(0) // BLOCKS
    cols = ct.bid(0) % BLOCKS * TILE_N + ct.arange(TILE_N, dtype=ct.int32)
    inside = cols < logits.shape[1]
    label = ct.gather(labels, row)
    if label == ignore_index:
        zeros = ct.zeros((TILE_N,), dtype=grad.dtype)
        ct.scatter(grad, (row, cols), zeros, mask=inside, check_bounds=False)
    else:
        found = ct.gather(logp, row)
        top = ct.gather(row_max, row)
        rest = ct.gather(log_sum, row)
        advantage = ct.gather(advantages, row)
        ratio = ct.exp(found - ct.gather(old_logp, row))
        clipped = ((advantage < 0.0) & (ratio < least)) | ((advantage > 0.0) & (ratio > most))
        pull = ct.where(beta == 0.0, 0.0, beta * _expm1(ct.gather(ref_logp, row) - found))
        factor = ct.where(clipped, 0.0, ratio * advantage) + pull
        factor = factor * ct.gather(grad_loss, row) * per_temperature
        x = ct.gather(logits, (row, cols), mask=inside, check_bounds=False).astype(ct.float32)
        off = ct.where(cols == label, _expm1(found), ct.exp((x - top) * per_temperature - rest))
        ct.scatter(grad, (row, cols), (off * factor).astype(grad.dtype), mask=inside, check_bounds=False)


_STATISTICS = {warps: _statistics.replace_hints(num_worker_warps=warps) for warps in (4, 8)}
_BACKWARD = {warps: _gradients.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


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
    m, n = logits.shape
    if m == 0:
        return
    lanes = 32 * WARPS * (16 // logits.element_size())
    while lanes > 64 and REPEAT * lanes > 2 * n:
        REPEAT, lanes = (REPEAT // 2, lanes) if REPEAT > 1 else (1, lanes // 2)
    pieces = 1 if m >= FEW_ROWS else max(1, min(FEW_ROWS // m, n // MIN_PIECE))
    steps = -(-n // (pieces * REPEAT * lanes))
    parts = torch.empty((2, m, pieces), dtype=torch.float32, device=logits.device)
    stream = torch.cuda.current_stream()
    numbers = (1 / temperature, beta, 1 - eps_low, 1 + eps_high, ignore_index)
    sizes = (pieces, steps, REPEAT, lanes)
    arguments = (logits, labels, parts, numbers[0], ignore_index, *sizes)
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
    m, n = logits.shape
    if m == 0:
        return
    tile = min(TILE_N, max(32, 1 << (n - 1).bit_length()))
    blocks = -(-n // tile)
    numbers = (1 / temperature, beta, 1 - eps_low, 1 + eps_high, ignore_index)
    tensors = (logits, labels, logp, row_max, log_sum, old_logp, ref_logp, advantages, grad_loss, grad_logits)
    ct.launch(torch.cuda.current_stream(), (m * blocks, 1, 1), _BACKWARD[WARPS], (*tensors, *numbers, blocks, tile))
