"""The gradients of GELU's tanh form of one tensor times another in TileLang: 16 bytes a thread and load, no shared memory."""

import functools

import tilelang
import tilelang.language as T
import torch

# tanh(u) = 2 sigmoid(2 u) - 1, so the tanh form of GELU is a * sigmoid(a * (LINEAR + CUBIC * a^2)).
LINEAR, CUBIC = 1.5957691216057308, 0.07135481282696677


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def gelu_tanh_and_mul_backward_kernel(I, dtype, vec, threads, repeat):
    """Compile for I columns: a thread makes one vector of `vec` values of both gradients in each of `repeat` rows."""
    M = T.dynamic("M")
    a_stride, b_stride, grad_stride = T.dynamic("a_stride b_stride grad_stride", "int64")
    grad_a_stride, grad_b_stride = T.dynamic("grad_a_stride grad_b_stride", "int64")
    vectors = -(-I // vec)
    columns = min(threads, -(-vectors // 32) * 32)  # threads along a row; short rows share a CTA
    rows = threads // columns
    blocks = -(-vectors // columns)  # CTAs along a row
    exact = dtype == torch.float32  # else the cast to T hides the last bits of the fast exponential and reciprocal

    @T.prim_func
    def gelu_tanh_and_mul_backward(
        a: T.StridedTensor((M, I), (a_stride, 1), dtype),
        b: T.StridedTensor((M, I), (b_stride, 1), dtype),
        grad_out: T.StridedTensor((M, I), (grad_stride, 1), dtype),
        grad_a: T.StridedTensor((M, I), (grad_a_stride, 1), dtype),
        grad_b: T.StridedTensor((M, I), (grad_b_stride, 1), dtype),
    ):
        # Column blocks vary fastest, so neighbouring CTAs read neighbouring memory.
        with T.Kernel(T.ceildiv(M, rows * repeat) * blocks, threads=(columns, rows)) as block:
            row_block = block // blocks
            column_block = block % blocks
            T.assume(a_stride % vec == 0)  # run() chose vec so; it lets the compiler use vector accesses
            T.assume(b_stride % vec == 0)
            T.assume(grad_stride % vec == 0)
            T.assume(grad_a_stride % vec == 0)
            T.assume(grad_b_stride % vec == 0)
            column = (column_block * columns + T.get_thread_binding(0)) * vec
            first_row = row_block * (rows * repeat) + T.get_thread_binding(1)
            gate = T.alloc_local((repeat, vec), dtype)
            up = T.alloc_local((repeat, vec), dtype)
            grad = T.alloc_local((repeat, vec), dtype)
            share = T.alloc_local((vec,), "float32")
            to_gate = T.alloc_local((vec,), dtype)
            to_up = T.alloc_local((vec,), dtype)

            if column < I:
                for i in T.unroll(repeat):  # all loads first: they overlap
                    if first_row + i * rows < M:
                        for v in T.vectorized(vec):
                            gate[i, v] = a[first_row + i * rows, column + v]
                        for v in T.vectorized(vec):
                            up[i, v] = b[first_row + i * rows, column + v]
                        for v in T.vectorized(vec):
                            grad[i, v] = grad_out[first_row + i * rows, column + v]
                for i in T.unroll(repeat):
                    if first_row + i * rows < M:
                        for v in T.unroll(vec):
                            g = T.cast(gate[i, v], "float32")
                            power = -g * (LINEAR + CUBIC * g * g)  # an exponential of inf makes the share 0
                            share[v] = 1.0 / (1.0 + T.exp(power)) if exact else T.fast_rcp(1.0 + T.__exp(power))
                        for v in T.vectorized(vec):
                            g = T.cast(gate[i, v], "float32")
                            product = T.cast(grad[i, v], "float32") * T.cast(up[i, v], "float32")
                            rounded = T.cast(T.cast(product, dtype), "float32")
                            steepness = LINEAR + 3.0 * CUBIC * g * g
                            # The cube of a large g would be infinite, and times 0 no number.
                            derivative = share[v] + g * (share[v] * (1.0 - share[v])) * steepness
                            to_gate[v] = T.cast(rounded * derivative, dtype)
                        for v in T.vectorized(vec):
                            activated = T.cast(T.cast(T.cast(gate[i, v], "float32") * share[v], dtype), "float32")
                            to_up[v] = T.cast(T.cast(grad[i, v], "float32") * activated, dtype)
                        for v in T.vectorized(vec):
                            grad_a[first_row + i * rows, column + v] = to_gate[v]
                        for v in T.vectorized(vec):
                            grad_b[first_row + i * rows, column + v] = to_up[v]

    return gelu_tanh_and_mul_backward


def run_gelu_tanh_and_mul_backward(a, b, grad_out, grad_a, grad_b, *, threads=256, repeat=1):
    """grad_a = T(T(grad_out * b) * the derivative of GELU at a), grad_b = T(grad_out * T(gelu(a))), tanh form, fp32 inside.

    All [M, I], last stride 1 (any row stride); T is bfloat16, float16 or float32. A CTA has `threads` threads along
    the row (short rows share a CTA), each of which makes one vector of both gradients in `repeat` rows.
    """
    M, I = grad_a.shape
    if M == 0:
        return
    dtype = grad_a.dtype
    itemsize = dtype.itemsize
    # The widest power of two, at most 16 bytes, that divides the row, the strides and all addresses.
    bits = I | 16 // itemsize
    for tensor in (a, b, grad_out, grad_a, grad_b):
        bits |= tensor.stride(0) | tensor.data_ptr() // itemsize
    vec = bits & -bits
    gelu_tanh_and_mul_backward_kernel(I, dtype, vec, threads, repeat)(a, b, grad_out, grad_a, grad_b)
