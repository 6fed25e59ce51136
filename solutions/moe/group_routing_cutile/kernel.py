"""Routing within groups of experts: one launch, whole rows in registers."""

from typing import Annotated

import cuda.tile as ct
import torch

# Sizes of a row are compile-time constants: lanes beyond it then cost nothing. The number of rows is dynamic.
Rows = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1,))]
Groups = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1, 2))]
Int = ct.Constant[int]

NOTHING = -float("inf")


@ct.function
def _take_best(values, left, names, beyond):
    """The smallest name among the largest values that are left, and what is left after it; rows [TILE_M, ...]."""
    best = ct.max(ct.where(left, values, NOTHING), axis=1, keepdims=True)
    first = ct.min(ct.where(left & (values == best), names, beyond), axis=1, keepdims=True)
    return first, left & (names != first)


@ct.function
def _worth(by_group, TOP: Int, TILE_S: Int):
    """The sum of the TOP (1 or 2) largest members of each group."""
    most = ct.max(by_group, axis=2)
    if TOP == 1:
        return most
    members = ct.arange(TILE_S, dtype=ct.int32)[None, None, :]
    first = ct.min(ct.where(by_group == most[:, :, None], members, TILE_S), axis=2)
    return most + ct.max(ct.where(members == first[:, :, None], NOTHING, by_group), axis=2)


@ct.kernel
def _group_idx(scores: Groups, out: Rows, TOP: Int, KEPT: Int, TILE_M: Int, TILE_G: Int, TILE_S: Int, TILE_K: Int):
    m, g, s = scores.shape
    rows = ct.bid(0) * TILE_M + ct.arange(TILE_M, dtype=ct.int32)
    groups = ct.arange(TILE_G, dtype=ct.int32)
    members = ct.arange(TILE_S, dtype=ct.int32)
    index = (rows[:, None, None], groups[None, :, None], members[None, None, :])
    inside = (index[0] < m) & (index[1] < g) & (index[2] < s)
    values = ct.gather(scores, index, mask=inside, check_bounds=False, padding_value=NOTHING)
    worth = _worth(values, TOP, TILE_S)
    choices = ct.arange(TILE_K, dtype=ct.int32)[None, :]
    kept = ct.zeros((TILE_M, TILE_K), dtype=ct.int32)
    left = ct.broadcast_to((groups < g)[None, :], (TILE_M, TILE_G))
    for k in range(KEPT):
        first, left = _take_best(worth, left, groups[None, :], TILE_G)
        kept = ct.where(choices == k, first, kept)
    mask = (rows < m)[:, None] & (choices < KEPT)
    ct.scatter(out, (rows[:, None], choices), kept.astype(ct.int64), mask=mask, check_bounds=False)


@ct.function
def _scores(logits, there, SCORING: Int):
    """sigmoid, the square root of softplus, or softmax of what is there."""
    if SCORING == 0:
        return 1.0 / (1.0 + ct.exp(-logits))
    if SCORING == 1:
        # log(1 + exp(x)) to the last digits also where it is small: the logarithm by the series of atanh, y <= 1/3.
        t = ct.exp(-ct.abs(logits))
        y = t / (2.0 + t)
        z = y * y
        series = 1.0 / 15 + z * (1.0 / 17)
        series = 1.0 / 11 + z * (1.0 / 13 + z * series)
        series = 1.0 / 7 + z * (1.0 / 9 + z * series)
        series = 1.0 / 3 + z * (1.0 / 5 + z * series)
        return ct.sqrt(ct.maximum(logits, 0.0) + 2.0 * y * (1.0 + z * series))
    highest = ct.max(ct.where(there, logits, NOTHING), axis=1, keepdims=True)
    parts = ct.where(there, ct.exp(logits - highest), 0.0)
    return parts / ct.sum(parts, axis=1, keepdims=True)


