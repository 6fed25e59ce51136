"""Routing within groups of experts, Triton: one launch."""

import torch
import triton
import triton.language as tl


@triton.jit
def _best_groups(by_group, G: tl.constexpr, KEPT: tl.constexpr, TOP: tl.constexpr, BLOCK_K: tl.constexpr):
    """The KEPT groups of by_group [rows, groups, members] with the largest sums of their TOP (1 or 2) largest members.

    Members and groups that there are not are -inf. Gives [rows, groups] with 2 where a group is kept, and the groups in order of
    their worth, [rows, BLOCK_K]; of equal ones the smaller is first.
    """
    ROWS: tl.constexpr = by_group.shape[0]
    BLOCK_G: tl.constexpr = by_group.shape[1]
    BLOCK_S: tl.constexpr = by_group.shape[2]
    groups = tl.arange(0, BLOCK_G)[None, :]
    members = tl.arange(0, BLOCK_S)[None, None, :]
    choices = tl.arange(0, BLOCK_K)[None, :]
    worth = tl.max(by_group, axis=2)
    if TOP == 2:
        best = tl.min(tl.where(by_group == worth[:, :, None], members, BLOCK_S), axis=2)
        worth += tl.max(tl.where(members == best[:, :, None], float("-inf"), by_group), axis=2)
    state = tl.where(groups < G, 0, 1) + tl.zeros([ROWS, BLOCK_G], dtype=tl.int32)
    kept = tl.zeros([ROWS, BLOCK_K], dtype=tl.int32)
    for k in range(KEPT):
        most = tl.max(tl.where(state == 0, worth, float("-inf")), axis=1, keep_dims=True)
        first = tl.min(tl.where((state == 0) & (worth == most), groups, BLOCK_G), axis=1, keep_dims=True)
        state = tl.where(groups == first, 2, state)
        kept = tl.where(choices == k, first, kept)
    return state, kept


