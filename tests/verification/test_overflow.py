"""Contents near the end of a dtype's range prove something only where no order of the operations leaves it."""

from __future__ import annotations

import pytest
import torch

from tilegym_db.catalog import Catalog
from tilegym_db.records.call import Call
from tilegym_db.records.workload import Case
from tilegym_db.verification.expected import make_oracle_case

DEFINITION = Catalog.default().definition("mhc_expand_backward")
SEEDS = range(12)


@pytest.mark.parametrize(("streams", "proves"), [(4, True), (7, False)])
def test_sum_that_overflows_in_another_order_proves_nothing(streams: int, proves: bool) -> None:
    """Four terms of a quarter of the largest number cannot overflow; of seven, those of one sign that come first may."""
    axes = DEFINITION.bind_axes({"M": 2, "C": streams, "H": 512})
    cases = [
        Case(Call(DEFINITION.name, axes, {"T": "bfloat16"}), distribution="max_quarter", seed=seed) for seed in SEEDS
    ]
    assert any(make_oracle_case(DEFINITION, case, "cpu") is not None for case in cases) is proves


def test_terms_of_any_sign_are_tried_where_they_are_small() -> None:
    axes = DEFINITION.bind_axes({"M": 2, "C": 7, "H": 512})
    expected = make_oracle_case(
        DEFINITION, Case(Call(DEFINITION.name, axes, {"T": "bfloat16"}), distribution="row_scale", seed=1), "cpu"
    )
    assert expected is not None
    assert torch.isfinite(expected.outputs["grad_x"]).all()


def test_one_element_that_may_overflow_is_enough() -> None:
    """Beside others that do overflow: whether the reference's own order keeps them all right is no matter."""
    quarter = torch.finfo(torch.bfloat16).max / 4
    never_above_a_quarter, above_the_largest = torch.tensor([1, -1, 1, -1, 1, -1, 1]), torch.ones(7)
    grad_out = torch.stack((never_above_a_quarter, above_the_largest)).to(torch.bfloat16)[:, :, None] * quarter
    case = Case(
        Call(DEFINITION.name, DEFINITION.bind_axes({"M": 2, "C": 7, "H": 1}), {"T": "bfloat16"}),
        distribution="max_quarter",
    )
    assert make_oracle_case(DEFINITION, case, "cpu", inputs={"grad_out": grad_out}) is None
    case = Case(
        Call(DEFINITION.name, DEFINITION.bind_axes({"M": 1, "C": 4, "H": 1}), {"T": "bfloat16"}),
        distribution="max_quarter",
    )
    assert make_oracle_case(DEFINITION, case, "cpu", inputs={"grad_out": grad_out[:1, :4]}) is not None


@pytest.mark.parametrize(("signs", "proves"), [((1,) * 8, True), ((1, 1, 1, 1, 1, -1, -1, -1), False)])
def test_infinite_sum_proves_something_if_no_part_cancels(signs: tuple[int, ...], proves: bool) -> None:
    """In another order, the sum of the negative terms is another infinity, and the result is not a number."""
    grad_out = (torch.tensor(signs) * torch.finfo(torch.bfloat16).max).to(torch.bfloat16)[None, :, None]
    case = Case(
        Call(DEFINITION.name, DEFINITION.bind_axes({"M": 1, "C": 8, "H": 1}), {"T": "bfloat16"}),
        distribution="max_quarter",
    )
    assert (make_oracle_case(DEFINITION, case, "cpu", inputs={"grad_out": grad_out}) is not None) is proves
