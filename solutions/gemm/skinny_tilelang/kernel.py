"""Products of at most 16 rows with weights as nn.Linear stores them, TileLang: bound by reading the weights once.

Two kernels for each operator. For one row, the threads of a CTA share K and add their dot products by way of shared memory.
For more, tensor cores multiply tiles of the weights by all rows of x, fetched several steps ahead.
"""

import functools

import tilelang
import tilelang.language as T

ROWS = 16
"""Rows of x of the kernel on tensor cores; what is missing is zero."""
FLAGS = {"tl.disable_tma_lower": True, "tl.disable_warp_specialized": True}
"""Asynchronous copies of 16 bytes a thread: without the copy engine, no warp waits for another one to fetch."""

ROW_FLAGS = {"tl.enable_lower_ldgstg": True}
"""Loads and stores by predicate, without a branch."""


# -- one row: dot products --------------------------------------------------------------------------------------------


@T.macro
def add_dots(x, w, sums, m, first, N, K, thread, dtype, vec, rows, threads):
    """Add to sums[r] this thread's share of row m of x times row first + r of w; rows past N repeat the last."""
    x_part = T.alloc_local((vec,), dtype)
    w_part = T.alloc_local((rows, vec), dtype)
    for step in T.serial(T.ceildiv(K, threads * vec)):
        if (step * threads + thread) * vec < K:
            for v in T.vectorized(vec):
                x_part[v] = x[m, (step * threads + thread) * vec + v]
            for r in T.unroll(rows):
                for v in T.vectorized(vec):
                    w_part[r, v] = w[T.min(first + r, N - 1), (step * threads + thread) * vec + v]
            for r in T.unroll(rows):
                for v in T.unroll(vec):
                    sums[r] += T.cast(x_part[v], "float32") * T.cast(w_part[r, v], "float32")


