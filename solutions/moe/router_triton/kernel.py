"""Choose K of E experts by their scores, Triton: one launch."""

import torch
import triton
import triton.language as tl

# Scores are ranked as integers that compare as they do: the largest of a warp is then one instruction. A program is one warp
# where it can be, so that no reduction waits for other warps.
LEAST = tl.constexpr(-(2**31))  # below the integer of every score
PLACE = tl.constexpr(
    0x1FFF
)  # bits that are zero in the fp32 value of every bf16 and fp16: the expert's number goes there


@triton.jit
def _ordered(scores):
    """int32 of float32: equal for -0.0 and 0.0, above that of infinity for a NaN."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)
    return tl.where(scores != scores, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def _score(ordered):
    """The reverse of _ordered."""
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _place_of(ordered, best, experts, BLOCK: tl.constexpr):
    return tl.min(tl.where(ordered == best, experts, BLOCK), axis=1, keep_dims=True)


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
    PACKED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    experts = tl.arange(0, BLOCK_E)[None, :]
    choices = tl.arange(0, BLOCK_K)[None, :]
    # Rows past the last are read from it and not stored: reads need no mask where E is a power of two.
    places = tl.minimum(rows, M - 1) * logits_stride + experts
    if E == BLOCK_E:
        scores = tl.load(logits_ptr + places).to(tl.float32)
    else:
        scores = tl.load(logits_ptr + places, mask=experts < E, other=0.0).to(tl.float32)
    # A softmax keeps the order of its scores, and rounds where they do not: the scores are ranked.
    ordered = _ordered(scores)
    if PACKED:  # a score and its expert in one integer, no two of which are equal; of equal scores the first expert's is largest
        ordered = (ordered & ~PLACE) | (PLACE - experts)
    ordered = tl.where(experts < E, ordered, LEAST)
    best = tl.max(ordered, axis=1, keep_dims=True)
    chosen = tl.where(choices == 0, best, 0)
    if PACKED:
        for k in range(1, K):
            best = tl.max(tl.where(ordered < best, ordered, LEAST), axis=1, keep_dims=True)
            chosen = tl.where(choices == k, best, chosen)
        ids = PLACE - (chosen & PLACE)
        chosen = tl.where(chosen < 0, chosen | PLACE, chosen & ~PLACE)
    else:
        first = _place_of(ordered, best, experts, BLOCK_E)
        ids = tl.where(choices == 0, first, 0)
        for k in range(1, K):
            ordered = tl.where(experts == first, LEAST, ordered)
            best = tl.max(ordered, axis=1, keep_dims=True)
            first = _place_of(ordered, best, experts, BLOCK_E)
            chosen = tl.where(choices == k, best, chosen)
            ids = tl.where(choices == k, first, ids)
    chosen = _score(chosen)
    highest = tl.max(tl.where(choices == 0, chosen, float("-inf")), axis=1, keep_dims=True)
    parts = tl.where(choices < K, tl.exp(chosen - highest), 0.0)
    if OVER_CHOSEN:
        total = tl.sum(parts, axis=1, keep_dims=True)
    else:
        total = tl.sum(tl.where(experts < E, tl.exp(scores - highest), 0.0), axis=1, keep_dims=True)
    # A row with a NaN, which is ranked first, has NaN for weights, as eager code, and ids that exist.
    broken = tl.max(tl.where(chosen != chosen, 1, 0), axis=1, keep_dims=True) > 0
    ids = tl.where(broken, choices, ids)
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
    if SIZE == BLOCK_S or G == 1:  # known to be side by side: wide reads
        there = columns < E
        experts = columns
    else:
        there = (columns // BLOCK_S < G) & (columns % BLOCK_S < SIZE)
        experts = tl.where(there, columns // BLOCK_S * SIZE + columns % BLOCK_S, COLUMNS)
    # Rows past the last are read from it and not stored.
    row_ptrs = logits_ptr + tl.minimum(rows, M - 1) * logits_stride
    logits = tl.load(row_ptrs + experts, mask=there, other=0.0)
    ranked = logits  # a softmax keeps the order of its scores, and rounds where they do not
    if SIGMOID:
        ranked = 1.0 / (1.0 + tl.exp(-logits)) + tl.load(bias_ptr + experts, mask=there, other=0.0)
    ranked = tl.where(ranked != ranked, float("inf"), ranked)  # a NaN is above all, and every id exists
    ranked = tl.where(there, ranked, float("-inf"))
    ordered = tl.where(there, _ordered(ranked), LEAST)
    if not SIGMOID:
        highest = tl.max(ranked, axis=1, keep_dims=True)
        total = tl.sum(tl.exp(ranked - highest), axis=1, keep_dims=True)

    if KEPT < G:
        # What a group is worth: its best expert, under a sigmoid its two best.
        by_group = tl.reshape(ranked, (BLOCK_M, BLOCK_G, BLOCK_S))
        worth = tl.max(by_group, axis=2)
        if SIGMOID:
            members = tl.arange(0, BLOCK_S)[None, None, :]
            best_of_group = tl.min(tl.where(by_group == worth[:, :, None], members, BLOCK_S), axis=2)
            worth += tl.max(tl.where(members == best_of_group[:, :, None], float("-inf"), by_group), axis=2)
        groups = tl.arange(0, BLOCK_G)[None, :]
        if BLOCK_G <= 16:
            # A group's rank is how many are ahead of it.
            ours, others = groups[:, :, None], groups[:, None, :]
            ahead = (worth[:, None, :] > worth[:, :, None]) | (
                (worth[:, None, :] == worth[:, :, None]) & (others < ours)
            )
            kept = tl.sum((ahead & (others < G)).to(tl.int32), axis=2) < KEPT
        else:
            state = tl.where(groups < G, 0, 1) + tl.zeros([BLOCK_M, BLOCK_G], dtype=tl.int32)
            for _ in range(KEPT):
                most = tl.max(tl.where(state == 0, worth, float("-inf")), axis=1, keep_dims=True)
                first = tl.min(tl.where((state == 0) & (worth == most), groups, BLOCK_G), axis=1, keep_dims=True)
                state = tl.where(groups == first, 2, state)
            kept = state == 2
        kept = tl.broadcast_to(kept.to(tl.int32)[:, :, None], (BLOCK_M, BLOCK_G, BLOCK_S))
        ordered = tl.where(tl.reshape(kept, (BLOCK_M, COLUMNS)) != 0, ordered, LEAST)

    choices = tl.arange(0, BLOCK_K)[None, :]
    chosen = tl.zeros([BLOCK_M, BLOCK_K], dtype=tl.int32)
    ids = tl.zeros([BLOCK_M, BLOCK_K], dtype=tl.int32)
    for k in range(K):
        best = tl.max(ordered, axis=1, keep_dims=True)
        first = _place_of(ordered, best, experts, COLUMNS)
        ordered = tl.where(experts == first, LEAST, ordered)
        chosen = tl.where(choices == k, best, chosen)
        ids = tl.where(choices == k, first, ids)
    mask = (choices < K) & (rows < M)
    if SIGMOID:
        # The logits of the chosen are read once more: cheaper than a reduction for each of them.
        weights = 1.0 / (1.0 + tl.exp(-tl.load(row_ptrs + ids, mask=mask & (ids < E), other=0.0)))
    else:
        weights = tl.exp(_score(chosen) - highest) / total
    if RENORMALISE:
        weights = weights / (tl.sum(tl.where(choices < K, weights, 0.0), axis=1, keep_dims=True) + 1e-20)
    tl.store(weights_ptr + rows * weights_stride + choices, weights * scale, mask=mask)
    tl.store(ids_ptr + rows * ids_stride + choices, ids.to(tl.int64), mask=mask)


def _power_of_two(size):
    return 1 << (size - 1).bit_length()  # triton.next_power_of_2 costs microseconds a call


def _shape(M, columns, block_m, num_warps):
    """Rows a program and warps: 2048 programs where there are so many rows, of at most 1024 scores; up to 32 a thread."""
    rows = block_m or max(1, min(1 << (max(1, M // 2048).bit_length() - 1), 1024 // columns))
    return rows, num_warps or max(1, min(8, rows * columns // 1024))


def _launch(logits, top_k, over_chosen, weights, ids, block_m, num_warps):
    M, E = logits.shape
    if M == 0:
        return
    block_e = _power_of_two(E)
    rows, warps = _shape(M, block_e, block_m, num_warps)
    _choose[((M + rows - 1) // rows,)](
        logits, weights, ids, logits.stride(0), weights.stride(0), ids.stride(0), M, E, top_k, over_chosen,
        logits.element_size() == 2 and E <= 1 << 13, rows, block_e, _power_of_two(top_k), num_warps=warps,
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
