"""Layer norm and the gradients of norms through torch.compile."""

import torch
import torch.nn.functional as F


def _layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def _layer_norm_backward(
    x: torch.Tensor, weight: torch.Tensor, grad_out: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    wide, grad = x.float(), grad_out.float()
    centred = wide - wide.mean(-1, keepdim=True)
    rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    normed = centred * rstd
    grad_normed = grad * weight.float()
    shared, along = grad_normed.mean(-1, keepdim=True), (grad_normed * normed).mean(-1, keepdim=True)
    grad_x = rstd * (grad_normed - shared - normed * along)
    return grad_x.to(x.dtype), (grad * normed).sum(0).to(weight.dtype), grad.sum(0).to(weight.dtype)


def _rms_norm_backward(
    x: torch.Tensor, weight: torch.Tensor, grad_out: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = x.float()
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    normed = wide * rstd
    grad_weight = (grad_out * normed.to(x.dtype)).float().sum(0)
    grad_normed = (grad_out * weight).float()
    grad_x = rstd * (grad_normed - normed * (grad_normed * normed).mean(-1, keepdim=True))
    return grad_x.to(x.dtype), grad_weight.to(weight.dtype)


# One static graph per shape, which is torch.compile at its best. PyTorch keeps eight graphs of one function, so all are
# dropped before a ninth; with fullgraph it would raise an error rather than run eager code.
_compiled_layer_norm = torch.compile(_layer_norm, dynamic=False, fullgraph=True)
_compiled_layer_norm_backward = torch.compile(_layer_norm_backward, dynamic=False, fullgraph=True)
_compiled_rms_norm_backward = torch.compile(_rms_norm_backward, dynamic=False, fullgraph=True)
MAX_GRAPHS = 8
_graphs: set[tuple[object, ...]] = set()


def _count(function: str, *given: object) -> None:
    tensors = [(one.shape, one.stride(), one.dtype) if isinstance(one, torch.Tensor) else one for one in given]
    graph = (function, *tensors)
    if graph not in _graphs:
        if len(_graphs) == MAX_GRAPHS:
            torch.compiler.reset()
            _graphs.clear()
        _graphs.add(graph)


def run_layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """x [M, N], weight, bias [N] -> [M, N]."""
    _count("layer_norm", x, weight, bias, eps)
    return _compiled_layer_norm(x, weight, bias, eps)


def run_layer_norm_backward(
    x: torch.Tensor, weight: torch.Tensor, grad_out: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, grad_out [M, N], weight [N] -> the gradients of x [M, N], of weight and of bias [N]."""
    _count("layer_norm_backward", x, weight, grad_out, eps)
    return _compiled_layer_norm_backward(x, weight, grad_out, eps)


def run_rms_norm_backward(
    x: torch.Tensor, weight: torch.Tensor, grad_out: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, grad_out [M, N], weight [N] -> the gradients of x [M, N] and of weight [N]."""
    _count("rms_norm_backward", x, weight, grad_out, eps)
    return _compiled_rms_norm_backward(x, weight, grad_out, eps)
