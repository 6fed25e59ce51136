"""The head of a language model that is not trained, its loss and one gradient in chunks of tokens, Triton: three kernels."""

import torch
from kernel import _logits_to_gradients, _multiply


def run(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    grad_loss: torch.Tensor,
    ignore_index: int,
    loss: torch.Tensor,
    grad_hidden: torch.Tensor,
    *,
    CHUNK: int = 2048,
    REPEAT: int = 8,
    num_stages: int = 4,
) -> None:
    """Write the loss of each token and the gradient of sum(loss * grad_loss) with respect to hidden.

    hidden, grad_hidden [M, H] and weight [V, H] in T (bfloat16, float16); labels [M] int64; grad_loss, loss [M] float32.
    CHUNK tokens at a time: their logits in T, the losses and the gradient of the logits in their place, then the product with
    it. The logits of a chunk are the only memory beside the outputs.
    """
    M, H = hidden.shape
    V = weight.shape[0]
    if M == 0:
        return
    rows = -(-M // -(-M // CHUNK))
    logits = torch.empty((rows, -(-V // 8) * 8), dtype=hidden.dtype, device=hidden.device)
    lanes = 2048
    while lanes > 64 and REPEAT * lanes > 2 * V:
        REPEAT, lanes = (REPEAT // 2, lanes) if REPEAT > 1 else (1, lanes // 2)
    for start in range(0, M, rows):
        count = min(M, start + rows) - start
        part, out = hidden[start : start + count], grad_hidden[start : start + count]
        _multiply(part, weight, logits, logits, count, V, H, a_rows=True, b_rows=True, stages=num_stages)
        _logits_to_gradients[(count,)](
            logits,
            labels[start:],
            grad_loss[start:],
            loss[start:],
            logits.stride(0),
            V,
            ignore_index,
            REPEAT,
            lanes,
            num_warps=8,
        )
        _multiply(logits, weight, out, out, count, H, V, a_rows=True, b_rows=False, stages=num_stages)
