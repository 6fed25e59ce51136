"""Decays of Kimi Delta Attention, cuTile: x is read once, and decays are written once."""

from typing import Annotated

import cuda.tile as ct
import torch

# The width of a token is a compile-time constant: aligned rows are read 16 bytes at a time. The number of tokens is dynamic.
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
def _decays(x: Rows, rate: Vector, bias: Vector, out: Rows, K: Int, TILE_M: Int, TILE_N: Int):
    m, n = x.shape
    rows = ct.bid(0) * TILE_M + ct.arange(TILE_M, dtype=ct.int32)[:, None]
    cols = ct.bid(1) * TILE_N + ct.arange(TILE_N, dtype=ct.int32)[None, :]
    in_row = cols < n
    inside = in_row & (rows < m)
    steps = ct.gather(x, (rows, cols), mask=inside, check_bounds=False).astype(ct.float32)
    rates = ct.exp(ct.gather(rate, cols // K, mask=in_row, check_bounds=False).astype(ct.float32))
    steps = steps + ct.gather(bias, cols, mask=in_row, check_bounds=False).astype(ct.float32)
    # softplus(step) = max(step, 0) + log1p(exp(-|step|)), which is step itself from 17 on; NaN stays in the second term.
    softplus = ct.where(steps > 0.0, steps, 0.0) + _log1p_of_fraction(ct.exp(-ct.abs(steps)))
    ct.scatter(out, (rows, cols), -rates * softplus, mask=inside, check_bounds=False)


_KERNELS = {warps: _decays.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


def run(
    x: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    out: torch.Tensor,
    *,
    TILE_M: int = 1,
    TILE_N: int = 1024,
    WARPS: int = 4,
) -> None:
    """out = -exp(A_log) * softplus(x + dt_bias) in fp32.

    x and out are [M, H, K], A_log [H] and dt_bias [H, K] of dtype P, all contiguous. A block computes TILE_N values of TILE_M
    tokens each.
    """
    m, h, k = out.shape
    if out.numel() == 0:
        return
    width = h * k
    tile_n = min(TILE_N, 1 << (width - 1).bit_length())
    args = (x.view(m, width), A_log, dt_bias.view(width), out.view(m, width), k, TILE_M, tile_n)
    ct.launch(torch.cuda.current_stream(), (-(-m // TILE_M), -(-width // tile_n), 1), _KERNELS[WARPS], args)
