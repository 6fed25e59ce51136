"""The loss of direct preference optimisation and its gradients, cuTile: one kernel each, a pair a lane."""

import cuda.tile as ct
import torch

TILE = 256


@ct.kernel
def _losses(chosen, rejected, ref_chosen, ref_rejected, loss, margin, beta: float):
    pairs = ct.bid(0) * TILE + ct.arange(
        TILE, dtype=ct.int32
    )  # gather reads 0 past the end, and scatter writes nothing
    of_chosen = ct.gather(chosen, pairs) - ct.gather(ref_chosen, pairs)
    of_rejected = ct.gather(rejected, pairs) - ct.gather(ref_rejected, pairs)
    found = beta * (of_chosen - of_rejected)
    small = ct.exp(-ct.abs(found))
    total = 1.0 + small
    # log(1 + small), with the rounding of the sum put back
    ct.scatter(loss, pairs, ct.maximum(-found, 0.0) + (ct.log(total) + (small - (total - 1.0)) / total))
    ct.scatter(margin, pairs, found)


@ct.kernel
def _gradients(margin, grad_loss, grad_chosen, grad_rejected, beta: float):
    pairs = ct.bid(0) * TILE + ct.arange(TILE, dtype=ct.int32)
    found = ct.gather(margin, pairs)
    small = ct.exp(-ct.abs(found))
    pull = ct.where(found > 0.0, small, 1.0) / (1.0 + small) * (beta * ct.gather(grad_loss, pairs))
    ct.scatter(grad_chosen, pairs, -pull)
    ct.scatter(grad_rejected, pairs, pull)


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
    n = chosen.shape[0]
    if n == 0:
        return
    arguments = (chosen, rejected, ref_chosen, ref_rejected, loss, margin, beta)
    ct.launch(torch.cuda.current_stream(), (-(-n // TILE), 1, 1), _losses, arguments)


def run_backward(
    margin: torch.Tensor,
    grad_loss: torch.Tensor,
    beta: float,
    grad_chosen: torch.Tensor,
    grad_rejected: torch.Tensor,
) -> None:
    """Write grad_rejected = beta sigmoid(-margin) grad_loss and its negative, grad_chosen, all [N] float32."""
    n = margin.shape[0]
    if n == 0:
        return
    arguments = (margin, grad_loss, grad_chosen, grad_rejected, beta)
    ct.launch(torch.cuda.current_stream(), (-(-n // TILE), 1, 1), _gradients, arguments)
