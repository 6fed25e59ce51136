"""The output of attention times the sigmoid of its gate, in TileLang: 16 bytes a thread and load, no shared memory."""

import functools

import tilelang
import tilelang.language as T
import torch


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def sigmoid_mul_kernel(N, dtype, vec, threads, repeat):
    """Compile for N columns: a thread makes one vector of `vec` outputs in each of `repeat` rows."""
    M = T.dynamic("M")
    x_stride, gate_stride, out_stride = T.dynamic("x_stride gate_stride out_stride", "int64")
    vectors = -(-N // vec)
    columns = min(threads, -(-vectors // 32) * 32)  # threads along a row; short rows share a CTA
    rows = threads // columns
    blocks = -(-vectors // columns)  # CTAs along a row
    exact = dtype == torch.float32  # else the cast to T hides the last bits of the fast exponential and reciprocal

    def sigmoid(value):
        divisor = 1.0 + (T.exp(-value) if exact else T.__exp(-value))
        return 1.0 / divisor if exact else T.fast_rcp(divisor)

    @T.prim_func
    def sigmoid_mul(
        x: T.StridedTensor((M, N), (x_stride, 1), dtype),
        gate: T.StridedTensor((M, N), (gate_stride, 1), dtype),
        out: T.StridedTensor((M, N), (out_stride, 1), dtype),
    ):
        with T.Kernel(T.ceildiv(M, rows * repeat) * blocks, threads=(columns, rows)) as block:
            T.assume(x_stride % vec == 0)  # the launch chose vec so; it lets the compiler use vector accesses
            T.assume(gate_stride % vec == 0)
            T.assume(out_stride % vec == 0)
            # Column blocks vary fastest, so neighbouring CTAs read neighbouring memory.
            column = (block % blocks * columns + T.get_thread_binding(0)) * vec
            first_row = block // blocks * (rows * repeat) + T.get_thread_binding(1)
            values = T.alloc_local((repeat, vec), dtype)
            gates = T.alloc_local((repeat, vec), dtype)
            opened = T.alloc_local((vec,), "float32")
            result = T.alloc_local((vec,), dtype)

            if column < N:
                for i in T.unroll(repeat):  # all loads first: they overlap
                    if first_row + i * rows < M:
                        for v in T.vectorized(vec):
                            gates[i, v] = gate[first_row + i * rows, column + v]
                        for v in T.vectorized(vec):
                            values[i, v] = x[first_row + i * rows, column + v]
                for i in T.unroll(repeat):
                    if first_row + i * rows < M:
                        for v in T.unroll(vec):
                            g = T.cast(gates[i, v], "float32")
                            opened[v] = sigmoid(g)
                        for v in T.vectorized(vec):
                            rounded = T.cast(T.cast(opened[v], dtype), "float32")
                            result[v] = T.cast(rounded * T.cast(values[i, v], "float32"), dtype)
                        for v in T.vectorized(vec):
                            out[first_row + i * rows, column + v] = result[v]

    return sigmoid_mul


def run(x: torch.Tensor, gate: torch.Tensor, out: torch.Tensor, *, threads=256, repeat=1):
    """out = T(x * T(sigmoid(gate))): sigmoid in float32, rounded to T before the product.

    x, gate, out: [M, N], last stride 1 (any row stride); T is bfloat16, float16 or float32. A CTA has `threads` threads along
    the row (short rows share a CTA), each of which makes one vector in `repeat` rows.
    """
    M, N = out.shape
    if M == 0:
        return
    dtype = out.dtype
    itemsize = dtype.itemsize
    # The widest power of two, at most 16 bytes, that divides the columns, the strides and all addresses.
    bits = N | x.stride(0) | gate.stride(0) | out.stride(0) | 16 // itemsize
    bits |= (x.data_ptr() | gate.data_ptr() | out.data_ptr()) // itemsize
    sigmoid_mul_kernel(N, dtype, bits & -bits, threads, repeat)(x, gate, out)