@ct.kernel
def _gate(
    logits: ct.Array,
    bias: ct.Array,
    routed: ct.Array,
    fixed: ct.Array,
    table: ct.Array,
    counts: ct.Array,
    unmapped: Rows,
    ids_out: Rows,
    weights_out: Rows,
    scale: float,
    ep_rank: int,
    per_rank: int,
    tp_rank: int,
    num_tp_ranks: int,
    E: Int,
    K: Int,
    G: Int,
    KEPT: Int,
    SHARED: Int,
    SCORING: Int,
    TILE_M: Int,
    TILE_G: Int,
    TILE_S: Int,
    TILE_K: Int,
):
    m = unmapped.shape[0]
    rows = ct.bid(0) * TILE_M + ct.arange(TILE_M, dtype=ct.int32)[:, None]
    # Groups start at multiples of a power of two, so that a tile of rows is one of groups as well.
    columns = ct.arange(TILE_G * TILE_S, dtype=ct.int32)[None, :]
    group, member = columns // TILE_S, columns % TILE_S
    there = (group < G) & (member < E // G)
    experts = ct.where(there, group * (E // G) + member, E)
    left = there & (rows < m)
    values = ct.gather(logits, (rows, experts), mask=left, check_bounds=False)
    scores = _scores(values, there, SCORING)
    ranked = ct.gather(bias, experts, mask=there, check_bounds=False) + (values if SCORING == 2 else scores)
    if G > 1:
        by_group = ct.reshape(ct.where(there, ranked, NOTHING), (TILE_M, TILE_G, TILE_S))
        worth = _worth(by_group, 2, TILE_S)
        groups = ct.arange(TILE_G, dtype=ct.int32)[None, :]
        others = ct.broadcast_to(groups < G, (TILE_M, TILE_G))
        for _ in range(KEPT):
            first, others = _take_best(worth, others, groups, TILE_G)
        # Groups of which there are none are not among the others, but have no experts either.
        closed = ct.broadcast_to(others.astype(ct.int32)[:, :, None], (TILE_M, TILE_G, TILE_S))
        left = left & (ct.reshape(closed, (TILE_M, TILE_G * TILE_S)) == 0)

    choices = ct.arange(TILE_K, dtype=ct.int32)[None, :]
    inside = (rows < m) & (choices < K)
    active = ct.gather(routed, rows, mask=rows < m, check_bounds=False) != 0
    given = active & (ct.gather(fixed, rows, mask=rows < m, check_bounds=False) != 0)
    # Of tokens whose choice is given, the weights are looked up only.
    ids = ct.gather(unmapped, (rows, choices), mask=inside & given, check_bounds=False).astype(ct.int32)
    weights = ct.zeros((TILE_M, TILE_K), dtype=ct.float32)
    for k in range(K):
        first, left = _take_best(ranked, left, experts, E)
        ids = ct.where((choices == k) & ~given, first, ids)
        mine = ct.sum(ct.where(choices == k, ids, 0), axis=1, keepdims=True)
        weight = ct.sum(ct.where(there & (experts == mine), scores, 0.0), axis=1, keepdims=True)
        weights = ct.where(choices == k, weight, weights)
    total = ct.maximum(ct.sum(weights, axis=1, keepdims=True), 1e-20)
    weights = ct.where(choices < K, weights / total * scale, 1.0)
    chosen = ct.where(active, ids, -1).astype(ct.int64)
    ct.scatter(unmapped, (rows, choices), chosen, mask=inside, check_bounds=False)

    ids = ct.where(choices < K, ids, E + choices - K)
    inside = (rows < m) & (choices < K + SHARED)
    known = inside & active & (ids >= 0) & (ids < E + SHARED)
    copies = ct.gather(counts, ids, mask=known, check_bounds=False, padding_value=1).astype(ct.int64)
    copy = ((rows.astype(ct.int64) * 23333 + ep_rank) % copies).astype(ct.int32)
    physical = ct.gather(table, (ids, copy), mask=known, check_bounds=False, padding_value=-1)
    ours = (physical >= 0) & (ct.maximum(physical, 0) // per_rank % num_tp_ranks == tp_rank)
    local = ct.where(ours, physical - tp_rank * per_rank, 0)
    local = local - local // (per_rank * num_tp_ranks) * (per_rank * num_tp_ranks - per_rank)
    found = ct.where(ours, local, -1).astype(ct.int64)
    ct.scatter(ids_out, (rows, choices), found, mask=inside, check_bounds=False)
    ct.scatter(weights_out, (rows, choices), ct.where(active, weights, 0.0), mask=inside, check_bounds=False)


_GROUP_IDX = {warps: _group_idx.replace_hints(num_worker_warps=warps) for warps in (4, 8)}
_GATE = {warps: _gate.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _rows(m: int, columns: int, tile_m: int | None) -> int:
    """Rows of a block: one while there are few to share out, else a tile of 1024 scores."""
    return tile_m or (1 if m <= 16 else max(1, 1024 // columns))


def run_topk_sum_and_topk_group_idx(
    scores: torch.Tensor,
    num_group_sum_topk: int,
    num_topk_groups: int,
    group_idx: torch.Tensor,
    *,
    TILE_M: int | None = None,
    WARPS: int = 4,
) -> None:
    """group_idx[m] = the groups whose num_group_sum_topk (1 or 2) largest scores have the largest sums, best first.

    scores: [M, G, S] float32, group_idx: [M, num_topk_groups] int64, both contiguous. Of equal groups the smaller is first.
    A block owns TILE_M whole rows (see _rows) and keeps them in registers; a group lies in a part of a power of two.
    """
    m, g, s = scores.shape
    if m == 0:
        return
    tile_g, tile_s = _power_of_two(g), _power_of_two(s)
    tile_m = _rows(m, tile_g * tile_s, TILE_M)
    tiles = (tile_m, tile_g, tile_s, _power_of_two(num_topk_groups))
    args = (scores, group_idx, num_group_sum_topk, num_topk_groups, *tiles)
    ct.launch(torch.cuda.current_stream(), (-(-m // tile_m), 1, 1), _GROUP_IDX[WARPS], args)


def run_top2_sum_gate(
    logits: torch.Tensor,
    bias: torch.Tensor,
    num_topk: int,
    num_topk_groups: int,
    num_groups: int,
    num_shared_experts: int,
    routed_scaling_factor: float,
    ep_rank: int,
    num_ep_ranks: int,
    tp_rank: int,
    num_tp_ranks: int,
    scoring_func: int,
    mask: torch.Tensor,
    fix_routing_mask: torch.Tensor,
    to_physical_map: torch.Tensor,
    logical_count: torch.Tensor,
    unmapped_topk_idx: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    TILE_M: int | None = None,
    WARPS: int = 4,
) -> None:
    """Score, rank with bias within the best groups, choose, normalise, and number each choice's copy on this rank; one launch.

    logits: [M, E] float32, rows of any stride; bias: [E] float32; mask, fix_routing_mask: [M] bool; to_physical_map:
    [E + S, C] int32, logical_count: [E + S] int32; unmapped_topk_idx: [M, K] int64, in place; topk_idx: [M, K + S] int64 and
    topk_weights: [M, K + S] float32. All but logits are contiguous; S = num_shared_experts. A block owns TILE_M whole rows
    (see _rows) and keeps them in registers; a group lies in a part of a power of two.
    """
    m, e = logits.shape
    if m == 0:
        return
    groups = num_groups if num_groups != num_topk_groups else 1  # all groups are one
    tile_g, tile_s = _power_of_two(groups), _power_of_two(e // groups)
    tile_m = _rows(m, tile_g * tile_s, TILE_M)
    per_rank = (e + to_physical_map.shape[1] - 1) // num_ep_ranks
    flags = (mask.view(torch.uint8), fix_routing_mask.view(torch.uint8))
    tensors = (logits, bias, *flags, to_physical_map, logical_count, unmapped_topk_idx, topk_idx, topk_weights)
    scalars = (routed_scaling_factor, ep_rank, per_rank, tp_rank, num_tp_ranks)
    sizes = (e, num_topk, groups, num_topk_groups, num_shared_experts, scoring_func)
    tiles = (tile_m, tile_g, tile_s, _power_of_two(num_topk + num_shared_experts))
    args = (*tensors, *scalars, *sizes, *tiles)
    ct.launch(torch.cuda.current_stream(), (-(-m // tile_m), 1, 1), _GATE[WARPS], args)
