"""SiLU of a gate times the activation, then RMSNorm of each group of columns, in TileLang; a CTA has a group of a row."""

import functools

import tilelang
import tilelang.language as T
import torch


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def gated_groups_kernel(N, size, dtype, vec, threads):
    """Compile for rows of N columns in groups of `size`; a thread loads `vec` columns at once."""
    M = T.dynamic("M")
    x_stride, gate_stride, out_stride = T.dynamic("x_stride gate_stride out_stride", "int64")
    groups = N // size
    chunks = -(-size // (threads * vec))
    full = chunks * threads * vec == size  # then no column needs a bounds check
    warps = threads // 32
    exact = dtype == torch.float32  # else the cast to T hides the last bits of the fast exponential and reciprocal

    def silu(value):
        divisor = 1.0 + (T.exp(-value) if exact else T.__exp(-value))
        return value / divisor if exact else value * T.fast_rcp(divisor)

    @T.prim_func
    def gated_groups(
        x: T.StridedTensor((M, N), (x_stride, 1), dtype),
        gate: T.StridedTensor((M, N), (gate_stride, 1), dtype),
        weight: T.Tensor((N,), dtype),
        eps: T.float32,
        out: T.StridedTensor((M, N), (out_stride, 1), dtype),
    ):
        with T.Kernel(M * groups, threads=threads) as block:
            T.assume(x_stride % vec == 0)  # the launch chose vec so; it lets the compiler use vector accesses
            T.assume(gate_stride % vec == 0)
            T.assume(out_stride % vec == 0)
            thread = T.get_thread_binding(0)
            row = block // groups
            first = block % groups * size
            values = T.alloc_local((chunks, vec), dtype)
            gates = T.alloc_local((chunks, vec), dtype)
            scales = T.alloc_local((chunks, vec), dtype)
            opened = T.alloc_local((chunks, vec), "float32")
            result = T.alloc_local((vec,), dtype)
            total = T.alloc_local((1,), "float32")
            sums = T.alloc_shared((warps,), "float32")

            for c in T.unroll(chunks):
                if not full:
                    for v in T.vectorized(vec):
                        values[c, v] = 0
                    for v in T.vectorized(vec):
                        gates[c, v] = 0
                if full or (c * threads + thread) * vec < size:
                    for v in T.vectorized(vec):
                        values[c, v] = x[row, first + (c * threads + thread) * vec + v]
                    for v in T.vectorized(vec):
                        gates[c, v] = gate[row, first + (c * threads + thread) * vec + v]
                    for v in T.vectorized(vec):  # asked for now, so that it arrives while the sums are reduced
                        scales[c, v] = weight[first + (c * threads + thread) * vec + v]
            total[0] = 0.0
            for c, v in T.grid(chunks, vec):
                g = T.cast(gates[c, v], "float32")
                opened[c, v] = T.cast(values[c, v], "float32") * silu(g)
                total[0] += opened[c, v] * opened[c, v]
            for step in T.unroll(5):
                total[0] += T.shfl_xor(total[0], 1 << step)
            if warps > 1:
                if thread % 32 == 0:
                    sums[thread // 32] = total[0]
                T.sync_threads()
                total[0] = 0.0
                for i in T.unroll(warps):
                    total[0] += sums[i]
            total[0] = T.rsqrt(total[0] * (1.0 / size) + eps)
            for c in T.unroll(chunks):
                if full or (c * threads + thread) * vec < size:
                    for v in T.vectorized(vec):
                        normed = T.cast(opened[c, v] * total[0], dtype)
                        result[v] = T.cast(T.cast(normed, "float32") * T.cast(scales[c, v], "float32"), dtype)
                    for v in T.vectorized(vec):
                        out[row, first + (c * threads + thread) * vec + v] = result[v]

    return gated_groups


def run(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    group_size: int,
    eps: float,
    out: torch.Tensor,
    *,
    threads=None,
):
    """out = T(T(y * rsqrt(mean(y^2) + eps)) * weight) with y = x * silu(gate) and means over groups, in float32.

    x, gate, out: [M, N] with last stride 1 (any row stride), groups of at most 8192 columns; weight: [N] contiguous; T is
    bfloat16, float16 or float32. A CTA has a group of a row; threads = None: one each 16 columns, from 32 to 512.
    """
    M, N = out.shape
    if M == 0 or N == 0:
        return
    dtype = out.dtype
    itemsize = dtype.itemsize
    # The widest power of two, at most 16 bytes, that divides a group, the strides and all addresses.
    bits = group_size | x.stride(0) | gate.stride(0) | out.stride(0) | 16 // itemsize
    bits |= (x.data_ptr() | gate.data_ptr() | weight.data_ptr() | out.data_ptr()) // itemsize
    threads = threads or min(512, max(32, 1 << (-(-group_size // 16) - 1).bit_length()))
    gated_groups_kernel(N, group_size, dtype, bits & -bits, threads)(x, gate, weight, eps, out)
