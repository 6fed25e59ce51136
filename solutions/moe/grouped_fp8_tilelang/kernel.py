"""Products of FP8 codes for each group of rows, in TileLang: sums go to float32 after each block of 128 columns.

A small kernel lists the row tiles of all groups, so that nothing is read back: per tile its expert, its first row, the row
from which on there are zeros, and the row behind its group. A tile that does not exist has no rows.
"""

import functools

import tilelang
import tilelang.language as T
import torch

GROUP = 128  # columns that share a scale, and rows of b
CODE = "float8_e4m3fn"


def one_warp_fetches(warps, tiles, stages, step, place, before, after, registers=(0, 0)):
    """A schedule in which `warps` warps multiply and one more fetches by TMA, `stages` tiles ahead.

    Without it TileLang lets four warps wait for room and one of them fetch. Nothing waits for the other three: where one looks
    at a barrier late, as it may when two processes share the GPU, the barrier has gone on by two turns, which looks like none.
    It then waits for a turn that never comes, and the kernel does not end. One warp alone cannot be late for itself.
    `step` lists what those that multiply do with a tile, "wait" and "release" among it; `place` is done by all; `registers` are
    those of a thread that multiplies and of one that fetches, 0 for what the compiler gives them.
    """
    sync = {"wait": T.WSSync.consumer_wait("tiles"), "release": T.WSSync.consumer_release("tiles")}
    steps = {
        "fetcher": [T.WSSync.producer_acquire("tiles"), "fetch_a", "fetch_b", T.WSSync.producer_commit("tiles")],
        "multiplier": [sync.get(name, name) for name in step],
    }
    root = {"fetcher": [*place, "steps"], "multiplier": [*place, *before, "steps", *after]}
    roles = [
        T.WSRole("multiplier", warps_lo=0, warps_hi=warps, max_nreg=registers[0]),
        T.WSRole("fetcher", warps_lo=warps, warps_hi=warps + 1, max_nreg=registers[1]),
    ]
    return T.WSSchedule(
        num_warps=-(-(warps + 1) // 4) * 4,
        roles=roles,
        pipelines=[T.WSPipeline("tiles", tiles, depth=stages)],
        scopes=[T.WSScope("steps", steps), T.WSScope(T.WSScope.ROOT, root)],
    )


@functools.cache
@tilelang.jit
def list_groups_kernel(E, block_M):
    """Compile the table of groups that end at offs. The rows behind the last of them are a group of zeros."""
    tiles = T.dynamic("tiles")
    threads = max(32, 1 << E.bit_length())  # more than E

    @T.prim_func
    def list_groups(offs: T.Tensor((E,), "int32"), rows: T.int32, table: T.Tensor((5, tiles), "int32")):
        with T.Kernel(1, threads=threads) as _:
            group = T.get_thread_binding(0)
            counts = T.alloc_shared((threads,), "int32")
            start = T.alloc_var("int32", init=0)
            end = T.alloc_var("int32", init=0)
            before = T.alloc_var("int32", init=0)
            mine = T.alloc_var("int32", init=0)
            if group < E:
                end = offs[group]
            if group == E:
                end = rows
            if group > 0 and group <= E:
                start = offs[group - 1]
            mine = T.ceildiv(end - start, block_M)
            counts[group] = mine
            T.sync_threads()
            for earlier in T.serial(threads):
                if earlier < group:
                    before += counts[earlier]
            for tile in T.serial(mine):
                table[0, before + tile] = T.min(group, E - 1)
                table[1, before + tile] = start + tile * block_M
                table[2, before + tile] = T.if_then_else(group < E, end, 0)
                table[3, before + tile] = end
            if group == threads - 1:
                table[4, 0] = before + mine  # as many tiles exist
                for tile in T.serial(tiles - before - mine):
                    for field in T.unroll(4):
                        table[field, before + mine + tile] = 0

    return list_groups


@functools.cache
@tilelang.jit
def list_masked_kernel(E, block_M):
    """Compile the table of groups of `rows` rows each, of which the first counts[e] are multiplied."""
    tiles = T.dynamic("tiles")

    @T.prim_func
    def list_masked(counts: T.Tensor((E,), "int32"), rows: T.int32, table: T.Tensor((5, tiles), "int32")):
        with T.Kernel(T.ceildiv(tiles, 128), threads=128) as block:
            tile = block * 128 + T.get_thread_binding(0)
            if tile < tiles:
                group = tile // T.ceildiv(rows, block_M)
                table[0, tile] = group
                table[1, tile] = group * rows + tile % T.ceildiv(rows, block_M) * block_M
                table[2, tile] = group * rows + counts[group]
                table[3, tile] = (group + 1) * rows

    return list_masked


@functools.cache
@tilelang.jit
def grouped_fp8_kernel(E, N, K, block_M, block_N, stages, swap, pairs):
    """Compile the products of all tiles of a table, one a CTA. One warp fetches tiles by TMA, the others multiply.

    Tensor cores add a block of 128 columns, whose sums are then scaled and added in registers. With swap they multiply b by
    a.T, so that few rows of a group cost only their own columns of a tensor-core product. The stride of out, which is N, is
    not a constant, or two columns would be stored at once wherever out begins: that takes `pairs`, a multiple of 4 bytes.
    """
    S, tiles = T.dynamic("S tiles")
    a_row, a_column, out_stride = T.dynamic("a_row a_column out_stride", "int64")
    blocks = -(-K // GROUP)
    down, across = (block_N, block_M) if swap else (block_M, block_N)
    tiles_N = -(-N // block_N)

    @T.prim_func
    def grouped_fp8(
        a: T.Tensor((S, K), CODE),
        b: T.Tensor((E, N, K), CODE),
        scale_a: T.StridedTensor((S, blocks), (a_row, a_column), "float32"),
        scale_b: T.Tensor((E, -(-N // GROUP), blocks), "float32"),
        table: T.Tensor((5, tiles), "int32"),
        out: T.StridedTensor((S, N), (out_stride, 1), "bfloat16"),
    ):
        # Columns vary fastest: CTAs in flight share rows of a, and the weights of one expert stay in L2.
        with T.Kernel(tiles * tiles_N, threads=2 * down) as block:
            if pairs:
                T.assume(out_stride % 2 == 0)
            a_tile = T.alloc_shared((block_M, GROUP), CODE)
            b_tile = T.alloc_shared((block_N, GROUP), CODE)
            sums = T.alloc_fragment((down, across), "float32")
            total = T.alloc_fragment((down, across), "float32")
            scale = T.alloc_fragment((block_M,), "float32")
            expert = T.alloc_var("int32")
            first = T.alloc_var("int32")
            used = T.alloc_var("int32")
            end = T.alloc_var("int32")
            tile, n = block // tiles_N, block % tiles_N
            step = ["scale", "wait", "multiply", "release", "add"]
            T.annotate_ws_schedule(
                one_warp_fetches(down // 16, [a_tile, b_tile], stages, step, ["place"], ["clear"], ["store", "zeros"])
            )
            with T.ws_op("place"):
                expert = table[0, tile]
                first = table[1, tile]
                used = table[2, tile]
                end = table[3, tile]
            if first < used:
                T.clear(total, annotations={T.WSID: "clear"})
                for k in T.Pipelined(blocks, num_stages=stages, annotations={T.WSID: "steps"}):
                    # Rows past the end, of the next group, are read and not stored.
                    T.copy(a[first, k * GROUP], a_tile, annotations={T.WSID: "fetch_a"})
                    T.copy(
                        b[expert, n * block_N : (n + 1) * block_N, k * GROUP : (k + 1) * GROUP],
                        b_tile,
                        annotations={T.WSID: "fetch_b"},
                    )
                    for i in T.Parallel(block_M, annotations={T.WSID: "scale"}):
                        scale[i] = scale_a[T.min(first + i, S - 1), k] * scale_b[expert, n * block_N // GROUP, k]
                    T.gemm(
                        b_tile if swap else a_tile,
                        a_tile if swap else b_tile,
                        sums,
                        transpose_B=True,
                        policy=T.GemmWarpPolicy.FullRow,
                        clear_accum=True,
                        annotations={T.WSID: "multiply"},
                    )
                    for i, j in T.Parallel(down, across, annotations={T.WSID: "add"}):
                        total[i, j] = total[i, j] + sums[i, j] * scale[j if swap else i]
                if swap:
                    for i, j in T.Parallel(block_N, block_M, annotations={T.WSID: "store"}):
                        if first + j < end and n * block_N + i < N:
                            out[first + j, n * block_N + i] = T.if_then_else(first + j < used, total[i, j], 0.0)
                else:
                    for i, j in T.Parallel(block_M, block_N, annotations={T.WSID: "store"}):
                        if first + i < end and n * block_N + j < N:
                            out[first + i, n * block_N + j] = T.if_then_else(first + i < used, total[i, j], 0.0)
            if used <= first and first < end:
                for i, j in T.Parallel(block_M, block_N, annotations={T.WSID: "zeros"}):
                    if first + i < end and n * block_N + j < N:
                        out[first + i, n * block_N + j] = 0

    return grouped_fp8


@functools.cache
@tilelang.jit
def grouped_fp8_pairs_kernel(E, N, K, stages, multiprocessors):
    """Compile the products of the tiles that exist, of 128 x 256 in two halves, by one CTA a multiprocessor.

    Both halves take the same 64 registers a thread for the sums of a block of 128 columns, one after the other: while one
    warpgroup scales and adds its sums, the other's products keep the tensor cores busy. A CTA walks over its tiles in one
    loop over all their blocks, so that the fetching warp runs on to the next tile while this one is stored.
    """
    S, tiles = T.dynamic("S tiles")
    a_row, a_column, out_stride = T.dynamic("a_row a_column out_stride", "int64")
    blocks, half = -(-K // GROUP), 128
    tiles_N, blocks_N = -(-N // (2 * half)), -(-N // GROUP)

    @T.prim_func
    def grouped_fp8_pairs(
        a: T.Tensor((S, K), CODE),
        b: T.Tensor((E, N, K), CODE),
        scale_a: T.StridedTensor((S, blocks), (a_row, a_column), "float32"),
        scale_b: T.Tensor((E, blocks_N, blocks), "float32"),
        table: T.Tensor((5, tiles), "int32"),
        out: T.StridedTensor((S, N), (out_stride, 1), "bfloat16"),
    ):
        with T.Kernel(multiprocessors, threads=2 * half) as block:
            T.assume(out_stride % 8 == 0)
            a_tile = T.alloc_shared((half, GROUP), CODE)
            b_tile = T.alloc_shared((2 * half, GROUP), CODE)
            out_tile = T.alloc_shared((half, half), "bfloat16")
            T.annotate_layout({out_tile: tilelang.layout.make_swizzled_layout(out_tile)})
            sums = T.alloc_fragment((half, half), "float32")
            total0 = T.alloc_fragment((half, half), "float32")
            total1 = T.alloc_fragment((half, half), "float32")
            scale = T.alloc_fragment((half,), "float32")
            column0 = T.alloc_var("float32")
            column1 = T.alloc_var("float32")
            expert = T.alloc_var("int32")
            first = T.alloc_var("int32")
            used = T.alloc_var("int32")
            end = T.alloc_var("int32")
            loop = [
                "place",
                "scale",
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
                one_warp_fetches(8, [a_tile, b_tile], stages, loop, [], ["clear0", "clear1"], [], registers)
            )
            T.clear(total0, annotations={T.WSID: "clear0"})
            T.clear(total1, annotations={T.WSID: "clear1"})
            # Columns vary fastest: CTAs in flight share rows of a, and the weights of one expert stay in L2.
            for step in T.Pipelined(
                T.max(0, T.ceildiv(table[4, 0] * tiles_N - block, multiprocessors)) * blocks,
                num_stages=stages,
                annotations={T.WSID: "steps"},
            ):
                k = step % blocks
                tile = (step // blocks * multiprocessors + block) // tiles_N
                n = (step // blocks * multiprocessors + block) % tiles_N
                # Rows past the end, of the next group, are read and not stored.
                T.copy(a[table[1, tile], k * GROUP], a_tile, annotations={T.WSID: "fetch_a"})
                T.copy(
                    b[table[0, tile], n * 2 * half : (n + 1) * 2 * half, k * GROUP : (k + 1) * GROUP],
                    b_tile,
                    annotations={T.WSID: "fetch_b"},
                )
                if k == 0:
                    with T.ws_op("place"):
                        expert = table[0, tile]
                        first = table[1, tile]
                        used = table[2, tile]
                        end = table[3, tile]
                # Loaded before the products and first needed after them.
                for i in T.Parallel(half, annotations={T.WSID: "scale"}):
                    scale[i] = scale_a[T.min(first + i, S - 1), k]
                with T.ws_op("column0"):
                    column0 = scale_b[expert, n * 2, k]
                with T.ws_op("column1"):
                    column1 = scale_b[expert, T.min(n * 2 + 1, blocks_N - 1), k]
                T.gemm(
                    a_tile,
                    b_tile[0:half, 0:GROUP],
                    sums,
                    transpose_B=True,
                    policy=T.GemmWarpPolicy.FullRow,
                    clear_accum=True,
                    annotations={T.WSID: "multiply0"},
                )
                for i, j in T.Parallel(half, half, annotations={T.WSID: "add0"}):
                    total0[i, j] = total0[i, j] + sums[i, j] * (scale[i] * column0)
                T.gemm(
                    a_tile,
                    b_tile[half : 2 * half, 0:GROUP],
                    sums,
                    transpose_B=True,
                    policy=T.GemmWarpPolicy.FullRow,
                    clear_accum=True,
                    annotations={T.WSID: "multiply1"},
                )
                for i, j in T.Parallel(half, half, annotations={T.WSID: "add1"}):
                    total1[i, j] = total1[i, j] + sums[i, j] * (scale[i] * column1)
                if k == blocks - 1:
                    with T.ws_op("store"):
                        T.copy(total0, out_tile)
                        for i, j in T.Parallel(half, half):
                            if first + i < end and n * 2 * half + j < N:
                                out[first + i, n * 2 * half + j] = T.if_then_else(first + i < used, out_tile[i, j], 0)
                        T.clear(total0)
                        T.copy(total1, out_tile)
                        for i, j in T.Parallel(half, half):
                            if first + i < end and n * 2 * half + half + j < N:
                                out[first + i, n * 2 * half + half + j] = T.if_then_else(
                                    first + i < used, out_tile[i, j], 0
                                )
                        T.clear(total1)
                        T.fence_proxy_async()  # here, or every step would have one, which waits for the scales

    return grouped_fp8_pairs


@functools.cache
@tilelang.jit
def grouped_fp8_plain_kernel(E, N, K):
    """Compile the products for codes that TMA cannot address (not aligned to 16 bytes): one code a load, no overlap.

    The strides of a and b, which are K, are not constants, or several codes would be read at once wherever they begin.
    """
    S, tiles = T.dynamic("S tiles")
    a_stride, b_group, b_stride = T.dynamic("a_stride b_group b_stride", "int64")
    a_row, a_column, out_stride = T.dynamic("a_row a_column out_stride", "int64")
    block, blocks = 64, -(-K // GROUP)
    tiles_N = -(-N // block)

    @T.prim_func
    def grouped_fp8_plain(
        a: T.StridedTensor((S, K), (a_stride, 1), CODE),
        b: T.StridedTensor((E, N, K), (b_group, b_stride, 1), CODE),
        scale_a: T.StridedTensor((S, blocks), (a_row, a_column), "float32"),
        scale_b: T.Tensor((E, -(-N // GROUP), blocks), "float32"),
        table: T.Tensor((5, tiles), "int32"),
        out: T.StridedTensor((S, N), (out_stride, 1), "bfloat16"),
    ):
        with T.Kernel(tiles * tiles_N, threads=128) as index:
            tile, n = index // tiles_N, index % tiles_N
            a_tile = T.alloc_shared((block, GROUP), CODE)
            b_tile = T.alloc_shared((block, GROUP), CODE)
            sums = T.alloc_fragment((block, block), "float32")
            total = T.alloc_fragment((block, block), "float32")
            expert = T.alloc_var("int32")
            first = T.alloc_var("int32")
            used = T.alloc_var("int32")
            end = T.alloc_var("int32")
            if table[1, tile] < table[3, tile]:
                expert = table[0, tile]
                first = table[1, tile]
                used = table[2, tile]
                end = table[3, tile]
                T.clear(total)
                for k in T.serial(blocks):
                    for i, j in T.Parallel(block, GROUP):
                        a_tile[i, j] = T.if_then_else(
                            first + i < used and k * GROUP + j < K, a[first + i, k * GROUP + j], T.cast(0, CODE)
                        )
                    for i, j in T.Parallel(block, GROUP):
                        b_tile[i, j] = T.if_then_else(
                            n * block + i < N and k * GROUP + j < K,
                            b[expert, n * block + i, k * GROUP + j],
                            T.cast(0, CODE),
                        )
                    T.gemm(a_tile, b_tile, sums, transpose_B=True, clear_accum=True)
                    for i, j in T.Parallel(block, block):
                        total[i, j] = (
                            total[i, j]
                            + sums[i, j] * scale_a[T.min(first + i, S - 1), k] * scale_b[expert, n * block // GROUP, k]
                        )
                for i, j in T.Parallel(block, block):
                    if first + i < end and n * block + j < N:
                        out[first + i, n * block + j] = T.if_then_else(first + i < used, total[i, j], 0.0)

    return grouped_fp8_plain


def default_rows(rows):
    """The smallest tile that holds the rows that a group has on average, or 128."""
    return 16 if rows <= 16 else 32 if rows <= 32 else 64 if rows <= 64 else 128


def is_aligned(*tensors):
    """Whether TMA reads these codes, contiguous ones of the same row length: it wants multiples of 16 bytes."""
    return tensors[0].shape[-1] % 16 == 0 and not any(tensor.data_ptr() % 16 for tensor in tensors)


@functools.cache
def multiprocessor_count(index):
    """Multiprocessors of a GPU; 132, those of an H100 or H200, where there is none (compiling without a GPU)."""
    return torch.cuda.get_device_properties(index).multi_processor_count if torch.cuda.is_available() else 132


def multiply(a, b, scale_a, scale_b, table, out, block_M, block_N, stages, pairs=False):
    """a [S, K], out [S, N]; tiles of block_M rows, as the table lists them (64 where codes are not aligned)."""
    E, N, K = b.shape
    if not is_aligned(a, b):
        grouped_fp8_plain_kernel(E, N, K)(a, b, scale_a, scale_b, table, out)
        return
    if pairs and N % 8 == 0 and out.data_ptr() % 16 == 0:
        kernel = grouped_fp8_pairs_kernel(E, N, K, min(stages or 4, 4), multiprocessor_count(a.device.index))
        kernel(a, b, scale_a, scale_b, table, out)
        return
    swap = block_M < 64
    block_N = block_N or (64 if swap else 128)
    stages = min(stages or (8 if swap else 4), 192 * 1024 // ((block_M + block_N) * GROUP))
    pairs = N % 2 == 0 and out.data_ptr() % 4 == 0
    grouped_fp8_kernel(E, N, K, block_M, block_N, stages, swap, pairs)(a, b, scale_a, scale_b, table, out)


def run_grouped(a, b, scale_a, scale_b, offs, out, *, block_M=None, block_N=None, stages=None, pairs=None):
    """out[s] = bfloat16(sum over blocks of scale_a[s] * scale_b[e] * (products of the block)), rows s of group e, in float32.

    a: [S, K] and b: [E, N, K] in float8_e4m3fn, scale_a: [S, ceil(K / 128)] of any strides and scale_b:
    [E, ceil(N / 128), ceil(K / 128)] in float32, offs: [E] int32, ascending, out: [S, N] in bfloat16; all but scale_a
    contiguous. Group e has the rows from offs[e - 1] to below offs[e]; rows from the last offset on are zeros.
    Rows of each group are cut into tiles of block_M (16, 32, 64 or 128), columns of the product into tiles of block_N (64 or
    128); `stages` tiles of K are in flight. None chooses by the rows that a group has on average. With `pairs`, tiles of 128
    rows are multiplied by two of 128 columns at once, in persistent CTAs (None: where there are tiles for them all).
    """
    S, N = out.shape
    E = b.shape[0]
    if S == 0 or N == 0:
        return
    block_M = (block_M or default_rows(-(-S // E))) if is_aligned(a, b) else 64
    tiles = (S + min(E + 1, S) * (block_M - 1)) // block_M
    table = torch.empty((5, tiles), dtype=torch.int32, device=a.device)
    list_groups_kernel(E, block_M)(offs, S, table)
    if pairs is None:
        pairs = not block_N and multiprocessor_count(a.device.index) <= S // 128 * -(-N // 256)
    multiply(a, b, scale_a, scale_b, table, out, block_M, block_N, stages, pairs and block_M == 128)


def run_masked(a, b, scale_a, scale_b, counts, out, *, block_M=None, block_N=None, stages=None):
    """As `run_grouped`, for a: [E, M, K], scale_a: [E, M, ceil(K / 128)] and out: [E, M, N], contiguous, and counts: [E] int32.

    The first counts[e] rows of a group are multiplied; the others are zeros, whatever a has there.
    """
    E, M, N = out.shape
    if not out.numel():
        return
    block_M = (block_M or default_rows(M)) if is_aligned(a, b) else 64
    table = torch.empty((5, E * -(-M // block_M)), dtype=torch.int32, device=a.device)
    list_masked_kernel(E, block_M)(counts, M, table)
    rows = E * M
    flat = a.view(rows, -1), b, scale_a.view(rows, -1), scale_b, table, out.view(rows, N)
    multiply(*flat, block_M, block_N, stages)
