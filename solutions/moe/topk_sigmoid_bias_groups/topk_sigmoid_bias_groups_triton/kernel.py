"""Choose K of E experts out of the best groups, Triton: one launch."""

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["M"])
def _choose(
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
    bias = tl.load(bias_ptr + experts, mask=there, other=0.0)
    scores = 1.0 / (1.0 + tl.exp(-logits))
    ranked = scores + bias

    # What a group is worth.
    groups = tl.arange(0, BLOCK_G)[None, :]
    by_group = tl.reshape(tl.where(there, ranked, float("-inf")), (BLOCK_M, BLOCK_G, BLOCK_S))
    worth = tl.max(by_group, axis=2)
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


def run(
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

    Shapes: logits [M, E], bias [E] and weights [M, K] float32, ids [M, K] int64; unit last stride and any row stride.
    Mapping: a program owns BLOCK_M whole rows and keeps them in registers, a group to a part of a power of two. kept_groups
    times it looks for the best group that is left, top_k times for the best expert; of equal ones it takes the first.
    BLOCK_M = None: 1 while there are few rows to share out, else as many as make a tile of 1024 scores.
    num_warps = None: 8 scores a thread.
    """
    M, E = logits.shape
    if M == 0:
        return
    block_g = 1 << (groups - 1).bit_length()  # next power of two; triton.next_power_of_2 costs microseconds a call
    block_s = 1 << (E // groups - 1).bit_length()
    block_k = 1 << (top_k - 1).bit_length()
    columns = block_g * block_s
    rows = BLOCK_M or (1 if M <= 16 else max(1, 1024 // columns))
    warps = num_warps or max(1, min(8, rows * columns // 256))
    _choose[((M + rows - 1) // rows,)](
        logits, bias, weights, ids, logits.stride(0), weights.stride(0), ids.stride(0), scale, M, E, top_k, groups,
        kept_groups, renormalise, rows, block_g, block_s, block_k, num_warps=warps,
    )  # fmt: skip
