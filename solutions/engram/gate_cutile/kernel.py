"""The gate of n-gram memory, cuTile.

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
    PARTS: Int,
    TILE: Int,
):
    """Adds the partial sums in a fixed order, and the product rule: each weight has the other one as its factor."""
    parts, total = partial.shape
    cols = ct.bid(0) * TILE + ct.arange(TILE, dtype=ct.int32)[None, :]
    inside = cols < total
    sums = ct.zeros((PARTS, TILE), dtype=ct.float32)
    for step in range(ct.cdiv(parts, PARTS)):
        part = step * PARTS + ct.arange(PARTS, dtype=ct.int32)[:, None]
        sums = sums + ct.gather(
            partial, (part, cols), mask=(part < parts) & inside, padding_value=0.0, check_bounds=False
        )
    summed = ct.sum(sums, axis=0, keepdims=True)
    hidden = ct.gather(weight_hidden, cols, mask=inside, check_bounds=False).astype(ct.float32)
    embed = ct.gather(weight_embed, cols, mask=inside, check_bounds=False).astype(ct.float32)
    to_hidden = ct.gather(grad_hidden, cols, mask=inside, check_bounds=False) + summed * embed
    to_embed = ct.gather(grad_embed, cols, mask=inside, check_bounds=False) + summed * hidden
    ct.scatter(grad_hidden, cols, to_hidden, mask=inside, check_bounds=False)
    ct.scatter(grad_embed, cols, to_embed, mask=inside, check_bounds=False)


_REDUCE = {warps: _grad_w_reduce.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


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
    if total == 0:
        return
    weights = weight_hidden.view(-1), weight_embed.view(-1)
    gradients = grad_weight_hidden.view(-1), grad_weight_embed.view(-1)
    args = (grad_w_partial.view(parts, total), *weights, *gradients, SUM_PARTS, TILE)
    ct.launch(torch.cuda.current_stream(), (-(-total // TILE), 1, 1), _REDUCE[WARPS], args)


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
        root = ct.sqrt(ct.maximum(ct.abs(score), clamp))
        root = ct.where(score > 0.0, root, ct.where(score < 0.0, -root, score))  # zero has no sign, NaN stays
        gate = 1.0 / (1.0 + ct.exp(-root))
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
