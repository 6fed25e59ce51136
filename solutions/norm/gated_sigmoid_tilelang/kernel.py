"""RMSNorm of each head's output, times its weight and the sigmoid of a gate, in TileLang: a part of a warp a row."""

import functools

import tilelang
import tilelang.language as T
import torch

THREADS = 128


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def gated_norm_kernel(N, dtype, vec, lanes, rows):
    """Compile for rows of N elements: `lanes` lanes of a warp (a power of two) have `rows` rows each, and load `vec` elements."""
    M = T.dynamic("M")
    x_stride, gate_stride, out_stride = T.dynamic("x_stride gate_stride out_stride", "int64")
    groups = THREADS // lanes
    chunks = -(-N // (lanes * vec))
    full = chunks * lanes * vec == N  # then no column needs a bounds check
    exact = dtype == torch.float32  # else the cast to T hides the last bits of the fast exponential and reciprocal

    def sigmoid(value):
        divisor = 1.0 + (T.exp(-value) if exact else T.__exp(-value))
        return 1.0 / divisor if exact else T.fast_rcp(divisor)

    @T.prim_func
    def gated_norm(
        x: T.StridedTensor((M, N), (x_stride, 1), dtype),
        gate: T.StridedTensor((M, N), (gate_stride, 1), dtype),
        weight: T.Tensor((N,), dtype),
        eps: T.float32,
        out: T.StridedTensor((M, N), (out_stride, 1), dtype),
    ):
        with T.Kernel(T.ceildiv(M, groups * rows), threads=THREADS) as block:
            T.assume(x_stride % vec == 0)  # the launch chose vec so; it lets the compiler use vector accesses
            T.assume(gate_stride % vec == 0)
            T.assume(out_stride % vec == 0)
            thread = T.get_thread_binding(0)
            first = block * groups * rows + thread // lanes
            lane = thread % lanes
            values = T.alloc_local((rows, chunks, vec), dtype)
            gates = T.alloc_local((rows, chunks, vec), dtype)
            scales = T.alloc_local((chunks, vec), dtype)
            opened = T.alloc_local((vec,), "float32")
            result = T.alloc_local((rows, chunks, vec), dtype)
            total = T.alloc_local((rows,), "float32")

            for r, c in T.grid(rows, chunks):
                if not full:
                    for v in T.vectorized(vec):
                        values[r, c, v] = 0
                if first + r * groups < M and (full or (c * lanes + lane) * vec < N):
                    for v in T.vectorized(vec):
                        values[r, c, v] = x[first + r * groups, (c * lanes + lane) * vec + v]
                    for v in T.vectorized(vec):  # asked for now, so that it arrives while the sums are reduced
                        gates[r, c, v] = gate[first + r * groups, (c * lanes + lane) * vec + v]
            for c in T.unroll(chunks):
                if full or (c * lanes + lane) * vec < N:
                    for v in T.vectorized(vec):
                        scales[c, v] = weight[(c * lanes + lane) * vec + v]
            for r in T.unroll(rows):
                total[r] = 0.0
                for c, v in T.grid(chunks, vec):
                    total[r] += T.cast(values[r, c, v], "float32") * T.cast(values[r, c, v], "float32")
                for step in T.unroll(lanes.bit_length() - 1):
                    total[r] += T.shfl_xor(total[r], 1 << step)
                total[r] = T.rsqrt(total[r] * (1.0 / N) + eps)
            for r, c in T.grid(rows, chunks):
                if first + r * groups < M and (full or (c * lanes + lane) * vec < N):
                    for v in T.unroll(vec):
                        g = T.cast(gates[r, c, v], "float32")
                        opened[v] = sigmoid(g)
                    for v in T.vectorized(vec):
                        normed = T.cast(values[r, c, v], "float32") * total[r]
                        result[r, c, v] = T.cast(normed * T.cast(scales[c, v], "float32") * opened[v], dtype)
                    for v in T.vectorized(vec):
                        out[first + r * groups, (c * lanes + lane) * vec + v] = result[r, c, v]

    return gated_norm


def run(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor, *, lanes=None, rows=None
):
    """out = T(x * rsqrt(mean(x^2) + eps) * weight * sigmoid(gate)), in float32 with one rounding.

    x, gate, out: [M, N] with last stride 1 (any row stride), N <= 1024; weight: [N] contiguous; T is bfloat16, float16 or
    float32. `lanes` lanes of a warp have `rows` rows each; None: as many lanes as load a row at once, at most 32, and 2 rows if
    there are many.
    """
    M, N = out.shape
    if M == 0:
        return
    dtype = out.dtype
    itemsize = dtype.itemsize
    # The widest power of two, at most 16 bytes, that divides the row, the strides and all addresses.
    bits = N | x.stride(0) | gate.stride(0) | out.stride(0) | 16 // itemsize
    bits |= (x.data_ptr() | gate.data_ptr() | weight.data_ptr() | out.data_ptr()) // itemsize
    vec = bits & -bits
    if lanes is None:
        lanes = min(32, 1 << (-(-N // vec) - 1).bit_length())
    gated_norm_kernel(N, dtype, vec, lanes, rows or (2 if M >= 4096 and N <= 256 else 1))(x, gate, weight, eps, out)
