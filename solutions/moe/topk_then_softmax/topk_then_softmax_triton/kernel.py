"""Choose K of E experts by their scores and soften what was chosen, Triton: one launch."""

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
    weights = (parts / total).to(weights_ptr.dtype.element_ty)
    tl.store(weights_ptr + rows * weights_stride + choices, weights, mask=mask)
    tl.store(ids_ptr + rows * ids_stride + choices, ids.to(tl.int64), mask=mask)


def _launch(logits, top_k, over_chosen, weights, ids, block_m, num_warps):
    M, E = logits.shape
    if M == 0:
        return
    block_e = 1 << (E - 1).bit_length()  # next power of two; triton.next_power_of_2 costs microseconds a call
    block_k = 1 << (top_k - 1).bit_length()
    rows = block_m or (1 if M <= 16 else max(1, 1024 // block_e))
    warps = num_warps or max(1, min(8, rows * block_e // 256))
    _choose[((M + rows - 1) // rows,)](
        logits, weights, ids, logits.stride(0), weights.stride(0), ids.stride(0), M, E, top_k, over_chosen, rows,
        block_e, block_k, num_warps=warps,
    )  # fmt: skip


def run(logits: torch.Tensor, top_k: int, weights: torch.Tensor, ids: torch.Tensor, *, BLOCK_M=None, num_warps=None):
    """weights = T(softmax(logits[ids])); ids are those of the top_k largest scores, largest first.

    Shapes: logits [M, E] and weights [M, K] of one dtype T in bfloat16, float16, float32, ids [M, K] int64; unit last
    stride and any row stride.
    Mapping: a program owns BLOCK_M whole rows and keeps them in registers, so each score is read once; K times it looks for the
    largest score that is left, and of equal ones takes the first.
    BLOCK_M = None: 1 while there are few rows to share out, else as many as make a tile of 1024 scores.
    num_warps = None: 8 scores a thread.
    """
    _launch(logits, top_k, True, weights, ids, BLOCK_M, num_warps)
