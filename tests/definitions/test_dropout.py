"""Dropout: the numbers of Philox, the share that is kept, and one mask for a tensor and its gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilegym_db.backends.load import load_entry
from tilegym_db.catalog import Catalog
from tilegym_db.verification.oracle import load_function

ZERO_KEY = (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
"""The first block of Philox 4x32-10 with key and counter zero, as its authors publish it (Random123, kat_vectors)."""
STATE = torch.tensor([1234567890123, 7])


def functions(catalog: Catalog, name: str) -> list[Any]:
    return [load_function(catalog.definition(name).reference, name), load_entry(catalog.solution(f"{name}_stock"))]


@pytest.mark.parametrize("which", range(4))
def test_the_mask_follows_from_the_published_numbers(which: int, catalog: Catalog) -> None:
    for run in functions(catalog, "dropout"):
        for apart, kept in ((-1e-9, True), (1e-9, False)):
            p = ZERO_KEY[which] / 2**32 + apart
            out = run(torch.ones(4, dtype=torch.double), torch.tensor([0, 0]), p)
            assert bool(out[which] != 0) is kept


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
def test_the_share_of_kept_elements_is_within_four_sigma(p: float, catalog: Catalog) -> None:
    count = 100_000
    for run in functions(catalog, "dropout"):
        kept = int((run(torch.ones(count), STATE, p) != 0).sum())
        assert abs(kept - count * (1 - p)) <= 4 * (count * p * (1 - p)) ** 0.5


def test_another_seed_or_offset_draws_another_mask(catalog: Catalog) -> None:
    for run in functions(catalog, "dropout"):
        masks = {tuple((run(torch.ones(64), STATE + step, 0.5) != 0).tolist()) for step in torch.eye(2).long()}
        masks.add(tuple((run(torch.ones(64), STATE, 0.5) != 0).tolist()))
        assert len(masks) == 3


def test_the_gradient_of_dropout_has_its_mask(catalog: Catalog) -> None:
    forward, backward = functions(catalog, "dropout"), functions(catalog, "dropout_backward")
    x, grad = torch.randn(1001, requires_grad=True), torch.randn(1001)
    for run, run_backward in zip(forward, backward, strict=True):
        (want,) = torch.autograd.grad(run(x, STATE, 0.3), x, grad)
        torch.testing.assert_close(run_backward(grad, STATE, 0.3), want)
