"""Gated activations, cuTile: SiLU or GELU of one half of each row, or of one matrix, times the other."""

from typing import Annotated

import cuda.tile as ct
import torch

# The row length is a compile-time constant, so that the compiler knows whether the second half of a row is aligned for
# 16-byte loads and how many tiles a row has, and lanes beyond the row cost nothing. The number of rows is dynamic.
Rows = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1,))]
Int = ct.Constant[int]

SILU, GELU_TANH = 1, 2  # values of ACTIVATION
# gelu(a) = a / 2 * (1 + tanh(u)) = a / (1 + exp(-2 u)) with u = sqrt(2 / pi) * (a + 0.044715 a^3), and exp(-2 u) is
# exp2(a * (LINEAR + CUBIC * a^2)): one exponential and one division, and no cancellation where tanh is near -1.
LINEAR = -2.302208198144325  # -2 * sqrt(2 / pi) * log2(e)
CUBIC = -0.1029432395800235  # LINEAR * 0.044715


@ct.function
def _place(out, TILE_M: Int, TILE_N: Int):
    """The rows and columns of this block's tile, and which of them exist."""
    m, n = out.shape
    tiles_n = ct.cdiv(n, TILE_N)  # a constant: blocks walk along a row first, and the grid needs only one dimension
    rows = ct.bid(0) // tiles_n * TILE_M + ct.arange(TILE_M, dtype=ct.int32)[:, None]
    cols = ct.bid(0) % tiles_n * TILE_N + ct.arange(TILE_N, dtype=ct.int32)[None, :]
    inside = cols < n
    if TILE_M > 1:  # with one row a block no row is out of bounds
        inside = inside & (rows < m)
    return rows, cols, inside


@ct.function
def _activated(gate, ACTIVATION: Int):
    # An exponential that overflows to inf for very negative gates makes the quotient -0, as in PyTorch. FULL division is
    # within 2 ulp of fp32 and several instructions shorter than the correctly rounded one.
    exponential = ct.exp(-gate) if ACTIVATION == SILU else ct.exp2(gate * (LINEAR + CUBIC * gate * gate))
    return ct.truediv(gate, 1.0 + exponential, rounding_mode=ct.RoundingMode.FULL)


@ct.kernel
def _halves(x: Rows, out: Rows, TILE_M: Int, TILE_N: Int):
    rows, cols, inside = _place(out, TILE_M, TILE_N)
    gate = ct.gather(x, (rows, cols), mask=inside, check_bounds=False).astype(ct.float32)
    up = ct.gather(x, (rows, cols + out.shape[1]), mask=inside, check_bounds=False).astype(ct.float32)
    result = (_activated(gate, SILU) * up).astype(out.dtype)
    ct.scatter(out, (rows, cols), result, mask=inside, check_bounds=False)


@ct.function
def _write_pair(a, b, out, ACTIVATION: Int, TILE_M: Int, TILE_N: Int):
    rows, cols, inside = _place(out, TILE_M, TILE_N)
    gate = ct.gather(a, (rows, cols), mask=inside, check_bounds=False).astype(ct.float32)
    up = ct.gather(b, (rows, cols), mask=inside, check_bounds=False)
    result = _activated(gate, ACTIVATION).astype(out.dtype) * up  # the product of two T is rounded to T
    ct.scatter(out, (rows, cols), result, mask=inside, check_bounds=False)


@ct.kernel
def _silu(a: Rows, b: Rows, out: Rows, TILE_M: Int, TILE_N: Int):
    _write_pair(a, b, out, SILU, TILE_M, TILE_N)


@ct.kernel
def _gelu_tanh(a: Rows, b: Rows, out: Rows, TILE_M: Int, TILE_N: Int):
    _write_pair(a, b, out, GELU_TANH, TILE_M, TILE_N)


def _launches(kernel):
    """Fill in a function that only declares an entry: one that called a shared launcher would cost each launch a Python call.

    x is [M, 2 * I]; a, b and out are [M, I]: T = bf16, fp16 or fp32, and rows may be further apart than their length. A
    block computes TILE outputs: a part of one row, or several rows when a row is shorter than TILE. None chooses 2048
    (1024 in fp32), or half of it while that would leave multiprocessors idle.
    """
    kernels = {warps: kernel.replace_hints(num_worker_warps=warps) for warps in (4, 8)}

    def run(a, b, out=None, *, TILE=None, WARPS=4):  # (x, out) or (a, b, out): the second has the shape of out
        m, n = b.shape
        if m == 0:
            return
        if TILE is None:
            TILE = 4096 // b.element_size()
            if m * n < 256 * TILE:
                TILE //= 2
        tile_n = min(TILE, 1 << (n - 1).bit_length())
        tile_m = TILE // tile_n
        grid = (-(-m // tile_m) * -(-n // tile_n), 1, 1)
        arguments = (a, b, tile_m, tile_n) if out is None else (a, b, out, tile_m, tile_n)
        ct.launch(torch.cuda.current_stream(), grid, kernels[WARPS], arguments)

    return lambda declared: run


@_launches(_halves)
def run_silu_and_mul(x: torch.Tensor, out: torch.Tensor, *, TILE: int | None = None, WARPS: int = 4) -> None:
    """out[M, I] = T(silu(x[:, :I]) * x[:, I:]); fp32 inside, one rounding."""


@_launches(_silu)
def run_swiglu(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, TILE: int | None = None, WARPS: int = 4) -> None:
    """out[M, I] = T(T(silu(a)) * b); silu is fp32 inside."""


@_launches(_gelu_tanh)
def run_gelu_tanh_and_mul(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, TILE: int | None = None, WARPS: int = 4
) -> None:
    """out[M, I] = T(T(gelu(a)) * b); gelu (tanh form) is fp32 inside."""
