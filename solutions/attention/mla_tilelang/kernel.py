"""Multi-head latent attention, TileLang, with keys wider than values: whole sequences and one position, by TMA.

One warp fetches tiles of keys and values, the others multiply. In prefill the product with the values of one step runs while the
scores of the next are weighed. What TMA cannot address (rows that are not apart, or not aligned to 16 bytes) is loaded element by
element, without overlap.
"""

import functools

import tilelang
import tilelang.language as T
import torch

LOG2_E = 1.4426950408889634
LEAST_SCORE = -3.4028234663852886e38  # of a row that has seen no key: finite, so that differences of it are no NaN
NEVER_BARRIER = 15  # a named barrier at which nothing arrives
FLAGS = {"tl.enable_fast_math": True}  # 2**x as one instruction; tiny weights become 0
L2_BYTES = 50 << 20  # of an H100 or H200
SHARED_BYTES = 224 << 10  # that a CTA may take, less some for barriers


@T.macro
def hide(scores, key, first, rows, keys):
    """Hide later keys from the positions `first` on, unless each of them sees all `keys` keys.

    Keys past S are later than every position that is stored.
    """
    if key + keys > first + 1:
        for i, j in T.Parallel(rows, keys):
            scores[i, j] = T.if_then_else(key + j <= first + i, scores[i, j], -T.infinity("float32"))


@T.macro
def weigh(scores, largest, shrink, sums, added, scale, rows, keys):
    """One step of the running softmax: unscaled scores become weights, and `shrink` what earlier sums are worth now.

    Scores are scaled after the largest, unscaled one is subtracted: that one gives 0, however large it is. The scale must be
    above 0.
    """
    T.copy(largest, shrink)
    T.reduce_max(scores, largest, dim=1, clear=True)
    for i in T.Parallel(rows):
        largest[i] = T.max(shrink[i], largest[i])
    for i, j in T.Parallel(rows, keys):
        scores[i, j] = T.exp2((scores[i, j] - largest[i]) * scale)
    T.reduce_sum(scores, added, dim=1)
    for i in T.Parallel(rows):
        shrink[i] = T.exp2((shrink[i] - largest[i]) * scale)
    for i in T.Parallel(rows):
        sums[i] = sums[i] * shrink[i] + added[i]


# --- Prefill


