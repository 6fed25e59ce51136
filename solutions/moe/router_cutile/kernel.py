"""Choose K of E experts by their scores, cuTile: one launch."""

import functools
from typing import Annotated

import cuda.tile as ct
import torch

# The number of experts is a compile-time constant: masks vanish where it is a power of two.
Rows = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1,))]
Int = ct.Constant[int]
Flag = ct.Constant[bool]

LOWEST = float("-inf")
HIGHEST = float("inf")


@ct.kernel
def _choose(
    logits: Rows,
    weights: Rows,
    ids: Rows,
    OVER_CHOSEN: Flag,
    TILE_M: Int,
    TILE_E: Int,
    TILE_K: Int,
):
    m, count = logits.shape
    k = ids.shape[1]
    rows = ct.bid(0) * TILE_M + ct.arange(TILE_M, dtype=ct.int32)[:, None]
    experts = ct.arange(TILE_E, dtype=ct.int32)[None, :]
    choices = ct.arange(TILE_K, dtype=ct.int32)[None, :]
    left = (experts < count) & (rows < m)
    scores = ct.gather(logits, (rows, experts), mask=left, check_bounds=False).astype(ct.float32)
    # A row with a NaN has NaN for weights, as eager code, and ids that exist: what comes after it indexes with them.
    broken = ct.max(ct.isnan(scores).astype(ct.int32), axis=1, keepdims=True) > 0
    scores = ct.where(broken, 0.0, scores)
    scores = ct.where(experts < count, scores, LOWEST)
    highest = ct.max(scores, axis=1, keepdims=True)
    total = ct.sum(ct.exp(scores - highest), axis=1, keepdims=True)
    chosen = ct.zeros((TILE_M, TILE_K), dtype=ct.float32)
    chosen_ids = ct.zeros((TILE_M, TILE_K), dtype=ct.int32)
    # A softmax keeps the order of its scores, and rounds where they do not: the scores are ranked.
    for choice in range(k):
        best = ct.max(ct.where(left, scores, LOWEST), axis=1, keepdims=True)
        first = ct.min(ct.where(left & (scores == best), experts, TILE_E), axis=1, keepdims=True)
        left = left & (experts != first)
        chosen = ct.where(choices == choice, best, chosen)
        chosen_ids = ct.where(choices == choice, first, chosen_ids)
    parts = ct.where(choices < k, ct.exp(chosen - highest), 0.0)
    if OVER_CHOSEN:
        total = ct.sum(parts, axis=1, keepdims=True)
    shares = ct.where(broken, float("nan"), parts / total)
    inside = (choices < k) & (rows < m)
    ct.scatter(weights, (rows, choices), shares.astype(weights.dtype), mask=inside, check_bounds=False)
    ct.scatter(ids, (rows, choices), chosen_ids.astype(ct.int64), mask=inside, check_bounds=False)


