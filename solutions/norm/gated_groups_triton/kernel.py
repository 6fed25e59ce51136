"""SiLU of a gate times the activation, then RMSNorm of each group of columns, in one pass; Triton."""

import torch
import triton
import triton.language as tl

MINUS_LOG2_E = tl.constexpr(-1.4426950408889634)


@triton.jit(do_not_specialize=["parts"])
def _gated_groups_tile(
    x_ptr,
    gate_ptr,
    weight_ptr,
    out_ptr,
    x_stride,
    gate_stride,
    out_stride,
    eps,
    parts,
    GROUPS: tl.constexpr,
    G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    dtype = out_ptr.dtype.element_ty
    # A part is one group of one row: parts of a row follow each other.
    part = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    row, first = part // GROUPS, part % GROUPS * G
    cols = tl.arange(0, BLOCK_G)[None, :]
    in_group = cols < G
    mask = (part < parts) & in_group
    x = tl.load(x_ptr + row * x_stride + first + cols, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + first + cols, mask=mask, other=0.0).to(tl.float32)
    # It does not depend on the reduction: asked for now, it arrives while that runs.
    weight = tl.load(weight_ptr + first + cols, mask=mask, other=0.0).to(tl.float32)
    # An exponential of inf gives -0 for very negative finite gates and NaN for -inf, as PyTorch does.
    # The cast to a 16-bit T hides the last bits of the shorter one.
    power = tl.exp(-gate) if dtype == tl.float32 else tl.exp2(gate * MINUS_LOG2_E)
    opened = x * (gate / (1.0 + power))
    scale = tl.rsqrt(tl.sum(opened * opened, axis=1, keep_dims=True) / G + eps)
    normed = (opened * scale).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * out_stride + first + cols, (normed * weight).to(dtype), mask=mask)


def run(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    group_size: int,
    eps: float,
    out: torch.Tensor,
    *,
    BLOCK_M=None,
    num_warps=None,
):
    """out = T(T(y * rsqrt(mean(y^2) + eps)) * weight) with y = x * silu(gate) and means over groups; fp32 inside.

    Shapes: x, gate, out [M, N] with unit last stride and any row stride, weight [N], groups of at most 16384 columns; one
    dtype T in bfloat16, float16, float32.
    Mapping: a program owns BLOCK_M whole groups and keeps both tensors in registers.
    BLOCK_M = None: 1 while there are few groups to share out, else as many as make a tile of 2048 values.
    num_warps = None: 16 values of each tensor a thread.
    """
    M, N = out.shape
    if M == 0 or N == 0:
        return
    groups = N // group_size
    parts = M * groups
    block_g = 1 << (group_size - 1).bit_length()  # next power of two; triton.next_power_of_2 costs microseconds a call
    block_m = BLOCK_M or (1 if parts <= 512 else max(1, 2048 // block_g))
    block_m = max(1, min(block_m, 16384 // block_g))
    warps = num_warps or min(32, max(1, block_m * block_g // 512))
    _gated_groups_tile[((parts + block_m - 1) // block_m,)](
        x, gate, weight, out, x.stride(0), gate.stride(0), out.stride(0), eps, parts, groups, group_size, block_m, block_g,
        num_warps=warps,
    )  # fmt: skip
