"""Divergences of rows and their gradients, cuTile: Kullback-Leibler and Jensen-Shannon, one read of both inputs and one write."""

import cuda.tile as ct
import torch
from _lib.cutile.vocabulary_rows import (
    LOWEST,
    Int,
    Rows,
    add_pieces,
    expm1,
    hinted,
    load_columns,
    log1p,
    row_blocks,
    row_steps,
    step_columns,
    store_columns,
)

Flag = ct.Constant[bool]

# KL(p | q) at beta 0, KL(q | p) at beta 1, the divergences from a mixture, and KL(p | q) of a p that is no logarithm.
FORWARD, REVERSE, MIXED, PLAIN = 0, 1, 2, 3


@ct.function
def _over_student(far, beta):
    """Return log(m / q) for far = log(p / q). Beyond 80 the exponential ends, and the mixture m is nothing but the teacher p."""
    over = ct.where(far <= 80.0, 0.0, far - 80.0)
    return log1p(beta * expm1(ct.minimum(far, 80.0))) + over


@ct.function
def _terms(x, y, beta, KIND):
    """Return the terms of the divergence for log-probabilities of student and teacher; 0 where neither has a probability."""
    if KIND == PLAIN:
        return ct.where(y == 0.0, 0.0, y * (ct.log(y) - x))
    elif KIND == FORWARD:
        chance = ct.exp(y)
        return ct.where(chance == 0.0, 0.0, chance * (y - x))
    elif KIND == REVERSE:
        chance = ct.exp(x)
        return ct.where(chance == 0.0, 0.0, chance * (x - y))
    else:
        larger = ct.maximum(x, y)
        far = ct.minimum(x - y, y - x)
        weight = ct.where(x >= y, beta, 1.0 - beta)
        small = expm1(far)
        ratio = small + 1.0
        fallen = ct.where(ratio == 0.0, 0.0, ratio * far)
        less = weight * small
        # The mixture over the larger of both probabilities is 1 + less.
        found = ct.exp(larger) * (weight * fallen - (less + 1.0) * log1p(less))
        return ct.where(larger == LOWEST, 0.0, found)


@ct.kernel
def _divergence(
    student: Rows, teacher: Rows, labels, sums, beta: float, ignore_index: int,
    KIND: Int, LABELED: Flag, PIECES: Int, STEPS: Int, REPEAT: Int, LANES: Int,
):  # fmt: skip
    """Add up a row, or one of its PIECES pieces, in STEPS tiles of REPEAT * LANES columns; LABELED: unless it is ignored."""
    row = ct.bid(0) // PIECES
    piece = ct.bid(0) % PIECES
    active = STEPS
    if LABELED:
        active = ct.where(ct.gather(labels, row) == ignore_index, 0, STEPS)  # an ignored row is not read
    nothing = 0.0 if KIND == PLAIN else LOWEST
    total = ct.zeros((LANES,), dtype=ct.float32)
    offsets = step_columns(REPEAT, LANES)
    for step in range(active):
        cols = (piece * STEPS + step) * (REPEAT * LANES) + offsets
        x = load_columns(student, row, cols, nothing)
        y = load_columns(teacher, row, cols, nothing)
        total = total + ct.sum(_terms(x, y, beta, KIND), axis=0)
    ct.scatter(sums, (row, piece), ct.sum(total))


@ct.kernel
def _gradients(
    student: Rows, teacher: Rows, labels, grad_loss, grad: Rows, beta: float, ignore_index: int,
    KIND: Int, LABELED: Flag, BLOCKS: Int, TILE_N: Int,
):  # fmt: skip
    """Store a block of the gradient of a row; LABELED: zeros if the row is ignored."""
    row = ct.bid(0) // BLOCKS
    cols = ct.bid(0) % BLOCKS * TILE_N + ct.arange(TILE_N, dtype=ct.int32)
    ignored = ct.gather(labels, row) == ignore_index if LABELED else False
    if ignored:
        store_columns(grad, row, cols, ct.zeros((TILE_N,), dtype=grad.dtype))
    else:
        factor = ct.gather(grad_loss, row)
        y = load_columns(teacher, row, cols, 0.0)
        if KIND == PLAIN:
            found = -y
        elif KIND == FORWARD:
            found = -ct.exp(y)
        else:
            x = load_columns(student, row, cols, 0.0)
            q = ct.exp(x)
            found = q * (x - y + 1.0)
            if KIND == MIXED:
                found = (beta - 1.0) * q * _over_student(y - x, beta)
            found = ct.where(q == 0.0, 0.0, found)
        store_columns(grad, row, cols, found * factor)