@functools.cache
@tilelang.jit(pass_configs=FLAGS)
def prefill_kernel(D, DV, dtype, rows, keys, columns, v_columns, k_stages, v_stages, multiprocessors):
    """Compile attention of tiles of `rows` positions of a head to the keys that any of them sees, `keys` a step.

    One CTA a multiprocessor walks over the tiles, the longest first, of `heads` heads at a time. `columns` and `v_columns` are D
    and DV filled up for the tensor cores; TMA gives zeros past them and past S. The scale must be above 0.
    """
    B, H, S = T.dynamic("B H S")
    q_b, q_h, q_s, out_b, out_h, out_s = T.dynamic("q_b q_h q_s out_b out_h out_s", "int64")
    k_b, k_h, k_s, v_b, v_h, v_s = T.dynamic("k_b k_h k_s v_b v_h v_s", "int64")
    warps = rows // 16
    # Registers of a thread that multiplies, when the last warpgroup, which fetches, keeps 24. Their sum must not grow, or the
    # kernel would wait for registers for ever.
    given = min(240, 65536 // (2 * rows + 128) // 8 * 8)
    registers = min(240, (given * (warps + 4) - 24 * 4) // warps // 8 * 8)
    full_row = T.GemmWarpPolicy.FullRow

    @T.prim_func
    def prefill(
        q: T.StridedTensor((B, H, S, D), (q_b, q_h, q_s, 1), dtype),
        k: T.StridedTensor((B, H, S, D), (k_b, k_h, k_s, 1), dtype),
        v: T.StridedTensor((B, H, S, DV), (v_b, v_h, v_s, 1), dtype),
        out: T.StridedTensor((B, H, S, DV), (out_b, out_h, out_s, 1), dtype),
        heads: T.int32,
        scale: T.float32,
    ):
        with T.Kernel(multiprocessors, threads=2 * rows) as block:
            T.annotate_min_blocks_per_sm(1)
            T.assume(q_b % 8 == 0)  # TMA wants rows aligned to 16 bytes; run_prefill() checked it
            T.assume(q_h % 8 == 0)
            T.assume(q_s % 8 == 0)
            T.assume(k_b % 8 == 0)
            T.assume(k_h % 8 == 0)
            T.assume(k_s % 8 == 0)
            T.assume(v_b % 8 == 0)
            T.assume(v_h % 8 == 0)
            T.assume(v_s % 8 == 0)
            q_tile = T.alloc_shared((rows, columns), dtype)
            k_tile = T.alloc_shared((keys, columns), dtype)
            v_tile = T.alloc_shared((keys, v_columns), dtype)
            k_first = T.alloc_shared((keys, columns), dtype)
            v_last = T.alloc_shared((keys, v_columns), dtype)
            scores = T.alloc_fragment((rows, keys), "float32")
            weights = T.alloc_fragment((rows, keys), dtype)
            acc = T.alloc_fragment((rows, v_columns), "float32")
            largest = T.alloc_fragment((rows,), "float32")
            shrink = T.alloc_fragment((rows,), "float32")
            sums = T.alloc_fragment((rows,), "float32")
            added = T.alloc_fragment((rows,), "float32")
            wave = T.alloc_var("int32")
            index = T.alloc_var("int32")
            span = T.alloc_var("int32")
            turn = T.alloc_var("int32")
            batch = T.alloc_var("int32")
            head = T.alloc_var("int32")
            first = T.alloc_var("int32")
            steps = T.alloc_var("int32")
            tiles = (S + rows - 1) // rows * (B * H)

            wait, release = T.WSSync.consumer_wait, T.WSSync.consumer_release
            acquire, commit = T.WSSync.producer_acquire, T.WSSync.producer_commit
            T.annotate_ws_schedule(
                T.WSSchedule(
                    num_warps=warps + 4,
                    roles=[
                        T.WSRole("multiplier", warps_lo=0, warps_hi=warps, max_nreg=registers),
                        T.WSRole("fetcher", warps_lo=warps, warps_hi=warps + 1, max_nreg=24),
                    ],
                    pipelines=[
                        T.WSPipeline("q", [q_tile], depth=1),
                        T.WSPipeline("first", [k_first], depth=1),
                        T.WSPipeline("k", [k_tile], depth=k_stages),
                        T.WSPipeline("v", [v_tile], depth=v_stages),
                        T.WSPipeline("last", [v_last], depth=1),
                    ],
                    scopes=[
                        T.WSScope(
                            "steps",
                            {
                                "fetcher": [acquire("k"), "fetch_k", commit("k"), acquire("v"), "fetch_v", commit("v")],
                                "multiplier": [
                                    wait("k"), "multiply_k", wait("v"), "multiply_v", "wait_k", release("k"), "weigh",
                                    "wait_v", release("v"), "renew",
                                ],
                            },
                        ),
                        T.WSScope(
                            "tiles",
                            {
                                "fetcher": [
                                    "place", acquire("q"), "fetch_q", commit("q"),
                                    acquire("first"), "fetch_first", commit("first"), "steps",
                                    acquire("last"), "fetch_last", commit("last"), "next",
                                ],
                                "multiplier": [
                                    "place", wait("q"), wait("first"), "multiply_first", release("first"), "start", "steps",
                                    release("q"), wait("last"), "multiply_last", release("last"), "store", "next",
                                ],
                            },
                        ),
                        T.WSScope(T.WSScope.ROOT, {"fetcher": ["first", "tiles"], "multiplier": ["first", "tiles"]}),
                    ],
                )
            )  # fmt: skip
            with T.ws_op("first"):
                wave = 0
                index = block
            with T.ws_op("tiles"):
                while index < tiles:
                    with T.ws_op("place"):
                        # The last positions see the most keys: theirs are the first tiles, of all heads that run together.
                        span = T.truncdiv(S + rows - 1, rows) * heads
                        turn = T.truncmod(index, span)
                        batch = T.truncdiv(T.truncdiv(index, span) * heads + T.truncmod(turn, heads), H)
                        head = T.truncmod(T.truncdiv(index, span) * heads + T.truncmod(turn, heads), H)
                        first = (T.truncdiv(S + rows - 1, rows) - 1 - T.truncdiv(turn, heads)) * rows
                        steps = T.truncdiv(T.min(first + rows, S) + keys - 1, keys)
                    T.copy(q[batch, head, first, 0], q_tile, annotations={T.WSID: "fetch_q"})
                    T.copy(k[batch, head, 0, 0], k_first, annotations={T.WSID: "fetch_first"})
                    T.gemm(q_tile, k_first, scores, transpose_B=True, policy=full_row, clear_accum=True,
                           annotations={T.WSID: "multiply_first"})  # fmt: skip
                    with T.ws_op("start"):
                        T.clear(acc)
                        T.fill(largest, LEAST_SCORE)
                        T.clear(sums)
                        hide(scores, 0, first, rows, keys)
                        weigh(scores, largest, shrink, sums, added, scale, rows, keys)
                        T.copy(scores, weights)
                    # In one step the keys of that step and the values of the one before.
                    for step in T.Pipelined(steps - 1, num_stages=v_stages, annotations={T.WSID: "steps"}):
                        T.copy(k[batch, head, (step + 1) * keys, 0], k_tile, annotations={T.WSID: "fetch_k"})
                        T.copy(v[batch, head, step * keys, 0], v_tile, annotations={T.WSID: "fetch_v"})
                        T.wgmma_gemm(q_tile, k_tile, scores, transpose_B=True, policy=full_row, clear_accum=True,
                                     annotations={T.WSID: "multiply_k"})  # fmt: skip
                        T.wgmma_gemm(weights, v_tile, acc, policy=full_row, annotations={T.WSID: "multiply_v"})
                        with T.ws_op("wait_k"):
                            T.wait_wgmma(1)
                        with T.ws_op("weigh"):
                            hide(scores, (step + 1) * keys, first, rows, keys)
                            weigh(scores, largest, shrink, sums, added, scale, rows, keys)
                            # ptxas would move the wait below before the softmax, and nothing would overlap. It keeps the order
                            # of barriers, and this one needs all weights. No sum of weights is below 0.
                            for i in T.Parallel(rows):
                                if added[i] < 0.0:
                                    T.named_barrier_arrive(NEVER_BARRIER, 256)
                        with T.ws_op("wait_v"):
                            T.wait_wgmma(0)
                        with T.ws_op("renew"):
                            T.copy(scores, weights)
                            for i, j in T.Parallel(rows, v_columns):
                                acc[i, j] = acc[i, j] * shrink[i]
                    T.copy(v[batch, head, (steps - 1) * keys, 0], v_last, annotations={T.WSID: "fetch_last"})
                    T.gemm(weights, v_last, acc, policy=full_row, annotations={T.WSID: "multiply_last"})
                    with T.ws_op("store"):
                        for i, j in T.Parallel(rows, v_columns):
                            acc[i, j] = acc[i, j] / sums[i]
                        for i, j in T.Parallel(rows, v_columns):
                            if first + i < S and j < DV:
                                out[batch, head, first + i, j] = T.cast(acc[i, j], dtype)
                    with T.ws_op("next"):
                        # Every other wave goes back over the CTAs, or the first ones would get the longest tile of each.
                        wave = wave + 1
                        index = wave * multiprocessors + T.if_then_else(
                            T.bitwise_and(wave, 1) == 1, multiprocessors - 1 - block, block
                        )

    return prefill


@functools.cache
@tilelang.jit(pass_configs=FLAGS)
def plain_prefill_kernel(D, DV, dtype, columns, v_columns):
    """Compile the kernel for rows that TMA cannot address, and for scales of any sign: one element a load, no overlap."""
    B, H, S = T.dynamic("B H S")
    q_b, q_h, q_s, out_b, out_h, out_s = T.dynamic("q_b q_h q_s out_b out_h out_s", "int64")
    k_b, k_h, k_s, v_b, v_h, v_s = T.dynamic("k_b k_h k_s v_b v_h v_s", "int64")
    rows = keys = 64
    full_row = T.GemmWarpPolicy.FullRow

    @T.prim_func
    def plain_prefill(
        q: T.StridedTensor((B, H, S, D), (q_b, q_h, q_s, 1), dtype),
        k: T.StridedTensor((B, H, S, D), (k_b, k_h, k_s, 1), dtype),
        v: T.StridedTensor((B, H, S, DV), (v_b, v_h, v_s, 1), dtype),
        out: T.StridedTensor((B, H, S, DV), (out_b, out_h, out_s, 1), dtype),
        sign: T.float32,
        scale: T.float32,
    ):
        with T.Kernel(B * H, T.ceildiv(S, rows), threads=128) as (row, tile):
            q_tile = T.alloc_shared((rows, columns), dtype)
            k_tile = T.alloc_shared((keys, columns), dtype)
            v_tile = T.alloc_shared((keys, v_columns), dtype)
            scores = T.alloc_fragment((rows, keys), "float32")
            weights = T.alloc_fragment((rows, keys), dtype)
            acc = T.alloc_fragment((rows, v_columns), "float32")
            largest = T.alloc_fragment((rows,), "float32")
            shrink = T.alloc_fragment((rows,), "float32")
            sums = T.alloc_fragment((rows,), "float32")
            added = T.alloc_fragment((rows,), "float32")
            batch = T.alloc_var("int32")
            head = T.alloc_var("int32")
            first = T.alloc_var("int32")

            batch = T.truncdiv(row, H)
            head = T.truncmod(row, H)
            first = tile * rows
            T.clear(acc)
            T.fill(largest, LEAST_SCORE)
            T.clear(sums)
            for i, j in T.Parallel(rows, columns):
                q_tile[i, j] = T.if_then_else(first + i < S and j < D, q[batch, head, first + i, j], 0)
            for step in T.serial(T.truncdiv(T.min(first + rows, S) + keys - 1, keys)):
                for i, j in T.Parallel(keys, columns):
                    k_tile[i, j] = T.if_then_else(step * keys + i < S and j < D, k[batch, head, step * keys + i, j], 0)
                for i, j in T.Parallel(keys, v_columns):
                    v_tile[i, j] = T.if_then_else(step * keys + i < S and j < DV, v[batch, head, step * keys + i, j], 0)
                T.gemm(q_tile, k_tile, scores, transpose_B=True, policy=full_row, clear_accum=True)
                for i, j in T.Parallel(rows, keys):
                    scores[i, j] = scores[i, j] * sign
                hide(scores, step * keys, first, rows, keys)
                weigh(scores, largest, shrink, sums, added, scale, rows, keys)
                T.copy(scores, weights)
                for i, j in T.Parallel(rows, v_columns):
                    acc[i, j] = acc[i, j] * shrink[i]
                T.gemm(weights, v_tile, acc, policy=full_row)
            for i, j in T.Parallel(rows, v_columns):
                if first + i < S and j < DV:
                    out[batch, head, first + i, j] = T.cast(acc[i, j] / sums[i], dtype)

    return plain_prefill


# --- Decode


def one_warp_fetches(warps, pipelines, fetch, multiply, registers=0):
    """A schedule in which `warps` warps multiply and one more fetches by TMA, as far ahead as there are buffers.

    Without it TileLang lets four warps wait for room and one of them fetch. Nothing waits for the other three: where one looks
    at a barrier late, as it may when two processes share the GPU, the barrier has gone on by two turns, which looks like none.
    It then waits for a turn that never comes, and the kernel does not end. One warp alone cannot be late for itself.
    `pipelines` gives the buffers and the depth of each name. `fetch` and `multiply` list what is done in each scope, "wait NAME"
    and the like among it. With `registers` a thread that multiplies has so many, and one that fetches 24.
    """
    sync = {}
    for name in pipelines:
        sync[f"wait {name}"] = T.WSSync.consumer_wait(name)
        sync[f"release {name}"] = T.WSSync.consumer_release(name)
        sync[f"acquire {name}"] = T.WSSync.producer_acquire(name)
        sync[f"commit {name}"] = T.WSSync.producer_commit(name)
    bodies = {"fetcher": fetch, "multiplier": multiply}
    return T.WSSchedule(
        num_warps=-(-(warps + 1) // 4) * 4,
        roles=[
            T.WSRole("multiplier", warps_lo=0, warps_hi=warps, max_nreg=registers),
            T.WSRole("fetcher", warps_lo=warps, warps_hi=warps + 1, max_nreg=24 if registers else 0),
        ],
        pipelines=[T.WSPipeline(name, buffers, depth=depth) for name, (buffers, depth) in pipelines.items()],
        scopes=[
            T.WSScope(scope, {role: [sync.get(name, name) for name in body[scope]] for role, body in bodies.items()})
            for scope in fetch
        ],
    )


@functools.cache
@tilelang.jit(pass_configs=FLAGS)
def decode_kernel(D, DV, dtype, keys, columns, v_columns, stages, whole):
    """Compile attention of the query of a head to a span of positions: out, or parts without `whole`.

    The query is the first of 16 rows of the products, as many as these have; the others are zeros. Four warps share the keys of a
    step. A part is sums of values not yet divided, the largest score and the sum of weights. The scale must be above 0.
    """
    B, H, L, splits = T.dynamic("B H L splits")
    q_b, q_h, q_s, out_b, out_h, out_s = T.dynamic("q_b q_h q_s out_b out_h out_s", "int64")
    k_b, k_h, k_s, v_b, v_h, v_s = T.dynamic("k_b k_h k_s v_b v_h v_s", "int64")
    rows, policy = 16, T.GemmWarpPolicy.FullCol
    one_out = T.StridedTensor((B, H, 1, DV), (out_b, out_h, out_s, 1), dtype)
    partial_out = T.Tensor((B, H, splits, DV + 2), "float32")

    @T.prim_func
    def decode(
        q: T.StridedTensor((B, H, 1, D), (q_b, q_h, q_s, 1), dtype),
        k: T.StridedTensor((B, H, L, D), (k_b, k_h, k_s, 1), dtype),
        v: T.StridedTensor((B, H, L, DV), (v_b, v_h, v_s, 1), dtype),
        out: one_out if whole else partial_out,
        span: T.int32,
        scale: T.float32,
    ):
        with T.Kernel(B * H, T.ceildiv(L, span), threads=128) as (row, split):
            T.assume(k_b % 8 == 0)  # TMA wants rows aligned to 16 bytes; run_decode() checked it
            T.assume(k_h % 8 == 0)
            T.assume(k_s % 8 == 0)
            T.assume(v_b % 8 == 0)
            T.assume(v_h % 8 == 0)
            T.assume(v_s % 8 == 0)
            q_tile = T.alloc_shared((rows, columns), dtype)
            k_tile = T.alloc_shared((keys, columns), dtype)
            v_tile = T.alloc_shared((keys, v_columns), dtype)
            weights = T.alloc_shared((rows, keys), dtype)
            scores = T.alloc_fragment((rows, keys), "float32")
            acc = T.alloc_fragment((rows, v_columns), "float32")
            largest = T.alloc_fragment((rows,), "float32")
            shrink = T.alloc_fragment((rows,), "float32")
            sums = T.alloc_fragment((rows,), "float32")
            added = T.alloc_fragment((rows,), "float32")
            batch = T.alloc_var("int32")
            head = T.alloc_var("int32")
            begin = T.alloc_var("int32")
            steps = T.alloc_var("int32")

            T.annotate_ws_schedule(
                one_warp_fetches(
                    4,
                    {"k": ([k_tile], stages), "v": ([v_tile], stages)},
                    {
                        "steps": ["acquire k", "fetch_k", "commit k", "acquire v", "fetch_v", "commit v"],
                        T.WSScope.ROOT: ["place", "steps"],
                    },
                    {
                        "steps": ["wait k", "multiply_k", "release k", "weigh", "wait v", "multiply_v", "release v"],
                        T.WSScope.ROOT: ["place", "start", "steps", "store"],
                    },
                )
            )
            with T.ws_op("place"):
                batch = T.truncdiv(row, H)
                head = T.truncmod(row, H)
                begin = split * span
                steps = T.truncdiv(T.min(span, L - split * span) + keys - 1, keys)
            with T.ws_op("start"):
                for i, j in T.Parallel(rows, columns):
                    q_tile[i, j] = T.if_then_else(i < 1 and j < D, q[batch, head, 0, j], 0)
                T.clear(acc)
                T.fill(largest, LEAST_SCORE)
                T.clear(sums)
            for step in T.Pipelined(steps, num_stages=stages, annotations={T.WSID: "steps"}):
                T.copy(k[batch, head, begin + step * keys, 0], k_tile, annotations={T.WSID: "fetch_k"})
                T.copy(v[batch, head, begin + step * keys, 0], v_tile, annotations={T.WSID: "fetch_v"})
                T.gemm(
                    q_tile,
                    k_tile,
                    scores,
                    transpose_B=True,
                    policy=policy,
                    clear_accum=True,
                    annotations={T.WSID: "multiply_k"},
                )
                with T.ws_op("weigh"):
                    if begin + (step + 1) * keys > L:
                        for i, j in T.Parallel(rows, keys):
                            scores[i, j] = T.if_then_else(
                                begin + step * keys + j < L, scores[i, j], -T.infinity("float32")
                            )
                    weigh(scores, largest, shrink, sums, added, scale, rows, keys)
                    T.copy(scores, weights)
                    for i, j in T.Parallel(rows, v_columns):
                        acc[i, j] = acc[i, j] * shrink[i]
                T.gemm(weights, v_tile, acc, policy=policy, annotations={T.WSID: "multiply_v"})
            with T.ws_op("store"):
                if whole:
                    for i, j in T.Parallel(rows, v_columns):
                        if i < 1 and j < DV:
                            out[batch, head, 0, j] = T.cast(acc[i, j] / sums[i], dtype)
                else:
                    for i, j in T.Parallel(rows, v_columns):
                        if i < 1 and j < DV:
                            out[batch, head, split, j] = acc[i, j]
                    for i in T.Parallel(rows):
                        if i < 1:
                            out[batch, head, split, DV] = largest[i]
                            out[batch, head, split, DV + 1] = sums[i]

    return decode


@functools.cache
@tilelang.jit(pass_configs=FLAGS)
def join_kernel(DV, dtype):
    """Compile out = the parts of each head, joined: a thread a column, always in the order of the spans."""
    B, H, splits, heads = T.dynamic("B H splits heads")
    out_b, out_h, out_s = T.dynamic("out_b out_h out_s", "int64")
    loads = 16  # of a thread in flight

    @T.prim_func
    def join(
        parts: T.Tensor((heads, splits, DV + 2), "float32"),
        out: T.StridedTensor((B, H, 1, DV), (out_b, out_h, out_s, 1), dtype),
        scale: T.float32,
    ):
        with T.Kernel(heads, threads=-(-DV // 32) * 32) as row:
            batch, head = T.truncdiv(row, H), T.truncmod(row, H)
            column = T.get_thread_binding(0)
            scores = T.alloc_local((loads,), "float32")
            weights = T.alloc_local((loads,), "float32")
            values = T.alloc_local((loads,), "float32")
            largest = T.alloc_var("float32", init=LEAST_SCORE)
            share = T.alloc_var("float32", init=0.0)
            total = T.alloc_var("float32", init=0.0)
            acc = T.alloc_var("float32", init=0.0)

            for turn in T.serial(T.ceildiv(splits, loads)):
                for u in T.unroll(loads):
                    largest = T.max(largest, parts[row, T.min(turn * loads + u, splits - 1), DV])
            for turn in T.serial(T.ceildiv(splits, loads)):
                for u in T.unroll(loads):
                    scores[u] = parts[row, T.min(turn * loads + u, splits - 1), DV]
                    weights[u] = parts[row, T.min(turn * loads + u, splits - 1), DV + 1]
                    values[u] = parts[row, T.min(turn * loads + u, splits - 1), T.min(column, DV - 1)]
                for u in T.unroll(loads):
                    share = T.if_then_else(turn * loads + u < splits, T.exp2((scores[u] - largest) * scale), 0.0)
                    total += share * weights[u]
                    acc += share * values[u]
            if column < DV:
                out[batch, head, 0, column] = T.cast(acc / total, dtype)

    return join


@functools.cache
@tilelang.jit(pass_configs=FLAGS)
def plain_decode_kernel(D, DV, dtype):
    """Compile the kernel for keys that TMA cannot address, and for scales of any sign: a warp a head, a key a turn."""
    B, H, L = T.dynamic("B H L")
    q_b, q_h, q_s, out_b, out_h, out_s = T.dynamic("q_b q_h q_s out_b out_h out_s", "int64")
    k_b, k_h, k_s, v_b, v_h, v_s = T.dynamic("k_b k_h k_s v_b v_h v_s", "int64")
    parts, v_parts = -(-D // 32), -(-DV // 32)

    @T.prim_func
    def plain_decode(
        q: T.StridedTensor((B, H, 1, D), (q_b, q_h, q_s, 1), dtype),
        k: T.StridedTensor((B, H, L, D), (k_b, k_h, k_s, 1), dtype),
        v: T.StridedTensor((B, H, L, DV), (v_b, v_h, v_s, 1), dtype),
        out: T.StridedTensor((B, H, 1, DV), (out_b, out_h, out_s, 1), dtype),
        sign: T.float32,
        scale: T.float32,
    ):
        with T.Kernel(B * H, threads=32) as row:
            batch, head = T.truncdiv(row, H), T.truncmod(row, H)
            lane = T.get_thread_binding(0)
            wanted = T.alloc_local((parts,), "float32")
            acc = T.alloc_local((v_parts,), "float32")
            largest = T.alloc_var("float32", init=LEAST_SCORE)
            grown = T.alloc_var("float32", init=0.0)
            total = T.alloc_var("float32", init=0.0)
            score = T.alloc_var("float32", init=0.0)
            shrink = T.alloc_var("float32", init=0.0)
            weight = T.alloc_var("float32", init=0.0)

            for p in T.unroll(v_parts):
                acc[p] = 0.0
            for p in T.unroll(parts):
                wanted[p] = 0.0
                if p * 32 + lane < D:
                    wanted[p] = T.cast(q[batch, head, 0, p * 32 + lane], "float32")
            for key in T.serial(L):
                score = 0.0
                for p in T.unroll(parts):
                    if p * 32 + lane < D:
                        score += wanted[p] * T.cast(k[batch, head, key, p * 32 + lane], "float32")
                for step in T.unroll(5):
                    score += T.shfl_xor(score, 1 << step)
                score *= sign
                grown = T.max(largest, score)
                shrink = T.exp2((largest - grown) * scale)
                weight = T.exp2((score - grown) * scale)
                total = total * shrink + weight
                weight = T.cast(T.cast(weight, dtype), "float32")
                for p in T.unroll(v_parts):
                    acc[p] *= shrink
                    if p * 32 + lane < DV:
                        acc[p] += weight * T.cast(v[batch, head, key, p * 32 + lane], "float32")
                largest = grown
            for p in T.unroll(v_parts):
                if p * 32 + lane < DV:
                    out[batch, head, 0, p * 32 + lane] = T.cast(acc[p] / total, dtype)

    return plain_decode


# --- Launches


def columns_of(size):
    """Columns of a tile: a size filled up to what swizzled tiles and the warps of a product take."""
    return max(64, -(-size // 64) * 64)


def v_columns_of(size):
    """Columns of a tile of values, which are also those of the second product."""
    return 64 if size <= 64 else 128 if size <= 128 else 256


def for_tma(*tensors):
    """Return True if the copy engine can address all of them: rows apart, and at multiples of 16 bytes."""
    return all(
        t.data_ptr() % 16 == 0 and all(stride > 0 and stride % 8 == 0 for stride in t.stride()[:-1]) for t in tensors
    )


def sign_and_size(scale):
    """Return the sign of a scale, and its size. A size of 0 is kept from it: a hidden score of -inf would become NaN."""
    return (-1.0 if scale < 0 else 1.0), max(abs(scale), 1e-30)


@functools.cache
def multiprocessor_count(index):
    """Return the multiprocessors of a GPU; 132, those of an H100 or H200, without a GPU."""
    return torch.cuda.get_device_properties(index).multi_processor_count if torch.cuda.is_available() else 132


@functools.lru_cache(maxsize=4096)
def heads_at_a_time(all_heads, S, width):
    """Return the heads whose keys and values, of two bytes a number, stay in half of the L2 cache together."""
    fitting = max(1, L2_BYTES // 2 // (2 * S * width))
    return max(heads for heads in range(1, all_heads + 1) if all_heads % heads == 0 and heads <= fitting)


@functools.cache
def stages_of(rows, keys, columns, v_columns):
    """Return the tiles of keys and of values in flight, as many as fit into shared memory beside the queries.

    The keys of the first step and the values of the last one have tiles apart.
    """
    left = SHARED_BYTES // 2 - rows * columns - keys * (columns + v_columns)
    return next(
        (pair for pair in ((2, 2), (2, 1), (1, 1)) if keys * (pair[0] * columns + pair[1] * v_columns) <= left), None
    )


def run_prefill(q, k, v, scale, out, *, rows=None, keys=None):
    """out = T(softmax(scale * q k^T, causal) v): scores, softmax and sums in float32.

    q and k: [B, H, S, D], v and out: [B, H, S, DV], last stride 1 (any others); T is bfloat16 or float16. Weights are rounded
    to T for the second product. A CTA owns `rows` positions of a head at a time (128 or 192) and streams the keys that they
    see, `keys` a step (64 or 96). What does not fit into shared memory gets 128 rows and 64 keys. Rows that are not aligned to
    16 bytes, and scales of 0 or less, take a plain kernel, which is slow.
    """
    B, H, S, D = q.shape
    DV = v.shape[3]
    if out.numel() == 0:
        return
    scale, columns, v_columns = float(scale) * LOG2_E, columns_of(D), v_columns_of(DV)
    if not (scale > 0 and for_tma(q, k, v)):
        plain_prefill_kernel(D, DV, q.dtype, columns, v_columns)(q, k, v, out, *sign_and_size(scale))
        return
    multiprocessors = multiprocessor_count(q.device.index)
    rows = (rows or 128) if v_columns <= 128 else 128
    keys = keys or 64
    stages = stages_of(rows, keys, columns, v_columns)
    if stages is None or v_columns > 128:
        rows, keys = 128, 64 if columns + v_columns <= 384 else 32
        stages = stages_of(rows, keys, columns, v_columns)
    kernel = prefill_kernel(D, DV, q.dtype, rows, keys, columns, v_columns, *stages, multiprocessors)
    kernel(q, k, v, out, heads_at_a_time(B * H, S, D + DV), scale)


@functools.lru_cache(maxsize=4096)
def default_span(programs, L, least, wanted):
    """Return the positions of a CTA, a multiple of 128: as few as `wanted` CTAs allow, but `least`, or all if these are few."""
    if 2 * least >= L:
        return -(-L // 128) * 128
    splits = max(1, wanted // programs)
    return max(least, -(-L // (splits * 128)) * 128)


def run_decode(q, k, v, scale, out, *, least=256, stages=2):
    """out = T(softmax(scale * q k^T) v): scores, softmax and sums in float32.

    q: [B, H, 1, D], k: [B, H, L, D], v: [B, H, L, DV], out: [B, H, 1, DV], last stride 1 (any others); T is bfloat16 or float16.
    Weights are rounded to T for the second product. A CTA owns a head and a span of `least` or more positions, two CTAs a
    multiprocessor with `stages` tiles of keys and of values each; spans are joined by a second kernel. Rows of k or v that are
    not aligned to 16 bytes, and scales of 0 or less, take a plain kernel, which is slow.
    """
    B, H, _, D = q.shape
    L, DV = k.shape[2], v.shape[3]
    if out.numel() == 0:
        return
    scale = float(scale) * LOG2_E
    if not (scale > 0 and for_tma(k, v)):
        plain_decode_kernel(D, DV, q.dtype)(q, k, v, out, *sign_and_size(scale))
        return
    columns, v_columns = columns_of(D), v_columns_of(DV)
    span = default_span(B * H, L, least, 2 * multiprocessor_count(q.device.index))
    splits = -(-L // span)
    kernel = decode_kernel(
        D, DV, q.dtype, 64 if columns + v_columns <= 384 else 32, columns, v_columns, stages, splits == 1
    )
    if splits == 1:
        kernel(q, k, v, out, span, scale)
        return
    parts = torch.empty((B, H, splits, DV + 2), dtype=torch.float32, device=q.device)
    kernel(q, k, v, parts, span, scale)
    join_kernel(DV, q.dtype)(parts.view(B * H, splits, DV + 2), out, scale)
