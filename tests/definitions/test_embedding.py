"""Rows of a table and their gradient: the sums of autograd, rows of padding and rows without tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tilegym_db.backends.load import load_entry
from tilegym_db.catalog import Catalog
from tilegym_db.verification.oracle import load_function


def functions(catalog: Catalog, name: str) -> list[Any]:
    """The reference and the stock solution of an operator."""
    return [load_function(catalog.definition(name).reference, name), load_entry(catalog.solution(f"{name}_stock"))]


@pytest.mark.parametrize("padding_idx", [-1, 2])
def test_gradient_of_a_table_is_that_of_autograd(padding_idx: int, catalog: Catalog) -> None:
    torch.manual_seed(0)
    ids, grad = torch.tensor([2, 0, 2, 4, 0, 2, 6]), torch.randn(7, 5)
    table = torch.randn(8, 5, dtype=torch.double, requires_grad=True)
    rows = F.embedding(ids, table, None if padding_idx < 0 else padding_idx)
    (want,) = torch.autograd.grad(rows, table, grad.double())
    for run in functions(catalog, "embedding"):
        (found,) = torch.autograd.grad(run(ids, table, padding_idx), table, grad.double())
        torch.testing.assert_close(found, want)
    for run in functions(catalog, "embedding_backward"):
        found = run(ids, table.detach().float(), grad, padding_idx)
        torch.testing.assert_close(found.double(), want)
        assert (found[[1, 3, 5, 7]] == 0).all()
        assert (found[2] != 0).any() == (padding_idx != 2)


def test_sum_of_many_tokens_is_not_rounded_on_the_way(catalog: Catalog) -> None:
    ids, grad = torch.zeros(4096, dtype=torch.long), torch.ones(4096, 3, dtype=torch.bfloat16)
    run = load_function(catalog.definition("embedding_backward").reference, "embedding_backward")
    found = run(ids, torch.zeros(2, 3, dtype=torch.bfloat16), grad, -1)
    assert found.tolist() == [[4096.0] * 3, [0.0] * 3]  # in bfloat16, 256 + 1 is 256
