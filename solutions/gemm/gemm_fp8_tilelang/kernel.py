"""Linear layers of FP8 codes with a scale a block, in TileLang: sums go to float32 after each block of 128 channels."""

import functools

import tilelang
import tilelang.language as T
import torch

GROUP = 128  # channels that share a scale, and rows of b
CODE = "float8_e4m3fn"


def one_warp_fetches(warps, tiles, stages, step, before=(), after=("store",), waves=False, registers=(0, 0)):
    """A schedule in which `warps` warps multiply and one more fetches by TMA, `stages` tiles ahead.

    Without it TileLang lets four warps wait for room and one of them fetch. Nothing waits for the other three: where one looks
    at a barrier late, as it may when two processes share the GPU, the barrier has gone on by two turns, which looks like none.
    It then waits for a turn that never comes, and the kernel does not end. One warp alone cannot be late for itself.
    `step` lists what those that multiply do with a tile, "wait" and "release" among it; `registers` are those of a thread
    that multiplies and of one that fetches, 0 for what the compiler gives them. With `waves`, tiles of the result follow one
    another, each after its "place" is found.
    """
    sync = {"wait": T.WSSync.consumer_wait("tiles"), "release": T.WSSync.consumer_release("tiles")}
    place = ["place"] if waves else []
    fetch, multiply = [*place, "steps"], [*place, *before, "steps", *after]
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
                "multiplier": [sync.get(name, name) for name in step],
            },
        ),
    ]
    if waves:
        scopes.append(T.WSScope("waves", {"fetcher": fetch, "multiplier": multiply}))
        fetch = multiply = ["waves"]
    scopes.append(T.WSScope(T.WSScope.ROOT, {"fetcher": fetch, "multiplier": multiply}))
    roles = [
        T.WSRole("multiplier", warps_lo=0, warps_hi=warps, max_nreg=registers[0]),
        T.WSRole("fetcher", warps_lo=warps, warps_hi=warps + 1, max_nreg=registers[1]),
    ]
    pipelines = [T.WSPipeline("tiles", tiles, depth=stages)]
    return T.WSSchedule(num_warps=-(-(warps + 1) // 4) * 4, roles=roles, pipelines=pipelines, scopes=scopes)


@functools.cache
@tilelang.jit
def gemm_fp8_dense_kernel(N, K, block_M, block_N, stages, group, split, tma_store, multiprocessors):
    """Compile the kernel for many rows: one CTA a multiprocessor walks over the output tiles.

    One warp fetches tiles of a and b by TMA, the others multiply. Tensor cores add a block of 128 channels, whose sums
    are then scaled and added in registers. Tiles go in bands of `group` rows of tiles, so that those in flight share their
    operands in L2. With split > 1, K is cut into `split` parts of which each writes its float32 sums to `out[part]`.
    """
    M = T.dynamic("M")
    a_stride, b_stride, out_stride = T.dynamic("a_stride b_stride out_stride", "int64")
    a_row, a_column, b_row, b_column = T.dynamic("a_row a_column b_row b_column", "int64")
    blocks = -(-K // GROUP)
    steps = -(-blocks // split)
    one_out, partial_out = T.StridedTensor((M, N), (out_stride, 1), "bfloat16"), T.Tensor((split, M, N), "float32")

    @T.prim_func
    def gemm_fp8_dense(
        a: T.StridedTensor((M, K), (a_stride, 1), CODE),
        b: T.StridedTensor((N, K), (b_stride, 1), CODE),
        scale_a: T.StridedTensor((M, blocks), (a_row, a_column), "float32"),
        scale_b: T.StridedTensor((-(-N // GROUP), blocks), (b_row, b_column), "float32"),
        out: one_out if split == 1 else partial_out,
    ):
        with T.Kernel(multiprocessors, threads=2 * block_M) as block:
            T.assume(a_stride % 16 == 0)  # TMA wants rows aligned to 16 bytes; run() checked it
            T.assume(b_stride % 16 == 0)
            if tma_store:
                T.assume(out_stride % 8 == 0)
            a_tile = T.alloc_shared((block_M, GROUP), CODE)
            b_tile = T.alloc_shared((block_N, GROUP), CODE)
            out_tile = T.alloc_shared((block_M, block_N), "bfloat16")
            sums = T.alloc_fragment((block_M, block_N), "float32")
            total = T.alloc_fragment((block_M, block_N), "float32")
            scale = T.alloc_fragment((block_M,), "float32")
            m = T.alloc_var("int32")  # variables, or every step of the loop over K would compute them again
            n = T.alloc_var("int32")
            part = T.alloc_var("int32")
            tiles_M, tiles_N = T.ceildiv(M, block_M), T.ceildiv(N, block_N)

            step = ["scale", "wait", "multiply", "release", "add"]
            T.annotate_ws_schedule(
                one_warp_fetches(block_M // 16, [a_tile, b_tile], stages, step, ["clear"], waves=True)
            )
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
                T.clear(total, annotations={T.WSID: "clear"})
                for k in T.Pipelined(steps, num_stages=stages, annotations={T.WSID: "steps"}):
                    T.copy(a[m * block_M, (part * steps + k) * GROUP], a_tile, annotations={T.WSID: "fetch_a"})
                    T.copy(b[n * block_N, (part * steps + k) * GROUP], b_tile, annotations={T.WSID: "fetch_b"})
                    for i in T.Parallel(block_M, annotations={T.WSID: "scale"}):
                        # Past the last block there are zeros to scale; what the scale is does not matter then.
                        scale[i] = (
                            scale_a[T.min(m * block_M + i, M - 1), T.min(part * steps + k, blocks - 1)]
                            * scale_b[n * block_N // GROUP, T.min(part * steps + k, blocks - 1)]
                        )
                    T.gemm(
                        a_tile,
                        b_tile,
                        sums,
                        transpose_B=True,
                        policy=T.GemmWarpPolicy.FullRow,
                        clear_accum=True,
                        annotations={T.WSID: "multiply"},
                    )
                    for i, j in T.Parallel(block_M, block_N, annotations={T.WSID: "add"}):
                        total[i, j] = total[i, j] + sums[i, j] * scale[i]
                if split > 1:
                    for i, j in T.Parallel(block_M, block_N, annotations={T.WSID: "store"}):
                        if m * block_M + i < M and n * block_N + j < N:
                            out[part, m * block_M + i, n * block_N + j] = total[i, j]
                elif tma_store:
                    with T.ws_op("store"):
                        T.copy(total, out_tile)
                        T.copy(out_tile, out[m * block_M, n * block_N])
                else:
                    for i, j in T.Parallel(block_M, block_N, annotations={T.WSID: "store"}):
                        if m * block_M + i < M and n * block_N + j < N:
                            out[m * block_M + i, n * block_N + j] = total[i, j]

    return gemm_fp8_dense


@functools.cache
@tilelang.jit
def gemm_fp8_pairs_kernel(N, K, wide, stages, group, multiprocessors):
    """Compile the kernel for many rows and columns: tiles of two halves of 128 x 128, side by side if `wide`, else stacked.

    A tile of 256 x 128 reads a quarter fewer bytes from L2 for a product than one of 128 x 128. Both halves take the same
    64 registers a thread for the sums of a block of 128 channels, one after the other: while one warpgroup scales and adds
    its sums, the other's products keep the tensor cores busy. A CTA walks over its tiles in one loop over all their blocks,
    so that the fetching warp runs on to the next tile while this one is stored.
    """
    M = T.dynamic("M")
    a_stride, b_stride, out_stride = T.dynamic("a_stride b_stride out_stride", "int64")
    a_row, a_column, b_row, b_column = T.dynamic("a_row a_column b_row b_column", "int64")
    blocks, half = -(-K // GROUP), 128
    block_M, block_N = (half, 2 * half) if wide else (2 * half, half)
    tiles_N, blocks_N = -(-N // block_N), -(-N // GROUP)
    down, right = (0, half) if wide else (half, 0)  # where the second half lies

    @T.prim_func
    def gemm_fp8_pairs(
        a: T.StridedTensor((M, K), (a_stride, 1), CODE),
        b: T.StridedTensor((N, K), (b_stride, 1), CODE),
        scale_a: T.StridedTensor((M, blocks), (a_row, a_column), "float32"),
        scale_b: T.StridedTensor((blocks_N, blocks), (b_row, b_column), "float32"),
        out: T.StridedTensor((M, N), (out_stride, 1), "bfloat16"),
    ):
        with T.Kernel(multiprocessors, threads=2 * half) as block:
            T.assume(a_stride % 16 == 0)  # TMA wants rows aligned to 16 bytes; run() checked it
            T.assume(b_stride % 16 == 0)
            T.assume(out_stride % 8 == 0)
            a_tile = T.alloc_shared((block_M, GROUP), CODE)
            b_tile = T.alloc_shared((block_N, GROUP), CODE)
            out_tile = T.alloc_shared((half, half), "bfloat16")
            sums = T.alloc_fragment((half, half), "float32")
            total0 = T.alloc_fragment((half, half), "float32")
            total1 = T.alloc_fragment((half, half), "float32")
            scale0 = T.alloc_fragment((half,), "float32")
            scale1 = T.alloc_fragment((half,), "float32")
            column0 = T.alloc_var("float32")
            column1 = T.alloc_var("float32")
            row = T.alloc_var("int32")  # variables, or every step would divide to find them again
            column = T.alloc_var("int32")
            tiles_M = T.ceildiv(M, block_M)

            loop = [
                "place",
                "scales",
                "column0",
                "column1",
                "wait",
                "multiply0",
                "add0",
                "multiply1",
                "release",
                "add1",
                "store",
            ]
            registers = 232, 40  # 128 totals and 64 sums a thread
            T.annotate_ws_schedule(
                one_warp_fetches(8, [a_tile, b_tile], stages, loop, ["clear0", "clear1"], (), registers=registers)
            )
            T.clear(total0, annotations={T.WSID: "clear0"})
            T.clear(total1, annotations={T.WSID: "clear1"})
            for step in T.Pipelined(
                T.ceildiv(tiles_M * tiles_N - block, multiprocessors) * blocks,
                num_stages=stages,
                annotations={T.WSID: "steps"},
            ):
                k = step % blocks
                tile = step // blocks * multiprocessors + block
                band = tile // (group * tiles_N)
                rows = T.min(group, tiles_M - band * group)
                m = band * group + tile % (group * tiles_N) % rows
                n = tile % (group * tiles_N) // rows
                T.copy(a[m * block_M, k * GROUP], a_tile, annotations={T.WSID: "fetch_a"})
                T.copy(b[n * block_N, k * GROUP], b_tile, annotations={T.WSID: "fetch_b"})
                if k == 0:
                    with T.ws_op("place"):
                        row = m * block_M
                        column = n * (block_N // GROUP)
                # Loaded before the products and first needed after them.
                for i in T.Parallel(half, annotations={T.WSID: "scales"}):
                    scale0[i] = scale_a[T.min(row + i, M - 1), k]
                    scale1[i] = scale_a[T.min(row + down + i, M - 1), k]
                with T.ws_op("column0"):
                    column0 = scale_b[column, k]
                with T.ws_op("column1"):
                    column1 = scale_b[T.min(column + right // GROUP, blocks_N - 1), k]
                T.gemm(
                    a_tile[0:half, 0:GROUP],
                    b_tile[0:half, 0:GROUP],
                    sums,
                    transpose_B=True,
                    policy=T.GemmWarpPolicy.FullRow,
                    clear_accum=True,
                    annotations={T.WSID: "multiply0"},
                )
                for i, j in T.Parallel(half, half, annotations={T.WSID: "add0"}):
                    total0[i, j] = total0[i, j] + sums[i, j] * (scale0[i] * column0)
                T.gemm(
                    a_tile[down : down + half, 0:GROUP],
                    b_tile[right : right + half, 0:GROUP],
                    sums,
                    transpose_B=True,
                    policy=T.GemmWarpPolicy.FullRow,
                    clear_accum=True,
                    annotations={T.WSID: "multiply1"},
                )
                for i, j in T.Parallel(half, half, annotations={T.WSID: "add1"}):
                    total1[i, j] = total1[i, j] + sums[i, j] * (scale1[i] * column1)
                if k == blocks - 1:
                    with T.ws_op("store"):
                        T.copy(total0, out_tile)
                        T.copy(out_tile, out[row, column * GROUP])
                        T.clear(total0)
                        T.copy(total1, out_tile)
                        T.copy(out_tile, out[row + down, column * GROUP + right])
                        T.clear(total1)
                        T.fence_proxy_async()  # here, or every step would have one, which waits for the scales

    return gemm_fp8_pairs


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def gemm_fp8_reduce_kernel(N, split, vec):
    """Compile out[m, n] = bfloat16(partial[0, m, n] + partial[1, m, n] + ...), always summed in this order."""
    M, out_stride = T.dynamic("M"), T.dynamic("out_stride", "int64")
    threads = 128

    @T.prim_func
    def gemm_fp8_reduce(
        partial: T.Tensor((split, M, N), "float32"),
        out: T.StridedTensor((M, N), (out_stride, 1), "bfloat16"),
    ):
        with T.Kernel(M, T.ceildiv(N, threads * vec), threads=threads) as (row, column_block):
            T.assume(out_stride % vec == 0)
            column = (column_block * threads + T.get_thread_binding(0)) * vec
            loaded = T.alloc_local((split, vec), "float32")
            result = T.alloc_local((vec,), "bfloat16")
            if column < N:
                for s in T.unroll(split):
                    for v in T.vectorized(vec):
                        loaded[s, v] = partial[s, row, column + v]
                for s in T.unroll(1, split):
                    for v in T.vectorized(vec):
                        loaded[0, v] = loaded[0, v] + loaded[s, v]
                for v in T.vectorized(vec):
                    result[v] = T.cast(loaded[0, v], "bfloat16")
                for v in T.vectorized(vec):
                    out[row, column + v] = result[v]

    return gemm_fp8_reduce


@functools.cache
@tilelang.jit
def gemm_fp8_skinny_kernel(N, K, block_M, block_N, stages, split):
    """Compile the kernel for block_M rows of a at most: it multiplies b by a.T, so that b's rows fill the tensor cores.

    Such a product only streams b: small tiles give every multiprocessor some, deep stages keep many bytes in flight. With
    split > 1, K is cut into `split` parts of which each writes its float32 sums to `out[part]`.
    """
    M = T.dynamic("M")
    a_stride, b_stride, out_stride = T.dynamic("a_stride b_stride out_stride", "int64")
    a_row, a_column, b_row, b_column = T.dynamic("a_row a_column b_row b_column", "int64")
    blocks = -(-K // GROUP)
    steps = -(-blocks // split)
    one_out, partial_out = T.StridedTensor((M, N), (out_stride, 1), "bfloat16"), T.Tensor((split, M, N), "float32")

    @T.prim_func
    def gemm_fp8_skinny(
        a: T.StridedTensor((M, K), (a_stride, 1), CODE),
        b: T.StridedTensor((N, K), (b_stride, 1), CODE),
        scale_a: T.StridedTensor((M, blocks), (a_row, a_column), "float32"),
        scale_b: T.StridedTensor((-(-N // GROUP), blocks), (b_row, b_column), "float32"),
        out: one_out if split == 1 else partial_out,
    ):
        with T.Kernel(T.ceildiv(N, block_N), T.ceildiv(M, block_M), split, threads=2 * block_N) as (n, m, part):
            T.assume(a_stride % 16 == 0)  # TMA wants rows aligned to 16 bytes; run() checked it
            T.assume(b_stride % 16 == 0)
            a_tile = T.alloc_shared((block_M, GROUP), CODE)
            b_tile = T.alloc_shared((block_N, GROUP), CODE)
            sums = T.alloc_fragment((block_N, block_M), "float32")
            total = T.alloc_fragment((block_N, block_M), "float32")
            scale = T.alloc_fragment((block_M,), "float32")
            step = ["scale", "wait", "multiply", "release", "add"]
            T.annotate_ws_schedule(one_warp_fetches(block_N // 16, [a_tile, b_tile], stages, step, ["clear"]))
            T.clear(total, annotations={T.WSID: "clear"})
            for k in T.Pipelined(steps, num_stages=stages, annotations={T.WSID: "steps"}):
                T.copy(b[n * block_N, (part * steps + k) * GROUP], b_tile, annotations={T.WSID: "fetch_b"})
                T.copy(a[m * block_M, (part * steps + k) * GROUP], a_tile, annotations={T.WSID: "fetch_a"})
                for j in T.Parallel(block_M, annotations={T.WSID: "scale"}):
                    # Past the last block there are zeros to scale; what the scale is does not matter then.
                    scale[j] = (
                        scale_a[T.min(m * block_M + j, M - 1), T.min(part * steps + k, blocks - 1)]
                        * scale_b[n * block_N // GROUP, T.min(part * steps + k, blocks - 1)]
                    )
                T.gemm(
                    b_tile,
                    a_tile,
                    sums,
                    transpose_B=True,
                    policy=T.GemmWarpPolicy.FullRow,
                    clear_accum=True,
                    annotations={T.WSID: "multiply"},
                )
                for i, j in T.Parallel(block_N, block_M, annotations={T.WSID: "add"}):
                    total[i, j] = total[i, j] + sums[i, j] * scale[j]
            for i, j in T.Parallel(block_N, block_M, annotations={T.WSID: "store"}):
                if m * block_M + j < M and n * block_N + i < N:
                    if split > 1:
                        out[part, m * block_M + j, n * block_N + i] = total[i, j]
                    else:
                        out[m * block_M + j, n * block_N + i] = total[i, j]

    return gemm_fp8_skinny


@functools.cache
@tilelang.jit
def gemm_fp8_plain_kernel(K):
    """Compile the kernel for rows that TMA cannot address (not aligned to 16 bytes): one code a load, no overlap.

    N is dynamic, or a single row of b, which no stride moves, would be loaded as if it were aligned.
    """
    M, N = T.dynamic("M N")
    a_stride, b_stride, out_stride = T.dynamic("a_stride b_stride out_stride", "int64")
    a_row, a_column, b_row, b_column = T.dynamic("a_row a_column b_row b_column", "int64")
    block, blocks = 64, -(-K // GROUP)

    @T.prim_func
    def gemm_fp8_plain(
        a: T.StridedTensor((M, K), (a_stride, 1), CODE),
        b: T.StridedTensor((N, K), (b_stride, 1), CODE),
        scale_a: T.StridedTensor((M, blocks), (a_row, a_column), "float32"),
        scale_b: T.StridedTensor((T.ceildiv(N, GROUP), blocks), (b_row, b_column), "float32"),
        out: T.StridedTensor((M, N), (out_stride, 1), "bfloat16"),
    ):
        with T.Kernel(T.ceildiv(N, block), T.ceildiv(M, block), threads=128) as (n, m):
            a_tile = T.alloc_shared((block, GROUP), CODE)
            b_tile = T.alloc_shared((block, GROUP), CODE)
            sums = T.alloc_fragment((block, block), "float32")
            total = T.alloc_fragment((block, block), "float32")
            T.clear(total)
            for k in T.serial(blocks):
                for i, j in T.Parallel(block, GROUP):
                    a_tile[i, j] = T.if_then_else(
                        m * block + i < M and k * GROUP + j < K, a[m * block + i, k * GROUP + j], T.cast(0, CODE)
                    )
                for i, j in T.Parallel(block, GROUP):
                    b_tile[i, j] = T.if_then_else(
                        n * block + i < N and k * GROUP + j < K, b[n * block + i, k * GROUP + j], T.cast(0, CODE)
                    )
                T.gemm(a_tile, b_tile, sums, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(block, block):
                    total[i, j] = (
                        total[i, j]
                        + sums[i, j] * scale_a[T.min(m * block + i, M - 1), k] * scale_b[n * block // GROUP, k]
                    )
            for i, j in T.Parallel(block, block):
                if m * block + i < M and n * block + j < N:
                    out[m * block + i, n * block + j] = total[i, j]

    return gemm_fp8_plain


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def cast_rows_kernel(K, vec):
    """Compile codes and scales of rows of K channels in bfloat16; scales lie column by column. A thread has 16 channels."""
    M = T.dynamic("M")
    x_stride = T.dynamic("x_stride", "int64")
    blocks, lanes, values = -(-K // GROUP), 8, 16
    units = -(-blocks // 2)  # pairs of blocks: two of them and eight rows are 128 threads

    @T.prim_func
    def cast_rows(
        x: T.StridedTensor((M, K), (x_stride, 1), "bfloat16"),
        codes: T.Tensor((M, -(-K // values) * values), CODE),
        scale: T.Tensor((blocks, M), "float32"),
    ):
        with T.Kernel(T.ceildiv(M, 8) * units, threads=(2 * lanes, 8)) as unit:
            T.assume(x_stride % vec == 0)  # run() chose vec so; it lets the compiler use vector accesses
            row = unit // units * 8 + T.get_thread_binding(1)
            block = unit % units * 2 + T.get_thread_binding(0) // lanes
            column = block * GROUP + T.get_thread_binding(0) % lanes * values
            loaded = T.alloc_local((values,), "bfloat16")
            made = T.alloc_local((values,), CODE)
            amax = T.alloc_var("float32", init=1e-4)
            inverse = T.alloc_var("float32")

            for c in T.unroll(values // vec):
                for v in T.vectorized(vec):
                    loaded[c * vec + v] = 0
                if row < M and column + c * vec < K:
                    for v in T.vectorized(vec):
                        loaded[c * vec + v] = x[row, column + c * vec + v]
            for v in T.unroll(values):
                amax = T.max(amax, T.abs(T.cast(loaded[v], "float32")))
            for step in T.unroll(3):
                amax = T.max(amax, T.shfl_xor(amax, 1 << step))
            inverse = T.float32(448.0) / amax
            for v in T.vectorized(values):  # the cast saturates
                made[v] = T.cast(T.cast(loaded[v], "float32") * inverse, CODE)
            # Rows of codes are padded to multiples of 16, so that a store is whole; no product reads what lies past K.
            if row < M and column < K:
                for v in T.vectorized(values):
                    codes[row, column + v] = made[v]
            if row < M and block < blocks and T.get_thread_binding(0) % lanes == 0:
                scale[block, row] = amax / T.float32(448.0)

    return cast_rows


@functools.cache
def multiprocessor_count(index):
    """Multiprocessors of a GPU; 132, those of an H100 or H200, where there is none (compiling without a GPU)."""
    return torch.cuda.get_device_properties(index).multi_processor_count if torch.cuda.is_available() else 132


@functools.lru_cache(maxsize=4096)
def default_split(tiles, blocks, multiprocessors):
    """Into how many parts to cut K, so that the busiest multiprocessor has the least to do.

    In blocks of 128 along K: a part's float32 sums take about 8 to write and read, the second kernel 9 to start.
    """
    parts = range(1, max(1, min(8, blocks // 4)) + 1)
    return min(
        parts,
        key=lambda part: -(-tiles * part // multiprocessors) * (blocks / part + 8 * (part > 1)) + 9 * (part > 1),
    )


@functools.lru_cache(maxsize=4096)
def default_tile(M, N, blocks, multiprocessors):
    """Tile of the dense product: 0 for 128 x 128, 1 for a stacked pair of them, 2 for a pair side by side.

    In steps of 128 x 128 x 128: pairs take 2 a block and about 5 to be stored, which nothing overlaps; single tiles 1.5 and 8.
    """
    rows, columns = -(-M // 128), -(-N // 128)
    stacked, side = -(-rows // 2) * columns, rows * -(-columns // 2)
    split = default_split(rows * columns, blocks, multiprocessors)
    single = -(-rows * columns * split // multiprocessors) * (1.5 * blocks / split + 8) + 12 * (split > 1)
    if -(-min(stacked, side) // multiprocessors) * (2 * blocks + 5) > single:
        return 0
    return 2 if side <= stacked else 1


def multiply(a, b, scale_a, scale_b, out, tile, block_M, split, group, skinny_M, skinny_N, stages):
    """Choose a kernel by shape and alignment, and launch it."""
    M, N = out.shape
    K = a.shape[1]
    if (a.stride(0) | b.stride(0)) % 16 or (a.data_ptr() | b.data_ptr()) % 16:
        gemm_fp8_plain_kernel(K)(a, b, scale_a, scale_b, out)
        return
    multiprocessors = multiprocessor_count(a.device.index)
    blocks = -(-K // GROUP)
    if (skinny_M or 64) >= M:
        rows = 16 if M <= 16 else 32 if M <= 32 else 64
        skinny_N = skinny_N or 64  # the rows of a tensor-core product
        # Three CTAs a multiprocessor keep the memory busy; a part of fewer than four blocks is not worth its sums.
        most = 3 * multiprocessors // -(-N // skinny_N)
        split = min(split or max(1, min(most, blocks // 4, 16)), blocks)
        # Three CTAs are to fit, or the last of them would begin when the first end.
        stages = min(stages or 12, max(2, 72 * 1024 // ((rows + skinny_N) * GROUP)))
        kernel = gemm_fp8_skinny_kernel(N, K, rows, skinny_N, stages, split)
    else:
        # TMA stores whole chunks of 16 bytes, also past the last column.
        out_aligned = out.stride(0) % 8 == 0 and out.data_ptr() % 16 == 0 and N % 8 == 0
        if block_M or not out_aligned or (split or 1) > 1:
            tile = 0
        elif tile is None:
            tile = default_tile(M, N, blocks, multiprocessors)
        if tile:
            kernel = gemm_fp8_pairs_kernel(N, K, tile == 2, min(stages or 4, 4), group, multiprocessors)
            kernel(a, b, scale_a, scale_b, out)
            return
        block_M = block_M or 128
        tiles = -(-M // block_M) * -(-N // 128)
        split = min(split or default_split(tiles, blocks, multiprocessors), blocks)
        kernel = gemm_fp8_dense_kernel(
            N, K, block_M, 128, min(stages or 4, 5), group, split, out_aligned and split == 1, multiprocessors
        )
    if split == 1:
        kernel(a, b, scale_a, scale_b, out)
        return
    partial = torch.empty((split, M, N), dtype=torch.float32, device=a.device)
    kernel(a, b, scale_a, scale_b, partial)
    gemm_fp8_reduce_kernel(N, split, 4 if out.stride(0) % 4 == 0 and out.data_ptr() % 8 == 0 and N % 4 == 0 else 1)(
        partial, out
    )


def run(
    a,
    b,
    scale_a,
    scale_b,
    out,
    *,
    tile=None,
    block_M=None,
    split=None,
    group=8,
    skinny_M=None,
    skinny_N=None,
    stages=None,
):
    """out = bfloat16(sum over blocks of scale_a * scale_b * (products of the block)), in float32.

    a: [M, K] and b: [N, K] in float8_e4m3fn, out: [M, N] in bfloat16, last stride 1 (any row stride); scale_a:
    [M, ceil(K / 128)] and scale_b: [ceil(N / 128), ceil(K / 128)] in float32, any strides. Up to `skinny_M` rows (at most
    64) are one tile of the skinny kernel, with `skinny_N` rows of b a CTA. More rows take, by `tile`, the kernel of pairs with
    tiles of 256 x 128 (1) or 128 x 256 (2), or the dense kernel with tiles of block_M (64 or 128) x 128 (0), which alone cuts
    K into `split` parts with a workspace; `stages` tiles of K are in flight. None chooses by shape. What TMA cannot store
    takes the dense kernel; rows of a or b that are not aligned to 16 bytes take a plain kernel, which is slow.
    """
    if out.numel():
        multiply(a, b, scale_a, scale_b, out, tile, block_M, split, group, skinny_M, skinny_N, stages)


def run_dynamic(
    x, b, scale_b, out, *, tile=None, block_M=None, split=None, group=8, skinny_M=None, skinny_N=None, stages=None
):
    """As `run`, for x: [M, K] in bfloat16, last stride 1 (any row stride): each 128 channels of a row are cast first.

    scale = max(|x|, 1e-4) / 448 and code = x * (448 / max(|x|, 1e-4)), rounded to nearest even, by a kernel of their own.
    """
    if not out.numel():
        return
    M, K = x.shape
    codes = torch.empty((M, -(-K // 16) * 16), dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty((-(-K // GROUP), M), dtype=torch.float32, device=x.device)
    bits = K | x.stride(0) | x.data_ptr() // 2 | 8
    cast_rows_kernel(K, bits & -bits)(x, codes, scale)
    multiply(codes[:, :K], b, scale.T, scale_b, out, tile, block_M, split, group, skinny_M, skinny_N, stages)
