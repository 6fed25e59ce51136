"""out = a @ b.T in TileLang: a persistent TMA + tensor-core kernel, and a transposed one for a few rows of a."""

import functools

import tilelang
import tilelang.language as T
import torch


def one_warp_fetches(warps, tiles, stages, before=(), persistent=False):
    """A schedule in which `warps` warps multiply and one more fetches by TMA, `stages` tiles ahead.

    Without it TileLang lets four warps wait for room and one of them fetch. Nothing waits for the other three: where one looks
    at a barrier late, as it may when two processes share the GPU, the barrier has gone on by two turns, which looks like none.
    It then waits for a turn that never comes, and the kernel does not end. One warp alone cannot be late for itself.
    """
    fetch = [*before, "steps"]
    multiply = [*before, "clear", "steps", "store"]
    scopes = [
        T.WSScope(
            "steps",
            {
                "fetcher": [
                    T.WSSync.producer_acquire("tiles"),
                    "fetch_a",
                    "fetch_b",
                    T.WSSync.producer_commit("tiles"),
                ],
                "multiplier": [T.WSSync.consumer_wait("tiles"), "multiply", T.WSSync.consumer_release("tiles")],
            },
        ),
    ]
    if persistent:
        scopes.append(T.WSScope("waves", {"fetcher": fetch, "multiplier": multiply}))
        fetch = multiply = ["waves"]
    scopes.append(T.WSScope(T.WSScope.ROOT, {"fetcher": fetch, "multiplier": multiply}))
    roles = [
        T.WSRole("multiplier", warps_lo=0, warps_hi=warps),
        T.WSRole("fetcher", warps_lo=warps, warps_hi=warps + 1),
    ]
    pipelines = [T.WSPipeline("tiles", tiles, depth=stages)]
    return T.WSSchedule(num_warps=-(-(warps + 1) // 4) * 4, roles=roles, pipelines=pipelines, scopes=scopes)


@functools.cache
@tilelang.jit
def gemm_dense_kernel(N, K, dtype, block_M, block_N, block_K, stages, group, split, tma_store, multiprocessors):
    """Compile the kernel for many rows: one CTA a multiprocessor walks over the output tiles.

    One warp fetches tiles of a and b by TMA, eight multiply; the fetching runs ahead into the next output tile.
    Tiles go in bands of `group` rows of tiles, so that the tiles in flight share their operands in L2. With split > 1,
    K is cut into `split` parts of which each writes its float32 sums to `out[part]`.
    """
    M = T.dynamic("M")
    a_stride, b_stride, out_stride = T.dynamic("a_stride b_stride out_stride", "int64")
    steps = -(-K // (block_K * split))
    policy = T.GemmWarpPolicy.FullRow if block_M == 128 else T.GemmWarpPolicy.FullCol
    one_out, partial_out = T.StridedTensor((M, N), (out_stride, 1), dtype), T.Tensor((split, M, N), "float32")

    @T.prim_func
    def gemm_dense(
        a: T.StridedTensor((M, K), (a_stride, 1), dtype),
        b: T.StridedTensor((N, K), (b_stride, 1), dtype),
        out: one_out if split == 1 else partial_out,
    ):
        with T.Kernel(multiprocessors, threads=256) as block:
            T.assume(a_stride % 8 == 0)  # TMA wants rows aligned to 16 bytes; run() checked it
            T.assume(b_stride % 8 == 0)
            if tma_store:
                T.assume(out_stride % 8 == 0)
            a_tile = T.alloc_shared((block_M, block_K), dtype)
            b_tile = T.alloc_shared((block_N, block_K), dtype)
            out_tile = T.alloc_shared((block_M, 128), dtype)  # a slice of the result: leaves room for another stage
            sums = T.alloc_fragment((block_M, block_N), "float32")
            m = T.alloc_var("int32")  # variables, or every step of the loop over K would compute them again
            n = T.alloc_var("int32")
            part = T.alloc_var("int32")
            tiles_M, tiles_N = T.ceildiv(M, block_M), T.ceildiv(N, block_N)

            T.annotate_ws_schedule(one_warp_fetches(8, [a_tile, b_tile], stages, before=["place"], persistent=True))
            for wave in T.serial(
                T.ceildiv(tiles_M * tiles_N * split - block, multiprocessors), annotations={T.WSID: "waves"}
            ):
                index = wave * multiprocessors + block
                tile = index // split
                band = tile // (group * tiles_N)
                rows = T.min(group, tiles_M - band * group)
                with T.ws_op("place"):
                    m = band * group + tile % (group * tiles_N) % rows
                    n = tile % (group * tiles_N) // rows
                    part = index % split
                T.clear(sums, annotations={T.WSID: "clear"})
                for k in T.Pipelined(steps, num_stages=stages, annotations={T.WSID: "steps"}):
                    T.copy(a[m * block_M, (part * steps + k) * block_K], a_tile, annotations={T.WSID: "fetch_a"})
                    T.copy(b[n * block_N, (part * steps + k) * block_K], b_tile, annotations={T.WSID: "fetch_b"})
                    T.gemm(a_tile, b_tile, sums, transpose_B=True, policy=policy, annotations={T.WSID: "multiply"})
                if split > 1:
                    for i, j in T.Parallel(block_M, block_N, annotations={T.WSID: "store"}):
                        if m * block_M + i < M and n * block_N + j < N:
                            out[part, m * block_M + i, n * block_N + j] = sums[i, j]
                elif tma_store:
                    for p in T.unroll(block_N // 128, annotations={T.WSID: "store"}):
                        T.copy(sums[:, p * 128 : (p + 1) * 128], out_tile)
                        T.copy(out_tile, out[m * block_M, n * block_N + p * 128])
                else:
                    for i, j in T.Parallel(block_M, block_N, annotations={T.WSID: "store"}):
                        if m * block_M + i < M and n * block_N + j < N:
                            out[m * block_M + i, n * block_N + j] = sums[i, j]

    return gemm_dense


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def gemm_reduce_kernel(N, dtype, split, vec):
    """Compile out[m, n] = T(partial[0, m, n] + partial[1, m, n] + ...), always summed in this order."""
    M, out_stride = T.dynamic("M"), T.dynamic("out_stride", "int64")
    threads = 128

    @T.prim_func
    def gemm_reduce(
        partial: T.Tensor((split, M, N), "float32"),
        out: T.StridedTensor((M, N), (out_stride, 1), dtype),
    ):
        with T.Kernel(M, T.ceildiv(N, threads * vec), threads=threads) as (row, column_block):
            T.assume(out_stride % vec == 0)
            column = (column_block * threads + T.get_thread_binding(0)) * vec
            loaded = T.alloc_local((split, vec), "float32")
            result = T.alloc_local((vec,), dtype)
            if column < N:
                for s in T.unroll(split):
                    for v in T.vectorized(vec):
                        loaded[s, v] = partial[s, row, column + v]
                for s in T.unroll(1, split):
                    for v in T.vectorized(vec):
                        loaded[0, v] = loaded[0, v] + loaded[s, v]
                for v in T.vectorized(vec):
                    result[v] = T.cast(loaded[0, v], dtype)
                for v in T.vectorized(vec):
                    out[row, column + v] = result[v]

    return gemm_reduce


@functools.cache
@tilelang.jit
def gemm_skinny_kernel(N, K, dtype, block_M, block_N, block_K, stages):
    """Compile the kernel for block_M rows of a at most: it multiplies b by a.T, so that b's rows fill the tensor cores.

    Such a product only streams b: small tiles give every multiprocessor some, deep stages keep many bytes in flight.
    """
    M = T.dynamic("M")
    a_stride, b_stride, out_stride = T.dynamic("a_stride b_stride out_stride", "int64")
    policy = T.GemmWarpPolicy.FullRow

    @T.prim_func
    def gemm_skinny(
        a: T.StridedTensor((M, K), (a_stride, 1), dtype),
        b: T.StridedTensor((N, K), (b_stride, 1), dtype),
        out: T.StridedTensor((M, N), (out_stride, 1), dtype),
    ):
        with T.Kernel(T.ceildiv(N, block_N), T.ceildiv(M, block_M), threads=2 * block_N) as (n, m):
            T.assume(a_stride % 8 == 0)  # TMA wants rows aligned to 16 bytes; run() checked it
            T.assume(b_stride % 8 == 0)
            a_tile = T.alloc_shared((block_M, block_K), dtype)
            b_tile = T.alloc_shared((block_N, block_K), dtype)
            sums = T.alloc_fragment((block_N, block_M), "float32")
            T.annotate_ws_schedule(one_warp_fetches(block_N // 16, [a_tile, b_tile], stages))
            T.clear(sums, annotations={T.WSID: "clear"})
            for k in T.Pipelined(T.ceildiv(K, block_K), num_stages=stages, annotations={T.WSID: "steps"}):
                T.copy(a[m * block_M, k * block_K], a_tile, annotations={T.WSID: "fetch_a"})
                T.copy(b[n * block_N, k * block_K], b_tile, annotations={T.WSID: "fetch_b"})
                T.gemm(b_tile, a_tile, sums, transpose_B=True, policy=policy, annotations={T.WSID: "multiply"})
            for i, j in T.Parallel(block_N, block_M, annotations={T.WSID: "store"}):
                if m * block_M + j < M and n * block_N + i < N:
                    out[m * block_M + j, n * block_N + i] = sums[i, j]

    return gemm_skinny


@functools.cache
@tilelang.jit
def gemm_plain_kernel(K, dtype):
    """Compile the kernel for rows that TMA cannot address (not aligned to 16 bytes): one element a load, no overlap.

    N is dynamic, or a single row of b, which no stride moves, would be loaded as if it were aligned.
    """
    M, N = T.dynamic("M N")
    a_stride, b_stride, out_stride = T.dynamic("a_stride b_stride out_stride", "int64")
    block, block_K = 64, 32

    @T.prim_func
    def gemm_plain(
        a: T.StridedTensor((M, K), (a_stride, 1), dtype),
        b: T.StridedTensor((N, K), (b_stride, 1), dtype),
        out: T.StridedTensor((M, N), (out_stride, 1), dtype),
    ):
        with T.Kernel(T.ceildiv(N, block), T.ceildiv(M, block), threads=128) as (n, m):
            a_tile = T.alloc_shared((block, block_K), dtype)
            b_tile = T.alloc_shared((block, block_K), dtype)
            sums = T.alloc_fragment((block, block), "float32")
            T.clear(sums)
            for k in T.serial(T.ceildiv(K, block_K)):
                for i, j in T.Parallel(block, block_K):
                    a_tile[i, j] = T.if_then_else(
                        m * block + i < M and k * block_K + j < K, a[m * block + i, k * block_K + j], 0
                    )
                for i, j in T.Parallel(block, block_K):
                    b_tile[i, j] = T.if_then_else(
                        n * block + i < N and k * block_K + j < K, b[n * block + i, k * block_K + j], 0
                    )
                T.gemm(a_tile, b_tile, sums, transpose_B=True)
            for i, j in T.Parallel(block, block):
                if m * block + i < M and n * block + j < N:
                    out[m * block + i, n * block + j] = sums[i, j]

    return gemm_plain


@functools.cache
def multiprocessor_count(index):
    """Multiprocessors of a GPU; 132, those of an H100 or H200, where there is none (compiling without a GPU)."""
    return torch.cuda.get_device_properties(index).multi_processor_count if torch.cuda.is_available() else 132


@functools.lru_cache(maxsize=4096)
def default_tile(M, N, K, multiprocessors):
    """(block_M, block_N, split) whose busiest multiprocessor has the least to do, with K split where that evens it out."""
    if M <= 64:
        block_M, block_N = 64, 128
    else:
        block_M = 128
        waves = [-(-(-(-M // 128) * -(-N // width)) // multiprocessors) for width in (128, 256)]
        block_N = 256 if 7 * waves[1] <= 4 * waves[0] else 128  # a wave of the larger costs twice, less some reuse
    tiles = -(-M // block_M) * -(-N // block_N)

    def cost(split):
        # In steps of 64 along K: a part's float32 sums take about 11 to write and read, the second kernel 9 to start.
        rounds = -(-tiles * split // multiprocessors)
        return rounds * (K / 64 / split + 11 * (split > 1)) + 9 * (split > 1)

    return block_M, block_N, min(range(1, max(1, min(8, K // 512)) + 1), key=cost)


def run(a, b, out, *, block_M=None, block_N=None, split=None, block_K=None, group=8, skinny_M=None, skinny_N=None):
    """out = T(a @ b.T), summed in float32 on tensor cores.

    a: [M, K], b: [N, K], out: [M, N], last stride 1 (any row stride); T is bfloat16 or float16. Up to `skinny_M` rows
    (at most 64) are one tile of the skinny kernel, with `skinny_N` rows of b a CTA; more rows take the dense kernel
    with tiles of block_M x block_N (64 x 128, 128 x 128 or 128 x 256) and K cut into `split` parts where the tiles are
    few, which needs a workspace. None chooses by shape. Rows of a or b that are not aligned to 16 bytes take a plain
    kernel, which is slow.
    """
    M, N = out.shape
    K = a.shape[1]
    if M == 0 or N == 0:
        return
    dtype = a.dtype
    if (a.stride(0) | b.stride(0)) % 8 or (a.data_ptr() | b.data_ptr()) % 16:
        gemm_plain_kernel(K, dtype)(a, b, out)
        return
    multiprocessors = multiprocessor_count(a.device.index)
    if (skinny_M or (32 if 64 * multiprocessors >= N else 64)) >= M:
        if skinny_N is None:  # at least a CTA a multiprocessor where N allows, else fewer, larger ones that reuse a
            skinny_N = 16 if 16 * multiprocessors >= N else 32 if 64 * multiprocessors >= N else 64
        rows = 16 if M <= 16 else 32 if M <= 32 else 64
        skinny_K = 256 if rows + skinny_N <= 48 else 128
        stages = min(6, 96 * 1024 // ((rows + skinny_N) * skinny_K * 2))  # leaves room for two CTAs
        gemm_skinny_kernel(N, K, dtype, rows, skinny_N, skinny_K, stages)(a, b, out)
        return
    if block_M is None or block_N is None or split is None:
        chosen = default_tile(M, N, K, multiprocessors)
        block_M, block_N, split = block_M or chosen[0], block_N or chosen[1], split or chosen[2]
    if block_K is None:  # few rows are bound by reading b: 256 bytes of a row at a time
        block_K = 128 if M <= 128 else 64
    stages = min(6, 192 * 1024 // ((block_M + block_N) * block_K * 2))
    out_aligned = out.stride(0) % 8 == 0 and out.data_ptr() % 16 == 0
    # The copy engine writes whole 16 bytes, and so beyond the last column of a row that ends elsewhere.
    copied_out = out_aligned and N % 8 == 0 and split == 1
    kernel = gemm_dense_kernel(
        N, K, dtype, block_M, block_N, block_K, stages, group, split, copied_out, multiprocessors
    )
    if split == 1:
        kernel(a, b, out)
        return
    partial = torch.empty((split, M, N), dtype=torch.float32, device=a.device)
    kernel(a, b, partial)
    gemm_reduce_kernel(N, dtype, split, 4 if out_aligned and N % 4 == 0 else 1)(partial, out)
