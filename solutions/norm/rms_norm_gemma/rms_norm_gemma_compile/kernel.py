"""RMSNorm with a zero-centred weight through torch.compile."""

import torch


def _eager(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (normed * (1.0 + weight.float())).to(x.dtype)


# One static graph per shape, which is torch.compile at its best. PyTorch goes back to eager code after eight graphs of
# one function, so all are dropped before that; shapes are measured one after the other.
_compiled = torch.compile(_eager, dynamic=False)
_MAX_GRAPHS = 7
_graphs: set[tuple[object, ...]] = set()


def run(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [M, N], weight [N] -> [M, N]."""
    key = (x.shape, x.stride(), x.dtype)
    if key not in _graphs:
        if len(_graphs) == _MAX_GRAPHS:
            torch._dynamo.reset()
            _graphs.clear()
        _graphs.add(key)
    return _compiled(x, weight, eps)
