"""The gate of n-gram memory, forward and backward, Triton.

A row is one copy of the residual stream of one token: H values each of hidden and key, which stay in registers between the sums
over the row and what is written. A program has a run of tokens of one copy, so that the weights of that copy are read once a
run; the copies of a token are neighbours in the grid and share its value row through the L2. In the forward the next rows are
on their way while one is reduced, and the sums over a row cross the warps together: memory would idle at every barrier
otherwise, since so few programs fit on a multiprocessor.
"""

import torch
import triton
import triton.language as tl

# Of the partial sums of weight gradients that are added up at once, and of the columns that a program does that for.
SUM_PARTS = 32
SUM_COLUMNS = 64

MULTIPROCESSORS = 132  # of an H200; only how the work is cut depends on it
MOST_TOKENS = 16  # of a program of the forward


def _cdiv(value: int, divisor: int) -> int:
    return -(-value // divisor)  # triton.cdiv costs microseconds a call


def _row_shape(M: int, C: int, H: int, tokens: int | None, num_warps: int | None) -> tuple[int, int, int]:
    """Tokens a program, lanes and warps: 16 values a thread of each tensor, and about eight programs a multiprocessor."""
    block = 1 << (H - 1).bit_length()
    return tokens or max(1, min(16, M * C // 1024)), block, num_warps or min(16, max(1, block // 512))


@triton.jit
def _fused_weight(hidden_ptr, embed_ptr, out_ptr, total, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    hidden = tl.load(hidden_ptr + at, mask=at < total).to(tl.float32)
    tl.store(out_ptr + at, hidden * tl.load(embed_ptr + at, mask=at < total).to(tl.float32), mask=at < total)


def run_fused_weight(
    weight_hidden: torch.Tensor, weight_embed: torch.Tensor, out: torch.Tensor, *, BLOCK=1024, num_warps=4
) -> None:
    """out = float32(weight_hidden) * float32(weight_embed), which is exact for bfloat16; all [C, H] and contiguous."""
    total = out.numel()
    if total:
        _fused_weight[(_cdiv(total, BLOCK),)](weight_hidden, weight_embed, out, total, BLOCK, num_warps=num_warps)


@triton.jit
def _gate_of(dot, rstd_hidden, rstd_key, clamp, H: tl.constexpr):
    """A score of exactly 0 has no sign and a gate of one half."""
    score = dot * rstd_hidden * rstd_key * (1.0 / H**0.5)
    root = tl.sqrt(tl.maximum(tl.abs(score), clamp))
    root = tl.where(score > 0, root, tl.where(score < 0, -root, score))  # NaN stays
    return tl.sigmoid(root)


@triton.jit
def _sum_four(first, second, third, fourth):
    """Sums of four rows, which cross the warps in one exchange."""
    sums = tl.sum(tl.join(tl.join(first, second), tl.join(third, fourth)), axis=0)
    one_three, two_four = tl.split(tl.trans(sums))
    first, third = tl.split(one_three)
    second, fourth = tl.split(two_four)
    return first, second, third, fourth


@triton.jit
def _load_row(base_ptr, row, cols, inside, H: tl.constexpr):
    return tl.load(base_ptr + tl.cast(row, tl.int64) * H + cols, mask=inside, other=0.0)


@triton.jit
def _load_weight(weight_hidden_ptr, weight_embed_ptr, copy, cols, inside, H: tl.constexpr):
    first = tl.load(weight_hidden_ptr + copy * H + cols, mask=inside, other=0.0)
    second = tl.load(weight_embed_ptr + copy * H + cols, mask=inside, other=0.0)
    return first.to(tl.float32) * second.to(tl.float32)


@triton.jit(do_not_specialize=["M", "tokens_per_run"])
def _gate_rows(
    hidden_ptr, key_ptr, value_ptr, weight_hidden_ptr, weight_embed_ptr, out_ptr, dot_ptr, gate_ptr, rstd_hidden_ptr,
    rstd_key_ptr, clamp, eps, M, tokens_per_run,
    C: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr, SAVE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    copy = tl.program_id(0) % C
    first = tl.program_id(0) // C * tokens_per_run
    cols = tl.arange(0, BLOCK)
    inside = cols < H
    weight = _load_weight(weight_hidden_ptr, weight_embed_ptr, copy, cols, inside, H)
    for token in tl.range(first, tl.minimum(first + tokens_per_run, M), num_stages=STAGES):
        row = token * C + copy
        hidden = _load_row(hidden_ptr, row, cols, inside, H).to(tl.float32)
        key = _load_row(key_ptr, row, cols, inside, H).to(tl.float32)
        value = _load_row(value_ptr, token, cols, inside, H)
        of_hidden, of_key, dot, _ = _sum_four(hidden * hidden, key * key, hidden * key * weight, hidden)
        rstd_hidden = tl.rsqrt(of_hidden / H + eps)
        rstd_key = tl.rsqrt(of_key / H + eps)
        gate = _gate_of(dot, rstd_hidden, rstd_key, clamp, H)
        result = hidden + gate * value.to(tl.float32)
        tl.store(out_ptr + tl.cast(row, tl.int64) * H + cols, result.to(out_ptr.dtype.element_ty), mask=inside)
        if SAVE:
            tl.store(dot_ptr + row, dot)
            tl.store(gate_ptr + row, gate)
            tl.store(rstd_hidden_ptr + row, rstd_hidden)
            tl.store(rstd_key_ptr + row, rstd_key)


def _run_gate(tensors, saved, clamp, eps, tokens, num_warps, stages):
    hidden, _, _, _, _, out = tensors
    M, C, H = hidden.shape
    if M == 0 or C == 0:
        return
    _, block, warps = _row_shape(M, C, H, None, num_warps)
    # As many programs as run at once leave room for: 1024 threads a multiprocessor, of 64 registers each.
    tokens = tokens or max(1, min(MOST_TOKENS, _cdiv(M, max(1, MULTIPROCESSORS * (32 // warps) // C))))
    stages = stages or (1 if tokens == 1 else 3 if block <= 8192 else 2)
    pointers = saved or (out,) * 4  # not written
    _gate_rows[(_cdiv(M, tokens) * C,)](
        *tensors, *pointers, clamp, eps, M, tokens, C, H, block, bool(saved), stages, num_warps=warps
    )


def run_gate_fwd(
    hidden, k, v, weight_hidden, weight_embed, clamp, eps, out, *, TOKENS=None, STAGES=None, num_warps=None
):
    """out = T(hidden + gate * v), gate = sigmoid(signed root of the score), one per token and copy; float32 inside.

    score = sum(hidden * weight_hidden * k * weight_embed) * rstd(hidden) * rstd(k) / sqrt(H), of magnitude clamp at least.
    Shapes: hidden, k and out [M, C, H], v [M, H], weights [C, H], all bfloat16 and contiguous; H <= 16384.
    TOKENS = None: as many tokens a program as let all programs of an H200 run at once, at most 16. STAGES - 1 rows are asked
    for ahead.
    """
    _run_gate((hidden, k, v, weight_hidden, weight_embed, out), (), clamp, eps, TOKENS, num_warps, STAGES)


def run_gate_fwd_save(
    hidden, k, v, weight_hidden, weight_embed, clamp, eps, out, dot, gate, rstd_hidden, rstd_key, *, TOKENS=None,
    STAGES=None, num_warps=None
):  # fmt: skip
    """As run_gate_fwd; the weighted dot product, the gate and both factors of the norms are kept: float32 [M, C] each."""
    tensors = hidden, k, v, weight_hidden, weight_embed, out
    _run_gate(tensors, (dot, gate, rstd_hidden, rstd_key), clamp, eps, TOKENS, num_warps, STAGES)


@triton.jit(do_not_specialize=["parts"])
def _sum_weight_gradients(
    partial_ptr, weight_hidden_ptr, weight_embed_ptr, grad_weight_hidden_ptr, grad_weight_embed_ptr, parts, total,
    ADD: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds the partial sums in a fixed order, and the product rule: each weight has the other one as its factor."""
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < total
    # What does not depend on the sums is asked for first, and the next parts before the last ones have come.
    weight_hidden = tl.load(weight_hidden_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    weight_embed = tl.load(weight_embed_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        old_hidden = tl.load(grad_weight_hidden_ptr + cols, mask=inside, other=0.0)
        old_embed = tl.load(grad_weight_embed_ptr + cols, mask=inside, other=0.0)
    sums = tl.zeros([BLOCK_P, BLOCK], dtype=tl.float32)
    for start in tl.range(0, parts, BLOCK_P, loop_unroll_factor=4):
        part = start + tl.arange(0, BLOCK_P)[:, None]
        where = partial_ptr + part.to(tl.int64) * total + cols[None, :]
        sums += tl.load(where, mask=(part < parts) & inside[None, :], other=0.0)
    sums = tl.sum(sums, axis=0)
    grad_hidden = sums * weight_embed
    grad_embed = sums * weight_hidden
    if ADD:
        grad_hidden += old_hidden
        grad_embed += old_embed
    tl.store(grad_weight_hidden_ptr + cols, grad_hidden, mask=inside)
    tl.store(grad_weight_embed_ptr + cols, grad_embed, mask=inside)


def _run_sum(partial, weight_hidden, weight_embed, grads, parts, add, block, num_warps):
    total = weight_hidden.numel()
    _sum_weight_gradients[(_cdiv(total, block),)](
        partial, weight_hidden, weight_embed, *grads, parts, total, add, SUM_PARTS, block, num_warps=num_warps
    )


def run_grad_w_reduce(
    grad_w_partial,
    weight_hidden,
    weight_embed,
    grad_weight_hidden,
    grad_weight_embed,
    *,
    BLOCK=SUM_COLUMNS,
    num_warps=4,
):
    """grad_weight_hidden += sum of the parts * weight_embed, and the other way round, in place.

    Shapes: grad_w_partial [B, C, H] and both gradients [C, H] in float32, weights [C, H] in bfloat16; contiguous.
    """
    if grad_weight_hidden.numel():
        grads, parts = (grad_weight_hidden, grad_weight_embed), grad_w_partial.shape[0]
        _run_sum(grad_w_partial, weight_hidden, weight_embed, grads, parts, True, BLOCK, num_warps)


@triton.jit(do_not_specialize=["M", "tokens_per_run"])
def _gate_backward_rows(
    grad_out_ptr, hidden_ptr, key_ptr, value_ptr, weight_hidden_ptr, weight_embed_ptr, dot_ptr, gate_ptr,
    rstd_hidden_ptr, rstd_key_ptr, grad_hidden_ptr, grad_key_ptr, partial_ptr, clamp, eps, M, tokens_per_run,
    C: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr, SAVED: tl.constexpr,
):  # fmt: skip
    """A run of tokens of one copy: both gradients of its rows, and a row of partial sums for the weights.

    The gates are read (SAVED), or computed again and written for the gradient of the values.
    """
    copy = tl.program_id(0) % C
    run = (tl.program_id(0) // C).to(tl.int64)
    first = run * tokens_per_run
    cols = tl.arange(0, BLOCK)
    inside = cols < H
    weight = tl.load(weight_hidden_ptr + copy * H + cols, mask=inside, other=0.0).to(tl.float32)
    weight *= tl.load(weight_embed_ptr + copy * H + cols, mask=inside, other=0.0).to(tl.float32)
    sums = tl.zeros([BLOCK], dtype=tl.float32)
    for token in range(first, tl.minimum(first + tokens_per_run, M)):
        row = token * C + copy
        grad = tl.load(grad_out_ptr + row * H + cols, mask=inside, other=0.0, eviction_policy="evict_last")
        hidden = tl.load(hidden_ptr + row * H + cols, mask=inside, other=0.0, eviction_policy="evict_last")
        key = tl.load(key_ptr + row * H + cols, mask=inside, other=0.0, eviction_policy="evict_last")
        value = tl.load(value_ptr + token * H + cols, mask=inside, other=0.0)
        grad, hidden, key = grad.to(tl.float32), hidden.to(tl.float32), key.to(tl.float32)
        if SAVED:
            dot, gate = tl.load(dot_ptr + row), tl.load(gate_ptr + row)
            rstd_hidden, rstd_key = tl.load(rstd_hidden_ptr + row), tl.load(rstd_key_ptr + row)
        else:
            rstd_hidden = tl.rsqrt(tl.sum(hidden * hidden, axis=0) / H + eps)
            rstd_key = tl.rsqrt(tl.sum(key * key, axis=0) / H + eps)
            dot = tl.sum(hidden * key * weight, axis=0)
            gate = _gate_of(dot, rstd_hidden, rstd_key, clamp, H)
            tl.store(gate_ptr + row, gate)
        grad_gate = tl.sum(grad * value.to(tl.float32), axis=0)
        # Rounded in the order of the Definition, so that a score next to clamp falls on the same side of it.
        factor = rstd_hidden * rstd_key * (1.0 / H**0.5)
        size = tl.abs(dot * factor)
        slope = grad_gate * gate * (1.0 - gate) * factor * 0.5 / tl.sqrt(size)
        slope = tl.where(size < clamp, 0.0, slope)  # none where the score is held at clamp, whatever the gradient
        grad_hidden = grad + slope * (key * weight - hidden * (dot * rstd_hidden * rstd_hidden / H))
        grad_key = slope * (hidden * weight - key * (dot * rstd_key * rstd_key / H))
        tl.store(grad_hidden_ptr + row * H + cols, grad_hidden.to(grad_hidden_ptr.dtype.element_ty), mask=inside)
        tl.store(grad_key_ptr + row * H + cols, grad_key.to(grad_key_ptr.dtype.element_ty), mask=inside)
        sums += slope * hidden * key
    tl.store(partial_ptr + (run * C + copy) * H + cols, sums, mask=inside)


@triton.jit(do_not_specialize=["M"])
def _gate_backward_value(
    grad_out_ptr, gate_ptr, grad_value_ptr, M, C: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr
):
    """The gradient of the values, which the copies share; tokens backwards, since the last were read last."""
    blocks: tl.constexpr = (H + BLOCK - 1) // BLOCK
    token = (M - 1 - tl.program_id(0) // blocks).to(tl.int64)
    cols = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for c in tl.static_range(C):
        grad = tl.load(grad_out_ptr + (token * C + c) * H + cols, mask=cols < H, other=0.0)
        total += tl.load(gate_ptr + token * C + c) * grad.to(tl.float32)
    tl.store(grad_value_ptr + token * H + cols, total.to(grad_value_ptr.dtype.element_ty), mask=cols < H)


def _run_gate_backward(inputs, saved, clamp, eps, outputs, tokens, num_warps):
    grad_out, hidden, _, _, weight_hidden, weight_embed = inputs
    grad_hidden, grad_k, grad_v, *grads = outputs
    M, C, H = hidden.shape
    if C == 0:
        return
    # A run leaves a float32 row for 5 of bfloat16 a token: long runs, two programs a multiprocessor of an H200 at least.
    tokens, block, warps = _row_shape(M, C, H, tokens or max(1, min(64, M * C // 528)), num_warps)
    runs = _cdiv(M, tokens)
    partial = torch.empty((max(runs, 1), C, H), dtype=torch.float32, device=hidden.device)
    if M:
        factors = saved or (torch.empty((M, C), dtype=torch.float32, device=hidden.device),) * 4
        _gate_backward_rows[(runs * C,)](
            *inputs, *factors, grad_hidden, grad_k, partial, clamp, eps, M, tokens, C, H, block, bool(saved),
            num_warps=warps,
        )  # fmt: skip
        columns = min(1024, block)
        _gate_backward_value[(M * _cdiv(H, columns),)](grad_out, factors[1], grad_v, M, C, H, columns, num_warps=4)
    _run_sum(partial, weight_hidden, weight_embed, grads, runs, False, SUM_COLUMNS, 4)


def run_gate_backward(
    grad_out, hidden, k, v, weight_hidden, weight_embed, clamp, eps, grad_hidden, grad_k, grad_v, grad_weight_hidden,
    grad_weight_embed, *, TOKENS=None, num_warps=None
):  # fmt: skip
    """All gradients of the gate from the inputs of its forward; gates and norms are computed again.

    Shapes: grad_out, hidden, k and their gradients [M, C, H], v and its gradient [M, H], weights [C, H] in bfloat16, gradients of
    the weights [C, H] in float32, zero where there are no tokens; contiguous, H <= 16384. No atomics: the order of every sum
    depends on the shape only. Three launches: rows, values (which read grad_out again), weights.
    """
    inputs = grad_out, hidden, k, v, weight_hidden, weight_embed
    outputs = grad_hidden, grad_k, grad_v, grad_weight_hidden, grad_weight_embed
    _run_gate_backward(inputs, (), clamp, eps, outputs, TOKENS, num_warps)


def run_gate_backward_saved(
    grad_out, hidden, k, v, weight_hidden, weight_embed, dot, gate, rstd_hidden, rstd_key, clamp, grad_hidden,
    grad_k, grad_v, grad_weight_hidden, grad_weight_embed, *, TOKENS=None, num_warps=None
):  # fmt: skip
    """As run_gate_backward, with what run_gate_fwd_save kept: float32 [M, C] each."""
    inputs = grad_out, hidden, k, v, weight_hidden, weight_embed
    outputs = grad_hidden, grad_k, grad_v, grad_weight_hidden, grad_weight_embed
    _run_gate_backward(inputs, (dot, gate, rstd_hidden, rstd_key), clamp, 0.0, outputs, TOKENS, num_warps)
