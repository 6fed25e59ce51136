"""Gated activations, Triton: SiLU or GELU of one half of each row, or of one tensor, times the other."""

import torch
import triton
import triton.language as tl

# gelu(a) = a / 2 * (1 + tanh(u)) = a / (1 + exp(-2 u)) with u = sqrt(2 / pi) * (a + 0.044715 a^3), and exp(-2 u) is
# exp2(a * (LINEAR + CUBIC * a^2)): one exponential and one division, and no cancellation where tanh is near -1.
LINEAR = tl.constexpr(-2.302208198144325)  # -2 * sqrt(2 / pi) * log2(e)
CUBIC = tl.constexpr(-0.1029432395800235)  # LINEAR * 0.044715


@triton.jit
def _place(M, I: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The rows and columns of this program's tile, and which of them exist."""
    # Column blocks vary fastest, so neighbouring programs read neighbouring memory.
    column_blocks: tl.constexpr = (I + BLOCK_N - 1) // BLOCK_N
    pid = tl.program_id(0)
    rows = (pid // column_blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    cols = (pid % column_blocks) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    return rows, cols, (rows < M) & (cols < I)


@triton.jit
def _load(pointers, mask):
    # evict_last, although nothing is read again: up to 6% faster than no policy, where evict_first is slower (H200).
    return tl.load(pointers, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)


@triton.jit
def _activated(gate, ACTIVATION: tl.constexpr):
    # An exponential of inf gives -0 for very negative finite gates and NaN for -inf, as PyTorch does.
    if ACTIVATION == "silu":
        return gate / (1.0 + tl.exp(-gate))
    else:
        return gate / (1.0 + tl.exp2(gate * (LINEAR + CUBIC * gate * gate)))


@triton.jit(do_not_specialize=["M"])
def _halves_tile(
    x_ptr, out_ptr, x_stride, out_stride, M, I: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    rows, cols, mask = _place(M, I, BLOCK_M, BLOCK_N)
    x_ptrs = x_ptr + rows * x_stride + cols
    gate = _load(x_ptrs, mask)
    up = _load(x_ptrs + I, mask)
    result = _activated(gate, "silu") * up
    tl.store(out_ptr + rows * out_stride + cols, result.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _write_pair(a_ptr, b_ptr, out_ptr, a_stride, b_stride, out_stride, rows, cols, mask, ACTIVATION: tl.constexpr):
    dtype = out_ptr.dtype.element_ty
    a = _load(a_ptr + rows * a_stride + cols, mask)
    b = _load(b_ptr + rows * b_stride + cols, mask)
    activated = _activated(a, ACTIVATION).to(dtype).to(tl.float32)
    tl.store(out_ptr + rows * out_stride + cols, (activated * b).to(dtype), mask=mask)


# A kernel for each activation: one that took it as an argument would cost each launch 0.15 us.
@triton.jit(do_not_specialize=["M"])
def _silu_tile(
    a_ptr, b_ptr, out_ptr, a_stride, b_stride, out_stride, M, I: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    rows, cols, mask = _place(M, I, BLOCK_M, BLOCK_N)
    _write_pair(a_ptr, b_ptr, out_ptr, a_stride, b_stride, out_stride, rows, cols, mask, "silu")


@triton.jit(do_not_specialize=["M"])
def _gelu_tanh_tile(
    a_ptr, b_ptr, out_ptr, a_stride, b_stride, out_stride, M, I: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    rows, cols, mask = _place(M, I, BLOCK_M, BLOCK_N)
    _write_pair(a_ptr, b_ptr, out_ptr, a_stride, b_stride, out_stride, rows, cols, mask, "gelu_tanh")


def _launches(kernel):
    """Fill in a function that only declares an entry: one that called a shared launcher would cost each launch a Python call.

    x is [M, 2 * I]; a, b and out are [M, I]: unit last stride, any row stride; one dtype T in bfloat16, float16, float32.
    Mapping: a flat grid of tiles of BLOCK values; a tile is part of one row when I is large and several whole rows
    when I is small. Every thread has all its loads of both operands in flight before the first use.
    BLOCK = None: 1024 values a program, or 512 where 1024 would leave most of the machine idle (decode).
    num_warps = None: 8 values a thread, more where BLOCK is above 1024.
    """

    def run(a, b, out=None, *, BLOCK=None, num_warps=None):  # (x, out) or (a, b, out): the second has the shape of out
        M, I = b.shape
        if M == 0 or I == 0:
            return
        block = BLOCK or (1024 if M * I >= 1 << 18 else 512)
        warps = num_warps or (4 if block >= 1024 else 2)
        block_n = min(block, 1 << (I - 1).bit_length())  # triton.next_power_of_2 costs microseconds a call
        block_m = block // block_n
        grid = ((M + block_m - 1) // block_m) * ((I + block_n - 1) // block_n)
        if out is None:
            kernel[(grid,)](a, b, a.stride(0), b.stride(0), M, I, block_m, block_n, num_warps=warps)
            return
        kernel[(grid,)](a, b, out, a.stride(0), b.stride(0), out.stride(0), M, I, block_m, block_n, num_warps=warps)

    return lambda declared: run


@_launches(_halves_tile)
def run_silu_and_mul(x: torch.Tensor, out: torch.Tensor, *, BLOCK=None, num_warps=None):
    """out = T(silu(x[:, :I]) * x[:, I:]), computed in fp32 and rounded once to nearest even."""


@_launches(_silu_tile)
def run_swiglu(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, BLOCK=None, num_warps=None):
    """out = T(T(silu(a)) * b): fp32 inside, two roundings to nearest even."""


@_launches(_gelu_tanh_tile)
def run_gelu_tanh_and_mul(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, BLOCK=None, num_warps=None):
    """out = T(T(gelu(a)) * b), gelu in its tanh form: fp32 inside, two roundings to nearest even."""