@ct.kernel
def _choose_in_groups(
    logits: Rows,
    bias: ct.Array,
    weights: Rows,
    ids: Rows,
    scale: float,
    GROUPS: Int,
    KEPT: Int,
    SIGMOID: Flag,
    RENORMALISE: Flag,
    TILE_M: Int,
    TILE_G: Int,
    TILE_S: Int,
    TILE_K: Int,
):
    m, count = logits.shape
    k = ids.shape[1]
    size = count // GROUPS
    rows = ct.bid(0) * TILE_M + ct.arange(TILE_M, dtype=ct.int32)[:, None]
    columns = ct.arange(TILE_G * TILE_S, dtype=ct.int32)[None, :]
    # Groups start at multiples of a power of two, so that a tile of rows is one of groups as well.
    group = columns // TILE_S
    member = columns % TILE_S
    there = (group < GROUPS) & (member < size)
    experts = ct.where(there, group * size + member, count)
    left = there & (rows < m)
    scores = ct.gather(logits, (rows, experts), mask=left, check_bounds=False)
    if SIGMOID:
        scores = 1.0 / (1.0 + ct.exp(-scores))
        ranked = scores + ct.gather(bias, experts, mask=there, check_bounds=False)
    else:
        # A softmax keeps the order of its scores, and rounds where they do not: the scores are ranked.
        ranked = ct.where(there, ct.where(ct.isnan(scores), HIGHEST, scores), LOWEST)
        parts = ct.exp(ranked - ct.max(ranked, axis=1, keepdims=True))
        scores = parts / ct.sum(parts, axis=1, keepdims=True)
    ranked = ct.where(ct.isnan(ranked), HIGHEST, ranked)  # a NaN is above all, and every id exists

    # What a group is worth: its best expert, under a sigmoid its two best.
    groups = ct.arange(TILE_G, dtype=ct.int32)[None, :]
    by_group = ct.reshape(ct.where(there, ranked, LOWEST), (TILE_M, TILE_G, TILE_S))
    worth = ct.max(by_group, axis=2)
    if SIGMOID:
        members = ct.arange(TILE_S, dtype=ct.int32)[None, None, :]
        best_of_group = ct.min(ct.where(by_group == worth[:, :, None], members, TILE_S), axis=2)
        second = ct.max(ct.where(members == best_of_group[:, :, None], LOWEST, by_group), axis=2)
        worth = worth + second
    open_groups = ct.broadcast_to(groups < GROUPS, (TILE_M, TILE_G))
    kept_groups = ct.zeros((TILE_M, TILE_G), dtype=ct.int32)
    for _ in range(KEPT):
        most = ct.max(ct.where(open_groups, worth, LOWEST), axis=1, keepdims=True)
        first_group = ct.min(ct.where(open_groups & (worth == most), groups, TILE_G), axis=1, keepdims=True)
        kept_groups = ct.where(groups == first_group, 1, kept_groups)
        open_groups = open_groups & (groups != first_group)
    open_experts = ct.broadcast_to(kept_groups[:, :, None], (TILE_M, TILE_G, TILE_S))
    left = left & (ct.reshape(open_experts, (TILE_M, TILE_G * TILE_S)) > 0)

    choices = ct.arange(TILE_K, dtype=ct.int32)[None, :]
    chosen = ct.zeros((TILE_M, TILE_K), dtype=ct.float32)
    chosen_ids = ct.zeros((TILE_M, TILE_K), dtype=ct.int32)
    for choice in range(k):
        best = ct.max(ct.where(left, ranked, LOWEST), axis=1, keepdims=True)
        first = ct.min(ct.where(left & (ranked == best), experts, count), axis=1, keepdims=True)
        left = left & (experts != first)
        weight = ct.sum(ct.where(there & (experts == first), scores, 0.0), axis=1, keepdims=True)
        chosen = ct.where(choices == choice, weight, chosen)
        chosen_ids = ct.where(choices == choice, first, chosen_ids)
    if RENORMALISE:
        chosen = chosen / (ct.sum(ct.where(choices < k, chosen, 0.0), axis=1, keepdims=True) + 1e-20)
    inside = (choices < k) & (rows < m)
    ct.scatter(weights, (rows, choices), chosen * scale, mask=inside, check_bounds=False)
    ct.scatter(ids, (rows, choices), chosen_ids.astype(ct.int64), mask=inside, check_bounds=False)


@functools.lru_cache
def _with_warps(kernel: ct.kernel, warps: int) -> ct.kernel:
    return kernel.replace_hints(num_worker_warps=warps)


def _power_of_two(size):
    return 1 << (size - 1).bit_length()


