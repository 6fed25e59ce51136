"""Generalised Jensen-Shannon divergence of rows and its gradient, Triton: one read of both inputs, and one write."""

import torch
import triton
import triton.language as tl

FEW_ROWS = 256  # below about two a multiprocessor, rows are cut into pieces that several programs read
MIN_PIECE = 8192  # columns

FORWARD, REVERSE, MIXED = 0, 1, 2  # KL(p | q) at beta 0, KL(q | p) at beta 1, and the divergences from a mixture


@triton.jit
def _expm1(x):
    """Return exp(x) - 1, near 0 by its series: the difference would have no correct digit there."""
    series = x * (1 / 40320) + 1 / 5040
    series = x * series + 1 / 720
    series = x * series + 1 / 120
    series = x * series + 1 / 24
    series = x * series + 1 / 6
    series = x * series + 1 / 2
    series = x * series + 1
    return tl.where(tl.abs(x) < 0.4, x * series, tl.exp(x) - 1)


@triton.jit
def _log1p(x):
    """Return log(1 + x), with the rounding of the sum put back."""
    total = 1 + x
    return tl.log(total) + (x - (total - 1)) / total


@triton.jit
def _over_student(far, beta):
    """Return log(m / q) for far = log(p / q). Beyond 80 the exponential ends, and the mixture m is nothing but the teacher p."""
    over = tl.where(far <= 80.0, 0.0, far - 80.0)
    return _log1p(beta * _expm1(tl.minimum(far, 80.0))) + over


@triton.jit
def _terms(x, y, beta, KIND: tl.constexpr):
    """Return the terms of the divergence for log-probabilities of student and teacher; 0 where neither has a probability."""
    if KIND == 0:
        p = tl.exp(y)
        found = tl.where(p == 0.0, 0.0, p * (y - x))
    elif KIND == 1:
        q = tl.exp(x)
        found = tl.where(q == 0.0, 0.0, q * (x - y))
    else:
        larger = tl.maximum(x, y)
        far = tl.minimum(x - y, y - x)
        weight = tl.where(x >= y, beta, 1 - beta)
        small = _expm1(far)
        ratio = 1 + small
        fallen = tl.where(ratio == 0.0, 0.0, ratio * far)
        less = weight * small
        # The mixture over the larger of both probabilities is 1 + less.
        found = tl.exp(larger) * (weight * fallen - (1 + less) * _log1p(less))
        found = tl.where(larger == float("-inf"), 0.0, found)
    return found


