"""The heads of a student and a teacher, their divergence and both gradients in chunks of tokens, cuTile: five kernels a chunk."""

import cuda.tile as ct
import torch
from _lib.cutile.vocabulary_rows import (
    LOWEST,
    Int,
    Rows,
    grow,
    join,
    load_columns,
    row_step,
    step_columns,
    store_columns,
)
from kernel import _is_aligned, _multiply, _padded

FORWARD, REVERSE, MIXED = 0, 1, 2  # KL(p | q) at beta 0, KL(q | p) at beta 1, and the divergences from a mixture


@ct.function
def _log_mixture(x, y, beta):
    """Return the logarithm of the mixture over the larger of the probabilities exp(x) and exp(y)."""
    weight = ct.where(x >= y, beta, 1.0 - beta)
    return ct.log(1.0 - weight + weight * ct.exp(-ct.abs(x - y)))


@ct.kernel
def _logits_to_gradients(
    student: Rows, teacher: Rows, labels, grad_loss, loss, first: int, per_temperature: float, beta: float, ignore_index: int,
    STEPS: Int, REPEAT: Int, LANES: Int, KIND: Int,
):  # fmt: skip
    """Store the loss of a row and write the gradient of the student's logits over them; the row is token first + row."""
    n = student.shape[1]
    row = ct.bid(0)
    label = ct.gather(labels, first + row)
    offsets = step_columns(REPEAT, LANES)
    if label == ignore_index:
        ct.scatter(loss, first + row, 0.0)
        zeros = ct.zeros((REPEAT, LANES), dtype=student.dtype)
        for step in range(STEPS):
            cols = step * (REPEAT * LANES) + offsets
            store_columns(student, row, cols, zeros)
    else:
        # 1. Statistics. A lane has its own maxima and sums until the end of the row, so warps do not wait for each other.
        x_top = ct.full((LANES,), LOWEST, dtype=ct.float32)
        y_top = ct.full((LANES,), LOWEST, dtype=ct.float32)
        x_total = ct.zeros((LANES,), dtype=ct.float32)
        y_total = ct.zeros((LANES,), dtype=ct.float32)
        for step in range(STEPS):
            cols = step * (REPEAT * LANES) + offsets
            x_top, x_total = grow(x_top, x_total, load_columns(student, row, cols, LOWEST), per_temperature)
            y_top, y_total = grow(y_top, y_total, load_columns(teacher, row, cols, LOWEST), per_temperature)
        x_base, x_total = join(x_top, x_total, per_temperature)
        y_base, y_total = join(y_top, y_total, per_temperature)
        x_rest, y_rest = ct.log(x_total), ct.log(y_total)
        # 2. The divergences. Backwards: the end of the row was read last and is still in cache.
        of_teacher = ct.zeros((LANES,), dtype=ct.float32)
        of_student = ct.zeros((LANES,), dtype=ct.float32)
        for back in range(STEPS):
            cols = (STEPS - 1 - back) * (REPEAT * LANES) + offsets
            inside = cols < n
            x = load_columns(student, row, cols, 0.0)
            y = load_columns(teacher, row, cols, 0.0)
            x = (x - x_base) * per_temperature - x_rest
            y = (y - y_base) * per_temperature - y_rest
            if KIND == FORWARD:
                of_teacher = of_teacher + ct.sum(ct.where(inside, ct.exp(y) * (y - x), 0.0), axis=0)
            elif KIND == REVERSE:
                of_student = of_student + ct.sum(ct.where(inside, ct.exp(x) * (x - y), 0.0), axis=0)
            else:
                above = _log_mixture(x, y, beta)
                terms = ct.exp(y) * (above + ct.maximum(x - y, 0.0))
                of_teacher = of_teacher - ct.sum(ct.where(inside, terms, 0.0), axis=0)
                terms = ct.exp(x) * (above + ct.maximum(y - x, 0.0))
                of_student = of_student - ct.sum(ct.where(inside, terms, 0.0), axis=0)
        from_student = ct.sum(of_student)
        found = ct.sum(of_teacher) + from_student  # without a mixture, one of them is 0
        if KIND == MIXED:
            found = beta * ct.sum(of_teacher) + (1.0 - beta) * from_student
        ct.scatter(loss, first + row, found)
        # 3. The gradient.
        factor = ct.gather(grad_loss, first + row) * per_temperature
        for step in range(STEPS):
            cols = step * (REPEAT * LANES) + offsets
            x = load_columns(student, row, cols, 0.0)
            y = load_columns(teacher, row, cols, 0.0)
            x = (x - x_base) * per_temperature - x_rest
            y = (y - y_base) * per_temperature - y_rest
            if KIND == FORWARD:
                grad = ct.exp(x) - ct.exp(y)
            elif KIND == REVERSE:
                grad = ct.exp(x) * (x - y - from_student)
            else:
                above = _log_mixture(x, y, beta)
                grad = (1.0 - beta) * ct.exp(x) * (ct.minimum(x - y, 0.0) - above - from_student)
            store_columns(student, row, cols, grad * factor)