def _shape(M, columns, tile_m, warps):
    """Rows a block and warps: a row each while there are few to share out, else a tile of 1024 scores; 8 warps from 2048 on."""
    rows = tile_m or (1 if M <= 16 else max(1, 1024 // columns))
    return rows, warps or (8 if rows * columns >= 2048 else 4)


def _launch(logits, over_chosen, weights, ids, tile_m, warps):
    M, E = logits.shape
    if M == 0:
        return
    tile_e = _power_of_two(E)
    rows, warps = _shape(M, tile_e, tile_m, warps)
    args = (logits, weights, ids, over_chosen, rows, tile_e, _power_of_two(ids.shape[1]))
    ct.launch(torch.cuda.current_stream(), (-(-M // rows), 1, 1), _with_warps(_choose, warps), args)


def _launch_in_groups(logits, bias, groups, kept, renormalise, scale, weights, ids, tile_m, warps):
    M, E = logits.shape
    if M == 0:
        return
    sigmoid = bias is not None
    tile_g, tile_s = _power_of_two(groups), _power_of_two(E // groups)
    rows, warps = _shape(M, tile_g * tile_s, tile_m, warps)
    args = (
        logits, bias if sigmoid else logits[0], weights, ids, scale,
        groups, kept, sigmoid, renormalise, rows, tile_g, tile_s, _power_of_two(ids.shape[1]),
    )  # fmt: skip
    ct.launch(torch.cuda.current_stream(), (-(-M // rows), 1, 1), _with_warps(_choose_in_groups, warps), args)


# Of all entry functions: a block owns TILE_M whole rows and keeps them in registers, so each score is read once; top_k times it
# looks for the largest score that is left, and of equal ones takes the first. Rows have unit last stride and any row stride;
# ids [M, K] are int64. TILE_M and WARPS: see _shape.


def run_topk_softmax(
    logits: torch.Tensor,
    top_k: int,
    renormalise: bool,
    weights: torch.Tensor,
    ids: torch.Tensor,
    *,
    TILE_M: int | None = None,
    WARPS: int | None = None,
) -> None:
    """weights = T(softmax(logits)[ids]), divided by their sum where renormalise; ids are those of the top_k largest scores.

    Shapes: logits [M, E] and weights [M, K] of one dtype T in bfloat16, float16, float32.
    """
    _launch(logits, bool(renormalise), weights, ids, TILE_M, WARPS)


def run_topk_then_softmax(
    logits: torch.Tensor,
    top_k: int,
    weights: torch.Tensor,
    ids: torch.Tensor,
    *,
    TILE_M: int | None = None,
    WARPS: int | None = None,
) -> None:
    """weights = T(softmax(logits[ids])); ids are those of the top_k largest scores, largest first.

    Shapes: logits [M, E] and weights [M, K] of one dtype T in bfloat16, float16, float32.
    """
    _launch(logits, True, weights, ids, TILE_M, WARPS)


def run_topk_softmax_groups(
    logits: torch.Tensor,
    top_k: int,
    groups: int,
    kept_groups: int,
    scale: float,
    weights: torch.Tensor,
    ids: torch.Tensor,
    *,
    TILE_M: int | None = None,
    WARPS: int | None = None,
) -> None:
    """weights = scale * softmax(logits)[ids]; ids are those of the top_k largest scores in the kept groups.

    Shapes: logits [M, E] and weights [M, K] float32. A group lies in a part of a power of two.
    """
    _launch_in_groups(logits, None, groups, kept_groups, False, scale, weights, ids, TILE_M, WARPS)


def run_topk_sigmoid_bias_groups(
    logits: torch.Tensor,
    bias: torch.Tensor,
    top_k: int,
    groups: int,
    kept_groups: int,
    renormalise: bool,
    scale: float,
    weights: torch.Tensor,
    ids: torch.Tensor,
    *,
    TILE_M: int | None = None,
    WARPS: int | None = None,
) -> None:
    """weights = scale * sigmoid(logits)[ids], divided by their sum where renormalise; ids are ranked with the bias added.

    Shapes: logits [M, E], bias [E] and weights [M, K] float32. A group lies in a part of a power of two.
    """
    _launch_in_groups(logits, bias, groups, kept_groups, bool(renormalise), scale, weights, ids, TILE_M, WARPS)
