"""The clipped policy loss of tokens and its gradient, Triton: one read of the logits, then one read and one write."""

import torch
import triton
import triton.language as tl
from _lib.triton.vocabulary_rows import (
    exp_over_line,
    expm1,
    grow,
    join,
    load_once,
    own_block,
    own_piece,
    row_blocks,
    row_pieces,
    row_steps,
    step_columns,
    store_zeros,
)


@triton.jit(do_not_specialize=["ignore_index"])
def _statistics(
    x_ptr, labels_ptr, parts_ptr, x_stride, V, per_temperature, ignore_index, pieces, piece_columns,
    REPEAT: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Store the maximum of a piece of a row, and its sum of exp((x - maximum) / temperature)."""
    row, first, last = own_piece(pieces, piece_columns, V)
    if tl.load(labels_ptr + row) != ignore_index:
        x_ptr += row * x_stride
        offsets = step_columns(REPEAT, LANES)
        top = tl.full([LANES], float("-inf"), dtype=tl.float32)
        total = tl.zeros([LANES], dtype=tl.float32)
        for start in range(first, last, REPEAT * LANES):
            cols = start + offsets
            top, total = grow(top, total, load_once(x_ptr + cols, cols < last, float("-inf")), per_temperature)
        top, total = join(top, total, per_temperature)
        tl.store(parts_ptr + 2 * tl.program_id(0), top)
        tl.store(parts_ptr + 2 * tl.program_id(0) + 1, total)


@triton.jit(do_not_specialize=["ignore_index", "M"])
def _losses(
    x_ptr, labels_ptr, parts_ptr, old_logp_ptr, ref_logp_ptr, advantages_ptr, loss_ptr, logp_ptr, row_max_ptr, log_sum_ptr,
    x_stride, M, V, per_temperature, beta, least, most, ignore_index, pieces,
    ROWS: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Join the pieces of ROWS rows and store what follows from them; a thread has a row or a piece."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = rows < M
    labels = tl.load(labels_ptr + rows, mask=here, other=0)
    learned = here & (labels != ignore_index)
    which = tl.arange(0, PIECES)[None, :]
    part_ptrs = parts_ptr + 2 * (rows[:, None] * pieces + which)
    known = learned[:, None] & (which < pieces)
    tops = tl.load(part_ptrs, mask=known, other=float("-inf"))
    totals = tl.load(part_ptrs + 1, mask=known, other=0.0)
    top, total = join(tops, totals, per_temperature)
    # A row of -inf has the sum 0, and +inf or NaN in a row leave NaN in the sum.
    bad = (top == float("-inf")) | (total != total)
    top = tl.where(bad, float("nan"), top)
    log_sum = tl.where(bad, float("nan"), tl.log(total))
    inside = learned & (labels >= 0) & (labels < V)  # a label that is neither a column nor ignored is an error: NaN
    x_ptrs = x_ptr + rows.to(tl.int64) * x_stride + labels
    of_label = tl.load(x_ptrs, mask=inside, other=float("nan")).to(tl.float32)
    logp = (of_label - top) * per_temperature - log_sum
    advantage = tl.load(advantages_ptr + rows, mask=learned, other=0.0)
    ratio = tl.exp(logp - tl.load(old_logp_ptr + rows, mask=learned, other=0.0))
    bounded = tl.where(ratio < least, least, tl.where(ratio > most, most, ratio))
    first, second = ratio * advantage, bounded * advantage
    smaller = tl.where((second < first) | (second != second), second, first)
    apart = tl.load(ref_logp_ptr + rows, mask=learned, other=0.0) - logp
    loss = tl.where(beta == 0, 0.0, beta * exp_over_line(apart)) - smaller  # at beta 0, ref_logp is any numbers
    tl.store(loss_ptr + rows, tl.where(learned, loss, 0.0), mask=here)
    tl.store(logp_ptr + rows, tl.where(learned, logp, 0.0), mask=here)
    tl.store(row_max_ptr + rows, tl.where(learned, top, 0.0), mask=here)
    tl.store(log_sum_ptr + rows, tl.where(learned, log_sum, 0.0), mask=here)


@triton.jit(do_not_specialize=["ignore_index"])
def _gradients(
    x_ptr, labels_ptr, logp_ptr, row_max_ptr, log_sum_ptr, old_logp_ptr, ref_logp_ptr, advantages_ptr, grad_loss_ptr, grad_ptr,
    x_stride, grad_stride, V, per_temperature, beta, least, most, ignore_index, blocks,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Store a block of the gradient of a row; zeros if its token is masked."""
    row, cols = own_block(blocks, BLOCK)
    inside = cols < V
    label = tl.load(labels_ptr + row)
    grad_ptrs = grad_ptr + row * grad_stride + cols
    if label == ignore_index:
        store_zeros(grad_ptrs, inside)
    else:
        logp = tl.load(logp_ptr + row)
        top = tl.load(row_max_ptr + row)
        log_sum = tl.load(log_sum_ptr + row)
        advantage = tl.load(advantages_ptr + row)
        ratio = tl.exp(logp - tl.load(old_logp_ptr + row))
        clipped = ((advantage < 0) & (ratio < least)) | ((advantage > 0) & (ratio > most))
        pull = beta * expm1(tl.load(ref_logp_ptr + row) - logp)
        factor = tl.where(clipped, 0.0, ratio * advantage) + tl.where(beta == 0, 0.0, pull)
        factor *= tl.load(grad_loss_ptr + row) * per_temperature
        x = load_once(x_ptr + row * x_stride + cols, inside, float("-inf"))
        chance = tl.exp((x - top) * per_temperature - log_sum)
        off = tl.where(cols == label, expm1(logp), chance)
        tl.store(grad_ptrs, (off * factor).to(grad_ptr.dtype.element_ty), mask=inside)


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
    num_warps: int = 8,
) -> None:
    """Write loss = beta (exp(d) - d - 1) - min(r A, clip(r, 1 - eps_low, 1 + eps_high) A), r = exp(logp - old), d = ref - logp.

    logits [M, V] with unit last stride and any row stride, in bfloat16, float16 or float32; labels [M] int64; old_logp,
    ref_logp, advantages and all outputs [M] float32. A program reads a row, or a piece of it, once. A second kernel joins the
    pieces and computes the losses. The row of an ignored label is not read.
    """
    M, V = logits.shape
    if M == 0:
        return
    REPEAT, lanes = row_steps(logits, REPEAT, num_warps)
    pieces, columns = row_pieces(logits, REPEAT * lanes)
    parts = torch.empty((M, pieces, 2), dtype=torch.float32, device=logits.device)
    stride, per_temperature = logits.stride(0), 1 / temperature
    numbers = (stride, V, per_temperature, ignore_index, pieces, columns)
    _statistics[(M * pieces,)](logits, labels, parts, *numbers, REPEAT, lanes, num_warps=num_warps)
    slots = 1 << (pieces - 1).bit_length()
    rows = max(1, 32 // slots)
    tensors = (logits, labels, parts, old_logp, ref_logp, advantages, loss, logp, row_max, log_sum)
    numbers = (stride, M, V, per_temperature, beta, 1 - eps_low, 1 + eps_high, ignore_index, pieces)
    _losses[(-(-M // rows),)](*tensors, *numbers, rows, slots, num_warps=1)


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
    BLOCK: int = 4096,
    num_warps: int = 4,
) -> None:
    """Write grad_logits [M, V] = T((p - (1 at the token)) * c * grad_loss / temperature); 0 for masked rows.

    c = r A, or 0 if r is clipped, plus beta (exp(ref - logp) - 1); p = exp((logits - row_max) / temperature - log_sum). logits
    and grad_logits with unit last stride and any row stride; labels [M] int64; all others [M] float32. A program has BLOCK
    columns of a row.
    """
    M, V = logits.shape
    if M == 0:
        return
    BLOCK, blocks = row_blocks(logits, BLOCK)
    tensors = (logits, labels, logp, row_max, log_sum, old_logp, ref_logp, advantages, grad_loss, grad_logits)
    strides = (logits.stride(0), grad_logits.stride(0))
    numbers = (V, 1 / temperature, beta, 1 - eps_low, 1 + eps_high, ignore_index, blocks)
    _gradients[(M * blocks,)](*tensors, *strides, *numbers, BLOCK, num_warps=num_warps)
