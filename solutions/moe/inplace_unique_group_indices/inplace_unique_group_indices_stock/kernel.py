"""The first of equal ids of each row, in eager PyTorch: by a stable sort."""

import torch


def run(ids: torch.Tensor) -> tuple[()]:
    """ids [M, K], overwritten: repeated ids of a row become -1. There is nothing else to return."""
    values, order = torch.sort(ids, dim=1, stable=True)
    again = torch.zeros_like(ids, dtype=torch.bool)
    again[:, 1:] = values[:, 1:] == values[:, :-1]
    repeated = torch.zeros_like(again).scatter_(1, order, again)
    ids.masked_fill_(repeated, -1)
    return ()
