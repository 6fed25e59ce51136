"""The gradients of GELU's tanh form of one tensor times another, rounded the way autograd rounds, Triton."""

import torch
import triton
import triton.language as tl

# tanh(u) = 2 sigmoid(2 u) - 1, so the tanh form of GELU is a * sigmoid(a * (LINEAR + CUBIC * a^2)).
LINEAR = tl.constexpr(1.5957691216057308)
CUBIC = tl.constexpr(0.07135481282696677)


@triton.jit(do_not_specialize=["M"])
def _gelu_tanh_and_mul_backward_tile(
    a_ptr,
    b_ptr,
    grad_out_ptr,
    grad_a_ptr,
    grad_b_ptr,
    a_stride,
    b_stride,
    grad_out_stride,
    grad_a_stride,
    grad_b_stride,
    M,
    I: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # Column blocks vary fastest, so neighbouring programs read neighbouring memory.
    column_blocks: tl.constexpr = (I + BLOCK_N - 1) // BLOCK_N
    dtype = grad_a_ptr.dtype.element_ty
    pid = tl.program_id(0)
    rows = (pid // column_blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    cols = (pid % column_blocks) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < M) & (cols < I)
    a = tl.load(a_ptr + rows * a_stride + cols, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    b = tl.load(b_ptr + rows * b_stride + cols, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    grad = tl.load(
        grad_out_ptr + rows * grad_out_stride + cols, mask=mask, other=0.0, eviction_policy="evict_first"
    ).to(tl.float32)
    # An exponential that overflows to inf makes the share 0.
    share = 1.0 / (1.0 + tl.exp(-a * (LINEAR + CUBIC * a * a)))
    activated = (a * share).to(dtype).to(tl.float32)
    grad_activated = (grad * b).to(dtype).to(tl.float32)
    steepness = LINEAR + 3.0 * CUBIC * a * a
    # The cube of a large a would be infinite, and times 0 no number.
    grad_a = grad_activated * (share + a * (share * (1.0 - share)) * steepness)
    tl.store(grad_a_ptr + rows * grad_a_stride + cols, grad_a.to(dtype), mask=mask)
    tl.store(grad_b_ptr + rows * grad_b_stride + cols, (grad * activated).to(dtype), mask=mask)


def run(
    a: torch.Tensor,
    b: torch.Tensor,
    grad_out: torch.Tensor,
    grad_a: torch.Tensor,
    grad_b: torch.Tensor,
    *,
    BLOCK=None,
    num_warps=None,
):
    """grad_a = T(T(grad_out * b) * the derivative of GELU at a), grad_b = T(grad_out * T(gelu(a))), tanh form, fp32 inside.

    Shapes: all [M, I], unit last stride, any row stride; one dtype T in bfloat16, float16, float32.
    Mapping: a flat grid of tiles of BLOCK values; a tile is part of one row when I is large and several whole rows
    when I is small. Every thread has its loads of all three inputs in flight before the first use.
    BLOCK = None: 2048 values a program, or 512 where 2048 would leave most of the machine idle.
    num_warps = None: 16 values a thread for 2048 (8 for 512).
    """
    M, I = grad_a.shape
    if M == 0 or I == 0:
        return
    block = BLOCK or (2048 if M * I >= 1 << 18 else 512)
    warps = num_warps or (4 if block >= 1024 else 2)
    block_n = min(block, 1 << (I - 1).bit_length())  # triton.next_power_of_2 costs microseconds a call
    block_m = block // block_n
    grid = ((M + block_m - 1) // block_m) * ((I + block_n - 1) // block_n)
    _gelu_tanh_and_mul_backward_tile[(grid,)](
        a,
        b,
        grad_out,
        grad_a,
        grad_b,
        a.stride(0),
        b.stride(0),
        grad_out.stride(0),
        grad_a.stride(0),
        grad_b.stride(0),
        M,
        I,
        block_m,
        block_n,
        num_warps=warps,
    )
