"""Decay and writing strength of a Gated DeltaNet layer, cuTile: one small tile of whole tokens a block."""

from typing import Annotated

import cuda.tile as ct
import torch

# The number of heads is a compile-time constant, so that lanes beyond it cost nothing.
Rows = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1,))]
Vector = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(0,))]
Int = ct.Constant[int]


@ct.function
def _quotient(dividend, divisor):
    # FULL division is within 2 ulp of fp32 and several instructions shorter than the correctly rounded one.
    return ct.truediv(dividend, divisor, rounding_mode=ct.RoundingMode.FULL)


@ct.function
def _log1p_of_fraction(e):
    # log(1 + e) for e in [0, 1] is 2 atanh(s) by its series, s = e / (2 + e) <= 1/3; ct.log(1 + e) loses all digits of a
    # small e.
    s = _quotient(e, 2.0 + e)
    q = s * s
    series = 1.0 / 13 + q * (1.0 / 15)
    series = 1.0 / 9 + q * (1.0 / 11 + q * series)
    series = 1.0 / 5 + q * (1.0 / 7 + q * series)
    return 2.0 * s * (1.0 + q * (1.0 / 3 + q * series))


@ct.kernel
def _gdn_gates(a: Rows, b: Rows, rate: Vector, bias: Vector, g: Rows, beta: Rows, TILE_M: Int, TILE_H: Int):
    m, h = a.shape
    rows = ct.bid(0) * TILE_M + ct.arange(TILE_M, dtype=ct.int32)[:, None]
    heads = ct.arange(TILE_H, dtype=ct.int32)[None, :]
    in_row = heads < h
    inside = in_row & (rows < m)
    steps = ct.gather(a, (rows, heads), mask=inside, check_bounds=False).astype(ct.float32)
    strengths = ct.gather(b, (rows, heads), mask=inside, check_bounds=False).astype(ct.float32)
    rates = ct.exp(ct.gather(rate, heads, mask=in_row, check_bounds=False).astype(ct.float32))
    steps = steps + ct.gather(bias, heads, mask=in_row, check_bounds=False).astype(ct.float32)
    # softplus(step) = max(step, 0) + log1p(exp(-|step|)), which is step itself from 17 on; NaN stays in the second term.
    softplus = ct.where(steps > 0.0, steps, 0.0) + _log1p_of_fraction(ct.exp(-ct.abs(steps)))
    ct.scatter(g, (rows, heads), -rates * softplus, mask=inside, check_bounds=False)
    opening = _quotient(1.0, 1.0 + ct.exp(-strengths))
    ct.scatter(beta, (rows, heads), opening.astype(beta.dtype), mask=inside, check_bounds=False)


_KERNELS = {warps: _gdn_gates.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


def run(
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    TILE: int | None = None,
    WARPS: int = 4,
) -> None:
    """g[M, H] = -exp(A_log) * softplus(a + dt_bias) in fp32, beta[M, H] = T(sigmoid(b)).

    a and b, whose rows may be further apart than H elements, are T = bf16, fp16 or fp32, A_log[H] and dt_bias[H] are P, one of
    the same; g and beta are contiguous, H <= 4096. A block computes TILE values in whole rows; None: 1024, or 256 where that
    would leave multiprocessors idle.
    """
    m, h = beta.shape
    if m == 0:
        return
    if TILE is None:
        TILE = 1024 if m * h >= 1 << 17 else 256
    tile_h = 1 << (h - 1).bit_length()
    tile_m = max(1, TILE // tile_h)
    args = (a, b, A_log, dt_bias, g, beta, tile_m, tile_h)
    ct.launch(torch.cuda.current_stream(), (-(-m // tile_m), 1, 1), _KERNELS[WARPS], args)
