"""The output of attention times the sigmoid of its gate, Triton."""

import torch
import triton
import triton.language as tl

MINUS_LOG2_E = tl.constexpr(-1.4426950408889634)


@triton.jit(do_not_specialize=["M"])
def _sigmoid_mul_tile(
    x_ptr,
    gate_ptr,
    out_ptr,
    x_stride,
    gate_stride,
    out_stride,
    M,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    dtype = out_ptr.dtype.element_ty
    # Column blocks vary fastest, so neighbouring programs read neighbouring memory.
    column_blocks: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    pid = tl.program_id(0)
    rows = (pid // column_blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    cols = (pid % column_blocks) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < M) & (cols < N)
    gate = tl.load(gate_ptr + rows * gate_stride + cols, mask=mask, other=0.0, eviction_policy="evict_last").to(
        tl.float32
    )
    x = tl.load(x_ptr + rows * x_stride + cols, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
    # The cast to a 16-bit T hides the last bits of the shorter exponential.
    power = tl.exp(-gate) if dtype == tl.float32 else tl.exp2(gate * MINUS_LOG2_E)
    opening = (1.0 / (1.0 + power)).to(dtype).to(tl.float32)
    tl.store(out_ptr + rows * out_stride + cols, (x * opening).to(dtype), mask=mask)


def run(x: torch.Tensor, gate: torch.Tensor, out: torch.Tensor, *, BLOCK=None, num_warps=None):
    """out = T(x * T(sigmoid(gate))): fp32 inside, two roundings to nearest even.

    Shapes: x, gate, out [M, N] with unit last stride and any row stride; one dtype T in bfloat16, float16, float32.
    Mapping: a flat grid of tiles of BLOCK values; a tile is part of one row when N is large and several whole rows when N is
    small.
    BLOCK = None: 1024 values a program, or 512 where 1024 would leave most of the machine idle (decode).
    num_warps = None: 8 values a thread.
    """
    M, N = out.shape
    if M == 0 or N == 0:
        return
    block = BLOCK or (1024 if M * N >= 1 << 18 else 512)
    warps = num_warps or (4 if block >= 1024 else 2)
    block_n = min(block, 1 << (N - 1).bit_length())  # triton.next_power_of_2 costs microseconds a call
    block_m = block // block_n
    grid = ((M + block_m - 1) // block_m) * ((N + block_n - 1) // block_n)
    _sigmoid_mul_tile[(grid,)](
        x, gate, out, x.stride(0), gate.stride(0), out.stride(0), M, N, block_m, block_n, num_warps=warps
    )
