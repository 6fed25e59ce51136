"""Gradient of a router that takes the K largest probabilities of a softmax, Triton: one launch."""

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["M"])
def _router_backward(
    logits_ptr,
    ids_ptr,
    grad_ptr,
    out_ptr,
    logits_stride,
    ids_stride,
    grad_stride,
    out_stride,
    M,
    E: tl.constexpr,
    K: tl.constexpr,
    RENORMALISE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    experts = tl.arange(0, BLOCK_E)[None, :]
    there = experts < E
    # Rows past the last are read from it and not stored.
    places = tl.minimum(rows, M - 1)
    scores = tl.load(logits_ptr + places * logits_stride + experts, mask=there, other=0.0).to(tl.float32)
    scores = tl.where(there, scores, float("-inf"))
    grads = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    taken = tl.zeros([BLOCK_M, BLOCK_E], tl.int32)
    for choice in tl.static_range(K):
        expert = tl.load(ids_ptr + places * ids_stride + choice)
        grad = tl.load(grad_ptr + places * grad_stride + choice).to(tl.float32)
        is_chosen = experts == expert
        grads = tl.where(is_chosen, grad, grads)
        taken = tl.where(is_chosen, 1, taken)
    # With renormalise the sum over all experts cancels, and a softmax of the chosen scores is left.
    if RENORMALISE:
        scores = tl.where(taken > 0, scores, float("-inf"))
    parts = tl.exp(scores - tl.max(scores, axis=1, keep_dims=True))
    weights = parts / tl.sum(parts, axis=1, keep_dims=True)
    found = weights * (grads - tl.sum(weights * grads, axis=1, keep_dims=True))
    tl.store(out_ptr + rows * out_stride + experts, found.to(out_ptr.dtype.element_ty), mask=there & (rows < M))


def run(
    logits: torch.Tensor,
    top_k: int,
    renormalise: bool,
    ids: torch.Tensor,
    grad_weights: torch.Tensor,
    grad_logits: torch.Tensor,
    *,
    BLOCK_M=None,
    num_warps=None,
):
    """grad_logits = T(p * (g - sum(p * g))): g is grad_weights at the chosen experts and zero elsewhere, fp32 inside.

    p: the softmax over all scores, or with renormalise over those of the chosen experts, and zero for the others.
    Shapes: logits and grad_logits [M, E], ids int64 and grad_weights [M, K] with unit last stride and any row stride; T in
    bfloat16, float16, float32.
    Mapping: a program owns BLOCK_M rows of scores, and compares each of their experts with the K that were chosen.
    BLOCK_M = None: as many rows as make a tile of 512 scores. num_warps = None: 16 scores a thread.
    """
    M, E = logits.shape
    if M == 0:
        return
    block_e = 1 << (E - 1).bit_length()
    block_m = BLOCK_M or max(1, 512 // block_e)
    warps = num_warps or min(8, max(1, block_m * block_e // 512))
    strides = logits.stride(0), ids.stride(0), grad_weights.stride(0), grad_logits.stride(0)
    _router_backward[((M + block_m - 1) // block_m,)](
        logits, ids, grad_weights, grad_logits, *strides, M, E, ids.shape[1], bool(renormalise), block_m, block_e,
        num_warps=warps,
    )  # fmt: skip
