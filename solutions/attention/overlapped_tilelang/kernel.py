"""Attention with shared key heads, causal or to all keys, TileLang: a softmax beside the products of its own and of other warps.

One warp fetches tiles of keys and values by TMA, the others multiply. The product with the values of one step runs while the
scores of the next are weighed, and warpgroups take turns with the tensor cores, as in FlashAttention-3. Rows that TMA cannot
address (not apart, or not aligned to 16 bytes) are loaded element by element, without overlap.
"""

import functools
import itertools
import math

import tilelang
import tilelang.language as T
import torch

LOG2_E = 1.4426950408889634
LEAST_SCORE = -1e30  # of a row that has seen no key: finite, so that differences of it are no NaN
MASSIVE = 2.0**28  # scaled scores beyond it differ by 8 or not at all, and a product is rounded by at most 8
FLAGS = {"tl.enable_fast_math": True}  # 2**x as one instruction; tiny weights become 0
L2_BYTES = 50 << 20  # of an H100 or H200
MANY_WAVES = 64  # of tiles: one tile more or less is no matter
NEVER_BARRIER = 15  # a named barrier at which nothing arrives
FIRST_BARRIER = 8  # named barriers of the warpgroups' turns; TileLang counts its own from 3 on


@T.macro
def hide(scores, key, first, L, causal, rows, keys):
    """Hide the keys past L, or the later ones of the positions `first` on; do nothing if no key is to be hidden.

    In causal attention L is the number of positions, and keys past L are later than every position that is stored.
    """
    if causal:
        if key + keys > first + 1:
            for i, j in T.Parallel(rows, keys):
                scores[i, j] = T.if_then_else(key + j <= first + i, scores[i, j], -T.infinity("float32"))
    else:
        if key + keys > L:
            for i, j in T.Parallel(rows, keys):
                scores[i, j] = T.if_then_else(key + j < L, scores[i, j], -T.infinity("float32"))


@T.macro
def weigh(scores, largest, steep, offset, shrink, sums, added, scale, power, rows, keys):
    """Take one step of the running softmax: unscaled scores become weights; `shrink` is what earlier sums are worth now.

    `offset` is the largest score so far, scaled. The difference of a score to it is one instruction, which does not round the
    product, so that the largest weight is 2**e with e the rounding error of the offset. That factor is in the sums too. It is
    small unless scores are massive. Two massive ones that differ are so far apart that one weighs nothing: any slope will do for
    them, and by `power`, a power of two, the offset is exact. The scale must be above 0, and `power` at least as large.
    """
    T.copy(offset, shrink)
    T.reduce_max(scores, largest, dim=1, clear=True)
    for i in T.Parallel(rows):
        steep[i] = T.if_then_else(T.abs(largest[i]) * scale > MASSIVE, power, scale)
    for i in T.Parallel(rows):
        offset[i] = T.max(shrink[i], largest[i] * steep[i])
    for i, j in T.Parallel(rows, keys):
        scores[i, j] = T.exp2(scores[i, j] * steep[i] - offset[i])
    T.reduce_sum(scores, added, dim=1)
    for i in T.Parallel(rows):
        shrink[i] = T.exp2(shrink[i] - offset[i])
    for i in T.Parallel(rows):
        sums[i] = sums[i] * shrink[i] + added[i]


