from __future__ import annotations

import math

import pytest
import torch

from tilegym_db.records.definition import LIMITS
from tilegym_db.verification.comparison import check_gathered

SCORES = torch.tensor([[5.0, 9.0, 5.0, 1.0, 9.0, 0.0], [1.0, 1.0, 1.0, 1.0, 1.0, 2.0]])
CHOSEN = torch.tensor([[1, 4, 0], [5, 0, 1]])


@pytest.mark.parametrize("chosen", [[[1, 4, 0], [5, 0, 1]], [[4, 1, 2], [5, 3, 2]]])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_any_choice_among_equal_values_passes(chosen, dtype):
    assert check_gathered("index", torch.tensor(chosen, dtype=dtype), CHOSEN, SCORES).passed


@pytest.mark.parametrize(
    ("wrong", "index", "message"),
    [
        ([[1, 4, 3], [5, 0, 1]], (0, 2), "another value"),
        ([[0, 1, 4], [5, 0, 1]], (0, 0), "another value"),  # the right ones in the wrong order
        ([[1, 1, 0], [5, 0, 1]], (0, 1), "twice in their row"),
        ([[1, 4, 0], [5, 0, 6]], (1, 2), "outside the row"),
        ([[1, 4, -2], [5, 0, 1]], (0, 2), "outside the row"),
    ],
)
def test_a_wrong_choice_is_named(wrong, index, message):
    verdict = check_gathered("index", torch.tensor(wrong), CHOSEN, SCORES)
    assert (verdict.gate, verdict.index) == ("exact", index)
    assert message in verdict.reason
    assert verdict.worst_row == index[0]


def test_no_choice_stays_no_choice():
    chosen = torch.tensor([[1, -1, -1]])
    scores = SCORES[:1]
    assert check_gathered("index", chosen.clone(), chosen, scores).passed
    assert not check_gathered("index", torch.tensor([[1, 4, -1]]), chosen, scores).passed
    assert not check_gathered("index", torch.tensor([[-1, -1, -1]]), chosen, scores).passed


def test_nan_is_as_good_as_nan_and_minus_infinity_as_itself():
    scores = torch.tensor([[math.nan, math.nan, -math.inf, -math.inf, 1.0]])
    want = torch.tensor([[0, 4, 2]])
    assert check_gathered("index", torch.tensor([[1, 4, 3]]), want, scores).passed
    assert not check_gathered("index", torch.tensor([[4, 1, 3]]), want, scores).passed


def test_indistinguishable_values_of_a_computed_source_may_swap():
    source = torch.tensor([[1.0, 1.0 + 1e-6, 0.5]], dtype=torch.float64)
    want, swapped = torch.tensor([[1, 0]]), torch.tensor([[0, 1]])
    assert check_gathered("index", swapped, want, source, LIMITS["float32"]).passed
    assert not check_gathered("index", swapped, want, source).passed
    assert not check_gathered("index", torch.tensor([[1, 2]]), want, source, LIMITS["float32"]).passed


def test_no_rows_pass():
    assert check_gathered("index", CHOSEN[:0], CHOSEN[:0], SCORES[:0]).passed