@T.macro
def spread(sums, parts, thread, rows):
    """Write the sum of each warp to parts[r, warp]; a barrier must follow."""
    for r in T.unroll(rows):
        sums[r] = T.warp_reduce_sum(sums[r])
    if thread % 32 == 0:
        for r in T.unroll(rows):
            parts[r, thread // 32] = sums[r]


@T.macro
def linear_row(x, w, out, parts, block, N, K, m, thread, dtype, vec, rows, threads):
    """Write rows * block and those after it of row m of x @ w.T."""
    sums = T.alloc_local((rows,), "float32")
    total = T.alloc_var("float32", init=0.0)
    for r in T.unroll(rows):
        sums[r] = 0.0
    add_dots(x, w, sums, m, block * rows, N, K, thread, dtype, vec, rows, threads)
    spread(sums, parts, thread, rows)
    T.sync_threads()
    if thread < rows and block * rows + thread < N:
        for warp in T.unroll(threads // 32):
            total += parts[thread, warp]
        out[m, block * rows + thread] = T.cast(total, dtype)


@functools.cache
@tilelang.jit(pass_configs=ROW_FLAGS)
def linear_row_kernel(dtype, vec, rows, threads):
    """Compile for any sizes; loads take `vec` elements, and a CTA has `rows` rows of the weight."""
    M, N, K = T.dynamic("M N K")
    x_stride, w_stride, out_stride = T.dynamic("x_stride w_stride out_stride", "int64")

    @T.prim_func
    def skinny_linear_row(
        x: T.StridedTensor((M, K), (x_stride, 1), dtype),
        w: T.StridedTensor((N, K), (w_stride, 1), dtype),
        out: T.StridedTensor((M, N), (out_stride, 1), dtype),
    ):
        with T.Kernel(T.ceildiv(N, rows), M, threads=threads) as (block, m):
            T.assume(x_stride % vec == 0)  # run_linear() chose vec so
            T.assume(w_stride % vec == 0)
            parts = T.alloc_shared((rows, threads // 32), "float32")
            linear_row(x, w, out, parts, block, N, K, m, T.get_thread_binding(0), dtype, vec, rows, threads)

    return skinny_linear_row


@functools.cache
@tilelang.jit(pass_configs=ROW_FLAGS)
def qkv_row_kernel(dtype, vec, rows, threads):
    """Compile for any sizes: CTAs of q first, then of k, then of v."""
    M, NQ, NK, NV, K = T.dynamic("M NQ NK NV K")
    x_stride, wq_stride, wk_stride, wv_stride = T.dynamic("x_stride wq_stride wk_stride wv_stride", "int64")
    q_stride, k_stride, v_stride = T.dynamic("q_stride k_stride v_stride", "int64")

    @T.prim_func
    def skinny_qkv_row(
        x: T.StridedTensor((M, K), (x_stride, 1), dtype),
        wq: T.StridedTensor((NQ, K), (wq_stride, 1), dtype),
        wk: T.StridedTensor((NK, K), (wk_stride, 1), dtype),
        wv: T.StridedTensor((NV, K), (wv_stride, 1), dtype),
        q: T.StridedTensor((M, NQ), (q_stride, 1), dtype),
        k: T.StridedTensor((M, NK), (k_stride, 1), dtype),
        v: T.StridedTensor((M, NV), (v_stride, 1), dtype),
    ):
        with T.Kernel(T.ceildiv(NQ, rows) + T.ceildiv(NK, rows) + T.ceildiv(NV, rows), M, threads=threads) as (n, m):
            T.assume(x_stride % vec == 0)  # run_qkv() chose vec so
            T.assume(wq_stride % vec == 0)
            T.assume(wk_stride % vec == 0)
            T.assume(wv_stride % vec == 0)
            parts = T.alloc_shared((rows, threads // 32), "float32")
            thread = T.get_thread_binding(0)
            of_q, of_k = T.ceildiv(NQ, rows), T.ceildiv(NK, rows)
            if n < of_q:
                linear_row(x, wq, q, parts, n, NQ, K, m, thread, dtype, vec, rows, threads)
            elif n < of_q + of_k:
                linear_row(x, wk, k, parts, n - of_q, NK, K, m, thread, dtype, vec, rows, threads)
            else:
                linear_row(x, wv, v, parts, n - of_q - of_k, NV, K, m, thread, dtype, vec, rows, threads)

    return skinny_qkv_row


@functools.cache
@tilelang.jit(pass_configs=ROW_FLAGS)
def swiglu_row_kernel(dtype, vec, rows, threads):
    """Compile for any sizes; a CTA has `rows` rows of both weights."""
    M, I, K = T.dynamic("M I K")
    x_stride, wg_stride, wu_stride, out_stride = T.dynamic("x_stride wg_stride wu_stride out_stride", "int64")

    @T.prim_func
    def skinny_swiglu_row(
        x: T.StridedTensor((M, K), (x_stride, 1), dtype),
        wg: T.StridedTensor((I, K), (wg_stride, 1), dtype),
        wu: T.StridedTensor((I, K), (wu_stride, 1), dtype),
        out: T.StridedTensor((M, I), (out_stride, 1), dtype),
    ):
        with T.Kernel(T.ceildiv(I, rows), M, threads=threads) as (block, m):
            T.assume(x_stride % vec == 0)  # run_swiglu() chose vec so
            T.assume(wg_stride % vec == 0)
            T.assume(wu_stride % vec == 0)
            thread = T.get_thread_binding(0)
            gates = T.alloc_shared((rows, threads // 32), "float32")
            ups = T.alloc_shared((rows, threads // 32), "float32")
            x_part = T.alloc_local((vec,), dtype)
            g_part = T.alloc_local((rows, vec), dtype)
            u_part = T.alloc_local((rows, vec), dtype)
            of_gate = T.alloc_local((rows,), "float32")
            of_up = T.alloc_local((rows,), "float32")
            gate = T.alloc_var("float32", init=0.0)
            up = T.alloc_var("float32", init=0.0)
            for r in T.unroll(rows):
                of_gate[r] = 0.0
                of_up[r] = 0.0
            for step in T.serial(T.ceildiv(K, threads * vec)):
                if (step * threads + thread) * vec < K:
                    for v in T.vectorized(vec):
                        x_part[v] = x[m, (step * threads + thread) * vec + v]
                    for r in T.unroll(rows):  # all loads first: they overlap
                        for v in T.vectorized(vec):
                            g_part[r, v] = wg[T.min(block * rows + r, I - 1), (step * threads + thread) * vec + v]
                        for v in T.vectorized(vec):
                            u_part[r, v] = wu[T.min(block * rows + r, I - 1), (step * threads + thread) * vec + v]
                    for r in T.unroll(rows):
                        for v in T.unroll(vec):
                            of_gate[r] += T.cast(x_part[v], "float32") * T.cast(g_part[r, v], "float32")
                            of_up[r] += T.cast(x_part[v], "float32") * T.cast(u_part[r, v], "float32")
            spread(of_gate, gates, thread, rows)
            spread(of_up, ups, thread, rows)
            T.sync_threads()
            if thread < rows and block * rows + thread < I:
                for warp in T.unroll(threads // 32):
                    gate += gates[thread, warp]
                    up += ups[thread, warp]
                # The roundings of a model: both products, silu, and the result.
                gate = T.cast(T.cast(gate, dtype), "float32")
                gate = T.cast(T.cast(gate / (1.0 + T.exp(-gate)), dtype), "float32")
                out[m, block * rows + thread] = T.cast(gate * T.cast(T.cast(up, dtype), "float32"), dtype)

    return skinny_swiglu_row


# -- up to 16 rows: tensor cores --------------------------------------------------------------------------------------


@T.macro
def linear_rows(x, w, out, x_tile, w_tile, sums, block, M, N, K, block_N, block_K, stages):
    """Write columns block * block_N and those after it of x @ w.T: w's rows fill the tensor cores."""
    T.clear(sums)
    for step in T.Pipelined(T.ceildiv(K, block_K), num_stages=stages):
        T.copy(x[0, step * block_K], x_tile)
        T.copy(w[block * block_N, step * block_K], w_tile)
        T.gemm(w_tile, x_tile, sums, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
    for i, j in T.Parallel(block_N, ROWS):
        if j < M and block * block_N + i < N:
            out[j, block * block_N + i] = sums[i, j]


@functools.cache
@tilelang.jit(pass_configs=FLAGS)
def linear_rows_kernel(K, dtype, block_N, block_K, stages):
    """Compile for rows of K elements, all aligned to 16 bytes. N is dynamic, as are the strides."""
    M, N = T.dynamic("M N")
    x_stride, w_stride, out_stride = T.dynamic("x_stride w_stride out_stride", "int64")

    @T.prim_func
    def skinny_linear_rows(
        x: T.StridedTensor((M, K), (x_stride, 1), dtype),
        w: T.StridedTensor((N, K), (w_stride, 1), dtype),
        out: T.StridedTensor((M, N), (out_stride, 1), dtype),
    ):
        with T.Kernel(T.ceildiv(N, block_N), threads=2 * block_N) as block:
            T.assume(x_stride % 8 == 0)  # run_linear() checked it
            T.assume(w_stride % 8 == 0)
            x_tile = T.alloc_shared((ROWS, block_K), dtype)
            w_tile = T.alloc_shared((block_N, block_K), dtype)
            sums = T.alloc_fragment((block_N, ROWS), "float32")
            linear_rows(x, w, out, x_tile, w_tile, sums, block, M, N, K, block_N, block_K, stages)

    return skinny_linear_rows


@functools.cache
@tilelang.jit(pass_configs=FLAGS)
def qkv_rows_kernel(K, dtype, block_N, block_K, stages):
    """Compile for rows of K elements, all aligned to 16 bytes: CTAs of q first, then of k, then of v."""
    M, NQ, NK, NV = T.dynamic("M NQ NK NV")
    x_stride, wq_stride, wk_stride, wv_stride = T.dynamic("x_stride wq_stride wk_stride wv_stride", "int64")
    q_stride, k_stride, v_stride = T.dynamic("q_stride k_stride v_stride", "int64")

    @T.prim_func
    def skinny_qkv_rows(
        x: T.StridedTensor((M, K), (x_stride, 1), dtype),
        wq: T.StridedTensor((NQ, K), (wq_stride, 1), dtype),
        wk: T.StridedTensor((NK, K), (wk_stride, 1), dtype),
        wv: T.StridedTensor((NV, K), (wv_stride, 1), dtype),
        q: T.StridedTensor((M, NQ), (q_stride, 1), dtype),
        k: T.StridedTensor((M, NK), (k_stride, 1), dtype),
        v: T.StridedTensor((M, NV), (v_stride, 1), dtype),
    ):
        with T.Kernel(
            T.ceildiv(NQ, block_N) + T.ceildiv(NK, block_N) + T.ceildiv(NV, block_N), threads=2 * block_N
        ) as n:
            T.assume(x_stride % 8 == 0)  # run_qkv() checked it
            T.assume(wq_stride % 8 == 0)
            T.assume(wk_stride % 8 == 0)
            T.assume(wv_stride % 8 == 0)
            x_tile = T.alloc_shared((ROWS, block_K), dtype)
            w_tile = T.alloc_shared((block_N, block_K), dtype)
            sums = T.alloc_fragment((block_N, ROWS), "float32")
            of_q, of_k = T.ceildiv(NQ, block_N), T.ceildiv(NK, block_N)
            if n < of_q:
                linear_rows(x, wq, q, x_tile, w_tile, sums, n, M, NQ, K, block_N, block_K, stages)
            elif n < of_q + of_k:
                linear_rows(x, wk, k, x_tile, w_tile, sums, n - of_q, M, NK, K, block_N, block_K, stages)
            else:
                linear_rows(x, wv, v, x_tile, w_tile, sums, n - of_q - of_k, M, NV, K, block_N, block_K, stages)

    return skinny_qkv_rows


@functools.cache
@tilelang.jit(pass_configs=FLAGS)
def swiglu_rows_kernel(K, dtype, block_N, block_K, stages):
    """Compile for rows of K elements, all aligned to 16 bytes; a CTA has block_N rows of both weights."""
    M, I = T.dynamic("M I")
    x_stride, wg_stride, wu_stride, out_stride = T.dynamic("x_stride wg_stride wu_stride out_stride", "int64")
    policy = T.GemmWarpPolicy.FullRow

    @T.prim_func
    def skinny_swiglu_rows(
        x: T.StridedTensor((M, K), (x_stride, 1), dtype),
        wg: T.StridedTensor((I, K), (wg_stride, 1), dtype),
        wu: T.StridedTensor((I, K), (wu_stride, 1), dtype),
        out: T.StridedTensor((M, I), (out_stride, 1), dtype),
    ):
        with T.Kernel(T.ceildiv(I, block_N), threads=2 * block_N) as block:
            T.assume(x_stride % 8 == 0)  # run_swiglu() checked it
            T.assume(wg_stride % 8 == 0)
            T.assume(wu_stride % 8 == 0)
            x_tile = T.alloc_shared((ROWS, block_K), dtype)
            g_tile = T.alloc_shared((block_N, block_K), dtype)
            u_tile = T.alloc_shared((block_N, block_K), dtype)
            gate = T.alloc_fragment((block_N, ROWS), "float32")
            up = T.alloc_fragment((block_N, ROWS), "float32")
            T.clear(gate)
            T.clear(up)
            for step in T.Pipelined(T.ceildiv(K, block_K), num_stages=stages):
                T.copy(x[0, step * block_K], x_tile)
                T.copy(wg[block * block_N, step * block_K], g_tile)
                T.copy(wu[block * block_N, step * block_K], u_tile)
                T.gemm(g_tile, x_tile, gate, transpose_B=True, policy=policy)
                T.gemm(u_tile, x_tile, up, transpose_B=True, policy=policy)
            # The roundings of a model: both products, silu, and the result.
            for i, j in T.Parallel(block_N, ROWS):
                gate[i, j] = T.cast(T.cast(gate[i, j], dtype), "float32")
                up[i, j] = T.cast(T.cast(up[i, j], dtype), "float32")
                gate[i, j] = T.cast(T.cast(gate[i, j] / (1.0 + T.exp(-gate[i, j])), dtype), "float32")
                if j < M and block * block_N + i < I:
                    out[j, block * block_N + i] = T.cast(gate[i, j] * up[i, j], dtype)

    return skinny_swiglu_rows


# -- which, and how large ---------------------------------------------------------------------------------------------


def is_aligned(tensor):
    """Whether every row begins at a multiple of 16 bytes."""
    return tensor.data_ptr() % 16 == 0 and tensor.stride(0) * tensor.element_size() % 16 == 0


def widest(K, *tensors):
    """How many elements a load may take from rows of K elements of all these tensors: 16 bytes, or one element."""
    full = 16 // tensors[0].element_size()
    return full if K % full == 0 and all(is_aligned(tensor) for tensor in tensors) else 1


def chosen(kernels, x, weights, sizes, tile, rows, threads):
    """Choose one of two kernels (for one row, for several) and its constants, and compile it."""
    one, several = kernels
    K, vec = x.shape[1], widest(x.shape[1], x, *weights)
    dtype = str(x.dtype).removeprefix("torch.")
    if x.shape[0] == 1 or vec != 8:  # float32, and what is not aligned, row by row: the weights stay in L2
        return one(dtype, vec, rows, threads)
    # Some 100 KB of shared memory, so that two CTAs fit; tiles of 64 rows read x half as often.
    products = 2 if kernels is SWIGLU else 1
    block_N = tile or (64 // products if sum(sizes) >= 64 * 132 else 32)
    block_K = 256 if block_N * products <= 32 else 128
    return several(K, dtype, block_N, block_K, 4)


LINEAR = (linear_row_kernel, linear_rows_kernel)
QKV = (qkv_row_kernel, qkv_rows_kernel)
SWIGLU = (swiglu_row_kernel, swiglu_rows_kernel)


def run_linear(a, b, out, *, TILE=None, ROW=4, THREADS=128):
    """out = T(a @ b.T), sums in float32.

    Shapes: a [M, K], b [N, K], out [M, N]; unit last stride, any row stride; M <= 16; T bfloat16, float16 or float32.
    TILE: rows of b a CTA for more than one row (None: by shape). ROW, THREADS: rows of b and threads a CTA for one row.
    """
    if out.numel():
        chosen(LINEAR, a, (b,), (b.shape[0],), TILE, ROW, THREADS)(a, b, out)


def run_swiglu(x, wg, wu, out, *, TILE=None, ROW=2, THREADS=128):
    """out = T(T(silu(T(x @ wg.T))) * T(x @ wu.T)), sums in float32.

    Shapes: x [M, K], wg and wu [I, K], out [M, I]; unit last stride, any row stride; M <= 16.
    """
    if out.numel():
        chosen(SWIGLU, x, (wg, wu), (wg.shape[0],), TILE, ROW, THREADS)(x, wg, wu, out)


def run_qkv(x, wq, wk, wv, q, k, v, *, TILE=None, ROW=4, THREADS=128):
    """q, k, v = T(x @ wq.T), T(x @ wk.T), T(x @ wv.T) in one launch, sums in float32.

    Shapes: x [M, K], wq [NQ, K], wk [NK, K], wv [NV, K], q [M, NQ], k [M, NK], v [M, NV]; unit last stride; M <= 16.
    """
    if x.shape[0]:
        sizes = wq.shape[0], wk.shape[0], wv.shape[0]
        chosen(QKV, x, (wq, wk, wv), sizes, TILE, ROW, THREADS)(x, wq, wk, wv, q, k, v)
