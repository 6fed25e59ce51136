"""Softmax over the last axis in TileLang: short rows are read once into registers, long ones twice; few long ones in pieces."""

import functools

import tilelang
import tilelang.language as T
import torch

FEW_ROWS = 128  # about one a multiprocessor: with a CTA each they would leave the machine idle
KEPT_ELEMENTS = 32  # of its row that a thread keeps in registers, as float32; longer rows take another kernel
CLUSTER = 8  # CTAs that share a long row and meet at the cluster's barrier
CLUSTERS = 128  # that take several rows each: more than run at once, so that the machine is busy to the end
LOG2E = 1.4426950408889634


@T.macro
def reduce_block(kind, thread, row, warps, value, partial):
    """Leave in value[0] the max or the sum over the warps that share a row."""
    value[0] = T.warp_reduce_max(value[0]) if kind == "max" else T.warp_reduce_sum(value[0])
    if warps > 1:
        if thread % 32 == 0:
            partial[row, thread // 32] = value[0]
        T.sync_threads()
        value[0] = partial[row, 0]
        for w in T.unroll(1, warps):
            value[0] = T.max(value[0], partial[row, w]) if kind == "max" else value[0] + partial[row, w]


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})  # keeps 16-byte stores whole
def softmax_short_kernel(N, dtype, vec, threads, rows):
    """Compile for rows of N elements: `threads` threads a row, moving `vec` elements at a time; `rows` rows a CTA."""
    M = T.dynamic("M")
    x_stride, out_stride = T.dynamic("x_stride out_stride", "int64")
    warps = threads // 32
    chunks = -(-N // (threads * vec))
    full = rows == 1 and N % (threads * vec) == 0  # then no access needs a bounds check
    exp = T.exp if dtype == torch.float32 else T.__exp  # the cast to a 16-bit T hides the fast one's last bits

    @T.prim_func
    def softmax_short(
        x: T.StridedTensor((M, N), (x_stride, 1), dtype),
        out: T.StridedTensor((M, N), (out_stride, 1), dtype),
    ):
        with T.Kernel(T.ceildiv(M, rows), threads=(threads, rows)) as block:
            T.assume(x_stride % vec == 0)  # run() chose vec so; it lets the compiler use vector accesses
            T.assume(out_stride % vec == 0)
            thread, local_row = T.get_thread_binding(0), T.get_thread_binding(1)
            row = block * rows + local_row
            loaded = T.alloc_local((chunks, vec), dtype)
            values = T.alloc_local((chunks, vec), "float32")
            result = T.alloc_local((vec,), dtype)
            partial_max = T.alloc_shared((rows, warps), "float32")
            partial_sum = T.alloc_shared((rows, warps), "float32")
            top = T.alloc_local((1,), "float32")
            total = T.alloc_local((1,), "float32")

            for c in T.unroll(chunks):
                column = (c * threads + thread) * vec
                if not full:
                    for v in T.vectorized(vec):
                        loaded[c, v] = -T.infinity(dtype)
                if full or (row < M and column < N):
                    for v in T.vectorized(vec):
                        loaded[c, v] = x[row, column + v]
            top[0] = -T.infinity("float32")
            for c in T.unroll(chunks):
                for v in T.unroll(vec):
                    values[c, v] = T.cast(loaded[c, v], "float32")
                    top[0] = T.max(top[0], values[c, v])
            reduce_block("max", thread, local_row, warps, top, partial_max)

            total[0] = 0.0
            for c in T.unroll(chunks):
                for v in T.unroll(vec):
                    values[c, v] = exp(values[c, v] - top[0])
                    total[0] += values[c, v]
            reduce_block("sum", thread, local_row, warps, total, partial_sum)
            total[0] = 1.0 / total[0]

            for c in T.unroll(chunks):
                column = (c * threads + thread) * vec
                if full or (row < M and column < N):
                    for v in T.vectorized(vec):
                        result[v] = T.cast(values[c, v] * total[0], dtype)
                    for v in T.vectorized(vec):
                        out[row, column + v] = result[v]

    return softmax_short


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})  # keeps 16-byte stores whole
def softmax_long_kernel(N, dtype, vec, threads, repeat):
    """Compile for rows of N elements: a CTA of `threads` threads a row, with `repeat` loads of `vec` in flight each."""
    M = T.dynamic("M")
    x_stride, out_stride = T.dynamic("x_stride out_stride", "int64")
    warps = threads // 32
    steps = -(-N // (threads * vec * repeat))
    exp = T.exp if dtype == torch.float32 else T.__exp  # the cast to a 16-bit T hides the fast one's last bits

    @T.prim_func
    def softmax_long(
        x: T.StridedTensor((M, N), (x_stride, 1), dtype),
        out: T.StridedTensor((M, N), (out_stride, 1), dtype),
    ):
        with T.Kernel(M, threads=threads) as row:
            T.assume(x_stride % vec == 0)  # run() chose vec so; it lets the compiler use vector accesses
            T.assume(out_stride % vec == 0)
            thread = T.get_thread_binding(0)
            loaded = T.alloc_local((repeat, vec), dtype)
            result = T.alloc_local((vec,), dtype)
            partial_max = T.alloc_shared((1, warps), "float32")
            partial_sum = T.alloc_shared((1, warps), "float32")
            own_top = T.alloc_local((1,), "float32")
            top = T.alloc_local((1,), "float32")
            total = T.alloc_local((1,), "float32")
            safe = T.alloc_var("float32", init=0.0)

            own_top[0] = -T.infinity("float32")
            total[0] = 0.0
            for step in T.serial(steps):
                for i in T.unroll(repeat):
                    column = ((step * repeat + i) * threads + thread) * vec
                    for v in T.vectorized(vec):
                        loaded[i, v] = -T.infinity(dtype)
                    if column < N:
                        for v in T.vectorized(vec):
                            loaded[i, v] = x[row, column + v]
                top[0] = own_top[0]
                for i in T.unroll(repeat):
                    for v in T.unroll(vec):
                        top[0] = T.max(top[0], T.cast(loaded[i, v], "float32"))
                # While all is -inf, subtract 0: exp(-inf - 0) adds nothing, exp(-inf + inf) would be NaN.
                safe = T.if_then_else(top[0] == -T.infinity("float32"), 0.0, top[0])
                total[0] = total[0] * exp(own_top[0] - safe)
                for i in T.unroll(repeat):
                    for v in T.unroll(vec):
                        total[0] += exp(T.cast(loaded[i, v], "float32") - safe)
                own_top[0] = top[0]
            reduce_block("max", thread, 0, warps, top, partial_max)
            safe = T.if_then_else(top[0] == -T.infinity("float32"), 0.0, top[0])
            total[0] = total[0] * exp(own_top[0] - safe)
            reduce_block("sum", thread, 0, warps, total, partial_sum)
            total[0] = 1.0 / total[0]  # a row of -inf alone: 0 * (1 / 0) is NaN, as it should be

            for reverse in T.serial(steps):  # backwards, from the part of the row that the caches hold
                for i in T.unroll(repeat):
                    column = (((steps - 1 - reverse) * repeat + i) * threads + thread) * vec
                    if column < N:
                        for v in T.vectorized(vec):
                            loaded[i, v] = x[row, column + v]
                for i in T.unroll(repeat):
                    column = (((steps - 1 - reverse) * repeat + i) * threads + thread) * vec
                    if column < N:
                        for v in T.unroll(vec):
                            result[v] = T.cast(exp(T.cast(loaded[i, v], "float32") - safe) * total[0], dtype)
                        for v in T.vectorized(vec):
                            out[row, column + v] = result[v]

    return softmax_long


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})  # keeps 16-byte stores whole
def softmax_stats_kernel(N, dtype, vec, threads, chunks):
    """Compile for rows of N elements in pieces of threads * chunks * vec: stats[row, piece] = its maximum and its sum."""
    M, x_stride = T.dynamic("M"), T.dynamic("x_stride", "int64")
    warps = threads // 32
    pieces = -(-N // (threads * chunks * vec))
    exp = T.exp if dtype == torch.float32 else T.__exp  # the cast to a 16-bit T hides the fast one's last bits

    @T.prim_func
    def softmax_stats(
        x: T.StridedTensor((M, N), (x_stride, 1), dtype),
        stats: T.Tensor((M, pieces, 2), "float32"),
    ):
        with T.Kernel(M * pieces, threads=threads) as block:
            T.assume(x_stride % vec == 0)  # run() chose vec so; it lets the compiler use vector accesses
            thread = T.get_thread_binding(0)
            row, piece = block // pieces, block % pieces
            loaded = T.alloc_local((chunks, vec), dtype)
            partial_max = T.alloc_shared((1, warps), "float32")
            partial_sum = T.alloc_shared((1, warps), "float32")
            top = T.alloc_local((1,), "float32")
            total = T.alloc_local((1,), "float32")
            safe = T.alloc_var("float32", init=0.0)

            for c in T.unroll(chunks):
                column = ((piece * chunks + c) * threads + thread) * vec
                for v in T.vectorized(vec):
                    loaded[c, v] = -T.infinity(dtype)
                if column < N:
                    for v in T.vectorized(vec):
                        loaded[c, v] = x[row, column + v]
            top[0] = -T.infinity("float32")
            for c in T.unroll(chunks):
                for v in T.unroll(vec):
                    top[0] = T.max(top[0], T.cast(loaded[c, v], "float32"))
            reduce_block("max", thread, 0, warps, top, partial_max)
            safe = T.if_then_else(top[0] == -T.infinity("float32"), 0.0, top[0])
            total[0] = 0.0
            for c in T.unroll(chunks):
                for v in T.unroll(vec):
                    total[0] += exp(T.cast(loaded[c, v], "float32") - safe)
            reduce_block("sum", thread, 0, warps, total, partial_sum)
            if thread == 0:
                stats[row, piece, 0] = top[0]
                stats[row, piece, 1] = total[0]

    return softmax_stats


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})  # keeps 16-byte stores whole
def softmax_piece_kernel(N, dtype, vec, threads, chunks):
    """Compile what follows softmax_stats_kernel: every warp combines the statistics of its row, in the same order."""
    M = T.dynamic("M")
    x_stride, out_stride = T.dynamic("x_stride out_stride", "int64")
    pieces = -(-N // (threads * chunks * vec))
    exp = T.exp if dtype == torch.float32 else T.__exp

    @T.prim_func
    def softmax_piece(
        x: T.StridedTensor((M, N), (x_stride, 1), dtype),
        stats: T.Tensor((M, pieces, 2), "float32"),
        out: T.StridedTensor((M, N), (out_stride, 1), dtype),
    ):
        with T.Kernel(M * pieces, threads=threads) as block:
            T.assume(x_stride % vec == 0)
            T.assume(out_stride % vec == 0)
            thread = T.get_thread_binding(0)
            row, piece = block // pieces, block % pieces
            loaded = T.alloc_local((chunks, vec), dtype)
            result = T.alloc_local((vec,), dtype)
            top = T.alloc_var("float32", init=0.0)
            total = T.alloc_var("float32", init=0.0)

            for c in T.unroll(chunks):  # asked for now, so that it arrives while the statistics are combined
                column = ((piece * chunks + c) * threads + thread) * vec
                if column < N:
                    for v in T.vectorized(vec):
                        loaded[c, v] = x[row, column + v]
            top = -T.infinity("float32")
            for step in T.serial(T.ceildiv(pieces, 32)):
                if step * 32 + thread % 32 < pieces:
                    top = T.max(top, stats[row, step * 32 + thread % 32, 0])
            top = T.warp_reduce_max(top)
            top = T.if_then_else(top == -T.infinity("float32"), 0.0, top)
            for step in T.serial(T.ceildiv(pieces, 32)):
                if step * 32 + thread % 32 < pieces:
                    total += stats[row, step * 32 + thread % 32, 1] * exp(stats[row, step * 32 + thread % 32, 0] - top)
            total = 1.0 / T.warp_reduce_sum(total)  # a row of -inf alone: 0 * (1 / 0) is NaN, as it should be

            for c in T.unroll(chunks):
                column = ((piece * chunks + c) * threads + thread) * vec
                if column < N:
                    for v in T.unroll(vec):
                        result[v] = T.cast(exp(T.cast(loaded[c, v], "float32") - top) * total, dtype)
                    for v in T.vectorized(vec):
                        out[row, column + v] = result[v]

    return softmax_piece


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True, "tl.enable_fast_math": True})
def softmax_cluster_kernel(N, dtype, threads, chunks, per_sm, clusters):
    """Compile for rows of N 16-bit elements in the registers of CLUSTER CTAs: `chunks` vectors of 8 a thread.

    The rows are shared out over `clusters` clusters; while one works on a row, its next one arrives in shared memory.
    With `clusters` = 0 each row has a cluster of its own, which reads it straight into registers.
    """
    M = T.dynamic("M")
    x_stride, out_stride = T.dynamic("x_stride out_stride", "int64")
    warps = threads // 32
    parts = CLUSTER * warps  # a multiple of 32

    @T.prim_func
    def softmax_cluster(
        x: T.StridedTensor((M, N), (x_stride, 1), dtype),
        stats: T.Tensor((M, parts, 2), "float32"),
        out: T.StridedTensor((M, N), (out_stride, 1), dtype),
    ):
        with T.Kernel((clusters if clusters else M) * CLUSTER, threads=threads, cluster_dims=CLUSTER) as block:
            T.annotate_min_blocks_per_sm(per_sm)
            T.assume(x_stride % 8 == 0)
            T.assume(out_stride % 8 == 0)
            thread = T.get_thread_binding(0)
            first, piece = block // CLUSTER, block % CLUSTER
            arriving = T.alloc_shared((chunks if clusters else 1, threads, 8), dtype)
            loaded = T.alloc_local((chunks, 8), dtype)
            values = T.alloc_local((chunks, 8), "float32")
            result = T.alloc_local((8,), dtype)
            own = T.alloc_local((1,), "float32")
            slope = T.alloc_local((1,), "float32")
            offset = T.alloc_local((1,), "float32")
            undo = T.alloc_local((1,), "float32")
            top = T.alloc_local((1,), "float32")
            safe = T.alloc_local((1,), "float32")
            total = T.alloc_local((1,), "float32")
            part_top = T.alloc_local((parts // 32,), "float32")
            part_sum = T.alloc_local((parts // 32,), "float32")

            if clusters:
                for c in T.unroll(chunks):
                    column = ((piece * chunks + c) * threads + thread) * 8
                    if column < N:
                        if first < M:
                            T.ptx_cp_async(
                                T.access_ptr(arriving[c, thread, 0], "w", 8), T.access_ptr(x[first, column], "r", 8), 8
                            )
                    else:  # what no copy reaches stays as it is for all rows
                        for v in T.vectorized(8):
                            arriving[c, thread, v] = -T.infinity(dtype)
                T.ptx_commit_group()
            for turn in T.serial(T.ceildiv(M - first, clusters) if clusters else 1):
                row = first + turn * clusters
                if clusters:
                    T.ptx_wait_group(0)
                for c in T.unroll(chunks):
                    if clusters:
                        for v in T.vectorized(8):
                            loaded[c, v] = arriving[c, thread, v]
                    else:
                        column = ((piece * chunks + c) * threads + thread) * 8
                        for v in T.vectorized(8):
                            loaded[c, v] = -T.infinity(dtype)
                        if column < N:
                            for v in T.vectorized(8):
                                loaded[c, v] = x[row, column + v]
                # Each thread subtracts its own maximum: nobody waits before the exponentials, which are computed once.
                own[0] = -T.infinity("float32")
                for c in T.unroll(chunks):
                    for v in T.unroll(8):
                        own[0] = T.max(own[0], T.cast(loaded[c, v], "float32"))
                if clusters:
                    if row + clusters < M:  # a thread fills only what it has just emptied: no barrier
                        for c in T.unroll(chunks):
                            column = ((piece * chunks + c) * threads + thread) * 8
                            if column < N:
                                T.ptx_cp_async(
                                    T.access_ptr(arriving[c, thread, 0], "w", 8),
                                    T.access_ptr(x[row + clusters, column], "r", 8),
                                    8,
                                )
                    T.ptx_commit_group()
                safe[0] = T.if_then_else(own[0] == -T.infinity("float32"), 0.0, own[0])
                # exp(x - own) = 2 ** (slope * x - offset), one multiply-add. From 2 ** 20 on it would lose all precision,
                # or overflow; but there all smaller 16-bit values are at least 4096 smaller: any base gives 0 and 1.
                slope[0] = T.if_then_else(T.abs(safe[0]) < 1048576.0, LOG2E, 1.0)
                offset[0] = safe[0] * slope[0]
                undo[0] = T.exp2(-T.ieee_fmaf(safe[0], slope[0], -offset[0]))  # what the rounding of offset did
                total[0] = 0.0
                for c in T.unroll(chunks):
                    for v in T.unroll(8):
                        values[c, v] = T.exp2(T.cast(loaded[c, v], "float32") * slope[0] - offset[0])
                        total[0] += values[c, v]
                top[0] = T.warp_reduce_max(own[0])
                safe[0] = T.if_then_else(top[0] == -T.infinity("float32"), 0.0, top[0])
                total[0] = T.warp_reduce_sum(total[0] * undo[0] * T.exp2((own[0] - safe[0]) * LOG2E))
                if thread % 32 == 0:
                    stats[row, piece * warps + thread // 32, 0] = top[0]
                    stats[row, piece * warps + thread // 32, 1] = total[0]
                T.sync_threads()  # the cluster's barrier orders memory, but not for the compiler; these two do
                T.cluster_sync()
                T.sync_threads()
                top[0] = -T.infinity("float32")
                for p in T.unroll(parts // 32):
                    part_top[p] = stats[row, p * 32 + thread % 32, 0]
                    part_sum[p] = stats[row, p * 32 + thread % 32, 1]
                    top[0] = T.max(top[0], part_top[p])
                top[0] = T.warp_reduce_max(top[0])
                safe[0] = T.if_then_else(top[0] == -T.infinity("float32"), 0.0, top[0])
                total[0] = 0.0
                for p in T.unroll(parts // 32):
                    total[0] += part_sum[p] * T.exp2((part_top[p] - safe[0]) * LOG2E)
                total[0] = T.warp_reduce_sum(total[0])
                # A row of -inf alone: 0 * (1 / 0) is NaN, as it should be.
                total[0] = undo[0] * T.exp2((own[0] - safe[0]) * LOG2E) * (1.0 / total[0])
                for c in T.unroll(chunks):
                    column = ((piece * chunks + c) * threads + thread) * 8
                    if column < N:
                        for v in T.unroll(8):
                            result[v] = T.cast(values[c, v] * total[0], dtype)
                        for v in T.vectorized(8):
                            out[row, column + v] = result[v]

    return softmax_cluster


@functools.cache
def has_clusters(device):
    """True where CTAs can meet in clusters: from compute capability 9 on."""
    return torch.cuda.get_device_capability(device)[0] >= 9


@functools.cache
def shared_bytes(device):
    """Shared memory that one CTA may have."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


@functools.cache
def default_shape(N, vec):
    """Threads a row and rows a CTA: 16 elements a thread, four warps a CTA where a row needs fewer."""
    threads = min(1024, 32 * -(-N // (max(vec, 16) * 32)))
    return threads, max(1, 128 // threads)


def run(x, out, *, threads=None, rows=None, repeat=4, piece=None, cluster_threads=256, cluster_rows=8):
    """out = exp(x - max(x)) / sum(exp(x - max(x))) over the last axis, in float32, rounded to T once.

    x, out: [M, N] with last stride 1 (any row stride); T is bfloat16, float16 or float32. A row of at most
    threads * 32 elements is kept in the registers of `threads` threads (a multiple of 32), `rows` rows a CTA; a longer
    one is read twice: cut into pieces of `piece` elements (a multiple of 2048) with a CTA of 256 threads each, or, where
    `piece` is 0, by one CTA of 1024 threads, `repeat` vectors in flight each. None chooses threads and rows from N alone,
    and pieces where there are few rows. Where `piece` is 0, T has 16 bits, vectors are whole, the device has clusters and
    the row fits, it is read once into the registers of CLUSTER CTAs of `cluster_threads` (128, 256, 512; 0: never). Of
    more than CLUSTERS rows a cluster takes several, where shared memory has room for the next one while it works on one:
    at least `cluster_rows` (1: only one) where that leaves CLUSTERS clusters or more.
    """
    M, N = x.shape
    if M == 0:
        return
    dtype = x.dtype
    itemsize = dtype.itemsize
    # The widest power of two, at most 16 bytes, that divides the row, both strides and both addresses.
    bits = N | x.stride(0) | out.stride(0) | (x.data_ptr() | out.data_ptr()) // itemsize | 16 // itemsize
    vec = bits & -bits
    if threads is None or rows is None:
        chosen = default_shape(N, vec)
        threads, rows = threads or chosen[0], rows or chosen[1]
    rows = min(rows, 1024 // threads)
    if threads * KEPT_ELEMENTS >= N:
        softmax_short_kernel(N, dtype, vec, threads, rows)(x, out)
        return
    if piece is None:
        piece = 4096 if M <= FEW_ROWS else 0
    if piece == 0 and cluster_threads and vec == 8 and has_clusters(x.device):
        chunks = -(-N // (CLUSTER * cluster_threads * 8))
        per_sm = 65536 // (cluster_threads * (8 * chunks + 20))  # about 20 registers beside the values
        if per_sm * cluster_threads >= 256 and chunks <= 16:
            ahead = cluster_rows > 1 and M > CLUSTERS and chunks * cluster_threads * 16 <= shared_bytes(x.device)
            # A power of two times CLUSTERS: the kernel is compiled for it.
            clusters = CLUSTERS << max(0, (M // (CLUSTERS * cluster_rows)).bit_length() - 1) if ahead else 0
            stats = torch.empty((M, CLUSTER * cluster_threads // 32, 2), dtype=torch.float32, device=x.device)
            softmax_cluster_kernel(N, dtype, cluster_threads, chunks, per_sm, clusters)(x, stats, out)
            return
    if piece == 0:
        softmax_long_kernel(N, dtype, vec, 1024, repeat)(x, out)
        return
    chunks = piece // (256 * vec)
    stats = torch.empty((M, -(-N // piece), 2), dtype=torch.float32, device=x.device)
    softmax_stats_kernel(N, dtype, vec, 256, chunks)(x, stats)
    softmax_piece_kernel(N, dtype, vec, 256, chunks)(x, stats, out)
