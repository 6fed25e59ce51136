"""FlashAttention in PyTorch's build, by its own operator: nothing of the process is set."""

import torch

ALIGNMENT = 8
"""Elements of 16 bits that a load of the library's kernels takes at once: rows must start at multiples of it."""


def _aligned(x: torch.Tensor) -> torch.Tensor:
    if all(start % ALIGNMENT == 0 for start in (x.storage_offset(), *x.stride()[:-1])):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """q [B, Hq, S, D], k and v [B, Hkv, S, D] -> [B, Hq, S, D].

    The operator shares a key head among Hq / Hkv query heads by itself, and lays its output out as q: where a model passes q as a
    view of [B, S, Hq, D], nothing is copied after it.
    """
    out = torch.ops.aten._scaled_dot_product_flash_attention.default(
        _aligned(q), _aligned(k), _aligned(v), 0.0, True, scale=scale
    )[0]
    # Heads after tokens in memory, which is how the model goes on.
    return out.transpose(1, 2).contiguous().transpose(1, 2)
