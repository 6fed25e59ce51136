"""Draw one index of each row of probabilities, TileLang: a thread block a row, one launch, no sort.

What is kept are the probabilities from a threshold up. Numbers that are not negative are ordered as the integers that have their
bits, so the threshold is found from its highest bits down, two of them in a pass over the row: it is the largest one with enough
probabilities, or enough of their sum, at or above it. A row is read from memory once and then from the cache.

The draw takes the columns thread by thread: each thread adds up what is kept of its own, one scan over the threads finds the one
in whose part the random number lies, and that thread walks its columns again.
"""

import functools

import tilelang
import tilelang.language as T

MOST = 0x7FFFFFFF  # a NaN's bits, which no probability has; and more than there are columns


@T.macro
def add_up(thread, warps, values, partial):
    """Leave in each of three values its sum over all threads, the same in each."""
    for i in T.unroll(3):
        values[i] = T.warp_reduce_sum(values[i])
    if thread % 32 == 0:
        for i in T.unroll(3):
            partial[i, thread // 32] = values[i]
    T.sync_threads()
    for i in T.unroll(3):
        values[i] = 0.0
        for w in T.serial(warps):
            values[i] += partial[i, w]
    T.sync_threads()  # before the next pass writes over what others may still read


@T.macro
def find_threshold(probs, row, thread, floor, least, found, values, sums, partial, V, vec, threads, count):
    """Leave in found[0] the largest bits at or above which there are least[0] values, or so much, and something.

    What has fewer bits than floor[0] is no part of it. Counts are float32 too: a row has fewer than 2 ** 24 columns.
    """
    low = T.alloc_var("int32", init=0)
    middle = T.alloc_var("int32", init=0)
    high = T.alloc_var("int32", init=0)
    weight = T.alloc_var("float32", init=0.0)
    bits = T.alloc_var("int32", init=0)
    found[0] = 0
    for step in T.serial(16):
        # Bit 31 is the sign: the first pass has one bit to decide, and thresholds beside it that nothing reaches.
        if step == 0:
            low = 1 << 30
            middle = MOST
            high = MOST
        else:
            low = found[0] | (1 << (30 - 2 * step))
            middle = found[0] | (2 << (30 - 2 * step))
            high = low | middle
        for i in T.unroll(3):
            sums[i] = 0.0
        for c in T.serial(-(-V // (threads * vec))):
            column = (c * threads + thread) * vec
            if column < V:
                for v in T.vectorized(vec):
                    values[v] = probs[row, column + v]
                for v in T.unroll(vec):
                    bits = T.reinterpret(values[v], "int32")
                    weight = 1.0 if count else values[v]
                    if bits >= floor[0]:
                        if bits >= low:
                            sums[0] += weight
                        if bits >= middle:
                            sums[1] += weight
                        if bits >= high:
                            sums[2] += weight
        add_up(thread, threads // 32, sums, partial)
        if sums[0] >= least[0] and sums[0] > 0.0:
            found[0] = low
        if sums[1] >= least[0] and sums[1] > 0.0:
            found[0] = middle
        if sums[2] >= least[0] and sums[2] > 0.0:
            found[0] = high


@T.macro
def kept_sum(probs, row, thread, threshold, own, values, V, vec, threads):
    """Leave in own[0] what this thread's columns have at or above the threshold."""
    own[0] = 0.0
    for c in T.serial(-(-V // (threads * vec))):
        column = (c * threads + thread) * vec
        if column < V:
            for v in T.vectorized(vec):
                values[v] = probs[row, column + v]
            for v in T.unroll(vec):
                if T.reinterpret(values[v], "int32") >= threshold[0]:
                    own[0] += values[v]


@functools.cache
@tilelang.jit
def sample_kernel(V, vec, threads, by_rank, by_mass, by_largest):
    """Compile for rows of V probabilities, `vec` of which a thread loads at a time, and for these filters."""
    B = T.dynamic("B")
    stride = T.dynamic("stride", "int64")
    warps = threads // 32

    @T.prim_func
    def sample(
        probs: T.StridedTensor((B, V), (stride, 1), "float32"),
        top_k: T.Tensor((B,), "int32" if by_rank else "float32"),
        share: T.Tensor((B,), "float32"),
        uniform: T.Tensor((B,), "float32"),
        samples: T.Tensor((B,), "int64"),
    ):
        with T.Kernel(B, threads=threads) as row:
            T.assume(stride % vec == 0)  # the entry functions chose vec so; it lets the compiler use vector accesses
            thread = T.get_thread_binding(0)
            values = T.alloc_local((vec,), "float32")
            sums = T.alloc_local((3,), "float32")
            least = T.alloc_local((1,), "float32")
            own = T.alloc_local((1,), "float32")
            threshold = T.alloc_local((1,), "int32")
            found = T.alloc_local((1,), "int32")
            partial = T.alloc_shared((3, warps), "float32")
            order = T.alloc_shared((warps,), "int32")
            end = T.alloc_var("float32", init=0.0)
            lower = T.alloc_var("float32", init=0.0)
            target = T.alloc_var("float32", init=0.0)
            place = T.alloc_var("int32", init=0)
            winner = T.alloc_var("int32", init=0)
            index = T.alloc_var("int32", init=0)
            done = T.alloc_var("int32", init=0)

            threshold[0] = 0
            if by_rank:
                least[0] = T.float32(V)
                if top_k[row] >= 1 and top_k[row] <= V:
                    least[0] = T.cast(top_k[row], "float32")
                find_threshold(
                    probs, row, thread, threshold, least, found, values, sums, partial, V, vec, threads, True
                )
                threshold[0] = found[0]
            if by_mass:
                kept_sum(probs, row, thread, threshold, own, values, V, vec, threads)
                sums[0] = own[0]
                sums[1] = 0.0
                sums[2] = 0.0
                add_up(thread, warps, sums, partial)
                least[0] = share[row] * sums[0]
                find_threshold(
                    probs, row, thread, threshold, least, found, values, sums, partial, V, vec, threads, False
                )
                if share[row] < 1.0:
                    threshold[0] = T.max(threshold[0], found[0])
            if by_largest:
                own[0] = 0.0
                for c in T.serial(-(-V // (threads * vec))):
                    column = (c * threads + thread) * vec
                    if column < V:
                        for v in T.vectorized(vec):
                            values[v] = probs[row, column + v]
                        for v in T.unroll(vec):
                            own[0] = T.max(own[0], values[v])
                own[0] = T.warp_reduce_max(own[0])
                if thread % 32 == 0:
                    partial[0, thread // 32] = own[0]
                T.sync_threads()
                for w in T.serial(warps):
                    own[0] = T.max(own[0], partial[0, w])
                T.sync_threads()
                least[0] = T.max(T.min(share[row], 1.0) * own[0], 0.0)
                threshold[0] = T.reinterpret(least[0], "int32")

            # Where each thread's part of the kept sum ends: a scan of its warp, after the warps before it.
            kept_sum(probs, row, thread, threshold, own, values, V, vec, threads)
            end = own[0]
            for step in T.unroll(5):
                lower = T.shfl_up(end, 1 << step)
                if thread % 32 >= 1 << step:
                    end += lower
            if thread % 32 == 31:
                partial[0, thread // 32] = end
            T.sync_threads()
            target = 0.0
            for w in T.serial(warps):
                target += partial[0, w]
                if w < thread // 32:
                    end += partial[0, w]
            target = target * uniform[row]
            # The first thread whose part ends beyond the target; where rounding leaves none, the last one that has a part.
            place = 3 * threads
            if own[0] > 0.0:
                place = 2 * threads - thread
                if end > target:
                    place = thread
            winner = T.warp_reduce_min(place)
            if thread % 32 == 0:
                order[thread // 32] = winner
            T.sync_threads()
            for w in T.serial(warps):
                winner = T.min(winner, order[w])
            if place == winner:
                lower = end - own[0]
                index = 0
                done = 0
                for c in T.serial(-(-V // (threads * vec))):
                    column = (c * threads + thread) * vec
                    if column < V and done == 0:
                        for v in T.vectorized(vec):
                            values[v] = probs[row, column + v]
                        for v in T.unroll(vec):
                            if done == 0 and values[v] > 0.0 and T.reinterpret(values[v], "int32") >= threshold[0]:
                                lower += values[v]
                                index = column + v
                                if lower > target:
                                    done = 1
                samples[row] = T.cast(index, "int64")

    return sample


@functools.cache
@tilelang.jit
def argmax_kernel(V, dtype, vec, threads):
    """Compile for rows of V scores, `vec` of which a thread loads at a time."""
    B = T.dynamic("B")
    stride = T.dynamic("stride", "int64")
    warps = threads // 32

    @T.prim_func
    def argmax(logits: T.StridedTensor((B, V), (stride, 1), dtype), ids: T.Tensor((B,), "int64")):
        with T.Kernel(B, threads=threads) as row:
            T.assume(stride % vec == 0)  # the entry function chose vec so; it lets the compiler use vector accesses
            thread = T.get_thread_binding(0)
            values = T.alloc_local((vec,), dtype)
            tops = T.alloc_shared((warps,), "float32")
            firsts = T.alloc_shared((2, warps), "int32")
            score = T.alloc_var("float32", init=0.0)
            largest = T.alloc_var("float32", init=0.0)
            top = T.alloc_var("float32", init=0.0)
            first = T.alloc_var("int32", init=0)
            first_nan = T.alloc_var("int32", init=0)

            largest = -T.infinity("float32")
            first = MOST
            first_nan = MOST
            for c in T.serial(-(-V // (threads * vec))):
                column = (c * threads + thread) * vec
                if column < V:
                    for v in T.vectorized(vec):
                        values[v] = logits[row, column + v]
                    for v in T.unroll(vec):
                        score = T.cast(values[v], "float32")
                        if T.isnan(score):
                            first_nan = T.min(first_nan, column + v)
                        else:
                            # Only a larger one replaces what came before; the very first may be -inf.
                            if score > largest or first == MOST:
                                largest = score
                                first = column + v
            top = T.warp_reduce_max(largest)
            if thread % 32 == 0:
                tops[thread // 32] = top
            T.sync_threads()
            for w in T.serial(warps):
                top = T.max(top, tops[w])
            if largest != top:
                first = MOST
            first = T.warp_reduce_min(first)
            first_nan = T.warp_reduce_min(first_nan)
            if thread % 32 == 0:
                firsts[0, thread // 32] = first
                firsts[1, thread // 32] = first_nan
            T.sync_threads()
            if thread == 0:
                for w in T.serial(warps):
                    first = T.min(first, firsts[0, w])
                    first_nan = T.min(first_nan, firsts[1, w])
                ids[row] = T.cast(first if first_nan == MOST else first_nan, "int64")

    return argmax


def _width(rows, columns):
    """Elements that one load of at most 16 bytes may take: rows and addresses are multiples of it."""
    size = rows.dtype.itemsize
    bits = columns | rows.stride(0) | rows.data_ptr() // size | 16 // size
    return bits & -bits


def _launch(probs, top_k, share, by_largest, uniform, samples, threads):
    B, V = probs.shape
    if B == 0:
        return
    kernel = sample_kernel(
        V, _width(probs, V), threads, top_k is not None, share is not None and not by_largest, by_largest
    )
    # What a filter does not read stands for any tensor.
    kernel(probs, uniform if top_k is None else top_k, uniform if share is None else share, uniform, samples)


# Of all entry functions: probs [B, V] float32 has unit last stride and any row stride; uniform [B] float32 holds a random number
# from 0 to below 1 for each row, top_k [B] is int32, and samples [B] int64. V < 2 ** 24.


def run_top_k(probs, top_k, uniform, samples, *, threads=512):
    """samples [B]: drawn from the top_k largest probabilities of each row and those that tie with the last of them."""
    _launch(probs, top_k, None, False, uniform, samples, threads)


def run_top_p(probs, top_p, uniform, samples, *, threads=512):
    """samples [B]: drawn from the largest probabilities of each row that reach top_p of its sum, and ties with the last."""
    _launch(probs, None, top_p, False, uniform, samples, threads)


def run_top_k_top_p(probs, top_k, top_p, uniform, samples, *, threads=512):
    """samples [B]: drawn from what top-p keeps of what top-k keeps of each row."""
    _launch(probs, top_k, top_p, False, uniform, samples, threads)


def run_min_p(probs, min_p, uniform, samples, *, threads=512):
    """samples [B]: drawn from the probabilities that are at least min_p times the largest of their row."""
    _launch(probs, None, min_p, True, uniform, samples, threads)


def run_greedy_argmax(logits, ids, *, threads=512):
    """ids [B]: the first index of the largest score of each row of logits [B, V], or of its first NaN.

    logits is bfloat16, float16 or float32, with unit last stride and any row stride; ids are int64.
    """
    B, V = logits.shape
    if B == 0:
        return
    argmax_kernel(V, logits.dtype, _width(logits, V), threads)(logits, ids)
