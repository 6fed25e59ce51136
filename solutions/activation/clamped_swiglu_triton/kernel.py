"""Gated activations of clamped operands, in halves of each row or in alternating columns, Triton."""

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["M", "alpha", "limit"])
def _clamped_swiglu_tile(
    x_ptr,
    out_ptr,
    x_stride,
    out_stride,
    alpha,
    limit,
    M,
    I: tl.constexpr,
    OAI: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    dtype = out_ptr.dtype.element_ty
    # Column blocks vary fastest, so neighbouring programs read neighbouring memory.
    column_blocks: tl.constexpr = (I + BLOCK_N - 1) // BLOCK_N
    pid = tl.program_id(0)
    rows = (pid // column_blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    first = (pid % column_blocks) * BLOCK_N
    cols = first + tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < M) & (cols < I)
    if OAI:  # pairs are loaded as they lie, in whole vectors, and taken apart in registers
        both = 2 * first + tl.arange(0, 2 * BLOCK_N)[None, :]
        in_pairs = (rows < M) & (both < 2 * I)
        x = tl.load(x_ptr + rows * x_stride + both, mask=in_pairs, other=0.0, eviction_policy="evict_last")
        gate, up = tl.split(x.to(tl.float32).reshape(BLOCK_M, BLOCK_N, 2))
    else:
        x_ptrs = x_ptr + rows * x_stride + cols
        gate = tl.load(x_ptrs, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
        up = tl.load(x_ptrs + I, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
    # Comparisons and not minima, so that NaN stays NaN.
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    # exp = inf gives -0 for very negative finite gates and NaN for -inf, as PyTorch does.
    if OAI:
        result = (up + 1.0) * (gate / (1.0 + tl.exp(-alpha * gate)))
    else:
        result = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up
    tl.store(out_ptr + rows * out_stride + cols, result.to(dtype), mask=mask)


def _launch(x, alpha, limit, oai, out, block, num_warps):
    """A flat grid of tiles of BLOCK results; a tile is part of one row when I is large and several whole rows when it is small.

    block = None: 1024 results a program, or 512 where 1024 would leave most of the machine idle (decode).
    num_warps = None: 8 results a thread, more where the block is above 1024.
    """
    M, I = out.shape
    if M == 0 or I == 0:
        return
    block = block or (1024 if M * I >= 1 << 18 else 512)
    warps = num_warps or (4 if block >= 1024 else 2)
    block_n = min(block, 1 << (I - 1).bit_length())  # triton.next_power_of_2 costs microseconds a call
    block_m = block // block_n
    grid = (((M + block_m - 1) // block_m) * ((I + block_n - 1) // block_n),)
    _clamped_swiglu_tile[grid](
        x, out, x.stride(0), out.stride(0), float(alpha), float(limit), M, I, oai, block_m, block_n, num_warps=warps
    )


def run_swiglu_clamp(x: torch.Tensor, limit: float, out: torch.Tensor, *, BLOCK=None, num_warps=None):
    """out = T(T(silu(min(x[:, :I], limit))) * clamp(x[:, I:], -limit, limit)), in fp32 between the two roundings.

    Shapes: x [M, 2 * I], out [M, I], unit last stride, any row stride; one dtype T in bfloat16, float16, float32.
    """
    _launch(x, 1.0, limit, False, out, BLOCK, num_warps)


def run_swiglu_oai(x: torch.Tensor, alpha: float, limit: float, out: torch.Tensor, *, BLOCK=None, num_warps=None):
    """out = T((u + 1) * g * sigmoid(alpha * g)), g = min(x[:, 0::2], limit), u = clamp(x[:, 1::2], -limit, limit), in fp32.

    Shapes: x [M, 2 * I], out [M, I], unit last stride, any row stride; one dtype T in bfloat16, float16, float32.
    """
    _launch(x, alpha, limit, True, out, BLOCK, num_warps)
