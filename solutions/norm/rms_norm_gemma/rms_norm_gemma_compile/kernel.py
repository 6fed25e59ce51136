"""RMSNorm with a zero-centred weight through torch.compile."""

import torch


def _eager(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (normed * (1.0 + weight.float())).to(x.dtype)


# One static graph per shape, which is torch.compile at its best. PyTorch keeps eight graphs of one function, so all are
# dropped before a ninth; with fullgraph it would raise an error rather than run eager code.
_compiled = torch.compile(_eager, dynamic=False, fullgraph=True)
MAX_GRAPHS = 8
_graphs: set[tuple[object, ...]] = set()


def run(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [M, N], weight [N] -> [M, N]."""
    graph = (x.shape, x.stride(), weight.stride(), x.dtype, eps)
    if graph not in _graphs:
        if len(_graphs) == MAX_GRAPHS:
            torch.compiler.reset()
            _graphs.clear()
        _graphs.add(graph)
    return _compiled(x, weight, eps)
