"""Choose K of E experts by their scores, Triton: one launch."""

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["M"])
def _choose(
    logits_ptr,
    weights_ptr,
    ids_ptr,
    logits_stride,
    weights_stride,
    ids_stride,
    M,
    E: tl.constexpr,
    K: tl.constexpr,
    OVER_CHOSEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    experts = tl.arange(0, BLOCK_E)[None, :]
    choices = tl.arange(0, BLOCK_K)[None, :]
    left = (experts < E) & (rows < M)
    scores = tl.load(logits_ptr + rows * logits_stride + experts, mask=left, other=0.0).to(tl.float32)
    # A row with a NaN has NaN for weights, as eager code, and ids that exist: what comes after it indexes with them.
    broken = tl.max(tl.where(scores != scores, 1, 0), axis=1, keep_dims=True) > 0
    scores = tl.where(broken, 0.0, scores)
    scores = tl.where(experts < E, scores, float("-inf"))
    highest = tl.max(scores, axis=1, keep_dims=True)
    total = tl.sum(tl.exp(scores - highest), axis=1, keep_dims=True)
    chosen = tl.zeros([BLOCK_M, BLOCK_K], dtype=tl.float32)
    ids = tl.zeros([BLOCK_M, BLOCK_K], dtype=tl.int32)
    # A softmax keeps the order of its scores, and rounds where they do not: the scores are ranked.
    for k in range(K):
        best = tl.max(tl.where(left, scores, float("-inf")), axis=1, keep_dims=True)
        first = tl.min(tl.where(left & (scores == best), experts, BLOCK_E), axis=1, keep_dims=True)
        left = left & (experts != first)
        chosen = tl.where(choices == k, best, chosen)
        ids = tl.where(choices == k, first, ids)
    parts = tl.where(choices < K, tl.exp(chosen - highest), 0.0)
    if OVER_CHOSEN:
        total = tl.sum(parts, axis=1, keep_dims=True)
    mask = (choices < K) & (rows < M)
    weights = tl.where(broken, float("nan"), parts / total).to(weights_ptr.dtype.element_ty)
    tl.store(weights_ptr + rows * weights_stride + choices, weights, mask=mask)
    tl.store(ids_ptr + rows * ids_stride + choices, ids.to(tl.int64), mask=mask)


@triton.jit(do_not_specialize=["M"])
def _choose_in_groups(
    logits_ptr,
    bias_ptr,
    weights_ptr,
    ids_ptr,
    logits_stride,
    weights_stride,
    ids_stride,
    scale,
    M,
    E: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    KEPT: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALISE: tl.constexpr,
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
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
        ranked = scores + tl.load(bias_ptr + experts, mask=there, other=0.0)
    else:
        # A softmax keeps the order of its scores, and rounds where they do not: the scores are ranked.
        ranked = tl.where(there, tl.where(logits != logits, float("inf"), logits), float("-inf"))
        parts = tl.exp(ranked - tl.max(ranked, axis=1, keep_dims=True))
        scores = parts / tl.sum(parts, axis=1, keep_dims=True)
    ranked = tl.where(ranked != ranked, float("inf"), ranked)  # a NaN is above all, and every id exists

    # What a group is worth: its best expert, under a sigmoid its two best.
    groups = tl.arange(0, BLOCK_G)[None, :]
    by_group = tl.reshape(tl.where(there, ranked, float("-inf")), (BLOCK_M, BLOCK_G, BLOCK_S))
    worth = tl.max(by_group, axis=2)
    if SIGMOID:
        members = tl.arange(0, BLOCK_S)[None, None, :]
        best_of_group = tl.min(tl.where(by_group == worth[:, :, None], members, BLOCK_S), axis=2)
        worth += tl.max(tl.where(members == best_of_group[:, :, None], float("-inf"), by_group), axis=2)
    closed = tl.where(groups < G, 0, 1) + tl.zeros([BLOCK_M, BLOCK_G], dtype=tl.int32)
    for _ in range(KEPT):
        most = tl.max(tl.where(closed == 0, worth, float("-inf")), axis=1, keep_dims=True)
        first = tl.min(tl.where((closed == 0) & (worth == most), groups, BLOCK_G), axis=1, keep_dims=True)
        closed = tl.where(groups == first, 2, closed)
    kept = tl.broadcast_to(closed[:, :, None], (BLOCK_M, BLOCK_G, BLOCK_S))
    left = left & (tl.reshape(kept, (BLOCK_M, COLUMNS)) == 2)

    choices = tl.arange(0, BLOCK_K)[None, :]
    chosen = tl.zeros([BLOCK_M, BLOCK_K], dtype=tl.float32)
    ids = tl.zeros([BLOCK_M, BLOCK_K], dtype=tl.int32)
    for k in range(K):
        best = tl.max(tl.where(left, ranked, float("-inf")), axis=1, keep_dims=True)
        first = tl.min(tl.where(left & (ranked == best), experts, E), axis=1, keep_dims=True)
        left = left & (experts != first)
        weight = tl.sum(tl.where(there & (experts == first), scores, 0.0), axis=1, keep_dims=True)
        chosen = tl.where(choices == k, weight, chosen)
        ids = tl.where(choices == k, first, ids)
    mask = (choices < K) & (rows < M)
    if RENORMALISE:
        chosen = chosen / (tl.sum(tl.where(choices < K, chosen, 0.0), axis=1, keep_dims=True) + 1e-20)
    tl.store(weights_ptr + rows * weights_stride + choices, chosen * scale, mask=mask)
    tl.store(ids_ptr + rows * ids_stride + choices, ids.to(tl.int64), mask=mask)


def _power_of_two(size):
    return 1 << (size - 1).bit_length()  # triton.next_power_of_2 costs microseconds a call


def _shape(M, columns, block_m, num_warps):
    """Rows a program and warps: a row each while there are few to share out, else a tile of 1024 scores; 8 scores a thread."""
    rows = block_m or (1 if M <= 16 else max(1, 1024 // columns))
    return rows, num_warps or max(1, min(8, rows * columns // 256))


def _launch(logits, top_k, over_chosen, weights, ids, block_m, num_warps):
    M, E = logits.shape
    if M == 0:
        return
    block_e = _power_of_two(E)
    rows, warps = _shape(M, block_e, block_m, num_warps)
    _choose[((M + rows - 1) // rows,)](
        logits, weights, ids, logits.stride(0), weights.stride(0), ids.stride(0), M, E, top_k, over_chosen, rows,
        block_e, _power_of_two(top_k), num_warps=warps,
    )  # fmt: skip


def _launch_in_groups(logits, bias, top_k, groups, kept, renormalise, scale, weights, ids, block_m, num_warps):
    M, E = logits.shape
    if M == 0:
        return
    sigmoid = bias is not None
    block_g, block_s = _power_of_two(groups), _power_of_two(E // groups)
    rows, warps = _shape(M, block_g * block_s, block_m, num_warps)
    _choose_in_groups[((M + rows - 1) // rows,)](
        logits, bias if sigmoid else logits, weights, ids, logits.stride(0), weights.stride(0), ids.stride(0), scale, M,
        E, top_k, groups, kept, sigmoid, renormalise, rows, block_g, block_s, _power_of_two(top_k), num_warps=warps,
    )  # fmt: skip


# Of all entry functions: a program owns BLOCK_M whole rows and keeps them in registers, so each score is read once; top_k times
# it looks for the largest score that is left, and of equal ones takes the first. Rows have unit last stride and any row stride;
# ids [M, K] are int64. BLOCK_M and num_warps: see _shape.


def run_topk_softmax(
    logits: torch.Tensor,
    top_k: int,
    renormalise: bool,
    weights: torch.Tensor,
    ids: torch.Tensor,
    *,
    BLOCK_M=None,
    num_warps=None,
):
    """weights = T(softmax(logits)[ids]), divided by their sum where renormalise; ids are those of the top_k largest scores.

    Shapes: logits [M, E] and weights [M, K] of one dtype T in bfloat16, float16, float32.
    """
    _launch(logits, top_k, renormalise, weights, ids, BLOCK_M, num_warps)


def run_topk_then_softmax(
    logits: torch.Tensor, top_k: int, weights: torch.Tensor, ids: torch.Tensor, *, BLOCK_M=None, num_warps=None
):
    """weights = T(softmax(logits[ids])); ids are those of the top_k largest scores, largest first.

    Shapes: logits [M, E] and weights [M, K] of one dtype T in bfloat16, float16, float32.
    """
    _launch(logits, top_k, True, weights, ids, BLOCK_M, num_warps)


def run_topk_softmax_groups(
    logits: torch.Tensor,
    top_k: int,
    groups: int,
    kept_groups: int,
    scale: float,
    weights: torch.Tensor,
    ids: torch.Tensor,
    *,
    BLOCK_M=None,
    num_warps=None,
):
    """weights = scale * softmax(logits)[ids]; ids are those of the top_k largest scores in the kept groups.

    Shapes: logits [M, E] and weights [M, K] float32. A group lies in a part of a power of two.
    """
    _launch_in_groups(logits, None, top_k, groups, kept_groups, False, scale, weights, ids, BLOCK_M, num_warps)


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
    BLOCK_M=None,
    num_warps=None,
):
    """weights = scale * sigmoid(logits)[ids], divided by their sum where renormalise; ids are ranked with the bias added.

    Shapes: logits [M, E], bias [E] and weights [M, K] float32. A group lies in a part of a power of two.
    """
    _launch_in_groups(logits, bias, top_k, groups, kept_groups, renormalise, scale, weights, ids, BLOCK_M, num_warps)
