"""Divergences of rows and their gradients, Triton: Kullback-Leibler and Jensen-Shannon, one read of both inputs and one write."""

import torch
import triton
import triton.language as tl
from _lib.triton.vocabulary_rows import (
    add_pieces,
    expm1,
    load_once,
    log1p,
    own_block,
    own_piece,
    row_blocks,
    row_pieces,
    row_steps,
    step_columns,
    store_zeros,
)

# KL(p | q) at beta 0, KL(q | p) at beta 1, the divergences from a mixture, and KL(p | q) of a p that is no logarithm.
FORWARD, REVERSE, MIXED, PLAIN = 0, 1, 2, 3


@triton.jit
def _over_student(far, beta):
    """Return log(m / q) for far = log(p / q). Beyond 80 the exponential ends, and the mixture m is nothing but the teacher p."""
    over = tl.where(far <= 80.0, 0.0, far - 80.0)
    return log1p(beta * expm1(tl.minimum(far, 80.0))) + over


@triton.jit
def _terms(x, y, beta, KIND: tl.constexpr):
    """Return the terms of the divergence for log-probabilities of student and teacher; 0 where neither has a probability."""
    if KIND == 0 or KIND == 3:
        p = tl.exp(y) if KIND == 0 else y
        found = tl.where(p == 0.0, 0.0, p * ((y if KIND == 0 else tl.log(y)) - x))
    elif KIND == 1:
        q = tl.exp(x)
        found = tl.where(q == 0.0, 0.0, q * (x - y))
    else:
        larger = tl.maximum(x, y)
        far = tl.minimum(x - y, y - x)
        weight = tl.where(x >= y, beta, 1 - beta)
        small = expm1(far)
        ratio = 1 + small
        fallen = tl.where(ratio == 0.0, 0.0, ratio * far)
        less = weight * small
        # The mixture over the larger of both probabilities is 1 + less.
        found = tl.exp(larger) * (weight * fallen - (1 + less) * log1p(less))
        found = tl.where(larger == float("-inf"), 0.0, found)
    return found


