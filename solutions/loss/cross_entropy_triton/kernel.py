"""Cross entropy of rows of logits and its gradient, Triton: one read of the logits, then one read and one write."""

import torch
import triton
import triton.language as tl

FEW_ROWS = 256  # below about two a multiprocessor, rows are cut into pieces that several programs read
MIN_PIECE = 16384  # columns


@triton.jit
def _row_statistics(x_ptr, first, last, REPEAT: tl.constexpr, LANES: tl.constexpr):
    """Return maximum and sum of exp(x - maximum) of the columns from first to last.

    A lane has its own maximum and sum until the end, so warps do not wait for each other. A lane takes REPEAT columns at
    a time and rescales its sum once for all of them: REPEAT + 1 exponentials.
    """
    offsets = tl.arange(0, REPEAT)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    top = tl.full([LANES], float("-inf"), dtype=tl.float32)
    total = tl.zeros([LANES], dtype=tl.float32)
    for start in range(first, last, REPEAT * LANES):
        cols = start + offsets
        x = tl.load(x_ptr + cols, mask=cols < last, other=float("-inf"), eviction_policy="evict_first")
        x = x.to(tl.float32)
        new_top = tl.maximum(top, tl.max(x, axis=0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        total = total * tl.exp(top - base) + tl.sum(tl.exp(x - base[None, :]), axis=0)
        top = new_top
    row_top = tl.max(top, axis=0)
    base = tl.where(row_top == float("-inf"), 0.0, row_top)
    return row_top, tl.sum(total * tl.exp(top - base), axis=0)


@triton.jit
def _store_row(loss_ptr, row_max_ptr, log_sum_ptr, row, x_ptr, label, top, total, V):
    """Store what a row's maximum and sum give. Both terms of the loss are at least 0: nothing cancels."""
    # A row of -inf has the sum 0, and +inf or NaN in a row leave NaN in the sum.
    bad = (top == float("-inf")) | (total != total)
    top = tl.where(bad, float("nan"), top)
    log_sum = tl.where(bad, float("nan"), tl.log(total))
    inside = (label >= 0) & (label < V)  # a label that is neither a column nor ignored is an error: its loss is NaN
    of_label = tl.load(x_ptr + label, mask=inside, other=float("nan")).to(tl.float32)
    tl.store(loss_ptr + row, log_sum + (top - of_label))
    tl.store(row_max_ptr + row, top)
    tl.store(log_sum_ptr + row, log_sum)


@triton.jit
def _store_ignored(loss_ptr, row_max_ptr, log_sum_ptr, row):
    tl.store(loss_ptr + row, 0.0)
    tl.store(row_max_ptr + row, 0.0)
    tl.store(log_sum_ptr + row, 0.0)


@triton.jit(do_not_specialize=["ignore_index"])
def _cross_entropy(
    x_ptr,
    labels_ptr,
    loss_ptr,
    row_max_ptr,
    log_sum_ptr,
    x_stride,
    V,
    ignore_index,
    REPEAT: tl.constexpr,
    LANES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)  # rows * vocabulary may not fit into 32 bits
    label = tl.load(labels_ptr + row)
    if label == ignore_index:
        _store_ignored(loss_ptr, row_max_ptr, log_sum_ptr, row)
    else:
        x_ptr += row * x_stride
        top, total = _row_statistics(x_ptr, 0, V, REPEAT, LANES)
        _store_row(loss_ptr, row_max_ptr, log_sum_ptr, row, x_ptr, label, top, total, V)


@triton.jit(do_not_specialize=["ignore_index"])
def _piece_statistics(
    x_ptr,
    labels_ptr,
    parts_ptr,
    x_stride,
    V,
    ignore_index,
    pieces,
    piece_columns,
    REPEAT: tl.constexpr,
    LANES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    if tl.load(labels_ptr + row) != ignore_index:
        first = piece * piece_columns
        last = tl.minimum(first + piece_columns, V)
        top, total = _row_statistics(x_ptr + row * x_stride, first, last, REPEAT, LANES)
        tl.store(parts_ptr + 2 * (row * pieces + piece), top)
        tl.store(parts_ptr + 2 * (row * pieces + piece) + 1, total)


@triton.jit(do_not_specialize=["ignore_index", "pieces"])
def _join_pieces(
    x_ptr,
    labels_ptr,
    parts_ptr,
    loss_ptr,
    row_max_ptr,
    log_sum_ptr,
    x_stride,
    V,
    ignore_index,
    pieces,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels_ptr + row)
    if label == ignore_index:
        _store_ignored(loss_ptr, row_max_ptr, log_sum_ptr, row)
    else:
        which = tl.arange(0, BLOCK)
        part_ptrs = parts_ptr + 2 * (row * pieces + which)
        tops = tl.load(part_ptrs, mask=which < pieces, other=float("-inf"))
        totals = tl.load(part_ptrs + 1, mask=which < pieces, other=0.0)
        top = tl.max(tops, axis=0)
        base = tl.where(top == float("-inf"), 0.0, top)
        total = tl.sum(totals * tl.exp(tops - base), axis=0)
        _store_row(loss_ptr, row_max_ptr, log_sum_ptr, row, x_ptr + row * x_stride, label, top, total, V)


@triton.jit
def _expm1(x):
    """Return exp(x) - 1 for x <= 0, near 0 by its series: the difference would have no correct digit there."""
    series = x / 8 + 1
    series = x / 7 * series + 1
    series = x / 6 * series + 1
    series = x / 5 * series + 1
    series = x / 4 * series + 1
    series = x / 3 * series + 1
    series = x / 2 * series + 1
    return tl.where(x > -0.4, x * series, tl.exp(x) - 1)


@triton.jit(do_not_specialize=["ignore_index"])
def _cross_entropy_backward(
    x_ptr,
    labels_ptr,
    row_max_ptr,
    log_sum_ptr,
    grad_loss_ptr,
    grad_ptr,
    x_stride,
    grad_stride,
    V,
    ignore_index,
    blocks,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) // blocks).to(tl.int64)
    cols = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    label = tl.load(labels_ptr + row)
    grad_ptrs = grad_ptr + row * grad_stride + cols
    if label == ignore_index:
        tl.store(grad_ptrs, tl.zeros([BLOCK], dtype=grad_ptr.dtype.element_ty), mask=cols < V)
    else:
        top = tl.load(row_max_ptr + row)
        log_sum = tl.load(log_sum_ptr + row)
        factor = tl.load(grad_loss_ptr + row)
        x = tl.load(x_ptr + row * x_stride + cols, mask=cols < V, other=float("-inf"), eviction_policy="evict_first")
        off = tl.exp((x.to(tl.float32) - top) - log_sum)
        inside = (label >= 0) & (label < V)
        of_label = tl.load(x_ptr + row * x_stride + label, mask=inside, other=float("nan")).to(tl.float32)
        off = tl.where(cols == label, _expm1((of_label - top) - log_sum), off)
        tl.store(grad_ptrs, (off * factor).to(grad_ptr.dtype.element_ty), mask=cols < V)


def run(
    logits: torch.Tensor,
    labels: torch.Tensor,
    ignore_index: int,
    loss: torch.Tensor,
    row_max: torch.Tensor,
    log_sum: torch.Tensor,
    *,
    REPEAT: int = 8,
    num_warps: int = 8,
) -> None:
    """Write loss = log_sum + row_max - logits[label], row_max and log_sum, all [M] in float32; 0 for ignored rows.

    logits [M, V] with unit last stride and any row stride, in bfloat16, float16 or float32; labels [M] int64. A program
    reads a row once, REPEAT * 256 * num_warps columns of a 16-bit T at a time. Few rows are cut into pieces, and a second
    kernel joins these. The row of an ignored label is not read.
    """
    M, V = logits.shape
    if M == 0:
        return
    lanes = 32 * num_warps * (16 // logits.element_size())
    while lanes > 64 and REPEAT * lanes > 2 * V:
        REPEAT, lanes = (REPEAT // 2, lanes) if REPEAT > 1 else (1, lanes // 2)
    pieces = 1 if M >= FEW_ROWS else max(1, min(FEW_ROWS // M, V // MIN_PIECE))
    if pieces == 1:
        _cross_entropy[(M,)](
            logits,
            labels,
            loss,
            row_max,
            log_sum,
            logits.stride(0),
            V,
            ignore_index,
            REPEAT,
            lanes,
            num_warps=num_warps,
        )
        return
    columns = -(-V // (pieces * 1024)) * 1024
    pieces = -(-V // columns)
    parts = torch.empty((M, pieces, 2), dtype=torch.float32, device=logits.device)
    _piece_statistics[(M, pieces)](
        logits,
        labels,
        parts,
        logits.stride(0),
        V,
        ignore_index,
        pieces,
        columns,
        REPEAT,
        lanes,
        num_warps=num_warps,
    )
    _join_pieces[(M,)](
        logits,
        labels,
        parts,
        loss,
        row_max,
        log_sum,
        logits.stride(0),
        V,
        ignore_index,
        pieces,
        1 << (pieces - 1).bit_length(),
        num_warps=1,
    )


def run_backward(
    logits: torch.Tensor,
    labels: torch.Tensor,
    row_max: torch.Tensor,
    log_sum: torch.Tensor,
    grad_loss: torch.Tensor,
    ignore_index: int,
    grad_logits: torch.Tensor,
    *,
    BLOCK: int = 4096,
    num_warps: int = 4,
) -> None:
    """Write grad_logits [M, V] = T((exp(logits - row_max - log_sum) - (1 at the label)) * grad_loss); 0 for ignored rows.

    logits and grad_logits with unit last stride and any row stride; labels [M]
    int64; row_max, log_sum and grad_loss [M] float32. A program has BLOCK columns of a row.
    """
    M, V = logits.shape
    if M == 0:
        return
    BLOCK = min(BLOCK, max(32, 1 << (V - 1).bit_length()))
    blocks = -(-V // BLOCK)
    _cross_entropy_backward[(M * blocks,)](
        logits,
        labels,
        row_max,
        log_sum,
        grad_loss,
        grad_logits,
        logits.stride(0),
        grad_logits.stride(0),
        V,
        ignore_index,
        blocks,
        BLOCK,
        num_warps=num_warps,
    )
