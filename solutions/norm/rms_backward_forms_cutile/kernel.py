"""The gradients of RMSNorm and of a residual sum before it: rows in registers, the weight's sums added in a fixed order."""

from typing import Annotated

import cuda.tile as ct
import torch

# The row length is a compile-time constant: lanes beyond it then cost nothing, and aligned rows are read 16 bytes at a
# time. The number of rows is dynamic.
Rows = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1,))]
Vector = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(0,))]
Int = ct.Constant[int]
Flag = ct.Constant[bool]

MAX_TILE = 16384  # values of each input that the registers of a block hold
SUM_PARTS, SUM_COLUMNS = 64, 32  # partial sums that are added at once, and the columns that a block does that for
# Values of FORM: the normalised value is rounded to T before its product with the weight, it is not, and it is not and the
# factor is 1 + weight.
ROUNDED, FP32, ZERO_CENTRED = 0, 1, 2


@ct.function
def _grad_normed(grad, scale, FORM: Int):
    """The gradient of the normalised row in fp32, rounded where autograd rounds it."""
    if FORM == ROUNDED:
        return (grad * scale).astype(ct.float32)  # the product of two T is rounded to T
    factor = scale.astype(ct.float32)
    if FORM == ZERO_CENTRED:
        factor = 1.0 + factor
    return grad.astype(ct.float32) * factor


@ct.kernel
def _rms_norm_backward(
    x: Rows,
    weight: Vector,
    grad_out: Rows,
    grad_total: Rows,
    grad_x: Rows,
    partial: Rows,
    eps: float,
    per_part: int,
    FORM: Int,
    ADDS: Flag,
    TILE_M: Int,
    TILE_N: Int,
):
    """A block has a run of rows. ADDS: the gradient of the residual stream is added to the rounded one of the norm."""
    m, n = x.shape
    part = ct.bid(0)
    first = part * per_part
    last = ct.minimum(first + per_part, m)
    cols = ct.arange(TILE_N, dtype=ct.int32)[None, :]
    in_row = cols < n
    scale = ct.gather(weight, cols, mask=in_row, check_bounds=False)
    sums = ct.zeros((TILE_M, TILE_N), dtype=ct.float32)
    for tile in range(ct.cdiv(last - first, TILE_M)):
        rows = first + tile * TILE_M + ct.arange(TILE_M, dtype=ct.int32)[:, None]
        inside = in_row & (rows < last)
        # The gathers are independent, so all are in flight before a reduction waits.
        values = ct.gather(x, (rows, cols), mask=inside, check_bounds=False).astype(ct.float32)
        grad = ct.gather(grad_out, (rows, cols), mask=inside, check_bounds=False)
        if ADDS:
            given = ct.gather(grad_total, (rows, cols), mask=inside, check_bounds=False).astype(ct.float32)
        rstd = ct.rsqrt(ct.sum(values * values, axis=1, keepdims=True) * (1.0 / n) + eps)
        # Beyond the last row the reciprocal root may be infinite, where eps is 0.
        normed = ct.where(inside, values * rstd, 0.0)
        to_normed = ct.where(inside, _grad_normed(grad, scale, FORM), 0.0)
        along = ct.sum(to_normed * normed, axis=1, keepdims=True) * (1.0 / n)
        gradient = (rstd * (to_normed - normed * along)).astype(grad_x.dtype)
        if ADDS:
            gradient = (gradient.astype(ct.float32) + given).astype(grad_x.dtype)
        ct.scatter(grad_x, (rows, cols), gradient, mask=inside, check_bounds=False)
        if FORM == ROUNDED:
            normed = normed.astype(x.dtype).astype(ct.float32)
        sums = sums + ct.where(inside, grad.astype(ct.float32), 0.0) * normed
    totals = ct.sum(sums, axis=0, keepdims=True)
    ct.scatter(partial, (part, cols), totals, mask=in_row, check_bounds=False)


@ct.kernel
def _sum_parts(partial: Rows, grad_weight: Vector, parts: int, TILE_P: Int, TILE_N: Int):
    n = grad_weight.shape[0]
    cols = ct.bid(0) * TILE_N + ct.arange(TILE_N, dtype=ct.int32)[None, :]
    sums = ct.zeros((TILE_P, TILE_N), dtype=ct.float32)
    for tile in range(ct.cdiv(parts, TILE_P)):
        rows = tile * TILE_P + ct.arange(TILE_P, dtype=ct.int32)[:, None]
        sums = sums + ct.gather(partial, (rows, cols), mask=(rows < parts) & (cols < n), check_bounds=False)
    totals = ct.sum(sums, axis=0, keepdims=True).astype(grad_weight.dtype)
    ct.scatter(grad_weight, cols, totals, mask=cols < n, check_bounds=False)


