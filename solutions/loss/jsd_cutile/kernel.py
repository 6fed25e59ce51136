"""Generalised Jensen-Shannon divergence of rows and its gradient, cuTile: one read of both inputs, and one write."""

from typing import Annotated

import cuda.tile as ct
import torch

# The vocabulary is a compile-time constant, so that aligned rows are read 16 bytes at a time.
Rows = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1,))]
Int = ct.Constant[int]

FEW_ROWS = 256  # below about two a multiprocessor, rows are cut into pieces that several blocks read
MIN_PIECE = 8192  # columns

FORWARD, REVERSE, MIXED = 0, 1, 2  # KL(p | q) at beta 0, KL(q | p) at beta 1, and the divergences from a mixture
LOWEST = -float("inf")


@ct.function
def _expm1(x):
    """Return exp(x) - 1, near 0 by its series: the difference would have no correct digit there."""
    series = x * (1 / 40320) + 1 / 5040
    series = x * series + 1 / 720
    series = x * series + 1 / 120
    series = x * series + 1 / 24
    series = x * series + 1 / 6
    series = x * series + 1 / 2
    series = x * series + 1.0
    return ct.where((x > -0.4) & (x < 0.4), x * series, ct.exp(x) - 1.0)


@ct.function
def _log1p(x):
    """Return log(1 + x), with the rounding of the sum put back."""
    total = x + 1.0
    return ct.log(total) + (x - (total - 1.0)) / total


@ct.function
def _over_student(far, beta):
    """Return log(m / q) for far = log(p / q). Beyond 80 the exponential ends, and the mixture m is nothing but the teacher p."""
    over = ct.where(far <= 80.0, 0.0, far - 80.0)
    return _log1p(beta * _expm1(ct.minimum(far, 80.0))) + over


@ct.kernel
def _jsd(
    student: Rows,
    teacher: Rows,
    labels,
    sums,
    beta: float,
    ignore_index: int,
    PIECES: Int,
    STEPS: Int,
    REPEAT: Int,
    LANES: Int,
    KIND: Int,
):
    """Add up a row, or one of its PIECES pieces, in STEPS tiles of REPEAT * LANES columns."""
    n = student.shape[1]
    row = ct.bid(0) // PIECES
    piece = ct.bid(0) % PIECES
    label = ct.gather(labels, row)
    if label == ignore_index:  # the row is not read
        ct.scatter(sums, (row, piece), 0.0)
    else:
        # Lanes share no sum until the end of the row, so that warps do not wait for each other.
        total = ct.zeros((LANES,), dtype=ct.float32)
        offsets = ct.arange(REPEAT, dtype=ct.int32)[:, None] * LANES + ct.arange(LANES, dtype=ct.int32)[None, :]
        for step in range(STEPS):
            cols = (piece * STEPS + step) * (REPEAT * LANES) + offsets
            inside = cols < n
            x = ct.gather(student, (row, cols), mask=inside, check_bounds=False, padding_value=LOWEST).astype(
                ct.float32
            )
            y = ct.gather(teacher, (row, cols), mask=inside, check_bounds=False, padding_value=LOWEST).astype(
                ct.float32
            )
            if KIND == FORWARD:
                chance = ct.exp(y)
                found = ct.where(chance == 0.0, 0.0, chance * (y - x))
            elif KIND == REVERSE:
                chance = ct.exp(x)
                found = ct.where(chance == 0.0, 0.0, chance * (x - y))
            else:
                larger = ct.maximum(x, y)
                far = ct.minimum(x - y, y - x)
                weight = ct.where(x >= y, beta, 1.0 - beta)
                small = _expm1(far)
                ratio = small + 1.0
                fallen = ct.where(ratio == 0.0, 0.0, ratio * far)
                less = weight * small
                # The mixture over the larger of both probabilities is 1 + less.
                found = ct.exp(larger) * (weight * fallen - (less + 1.0) * _log1p(less))
                found = ct.where(larger == LOWEST, 0.0, found)
            total = total + ct.sum(found, axis=0)
        ct.scatter(sums, (row, piece), ct.sum(total))


@ct.kernel
def _add_pieces(sums, loss, PIECES: Int, TILE_PIECES: Int):
    row = ct.bid(0)
    pieces = ct.arange(TILE_PIECES, dtype=ct.int32)
    parts = ct.gather(sums, (row, pieces), mask=pieces < PIECES, check_bounds=False, padding_value=0.0)
    ct.scatter(loss, row, ct.sum(parts))


