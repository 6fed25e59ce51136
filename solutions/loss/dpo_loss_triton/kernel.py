"""The loss of direct preference optimisation and its gradients, Triton: one kernel each, a pair a lane."""

import torch
import triton
import triton.language as tl
from _lib.triton.vocabulary_rows import log1p

BLOCK = 256


@triton.jit(do_not_specialize=["N"])
def _losses(
    chosen_ptr, rejected_ptr, ref_chosen_ptr, ref_rejected_ptr, loss_ptr, margin_ptr, N, beta, BLOCK: tl.constexpr
):
    pairs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = pairs < N
    chosen = tl.load(chosen_ptr + pairs, mask=here, other=0.0) - tl.load(ref_chosen_ptr + pairs, mask=here, other=0.0)
    rejected = tl.load(rejected_ptr + pairs, mask=here, other=0.0)
    rejected -= tl.load(ref_rejected_ptr + pairs, mask=here, other=0.0)
    margin = beta * (chosen - rejected)
    tl.store(loss_ptr + pairs, tl.maximum(-margin, 0.0) + log1p(tl.exp(-tl.abs(margin))), mask=here)
    tl.store(margin_ptr + pairs, margin, mask=here)


@triton.jit(do_not_specialize=["N"])
def _gradients(margin_ptr, grad_loss_ptr, grad_chosen_ptr, grad_rejected_ptr, N, beta, BLOCK: tl.constexpr):
    pairs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = pairs < N
    margin = tl.load(margin_ptr + pairs, mask=here, other=0.0)
    small = tl.exp(-tl.abs(margin))
    pull = tl.where(margin > 0, small, 1.0) / (1 + small)
    pull *= beta * tl.load(grad_loss_ptr + pairs, mask=here, other=0.0)
    tl.store(grad_chosen_ptr + pairs, -pull, mask=here)
    tl.store(grad_rejected_ptr + pairs, pull, mask=here)


def run(
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    ref_chosen: torch.Tensor,
    ref_rejected: torch.Tensor,
    beta: float,
    loss: torch.Tensor,
    margin: torch.Tensor,
) -> None:
    """Write loss = -log(sigmoid(margin)) and margin = beta ((chosen - ref_chosen) - (rejected - ref_rejected)), [N] float32."""
    N = chosen.shape[0]
    if N == 0:
        return
    tensors = (chosen, rejected, ref_chosen, ref_rejected, loss, margin)
    _losses[(-(-N // BLOCK),)](*tensors, N, beta, BLOCK, num_warps=4)


def run_backward(
    margin: torch.Tensor,
    grad_loss: torch.Tensor,
    beta: float,
    grad_chosen: torch.Tensor,
    grad_rejected: torch.Tensor,
) -> None:
    """Write grad_rejected = beta sigmoid(-margin) grad_loss and its negative, grad_chosen, all [N] float32."""
    N = margin.shape[0]
    if N == 0:
        return
    _gradients[(-(-N // BLOCK),)](margin, grad_loss, grad_chosen, grad_rejected, N, beta, BLOCK, num_warps=4)
