"""routed + sigmoid(x . weight) * shared in one pass, in TileLang: a group of warps a row."""

import functools

import tilelang
import tilelang.language as T


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def shared_expert_gate_kernel(N, dtype, vec, threads, rows):
    """Compile for rows of N elements: `threads` threads a row, moving `vec` elements at a time; `rows` rows a CTA."""
    M = T.dynamic("M")
    warps = threads // 32
    chunks = -(-N // (threads * vec))
    # The two addends stay in registers where they suffice, so that they arrive while the product is reduced.
    kept = chunks * vec * dtype.itemsize <= 64
    full = rows == 1 and N % (threads * vec) == 0  # then no access needs a bounds check
    loop, slots = (T.unroll, chunks) if kept else (T.serial, 1)

    @T.prim_func
    def shared_expert_gate(
        routed: T.Tensor((M, N), dtype),
        x: T.Tensor((M, N), dtype),
        weight: T.Tensor((1, N), dtype),
        shared: T.Tensor((M, N), dtype),
        out: T.Tensor((M, N), dtype),
    ):
        with T.Kernel(T.ceildiv(M, rows), threads=(threads, rows)) as block:
            thread, local_row = T.get_thread_binding(0), T.get_thread_binding(1)
            row = block * rows + local_row
            values = T.alloc_local((slots, vec), dtype)
            scales = T.alloc_local((slots, vec), dtype)
            addends = T.alloc_local((slots, vec), dtype)
            gated = T.alloc_local((slots, vec), dtype)
            result = T.alloc_local((vec,), dtype)
            partial = T.alloc_shared((rows, warps), "float32")
            total = T.alloc_var("float32", init=0.0)

            for c in loop(chunks):
                column = (c * threads + thread) * vec
                slot = c if kept else 0
                if full or (row < M and column < N):
                    for v in T.vectorized(vec):
                        values[slot, v] = x[row, column + v]
                    for v in T.vectorized(vec):
                        scales[slot, v] = weight[0, column + v]
                    if kept:
                        for v in T.vectorized(vec):
                            gated[slot, v] = shared[row, column + v]
                        for v in T.vectorized(vec):
                            addends[slot, v] = routed[row, column + v]
                    else:
                        for v in T.unroll(vec):
                            total += T.cast(values[0, v], "float32") * T.cast(scales[0, v], "float32")
            if kept:  # a second loop, so that every load is on its way before the first is waited for
                for c in T.unroll(chunks):
                    if full or (row < M and (c * threads + thread) * vec < N):
                        for v in T.unroll(vec):
                            total += T.cast(values[c, v], "float32") * T.cast(scales[c, v], "float32")

            total = T.warp_reduce_sum(total)
            if warps > 1:
                if thread % 32 == 0:
                    partial[local_row, thread // 32] = total
                T.sync_threads()
                total = 0.0
                for w in T.unroll(warps):
                    total += partial[local_row, w]
            logit = T.cast(T.cast(total, dtype), "float32")
            gate = T.cast(T.cast(1.0 / (1.0 + T.exp(-logit)), dtype), "float32")

            for c in loop(chunks):
                column = (c * threads + thread) * vec
                slot = c if kept else 0
                if full or (row < M and column < N):
                    if not kept:
                        for v in T.vectorized(vec):
                            gated[0, v] = shared[row, column + v]
                        for v in T.vectorized(vec):
                            addends[0, v] = routed[row, column + v]
                    for v in T.unroll(vec):
                        product = T.cast(gate * T.cast(gated[slot, v], "float32"), dtype)
                        result[v] = T.cast(T.cast(addends[slot, v], "float32") + T.cast(product, "float32"), dtype)
                    for v in T.vectorized(vec):
                        out[row, column + v] = result[v]

    return shared_expert_gate


@functools.cache
def default_shape(N, vec):
    """Threads a row and rows a CTA: two vectors a thread, four warps a CTA where a row needs fewer."""
    threads = min(1024, 32 * -(-N // (2 * vec * 32)))
    return threads, max(1, 128 // threads)


def run(routed, x, weight, shared, out, *, threads=None, rows=None):
    """out = T(routed + T(g * shared)), g = T(sigmoid(T(x . weight))): sums in float32, rounded to T after each step.

    routed, x, shared, out: [M, N], weight: [1, N], contiguous; T is bfloat16, float16 or float32. A row belongs to `threads`
    threads (a multiple of 32), a CTA has `rows` rows; None chooses both from N alone.
    """
    M, N = out.shape
    if M == 0:
        return
    dtype = out.dtype
    itemsize = dtype.itemsize
    # The widest power of two, at most 16 bytes, that divides the row and all addresses.
    addresses = routed.data_ptr() | x.data_ptr() | weight.data_ptr() | shared.data_ptr() | out.data_ptr()
    bits = N | addresses // itemsize | 16 // itemsize
    vec = bits & -bits
    if threads is None or rows is None:
        chosen = default_shape(N, vec)
        threads, rows = threads or chosen[0], rows or chosen[1]
    rows = min(rows, 1024 // threads)
    shared_expert_gate_kernel(N, dtype, vec, threads, rows)(routed, x, weight, shared, out)
