"""Experts by the square root of softplus, or by a table, TileLang: one launch."""

import functools

import tilelang
import tilelang.language as T


def rounded(value, dtype):
    """A float32 number that is one of `dtype`."""
    return T.cast(T.cast(value, dtype), "float32")


def score_of(logit, dtype):
    """The square root of log(1 + exp(x)), both rounded as eager code does: which scores are equal depends on it."""
    soft = T.max(logit, T.float32(0)) + T.log1p(T.exp(-T.abs(logit)))
    return rounded(T.sqrt(rounded(soft, dtype)), dtype)


def share_of(score, total, scale, dtype):
    """score / (total + 1e-20) * scale, every step of it rounded."""
    most = rounded(rounded(total, dtype) + T.float32(1e-20), dtype)
    return T.cast(rounded(score / most, dtype) * scale, dtype)


@functools.cache
@tilelang.jit
def choose_kernel(E, K, dtype, rows):
    """Compile for E experts of which K are chosen, a warp a row, its scores in registers; `rows` rows a CTA."""
    M = T.dynamic("M")
    logits_stride, weights_stride, ids_stride = T.dynamic("logits_stride weights_stride ids_stride", "int64")
    chunks = -(-E // 32)

    @T.prim_func
    def choose(
        logits: T.StridedTensor((M, E), (logits_stride, 1), dtype),
        bias: T.Tensor((E,), "float32"),
        weights: T.StridedTensor((M, K), (weights_stride, 1), dtype),
        ids: T.StridedTensor((M, K), (ids_stride, 1), "int64"),
        scale: T.float32,
    ):
        with T.Kernel(T.ceildiv(M, rows), threads=32 * rows) as block:
            lane, warp = T.get_thread_binding(0) % 32, T.get_thread_binding(0) // 32
            row = block * rows + warp
            scores = T.alloc_local((chunks,), "float32")
            ranked = T.alloc_local((chunks,), "float32")
            taken = T.alloc_var("uint32", init=0)  # a bit for each of this lane's scores
            logit = T.alloc_var("float32", init=0.0)
            total = T.alloc_var("float32", init=0.0)
            best = T.alloc_var("float32", init=0.0)
            best_score = T.alloc_var("float32", init=0.0)
            top = T.alloc_var("float32", init=0.0)
            chosen = T.alloc_var("float32", init=0.0)
            place = T.alloc_var("int32", init=0)
            first = T.alloc_var("int32", init=0)
            expert = T.alloc_var("int32", init=0)

            for c in T.unroll(chunks):
                ranked[c] = -T.infinity("float32")
                scores[c] = 0.0
                if c * 32 + lane < E:
                    logit = T.cast(logits[T.min(row, M - 1), c * 32 + lane], "float32")
                    scores[c] = score_of(logit, dtype)
                    ranked[c] = scores[c] + bias[c * 32 + lane]
                    if T.isnan(ranked[c]):  # above all, so that every id exists
                        ranked[c] = T.infinity("float32")
                else:
                    taken = taken | T.uint32(1 << c)

            for k in T.serial(K):
                best = -T.infinity("float32")
                place = E
                for c in T.unroll(chunks):
                    if (taken & T.uint32(1 << c)) == T.uint32(0) and (place == E or ranked[c] > best):
                        best = ranked[c]
                        best_score = scores[c]
                        place = c * 32 + lane
                top = T.warp_reduce_max(best)
                first = T.warp_reduce_min(T.if_then_else(best == top, place, E))
                best_score = T.shfl_sync(best_score, first % 32)
                if place == first:
                    taken = taken | (T.uint32(1) << T.cast(first // 32, "uint32"))
                if lane == k:
                    chosen = best_score
                    expert = first
            total = T.warp_reduce_sum(T.if_then_else(lane < K, chosen, 0.0))
            if row < M and lane < K:
                weights[row, lane] = share_of(chosen, total, scale, dtype)
                ids[row, lane] = T.cast(expert, "int64")

    return choose


@functools.cache
@tilelang.jit
def look_up_kernel(E, K, dtype, threads):
    """Compile for E experts and tables of K a token: as many lanes a row as the next power of two has."""
    M, V = T.dynamic("M"), T.dynamic("V")
    logits_stride, table_stride = T.dynamic("logits_stride table_stride", "int64")
    weights_stride, ids_stride = T.dynamic("weights_stride ids_stride", "int64")
    lanes = 1 << (K - 1).bit_length()
    rows = threads // lanes

    @T.prim_func
    def look_up(
        logits: T.StridedTensor((M, E), (logits_stride, 1), dtype),
        token_ids: T.Tensor((M,), "int64"),
        table: T.StridedTensor((V, K), (table_stride, 1), "int64"),
        weights: T.StridedTensor((M, K), (weights_stride, 1), dtype),
        ids: T.StridedTensor((M, K), (ids_stride, 1), "int64"),
        scale: T.float32,
    ):
        with T.Kernel(T.ceildiv(M, rows), threads=threads) as block:
            thread = T.get_thread_binding(0)
            row = block * rows + thread // lanes
            choice = thread % lanes
            token = T.alloc_var("int64", init=0)
            expert = T.alloc_var("int64", init=0)
            logit = T.alloc_var("float32", init=0.0)
            score = T.alloc_var("float32", init=0.0)
            total = T.alloc_var("float32", init=0.0)

            # What no table has is read nowhere: an id that is out of range gives the experts 0, and such an expert a score of
            # zero.
            if row < M and choice < K:
                token = token_ids[row]
                if token >= T.int64(0) and token < T.cast(V, "int64"):
                    expert = table[token, choice]
                if expert >= T.int64(0) and expert < T.int64(E):
                    logit = T.cast(logits[row, expert], "float32")
                    score = score_of(logit, dtype)
            total = score
            for step in T.unroll(lanes.bit_length() - 1):
                total = total + T.shfl_xor(total, 1 << step)
            if row < M and choice < K:
                weights[row, choice] = share_of(score, total, scale, dtype)
                ids[row, choice] = expert

    return look_up


def run_topk_sqrtsoftplus_bias(logits, bias, top_k, scale, weights, ids, *, rows=4):
    """weights = scale * s / sum(s), s the square roots of softplus(logits)[ids]; ids are ranked with the bias added.

    Shapes: logits [M, E] and weights [M, K] of bfloat16 or float32; bias [E] float32; ids [M, K] int64. Rows have unit last
    stride and any row stride. top_k times a warp looks for the largest value that is left, and of equal ones takes the first.
    """
    M, E = logits.shape
    if M == 0:
        return
    choose_kernel(E, top_k, logits.dtype, rows)(logits, bias, weights, ids, float(scale))


def run_table_router(logits, token_ids, table, scale, weights, ids, *, threads=128):
    """weights = scale * s / sum(s), s the square roots of softplus(logits)[ids]; ids = table[token_ids].

    Shapes: logits [M, E] and weights [M, K] of bfloat16 or float32; token_ids [M], table [V, K] and ids [M, K] int64.
    Rows have unit last stride and any row stride.
    """
    M, E = logits.shape
    if M == 0:
        return
    look_up_kernel(E, ids.shape[1], logits.dtype, threads)(logits, token_ids, table, weights, ids, float(scale))
