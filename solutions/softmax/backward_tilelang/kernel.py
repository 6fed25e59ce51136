"""The gradient of softmax from its saved output in TileLang: a group of warps has a row, in registers where it fits."""

import functools

import tilelang
import tilelang.language as T


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def softmax_backward_kernel(N, dtype, vec, threads, rows):
    """Compile for rows of N elements: `threads` threads a row, moving `vec` elements at a time; `rows` rows a CTA."""
    M = T.dynamic("M")
    out_stride, grad_stride, grad_x_stride = T.dynamic("out_stride grad_stride grad_x_stride", "int64")
    warps = threads // 32
    chunks = -(-N // (threads * vec))
    # Both tensors stay in registers where they suffice: a thread of 1024 has 64. Longer rows are read again, from L2.
    kept = chunks * vec * dtype.itemsize <= (64 if threads <= 512 else 32)
    full = rows == 1 and N % (threads * vec) == 0  # then no access needs a bounds check
    loop, slots = (T.unroll, chunks) if kept else (T.serial, 1)

    @T.prim_func
    def softmax_backward(
        out: T.StridedTensor((M, N), (out_stride, 1), dtype),
        grad_out: T.StridedTensor((M, N), (grad_stride, 1), dtype),
        grad_x: T.StridedTensor((M, N), (grad_x_stride, 1), dtype),
    ):
        with T.Kernel(T.ceildiv(M, rows), threads=(threads, rows)) as block:
            T.assume(out_stride % vec == 0)  # run chose vec so; it lets the compiler use vector accesses
            T.assume(grad_stride % vec == 0)
            T.assume(grad_x_stride % vec == 0)
            thread, local_row = T.get_thread_binding(0), T.get_thread_binding(1)
            row = block * rows + local_row
            values = T.alloc_local((slots, vec), dtype)
            grads = T.alloc_local((slots, vec), dtype)
            result = T.alloc_local((vec,), dtype)
            partial = T.alloc_shared((rows, warps), "float32")
            total = T.alloc_var("float32", init=0.0)

            for c in loop(chunks):
                column = (c * threads + thread) * vec
                slot = c if kept else 0
                if not full:
                    for v in T.vectorized(vec):
                        values[slot, v] = 0
                    for v in T.vectorized(vec):
                        grads[slot, v] = 0
                if full or (row < M and column < N):
                    for v in T.vectorized(vec):
                        values[slot, v] = out[row, column + v]
                    for v in T.vectorized(vec):
                        grads[slot, v] = grad_out[row, column + v]
                if not kept:
                    for v in T.unroll(vec):
                        total += T.cast(values[0, v], "float32") * T.cast(grads[0, v], "float32")
            if kept:
                for c, v in T.grid(chunks, vec):
                    total += T.cast(values[c, v], "float32") * T.cast(grads[c, v], "float32")

            total = T.warp_reduce_sum(total)
            if warps > 1:
                if thread % 32 == 0:
                    partial[local_row, thread // 32] = total
                T.sync_threads()
                total = 0.0
                for w in T.unroll(warps):
                    total += partial[local_row, w]

            for c in loop(chunks):
                column = (c * threads + thread) * vec
                slot = c if kept else 0
                if full or (row < M and column < N):
                    if not kept:
                        for v in T.vectorized(vec):
                            values[0, v] = out[row, column + v]
                        for v in T.vectorized(vec):
                            grads[0, v] = grad_out[row, column + v]
                    for v in T.vectorized(vec):
                        centred = T.cast(grads[slot, v], "float32") - total
                        result[v] = T.cast(T.cast(values[slot, v], "float32") * centred, dtype)
                    for v in T.vectorized(vec):
                        grad_x[row, column + v] = result[v]

    return softmax_backward


def run(out, grad_out, grad_x, *, threads=None):
    """grad_x = T(out * (grad_out - sum(out * grad_out))), float32 inside, rounded once.

    All [M, N] with last stride 1 (any row stride); T is bfloat16, float16 or float32. A row belongs to `threads` threads (a
    multiple of 32); None: two vectors a thread, up to 1024 threads. Short rows share a CTA of 128 threads.
    """
    M, N = out.shape
    if M == 0:
        return
    dtype = out.dtype
    itemsize = dtype.itemsize
    # The widest power of two, at most 16 bytes, that divides the row, all strides and all addresses.
    bits = N | 16 // itemsize
    for tensor in (out, grad_out, grad_x):
        bits |= tensor.stride(0) | tensor.data_ptr() // itemsize
    vec = bits & -bits
    threads = threads or min(1024, 32 * -(-N // (2 * vec * 32)))
    softmax_backward_kernel(N, dtype, vec, threads, max(1, 128 // threads))(out, grad_out, grad_x)
