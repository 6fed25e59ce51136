"""Routing within groups of experts, in TileLang: a warp a row, a group the neighbouring lanes of a warp."""

import functools

import tilelang
import tilelang.language as T
import torch

ABSENT = -0x7FFFFFFF
"""The place in the order of what is not there or not left: below that of -infinity."""


def order_of(value):
    """An integer of the same order as a float32, and equal for both zeros."""
    bits = T.reinterpret(T.if_then_else(value == T.float32(0), T.float32(0), value), "int32")
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def widest(*multiples):
    """The widest power of two that divides all of these: how many elements an access may take."""
    bits = 0
    for multiple in multiples:
        bits |= multiple
    return bits & -bits


def shape_of(G, S, vec):
    """Lanes of a group, rounds of a warp over all groups, and members of a lane, whole vectors of them."""
    lanes = max(1, 32 // (1 << (G - 1).bit_length()))
    return lanes, -(-G * lanes // 32), -(-S // (lanes * vec)) * vec


@T.macro
def worth_of(most, second, lanes, TOP):
    """Of the two largest values of each lane, those of all neighbouring lanes of a group; their sum, or the larger one."""
    most_there = T.alloc_var("float32")
    second_there = T.alloc_var("float32")
    for step in T.unroll(lanes.bit_length() - 1):
        most_there = T.shfl_xor(most[0], 1 << step)
        second_there = T.shfl_xor(second[0], 1 << step)
        second[0] = T.max(T.min(most[0], most_there), T.max(second[0], second_there))
        most[0] = T.max(most[0], most_there)
    if TOP == 2:
        most[0] = most[0] + second[0]


@T.macro
def take_best(keys, names, count, first, beyond):
    """The smallest name among the largest keys of a warp, `count` a lane; its key is absent from then on."""
    best = T.alloc_var("int32")
    best = T.int32(ABSENT)
    for j in T.unroll(count):
        best = T.max(best, keys[j])
    best = T.warp_reduce_max(best)
    first[0] = beyond
    for j in T.unroll(count):
        if keys[j] == best and names[j] < first[0]:
            first[0] = names[j]
    first[0] = T.warp_reduce_min(first[0])
    for j in T.unroll(count):
        if names[j] == first[0]:
            keys[j] = T.int32(ABSENT)


@functools.cache
@tilelang.jit
def group_kernel(G, S, top, kept, vec, warps):
    """Compile for G groups of S scores, loaded `vec` at a time; `warps` rows a thread block."""
    M = T.dynamic("M")
    lanes, rounds, part = shape_of(G, S, vec)

    @T.prim_func
    def group_idx(scores: T.Tensor((M, G, S), "float32"), out: T.Tensor((M, kept), "int64")):
        with T.Kernel(T.ceildiv(M, warps), threads=(32, warps)) as block:
            lane = T.get_thread_binding(0)
            row = block * warps + T.get_thread_binding(1)
            values = T.alloc_local((rounds, part), "float32")
            most = T.alloc_local((1,), "float32")
            second = T.alloc_local((1,), "float32")
            keys = T.alloc_local((rounds,), "int32")
            names = T.alloc_local((rounds,), "int32")
            first = T.alloc_local((1,), "int32")
            mine = T.alloc_var("int32", init=0)

            if row < M:
                for r in T.unroll(rounds):
                    names[r] = r * (32 // lanes) + lane // lanes
                    for c in T.unroll(part // vec):
                        for v in T.vectorized(vec):
                            values[r, c * vec + v] = -T.infinity("float32")
                        if names[r] < G and lane % lanes * part + c * vec < S:
                            for v in T.vectorized(vec):
                                values[r, c * vec + v] = scores[row, names[r], lane % lanes * part + c * vec + v]
                for r in T.unroll(rounds):
                    most[0] = -T.infinity("float32")
                    second[0] = -T.infinity("float32")
                    for i in T.unroll(part):
                        second[0] = T.max(second[0], T.min(most[0], values[r, i]))
                        most[0] = T.max(most[0], values[r, i])
                    worth_of(most, second, lanes, top)
                    keys[r] = T.if_then_else(names[r] < G, order_of(most[0]), T.int32(ABSENT))
                for k in T.serial(kept):
                    take_best(keys, names, rounds, first, G)
                    if lane == k:
                        mine = first[0]
                if lane < kept:
                    out[row, lane] = T.cast(mine, "int64")

    return group_idx


def run_topk_sum_and_topk_group_idx(scores, num_group_sum_topk, num_topk_groups, group_idx, *, warps=4):
    """group_idx[m] = the groups whose num_group_sum_topk (1 or 2) largest scores have the largest sums, best first.

    scores: [M, G, S] float32, group_idx: [M, num_topk_groups <= 32] int64, both contiguous. Of equal groups the smaller is first.
    A row belongs to one warp, which keeps it in registers; a group belongs to neighbouring lanes.
    """
    M, G, S = scores.shape
    if M == 0:
        return
    vec = widest(S, scores.data_ptr() // 4, 4)
    group_kernel(G, S, num_group_sum_topk, num_topk_groups, vec, warps)(scores, group_idx)


def score_of(logit, scoring, highest, total):
    """sigmoid, the square root of softplus, or softmax with the largest logit of the row and the sum of its exponentials."""
    if scoring == 0:
        return T.float32(1) / (T.float32(1) + T.exp(-logit))
    if scoring == 1:
        return T.sqrt(T.max(logit, T.float32(0)) + T.log1p(T.exp(-T.abs(logit))))
    return T.exp(logit - highest) / total


@functools.cache
@tilelang.jit
def gate_kernel(E, K, G, kept, shared, scoring, vec, warps):
    """Compile for K of E experts in G groups and `shared` more, logits loaded `vec` at a time; `warps` rows a thread block."""
    M, C = T.dynamic("M"), T.dynamic("C")
    stride = T.dynamic("stride", "int64")
    S = E // G
    lanes, rounds, part = shape_of(G, S, vec)

    @T.prim_func
    def gate(
        logits: T.StridedTensor((M, E), (stride, 1), "float32"),
        bias: T.Tensor((E,), "float32"),
        mask: T.Tensor((M,), "uint8"),
        fixed: T.Tensor((M,), "uint8"),
        table: T.Tensor((E + shared, C), "int32"),
        counts: T.Tensor((E + shared,), "int32"),
        unmapped: T.Tensor((M, K), "int64"),
        ids: T.Tensor((M, K + shared), "int64"),
        weights: T.Tensor((M, K + shared), "float32"),
        scale: T.float32,
        ep_rank: T.int32,
        per_rank: T.int32,
        tp_rank: T.int32,
        num_tp_ranks: T.int32,
    ):
        with T.Kernel(T.ceildiv(M, warps), threads=(32, warps)) as block:
            T.assume(stride % vec == 0)  # run() chose vec so
            lane = T.get_thread_binding(0)
            row = block * warps + T.get_thread_binding(1)
            values = T.alloc_local((rounds * part,), "float32")
            keys = T.alloc_local((rounds * part,), "int32")
            names = T.alloc_local((rounds * part,), "int32")
            group_keys = T.alloc_local((rounds,), "int32")
            groups = T.alloc_local((rounds,), "int32")
            is_open = T.alloc_local((rounds,), "int32")
            most = T.alloc_local((1,), "float32")
            second = T.alloc_local((1,), "float32")
            first = T.alloc_local((1,), "int32")
            highest = T.alloc_var("float32", init=0.0)
            total = T.alloc_var("float32", init=0.0)
            mine = T.alloc_var("int32", init=0)
            weight = T.alloc_var("float32", init=0.0)
            physical = T.alloc_var("int32", init=0)
            local = T.alloc_var("int32", init=0)

            if row < M:
                for r in T.unroll(rounds):
                    groups[r] = r * (32 // lanes) + lane // lanes
                    for c in T.unroll(part // vec):
                        for v in T.vectorized(vec):
                            values[r * part + c * vec + v] = T.float32(0)
                        if groups[r] < G and lane % lanes * part + c * vec < S:
                            for v in T.vectorized(vec):
                                values[r * part + c * vec + v] = logits[
                                    row, groups[r] * S + lane % lanes * part + c * vec + v
                                ]
                    for i in T.unroll(part):  # E: no expert
                        names[r * part + i] = T.if_then_else(
                            groups[r] < G and lane % lanes * part + i < S, groups[r] * S + lane % lanes * part + i, E
                        )
                if scoring == 2:
                    highest = -T.infinity("float32")
                    for j in T.unroll(rounds * part):
                        if names[j] < E:
                            highest = T.max(highest, values[j])
                    highest = T.warp_reduce_max(highest)
                    for j in T.unroll(rounds * part):
                        if names[j] < E:
                            total += T.exp(values[j] - highest)
                    total = T.warp_reduce_sum(total)
                for j in T.unroll(rounds * part):
                    keys[j] = T.int32(ABSENT)
                    if names[j] < E:
                        if scoring < 2:
                            values[j] = score_of(values[j], scoring, highest, total)
                        values[j] = values[j] + bias[names[j]]
                        keys[j] = order_of(values[j])
                    else:
                        values[j] = -T.infinity("float32")

                if G > 1:
                    for r in T.unroll(rounds):
                        most[0] = -T.infinity("float32")
                        second[0] = -T.infinity("float32")
                        for i in T.unroll(part):
                            second[0] = T.max(second[0], T.min(most[0], values[r * part + i]))
                            most[0] = T.max(most[0], values[r * part + i])
                        worth_of(most, second, lanes, 2)
                        group_keys[r] = T.if_then_else(groups[r] < G, order_of(most[0]), T.int32(ABSENT))
                        is_open[r] = 0
                    for _ in T.serial(kept):
                        take_best(group_keys, groups, rounds, first, G)
                        for r in T.unroll(rounds):
                            if groups[r] == first[0]:
                                is_open[r] = 1
                    for r in T.unroll(rounds):
                        for i in T.unroll(part):
                            if is_open[r] == 0:
                                keys[r * part + i] = T.int32(ABSENT)

                for k in T.serial(K):  # lane k has choice k
                    take_best(keys, names, rounds * part, first, E)
                    if lane == k:
                        mine = first[0]
                if lane < K and mask[row] != 0 and fixed[row] != 0:
                    mine = T.cast(unmapped[row, lane], "int32")
                if lane < K:
                    if mine >= 0 and mine < E:
                        weight = score_of(logits[row, mine], scoring, highest, total)
                    unmapped[row, lane] = T.if_then_else(mask[row] != 0, T.cast(mine, "int64"), T.int64(-1))
                total = T.warp_reduce_sum(weight)
                weight = weight / T.max(total, T.float32(1e-20)) * scale
                if lane >= K:
                    mine = E + lane - K
                    weight = T.float32(1)

                local = -1
                if lane < K + shared:
                    if mask[row] != 0 and mine >= 0 and mine < E + shared:
                        local = counts[mine]  # copies that there are
                        local = T.cast(
                            T.truncmod(T.cast(ep_rank, "int64") + T.cast(row, "int64") * 23333, T.cast(local, "int64")),
                            "int32",
                        )
                        physical = table[mine, local]
                        local = -1
                        if physical >= 0 and T.truncmod(T.truncdiv(physical, per_rank), num_tp_ranks) == tp_rank:
                            physical = physical - tp_rank * per_rank
                            local = physical - T.truncdiv(physical, per_rank * num_tp_ranks) * (
                                per_rank * num_tp_ranks - per_rank
                            )
                    ids[row, lane] = T.cast(local, "int64")
                    weights[row, lane] = T.if_then_else(mask[row] != 0, weight, T.float32(0))

    return gate


def run_top2_sum_gate(
    logits,
    bias,
    num_topk,
    num_topk_groups,
    num_groups,
    num_shared_experts,
    routed_scaling_factor,
    ep_rank,
    num_ep_ranks,
    tp_rank,
    num_tp_ranks,
    scoring_func,
    mask,
    fix_routing_mask,
    to_physical_map,
    logical_count,
    unmapped_topk_idx,
    topk_idx,
    topk_weights,
    *,
    warps=4,
):
    """Score, rank with bias within the best groups, choose, normalise, and number each choice's copy on this rank; one launch.

    logits: [M, E] float32, rows of any stride; bias: [E] float32; mask, fix_routing_mask: [M] bool; to_physical_map:
    [E + S, C] int32, logical_count: [E + S] int32; unmapped_topk_idx: [M, K] int64, in place; topk_idx: [M, K + S] int64 and
    topk_weights: [M, K + S] float32. All but logits are contiguous; S = num_shared_experts, K + S <= 32. A row belongs to one
    warp, a group to neighbouring lanes of it, and choice k to lane k, which looks up its score again.
    """
    M, E = logits.shape
    if M == 0:
        return
    groups = num_groups if num_groups != num_topk_groups else 1  # all groups are one
    vec = widest(E // groups, logits.stride(0), logits.data_ptr() // 4, 4)
    per_rank = (E + to_physical_map.shape[1] - 1) // num_ep_ranks
    kernel = gate_kernel(E, num_topk, groups, num_topk_groups, num_shared_experts, scoring_func, vec, warps)
    flags = mask.view(torch.uint8), fix_routing_mask.view(torch.uint8)
    kernel(
        logits, bias, *flags, to_physical_map, logical_count, unmapped_topk_idx, topk_idx, topk_weights,
        routed_scaling_factor, ep_rank, per_rank, tp_rank, num_tp_ranks,
    )  # fmt: skip