@functools.cache
@tilelang.jit(pass_configs=FLAGS)
def attention_kernel(D, dtype, causal, rows, keys, columns, k_stages, v_stages, turns, multiprocessors):
    """Compile attention of tiles of `rows` positions of a query head to the keys that any of them sees, `keys` a step.

    One CTA a multiprocessor walks over the tiles, of `heads` query heads at a time, if causal the longest first. With `turns` a
    warpgroup starts its products when the one before has started its own, and weighs while that one multiplies. `columns` is D
    filled up for the tensor cores; TMA gives zeros past D, S and L. The scale must be above 0.
    """
    B, Hq, Hkv, S, L = T.dynamic("B Hq Hkv S L")
    q_b, q_h, q_s, out_b, out_h, out_s = T.dynamic("q_b q_h q_s out_b out_h out_s", "int64")
    k_b, k_h, k_s, v_b, v_h, v_s = T.dynamic("k_b k_h k_s v_b v_h v_s", "int64")
    warps = rows // 16
    # Registers of a thread that multiplies, when the last warpgroup, which fetches, keeps 24. Their sum must not grow, or the
    # kernel would wait for registers for ever.
    given = min(240, 65536 // (2 * rows + 128) // 8 * 8)
    registers = min(240, (given * (warps + 4) - 24 * 4) // warps // 8 * 8)
    full_row = T.GemmWarpPolicy.FullRow
    groups = rows // 64
    # The result leaves from the place of the last values, or from its own, and the next queries are fetched meanwhile. Large
    # heads fill the memory: it leaves from the place of the queries.
    is_large = columns == 256

    @T.prim_func
    def attention(
        q: T.StridedTensor((B, Hq, S, D), (q_b, q_h, q_s, 1), dtype),
        k: T.StridedTensor((B, Hkv, L, D), (k_b, k_h, k_s, 1), dtype),
        v: T.StridedTensor((B, Hkv, L, D), (v_b, v_h, v_s, 1), dtype),
        out: T.StridedTensor((B, Hq, S, D), (out_b, out_h, out_s, 1), dtype),
        heads: T.int32,
        scale: T.float32,
        power: T.float32,
    ):
        with T.Kernel(multiprocessors, threads=2 * rows) as block:
            T.annotate_min_blocks_per_sm(1)
            T.assume(q_b % 8 == 0)  # TMA wants rows aligned to 16 bytes; run() checked it
            T.assume(q_h % 8 == 0)
            T.assume(q_s % 8 == 0)
            T.assume(k_b % 8 == 0)
            T.assume(k_h % 8 == 0)
            T.assume(k_s % 8 == 0)
            T.assume(v_b % 8 == 0)
            T.assume(v_h % 8 == 0)
            T.assume(v_s % 8 == 0)
            T.assume(out_b % 8 == 0)
            T.assume(out_h % 8 == 0)
            T.assume(out_s % 8 == 0)
            q_tile = T.alloc_shared((rows, columns), dtype)
            k_tile = T.alloc_shared((keys, columns), dtype)
            v_tile = T.alloc_shared((keys, columns), dtype)
            k_first = T.alloc_shared((keys, columns), dtype)
            v_last = T.alloc_shared((keys, columns), dtype)
            result = q_tile if is_large else v_last if rows == keys else T.alloc_shared((rows, columns), dtype)
            scores = T.alloc_fragment((rows, keys), "float32")
            weights = T.alloc_fragment((rows, keys), dtype)
            acc = T.alloc_fragment((rows, columns), "float32")
            largest = T.alloc_fragment((rows,), "float32")
            steep = T.alloc_fragment((rows,), "float32")
            offset = T.alloc_fragment((rows,), "float32")
            shrink = T.alloc_fragment((rows,), "float32")
            sums = T.alloc_fragment((rows,), "float32")
            added = T.alloc_fragment((rows,), "float32")
            wave = T.alloc_var("int32")
            index = T.alloc_var("int32")
            group = T.alloc_var("int32")
            turn = T.alloc_var("int32")
            batch = T.alloc_var("int32")
            head = T.alloc_var("int32")
            key_head = T.alloc_var("int32")
            first = T.alloc_var("int32")
            steps = T.alloc_var("int32")
            tiles = (S + rows - 1) // rows * (B * Hq)

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
                                    wait("k"), *(["take"] if turns else []), "multiply_k", wait("v"), "multiply_v",
                                    *(["give"] if turns else []), "wait_k", release("k"), "weigh",
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
                                    *([] if is_large else [release("q")]), wait("last"), "multiply_last",
                                    *([release("last"), "store", release("q")] if is_large else ["store", release("last")]),
                                    "next",
                                ],
                            },
                        ),
                        T.WSScope(
                            T.WSScope.ROOT,
                            {
                                "fetcher": ["first", "tiles"],
                                "multiplier": ["begin", "first", "tiles", "end"] if turns else ["first", "tiles"],
                            },
                        ),
                    ],
                )
            )  # fmt: skip
            if turns:
                with T.ws_op("begin"):
                    if T.get_thread_binding(0) // 128 == groups - 1:
                        T.named_barrier_arrive(FIRST_BARRIER, 256)  # the turn of the first warpgroup
            with T.ws_op("first"):
                wave = 0
                index = block
            with T.ws_op("tiles"):
                while index < tiles:
                    with T.ws_op("place"):
                        group = T.truncdiv(index, T.truncdiv(S + rows - 1, rows) * heads)
                        turn = index - group * T.truncdiv(S + rows - 1, rows) * heads
                        batch = T.truncdiv(group * heads + T.truncmod(turn, heads), Hq)
                        head = T.truncmod(group * heads + T.truncmod(turn, heads), Hq)
                        key_head = T.truncdiv(head, T.truncdiv(Hq, Hkv))
                        if causal:
                            # The last positions see the most keys: theirs are the first tiles, of all heads of a group.
                            first = (T.truncdiv(S + rows - 1, rows) - 1 - T.truncdiv(turn, heads)) * rows
                            steps = T.truncdiv(T.min(first + rows, S) + keys - 1, keys)
                        else:
                            first = T.truncdiv(turn, heads) * rows
                            steps = T.truncdiv(L + keys - 1, keys)
                    T.copy(q[batch, head, first, 0], q_tile, annotations={T.WSID: "fetch_q"})
                    T.copy(k[batch, key_head, 0, 0], k_first, annotations={T.WSID: "fetch_first"})
                    T.gemm(q_tile, k_first, scores, transpose_B=True, policy=full_row, clear_accum=True,
                           annotations={T.WSID: "multiply_first"})  # fmt: skip
                    with T.ws_op("start"):
                        T.clear(acc)
                        T.fill(offset, LEAST_SCORE)
                        T.clear(sums)
                        hide(scores, 0, first, L, causal, rows, keys)
                        weigh(scores, largest, steep, offset, shrink, sums, added, scale, power, rows, keys)
                        T.copy(scores, weights)
                    # In one step the keys of that step and the values of the one before.
                    for step in T.Pipelined(steps - 1, num_stages=v_stages, annotations={T.WSID: "steps"}):
                        T.copy(k[batch, key_head, (step + 1) * keys, 0], k_tile, annotations={T.WSID: "fetch_k"})
                        T.copy(v[batch, key_head, step * keys, 0], v_tile, annotations={T.WSID: "fetch_v"})
                        if turns:
                            with T.ws_op("take"):
                                T.sync_threads(FIRST_BARRIER + T.get_thread_binding(0) // 128, 256)
                        T.wgmma_gemm(q_tile, k_tile, scores, transpose_B=True, policy=full_row, clear_accum=True,
                                     annotations={T.WSID: "multiply_k"})  # fmt: skip
                        T.wgmma_gemm(weights, v_tile, acc, policy=full_row, annotations={T.WSID: "multiply_v"})
                        if turns:
                            with T.ws_op("give"):
                                T.named_barrier_arrive(
                                    FIRST_BARRIER + (T.get_thread_binding(0) // 128 + 1) % groups, 256
                                )
                        with T.ws_op("wait_k"):
                            T.wait_wgmma(1)
                        with T.ws_op("weigh"):
                            hide(scores, (step + 1) * keys, first, L, causal, rows, keys)
                            weigh(scores, largest, steep, offset, shrink, sums, added, scale, power, rows, keys)
                            # ptxas would move the wait below before the softmax, and nothing would overlap. It keeps the order
                            # of barriers, and this one needs all weights. No sum of weights is below 0.
                            for i in T.Parallel(rows):
                                if added[i] < 0.0:
                                    T.named_barrier_arrive(NEVER_BARRIER, 256)
                        with T.ws_op("wait_v"):
                            T.wait_wgmma(0)
                        with T.ws_op("renew"):
                            T.copy(scores, weights)
                            for i, j in T.Parallel(rows, columns):
                                acc[i, j] = acc[i, j] * shrink[i]
                    T.copy(v[batch, key_head, (steps - 1) * keys, 0], v_last, annotations={T.WSID: "fetch_last"})
                    T.gemm(weights, v_last, acc, policy=full_row, annotations={T.WSID: "multiply_last"})
                    with T.ws_op("store"):
                        for i in T.Parallel(rows):
                            sums[i] = 1.0 / sums[i]
                        for i, j in T.Parallel(rows, columns):
                            acc[i, j] = acc[i, j] * sums[i]
                        T.copy(acc, result)
                        T.fence_proxy_async()
                        T.copy(result, out[batch, head, first, 0])
                    with T.ws_op("next"):
                        # Every other wave goes back over the CTAs, or the first ones would get the longest tile of each.
                        wave = wave + 1
                        index = wave * multiprocessors + T.if_then_else(
                            T.bitwise_and(wave, 1) == 1, multiprocessors - 1 - block, block
                        )

            if turns:
                with T.ws_op("end"):
                    if T.get_thread_binding(0) // 128 == 0:
                        T.sync_threads(FIRST_BARRIER, 256)  # of the turn that nothing takes

    return attention


@functools.cache
@tilelang.jit(pass_configs=FLAGS)
def plain_attention_kernel(D, dtype, causal, columns):
    """Compile the kernel for rows that TMA cannot address, and for scales of any sign: one element a load, no overlap."""
    B, Hq, Hkv, S, L = T.dynamic("B Hq Hkv S L")
    q_b, q_h, q_s, out_b, out_h, out_s = T.dynamic("q_b q_h q_s out_b out_h out_s", "int64")
    k_b, k_h, k_s, v_b, v_h, v_s = T.dynamic("k_b k_h k_s v_b v_h v_s", "int64")
    rows = keys = 64
    full_row = T.GemmWarpPolicy.FullRow

    @T.prim_func
    def plain_attention(
        q: T.StridedTensor((B, Hq, S, D), (q_b, q_h, q_s, 1), dtype),
        k: T.StridedTensor((B, Hkv, L, D), (k_b, k_h, k_s, 1), dtype),
        v: T.StridedTensor((B, Hkv, L, D), (v_b, v_h, v_s, 1), dtype),
        out: T.StridedTensor((B, Hq, S, D), (out_b, out_h, out_s, 1), dtype),
        sign: T.float32,
        scale: T.float32,
        power: T.float32,
    ):
        with T.Kernel(B * Hq, T.ceildiv(S, rows), threads=128) as (row, tile):
            q_tile = T.alloc_shared((rows, columns), dtype)
            k_tile = T.alloc_shared((keys, columns), dtype)
            v_tile = T.alloc_shared((keys, columns), dtype)
            scores = T.alloc_fragment((rows, keys), "float32")
            weights = T.alloc_fragment((rows, keys), dtype)
            acc = T.alloc_fragment((rows, columns), "float32")
            largest = T.alloc_fragment((rows,), "float32")
            steep = T.alloc_fragment((rows,), "float32")
            offset = T.alloc_fragment((rows,), "float32")
            shrink = T.alloc_fragment((rows,), "float32")
            sums = T.alloc_fragment((rows,), "float32")
            added = T.alloc_fragment((rows,), "float32")
            batch = T.alloc_var("int32")
            head = T.alloc_var("int32")
            key_head = T.alloc_var("int32")
            first = T.alloc_var("int32")

            batch = T.truncdiv(row, Hq)
            head = T.truncmod(row, Hq)
            key_head = T.truncdiv(head, T.truncdiv(Hq, Hkv))
            first = tile * rows
            T.clear(acc)
            T.fill(offset, LEAST_SCORE)
            T.clear(sums)
            for i, j in T.Parallel(rows, columns):
                q_tile[i, j] = T.if_then_else(first + i < S and j < D, q[batch, head, first + i, j], 0)
            for step in T.serial(T.truncdiv((T.min(first + rows, S) if causal else L) + keys - 1, keys)):
                for i, j in T.Parallel(keys, columns):
                    k_tile[i, j] = T.if_then_else(
                        step * keys + i < L and j < D, k[batch, key_head, step * keys + i, j], 0
                    )
                for i, j in T.Parallel(keys, columns):
                    v_tile[i, j] = T.if_then_else(
                        step * keys + i < L and j < D, v[batch, key_head, step * keys + i, j], 0
                    )
                T.gemm(q_tile, k_tile, scores, transpose_B=True, policy=full_row, clear_accum=True)
                for i, j in T.Parallel(rows, keys):
                    scores[i, j] = scores[i, j] * sign
                hide(scores, step * keys, first, L, causal, rows, keys)
                weigh(scores, largest, steep, offset, shrink, sums, added, scale, power, rows, keys)
                T.copy(scores, weights)
                for i, j in T.Parallel(rows, columns):
                    acc[i, j] = acc[i, j] * shrink[i]
                T.gemm(weights, v_tile, acc, policy=full_row)
            for i, j in T.Parallel(rows, columns):
                if first + i < S and j < D:
                    out[batch, head, first + i, j] = T.cast(acc[i, j] / sums[i], dtype)

    return plain_attention


def columns_of(D):
    """Columns of a tile: D filled up to what swizzled tiles and the warps of a product take."""
    return 64 if D <= 64 else 128 if D <= 128 else 256


def for_tma(*tensors):
    """Whether the copy engine can address all of them: rows apart, and at multiples of 16 bytes."""
    return all(
        t.data_ptr() % 16 == 0 and all(stride > 0 and stride % 8 == 0 for stride in t.stride()[:-1]) for t in tensors
    )


@functools.lru_cache(maxsize=256)
def power_of_two(scale):
    """Return the least power of two that is no smaller than a scale above 0."""
    return 2.0 ** math.ceil(math.log2(scale))


def sign_and_size(scale):
    """Return the sign of a scale, and its size. A size of 0 is kept from it: a hidden score of -inf would become NaN."""
    return (-1.0 if scale < 0 else 1.0), max(abs(scale), 1e-30)


@functools.cache
def multiprocessor_count(index):
    """Multiprocessors of a GPU; 132, those of an H100 or H200, where there is none (compiling without a GPU)."""
    return torch.cuda.get_device_properties(index).multi_processor_count if torch.cuda.is_available() else 132


def most_work(all_heads, heads, S, rows, keys, multiprocessors):
    """Return the steps of the CTA with the most of them, and one more for each of its tiles, in causal attention."""
    tiles = -(-S // rows)
    changes = [0] * (multiprocessors + 1)  # of the work from one CTA to the next
    index = 0
    while index < tiles * all_heads:
        # As many tiles as are equally long and of one wave.
        wave = index // multiprocessors
        after = min(index // heads * heads + heads, (wave + 1) * multiprocessors, tiles * all_heads)
        first, last = index - wave * multiprocessors, after - wave * multiprocessors
        if wave % 2 == 1:
            first, last = multiprocessors - last, multiprocessors - first
        tile = tiles - 1 - index % (tiles * heads) // heads
        steps = -(-min(tile * rows + rows, S) // keys) + 1
        changes[first] += steps
        changes[last] -= steps
        index = after
    return max(itertools.accumulate(changes))


@functools.lru_cache(maxsize=4096)
def heads_at_a_time(all_heads, group, S, L, D, causal, rows, keys, multiprocessors):
    """Return how many query heads share a turn: few, so that L2 keeps their keys and values, unless CTAs idle the longer.

    The tiles of a CTA are known beforehand, and so is the CTA with the most work. Many waves even out.
    """
    fitting = max(group, L2_BYTES // 2 // (4 * L * D) * group)
    possible = [heads for heads in range(1, all_heads + 1) if all_heads % heads == 0]
    chosen = max(heads for heads in possible if heads <= fitting)
    if not causal or -(-S // rows) * all_heads > MANY_WAVES * multiprocessors:
        return chosen
    possible = [heads for heads in possible if heads >= max(4, group)] or [chosen]
    work = {heads: most_work(all_heads, heads, S, rows, keys, multiprocessors) for heads in possible}
    return min(possible, key=lambda heads: work[heads] * (1.0 if heads <= fitting else 1.02))


def attend(q, k, v, scale, out, causal, rows, keys, turns):
    """Write the attention of q to k and v with any strides but the last; ``rows`` and ``keys`` of a tile, None by shape."""
    B, Hq, S, D = q.shape
    L = k.shape[2]
    if q.numel() == 0:
        return
    scale, columns = float(scale) * LOG2_E, columns_of(D)
    if not (scale > 0 and for_tma(q, k, v, out)):
        sign, size = sign_and_size(scale)
        plain_attention_kernel(D, q.dtype, causal, columns)(q, k, v, out, sign, size, power_of_two(size))
        return
    multiprocessors = multiprocessor_count(q.device.index)
    # Large tiles read keys the least often. They need enough tiles to even out, and few rows past S. Large heads take the
    # registers of 192 rows.
    is_large = B * Hq * S >= 192 * 4 * multiprocessors and -(-S // 192) * 192 <= -(-S // 128) * 128
    rows = rows or (192 if is_large and not causal else 128)
    rows = rows if columns == 64 else 128
    keys = 64 if columns == 256 else keys or 128
    k_stages = 1 if columns == 256 else 2
    kernel = attention_kernel(D, q.dtype, causal, rows, keys, columns, k_stages, 2, turns, multiprocessors)
    heads = heads_at_a_time(B * Hq, Hq // k.shape[1], S, L, D, causal, rows, keys, multiprocessors)
    kernel(q, k, v, out, heads, scale, power_of_two(scale))


def run_prefill(q, k, v, scale, out, *, rows=None, keys=None, turns=True):
    """out = T(softmax(scale * q k^T, causal) v): scores, softmax and sums in float32.

    q and out: [B, Hq, S, D], k and v: [B, Hkv, S, D], last stride 1 (any others); T is bfloat16 or float16. Weights are rounded
    to T for the second product. A CTA owns `rows` positions of a query head at a time (128, or 192 for heads of up to 64) and
    streams the keys that they see, `keys` a step (64 or 128). With `turns` its warpgroups multiply in turn. None chooses by
    shape. Rows that are not aligned to 16 bytes, and scales of 0 or less, take a plain kernel, which is slow.
    """
    attend(q, k, v, scale, out, True, rows, keys, turns)


def run_all_keys(q, k, v, scale, out, *, rows=None, keys=None, turns=True):
    """out = T(softmax(scale * q k^T) v), as run_prefill(), for k and v [B, Hkv, L, D] that every position sees."""
    attend(q, k, v, scale, out, False, rows, keys, turns)
