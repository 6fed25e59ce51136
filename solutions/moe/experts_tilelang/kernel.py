"""Experts of a mixture, TileLang: ids are sorted by expert on the device, two grouped products follow, then a sum over choices.

Products read tiles by TMA: one warp fetches, the others multiply, and a CTA a multiprocessor walks over the tiles. For a few
rows an expert the weights take the place of the rows of the tensor-core product. For one or two tokens, and for what TMA cannot
address, each choice reads its own weights with ordinary loads.

A loop bound is read from memory: what it needs must be the same for the warp that fetches and for those that multiply.
"""

import functools

import tilelang
import tilelang.language as T
import torch

ROUTING_THREADS = 256
FEW_PAIRS = 1024  # up to this many pairs of token and choice every thread block counts all ids itself, in one launch
MOST_PARTS = 128
WARPS = 4  # of a thread block of the kernels without tensor cores; a warp makes a column
BATCH = 4  # loads of a thread in flight there


def one_warp_fetches(warps, stages, tiles, step, clear):
    """A schedule in which `warps` warps multiply and one more fetches by TMA, `stages` tiles ahead.

    Without it TileLang lets four warps wait for room and one of them fetch. Nothing waits for the other three: where one looks
    at a barrier late, as it may when two processes share the GPU, the barrier has gone on by two turns, which looks like none.
    It then waits for a turn that never comes, and the kernel does not end. One warp alone cannot be late for itself.
    `tiles` names what is waited for at once: buffers, and the copies that fill them. `step` lists what those that multiply do,
    "wait NAME" and "release NAME" among it, and `clear` what they do before the first step of a tile.
    """
    fetch = []
    for name, (_, copies) in tiles.items():
        fetch += [T.WSSync.producer_acquire(name), *copies, T.WSSync.producer_commit(name)]
    sync = {f"wait {name}": T.WSSync.consumer_wait(name) for name in tiles}
    sync.update({f"release {name}": T.WSSync.consumer_release(name) for name in tiles})
    multiply = [sync.get(name, name) for name in step]
    return T.WSSchedule(
        num_warps=-(-(warps + 1) // 4) * 4,
        roles=[
            T.WSRole("multiplier", warps_lo=0, warps_hi=warps),
            T.WSRole("fetcher", warps_lo=warps, warps_hi=warps + 1),
        ],
        pipelines=[T.WSPipeline(name, buffers, depth=stages) for name, (buffers, _) in tiles.items()],
        scopes=[
            T.WSScope("steps", {"fetcher": fetch, "multiplier": multiply}),
            T.WSScope("waves", {"fetcher": ["place", "steps"], "multiplier": ["place", *clear, "steps", "store"]}),
            T.WSScope(T.WSScope.ROOT, {"fetcher": ["waves"], "multiplier": ["waves"]}),
        ],
    )


# --- Routing: slots[pair of token and choice], sorted stably by expert, -1 for ids of no expert; table of row tiles.


@functools.cache
@tilelang.jit
def count_ids_kernel(bins, threads):
    """Compile counts[part, e] = how many of the part's ids are e, for up to `bins` experts."""
    P, N = T.dynamic("P N")

    @T.prim_func
    def count_ids(
        ids: T.Tensor((N,), "int64"), counts: T.Tensor((P, bins), "int32"), experts: T.int32, rounds: T.int32
    ):
        with T.Kernel(P, threads=threads) as part:
            thread = T.get_thread_binding(0)
            histogram = T.alloc_shared((bins,), "int32")

            for g in T.serial(bins // threads):
                histogram[g * threads + thread] = 0
            T.sync_threads()
            for r in T.serial(rounds):
                place = (part * rounds + r) * threads + thread
                if place < N:
                    expert = ids[place]
                    if expert >= 0 and expert < experts:
                        T.atomic_add(histogram[T.cast(expert, "int32")], 1)
            T.sync_threads()
            for g in T.serial(bins // threads):
                counts[part, g * threads + thread] = histogram[g * threads + thread]

    return count_ids


@T.macro
def scan_rows(ends, thread, bins):
    """Running sums along the two rows of ends, each in place by one warp."""
    value = T.alloc_var("int32", init=0)
    other = T.alloc_var("int32", init=0)
    carry = T.alloc_var("int32", init=0)
    if thread < 64:
        for part in T.serial(bins // 32):
            value = ends[thread // 32, part * 32 + thread % 32]
            for step in T.unroll(5):
                other = T.shfl_up(value, 1 << step)
                if thread % 32 >= 1 << step:
                    value += other
            value += carry
            ends[thread // 32, part * 32 + thread % 32] = value
            carry = T.shfl_sync(value, 31)


@T.macro
def list_tiles(table, used, total, ends, part, parts, thread, threads, bins, tile_rows):
    """Write this part's share of the table of row tiles, whose rows are group, first slot and end of the group's slots."""
    for g in T.serial(bins // threads):
        group = g * threads + thread
        tiles = T.truncdiv(total[group] + tile_rows - 1, tile_rows)
        for q in T.serial(T.truncdiv(tiles - part + parts - 1, parts)):
            turn = q * parts + part
            tile = ends[1, group] - tiles + turn
            table[0, tile] = group
            table[1, tile] = ends[0, group] - total[group] + turn * tile_rows
            table[2, tile] = ends[0, group]
    if part == 0 and thread == 0:
        used[0] = ends[1, bins - 1]


@functools.cache
@tilelang.jit
def place_ids_kernel(bins, threads, counted):
    """Compile the slots of each part's ids and the table of row tiles; without `counted` each part counts all ids itself."""
    P, N, tiles = T.dynamic("P N tiles")

    @T.prim_func
    def place_ids(
        ids: T.Tensor((N,), "int64"),
        counts: T.Tensor((P, bins), "int32"),
        slots: T.Tensor((N,), "int32"),
        table: T.Tensor((3, tiles), "int32"),
        used: T.Tensor((1,), "int32"),
        experts: T.int32,
        rounds: T.int32,
        tile_rows: T.int32,
    ):
        with T.Kernel(P, threads=threads) as part:
            thread = T.get_thread_binding(0)
            total = T.alloc_shared((bins,), "int32")
            before = T.alloc_shared((bins,), "int32")  # of each expert in earlier parts; later its next slot
            ends = T.alloc_shared((2, bins), "int32")  # of slots and of tiles
            keys = T.alloc_shared((threads,), "int32")
            key = T.alloc_var("int32", init=0)
            rank = T.alloc_var("int32", init=0)
            all_of = T.alloc_var("int32", init=0)
            earlier = T.alloc_var("int32", init=0)

            for g in T.serial(bins // threads):
                all_of = 0
                earlier = 0
                if counted:
                    for p in T.serial(P):
                        all_of += counts[p, g * threads + thread]
                        if p < part:
                            earlier += counts[p, g * threads + thread]
                total[g * threads + thread] = all_of
                before[g * threads + thread] = earlier
            T.sync_threads()
            if not counted:
                for r in T.serial(T.ceildiv(N, threads)):
                    place = r * threads + thread
                    if place < N:
                        expert = ids[place]
                        if expert >= 0 and expert < experts:
                            T.atomic_add(total[T.cast(expert, "int32")], 1)
                            if place < part * rounds * threads:
                                T.atomic_add(before[T.cast(expert, "int32")], 1)
                T.sync_threads()
            for g in T.serial(bins // threads):
                ends[0, g * threads + thread] = total[g * threads + thread]
                ends[1, g * threads + thread] = T.truncdiv(total[g * threads + thread] + tile_rows - 1, tile_rows)
            T.sync_threads()
            scan_rows(ends, thread, bins)
            T.sync_threads()
            list_tiles(table, used, total, ends, part, P, thread, threads, bins, tile_rows)
            for g in T.serial(bins // threads):
                before[g * threads + thread] += ends[0, g * threads + thread] - total[g * threads + thread]
            T.sync_threads()

            for r in T.serial(rounds):
                place = (part * rounds + r) * threads + thread
                key = -1
                if place < N:
                    expert = ids[place]
                    if expert >= 0 and expert < experts:
                        key = T.cast(expert, "int32")
                keys[thread] = key
                T.sync_threads()
                rank = 0
                for j in T.serial(threads):
                    if j < thread and keys[j] == key:
                        rank += 1
                if key >= 0:
                    rank += before[key]
                if place < N:
                    slots[place] = T.if_then_else(key >= 0, rank, -1)
                T.sync_threads()  # every thread has read the counters
                if key >= 0:
                    T.atomic_add(before[key], 1)
                T.sync_threads()

    return place_ids


@functools.cache
@tilelang.jit
def list_groups_kernel(bins, threads, dtype, vec):
    """Compile the table of row tiles of groups that end at offs, and zeros into the rows after the last of them."""
    S, E, tiles = T.dynamic("S E tiles")
    N = T.dynamic("N", "int64")
    parts = MOST_PARTS

    @T.prim_func
    def list_groups(
        offs: T.Tensor((E,), "int32"),
        table: T.Tensor((3, tiles), "int32"),
        used: T.Tensor((1,), "int32"),
        out: T.Tensor((S, N), dtype),
        tile_rows: T.int32,
    ):
        with T.Kernel(parts, threads=threads) as part:
            T.assume(N % vec == 0)  # run_grouped_gemm() chose vec so
            thread = T.get_thread_binding(0)
            total = T.alloc_shared((bins,), "int32")
            ends = T.alloc_shared((2, bins), "int32")  # of slots and of tiles
            zeros = T.alloc_local((vec,), dtype)
            count = T.alloc_var("int32", init=0)

            for g in T.serial(bins // threads):
                count = 0
                if g * threads + thread < E:
                    count = offs[g * threads + thread]
                    if g * threads + thread > 0:
                        count -= offs[g * threads + thread - 1]
                total[g * threads + thread] = count
                ends[0, g * threads + thread] = count
                ends[1, g * threads + thread] = T.truncdiv(count + tile_rows - 1, tile_rows)
            T.sync_threads()
            scan_rows(ends, thread, bins)
            T.sync_threads()
            list_tiles(table, used, total, ends, part, parts, thread, threads, bins, tile_rows)

            for v in T.unroll(vec):
                zeros[v] = T.cast(0, dtype)
            for q in T.serial(T.truncdiv(S - offs[E - 1] - part + parts - 1, parts)):
                row = offs[E - 1] + q * parts + part
                for c in T.serial(T.ceildiv(N, threads * vec)):
                    column = (c * threads + thread) * vec
                    if column < N:
                        for v in T.vectorized(vec):
                            out[row, column + v] = zeros[v]

    return list_groups


# --- Products


def rounded(value, dtype):
    """A float32 expression rounded to dtype."""
    return T.cast(T.cast(value, dtype), "float32")


def activation(gate, up, alpha, limit, kind, dtype):
    """What models compute between the products, each step rounded to dtype as theirs. NaN passes every bound."""
    gate = rounded(gate, dtype)
    up = rounded(up, dtype)
    if kind != "silu":
        gate = rounded(T.if_then_else(gate > limit, limit, gate), dtype)
        up = T.if_then_else(up > limit, limit, up)
        up = rounded(T.if_then_else(up < -limit, -limit, up), dtype)
    if kind == "oai":
        sigmoid = rounded(1.0 / (1.0 + T.exp(-rounded(gate * alpha, dtype))), dtype)
        return T.cast(rounded(up + 1.0, dtype) * rounded(gate * sigmoid, dtype), dtype)
    return T.cast(rounded(gate / (1.0 + T.exp(-gate)), dtype) * up, dtype)


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def gather_rows_kernel(dtype, vec, threads):
    """Compile sorted[slot] = x[token] for the slots of each token's choices: a CTA a token."""
    M, K, P = T.dynamic("M K P")
    H, x_stride = T.dynamic("H x_stride", "int64")

    @T.prim_func
    def gather_rows(
        x: T.StridedTensor((M, H), (x_stride, 1), dtype),
        slots: T.Tensor((M, K), "int32"),
        sorted_rows: T.Tensor((P, H), dtype),
    ):
        with T.Kernel(M, threads=threads) as token:
            T.assume(H % vec == 0)  # run() checked it
            T.assume(x_stride % vec == 0)
            thread = T.get_thread_binding(0)
            row = T.alloc_local((vec,), dtype)
            slot = T.alloc_var("int32", init=0)

            for c in T.serial(T.ceildiv(H, threads * vec)):
                column = (c * threads + thread) * vec
                if column < H:
                    for v in T.vectorized(vec):
                        row[v] = x[token, column + v]
                    for k in T.serial(K):
                        slot = slots[token, k]
                        if slot >= 0:
                            for v in T.vectorized(vec):
                                sorted_rows[slot, column + v] = row[v]

    return gather_rows


@functools.cache
@tilelang.jit
def first_product_kernel(dtype, kind, by_column, rows, columns, depth, stages, group, multiprocessors):
    """Compile inner[slot] = activation(x w_gate, x w_up) by tiles of `rows` slots and `columns` columns of gate and of up.

    w is [E, 2 I, H] with gate rows first, or by_column [E, H, 2 I] with gate in the even columns. Past the last row, column or
    step along H, TMA gives zeros, each expert by itself; rows of the next expert are computed and not stored.
    """
    P, tiles, E, H, I = T.dynamic("P tiles E H I")
    biases = T.dynamic("bias_rows bias_columns")  # those of w, or of anything where there is no bias
    w_shape = (E, H, 2 * I) if by_column else (E, 2 * I, H)
    full_row = T.GemmWarpPolicy.FullRow

    @T.prim_func
    def first_product(
        x: T.Tensor((P, H), dtype),
        w: T.Tensor(w_shape, dtype),
        bias: T.Tensor(biases, dtype),
        table: T.Tensor((3, tiles), "int32"),
        used: T.Tensor((1,), "int32"),
        inner: T.Tensor((P, I), dtype),
        alpha: T.float32,
        limit: T.float32,
    ):
        with T.Kernel(multiprocessors, threads=2 * rows) as block:
            T.assume(H % 8 == 0)  # TMA wants rows aligned to 16 bytes; run() checked it
            T.assume(I % 8 == 0)
            x_tile = T.alloc_shared((rows, depth), dtype)
            gate = T.alloc_fragment((rows, columns), "float32")
            up = T.alloc_fragment((rows, columns), "float32")
            if by_column:
                w_tile = T.alloc_shared((depth, 2 * columns), dtype)
                sums = T.alloc_fragment((rows, 2 * columns), "float32")
            else:
                gate_tile = T.alloc_shared((columns, depth), dtype)
                up_tile = T.alloc_shared((columns, depth), dtype)
            m = T.alloc_var("int32")
            n = T.alloc_var("int32")
            expert = T.alloc_var("int32")
            first = T.alloc_var("int32")
            end = T.alloc_var("int32")
            n_tiles = T.ceildiv(I, columns)

            if by_column:
                T.annotate_ws_schedule(
                    one_warp_fetches(
                        rows // 16,
                        stages,
                        {"tiles": ([x_tile, w_tile], ["fetch_x", "fetch_w"])},
                        ["wait tiles", "multiply", "release tiles"],
                        ["clear"],
                    )
                )
            else:
                T.annotate_ws_schedule(
                    one_warp_fetches(
                        rows // 16,
                        stages,
                        {
                            "x": ([x_tile], ["fetch_x"]),
                            "gate": ([gate_tile], ["fetch_gate"]),
                            "up": ([up_tile], ["fetch_up"]),
                        },
                        [
                            *("wait x", "wait gate", "multiply_gate", "release gate"),
                            *("wait up", "multiply_up", "release x", "release up"),
                        ],
                        ["clear_gate", "clear_up"],
                    )
                )
            for wave in T.serial(
                T.truncdiv(used[0] * n_tiles - block + multiprocessors - 1, multiprocessors),
                annotations={T.WSID: "waves"},
            ):
                index = wave * multiprocessors + block
                band = T.truncdiv(index, group * n_tiles)
                within = T.truncmod(index, group * n_tiles)
                with T.ws_op("place"):
                    m = band * group + T.truncmod(within, T.min(group, used[0] - band * group))
                    n = T.truncdiv(within, T.min(group, used[0] - band * group))
                    expert = table[0, m]
                    first = table[1, m]
                    end = table[2, m]
                if by_column:
                    T.clear(sums, annotations={T.WSID: "clear"})
                    for k in T.Pipelined(T.ceildiv(H, depth), num_stages=stages, annotations={T.WSID: "steps"}):
                        T.copy(x[first, k * depth], x_tile, annotations={T.WSID: "fetch_x"})
                        T.copy(w[expert, k * depth, n * (2 * columns)], w_tile, annotations={T.WSID: "fetch_w"})
                        T.gemm(x_tile, w_tile, sums, policy=full_row, annotations={T.WSID: "multiply"})
                else:
                    T.clear(gate, annotations={T.WSID: "clear_gate"})
                    T.clear(up, annotations={T.WSID: "clear_up"})
                    for k in T.Pipelined(T.ceildiv(H, depth), num_stages=stages, annotations={T.WSID: "steps"}):
                        T.copy(x[first, k * depth], x_tile, annotations={T.WSID: "fetch_x"})
                        T.copy(w[expert, n * columns, k * depth], gate_tile, annotations={T.WSID: "fetch_gate"})
                        T.copy(w[expert, I + n * columns, k * depth], up_tile, annotations={T.WSID: "fetch_up"})
                        T.gemm(
                            x_tile,
                            gate_tile,
                            gate,
                            transpose_B=True,
                            policy=full_row,
                            annotations={T.WSID: "multiply_gate"},
                        )
                        T.gemm(
                            x_tile, up_tile, up, transpose_B=True, policy=full_row, annotations={T.WSID: "multiply_up"}
                        )
                with T.ws_op("store"):
                    if by_column:
                        for i, j in T.Parallel(rows, 2 * columns):
                            if n * (2 * columns) + j < 2 * I:
                                sums[i, j] = rounded(sums[i, j], dtype) + T.cast(
                                    bias[expert, n * (2 * columns) + j], "float32"
                                )
                        for i, j in T.Parallel(rows, columns):
                            gate[i, j] = sums[i, 2 * j]
                        for i, j in T.Parallel(rows, columns):
                            up[i, j] = sums[i, 2 * j + 1]
                    for i, j in T.Parallel(rows, columns):
                        gate[i, j] = activation(gate[i, j], up[i, j], alpha, limit, kind, dtype)
                    for i, j in T.Parallel(rows, columns):
                        if first + i < end and n * columns + j < I:
                            inner[first + i, n * columns + j] = T.cast(gate[i, j], dtype)

    return first_product


@functools.cache
@tilelang.jit
def first_product_few_kernel(dtype, kind, by_column, rows, columns, depth, stages, multiprocessors):
    """Compile the same for a few rows an expert: weights are the rows of the tensor-core product and slots its columns."""
    P, tiles, E, H, I = T.dynamic("P tiles E H I")
    biases = T.dynamic("bias_rows bias_columns")  # those of w, or of anything where there is no bias
    w_shape = (E, H, 2 * I) if by_column else (E, 2 * I, H)
    full_row = T.GemmWarpPolicy.FullRow

    @T.prim_func
    def first_product_few(
        x: T.Tensor((P, H), dtype),
        w: T.Tensor(w_shape, dtype),
        bias: T.Tensor(biases, dtype),
        table: T.Tensor((3, tiles), "int32"),
        used: T.Tensor((1,), "int32"),
        inner: T.Tensor((P, I), dtype),
        alpha: T.float32,
        limit: T.float32,
    ):
        with T.Kernel(multiprocessors, threads=2 * columns) as block:
            T.assume(H % 8 == 0)  # TMA wants rows aligned to 16 bytes; run() checked it
            T.assume(I % 8 == 0)
            x_tile = T.alloc_shared((rows, depth), dtype)
            if by_column:
                w_tile = T.alloc_shared((depth, 2 * columns), dtype)
                sums = T.alloc_fragment((2 * columns, rows), "float32")
                staged = T.alloc_shared((2 * columns, rows + 1), "float32")  # one more: other banks for other rows
            else:
                gate_tile = T.alloc_shared((columns, depth), dtype)
                up_tile = T.alloc_shared((columns, depth), dtype)
                gate = T.alloc_fragment((columns, rows), "float32")
                up = T.alloc_fragment((columns, rows), "float32")
            m = T.alloc_var("int32")
            n = T.alloc_var("int32")
            expert = T.alloc_var("int32")
            first = T.alloc_var("int32")
            end = T.alloc_var("int32")
            n_tiles = T.ceildiv(I, columns)

            if by_column:
                T.annotate_ws_schedule(
                    one_warp_fetches(
                        columns // 16,
                        stages,
                        {"tiles": ([x_tile, w_tile], ["fetch_x", "fetch_w"])},
                        ["wait tiles", "multiply", "release tiles"],
                        ["clear"],
                    )
                )
            else:
                T.annotate_ws_schedule(
                    one_warp_fetches(
                        columns // 16,
                        stages,
                        {
                            "x": ([x_tile], ["fetch_x"]),
                            "gate": ([gate_tile], ["fetch_gate"]),
                            "up": ([up_tile], ["fetch_up"]),
                        },
                        [
                            *("wait x", "wait gate", "multiply_gate", "release gate"),
                            *("wait up", "multiply_up", "release x", "release up"),
                        ],
                        ["clear_gate", "clear_up"],
                    )
                )
            for wave in T.serial(
                T.truncdiv(used[0] * n_tiles - block + multiprocessors - 1, multiprocessors),
                annotations={T.WSID: "waves"},
            ):
                index = wave * multiprocessors + block
                with T.ws_op("place"):
                    m = T.truncdiv(index, n_tiles)
                    n = T.truncmod(index, n_tiles)
                    expert = table[0, m]
                    first = table[1, m]
                    end = table[2, m]
                if by_column:
                    T.clear(sums, annotations={T.WSID: "clear"})
                    for k in T.Pipelined(T.ceildiv(H, depth), num_stages=stages, annotations={T.WSID: "steps"}):
                        T.copy(x[first, k * depth], x_tile, annotations={T.WSID: "fetch_x"})
                        T.copy(w[expert, k * depth, n * (2 * columns)], w_tile, annotations={T.WSID: "fetch_w"})
                        T.gemm(
                            w_tile,
                            x_tile,
                            sums,
                            transpose_A=True,
                            transpose_B=True,
                            policy=full_row,
                            annotations={T.WSID: "multiply"},
                        )
                    with T.ws_op("store"):
                        for j, i in T.Parallel(2 * columns, rows):
                            if n * (2 * columns) + j < 2 * I:
                                sums[j, i] = rounded(sums[j, i], dtype) + T.cast(
                                    bias[expert, n * (2 * columns) + j], "float32"
                                )
                        for j, i in T.Parallel(2 * columns, rows):
                            staged[j, i] = sums[j, i]  # gate and up lie in neighbouring rows, which other threads have
                        for i, j in T.Parallel(rows, columns):
                            if first + i < end and n * columns + j < I:
                                inner[first + i, n * columns + j] = activation(
                                    staged[2 * j, i], staged[2 * j + 1, i], alpha, limit, kind, dtype
                                )
                else:
                    T.clear(gate, annotations={T.WSID: "clear_gate"})
                    T.clear(up, annotations={T.WSID: "clear_up"})
                    for k in T.Pipelined(T.ceildiv(H, depth), num_stages=stages, annotations={T.WSID: "steps"}):
                        T.copy(x[first, k * depth], x_tile, annotations={T.WSID: "fetch_x"})
                        T.copy(w[expert, n * columns, k * depth], gate_tile, annotations={T.WSID: "fetch_gate"})
                        T.copy(w[expert, I + n * columns, k * depth], up_tile, annotations={T.WSID: "fetch_up"})
                        T.gemm(
                            gate_tile,
                            x_tile,
                            gate,
                            transpose_B=True,
                            policy=full_row,
                            annotations={T.WSID: "multiply_gate"},
                        )
                        T.gemm(
                            up_tile, x_tile, up, transpose_B=True, policy=full_row, annotations={T.WSID: "multiply_up"}
                        )
                    for j, i in T.Parallel(columns, rows, annotations={T.WSID: "store"}):
                        if first + i < end and n * columns + j < I:
                            inner[first + i, n * columns + j] = activation(
                                gate[j, i], up[j, i], alpha, limit, kind, dtype
                            )

    return first_product_few


@functools.cache
@tilelang.jit
def second_product_kernel(dtype, biased, by_column, few, rows, columns, depth, stages, group, multiprocessors):
    """Compile out[slot] = inner[slot] w for w [E, N, K], or by_column [E, K, N]: tiles of `rows` slots and `columns` columns.

    With `few`, weights are the rows of the tensor-core product and slots its columns.
    """
    P, tiles, E, N, K = T.dynamic("P tiles E N K")
    biases = T.dynamic("bias_rows bias_columns")  # those of w, or of anything where there is no bias
    w_shape = (E, K, N) if by_column else (E, N, K)

    @T.prim_func
    def second_product(
        inner: T.Tensor((P, K), dtype),
        w: T.Tensor(w_shape, dtype),
        bias: T.Tensor(biases, dtype),
        table: T.Tensor((3, tiles), "int32"),
        used: T.Tensor((1,), "int32"),
        out: T.Tensor((P, N), dtype),
    ):
        with T.Kernel(multiprocessors, threads=2 * (columns if few else rows)) as block:
            T.assume(K % 8 == 0)  # TMA wants rows aligned to 16 bytes; run() checked it
            T.assume(N % 8 == 0)
            inner_tile = T.alloc_shared((rows, depth), dtype)
            w_tile = T.alloc_shared((depth, columns) if by_column else (columns, depth), dtype)
            sums = T.alloc_fragment((columns, rows) if few else (rows, columns), "float32")
            m = T.alloc_var("int32")
            n = T.alloc_var("int32")
            expert = T.alloc_var("int32")
            first = T.alloc_var("int32")
            end = T.alloc_var("int32")
            n_tiles = T.ceildiv(N, columns)

            T.annotate_ws_schedule(
                one_warp_fetches(
                    (columns if few else rows) // 16,
                    stages,
                    {"tiles": ([inner_tile, w_tile], ["fetch_inner", "fetch_w"])},
                    ["wait tiles", "multiply", "release tiles"],
                    ["clear"],
                )
            )
            for wave in T.serial(
                T.truncdiv(used[0] * n_tiles - block + multiprocessors - 1, multiprocessors),
                annotations={T.WSID: "waves"},
            ):
                index = wave * multiprocessors + block
                band = T.truncdiv(index, group * n_tiles)
                within = T.truncmod(index, group * n_tiles)
                with T.ws_op("place"):
                    m = band * group + T.truncmod(within, T.min(group, used[0] - band * group))
                    n = T.truncdiv(within, T.min(group, used[0] - band * group))
                    expert = table[0, m]
                    first = table[1, m]
                    end = table[2, m]
                T.clear(sums, annotations={T.WSID: "clear"})
                for k in T.Pipelined(T.ceildiv(K, depth), num_stages=stages, annotations={T.WSID: "steps"}):
                    T.copy(inner[first, k * depth], inner_tile, annotations={T.WSID: "fetch_inner"})
                    if by_column:
                        T.copy(w[expert, k * depth, n * columns], w_tile, annotations={T.WSID: "fetch_w"})
                    else:
                        T.copy(w[expert, n * columns, k * depth], w_tile, annotations={T.WSID: "fetch_w"})
                    if few:
                        T.gemm(
                            w_tile,
                            inner_tile,
                            sums,
                            transpose_A=by_column,
                            transpose_B=True,
                            policy=T.GemmWarpPolicy.FullRow,
                            annotations={T.WSID: "multiply"},
                        )
                    else:
                        T.gemm(
                            inner_tile,
                            w_tile,
                            sums,
                            transpose_B=not by_column,
                            policy=T.GemmWarpPolicy.FullRow,
                            annotations={T.WSID: "multiply"},
                        )
                if few:
                    for j, i in T.Parallel(columns, rows, annotations={T.WSID: "store"}):
                        if first + i < end and n * columns + j < N:
                            if biased:
                                out[first + i, n * columns + j] = T.cast(
                                    rounded(sums[j, i], dtype) + T.cast(bias[expert, n * columns + j], "float32"),
                                    dtype,
                                )
                            else:
                                out[first + i, n * columns + j] = T.cast(sums[j, i], dtype)
                else:
                    for i, j in T.Parallel(rows, columns, annotations={T.WSID: "store"}):
                        if first + i < end and n * columns + j < N:
                            if biased:
                                out[first + i, n * columns + j] = T.cast(
                                    rounded(sums[i, j], dtype) + T.cast(bias[expert, n * columns + j], "float32"),
                                    dtype,
                                )
                            else:
                                out[first + i, n * columns + j] = T.cast(sums[i, j], dtype)

    return second_product


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def sum_choices_kernel(K, dtype, weight_dtype, vec, threads):
    """Compile out[token] = sum over its K choices, in order, of weight times row: a CTA a token."""
    M, P = T.dynamic("M P")
    H, out_stride = T.dynamic("H out_stride", "int64")
    exact_product = weight_dtype != dtype

    @T.prim_func
    def sum_choices(
        rows: T.Tensor((P, H), dtype),
        slots: T.Tensor((M, K), "int32"),
        weights: T.Tensor((M, K), weight_dtype),
        out: T.StridedTensor((M, H), (out_stride, 1), dtype),
    ):
        with T.Kernel(M, threads=threads) as token:
            T.assume(H % vec == 0)  # run() chose vec so
            T.assume(out_stride % vec == 0)
            thread = T.get_thread_binding(0)
            row = T.alloc_local((vec,), dtype)
            total = T.alloc_local((vec,), "float32")
            result = T.alloc_local((vec,), dtype)
            slot = T.alloc_var("int32", init=0)
            share = T.alloc_var("float32", init=0.0)

            for c in T.serial(T.ceildiv(H, threads * vec)):
                column = (c * threads + thread) * vec
                if column < H:
                    for v in T.unroll(vec):
                        total[v] = 0.0
                    for k in T.serial(K):
                        slot = slots[token, k]
                        share = T.cast(weights[token, k], "float32")
                        if slot >= 0:
                            for v in T.vectorized(vec):
                                row[v] = rows[slot, column + v]
                            for v in T.unroll(vec):
                                product = T.cast(row[v], "float32") * share
                                total[v] += product if exact_product else rounded(product, dtype)
                    for v in T.unroll(vec):
                        result[v] = T.cast(total[v], dtype)
                    for v in T.vectorized(vec):
                        out[token, column + v] = result[v]

    return sum_choices


# --- One or two tokens, and what TMA cannot address: nothing is sorted, and each choice reads its own weights.


@functools.cache
@tilelang.jit
def first_of_choice_kernel(dtype, kind, vec):
    """Compile inner[pair] = activation(x w_gate, x w_up) for w [E, 2 I, H] with gate rows first: a warp a column."""
    M, K = T.dynamic("M K")
    E, H, I, x_stride = T.dynamic("E H I x_stride", "int64")

    @T.prim_func
    def first_of_choice(
        x: T.StridedTensor((M, H), (x_stride, 1), dtype),
        ids: T.Tensor((M, K), "int64"),
        w: T.Tensor((E, 2 * I, H), dtype),
        inner: T.Tensor((M, K, I), dtype),
        alpha: T.float32,
        limit: T.float32,
    ):
        with T.Kernel(M * K * T.ceildiv(I, WARPS), threads=32 * WARPS) as block:
            T.assume(H % vec == 0)  # run() chose vec so
            T.assume(x_stride % vec == 0)
            lane, warp = T.get_thread_binding(0) % 32, T.get_thread_binding(0) // 32
            pair = T.truncdiv(T.cast(block, "int64"), T.ceildiv(I, WARPS))
            column = T.truncmod(T.cast(block, "int64"), T.ceildiv(I, WARPS)) * WARPS + warp
            token, choice = T.truncdiv(pair, T.cast(K, "int64")), T.truncmod(pair, T.cast(K, "int64"))
            values = T.alloc_local((BATCH, vec), dtype)
            gates = T.alloc_local((BATCH, vec), dtype)
            ups = T.alloc_local((BATCH, vec), dtype)
            gate = T.alloc_var("float32", init=0.0)
            up = T.alloc_var("float32", init=0.0)
            expert = T.alloc_var("int64", init=0)

            expert = ids[token, choice]
            if expert >= 0 and expert < E and column < I:
                for s in T.serial(T.ceildiv(H, 32 * vec * BATCH)):
                    for b in T.unroll(BATCH):  # all loads first: they overlap
                        h = ((s * BATCH + b) * 32 + lane) * vec
                        for v in T.vectorized(vec):
                            values[b, v] = T.cast(0, dtype)
                        for v in T.vectorized(vec):
                            gates[b, v] = T.cast(0, dtype)
                        for v in T.vectorized(vec):
                            ups[b, v] = T.cast(0, dtype)
                        if h < H:
                            for v in T.vectorized(vec):
                                gates[b, v] = w[expert, column, h + v]
                            for v in T.vectorized(vec):
                                ups[b, v] = w[expert, I + column, h + v]
                            for v in T.vectorized(vec):
                                values[b, v] = x[token, h + v]
                    for b in T.unroll(BATCH):
                        for v in T.unroll(vec):
                            gate += T.cast(values[b, v], "float32") * T.cast(gates[b, v], "float32")
                            up += T.cast(values[b, v], "float32") * T.cast(ups[b, v], "float32")
                gate = T.warp_reduce_sum(gate)
                up = T.warp_reduce_sum(up)
                if lane == 0:
                    inner[token, choice, column] = activation(gate, up, alpha, limit, kind, dtype)

    return first_of_choice


@functools.cache
@tilelang.jit
def second_of_token_kernel(K, dtype, weight_dtype, vec):
    """Compile out[token] = sum over choices of weight times inner w for w [E, H, I]: a warp a column, choices side by side."""
    M = T.dynamic("M")
    E, H, I, out_stride = T.dynamic("E H I out_stride", "int64")
    exact_product = weight_dtype != dtype
    groups = -(-K // 8)
    size = -(-K // groups)  # choices whose loads are in flight together

    @T.prim_func
    def second_of_token(
        inner: T.Tensor((M, K, I), dtype),
        ids: T.Tensor((M, K), "int64"),
        weights: T.Tensor((M, K), weight_dtype),
        w: T.Tensor((E, H, I), dtype),
        out: T.StridedTensor((M, H), (out_stride, 1), dtype),
    ):
        with T.Kernel(M * T.ceildiv(H, WARPS), threads=32 * WARPS) as block:
            T.assume(I % vec == 0)  # run() chose vec so
            lane, warp = T.get_thread_binding(0) % 32, T.get_thread_binding(0) // 32
            token = T.truncdiv(T.cast(block, "int64"), T.ceildiv(H, WARPS))
            column = T.truncmod(T.cast(block, "int64"), T.ceildiv(H, WARPS)) * WARPS + warp
            experts = T.alloc_local((groups * size,), "int64")
            values = T.alloc_local((size, vec), dtype)
            scales = T.alloc_local((size, vec), dtype)
            found = T.alloc_local((groups * size,), "float32")
            total = T.alloc_var("float32", init=0.0)

            if column < H:
                for k in T.unroll(groups * size):
                    experts[k] = T.int64(-1)
                    if k < K:
                        experts[k] = ids[token, k]
                    if experts[k] >= E:
                        experts[k] = T.int64(-1)
                    found[k] = 0.0
                for g in T.unroll(groups):
                    for s in T.serial(T.ceildiv(I, 32 * vec)):
                        i = (s * 32 + lane) * vec
                        for c in T.unroll(size):  # all loads first: they overlap
                            for v in T.vectorized(vec):
                                values[c, v] = T.cast(0, dtype)
                            for v in T.vectorized(vec):
                                scales[c, v] = T.cast(0, dtype)
                            if i < I and experts[g * size + c] >= 0:
                                for v in T.vectorized(vec):
                                    scales[c, v] = w[experts[g * size + c], column, i + v]
                                for v in T.vectorized(vec):
                                    values[c, v] = inner[token, g * size + c, i + v]
                        for c in T.unroll(size):
                            for v in T.unroll(vec):
                                found[g * size + c] += T.cast(values[c, v], "float32") * T.cast(scales[c, v], "float32")
                for k in T.unroll(K):
                    found[k] = T.warp_reduce_sum(found[k])
                for k in T.unroll(K):
                    if experts[k] >= 0:
                        product = rounded(found[k], dtype) * T.cast(weights[token, k], "float32")
                        total += product if exact_product else rounded(product, dtype)
                if lane == 0:
                    out[token, column] = T.cast(total, dtype)

    return second_of_token


@functools.cache
@tilelang.jit
def first_of_choice_by_column_kernel(dtype, kind, vec):
    """Compile the first product for w [E, H, 2 I] with gate in the even columns and a bias: a CTA a strip of columns."""
    M, K = T.dynamic("M K")
    E, H, I, x_stride = T.dynamic("E H I x_stride", "int64")
    across, down = 8, 32  # threads
    strip = across * vec
    warps = across * down // 32

    @T.prim_func
    def first_of_choice_by_column(
        x: T.StridedTensor((M, H), (x_stride, 1), dtype),
        ids: T.Tensor((M, K), "int64"),
        w: T.Tensor((E, H, 2 * I), dtype),
        bias: T.Tensor((E, 2 * I), dtype),
        inner: T.Tensor((M, K, I), dtype),
        alpha: T.float32,
        limit: T.float32,
    ):
        with T.Kernel(M * K * T.ceildiv(2 * I, strip), threads=across * down) as block:
            T.assume(2 * I % vec == 0)  # run() chose vec so
            thread = T.get_thread_binding(0)
            pair = T.truncdiv(T.cast(block, "int64"), T.ceildiv(2 * I, strip))
            start = T.truncmod(T.cast(block, "int64"), T.ceildiv(2 * I, strip)) * strip
            token, choice = T.truncdiv(pair, T.cast(K, "int64")), T.truncmod(pair, T.cast(K, "int64"))
            column = start + thread % across * vec
            scales = T.alloc_local((BATCH * 2, vec), dtype)
            values = T.alloc_local((BATCH * 2,), "float32")
            sums = T.alloc_local((vec,), "float32")
            partial = T.alloc_shared((warps, strip), "float32")
            gate = T.alloc_var("float32", init=0.0)
            up = T.alloc_var("float32", init=0.0)
            expert = T.alloc_var("int64", init=0)

            expert = ids[token, choice]
            for v in T.unroll(vec):
                sums[v] = 0.0
            if expert >= 0 and expert < E and column < 2 * I:
                for s in T.serial(T.ceildiv(H, down * BATCH * 2)):
                    for b in T.unroll(BATCH * 2):  # all loads first: they overlap
                        h = (s * (BATCH * 2) + b) * down + thread // across
                        values[b] = 0.0
                        for v in T.vectorized(vec):
                            scales[b, v] = T.cast(0, dtype)
                        if h < H:
                            values[b] = T.cast(x[token, h], "float32")
                            for v in T.vectorized(vec):
                                scales[b, v] = w[expert, h, column + v]
                    for b in T.unroll(BATCH * 2):
                        for v in T.unroll(vec):
                            sums[v] += values[b] * T.cast(scales[b, v], "float32")
            for v in T.unroll(vec):  # threads of a warp that share the columns, then the warps
                sums[v] += T.shfl_xor(sums[v], 16)
                sums[v] += T.shfl_xor(sums[v], 8)
                if thread % 32 < across:
                    partial[thread // 32, thread % across * vec + v] = sums[v]
            T.sync_threads()
            if expert >= 0 and expert < E and thread < strip // 2 and start + 2 * thread < 2 * I:
                for r in T.unroll(warps):
                    gate += partial[r, 2 * thread]
                    up += partial[r, 2 * thread + 1]
                inner[token, choice, T.truncdiv(start, T.int64(2)) + thread] = activation(
                    rounded(gate, dtype) + T.cast(bias[expert, start + 2 * thread], "float32"),
                    rounded(up, dtype) + T.cast(bias[expert, start + 2 * thread + 1], "float32"),
                    alpha,
                    limit,
                    kind,
                    dtype,
                )

    return first_of_choice_by_column


@functools.cache
@tilelang.jit
def second_of_token_by_column_kernel(K, dtype, weight_dtype, vec):
    """Compile the second product and the sum over choices for w [E, I, H] and a bias: a CTA a strip of columns."""
    M = T.dynamic("M")
    E, H, I, out_stride = T.dynamic("E H I out_stride", "int64")
    exact_product = weight_dtype != dtype
    across, down = 2, 128  # threads
    strip = across * vec
    warps = across * down // 32

    @T.prim_func
    def second_of_token_by_column(
        inner: T.Tensor((M, K, I), dtype),
        ids: T.Tensor((M, K), "int64"),
        weights: T.Tensor((M, K), weight_dtype),
        w: T.Tensor((E, I, H), dtype),
        bias: T.Tensor((E, H), dtype),
        out: T.StridedTensor((M, H), (out_stride, 1), dtype),
    ):
        with T.Kernel(M * T.ceildiv(H, strip), threads=across * down) as block:
            T.assume(H % vec == 0)  # run() chose vec so
            thread = T.get_thread_binding(0)
            token = T.truncdiv(T.cast(block, "int64"), T.ceildiv(H, strip))
            start = T.truncmod(T.cast(block, "int64"), T.ceildiv(H, strip)) * strip
            column = start + thread % across * vec
            scales = T.alloc_local((BATCH * 2, vec), dtype)
            values = T.alloc_local((BATCH * 2,), "float32")
            sums = T.alloc_local((vec,), "float32")
            partial = T.alloc_shared((K, warps, strip), "float32")
            total = T.alloc_var("float32", init=0.0)
            found = T.alloc_var("float32", init=0.0)
            expert = T.alloc_var("int64", init=0)

            for k in T.serial(K):
                expert = ids[token, k]
                for v in T.unroll(vec):
                    sums[v] = 0.0
                if expert >= 0 and expert < E and column < H:
                    for s in T.serial(T.ceildiv(I, down * BATCH * 2)):
                        for b in T.unroll(BATCH * 2):  # all loads first: they overlap
                            i = (s * (BATCH * 2) + b) * down + thread // across
                            values[b] = 0.0
                            for v in T.vectorized(vec):
                                scales[b, v] = T.cast(0, dtype)
                            if i < I:
                                values[b] = T.cast(inner[token, k, i], "float32")
                                for v in T.vectorized(vec):
                                    scales[b, v] = w[expert, i, column + v]
                        for b in T.unroll(BATCH * 2):
                            for v in T.unroll(vec):
                                sums[v] += values[b] * T.cast(scales[b, v], "float32")
                for v in T.unroll(vec):  # threads of a warp that share the columns, then the warps
                    sums[v] += T.shfl_xor(sums[v], 16)
                    sums[v] += T.shfl_xor(sums[v], 8)
                    sums[v] += T.shfl_xor(sums[v], 4)
                    sums[v] += T.shfl_xor(sums[v], 2)
                    if thread % 32 < across:
                        partial[k, thread // 32, thread % across * vec + v] = sums[v]
            T.sync_threads()
            if thread < strip and start + thread < H:
                for k in T.serial(K):
                    expert = ids[token, k]
                    if expert >= 0 and expert < E:
                        found = 0.0
                        for r in T.unroll(warps):
                            found += partial[k, r, thread]
                        found = rounded(found, dtype) + T.cast(bias[expert, start + thread], "float32")
                        product = rounded(found, dtype) * T.cast(weights[token, k], "float32")
                        total += product if exact_product else rounded(product, dtype)
                out[token, start + thread] = T.cast(total, dtype)

    return second_of_token_by_column


@functools.cache
@tilelang.jit
def row_product_kernel(dtype, vec):
    """Compile out[s] = x[s] w[group of s], zero behind the last group, for w [E, N, K]: a warp a column of a row."""
    S, E = T.dynamic("S E")
    N, K = T.dynamic("N K", "int64")

    @T.prim_func
    def row_product(
        x: T.Tensor((S, K), dtype),
        w: T.Tensor((E, N, K), dtype),
        offs: T.Tensor((E,), "int32"),
        out: T.Tensor((S, N), dtype),
    ):
        with T.Kernel(S * T.ceildiv(N, WARPS), threads=32 * WARPS) as block:
            T.assume(K % vec == 0)  # run_grouped_gemm() chose vec so
            lane, warp = T.get_thread_binding(0) % 32, T.get_thread_binding(0) // 32
            row = T.truncdiv(T.cast(block, "int64"), T.ceildiv(N, WARPS))
            column = T.truncmod(T.cast(block, "int64"), T.ceildiv(N, WARPS)) * WARPS + warp
            values = T.alloc_local((BATCH, vec), dtype)
            scales = T.alloc_local((BATCH, vec), dtype)
            total = T.alloc_var("float32", init=0.0)
            group = T.alloc_var("int32", init=0)

            if column < N:
                for g in T.serial(T.ceildiv(E, 32)):
                    if g * 32 + lane < E and offs[g * 32 + lane] <= row:
                        group += 1
                group = T.warp_reduce_sum(group)
                if group < E:
                    for s in T.serial(T.ceildiv(K, 32 * vec * BATCH)):
                        for b in T.unroll(BATCH):  # all loads first: they overlap
                            k = ((s * BATCH + b) * 32 + lane) * vec
                            for v in T.vectorized(vec):
                                values[b, v] = T.cast(0, dtype)
                            for v in T.vectorized(vec):
                                scales[b, v] = T.cast(0, dtype)
                            if k < K:
                                for v in T.vectorized(vec):
                                    scales[b, v] = w[group, column, k + v]
                                for v in T.vectorized(vec):
                                    values[b, v] = x[row, k + v]
                        for b in T.unroll(BATCH):
                            for v in T.unroll(vec):
                                total += T.cast(values[b, v], "float32") * T.cast(scales[b, v], "float32")
                total = T.warp_reduce_sum(total)
                if lane == 0:
                    out[row, column] = T.cast(total, dtype)

    return row_product


# --- Launches

# Configurations by rows of a tile, then by index UP or DOWN: columns, depth, stages. A tile of the first product has as many
# columns of gate and of up. Stages fill the shared memory of a multiprocessor.
_UP = {
    16: ((64, 128, 6), (64, 256, 3), (128, 128, 3)),
    32: ((64, 128, 5), (64, 256, 2), (128, 64, 5)),
    64: ((128, 64, 5), (64, 128, 4), (128, 128, 2)),
    128: ((128, 64, 4), (64, 64, 6), (128, 128, 2)),
}
_DOWN = {
    16: ((128, 128, 6), (64, 128, 8), (64, 256, 5)),
    32: ((128, 128, 5), (64, 128, 8), (64, 256, 4)),
    64: ((256, 64, 5), (128, 128, 4), (128, 64, 8)),
    128: ((256, 64, 4), (128, 64, 6), (128, 128, 3)),
}
_MOST_FEW = 32  # rows of a tile up to which weights are the rows of the tensor-core product


def _cdiv(value, divisor):
    return -(-value // divisor)


def _vector(itemsize, sizes, tensors):
    """The widest power of two, at most 16 bytes, that divides all sizes and the addresses of all tensors, in elements."""
    bits = 16 // itemsize
    for size in sizes:
        bits |= size
    for tensor in tensors:
        bits |= tensor.data_ptr() // itemsize
    return bits & -bits


def _default_rows(tokens, pairs, experts):
    """Rows of a tile by what an expert gets on average; 1: choices are worked off one by one."""
    if tokens <= 2:
        return 1
    rows = pairs / experts
    return 16 if rows <= 8 else 32 if rows <= 20 else 64 if rows <= 48 else 128


@functools.cache
def _multiprocessors(index):
    """Multiprocessors of a GPU; 132, those of an H100 or H200, where there is none (compiling without a GPU)."""
    return torch.cuda.get_device_properties(index).multi_processor_count if torch.cuda.is_available() else 132


def _bins(groups):
    """Counters: a multiple of the threads, and few different numbers, each of which is compiled."""
    return max(ROUTING_THREADS, 1 << (groups - 1).bit_length())


def _most_tiles(rows, groups, tile_rows):
    """How many row tiles there are at most, which no host has to read back."""
    return (rows + min(groups, rows) * (tile_rows - 1)) // tile_rows


def _route(ids, experts, tile_rows):
    """Slots of the pairs, table of tiles, and how many of it are used."""
    pairs = ids.numel()
    bins = _bins(experts)
    tiles = _cdiv(pairs, ROUTING_THREADS)
    rounds = _cdiv(tiles, MOST_PARTS)
    parts = _cdiv(tiles, rounds)
    slots = torch.empty(ids.shape, dtype=torch.int32, device=ids.device)
    table = torch.empty((3, _most_tiles(pairs, experts, tile_rows)), dtype=torch.int32, device=ids.device)
    used = torch.empty(1, dtype=torch.int32, device=ids.device)
    counts = torch.empty((parts, bins), dtype=torch.int32, device=ids.device)
    flat = ids.view(-1)
    if pairs > FEW_PAIRS:
        count_ids_kernel(bins, ROUTING_THREADS)(flat, counts, experts, rounds)
    place = place_ids_kernel(bins, ROUTING_THREADS, pairs > FEW_PAIRS)
    place(flat, counts, slots.view(-1), table, used, experts, rounds, tile_rows)
    return slots, table, used


def _choice_by_choice(x, ids, weights, gate_up, up_bias, down, down_bias, out, kind, alpha, limit):
    M, H = out.shape
    K = ids.shape[1]
    by_column = up_bias is not None
    I = down.shape[1] if by_column else down.shape[2]
    itemsize = x.element_size()
    inner = torch.empty((M, K, I), dtype=x.dtype, device=x.device)
    if by_column:
        vec = _vector(itemsize, (2 * I,), (gate_up,))
        first_of_choice_by_column_kernel(x.dtype, kind, vec)(x, ids, gate_up, up_bias, inner, alpha, limit)
        vec = _vector(itemsize, (H,), (down,))
        second = second_of_token_by_column_kernel(K, x.dtype, weights.dtype, vec)
        second(inner, ids, weights, down, down_bias, out)
        return
    vec = _vector(itemsize, (H, x.stride(0)), (x, gate_up))
    first_of_choice_kernel(x.dtype, kind, vec)(x, ids, gate_up, inner, alpha, limit)
    vec = _vector(itemsize, (I,), (down,))
    second_of_token_kernel(K, x.dtype, weights.dtype, vec)(inner, ids, weights, down, out)


def _experts(x, ids, weights, gate_up, up_bias, down, down_bias, out, kind, alpha, limit, config):
    """Launch the kernels. kind: the activation; with biases weights are [E, H, 2 I] and [E, I, H]; config: as `run` takes it."""
    rows, UP, DOWN, group = config
    M, H = out.shape
    if M == 0:
        return
    by_column = up_bias is not None
    K = ids.shape[1]
    E, I = down.shape[0], down.shape[1] if by_column else down.shape[2]
    rows = rows or _default_rows(M, M * K, E)
    dtype = x.dtype
    fetched = dtype == torch.bfloat16 and H % 8 == 0 and I % 8 == 0 and (gate_up.data_ptr() | down.data_ptr()) % 16 == 0
    if rows == 1 or not fetched:
        _choice_by_choice(x, ids, weights, gate_up, up_bias, down, down_bias, out, kind, alpha, limit)
        return
    slots, table, used = _route(ids, E, rows)
    multiprocessors = _multiprocessors(x.device.index)
    chosen, inner, summed = (torch.empty((M * K, width), dtype=dtype, device=x.device) for width in (H, I, H))
    vec = _vector(2, (H, x.stride(0)), (x,))
    gather_rows_kernel(dtype, vec, min(256, 32 * _cdiv(H, 32 * vec)))(x, slots, chosen)

    columns, depth, stages = _UP[rows][UP or 0]
    if rows <= _MOST_FEW:
        first = first_product_few_kernel(dtype, kind, by_column, rows, columns, depth, stages, multiprocessors)
    else:
        first = first_product_kernel(dtype, kind, by_column, rows, columns, depth, stages, group, multiprocessors)
    first(chosen, gate_up, chosen if up_bias is None else up_bias, table, used, inner, alpha, limit)

    second = _second_product(dtype, by_column, by_column, rows, DOWN, group, multiprocessors)
    second(inner, down, inner if down_bias is None else down_bias, table, used, summed)
    vec = _vector(2, (H, out.stride(0)), (out,))
    threads = min(256, 32 * _cdiv(H, 32 * vec))
    sum_choices_kernel(K, dtype, weights.dtype, vec, threads)(summed, slots, weights, out)


def _second_product(dtype, biased, by_column, rows, variant, group, multiprocessors):
    columns, depth, stages = _DOWN[rows][variant or 0]
    return second_product_kernel(
        dtype, biased, by_column, rows <= _MOST_FEW, rows, columns, depth, stages, group, multiprocessors
    )


def run(x, ids, weights, gate_up, down, out, *, BLOCK_M=None, UP=None, DOWN=None, GROUP_M=8):
    """out[t] = sum over choices of weights[t, k] * (silu(x gate^T) * (x up^T)) down^T of expert ids[t, k], fp32 accumulation.

    Shapes: x and out [M, H], ids [M, K] int64, weights [M, K], gate_up [E, 2 I, H] with gate rows first, down [E, H, I];
    T bfloat16 or float32 (IEEE products, choice by choice); unit last stride, any row stride of x and out.
    Roundings are those of the Definition; ids outside of 0..E-1 contribute nothing. Sums are in a fixed order.
    Mapping: pairs of token and choice are sorted by expert on the device and their rows of x copied in that order; each expert's
    rows are cut into tiles of BLOCK_M, listed in a table of the size of a bound, so that nothing is read back; both products
    work on the sorted rows, and a last kernel adds the K rows of a token. With BLOCK_M = 1, in float32, and where rows are not
    aligned to 16 bytes, choices are worked off one by one instead, which reads an expert once for each of its pairs.
    BLOCK_M = None: by the rows that an expert gets on average. UP and DOWN pick rows of the tables of configurations of the
    two products, of which each is valid for every shape; None: the first. GROUP_M: row tiles that share weights in L2.
    """
    _experts(x, ids, weights, gate_up, None, down, None, out, "silu", 0.0, 0.0, (BLOCK_M, UP, DOWN, GROUP_M))


def run_clamp(x, ids, weights, gate_up, down, limit, out, *, BLOCK_M=None, UP=None, DOWN=None, GROUP_M=8):
    """As `run`, with gate cut at limit from above and up on both sides before the activation."""
    _experts(x, ids, weights, gate_up, None, down, None, out, "clamp", 0.0, limit, (BLOCK_M, UP, DOWN, GROUP_M))


def run_oai(
    x,
    ids,
    weights,
    gate_up,
    gate_up_bias,
    down,
    down_bias,
    alpha,
    limit,
    out,
    *,
    BLOCK_M=None,
    UP=None,
    DOWN=None,
    GROUP_M=8,
):
    """As `run`, for gate_up [E, H, 2 I] with gate in the even columns, down [E, I, H], biases [E, 2 I] and [E, H].

    Between the products: (up + 1) * gate * sigmoid(alpha * gate), gate cut at limit from above, up on both sides.
    """
    config = BLOCK_M, UP, DOWN, GROUP_M
    _experts(x, ids, weights, gate_up, gate_up_bias, down, down_bias, out, "oai", alpha, limit, config)


def run_grouped_gemm(x, w, offs, out, *, BLOCK_M=None, DOWN=None, GROUP_M=8):
    """out[s] = x[s] w[e]^T for the rows s from offs[e - 1] to below offs[e]; zero from offs[E - 1] on; fp32 accumulation.

    Shapes: x [S, K], w [E, N, K], out [S, N] of one dtype in bfloat16, float16, float32, offs [E] int32, ascending; contiguous.
    Mapping: the rows of each group are cut into tiles of BLOCK_M, listed on the device; tunables are those of `run`. In float32,
    and where rows are not aligned to 16 bytes, each row reads the weights of its group.
    """
    S, K = x.shape
    E, N = w.shape[:2]
    if S == 0:
        return
    itemsize = x.element_size()
    addresses = x.data_ptr() | w.data_ptr() | out.data_ptr()
    if itemsize != 2 or K % 8 or N % 8 or addresses % 16:
        row_product_kernel(x.dtype, _vector(itemsize, (K,), (x, w)))(x, w, offs, out)
        return
    rows = BLOCK_M or max(16, _default_rows(S, S, E))
    table = torch.empty((3, _most_tiles(S, E, rows)), dtype=torch.int32, device=x.device)
    used = torch.empty(1, dtype=torch.int32, device=x.device)
    list_groups_kernel(_bins(E), ROUTING_THREADS, x.dtype, 8)(offs, table, used, out, rows)
    second = _second_product(x.dtype, False, False, rows, DOWN, GROUP_M, _multiprocessors(x.device.index))
    second(x, w, x, table, used, out)
