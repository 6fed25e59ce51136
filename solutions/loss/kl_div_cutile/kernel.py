"""Kullback-Leibler divergence of rows and its gradient, cuTile: one read of both inputs, then one read and one write."""

from typing import Annotated

import cuda.tile as ct
import torch

# The vocabulary is a compile-time constant, so that aligned rows are read 16 bytes at a time.
Rows = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1,))]
Int = ct.Constant[int]

FEW_ROWS = 256  # below about two a multiprocessor, rows are cut into pieces that several blocks read
MIN_PIECE = 8192  # columns


@ct.kernel
def _kl_div(
    log_probs: Rows, target: Rows, sums, PIECES: Int, STEPS: Int, REPEAT: Int, LANES: Int, LOG_TARGET: ct.Constant[bool]
):
    """Add up a row, or one of its PIECES pieces, in STEPS tiles of REPEAT * LANES columns."""
    n = log_probs.shape[1]
    row = ct.bid(0) // PIECES
    piece = ct.bid(0) % PIECES
    # Lanes share no sum until the end of the row, so that warps do not wait for each other.
    total = ct.zeros((LANES,), dtype=ct.float32)
    offsets = ct.arange(REPEAT, dtype=ct.int32)[:, None] * LANES + ct.arange(LANES, dtype=ct.int32)[None, :]
    for step in range(STEPS):
        cols = (piece * STEPS + step) * (REPEAT * LANES) + offsets
        inside = cols < n
        x = ct.gather(log_probs, (row, cols), mask=inside, check_bounds=False, padding_value=0.0).astype(ct.float32)
        if LOG_TARGET:
            wanted = ct.gather(target, (row, cols), mask=inside, check_bounds=False, padding_value=-float("inf"))
            wanted = wanted.astype(ct.float32)
            chance = ct.exp(wanted)
        else:
            chance = ct.gather(target, (row, cols), mask=inside, check_bounds=False, padding_value=0.0)
            chance = chance.astype(ct.float32)
            wanted = ct.log(chance)
        total = total + ct.sum(ct.where(chance == 0.0, 0.0, chance * (wanted - x)), axis=0)
    ct.scatter(sums, (row, piece), ct.sum(total))


@ct.kernel
def _add_pieces(sums, loss, PIECES: Int, TILE_PIECES: Int):
    row = ct.bid(0)
    pieces = ct.arange(TILE_PIECES, dtype=ct.int32)
    parts = ct.gather(sums, (row, pieces), mask=pieces < PIECES, check_bounds=False, padding_value=0.0)
    ct.scatter(loss, row, ct.sum(parts))


@ct.kernel
def _kl_div_backward(target: Rows, grad_loss, grad: Rows, BLOCKS: Int, TILE_N: Int, LOG_TARGET: ct.Constant[bool]):
    row = ct.bid(0) // BLOCKS
    cols = ct.bid(0) % BLOCKS * TILE_N + ct.arange(TILE_N, dtype=ct.int32)
    inside = cols < target.shape[1]
    factor = -ct.gather(grad_loss, row)
    chance = ct.gather(target, (row, cols), mask=inside, check_bounds=False).astype(ct.float32)
    if LOG_TARGET:
        chance = ct.exp(chance)
    ct.scatter(grad, (row, cols), (chance * factor).astype(grad.dtype), mask=inside, check_bounds=False)


_FORWARD = {warps: _kl_div.replace_hints(num_worker_warps=warps) for warps in (4, 8)}
_BACKWARD = {warps: _kl_div_backward.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


def run(
    log_probs: torch.Tensor,
    target: torch.Tensor,
    log_target: bool,
    loss: torch.Tensor,
    *,
    REPEAT: int = 4,
    WARPS: int = 8,
) -> None:
    """Write loss [M] = sum(p * (log(p) - log_probs)) in float32, p being the target or, with log_target, its exponential.

    log_probs and target [M, V] with unit last stride and any row stride, in bfloat16, float16 or float32. A block of WARPS (4
    or 8) warps reads REPEAT vectors of 16 bytes a thread at a time. Few rows are cut into pieces, and a second kernel adds
    these up.
    """
    m, n = log_probs.shape
    if m == 0:
        return
    lanes = 32 * WARPS * (16 // log_probs.element_size())
    while lanes > 64 and REPEAT * lanes > 2 * n:
        REPEAT, lanes = (REPEAT // 2, lanes) if REPEAT > 1 else (1, lanes // 2)
    pieces = 1 if m >= FEW_ROWS else max(1, min(FEW_ROWS // m, n // MIN_PIECE))
    steps = -(-n // (pieces * REPEAT * lanes))
    sums = loss.view(m, 1) if pieces == 1 else torch.empty((m, pieces), dtype=torch.float32, device=loss.device)
    stream = torch.cuda.current_stream()
    arguments = (log_probs, target, sums, pieces, steps, REPEAT, lanes, log_target)
    ct.launch(stream, (m * pieces, 1, 1), _FORWARD[WARPS], arguments)
    if pieces > 1:
        ct.launch(stream, (m, 1, 1), _add_pieces, (sums, loss, pieces, 1 << (pieces - 1).bit_length()))


def run_backward(
    target: torch.Tensor,
    grad_loss: torch.Tensor,
    log_target: bool,
    grad_log_probs: torch.Tensor,
    *,
    TILE_N: int = 4096,
    WARPS: int = 4,
) -> None:
    """Write grad_log_probs [M, V] = T(-p * grad_loss), p being the target or, with log_target, its exponential.

    target and grad_log_probs with unit last stride and any row stride; grad_loss [M] float32. A block has TILE_N columns.
    """
    m, n = target.shape
    if m == 0:
        return
    tile = min(TILE_N, max(32, 1 << (n - 1).bit_length()))
    blocks = -(-n // tile)
    arguments = (target, grad_loss, grad_log_probs, blocks, tile, log_target)
    ct.launch(torch.cuda.current_stream(), (m * blocks, 1, 1), _BACKWARD[WARPS], arguments)
