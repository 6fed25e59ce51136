"""The shared expert added to the routed ones in one pass, Triton."""

import torch
import triton
import triton.language as tl


@triton.jit
def _sum(routed, shared, T: tl.constexpr):
    return (routed.to(tl.float32) + shared.to(tl.float32)).to(T)


@triton.jit(do_not_specialize=["count"])
def _add(routed_ptr, shared_ptr, out_ptr, count, BLOCK: tl.constexpr):
    T: tl.constexpr = out_ptr.dtype.element_ty
    first = tl.program_id(0).to(tl.int64) * BLOCK
    places = first + tl.arange(0, BLOCK)
    if first + BLOCK <= count:
        # Without a mask: one of a count that is not known to be a multiple of 8 would make every read one of 2 bytes.
        routed = tl.load(routed_ptr + places, eviction_policy="evict_last")
        shared = tl.load(shared_ptr + places, eviction_policy="evict_last")
        tl.store(out_ptr + places, _sum(routed, shared, T))
    else:
        inside = places < count
        routed = tl.load(routed_ptr + places, mask=inside, other=0.0)
        shared = tl.load(shared_ptr + places, mask=inside, other=0.0)
        tl.store(out_ptr + places, _sum(routed, shared, T), mask=inside)


def run_shared_expert_add(routed: torch.Tensor, shared: torch.Tensor, out: torch.Tensor, *, BLOCK=None, num_warps=4):
    """out = T(routed + shared).

    Shapes: routed, shared, out [M, N], contiguous; one dtype T in bfloat16, float16, float32.
    Mapping: BLOCK values a program; None: 2048, or 512 where that would leave most of the machine idle (decode).
    """
    count = out.numel()
    if count == 0:
        return
    block = BLOCK or (2048 if count >= 1 << 19 else 512)
    _add[((count + block - 1) // block,)](routed, shared, out, count, block, num_warps=num_warps)


@triton.jit(do_not_specialize=["M"])
def _shared_expert_gate_tile(
    routed_ptr,
    x_ptr,
    weight_ptr,
    shared_ptr,
    out_ptr,
    M,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    dtype = out_ptr.dtype.element_ty
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    in_row = cols < N
    mask = (rows < M) & in_row
    places = rows * N + cols
    weight = tl.load(weight_ptr + cols, mask=in_row, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + places, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
    # Neither depends on the gate: asked for now, they arrive while the product is reduced.
    shared = tl.load(shared_ptr + places, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
    routed = tl.load(routed_ptr + places, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
    logit = tl.sum(x * weight, axis=1, keep_dims=True).to(dtype).to(tl.float32)
    gate = (1.0 / (1.0 + tl.exp(-logit))).to(dtype).to(tl.float32)
    gated = (gate * shared).to(dtype).to(tl.float32)
    tl.store(out_ptr + places, (routed + gated).to(dtype), mask=mask)


def run_shared_expert_gate(
    routed: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    shared: torch.Tensor,
    out: torch.Tensor,
    *,
    BLOCK_M=None,
    num_warps=None,
):
    """out = T(routed + T(g * shared)), g = T(sigmoid(T(x . weight))): sums in fp32, rounded to T after each step.

    Shapes: routed, x, shared, out [M, N], weight [1, N], contiguous, N <= 16384; one dtype T in bfloat16, float16, float32.
    Mapping: a program owns BLOCK_M whole rows and keeps them in registers.
    BLOCK_M = None: 1 while there are few rows to share out, else as many rows as make a tile of 2048 values.
    num_warps = None: 16 values a thread of each tensor where there are many rows, else 8.
    """
    M, N = out.shape
    if M == 0 or N == 0:
        return
    block_n = 1 << (N - 1).bit_length()  # next power of two; triton.next_power_of_2 costs microseconds a call
    block_m = BLOCK_M or (1 if M <= 512 else max(1, 2048 // block_n))
    values = block_m * block_n
    warps = num_warps or min(32, max(4, values // 512) if M > 512 else max(1, values // 256))
    grid = ((M + block_m - 1) // block_m,)
    # Without contraction: LLVM turns the rounded product and the sum into one multiply-add of T, which skips a rounding.
    _shared_expert_gate_tile[grid](
        routed, x, weight, shared, out, M, N, block_m, block_n, num_warps=warps, enable_fp_fusion=False
    )
