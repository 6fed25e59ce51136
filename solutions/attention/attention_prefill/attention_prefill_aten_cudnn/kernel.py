"""cuDNN's attention, by its own operator; prompts are padded to a few lengths, because cuDNN makes a plan for each."""

import torch

ALIGNMENT = 8
"""Elements of 16 bits that a load of the library's kernels takes at once: rows must start at multiples of it."""


def _aligned(x: torch.Tensor) -> torch.Tensor:
    if all(start % ALIGNMENT == 0 for start in (x.storage_offset(), *x.stride()[:-1])):
        return x
    return x.clone(memory_format=torch.contiguous_format)


SHORTEST = 128
STEPS = 16


def _planned_length(tokens: int) -> int:
    """The length that a prompt is padded to: of eight between two powers of two the next, so that at most an eighth is added."""
    step = max(SHORTEST, (1 << (tokens - 1).bit_length()) // STEPS)
    return (tokens + step - 1) // step * step


def _padded(x: torch.Tensor, length: int) -> torch.Tensor:
    """[B, H, S, D] with zeros up to ``length`` positions, in the order of memory that it has: a copy."""
    missing = length - x.shape[2]
    if x.stride(1) < x.stride(2):  # a view of [B, S, H, D], which the output shall be as well
        return torch.nn.functional.pad(x.transpose(1, 2), (0, 0, 0, 0, 0, missing)).transpose(1, 2)
    return torch.nn.functional.pad(x, (0, 0, 0, missing))


def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """q [B, Hq, S, D], k and v [B, Hkv, S, D] -> [B, Hq, S, D].

    cuDNN builds a plan for each shape that a process has not had yet, which takes up to half a second: a server that gets a new
    length with each prompt would wait every time. So lengths in between are padded. Causality keeps what was added from every
    real position, and the rest is cut off. Lengths of the list are not copied.

    The operator shares a key head among Hq / Hkv query heads by itself, and lays its output out as q.
    """
    tokens = q.shape[2]
    length = _planned_length(tokens)
    q, k, v = (_padded(x, length) if length != tokens else _aligned(x) for x in (q, k, v))
    out = torch.ops.aten._scaled_dot_product_cudnn_attention.default(q, k, v, None, False, 0.0, True, scale=scale)[0]
    # Heads after tokens in memory, which is how the model goes on.
    return out[:, :, :tokens].transpose(1, 2).contiguous().transpose(1, 2)