_SUMS, _GRADIENTS = hinted(_divergence), hinted(_gradients)


def _write_divergence(x, y, labels, beta, ignore_index, kind, loss, REPEAT, WARPS):
    """Launch the sums of rows, in pieces if rows are few; labels None: of all rows."""
    m = x.shape[0]
    if m == 0:
        return
    steps = row_steps(x, REPEAT, WARPS)
    pieces = steps[0]
    sums = loss.view(m, 1) if pieces == 1 else torch.empty((m, pieces), dtype=torch.float32, device=loss.device)
    arguments = (x, y, loss if labels is None else labels, sums, beta, ignore_index, kind, labels is not None, *steps)
    stream = torch.cuda.current_stream()
    ct.launch(stream, (m * pieces, 1, 1), _SUMS[WARPS], arguments)
    if pieces > 1:
        ct.launch(stream, (m, 1, 1), add_pieces, (sums, loss, pieces, 1 << (pieces - 1).bit_length()))


def _write_gradients(x, y, labels, grad_loss, beta, ignore_index, kind, grad, TILE_N, WARPS):
    """Launch the gradients of blocks of rows; labels None: of all rows."""
    m = y.shape[0]
    if m == 0:
        return
    blocks, tile = row_blocks(y, TILE_N)
    given = (x, y, grad_loss if labels is None else labels, grad_loss, grad)
    arguments = (*given, beta, ignore_index, kind, labels is not None, blocks, tile)
    ct.launch(torch.cuda.current_stream(), (m * blocks, 1, 1), _GRADIENTS[WARPS], arguments)


def _kind(beta: float) -> int:
    return FORWARD if beta == 0 else REVERSE if beta == 1 else MIXED


def run_kl_div(
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
    or 8) warps reads REPEAT vectors of 16 bytes a thread at a time. Few rows are cut into pieces.
    """
    _write_divergence(log_probs, target, None, 0.0, 0, FORWARD if log_target else PLAIN, loss, REPEAT, WARPS)


def run_kl_div_backward(
    target: torch.Tensor, grad_loss: torch.Tensor, log_target: bool, grad_log_probs: torch.Tensor, *, TILE_N: int = 4096,
    WARPS: int = 4,
) -> None:  # fmt: skip
    """Write grad_log_probs [M, V] = T(-p * grad_loss), p being the target or, with log_target, its exponential.

    target and grad_log_probs with unit last stride and any row stride; grad_loss [M] float32. A block has TILE_N columns.
    """
    kind = FORWARD if log_target else PLAIN
    _write_gradients(target, target, None, grad_loss, 0.0, 0, kind, grad_log_probs, TILE_N, WARPS)


def run_jsd(
    student: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor, beta: float, ignore_index: int, loss: torch.Tensor,
    *, REPEAT: int = 2, WARPS: int = 8,
) -> None:  # fmt: skip
    """Write loss [M] = beta KL(p | m) + (1 - beta) KL(q | m), m = beta p + (1 - beta) q, in float32; 0 for ignored rows.

    student (log q) and teacher (log p) [M, V] as for run_kl_div; labels [M] int64. With beta 0 the loss is KL(p | q), with
    beta 1 it is KL(q | p).
    """
    _write_divergence(student, teacher, labels, beta, ignore_index, _kind(beta), loss, REPEAT, WARPS)


def run_jsd_backward(
    student: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor, grad_loss: torch.Tensor, beta: float,
    ignore_index: int, grad_student: torch.Tensor, *, TILE_N: int = 2048, WARPS: int = 4,
) -> None:  # fmt: skip
    """Write grad_student [M, V] = T((1 - beta) q log(q / m) * grad_loss), m = beta p + (1 - beta) q; 0 for ignored rows.

    With beta 0 it is -p * grad_loss, with beta 1 it is q (log(q / p) + 1) * grad_loss. A block has TILE_N columns.
    """
    kind = _kind(beta)
    _write_gradients(student, teacher, labels, grad_loss, beta, ignore_index, kind, grad_student, TILE_N, WARPS)