@triton.jit(do_not_specialize=["ignore_index"])
def _jsd(
    x_ptr,
    y_ptr,
    labels_ptr,
    sums_ptr,
    x_stride,
    y_stride,
    V,
    beta,
    ignore_index,
    pieces,
    piece_columns,
    KIND: tl.constexpr,
    REPEAT: tl.constexpr,
    LANES: tl.constexpr,
):
    """Add up a piece of a row. A lane has its own sum until the end, so warps do not wait for each other."""
    row = (tl.program_id(0) // pieces).to(tl.int64)  # rows * vocabulary may not fit into 32 bits
    if tl.load(labels_ptr + row) == ignore_index:
        tl.store(sums_ptr + tl.program_id(0), 0.0)
    else:
        first = tl.program_id(0) % pieces * piece_columns
        last = tl.minimum(first + piece_columns, V)
        x_ptr += row * x_stride
        y_ptr += row * y_stride
        offsets = tl.arange(0, REPEAT)[:, None] * LANES + tl.arange(0, LANES)[None, :]
        sums = tl.zeros([LANES], dtype=tl.float32)
        for start in range(first, last, REPEAT * LANES):
            cols = start + offsets
            inside = cols < last
            x = tl.load(x_ptr + cols, mask=inside, other=float("-inf"), eviction_policy="evict_first").to(tl.float32)
            y = tl.load(y_ptr + cols, mask=inside, other=float("-inf"), eviction_policy="evict_first").to(tl.float32)
            sums += tl.sum(_terms(x, y, beta, KIND), axis=0)
        tl.store(sums_ptr + tl.program_id(0), tl.sum(sums, axis=0))


@triton.jit
def _add_pieces(sums_ptr, loss_ptr, pieces, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    which = tl.arange(0, BLOCK)
    sums = tl.load(sums_ptr + row * pieces + which, mask=which < pieces, other=0.0)
    tl.store(loss_ptr + row, tl.sum(sums, axis=0))


@triton.jit(do_not_specialize=["ignore_index"])
def _jsd_backward(
    x_ptr,
    y_ptr,
    labels_ptr,
    grad_loss_ptr,
    grad_ptr,
    x_stride,
    y_stride,
    grad_stride,
    V,
    beta,
    ignore_index,
    blocks,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) // blocks).to(tl.int64)
    cols = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = cols < V
    grad_ptrs = grad_ptr + row * grad_stride + cols
    if tl.load(labels_ptr + row) == ignore_index:
        tl.store(grad_ptrs, tl.zeros([BLOCK], dtype=grad_ptr.dtype.element_ty), mask=inside)
    else:
        factor = tl.load(grad_loss_ptr + row)
        y = tl.load(y_ptr + row * y_stride + cols, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        if KIND == 0:
            found = -tl.exp(y)
        else:
            x = tl.load(x_ptr + row * x_stride + cols, mask=inside, other=0.0, eviction_policy="evict_first")
            x = x.to(tl.float32)
            q = tl.exp(x)
            found = q * (x - y + 1)
            if KIND == 2:
                found = (1 - beta) * q * -_over_student(y - x, beta)
            found = tl.where(q == 0.0, 0.0, found)
        tl.store(grad_ptrs, (found * factor).to(grad_ptr.dtype.element_ty), mask=inside)


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
    num_warps: int = 8,
) -> None:
    """Write loss [M] = beta KL(p | m) + (1 - beta) KL(q | m), m = beta p + (1 - beta) q, in float32; 0 for ignored rows.

    student (log q) and teacher (log p) [M, V] with unit last stride and any row stride, in bfloat16, float16 or float32;
    labels [M] int64. With beta 0 the loss is KL(p | q), with beta 1 it is KL(q | p). A program reads REPEAT vectors of 16
    bytes a thread at a time. Few rows are cut into pieces, and a second kernel adds these up.
    """
    M, V = student.shape
    if M == 0:
        return
    lanes = 32 * num_warps * (16 // student.element_size())
    while lanes > 64 and REPEAT * lanes > 2 * V:
        REPEAT, lanes = (REPEAT // 2, lanes) if REPEAT > 1 else (1, lanes // 2)
    pieces = 1 if M >= FEW_ROWS else max(1, min(FEW_ROWS // M, V // MIN_PIECE))
    columns = -(-V // (pieces * REPEAT * lanes)) * REPEAT * lanes
    sums = loss if pieces == 1 else torch.empty((M, pieces), dtype=torch.float32, device=loss.device)
    _jsd[(M * pieces,)](
        student,
        teacher,
        labels,
        sums,
        student.stride(0),
        teacher.stride(0),
        V,
        beta,
        ignore_index,
        pieces,
        columns,
        _kind(beta),
        REPEAT,
        lanes,
        num_warps=num_warps,
    )
    if pieces > 1:
        _add_pieces[(M,)](sums, loss, pieces, 1 << (pieces - 1).bit_length(), num_warps=1)


def run_backward(
    student: torch.Tensor,
    teacher: torch.Tensor,
    labels: torch.Tensor,
    grad_loss: torch.Tensor,
    beta: float,
    ignore_index: int,
    grad_student: torch.Tensor,
    *,
    BLOCK: int = 2048,
    num_warps: int = 4,
) -> None:
    """Write grad_student [M, V] = T((1 - beta) q log(q / m) * grad_loss), m = beta p + (1 - beta) q; 0 for ignored rows.

    With beta 0 it is -p * grad_loss, with beta 1 it is q (log(q / p) + 1) * grad_loss. student (log q), teacher (log p) and
    grad_student with unit last stride and any row stride; labels [M] int64, grad_loss [M] float32. A program has BLOCK columns.
    """
    M, V = student.shape
    if M == 0:
        return
    BLOCK = min(BLOCK, max(32, 1 << (V - 1).bit_length()))
    blocks = -(-V // BLOCK)
    _jsd_backward[(M * blocks,)](
        student,
        teacher,
        labels,
        grad_loss,
        grad_student,
        student.stride(0),
        teacher.stride(0),
        grad_student.stride(0),
        V,
        beta,
        ignore_index,
        blocks,
        _kind(beta),
        BLOCK,
        num_warps=num_warps,
    )
