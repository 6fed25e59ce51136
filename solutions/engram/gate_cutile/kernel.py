"""The gate of n-gram memory, forward and backward, cuTile.

A row is one copy of the residual stream of one token: H values each of hidden and key, which stay in registers between the sums
over the row and what is written. A block has a run of tokens of one copy, so that the weights of that copy are read once a run;
the copies of a token are neighbours in the grid and share its value row through the L2.
"""

from typing import Annotated

import cuda.tile as ct
import torch

# The row length is a compile-time constant: lanes beyond it then cost nothing, and aligned rows are read 16 bytes at a
# time. The number of rows is dynamic.
Rows = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1,))]
Vector = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(0,))]
Int = ct.Constant[int]
Flag = ct.Constant[bool]

SUM_PARTS = 32  # partial sums of weight gradients that are added at once


@ct.kernel
def _fused_weight(hidden: Vector, embed: Vector, out: Vector, TILE: Int):
    at = ct.bid(0) * TILE + ct.arange(TILE, dtype=ct.int32)
    inside = at < out.shape[0]
    product = ct.gather(hidden, at, mask=inside, check_bounds=False).astype(ct.float32)
    product = product * ct.gather(embed, at, mask=inside, check_bounds=False).astype(ct.float32)
    ct.scatter(out, at, product, mask=inside, check_bounds=False)


