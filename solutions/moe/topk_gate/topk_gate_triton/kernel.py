"""Indices of the K largest scores of each row, Triton: one launch."""

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["M"])
def _choose(
    scores_ptr,
    ids_ptr,
    scores_stride,
    M,
    E: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    TAKEN: tl.constexpr = -(2**63)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    experts = tl.arange(0, BLOCK_E)[None, :]
    choices = tl.arange(0, BLOCK_K)[None, :]
    inside = (experts < E) & (rows < M)
    scores = tl.load(scores_ptr + rows * scores_stride + experts, mask=inside, other=0.0)
    scores = tl.where(scores == 0.0, 0.0, scores)  # -0.0 equals 0.0
    # The bits of a float as a number of the same order, and below them the index, of which the smaller is to be preferred:
    # no two are equal, and one reduction finds score and index.
    bits = scores.to(tl.int32, bitcast=True)
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    left = tl.where(inside, order * 4294967296 + (BLOCK_E - 1 - experts), TAKEN)
    ids = tl.zeros([BLOCK_M, BLOCK_K], dtype=tl.int64)
    for k in range(K):
        best = tl.max(left, axis=1, keep_dims=True)
        left = tl.where(left == best, TAKEN, left)
        ids = tl.where(choices == k, BLOCK_E - 1 - (best & 0xFFFFFFFF), ids)
    tl.store(ids_ptr + rows * K + choices, ids, mask=(choices < K) & (rows < M))


def run(scores: torch.Tensor, top_k: int, topk_idx: torch.Tensor, *, BLOCK_M=None, num_warps=None):
    """topk_idx[m] = indices of the top_k largest scores[m], largest first; of equal scores the smaller index first.

    Shapes: scores [M, E] float32, unit last stride and any row stride; topk_idx [M, K] int64, contiguous. -inf is a score like
    any other.
    Mapping: a program owns BLOCK_M whole rows and keeps them in registers, so each score is read once; K times it looks for the
    largest that is left.
    BLOCK_M = None: 1 while there are few rows to share out, else as many as make a tile of 1024 scores.
    num_warps = None: 8 scores a thread.
    """
    M, E = scores.shape
    if M == 0:
        return
    block_e = max(2, 1 << (E - 1).bit_length())  # next power of two; triton.next_power_of_2 costs microseconds a call
    rows = BLOCK_M or (1 if M <= 16 else max(1, 1024 // block_e))
    warps = num_warps or max(1, min(8, rows * block_e // 256))
    _choose[((M + rows - 1) // rows,)](
        scores, topk_idx, scores.stride(0), M, E, top_k, rows, block_e, 1 << (top_k - 1).bit_length(), num_warps=warps
    )