_PARTS = {warps: _rms_norm_backward.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


def _launches(form, adds):
    """Fill in a function that only declares an entry, for one form with or without a residual stream.

    Activations and their gradients: [M, N] with N <= 16384, rows may be further apart than N elements; weight and grad_weight:
    [N]; all T = bf16, fp16 or fp32. At most PARTS blocks have a run of rows each and leave fp32 partial sums, which a second
    kernel adds up: no atomics, so the order of the sums depends on the shape only. 264 is two for each multiprocessor of an H200.
    A block has TILE_M whole rows at once and WARPS (4 or 8) warps. None chooses by the row length.
    """

    def compute(x, weight, grad_out, grad_total, eps, grad_x, grad_weight, PARTS, TILE_M, WARPS):
        m, n = x.shape
        tile_n = 1 << (n - 1).bit_length()
        tile_m = max(1, min(TILE_M or 4096 // tile_n, MAX_TILE // tile_n))
        warps = WARPS or (8 if tile_n >= 4096 else 4)
        tiles = -(-m // tile_m)
        per_part = -(-tiles // PARTS) * tile_m  # whole tiles of rows, as even as they go
        parts = -(-m // per_part) if m else 0  # no part may be empty
        partial = torch.empty((max(parts, 1), n), dtype=torch.float32, device=x.device)
        stream = torch.cuda.current_stream()
        if parts:
            arguments = (x, weight, grad_out, grad_total, grad_x, partial, eps, per_part, form, adds, tile_m, tile_n)
            ct.launch(stream, (parts, 1, 1), _PARTS[warps], arguments)
        blocks = -(-n // SUM_COLUMNS)
        ct.launch(stream, (blocks, 1, 1), _sum_parts, (partial, grad_weight, parts, SUM_PARTS, SUM_COLUMNS))

    if adds:

        def run(
            residual_out, weight, grad_out, grad_residual_out, eps, grad_x, grad_weight,
            *, PARTS=264, TILE_M=None, WARPS=None,
        ):  # fmt: skip
            compute(residual_out, weight, grad_out, grad_residual_out, eps, grad_x, grad_weight, PARTS, TILE_M, WARPS)

    else:

        def run(x, weight, grad_out, eps, grad_x, grad_weight, *, PARTS=264, TILE_M=None, WARPS=None):
            compute(x, weight, grad_out, grad_out, eps, grad_x, grad_weight, PARTS, TILE_M, WARPS)

    return lambda declared: run


@_launches(ROUNDED, True)
def run_add_rms_norm_backward(
    residual_out: torch.Tensor,
    weight: torch.Tensor,
    grad_out: torch.Tensor,
    grad_residual_out: torch.Tensor,
    eps: float,
    grad_x: torch.Tensor,
    grad_weight: torch.Tensor,
    *,
    PARTS=264,
    TILE_M=None,
    WARPS=None,
):
    """grad_x = T(T(r * (h - n * mean(h * n))) + grad_residual_out), grad_weight = T(sum over rows of grad_out * T(n)).

    s = residual_out, r = rsqrt(mean(s^2) + eps), n = s * r, h = T(grad_out * weight); fp32 inside and in the sum.
    """


@_launches(FP32, True)
def run_add_rms_norm_fp32_backward(
    residual_out: torch.Tensor,
    weight: torch.Tensor,
    grad_out: torch.Tensor,
    grad_residual_out: torch.Tensor,
    eps: float,
    grad_x: torch.Tensor,
    grad_weight: torch.Tensor,
    *,
    PARTS=264,
    TILE_M=None,
    WARPS=None,
):
    """grad_x = T(T(r * (h - n * mean(h * n))) + grad_residual_out), grad_weight = T(sum over rows of grad_out * n).

    s = residual_out, r = rsqrt(mean(s^2) + eps), n = s * r, h = grad_out * weight; fp32 inside and in the sum.
    """


@_launches(ZERO_CENTRED, True)
def run_add_rms_norm_gemma_backward(
    residual_out: torch.Tensor,
    weight: torch.Tensor,
    grad_out: torch.Tensor,
    grad_residual_out: torch.Tensor,
    eps: float,
    grad_x: torch.Tensor,
    grad_weight: torch.Tensor,
    *,
    PARTS=264,
    TILE_M=None,
    WARPS=None,
):
    """grad_x = T(T(r * (h - n * mean(h * n))) + grad_residual_out), grad_weight = T(sum over rows of grad_out * n).

    s = residual_out, r = rsqrt(mean(s^2) + eps), n = s * r, h = grad_out * (1 + weight); fp32 inside and in the sum.
    """


@_launches(FP32, False)
def run_rms_norm_fp32_backward(
    x: torch.Tensor,
    weight: torch.Tensor,
    grad_out: torch.Tensor,
    eps: float,
    grad_x: torch.Tensor,
    grad_weight: torch.Tensor,
    *,
    PARTS=264,
    TILE_M=None,
    WARPS=None,
):
    """grad_x = T(r * (h - n * mean(h * n))), grad_weight = T(sum over rows of grad_out * n).

    r = rsqrt(mean(x^2) + eps), n = x * r, h = grad_out * weight; fp32 inside and in the sum.
    """


@_launches(ZERO_CENTRED, False)
def run_rms_norm_gemma_backward(
    x: torch.Tensor,
    weight: torch.Tensor,
    grad_out: torch.Tensor,
    eps: float,
    grad_x: torch.Tensor,
    grad_weight: torch.Tensor,
    *,
    PARTS=264,
    TILE_M=None,
    WARPS=None,
):
    """grad_x = T(r * (h - n * mean(h * n))), grad_weight = T(sum over rows of grad_out * n).

    r = rsqrt(mean(x^2) + eps), n = x * r, h = grad_out * (1 + weight); fp32 inside and in the sum.
    """