@triton.jit(do_not_specialize=["ignore_index"])
def _divergence(
    x_ptr, y_ptr, labels_ptr, sums_ptr, x_stride, y_stride, V, beta, ignore_index, pieces, piece_columns,
    KIND: tl.constexpr, LABELED: tl.constexpr, REPEAT: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Add up a piece of a row; LABELED: unless the row is ignored."""
    row, first, last = own_piece(pieces, piece_columns, V)
    if LABELED:
        last = tl.where(tl.load(labels_ptr + row) == ignore_index, first, last)  # an ignored row is not read
    x_ptr += row * x_stride
    y_ptr += row * y_stride
    offsets = step_columns(REPEAT, LANES)
    NOTHING: tl.constexpr = 0.0 if KIND == 3 else float("-inf")
    sums = tl.zeros([LANES], dtype=tl.float32)
    for start in range(first, last, REPEAT * LANES):
        cols = start + offsets
        inside = cols < last
        x = load_once(x_ptr + cols, inside, NOTHING)
        y = load_once(y_ptr + cols, inside, NOTHING)
        sums += tl.sum(_terms(x, y, beta, KIND), axis=0)
    tl.store(sums_ptr + tl.program_id(0), tl.sum(sums, axis=0))


@triton.jit(do_not_specialize=["ignore_index"])
def _gradients(
    x_ptr, y_ptr, labels_ptr, grad_loss_ptr, grad_ptr, x_stride, y_stride, grad_stride, V, beta, ignore_index, blocks,
    KIND: tl.constexpr, LABELED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store a block of the gradient of a row; LABELED: zeros if the row is ignored."""
    row, cols = own_block(blocks, BLOCK)
    inside = cols < V
    grad_ptrs = grad_ptr + row * grad_stride + cols
    learned = True
    if LABELED:
        learned = tl.load(labels_ptr + row) != ignore_index
    if learned:
        factor = tl.load(grad_loss_ptr + row)
        y = load_once(y_ptr + row * y_stride + cols, inside, 0.0)
        if KIND == 0:
            found = -tl.exp(y)
        elif KIND == 3:
            found = -y
        else:
            x = load_once(x_ptr + row * x_stride + cols, inside, 0.0)
            q = tl.exp(x)
            found = q * (x - y + 1)
            if KIND == 2:
                found = (1 - beta) * q * -_over_student(y - x, beta)
            found = tl.where(q == 0.0, 0.0, found)
        tl.store(grad_ptrs, (found * factor).to(grad_ptr.dtype.element_ty), mask=inside)
    else:
        store_zeros(grad_ptrs, inside)


def _write_divergence(x, y, labels, beta, ignore_index, kind, loss, REPEAT, num_warps):
    """Launch the sums of rows, in pieces if rows are few; labels None: of all rows."""
    M, V = x.shape
    if M == 0:
        return
    REPEAT, lanes = row_steps(x, REPEAT, num_warps)
    pieces, columns = row_pieces(x, REPEAT * lanes)
    sums = loss if pieces == 1 else torch.empty((M, pieces), dtype=torch.float32, device=loss.device)
    numbers = (x.stride(0), y.stride(0), V, beta, ignore_index, pieces, columns)
    constants = (kind, labels is not None, REPEAT, lanes)
    _divergence[(M * pieces,)](x, y, labels, sums, *numbers, *constants, num_warps=num_warps)
    if pieces > 1:
        add_pieces[(M,)](sums, loss, pieces, 1 << (pieces - 1).bit_length(), num_warps=1)


def _write_gradients(x, y, labels, grad_loss, beta, ignore_index, kind, grad, BLOCK, num_warps):
    """Launch the gradients of blocks of rows; labels None: of all rows."""
    M, V = y.shape
    if M == 0:
        return
    BLOCK, blocks = row_blocks(y, BLOCK)
    numbers = (x.stride(0), y.stride(0), grad.stride(0), V, beta, ignore_index, blocks)
    constants = (kind, labels is not None, BLOCK)
    _gradients[(M * blocks,)](x, y, labels, grad_loss, grad, *numbers, *constants, num_warps=num_warps)


def _kind(beta: float) -> int:
    return FORWARD if beta == 0 else REVERSE if beta == 1 else MIXED


def run_kl_div(
    log_probs: torch.Tensor,
    target: torch.Tensor,
    log_target: bool,
    loss: torch.Tensor,
    *,
    REPEAT: int = 4,
    num_warps: int = 8,
) -> None:
    """Write loss [M] = sum(p * (log(p) - log_probs)) in float32, p being the target or, with log_target, its exponential.

    log_probs and target [M, V] with unit last stride and any row stride, in bfloat16, float16 or float32. A program reads
    REPEAT vectors of 16 bytes a thread at a time. Few rows are cut into pieces, and a second kernel adds these up.
    """
    kind = FORWARD if log_target else PLAIN
    _write_divergence(log_probs, target, None, 0.0, 0, kind, loss, REPEAT, num_warps)


def run_kl_div_backward(
    target: torch.Tensor, grad_loss: torch.Tensor, log_target: bool, grad_log_probs: torch.Tensor, *, BLOCK: int = 4096,
    num_warps: int = 4,
) -> None:  # fmt: skip
    """Write grad_log_probs [M, V] = T(-p * grad_loss), p being the target or, with log_target, its exponential.

    target and grad_log_probs with unit last stride and any row stride; grad_loss [M] float32. A program has BLOCK columns.
    """
    kind = FORWARD if log_target else PLAIN
    _write_gradients(target, target, None, grad_loss, 0.0, 0, kind, grad_log_probs, BLOCK, num_warps)


def run_jsd(
    student: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor, beta: float, ignore_index: int, loss: torch.Tensor,
    *, REPEAT: int = 2, num_warps: int = 8,
) -> None:  # fmt: skip
    """Write loss [M] = beta KL(p | m) + (1 - beta) KL(q | m), m = beta p + (1 - beta) q, in float32; 0 for ignored rows.

    student (log q) and teacher (log p) [M, V] with unit last stride and any row stride, in bfloat16, float16 or float32;
    labels [M] int64. With beta 0 the loss is KL(p | q), with beta 1 it is KL(q | p). A program reads REPEAT vectors of 16
    bytes a thread at a time. Few rows are cut into pieces, and a second kernel adds these up.
    """
    _write_divergence(student, teacher, labels, beta, ignore_index, _kind(beta), loss, REPEAT, num_warps)


def run_jsd_backward(
    student: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor, grad_loss: torch.Tensor, beta: float,
    ignore_index: int, grad_student: torch.Tensor, *, BLOCK: int = 2048, num_warps: int = 4,
) -> None:  # fmt: skip
    """Write grad_student [M, V] = T((1 - beta) q log(q / m) * grad_loss), m = beta p + (1 - beta) q; 0 for ignored rows.

    With beta 0 it is -p * grad_loss, with beta 1 it is q (log(q / p) + 1) * grad_loss. student (log q), teacher (log p) and
    grad_student with unit last stride and any row stride; labels [M] int64, grad_loss [M] float32. A program has BLOCK columns.
    """
    kind = _kind(beta)
    _write_gradients(student, teacher, labels, grad_loss, beta, ignore_index, kind, grad_student, BLOCK, num_warps)
