"""The gradients of activations of MLPs without a gate through torch.compile."""

import math

import torch


def _gelu_new_backward(x: torch.Tensor, grad_out: torch.Tensor) -> torch.Tensor:
    tanh = torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0)))
    grad_sum = torch.ops.aten.tanh_backward(grad_out * (0.5 * x), tanh) * math.sqrt(2.0 / math.pi)
    return grad_out * (1.0 + tanh) * 0.5 + (grad_sum + grad_sum * 0.044715 * (3.0 * torch.pow(x, 2.0)))


def _quick_gelu_backward(x: torch.Tensor, grad_out: torch.Tensor) -> torch.Tensor:
    sigmoid = torch.sigmoid(1.702 * x)
    return grad_out * sigmoid + torch.ops.aten.sigmoid_backward(grad_out * x, sigmoid) * 1.702


def _relu_squared_backward(x: torch.Tensor, grad_out: torch.Tensor) -> torch.Tensor:
    kept = torch.nn.functional.relu(x)
    return torch.ops.aten.threshold_backward(grad_out * (2.0 * kept), kept, 0)


# One static graph per shape, which is torch.compile at its best. PyTorch keeps eight graphs of one function, so all are
# dropped before a ninth; with fullgraph it would raise an error rather than run eager code.
_compiled_gelu_new_backward = torch.compile(_gelu_new_backward, dynamic=False, fullgraph=True)
_compiled_quick_gelu_backward = torch.compile(_quick_gelu_backward, dynamic=False, fullgraph=True)
_compiled_relu_squared_backward = torch.compile(_relu_squared_backward, dynamic=False, fullgraph=True)
MAX_GRAPHS = 8
_graphs: set[tuple[object, ...]] = set()


def _count(x: torch.Tensor, grad_out: torch.Tensor) -> None:
    graph = (x.shape, x.stride(), grad_out.stride(), x.dtype)
    if graph not in _graphs:
        if len(_graphs) == MAX_GRAPHS:
            torch.compiler.reset()
            _graphs.clear()
        _graphs.add(graph)


def run_gelu_new_backward(x: torch.Tensor, grad_out: torch.Tensor) -> torch.Tensor:
    """x, grad_out [M, I] -> the gradient of x [M, I]."""
    _count(x, grad_out)
    return _compiled_gelu_new_backward(x, grad_out)


def run_quick_gelu_backward(x: torch.Tensor, grad_out: torch.Tensor) -> torch.Tensor:
    """x, grad_out [M, I] -> the gradient of x [M, I]."""
    _count(x, grad_out)
    return _compiled_quick_gelu_backward(x, grad_out)


def run_relu_squared_backward(x: torch.Tensor, grad_out: torch.Tensor) -> torch.Tensor:
    """x, grad_out [M, I] -> the gradient of x [M, I]."""
    _count(x, grad_out)
    return _compiled_relu_squared_backward(x, grad_out)
