"""Activations of MLPs without a gate through torch.compile."""

import torch


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


def _relu_squared(x: torch.Tensor) -> torch.Tensor:
    return torch.square(torch.nn.functional.relu(x))


# One static graph per shape, which is torch.compile at its best. PyTorch keeps eight graphs of one function, so all are
# dropped before a ninth; with fullgraph it would raise an error rather than run eager code.
_compiled_quick_gelu = torch.compile(_quick_gelu, dynamic=False, fullgraph=True)
_compiled_relu_squared = torch.compile(_relu_squared, dynamic=False, fullgraph=True)
MAX_GRAPHS = 8
_graphs: set[tuple[object, ...]] = set()


def _count(x: torch.Tensor) -> None:
    graph = (x.shape, x.stride(), x.dtype)
    if graph not in _graphs:
        if len(_graphs) == MAX_GRAPHS:
            torch.compiler.reset()
            _graphs.clear()
        _graphs.add(graph)


def run_quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """x [M, I] -> [M, I]."""
    _count(x)
    return _compiled_quick_gelu(x)


def run_relu_squared(x: torch.Tensor) -> torch.Tensor:
    """x [M, I] -> [M, I]."""
    _count(x)
    return _compiled_relu_squared(x)
