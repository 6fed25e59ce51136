"""The heads of a student and a teacher, their divergence and both gradients in chunks of tokens, Triton: five kernels a chunk."""

import torch
import triton
import triton.language as tl
from _lib.triton.vocabulary_rows import grow, join, row_steps, step_columns, store_zeros
from kernel import _multiply

FORWARD, REVERSE, MIXED = 0, 1, 2  # KL(p | q) at beta 0, KL(q | p) at beta 1, and the divergences from a mixture


@triton.jit
def _log_mixture(x, y, beta):
    """Return the logarithm of the mixture over the larger of the probabilities exp(x) and exp(y)."""
    weight = tl.where(x >= y, beta, 1 - beta)
    return tl.log(1 - weight + weight * tl.exp(-tl.abs(x - y)))


@triton.jit(do_not_specialize=["ignore_index"])
def _logits_to_gradients(
    x_ptr, y_ptr, labels_ptr, grad_loss_ptr, loss_ptr, x_stride, y_stride, V, per_temperature, beta, ignore_index,
    KIND: tl.constexpr, REPEAT: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Store the loss of a row and write the gradient of the student's logits over them."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    y_ptr += row * y_stride
    offsets = step_columns(REPEAT, LANES)
    steps = tl.cdiv(V, REPEAT * LANES)
    if tl.load(labels_ptr + row) == ignore_index:
        tl.store(loss_ptr + row, 0.0)
        for step in range(0, steps):
            cols = step * (REPEAT * LANES) + offsets
            store_zeros(x_ptr + cols, cols < V)
    else:
        # 1. Statistics. A lane has its own maxima and sums until the end of the row, so warps do not wait for each other.
        x_top = tl.full([LANES], float("-inf"), dtype=tl.float32)
        y_top = tl.full([LANES], float("-inf"), dtype=tl.float32)
        x_total = tl.zeros([LANES], dtype=tl.float32)
        y_total = tl.zeros([LANES], dtype=tl.float32)
        for step in range(0, steps):
            cols = step * (REPEAT * LANES) + offsets
            x = tl.load(x_ptr + cols, mask=cols < V, other=float("-inf"), eviction_policy="evict_last").to(tl.float32)
            y = tl.load(y_ptr + cols, mask=cols < V, other=float("-inf"), eviction_policy="evict_last").to(tl.float32)
            x_top, x_total = grow(x_top, x_total, x, per_temperature)
            y_top, y_total = grow(y_top, y_total, y, per_temperature)
        x_base, x_total = join(x_top, x_total, per_temperature)
        y_base, y_total = join(y_top, y_total, per_temperature)
        x_rest, y_rest = tl.log(x_total), tl.log(y_total)
        # 2. The divergences. Backwards: the end of the row was read last and is still in cache.
        of_teacher = tl.zeros([LANES], dtype=tl.float32)
        of_student = tl.zeros([LANES], dtype=tl.float32)
        for step in range(0, steps):
            cols = (steps - 1 - step) * (REPEAT * LANES) + offsets
            inside = cols < V
            x = tl.load(x_ptr + cols, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
            y = tl.load(y_ptr + cols, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
            x = (x - x_base) * per_temperature - x_rest
            y = (y - y_base) * per_temperature - y_rest
            if KIND == 0:
                of_teacher += tl.sum(tl.where(inside, tl.exp(y) * (y - x), 0.0), axis=0)
            elif KIND == 1:
                of_student += tl.sum(tl.where(inside, tl.exp(x) * (x - y), 0.0), axis=0)
            else:
                above = _log_mixture(x, y, beta)
                of_teacher -= tl.sum(tl.where(inside, tl.exp(y) * (above + tl.maximum(x - y, 0.0)), 0.0), axis=0)
                of_student -= tl.sum(tl.where(inside, tl.exp(x) * (above + tl.maximum(y - x, 0.0)), 0.0), axis=0)
        from_student = tl.sum(of_student, axis=0)
        if KIND == 0:
            tl.store(loss_ptr + row, tl.sum(of_teacher, axis=0))
        elif KIND == 1:
            tl.store(loss_ptr + row, from_student)
        else:
            tl.store(loss_ptr + row, beta * tl.sum(of_teacher, axis=0) + (1 - beta) * from_student)
        # 3. The gradient.
        factor = tl.load(grad_loss_ptr + row) * per_temperature
        for step in range(0, steps):
            cols = step * (REPEAT * LANES) + offsets
            inside = cols < V
            x = tl.load(x_ptr + cols, mask=inside, other=0.0).to(tl.float32)
            y = tl.load(y_ptr + cols, mask=inside, other=0.0).to(tl.float32)
            x = (x - x_base) * per_temperature - x_rest
            y = (y - y_base) * per_temperature - y_rest
            if KIND == 0:
                grad = tl.exp(x) - tl.exp(y)
            elif KIND == 1:
                grad = tl.exp(x) * (x - y - from_student)
            else:
                above = _log_mixture(x, y, beta)
                grad = (1 - beta) * tl.exp(x) * (tl.minimum(x - y, 0.0) - above - from_student)
            tl.store(x_ptr + cols, (grad * factor).to(x_ptr.dtype.element_ty), mask=inside)


def run(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher_hidden: torch.Tensor,
    teacher_weight: torch.Tensor,
    labels: torch.Tensor,
    grad_loss: torch.Tensor,
    temperature: float,
    beta: float,
    ignore_index: int,
    loss: torch.Tensor,
    grad_hidden: torch.Tensor,
    grad_weight: torch.Tensor,
    *,
    CHUNK: int = 2048,
    REPEAT: int = 4,
    num_stages: int = 4,
) -> None:
    """Write the divergence of each token and the gradients of sum(loss * grad_loss) for the student.

    hidden, grad_hidden [M, H], weight, grad_weight [V, H], teacher_hidden [M, G] and teacher_weight [V, G] in T (bfloat16);
    labels [M] int64; grad_loss, loss [M] float32. CHUNK tokens at a time: both logits in T, the losses and the gradient of the
    student's logits in their place, then both products with it. With several chunks, the gradient of the weight is added up
    in a float32 tensor of its size, which the product of every chunk reads and writes once.
    """
    M, H = hidden.shape
    G, V = teacher_hidden.shape[1], weight.shape[0]
    if M == 0:
        grad_weight.zero_()
        return
    chunks = -(-M // CHUNK)
    rows = -(-M // chunks)
    logits, teacher_logits = torch.empty((2, rows, -(-V // 8) * 8), dtype=hidden.dtype, device=hidden.device)
    partial = grad_weight
    if chunks > 1:
        partial = torch.empty((V, H), dtype=torch.float32, device=hidden.device)
    kind = FORWARD if beta == 0 else REVERSE if beta == 1 else MIXED
    REPEAT, lanes = row_steps(logits, REPEAT, 8)
    scalars = (logits.stride(0), teacher_logits.stride(0), V, 1 / temperature, beta, ignore_index)
    for start in range(0, M, rows):
        stop = min(M, start + rows)
        count, part, taught = stop - start, hidden[start:stop], teacher_hidden[start:stop]
        _multiply(part, weight, logits, partial, count, V, H, a_rows=True, b_rows=True, stages=num_stages)
        _multiply(
            taught, teacher_weight, teacher_logits, partial, count, V, G, a_rows=True, b_rows=True, stages=num_stages
        )
        of_tokens = (labels[start:], grad_loss[start:], loss[start:])
        _logits_to_gradients[(count,)](logits, teacher_logits, *of_tokens, *scalars, kind, REPEAT, lanes, num_warps=8)
        out = grad_hidden[start:stop]
        _multiply(logits, weight, out, partial, count, H, V, a_rows=True, b_rows=False, stages=num_stages)
        sums = {"adds": start > 0, "keeps": stop < M}
        stages = min(num_stages, 3) if start else num_stages  # adding takes shared memory for the sums
        _multiply(logits, part, grad_weight, partial, V, H, count, a_rows=False, b_rows=False, stages=stages, **sums)
