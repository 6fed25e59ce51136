"""N-gram memory: looked-up values that are gated into every copy of the residual stream."""

from __future__ import annotations

import torch
from torch import nn

from tilegym_db.layers.differentiable import differentiable, operator

_gate = differentiable("engram_gate_fwd_save", "engram_gate_backward_saved")
_gate_alone = operator("engram_gate_fwd")  # without the outputs that a gradient needs


class EngramGateLayer(nn.Module):
    """A layer for hidden + gate * value. The gate of a copy measures how well its hidden state and a looked-up key agree."""

    def __init__(self, hidden_size: int, num_copies: int = 4, *, clamp: float = 1e-6, eps: float = 1e-20) -> None:
        """Create the two norm weights, filled with ones.

        Args:
            hidden_size: H.
            num_copies: copies of the residual stream, C.
            clamp: smallest magnitude of a score under the root, which limits its slope.
            eps: added to the mean squares.
        """
        super().__init__()
        self.hidden_size, self.num_copies, self.clamp, self.eps = hidden_size, num_copies, clamp, eps
        self.weight_hidden = nn.Parameter(torch.ones(num_copies, hidden_size))
        self.weight_embed = nn.Parameter(torch.ones(num_copies, hidden_size))

    def reset_parameters(self) -> None:
        """Set the weights to one."""
        nn.init.ones_(self.weight_hidden)
        nn.init.ones_(self.weight_embed)

    def forward(self, hidden: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Map hidden and key [..., C, H] and value [..., H] to [..., C, H]; key and value in the dtype of hidden."""
        count, size, dtype = self.num_copies, self.hidden_size, hidden.dtype
        tensors = (
            hidden.reshape(-1, count, size),
            key.reshape(-1, count, size).to(dtype),
            value.reshape(-1, size).to(dtype),
            self.weight_hidden.to(dtype),
            self.weight_embed.to(dtype),
        )
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            out = _gate(*tensors, self.clamp, self.eps)[0]
        else:
            out = _gate_alone(*tensors, self.clamp, self.eps)
        gated: torch.Tensor = out.reshape(hidden.shape)
        return gated

    def extra_repr(self) -> str:
        """Return the sizes for a printed model."""
        return f"hidden_size={self.hidden_size}, num_copies={self.num_copies}"