@ct.kernel
def _jsd_backward(
    student: Rows,
    teacher: Rows,
    labels,
    grad_loss,
    grad: Rows,
    beta: float,
    ignore_index: int,
    BLOCKS: Int,
    TILE_N: Int,
    KIND: Int,
):
    row = ct.bid(0) // BLOCKS
    cols = ct.bid(0) % BLOCKS * TILE_N + ct.arange(TILE_N, dtype=ct.int32)
    inside = cols < student.shape[1]
    label = ct.gather(labels, row)
    if label == ignore_index:
        zeros = ct.zeros((TILE_N,), dtype=grad.dtype)
        ct.scatter(grad, (row, cols), zeros, mask=inside, check_bounds=False)
    else:
        factor = ct.gather(grad_loss, row)
        y = ct.gather(teacher, (row, cols), mask=inside, check_bounds=False).astype(ct.float32)
        if KIND == FORWARD:
            found = -ct.exp(y)
        else:
            x = ct.gather(student, (row, cols), mask=inside, check_bounds=False).astype(ct.float32)
            q = ct.exp(x)
            found = q * (x - y + 1.0)
            if KIND == MIXED:
                found = (beta - 1.0) * q * _over_student(y - x, beta)
            found = ct.where(q == 0.0, 0.0, found)
        ct.scatter(grad, (row, cols), (found * factor).astype(grad.dtype), mask=inside, check_bounds=False)


_FORWARD = {warps: _jsd.replace_hints(num_worker_warps=warps) for warps in (4, 8)}
_BACKWARD = {warps: _jsd_backward.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


def _kind(beta: float) -> int:
    return FORWARD if beta == 0 else REVERSE if beta == 1 else MIXED


def run(
    student: torch.Tensor,
    teacher: torch.Tensor,
    labels: torch.Tensor,
    beta: float,
    ignore_index: int,
    loss: torch.Tensor,
    *,
    REPEAT: int = 2,
    WARPS: int = 8,
) -> None:
    """Write loss [M] = beta KL(p | m) + (1 - beta) KL(q | m), m = beta p + (1 - beta) q, in float32; 0 for ignored rows.

    student (log q) and teacher (log p) [M, V] with unit last stride and any row stride, in bfloat16, float16 or float32;
    labels [M] int64. With beta 0 the loss is KL(p | q), with beta 1 it is KL(q | p). A block of WARPS (4 or 8) warps reads
    REPEAT vectors of 16 bytes a thread at a time. Few rows are cut into pieces, and a second kernel adds these up.
    """
    m, n = student.shape
    if m == 0:
        return
    lanes = 32 * WARPS * (16 // student.element_size())
    while lanes > 64 and REPEAT * lanes > 2 * n:
        REPEAT, lanes = (REPEAT // 2, lanes) if REPEAT > 1 else (1, lanes // 2)
    pieces = 1 if m >= FEW_ROWS else max(1, min(FEW_ROWS // m, n // MIN_PIECE))
    steps = -(-n // (pieces * REPEAT * lanes))
    sums = loss.view(m, 1) if pieces == 1 else torch.empty((m, pieces), dtype=torch.float32, device=loss.device)
    stream = torch.cuda.current_stream()
    arguments = (student, teacher, labels, sums, beta, ignore_index, pieces, steps, REPEAT, lanes, _kind(beta))
    ct.launch(stream, (m * pieces, 1, 1), _FORWARD[WARPS], arguments)
    if pieces > 1:
        ct.launch(stream, (m, 1, 1), _add_pieces, (sums, loss, pieces, 1 << (pieces - 1).bit_length()))


def run_backward(
    student: torch.Tensor,
    teacher: torch.Tensor,
    labels: torch.Tensor,
    grad_loss: torch.Tensor,
    beta: float,
    ignore_index: int,
    grad_student: torch.Tensor,
    *,
    TILE_N: int = 2048,
    WARPS: int = 4,
) -> None:
    """Write grad_student [M, V] = T((1 - beta) q log(q / m) * grad_loss), m = beta p + (1 - beta) q; 0 for ignored rows.

    With beta 0 it is -p * grad_loss, with beta 1 it is q (log(q / p) + 1) * grad_loss. student (log q), teacher (log p) and
    grad_student with unit last stride and any row stride; labels [M] int64, grad_loss [M] float32. A block has TILE_N columns.
    """
    m, n = student.shape
    if m == 0:
        return
    tile = min(TILE_N, max(32, 1 << (n - 1).bit_length()))
    blocks = -(-n // tile)
    arguments = (student, teacher, labels, grad_loss, grad_student, beta, ignore_index, blocks, tile, _kind(beta))
    ct.launch(torch.cuda.current_stream(), (m * blocks, 1, 1), _BACKWARD[WARPS], arguments)