_FUSED = {warps: _fused_weight.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


def run_fused_weight(
    weight_hidden: torch.Tensor, weight_embed: torch.Tensor, out: torch.Tensor, *, TILE: int = 1024, WARPS: int = 4
) -> None:
    """out = float32(weight_hidden) * float32(weight_embed), which is exact for bfloat16; all [C, H] and contiguous."""
    total = out.numel()
    if total:
        args = (weight_hidden.view(-1), weight_embed.view(-1), out.view(-1), TILE)
        ct.launch(torch.cuda.current_stream(), (-(-total // TILE), 1, 1), _FUSED[WARPS], args)


@ct.kernel
def _grad_w_reduce(
    partial: Rows,
    weight_hidden: Vector,
    weight_embed: Vector,
    grad_hidden: Vector,
    grad_embed: Vector,
    used: int,
    ADD: Flag,
    PARTS: Int,
    TILE: Int,
):
    """Adds the `used` partial sums in a fixed order, and the product rule: each weight has the other one as its factor."""
    total = partial.shape[1]
    cols = ct.bid(0) * TILE + ct.arange(TILE, dtype=ct.int32)[None, :]
    inside = cols < total
    sums = ct.zeros((PARTS, TILE), dtype=ct.float32)
    for step in range(ct.cdiv(used, PARTS)):
        part = step * PARTS + ct.arange(PARTS, dtype=ct.int32)[:, None]
        sums = sums + ct.gather(
            partial, (part, cols), mask=(part < used) & inside, padding_value=0.0, check_bounds=False
        )
    summed = ct.sum(sums, axis=0, keepdims=True)
    hidden = ct.gather(weight_hidden, cols, mask=inside, check_bounds=False).astype(ct.float32)
    embed = ct.gather(weight_embed, cols, mask=inside, check_bounds=False).astype(ct.float32)
    to_hidden, to_embed = summed * embed, summed * hidden
    if ADD:
        to_hidden = to_hidden + ct.gather(grad_hidden, cols, mask=inside, check_bounds=False)
        to_embed = to_embed + ct.gather(grad_embed, cols, mask=inside, check_bounds=False)
    ct.scatter(grad_hidden, cols, to_hidden, mask=inside, check_bounds=False)
    ct.scatter(grad_embed, cols, to_embed, mask=inside, check_bounds=False)


_REDUCE = {warps: _grad_w_reduce.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


def _add_parts(partial, used, weights, add, tile, warps):
    """Both weights and their gradients, of which `add` says whether they have a value already."""
    flat = [tensor.view(-1) for tensor in weights]
    args = (partial, *flat, used, add, SUM_PARTS, tile)
    ct.launch(torch.cuda.current_stream(), (-(-partial.shape[1] // tile), 1, 1), _REDUCE[warps], args)


def run_grad_w_reduce(
    grad_w_partial: torch.Tensor,
    weight_hidden: torch.Tensor,
    weight_embed: torch.Tensor,
    grad_weight_hidden: torch.Tensor,
    grad_weight_embed: torch.Tensor,
    *,
    TILE: int = 64,
    WARPS: int = 4,
) -> None:
    """grad_weight_hidden += sum of the parts * weight_embed, and the other way round, in place.

    Shapes: grad_w_partial [B, C, H] and both gradients [C, H] in float32, weights [C, H] in bfloat16; contiguous.
    """
    parts, total = grad_w_partial.shape[0], grad_weight_hidden.numel()
    if total:
        weights = weight_hidden, weight_embed, grad_weight_hidden, grad_weight_embed
        _add_parts(grad_w_partial.view(parts, total), parts, weights, True, TILE, WARPS)


@ct.function
def _gate_of(score, clamp):
    """A score of exactly 0 has no sign and a gate of one half."""
    root = ct.sqrt(ct.maximum(ct.abs(score), clamp))
    root = ct.where(score > 0.0, root, ct.where(score < 0.0, -root, score))  # NaN stays
    return 1.0 / (1.0 + ct.exp(-root))


@ct.kernel
def _gate_rows(
    hidden: Rows,
    key: Rows,
    value: Rows,
    weight_hidden: Rows,
    weight_embed: Rows,
    out: Rows,
    dots: ct.Array,
    gates: ct.Array,
    rstds_hidden: ct.Array,
    rstds_key: ct.Array,
    clamp: float,
    eps: float,
    tokens_per_run: int,
    scale: ct.Constant[float],
    COPIES: Int,
    TILE: Int,
    SAVE: Flag,
    VALUE_ONLY: Flag,
):
    """VALUE_ONLY: weights are about zero, and the stream is not added. SAVE: what the gradient needs is kept."""
    m, n = value.shape
    copy = ct.bid(0) % COPIES
    first = ct.bid(0) // COPIES * tokens_per_run
    cols = ct.arange(TILE, dtype=ct.int32)
    inside = cols < n
    of_hidden = ct.gather(weight_hidden, (copy, cols), mask=inside, check_bounds=False).astype(ct.float32)
    of_key = ct.gather(weight_embed, (copy, cols), mask=inside, check_bounds=False).astype(ct.float32)
    if VALUE_ONLY:
        of_hidden, of_key = 1.0 + of_hidden, 1.0 + of_key
    weight = of_hidden * of_key
    for token in range(first, ct.minimum(first + tokens_per_run, m)):
        row = token * COPIES + copy
        x = ct.gather(hidden, (row, cols), mask=inside, padding_value=0.0, check_bounds=False)
        y = ct.gather(key, (row, cols), mask=inside, padding_value=0.0, check_bounds=False)
        added = ct.gather(value, (token, cols), mask=inside, check_bounds=False).astype(ct.float32)
        x, y = x.astype(ct.float32), y.astype(ct.float32)
        rstd_hidden = ct.rsqrt(ct.sum(x * x) * (1.0 / n) + eps)
        rstd_key = ct.rsqrt(ct.sum(y * y) * (1.0 / n) + eps)
        if (
            VALUE_ONLY
        ):  # normalised first, as there: the product of two rows may be out of range where that of their norms is not
            dot = ct.sum((x * rstd_hidden) * (y * rstd_key) * weight)
            score = dot * scale
        else:
            dot = ct.sum(x * y * weight)
            score = dot * rstd_hidden * rstd_key * scale
        gate = _gate_of(score, clamp)
        result = gate * added
        if not VALUE_ONLY:
            result = x + result
        ct.scatter(out, (row, cols), result.astype(out.dtype), mask=inside, check_bounds=False)
        if SAVE:
            ct.scatter(dots, (token, copy), dot, check_bounds=False)
            ct.scatter(gates, (token, copy), gate, check_bounds=False)
            ct.scatter(rstds_hidden, (token, copy), rstd_hidden, check_bounds=False)
            ct.scatter(rstds_key, (token, copy), rstd_key, check_bounds=False)


_GATE = {warps: _gate_rows.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


def _run_gate(tensors, saved, clamp, eps, value_only, tokens, warps):
    hidden, key, value, weight_hidden, weight_embed, out = tensors
    M, C, H = hidden.shape
    if M == 0:
        return
    tile = 1 << (H - 1).bit_length()
    tokens = tokens or max(1, min(16, M * C // 1024))
    warps = warps or (8 if tile >= 4096 else 4)
    rows = hidden.view(M * C, H), key.view(M * C, H), value, weight_hidden, weight_embed, out.view(M * C, H)
    kept = saved or (value,) * 4  # not written
    args = (*rows, *kept, clamp, eps, tokens, H**-0.5, C, tile, bool(saved), value_only)
    ct.launch(torch.cuda.current_stream(), (-(-M // tokens) * C, 1, 1), _GATE[warps], args)


def run_gate_fwd(
    hidden: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    weight_hidden: torch.Tensor,
    weight_embed: torch.Tensor,
    clamp: float,
    eps: float,
    out: torch.Tensor,
    *,
    TOKENS: int | None = None,
    WARPS: int | None = None,
) -> None:
    """out = T(hidden + gate * v), gate = sigmoid(signed root of the score), one per token and copy; float32 inside.

    score = sum(hidden * weight_hidden * k * weight_embed) * rstd(hidden) * rstd(k) / sqrt(H), of magnitude clamp at least.
    Shapes: hidden, k and out [M, C, H], v [M, H], weights [C, H], all bfloat16 and contiguous; H <= 8192.
    TOKENS = None: as many tokens a block as leave eight blocks a multiprocessor, at most 16.
    """
    _run_gate((hidden, k, v, weight_hidden, weight_embed, out), (), clamp, eps, False, TOKENS, WARPS)


def run_gate_fwd_save(
    hidden: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    weight_hidden: torch.Tensor,
    weight_embed: torch.Tensor,
    clamp: float,
    eps: float,
    out: torch.Tensor,
    dot: torch.Tensor,
    gate: torch.Tensor,
    rstd_hidden: torch.Tensor,
    rstd_key: torch.Tensor,
    *,
    TOKENS: int | None = None,
    WARPS: int | None = None,
) -> None:
    """As run_gate_fwd; the weighted dot product, the gate and both factors of the norms are kept: float32 [M, C] each."""
    tensors = hidden, k, v, weight_hidden, weight_embed, out
    _run_gate(tensors, (dot, gate, rstd_hidden, rstd_key), clamp, eps, False, TOKENS, WARPS)


def run_gate_hf(
    hidden: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    weight_hidden: torch.Tensor,
    weight_embed: torch.Tensor,
    clamp: float,
    eps: float,
    out: torch.Tensor,
    *,
    TOKENS: int | None = None,
    WARPS: int | None = None,
) -> None:
    """out = T(gate * v), with weights of 1 + weight_hidden and 1 + weight_embed in the score; float32 inside, rounded once.

    Shapes as above; T is bfloat16 or float32.
    """
    _run_gate((hidden, k, v, weight_hidden, weight_embed, out), (), clamp, eps, True, TOKENS, WARPS)


@ct.kernel
def _gate_backward_rows(
    grad_out: Rows,
    hidden: Rows,
    key: Rows,
    value: Rows,
    weight_hidden: Rows,
    weight_embed: Rows,
    dots: ct.Array,
    gates: ct.Array,
    rstds_hidden: ct.Array,
    rstds_key: ct.Array,
    grad_hidden: Rows,
    grad_key: Rows,
    partial: Rows,
    clamp: float,
    eps: float,
    tokens_per_run: int,
    scale: ct.Constant[float],
    COPIES: Int,
    TILE: Int,
    SAVED: Flag,
):
    """A run of tokens of one copy: both gradients of its rows, and a row of partial sums for the weights.

    The gates are read (SAVED), or computed again and written for the gradient of the values.
    """
    m, n = value.shape
    copy = ct.bid(0) % COPIES
    run = ct.bid(0) // COPIES
    first = run * tokens_per_run
    cols = ct.arange(TILE, dtype=ct.int32)
    inside = cols < n
    weight = ct.gather(weight_hidden, (copy, cols), mask=inside, check_bounds=False).astype(ct.float32)
    weight = weight * ct.gather(weight_embed, (copy, cols), mask=inside, check_bounds=False).astype(ct.float32)
    sums = ct.zeros((TILE,), dtype=ct.float32)
    for token in range(first, ct.minimum(first + tokens_per_run, m)):
        row = token * COPIES + copy
        grad = ct.gather(grad_out, (row, cols), mask=inside, padding_value=0.0, check_bounds=False)
        x = ct.gather(hidden, (row, cols), mask=inside, padding_value=0.0, check_bounds=False)
        y = ct.gather(key, (row, cols), mask=inside, padding_value=0.0, check_bounds=False)
        added = ct.gather(value, (token, cols), mask=inside, padding_value=0.0, check_bounds=False)
        grad, x, y = grad.astype(ct.float32), x.astype(ct.float32), y.astype(ct.float32)
        if SAVED:
            dot = ct.gather(dots, (token, copy), check_bounds=False)
            gate = ct.gather(gates, (token, copy), check_bounds=False)
            rstd_hidden = ct.gather(rstds_hidden, (token, copy), check_bounds=False)
            rstd_key = ct.gather(rstds_key, (token, copy), check_bounds=False)
        else:
            rstd_hidden = ct.rsqrt(ct.sum(x * x) * (1.0 / n) + eps)
            rstd_key = ct.rsqrt(ct.sum(y * y) * (1.0 / n) + eps)
            dot = ct.sum(x * y * weight)
            score = dot * rstd_hidden * rstd_key * scale
            gate = _gate_of(score, clamp)
            ct.scatter(gates, (token, copy), gate, check_bounds=False)
        grad_gate = ct.sum(grad * added.astype(ct.float32))
        # Rounded in the order of the Definition, so that a score next to clamp falls on the same side of it.
        factor = rstd_hidden * rstd_key * scale
        size = ct.abs(dot * factor)
        slope = grad_gate * gate * (1.0 - gate) * factor * 0.5 / ct.sqrt(size)
        slope = ct.where(size < clamp, 0.0, slope)  # none where the score is held at clamp, whatever the gradient
        along_hidden = dot * rstd_hidden * rstd_hidden * (1.0 / n)
        along_key = dot * rstd_key * rstd_key * (1.0 / n)
        to_hidden = (grad + slope * (y * weight - x * along_hidden)).astype(grad_hidden.dtype)
        to_key = (slope * (x * weight - y * along_key)).astype(grad_key.dtype)
        ct.scatter(grad_hidden, (row, cols), to_hidden, mask=inside, check_bounds=False)
        ct.scatter(grad_key, (row, cols), to_key, mask=inside, check_bounds=False)
        sums = sums + slope * x * y
    ct.scatter(partial, (run * COPIES + copy, cols), sums, mask=inside, check_bounds=False)


@ct.kernel
def _gate_backward_value(grad_out: Rows, gates: ct.Array, grad_value: Rows, COPIES: Int, TILE: Int):
    """The gradient of the values, which the copies share; tokens backwards, since the last were read last."""
    m, n = grad_value.shape
    blocks = ct.cdiv(n, TILE)
    token = m - 1 - ct.bid(0) // blocks
    cols = ct.bid(0) % blocks * TILE + ct.arange(TILE, dtype=ct.int32)
    inside = cols < n
    total = ct.zeros((TILE,), dtype=ct.float32)
    for copy in ct.static_iter(range(COPIES)):
        grad = ct.gather(grad_out, (token * COPIES + copy, cols), mask=inside, check_bounds=False)
        total = total + ct.gather(gates, (token, copy), check_bounds=False) * grad.astype(ct.float32)
    ct.scatter(grad_value, (token, cols), total.astype(grad_value.dtype), mask=inside, check_bounds=False)


_BACKWARD = {warps: _gate_backward_rows.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


def _run_gate_backward(inputs, saved, clamp, eps, outputs, tokens, warps):
    grad_out, hidden, key, value, weight_hidden, weight_embed = inputs
    grad_hidden, grad_k, grad_v, grad_weight_hidden, grad_weight_embed = outputs
    M, C, H = hidden.shape
    tile = 1 << (H - 1).bit_length()
    # A run leaves a float32 row for 5 of bfloat16 a token: long runs, two blocks a multiprocessor of an H200 at least.
    tokens = tokens or max(1, min(64, M * C // 528))
    warps = warps or (8 if tile >= 2048 else 4)
    runs = -(-M // tokens)
    partial = torch.empty((max(runs, 1) * C, H), dtype=torch.float32, device=hidden.device)
    if M:
        factors = saved or (torch.empty((M, C), dtype=torch.float32, device=hidden.device),) * 4
        given = grad_out.view(M * C, H), hidden.view(M * C, H), key.view(M * C, H), value, weight_hidden, weight_embed
        written = grad_hidden.view(M * C, H), grad_k.view(M * C, H), partial
        args = (*given, *factors, *written, clamp, eps, tokens, H**-0.5, C, tile, bool(saved))
        ct.launch(torch.cuda.current_stream(), (runs * C, 1, 1), _BACKWARD[warps], args)
        columns = min(1024, tile)
        args = (given[0], factors[1], grad_v, C, columns)
        ct.launch(torch.cuda.current_stream(), (M * -(-H // columns), 1, 1), _gate_backward_value, args)
    weights = weight_hidden, weight_embed, grad_weight_hidden, grad_weight_embed
    _add_parts(partial.view(-1, C * H), runs, weights, False, 64, 4)


def run_gate_backward(
    grad_out: torch.Tensor,
    hidden: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    weight_hidden: torch.Tensor,
    weight_embed: torch.Tensor,
    clamp: float,
    eps: float,
    grad_hidden: torch.Tensor,
    grad_k: torch.Tensor,
    grad_v: torch.Tensor,
    grad_weight_hidden: torch.Tensor,
    grad_weight_embed: torch.Tensor,
    *,
    TOKENS: int | None = None,
    WARPS: int | None = None,
) -> None:
    """All gradients of the gate from the inputs of its forward; gates and norms are computed again.

    Shapes: grad_out, hidden, k and their gradients [M, C, H], v and its gradient [M, H], weights [C, H] in bfloat16, gradients of
    the weights [C, H] in float32, zero where there are no tokens; contiguous, H <= 8192. No atomics: the order of every sum
    depends on the shape only. Three launches: rows, values (which read grad_out again), weights.
    """
    inputs = grad_out, hidden, k, v, weight_hidden, weight_embed
    outputs = grad_hidden, grad_k, grad_v, grad_weight_hidden, grad_weight_embed
    _run_gate_backward(inputs, (), clamp, eps, outputs, TOKENS, WARPS)


def run_gate_backward_saved(
    grad_out: torch.Tensor,
    hidden: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    weight_hidden: torch.Tensor,
    weight_embed: torch.Tensor,
    dot: torch.Tensor,
    gate: torch.Tensor,
    rstd_hidden: torch.Tensor,
    rstd_key: torch.Tensor,
    clamp: float,
    grad_hidden: torch.Tensor,
    grad_k: torch.Tensor,
    grad_v: torch.Tensor,
    grad_weight_hidden: torch.Tensor,
    grad_weight_embed: torch.Tensor,
    *,
    TOKENS: int | None = None,
    WARPS: int | None = None,
) -> None:
    """As run_gate_backward, with what run_gate_fwd_save kept: float32 [M, C] each."""
    inputs = grad_out, hidden, k, v, weight_hidden, weight_embed
    outputs = grad_hidden, grad_k, grad_v, grad_weight_hidden, grad_weight_embed
    _run_gate_backward(inputs, (dot, gate, rstd_hidden, rstd_key), clamp, 0.0, outputs, TOKENS, WARPS)
