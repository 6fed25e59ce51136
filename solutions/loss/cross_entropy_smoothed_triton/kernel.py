"""Cross entropy with label smoothing and z-loss, and its gradient, Triton: one read of the logits each, and one write."""

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["ignore_index"])
def _cross_entropy(
    x_ptr,
    labels_ptr,
    loss_ptr,
    row_max_ptr,
    log_sum_ptr,
    x_stride,
    V,
    smoothing,
    z_weight,
    ignore_index,
    share,
    REPEAT: tl.constexpr,
    LANES: tl.constexpr,
):
    """Compute one row. A lane has its own maximum and sums until the end, so warps do not wait for each other."""
    row = tl.program_id(0).to(tl.int64)  # rows * vocabulary may not fit into 32 bits
    label = tl.load(labels_ptr + row)
    if label == ignore_index:
        tl.store(loss_ptr + row, 0.0)
        tl.store(row_max_ptr + row, 0.0)
        tl.store(log_sum_ptr + row, 0.0)
    else:
        x_ptr += row * x_stride
        offsets = tl.arange(0, REPEAT)[:, None] * LANES + tl.arange(0, LANES)[None, :]
        tops = tl.full([LANES], float("-inf"), dtype=tl.float32)
        totals = tl.zeros([LANES], dtype=tl.float32)
        sums = tl.zeros([LANES], dtype=tl.float32)
        for start in range(0, V, REPEAT * LANES):
            cols = start + offsets
            x = tl.load(x_ptr + cols, mask=cols < V, other=float("-inf"), eviction_policy="evict_first")
            x = x.to(tl.float32)
            new_tops = tl.maximum(tops, tl.max(x, axis=0))
            base = tl.where(new_tops == float("-inf"), 0.0, new_tops)
            totals = totals * tl.exp(tops - base) + tl.sum(tl.exp(x - base[None, :]), axis=0)
            # By a power of two, so that large logits do not overflow and nothing is rounded.
            sums += tl.sum(tl.where(cols < V, x * share, 0.0), axis=0)
            tops = new_tops
        top = tl.max(tops, axis=0)
        base = tl.where(top == float("-inf"), 0.0, top)
        total = tl.sum(totals * tl.exp(tops - base), axis=0)
        # A row of -inf has the sum 0, and +inf or NaN in a row leave NaN in the sum.
        bad = (top == float("-inf")) | (total != total)
        top = tl.where(bad, float("nan"), top)
        log_sum = tl.where(bad, float("nan"), tl.log(total))
        inside = (label >= 0) & (label < V)  # a label that is neither a column nor ignored is an error: its loss is NaN
        of_label = top - tl.load(x_ptr + label, mask=inside, other=float("nan")).to(tl.float32)
        of_all = top - tl.sum(sums, axis=0) / (V * share)
        lse = top + log_sum
        loss = log_sum + (1.0 - smoothing) * of_label + smoothing * of_all + z_weight * lse * lse
        tl.store(loss_ptr + row, loss)
        tl.store(row_max_ptr + row, top)
        tl.store(log_sum_ptr + row, log_sum)


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
    smoothing,
    z_weight,
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
        chance = tl.exp((x.to(tl.float32) - top) - log_sum)
        inside = (label >= 0) & (label < V)
        of_label = tl.load(x_ptr + row * x_stride + label, mask=inside, other=float("nan")).to(tl.float32)
        off = tl.where(cols == label, _expm1((of_label - top) - log_sum) + smoothing, chance)
        off += 2.0 * z_weight * (top + log_sum) * chance - smoothing / V
        tl.store(grad_ptrs, (off * factor).to(grad_ptr.dtype.element_ty), mask=cols < V)


def run(
    logits: torch.Tensor,
    labels: torch.Tensor,
    smoothing: float,
    z_weight: float,
    ignore_index: int,
    loss: torch.Tensor,
    row_max: torch.Tensor,
    log_sum: torch.Tensor,
    *,
    REPEAT: int = 8,
    num_warps: int = 8,
) -> None:
    """Write loss, row_max and log_sum, all [M] in float32; 0 for ignored rows.

    loss = (1 - smoothing) (lse - logits[label]) + smoothing (lse - mean(logits)) + z_weight lse^2, lse = row_max + log_sum.

    logits [M, V] with unit last stride and any row stride, in bfloat16, float16 or float32; labels [M] int64. A program
    reads a row once, REPEAT * 256 * num_warps columns of a 16-bit T at a time. The row of an ignored label is not read.
    """
    M, V = logits.shape
    if M == 0:
        return
    lanes = 32 * num_warps * (16 // logits.element_size())
    while lanes > 64 and REPEAT * lanes > 2 * V:
        REPEAT, lanes = (REPEAT // 2, lanes) if REPEAT > 1 else (1, lanes // 2)
    strides = (logits.stride(0),)
    _cross_entropy[(M,)](
        logits,
        labels,
        loss,
        row_max,
        log_sum,
        *strides,
        V,
        smoothing,
        z_weight,
        ignore_index,
        0.5 ** (V - 1).bit_length(),
        REPEAT,
        lanes,
        num_warps=num_warps,
    )


def run_backward(
    logits: torch.Tensor,
    labels: torch.Tensor,
    row_max: torch.Tensor,
    log_sum: torch.Tensor,
    grad_loss: torch.Tensor,
    smoothing: float,
    z_weight: float,
    ignore_index: int,
    grad_logits: torch.Tensor,
    *,
    BLOCK: int = 4096,
    num_warps: int = 4,
) -> None:
    """Write grad_logits [M, V] = T((p (1 + 2 z_weight lse) - smoothing / V - (1 - smoothing at the label)) * grad_loss).

    p = exp(logits - lse), lse = row_max + log_sum; 0 for ignored rows. logits and grad_logits with unit last stride and any row
    stride; labels [M] int64; row_max, log_sum and grad_loss [M] float32. A program has BLOCK columns of a row.
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
        smoothing,
        z_weight,
        ignore_index,
        blocks,
        BLOCK,
        num_warps=num_warps,
    )
