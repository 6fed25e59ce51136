"""SiLU of the clamped first half of each row times the clamped second half, Triton."""

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["M", "limit"])
def _swiglu_clamp_tile(
    x_ptr, out_ptr, x_stride, out_stride, limit, M, I: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    dtype = out_ptr.dtype.element_ty
    # Column blocks vary fastest, so neighbouring programs read neighbouring memory.
    column_blocks: tl.constexpr = (I + BLOCK_N - 1) // BLOCK_N
    pid = tl.program_id(0)
    rows = (pid // column_blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    cols = (pid % column_blocks) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < M) & (cols < I)
    x_ptrs = x_ptr + rows * x_stride + cols
    gate = tl.load(x_ptrs, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
    up = tl.load(x_ptrs + I, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
    # Comparisons and not minima, so that NaN stays NaN.
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    # exp(-gate) = inf gives -0 for very negative finite gates and NaN for -inf, as PyTorch does.
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out_ptr + rows * out_stride + cols, (silu * up).to(dtype), mask=mask)


def run(x: torch.Tensor, limit: float, out: torch.Tensor, *, BLOCK=None, num_warps=None):
    """out = T(T(silu(min(x[:, :I], limit))) * clamp(x[:, I:], -limit, limit)), in fp32 between the two roundings.

    Shapes: x [M, 2 * I], out [M, I], unit last stride, any row stride; one dtype T in bfloat16, float16, float32.
    Mapping: a flat grid of tiles of BLOCK values; a tile is part of one row when I is large and several whole rows
    when I is small. Every thread has all its loads of both halves in flight before the first use.
    BLOCK = None: 1024 values a program, or 512 where 1024 would leave most of the machine idle (decode).
    num_warps = None: 8 values a thread, more where BLOCK is above 1024.
    """
    M, I = out.shape
    if M == 0 or I == 0:
        return
    block = BLOCK or (1024 if M * I >= 1 << 18 else 512)
    warps = num_warps or (4 if block >= 1024 else 2)
    block_n = min(block, 1 << (I - 1).bit_length())  # triton.next_power_of_2 costs microseconds a call
    block_m = block // block_n
    grid = (((M + block_m - 1) // block_m) * ((I + block_n - 1) // block_n),)
    _swiglu_clamp_tile[grid](x, out, x.stride(0), out.stride(0), float(limit), M, I, block_m, block_n, num_warps=warps)
