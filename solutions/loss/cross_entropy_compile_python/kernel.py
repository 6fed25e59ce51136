"""Cross entropy and its gradients through torch.compile."""

import torch
import torch.nn.functional as F


def _cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ignored = labels == ignore_index
    wide = logits.float()
    row_max = wide.amax(dim=-1)
    log_sum = torch.exp(wide - row_max[:, None]).sum(dim=-1).log()
    of_label = logits.gather(-1, torch.where(ignored, 0, labels)[:, None])[:, 0].float()
    loss = log_sum + (row_max - of_label)
    row_max = torch.where(log_sum.isnan(), log_sum, row_max)
    return torch.where(ignored, 0.0, loss), torch.where(ignored, 0.0, row_max), torch.where(ignored, 0.0, log_sum)


def _cross_entropy_backward(
    logits: torch.Tensor,
    labels: torch.Tensor,
    row_max: torch.Tensor,
    log_sum: torch.Tensor,
    grad_loss: torch.Tensor,
    ignore_index: int,
) -> torch.Tensor:
    scores = (logits.float() - row_max[:, None]) - log_sum[:, None]
    columns = torch.arange(logits.shape[1], device=logits.device)
    off = torch.where(columns == labels[:, None], torch.expm1(scores), torch.exp(scores))
    grad = off * grad_loss[:, None]
    return torch.where((labels == ignore_index)[:, None], 0.0, grad).to(logits.dtype)


def _linear_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, grad_loss: torch.Tensor, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits = F.linear(hidden, weight)
    loss, row_max, log_sum = _cross_entropy(logits, labels, ignore_index)
    grad = _cross_entropy_backward(logits, labels, row_max, log_sum, grad_loss, ignore_index)
    return loss, grad @ weight, grad.T @ hidden


# One static graph per shape, which is torch.compile at its best. PyTorch keeps eight graphs of one function, so all are
# dropped before a ninth; with fullgraph it would raise an error rather than run eager code.
_compiled = torch.compile(_cross_entropy, dynamic=False, fullgraph=True)
_compiled_backward = torch.compile(_cross_entropy_backward, dynamic=False, fullgraph=True)
_compiled_linear = torch.compile(_linear_cross_entropy, dynamic=False, fullgraph=True)
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


def run(
    logits: torch.Tensor, labels: torch.Tensor, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """logits [M, V], labels [M] -> loss, row_max, log_sum [M] in float32; all 0 for an ignored row."""
    _count("forward", logits, labels, ignore_index)
    return _compiled(logits, labels, ignore_index)


def run_backward(
    logits: torch.Tensor,
    labels: torch.Tensor,
    row_max: torch.Tensor,
    log_sum: torch.Tensor,
    grad_loss: torch.Tensor,
    ignore_index: int,
) -> torch.Tensor:
    """logits [M, V], labels, row_max, log_sum, grad_loss [M] -> the gradient of the logits [M, V]."""
    _count("backward", logits, labels, row_max, log_sum, grad_loss, ignore_index)
    return _compiled_backward(logits, labels, row_max, log_sum, grad_loss, ignore_index)


def run_linear(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, grad_loss: torch.Tensor, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden [M, H], weight [V, H], labels, grad_loss [M] -> loss [M] and the gradients of hidden and weight."""
    _count("linear", hidden, weight, labels, grad_loss, ignore_index)
    return _compiled_linear(hidden, weight, labels, grad_loss, ignore_index)
