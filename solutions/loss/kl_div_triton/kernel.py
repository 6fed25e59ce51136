"""Kullback-Leibler divergence of rows and its gradient, Triton: one read of both inputs, then one read and one write."""

import torch
import triton
import triton.language as tl

FEW_ROWS = 256  # below about two a multiprocessor, rows are cut into pieces that several programs read
MIN_PIECE = 8192  # columns


@triton.jit
def _kl_div(
    x_ptr,
    target_ptr,
    sums_ptr,
    x_stride,
    target_stride,
    V,
    pieces,
    piece_columns,
    LOG_TARGET: tl.constexpr,
    REPEAT: tl.constexpr,
    LANES: tl.constexpr,
):
    """Add up a piece of a row. A lane has its own sum until the end, so warps do not wait for each other."""
    row = (tl.program_id(0) // pieces).to(tl.int64)  # rows * vocabulary may not fit into 32 bits
    first = tl.program_id(0) % pieces * piece_columns
    last = tl.minimum(first + piece_columns, V)
    x_ptr += row * x_stride
    target_ptr += row * target_stride
    offsets = tl.arange(0, REPEAT)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    NOTHING: tl.constexpr = float("-inf") if LOG_TARGET else 0.0
    sums = tl.zeros([LANES], dtype=tl.float32)
    for start in range(first, last, REPEAT * LANES):
        cols = start + offsets
        inside = cols < last
        target = tl.load(target_ptr + cols, mask=inside, other=NOTHING, eviction_policy="evict_first").to(tl.float32)
        x = tl.load(x_ptr + cols, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        chance = tl.exp(target) if LOG_TARGET else target
        apart = (target if LOG_TARGET else tl.log(target)) - x
        sums += tl.sum(tl.where(chance == 0.0, 0.0, chance * apart), axis=0)
    tl.store(sums_ptr + tl.program_id(0), tl.sum(sums, axis=0))


@triton.jit
def _add_pieces(sums_ptr, loss_ptr, pieces, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    which = tl.arange(0, BLOCK)
    sums = tl.load(sums_ptr + row * pieces + which, mask=which < pieces, other=0.0)
    tl.store(loss_ptr + row, tl.sum(sums, axis=0))


@triton.jit
def _kl_div_backward(
    target_ptr,
    grad_loss_ptr,
    grad_ptr,
    target_stride,
    grad_stride,
    V,
    blocks,
    LOG_TARGET: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) // blocks).to(tl.int64)
    cols = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = cols < V
    factor = -tl.load(grad_loss_ptr + row)
    target = tl.load(target_ptr + row * target_stride + cols, mask=inside, other=0.0, eviction_policy="evict_first")
    target = target.to(tl.float32)
    chance = tl.exp(target) if LOG_TARGET else target
    tl.store(grad_ptr + row * grad_stride + cols, (chance * factor).to(grad_ptr.dtype.element_ty), mask=inside)


def run(
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
    M, V = log_probs.shape
    if M == 0:
        return
    lanes = 32 * num_warps * (16 // log_probs.element_size())
    while lanes > 64 and REPEAT * lanes > 2 * V:
        REPEAT, lanes = (REPEAT // 2, lanes) if REPEAT > 1 else (1, lanes // 2)
    pieces = 1 if M >= FEW_ROWS else max(1, min(FEW_ROWS // M, V // MIN_PIECE))
    columns = -(-V // (pieces * REPEAT * lanes)) * REPEAT * lanes
    sums = loss if pieces == 1 else torch.empty((M, pieces), dtype=torch.float32, device=loss.device)
    strides = (log_probs.stride(0), target.stride(0))
    _kl_div[(M * pieces,)](
        log_probs, target, sums, *strides, V, pieces, columns, log_target, REPEAT, lanes, num_warps=num_warps
    )
    if pieces > 1:
        _add_pieces[(M,)](sums, loss, pieces, 1 << (pieces - 1).bit_length(), num_warps=1)


def run_backward(
    target: torch.Tensor,
    grad_loss: torch.Tensor,
    log_target: bool,
    grad_log_probs: torch.Tensor,
    *,
    BLOCK: int = 4096,
    num_warps: int = 4,
) -> None:
    """Write grad_log_probs [M, V] = T(-p * grad_loss), p being the target or, with log_target, its exponential.

    target and grad_log_probs with unit last stride and any row stride; grad_loss [M] float32. A program has BLOCK columns.
    """
    M, V = target.shape
    if M == 0:
        return
    BLOCK = min(BLOCK, max(32, 1 << (V - 1).bit_length()))
    blocks = -(-V // BLOCK)
    strides = (target.stride(0), grad_log_probs.stride(0))
    _kl_div_backward[(M * blocks,)](
        target, grad_loss, grad_log_probs, *strides, V, blocks, log_target, BLOCK, num_warps=num_warps
    )