@triton.jit(do_not_specialize=["M"])
def _group_idx(
    scores_ptr,
    groups_ptr,
    M,
    G: tl.constexpr,
    SIZE: tl.constexpr,
    TOP: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    groups = tl.arange(0, BLOCK_G)[None, :, None]
    members = tl.arange(0, BLOCK_S)[None, None, :]
    inside = (rows < M)[:, None, None] & (groups < G) & (members < SIZE)
    places = rows[:, None, None] * (G * SIZE) + groups * SIZE + members
    _, kept = _best_groups(tl.load(scores_ptr + places, mask=inside, other=float("-inf")), G, KEPT, TOP, BLOCK_K)
    choices = tl.arange(0, BLOCK_K)[None, :]
    mask = (choices < KEPT) & (rows < M)[:, None]
    tl.store(groups_ptr + rows[:, None] * KEPT + choices, kept.to(tl.int64), mask=mask)


def _power_of_two(size):
    return 1 << (size - 1).bit_length()  # triton.next_power_of_2 costs microseconds a call


def _shape(M, columns, block_m, num_warps):
    """Rows a program and warps: a row each while there are few to share out, else a tile of 1024 scores; 8 scores a thread."""
    rows = block_m or (1 if M <= 16 else max(1, 1024 // columns))
    return rows, num_warps or max(1, min(8, rows * columns // 256))


def run_topk_sum_and_topk_group_idx(
    scores: torch.Tensor,
    num_group_sum_topk: int,
    num_topk_groups: int,
    group_idx: torch.Tensor,
    *,
    BLOCK_M=None,
    num_warps=None,
):
    """group_idx[m] = the groups whose num_group_sum_topk (1 or 2) largest scores have the largest sums, best first.

    Shapes: scores [M, G, S] float32, group_idx [M, num_topk_groups] int64, both contiguous. Of equal groups the smaller is first.
    Mapping: a program owns BLOCK_M whole rows and keeps them in registers, so each score is read once; a group lies in a part of
    a power of two. BLOCK_M and num_warps: see _shape.
    """
    M, G, size = scores.shape
    if M == 0:
        return
    block_g, block_s = _power_of_two(G), _power_of_two(size)
    rows, warps = _shape(M, block_g * block_s, BLOCK_M, num_warps)
    _group_idx[((M + rows - 1) // rows,)](
        scores, group_idx, M, G, size, num_group_sum_topk, num_topk_groups, rows, block_g, block_s,
        _power_of_two(num_topk_groups), num_warps=warps,
    )  # fmt: skip


@triton.jit
def _softplus(x):
    """log(1 + exp(x)) to the last digits also where it is small: the logarithm by the series of atanh, y <= 1/3."""
    t = tl.exp(-tl.abs(x))
    y = t / (2.0 + t)
    z = y * y
    series = 1.0 / 15 + z * (1.0 / 17)
    series = 1.0 / 11 + z * (1.0 / 13 + z * series)
    series = 1.0 / 7 + z * (1.0 / 9 + z * series)
    series = 1.0 / 3 + z * (1.0 / 5 + z * series)
    return tl.maximum(x, 0.0) + 2.0 * y * (1.0 + z * series)


@triton.jit(do_not_specialize=["M", "ep_rank", "per_rank", "tp_rank", "num_tp_ranks", "copies"])
def _gate(
    logits_ptr,
    bias_ptr,
    mask_ptr,
    fixed_ptr,
    map_ptr,
    count_ptr,
    unmapped_ptr,
    ids_ptr,
    weights_ptr,
    logits_stride,
    scale,
    M,
    ep_rank,
    per_rank,
    tp_rank,
    num_tp_ranks,
    copies,
    E: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    KEPT: tl.constexpr,
    SHARED: tl.constexpr,
    SCORING: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    SIZE: tl.constexpr = E // G
    COLUMNS: tl.constexpr = BLOCK_G * BLOCK_S
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    columns = tl.arange(0, COLUMNS)[None, :]
    # Groups start at multiples of a power of two, so that a tile of rows is one of groups as well.
    group, member = columns // BLOCK_S, columns % BLOCK_S
    there = (group < G) & (member < SIZE)
    experts = tl.where(there, group * SIZE + member, E)
    left = there & (rows < M)
    logits = tl.load(logits_ptr + rows * logits_stride + experts, mask=left, other=0.0)
    bias = tl.load(bias_ptr + experts, mask=there, other=0.0)
    if SCORING == 0:
        scores = 1.0 / (1.0 + tl.exp(-logits))
        ranked = scores + bias
    elif SCORING == 1:
        scores = tl.sqrt(_softplus(logits))
        ranked = scores + bias
    else:
        highest = tl.max(tl.where(there, logits, float("-inf")), axis=1, keep_dims=True)
        parts = tl.where(there, tl.exp(logits - highest), 0.0)
        scores = parts / tl.sum(parts, axis=1, keep_dims=True)
        ranked = logits + bias
    ranked = tl.where(ranked != ranked, float("inf"), ranked)  # a NaN is above all, and every id exists
    if G > 1:
        by_group = tl.reshape(tl.where(there, ranked, float("-inf")), (BLOCK_M, BLOCK_G, BLOCK_S))
        state, _ = _best_groups(by_group, G, KEPT, 2, BLOCK_G)
        state = tl.broadcast_to(state[:, :, None], (BLOCK_M, BLOCK_G, BLOCK_S))
        left = left & (tl.reshape(state, (BLOCK_M, COLUMNS)) == 2)

    choices = tl.arange(0, BLOCK_K)[None, :]
    routed = (choices < K) & (rows < M)
    active = tl.load(mask_ptr + rows, mask=rows < M, other=0) != 0
    fixed = tl.load(fixed_ptr + rows, mask=rows < M, other=0) != 0
    # Of tokens whose choice is given, the weights are looked up only.
    given = tl.load(unmapped_ptr + rows * K + choices, mask=routed & fixed & active, other=0).to(tl.int32)
    chosen = tl.zeros([BLOCK_M, BLOCK_K], dtype=tl.float32)
    ids = tl.zeros([BLOCK_M, BLOCK_K], dtype=tl.int32)
    for k in range(K):
        best = tl.max(tl.where(left, ranked, float("-inf")), axis=1, keep_dims=True)
        first = tl.min(tl.where(left & (ranked == best), experts, E), axis=1, keep_dims=True)
        left = left & (experts != first)
        first = tl.where(fixed, tl.sum(tl.where(choices == k, given, 0), axis=1, keep_dims=True), first)
        weight = tl.sum(tl.where(there & (experts == first), scores, 0.0), axis=1, keep_dims=True)
        chosen = tl.where(choices == k, weight, chosen)
        ids = tl.where(choices == k, first, ids)
    total = tl.sum(tl.where(choices < K, chosen, 0.0), axis=1, keep_dims=True)
    weights = tl.where(choices < K, chosen / tl.maximum(total, 1e-20) * scale, 1.0)
    tl.debug_barrier()  # every warp has read the ids that are given
    tl.store(unmapped_ptr + rows * K + choices, tl.where(active, ids, -1).to(tl.int64), mask=routed)

    ids = tl.where(choices < K, ids, E + choices - K)
    known = active & (rows < M) & (choices < K + SHARED) & (ids >= 0) & (ids < E + SHARED)
    count = tl.load(count_ptr + ids, mask=known, other=1)
    copy = (ep_rank + rows * 23333) % count
    physical = tl.load(map_ptr + ids.to(tl.int64) * copies + copy, mask=known, other=-1)
    known = known & (physical >= 0)
    physical = tl.where(known, physical, 0)  # integer division rounds toward zero and not down
    ours = known & ((physical // per_rank) % num_tp_ranks == tp_rank)
    local = tl.where(ours, physical - tp_rank * per_rank, 0)
    local = local - local // (per_rank * num_tp_ranks) * (per_rank * num_tp_ranks - per_rank)
    mask = (choices < K + SHARED) & (rows < M)
    places = rows * (K + SHARED) + choices
    tl.store(ids_ptr + places, tl.where(ours, local, -1).to(tl.int64), mask=mask)
    tl.store(weights_ptr + places, tl.where(active, weights, 0.0), mask=mask)


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
    BLOCK_M=None,
    num_warps=None,
):
    """Score, rank with bias within the best groups, choose, normalise, and number each choice's copy on this rank; one launch.

    Shapes: logits [M, E] float32, rows of any stride; bias [E] float32; mask, fix_routing_mask [M] bool; to_physical_map
    [E + S, C] int32, logical_count [E + S] int32; unmapped_topk_idx [M, K] int64, in place; topk_idx [M, K + S] int64 and
    topk_weights [M, K + S] float32. All but logits are contiguous; S = num_shared_experts. The scalars are Python numbers.
    Mapping: as in run_topk_sum_and_topk_group_idx.
    """
    M, E = logits.shape
    if M == 0:
        return
    groups = num_groups if num_groups != num_topk_groups else 1  # all groups are one
    block_g, block_s = _power_of_two(groups), _power_of_two(E // groups)
    rows, warps = _shape(M, block_g * block_s, BLOCK_M, num_warps)
    copies = to_physical_map.shape[1]
    per_rank = (E + copies - 1) // num_ep_ranks
    _gate[((M + rows - 1) // rows,)](
        logits, bias, mask, fix_routing_mask, to_physical_map, logical_count, unmapped_topk_idx, topk_idx, topk_weights,
        logits.stride(0), routed_scaling_factor, M, ep_rank, per_rank, tp_rank, num_tp_ranks, copies,
        E, num_topk, groups, num_topk_groups, num_shared_experts, scoring_func, rows, block_g, block_s,
        _power_of_two(num_topk + num_shared_experts), num_warps=warps,
    )  # fmt: skip
