"""SiLU of the first half of each row times the second half, Triton."""

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["M"])
def _silu_and_mul_tile(
    x_ptr, out_ptr, x_stride, out_stride, M, I: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    # Column blocks vary fastest, so neighbouring programs read neighbouring memory.
    column_blocks: tl.constexpr = (I + BLOCK_N - 1) // BLOCK_N
    pid = tl.program_id(0)
    rows = (pid // column_blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    cols = (pid % column_blocks) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < M) & (cols < I)
    x_ptrs = x_ptr + rows * x_stride + cols
    # evict_last, although nothing is read again: up to 6% faster than no policy, where evict_first is slower (H200).
    gate = tl.load(x_ptrs, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
    up = tl.load(x_ptrs + I, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
    # This form of SiLU: exp(-gate) = inf gives -0 for very negative finite gates and NaN for -inf, as PyTorch does.
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + rows * out_stride + cols, result.to(out_ptr.dtype.element_ty), mask=mask)


def run(x: torch.Tensor, out: torch.Tensor, *, BLOCK=None, num_warps=None):
    """out = T(silu(x[:, :I]) * x[:, I:]), computed in fp32 and rounded once to nearest even.

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
    grid = ((M + block_m - 1) // block_m) * ((I + block_n - 1) // block_n)
    _silu_and_mul_tile[(grid,)](x, out, x.stride(0), out.stride(0), M, I, block_m, block_n, num_warps=warps)
