"""The shared expert added to the routed ones in one pass, in TileLang: 16 bytes a thread and load."""

import functools

import tilelang
import tilelang.language as T


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def shared_expert_add_kernel(dtype, vec, threads, repeat):
    """Compile for `repeat` vectors of `vec` values a thread."""
    N = T.dynamic("N", "int64")

    @T.prim_func
    def shared_expert_add(routed: T.Tensor((N,), dtype), shared: T.Tensor((N,), dtype), out: T.Tensor((N,), dtype)):
        with T.Kernel(T.ceildiv(N, threads * vec * repeat), threads=threads) as block:
            T.assume(N % vec == 0)  # run() chose vec so
            first = T.cast(block, "int64") * (threads * vec * repeat) + T.get_thread_binding(0) * vec
            a = T.alloc_local((repeat, vec), dtype)
            b = T.alloc_local((repeat, vec), dtype)
            result = T.alloc_local((vec,), dtype)

            for i in T.unroll(repeat):  # all loads first: they overlap
                if first + i * (threads * vec) < N:
                    for v in T.vectorized(vec):
                        a[i, v] = routed[first + i * (threads * vec) + v]
                    for v in T.vectorized(vec):
                        b[i, v] = shared[first + i * (threads * vec) + v]
            for i in T.unroll(repeat):
                if first + i * (threads * vec) < N:
                    for v in T.unroll(vec):
                        result[v] = T.cast(T.cast(a[i, v], "float32") + T.cast(b[i, v], "float32"), dtype)
                    for v in T.vectorized(vec):
                        out[first + i * (threads * vec) + v] = result[v]

    return shared_expert_add


def run_shared_expert_add(routed, shared, out, *, threads=256, repeat=1):
    """out = T(routed + shared), added in float32 and rounded once.

    routed, shared, out: [M, N], contiguous; T is bfloat16, float16 or float32. A thread makes `repeat` vectors of at most
    16 bytes.
    """
    count = out.numel()
    if count == 0:
        return
    dtype = out.dtype
    itemsize = dtype.itemsize
    # The widest power of two, at most 16 bytes, that divides the number of values and all addresses.
    bits = count | (routed.data_ptr() | shared.data_ptr() | out.data_ptr()) // itemsize | 16 // itemsize
    shared_expert_add_kernel(dtype, bits & -bits, threads, repeat)(routed.view(-1), shared.view(-1), out.view(-1))


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


def run_shared_expert_gate(routed, x, weight, shared, out, *, threads=None, rows=None):
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