_GRADIENTS = _logits_to_gradients.replace_hints(num_worker_warps=8)


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
    TILE: str = "wide",
) -> None:
    """Write the divergence of each token and the gradients of sum(loss * grad_loss) for the student.

    hidden, grad_hidden [M, H], weight, grad_weight [V, H], teacher_hidden [M, G] and teacher_weight [V, G] in T (bfloat16);
    labels [M] int64; grad_loss, loss [M] float32. CHUNK tokens at a time: both logits in T, the losses and the gradient of the
    student's logits in their place, then both products with it. With several chunks, the gradient of the weight is added up in
    a float32 tensor of its size. TILE names an entry of TILES. Tensors that TMA cannot address are copied, which is slow.
    """
    m, h = hidden.shape
    g, v = teacher_hidden.shape[1], weight.shape[0]
    if m == 0:
        grad_weight.zero_()
        return
    outputs = (grad_hidden, grad_weight)
    targets = [tensor if _is_aligned(tensor) else _padded(tensor) for tensor in outputs]
    inputs = (hidden, weight, teacher_hidden, teacher_weight)
    given = [tensor if _is_aligned(tensor) else _padded(tensor).copy_(tensor) for tensor in inputs]
    chunks = -(-m // CHUNK)
    rows = -(-m // chunks)
    logits, taught = torch.empty((2, rows, -(-v // 8) * 8), dtype=hidden.dtype, device=hidden.device)[:, :, :v]
    partial = targets[1]
    if chunks > 1:
        partial = torch.empty((v, -(-h // 4) * 4), dtype=torch.float32, device=hidden.device)[:, :h]
    repeat, lanes = row_step(logits, 4, 8)
    steps = -(-v // (repeat * lanes))
    numbers = (1 / temperature, beta, ignore_index)
    constants = (steps, repeat, lanes, FORWARD if beta == 0 else REVERSE if beta == 1 else MIXED)
    for start in range(0, m, rows):
        stop = min(m, start + rows)
        count, part = stop - start, given[0][start:stop]
        chunk, other = logits[:count], taught[:count]
        _multiply(TILE, part, given[1], chunk, partial, count, v, h, a_rows=True, b_rows=True)
        _multiply(TILE, given[2][start:stop], given[3], other, partial, count, v, g, a_rows=True, b_rows=True)
        arguments = (chunk, other, labels, grad_loss, loss, start, *numbers, *constants)
        ct.launch(torch.cuda.current_stream(), (count, 1, 1), _GRADIENTS, arguments)
        out = targets[0][start:stop]
        _multiply(TILE, chunk, given[1], out, partial, count, h, v, a_rows=True, b_rows=False)
        sums = {"adds": start > 0, "keeps": stop < m}
        _multiply(TILE, chunk, part, targets[1], partial, v, h, count, a_rows=False, b_rows=False, **sums)
    for tensor, target in zip(outputs, targets, strict=True):
        if target is not tensor:
            tensor.copy_(target)
