"""Choose K of E experts by their scores, TileLang: one launch, a warp a row, scores in registers."""

import functools

import tilelang
import tilelang.language as T


@functools.cache
@tilelang.jit
def choose_kernel(E, K, dtype, over_chosen, rows):
    """Compile for E experts of which K are chosen: a softmax over all, or `over_chosen`; `rows` rows a CTA."""
    M = T.dynamic("M")
    logits_stride, weights_stride, ids_stride = T.dynamic("logits_stride weights_stride ids_stride", "int64")
    chunks = -(-E // 32)

    @T.prim_func
    def choose(
        logits: T.StridedTensor((M, E), (logits_stride, 1), dtype),
        weights: T.StridedTensor((M, K), (weights_stride, 1), dtype),
        ids: T.StridedTensor((M, K), (ids_stride, 1), "int64"),
    ):
        with T.Kernel(T.ceildiv(M, rows), threads=32 * rows) as block:
            lane, warp = T.get_thread_binding(0) % 32, T.get_thread_binding(0) // 32
            row = block * rows + warp
            scores = T.alloc_local((chunks,), "float32")
            taken = T.alloc_var("uint32", init=0)  # a bit for each of this lane's scores
            poison = T.alloc_var("float32", init=0.0)
            highest = T.alloc_var("float32", init=0.0)
            total = T.alloc_var("float32", init=0.0)
            best = T.alloc_var("float32", init=0.0)
            top = T.alloc_var("float32", init=0.0)
            chosen = T.alloc_var("float32", init=0.0)
            place = T.alloc_var("int32", init=0)
            first = T.alloc_var("int32", init=0)
            expert = T.alloc_var("int32", init=0)

            for c in T.unroll(chunks):
                scores[c] = -T.infinity("float32")
                if c * 32 + lane < E:
                    scores[c] = T.cast(logits[T.min(row, M - 1), c * 32 + lane], "float32")
                    if T.isnan(scores[c]):
                        poison = scores[c]
                else:
                    taken = taken | T.uint32(1 << c)
            # A row with a NaN has NaN for weights, as eager code, and ids that exist: what comes after it indexes with them.
            poison = T.warp_reduce_sum(poison)
            if T.isnan(poison):
                for c in T.unroll(chunks):
                    if c * 32 + lane < E:
                        scores[c] = 0.0
            highest = scores[0]
            for c in T.unroll(1, chunks):
                highest = T.max(highest, scores[c])
            highest = T.warp_reduce_max(highest)
            if not over_chosen:
                for c in T.unroll(chunks):
                    total += T.exp(scores[c] - highest)
                total = T.warp_reduce_sum(total)

            # A softmax keeps the order of its scores, and rounds where they do not: the scores are ranked.
            for k in T.serial(K):
                best = -T.infinity("float32")
                place = E
                for c in T.unroll(chunks):
                    if (taken & T.uint32(1 << c)) == T.uint32(0) and (place == E or scores[c] > best):
                        best = scores[c]
                        place = c * 32 + lane
                top = T.warp_reduce_max(best)
                first = T.warp_reduce_min(T.if_then_else(best == top, place, E))
                if place == first:
                    taken = taken | (T.uint32(1) << T.cast(first // 32, "uint32"))
                if lane == k:
                    chosen = top
                    expert = first
            best = T.if_then_else(lane < K, T.exp(chosen - highest), 0.0)
            if over_chosen:
                total = T.warp_reduce_sum(best)
            if row < M and lane < K:
                weights[row, lane] = T.cast(best / total + poison, dtype)
                ids[row, lane] = T.cast(expert, "int64")

    return choose


@functools.cache
@tilelang.jit
def choose_in_groups_kernel(E, K, groups, kept, sigmoid, rows):
    """Compile for E experts in groups, of which `kept` may be chosen from: a softmax, or a sigmoid and a bias to rank by."""
    M = T.dynamic("M")
    logits_stride, weights_stride, ids_stride = T.dynamic("logits_stride weights_stride ids_stride", "int64")
    chunks = -(-E // 32)
    size = E // groups
    slots = 1 << (groups - 1).bit_length()
    shared_by = max(1, 32 // slots)  # lanes that look through a group together
    own = max(1, slots // 32)  # groups of a lane
    steps = -(-size // shared_by)

    @T.prim_func
    def choose_in_groups(
        logits: T.StridedTensor((M, E), (logits_stride, 1), "float32"),
        bias: T.Tensor((E,), "float32"),
        weights: T.StridedTensor((M, K), (weights_stride, 1), "float32"),
        ids: T.StridedTensor((M, K), (ids_stride, 1), "int64"),
        renormalise: T.int32,
        scale: T.float32,
    ):
        with T.Kernel(T.ceildiv(M, rows), threads=32 * rows) as block:
            lane, warp = T.get_thread_binding(0) % 32, T.get_thread_binding(0) // 32
            row = block * rows + warp
            scores = T.alloc_local((chunks,), "float32")
            ranked = T.alloc_local((chunks,), "float32")
            worth = T.alloc_local((own,), "float32")
            shared_ranks = T.alloc_shared((rows, E), "float32")
            taken = T.alloc_var("uint32", init=0)  # a bit for each of this lane's scores
            open_groups = T.alloc_var("uint32", init=0)  # those that are kept, of the first 32 and of the others
            more_groups = T.alloc_var("uint32", init=0)
            closed = T.alloc_var("uint32", init=0)  # a bit for each of this lane's groups
            most = T.alloc_var("float32", init=0.0)
            second = T.alloc_var("float32", init=0.0)
            other = T.alloc_var("float32", init=0.0)
            other_second = T.alloc_var("float32", init=0.0)
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
                    scores[c] = logits[T.min(row, M - 1), c * 32 + lane]
                    if sigmoid:
                        scores[c] = 1.0 / (1.0 + T.exp(-scores[c]))
                        ranked[c] = scores[c] + bias[c * 32 + lane]
                    else:
                        ranked[c] = scores[c]
                    if T.isnan(ranked[c]):  # above all, so that every id exists
                        ranked[c] = T.infinity("float32")
                    shared_ranks[warp, c * 32 + lane] = ranked[c]
                else:
                    taken = taken | T.uint32(1 << c)
            if not sigmoid:
                # A softmax keeps the order of its scores, and rounds where they do not: the scores are ranked.
                most = ranked[0]
                for c in T.unroll(1, chunks):
                    most = T.max(most, ranked[c])
                most = T.warp_reduce_max(most)
                for c in T.unroll(chunks):
                    scores[c] = T.exp(ranked[c] - most)
                    total += scores[c]
                total = T.warp_reduce_sum(total)

            if kept < groups:
                T.sync_threads()
                # What a group is worth: its best expert, under a sigmoid its two best.
                for q in T.unroll(own):
                    most = -T.infinity("float32")
                    second = -T.infinity("float32")
                    for s in T.serial(steps):
                        # Lanes start at different members, which lie in different banks.
                        member = (s + lane) % steps * shared_by + lane % shared_by
                        if member < size and q * 32 + lane // shared_by < groups:
                            other = shared_ranks[warp, (q * 32 + lane // shared_by) * size + member]
                            second = T.max(second, T.min(most, other))
                            most = T.max(most, other)
                    for step in T.unroll(5):
                        if 1 << step < shared_by:
                            other = T.shfl_xor(most, 1 << step)
                            other_second = T.shfl_xor(second, 1 << step)
                            second = T.max(T.min(most, other), T.max(second, other_second))
                            most = T.max(most, other)
                    worth[q] = most + second if sigmoid else most
                    if q * 32 + lane // shared_by >= groups:
                        closed = closed | T.uint32(1 << q)
                for _ in T.serial(kept):
                    best = -T.infinity("float32")
                    place = groups
                    for q in T.unroll(own):
                        if (closed & T.uint32(1 << q)) == T.uint32(0) and (place == groups or worth[q] > best):
                            best = worth[q]
                            place = q * 32 + lane // shared_by
                    top = T.warp_reduce_max(best)
                    first = T.warp_reduce_min(T.if_then_else(best == top, place, groups))
                    if place == first:
                        closed = closed | (T.uint32(1) << T.cast(first // 32, "uint32"))
                    if first < 32:
                        open_groups = open_groups | (T.uint32(1) << T.cast(first, "uint32"))
                    else:
                        more_groups = more_groups | (T.uint32(1) << T.cast(first - 32, "uint32"))
                for c in T.unroll(chunks):
                    group = (c * 32 + lane) // size
                    if group < 32:
                        if ((open_groups >> T.cast(group, "uint32")) & T.uint32(1)) == T.uint32(0):
                            taken = taken | T.uint32(1 << c)
                    else:
                        if ((more_groups >> T.cast(group % 32, "uint32")) & T.uint32(1)) == T.uint32(0):
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
            if sigmoid:
                if renormalise != 0:
                    total = T.warp_reduce_sum(T.if_then_else(lane < K, chosen, 0.0))
                    chosen = chosen / (total + 1e-20)
            else:
                chosen = chosen / total
            if row < M and lane < K:
                weights[row, lane] = chosen * scale
                ids[row, lane] = T.cast(expert, "int64")

    return choose_in_groups


# Of all entry functions: a warp owns a whole row and keeps it in registers, so each score is read once; top_k times it looks
# for the largest score that is left, and of equal ones takes the first. Rows have unit last stride and any row stride; ids
# [M, K] are int64. `rows` rows a CTA.


def _launch(logits, top_k, over_chosen, weights, ids, rows):
    M, E = logits.shape
    if M == 0:
        return
    choose_kernel(E, top_k, logits.dtype, over_chosen, rows)(logits, weights, ids)


def run_topk_softmax(logits, top_k, renormalise, weights, ids, *, rows=4):
    """weights = T(softmax(logits)[ids]), divided by their sum where renormalise; ids are those of the top_k largest scores.

    Shapes: logits [M, E] and weights [M, K] of one dtype T in bfloat16, float16, float32.
    """
    _launch(logits, top_k, renormalise, weights, ids, rows)


def run_topk_then_softmax(logits, top_k, weights, ids, *, rows=4):
    """weights = T(softmax(logits[ids])); ids are those of the top_k largest scores, largest first.

    Shapes: logits [M, E] and weights [M, K] of one dtype T in bfloat16, float16, float32.
    """
    _launch(logits, top_k, True, weights, ids, rows)


def run_topk_softmax_groups(logits, top_k, groups, kept_groups, scale, weights, ids, *, rows=4):
    """weights = scale * softmax(logits)[ids]; ids are those of the top_k largest scores in the kept groups.

    Shapes: logits [M, E] and weights [M, K] float32.
    """
    M, E = logits.shape
    if M == 0:
        return
    kernel = choose_in_groups_kernel(E, top_k, groups, kept_groups, False, rows)
    kernel(logits, logits[0], weights, ids, 0, scale)  # the bias is not read


def run_topk_sigmoid_bias_groups(logits, bias, top_k, groups, kept_groups, renormalise, scale, weights, ids, *, rows=4):
    """weights = scale * sigmoid(logits)[ids], divided by their sum where renormalise; ids are ranked with the bias added.

    Shapes: logits [M, E], bias [E] and weights [M, K] float32.
    """
    M, E = logits.shape
    if M == 0:
        return
    kernel = choose_in_groups_kernel(E, top_k, groups, kept_groups, True, rows)
    kernel(logits, bias, weights, ids, int(renormalise), scale)
