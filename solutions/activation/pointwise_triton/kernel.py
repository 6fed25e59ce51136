"""Activations of MLPs without a gate, Triton: the Definitions differ in one constant, the function."""

import torch
import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
ROOT_HALF = tl.constexpr(0.7071067811865476)
# tanh(u) = 2 sigmoid(2 u) - 1, so the tanh form of GELU is x * sigmoid(x * (LINEAR + CUBIC * x^2)).
LINEAR = tl.constexpr(1.5957691216057308)
CUBIC = tl.constexpr(0.07135481282696677)
QUICK = tl.constexpr(1.702)


@triton.jit
def _lower_tail(a):
    """Return the normal distribution below -a for a >= 0, to 1.2e-4 of itself up to a = 5.2.

    It is 2^-p(a), with the polynomial p fitted to its logarithm: one exponential and no division. p grows without bound.
    """
    p = 5.383534103556255e-07 * a - 2.793161195929273e-05
    p = p * a + 0.0005913092970659742
    p = p * a - 0.0068295334932924326
    p = p * a + 0.04972661171681173
    p = p * a + 0.4635307453964969
    p = p * a + 1.1489743534111536
    p = p * a + 1.0001648380943793
    return tl.exp2(-p)


@triton.jit
def _activated(x, FUNCTION: tl.constexpr, EXACT: tl.constexpr):
    """Return the function of x in fp32; a cast to 16 bits hides the last bits of the shorter forms."""
    if FUNCTION == "relu_squared":
        kept = tl.where(x < 0.0, 0.0, x)  # NaN stays
        return kept * kept
    if FUNCTION == "gelu":
        if EXACT:
            return 0.5 * x * (1.0 + tl.erf(x * ROOT_HALF))
        below = _lower_tail(tl.abs(x))
        return x * tl.where(x > 0.0, 1.0 - below, below)
    slope = QUICK * x if FUNCTION == "quick_gelu" else x * (LINEAR + CUBIC * x * x)
    power = tl.exp(-slope) if EXACT else tl.exp2(slope * -LOG2_E)
    return x / (1.0 + power)


@triton.jit(do_not_specialize=["M"])
def _pointwise_tile(
    x_ptr,
    out_ptr,
    x_stride,
    out_stride,
    M,
    I: tl.constexpr,
    FUNCTION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    dtype = out_ptr.dtype.element_ty
    # Column blocks vary fastest, so neighbouring programs read neighbouring memory.
    column_blocks: tl.constexpr = (I + BLOCK_N - 1) // BLOCK_N
    pid = tl.program_id(0)
    rows = (pid // column_blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    cols = (pid % column_blocks) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < M) & (cols < I)
    x = tl.load(x_ptr + rows * x_stride + cols, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
    tl.store(out_ptr + rows * out_stride + cols, _activated(x, FUNCTION, dtype == tl.float32).to(dtype), mask=mask)


def _launches(function):
    """Fill in a function that only declares an entry: one that called a shared launcher would cost each launch a Python call.

    Shapes: x, out [M, I] with unit last stride and any row stride; one dtype T in bfloat16, float16, float32.
    Mapping: a flat grid of tiles of BLOCK values; a tile is part of one row when I is large and several whole rows when I is
    small.
    BLOCK = None: 2048 values a program, or 512 where 2048 would leave most of the machine idle (decode).
    num_warps = None: 16 values a thread, 8 in decode.
    """

    def run(x, out, *, BLOCK=None, num_warps=None):
        M, I = out.shape
        if M == 0 or I == 0:
            return
        block = BLOCK or (2048 if M * I >= 1 << 19 else 512)
        warps = num_warps or (4 if block >= 1024 else 2)
        block_n = min(block, 1 << (I - 1).bit_length())  # triton.next_power_of_2 costs microseconds a call
        block_m = block // block_n
        grid = ((M + block_m - 1) // block_m) * ((I + block_n - 1) // block_n)
        _pointwise_tile[(grid,)](x, out, x.stride(0), out.stride(0), M, I, function, block_m, block_n, num_warps=warps)

    return lambda declared: run


@_launches("gelu")
def run_gelu(x: torch.Tensor, out: torch.Tensor, *, BLOCK=None, num_warps=None):
    """out = T(x * Phi(x)), fp32 inside."""


@_launches("gelu_tanh")
def run_gelu_tanh(x: torch.Tensor, out: torch.Tensor, *, BLOCK=None, num_warps=None):
    """out = T(x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) / 2), fp32 inside, for gelu_tanh and gelu_new."""


@_launches("quick_gelu")
def run_quick_gelu(x: torch.Tensor, out: torch.Tensor, *, BLOCK=None, num_warps=None):
    """out = T(x * sigmoid(1.702 x)), fp32 inside."""


@_launches("relu_squared")
def run_relu_squared(x: torch.Tensor, out: torch.Tensor, *, BLOCK=None, num_warps=None):
    """out = T(max(x, 0)^2), fp32 inside."""
