"""Contents near the end of a dtype's range prove something only where no order of the operations leaves it."""

from __future__ import annotations

import pytest
import torch

from tilegym_db.catalog import Catalog
from tilegym_db.verify.expected import expect
from tilegym_db.verify.inputs import Case

DEFINITION = Catalog.default().definition("mhc_expand_backward")
SEEDS = range(12)


@pytest.mark.parametrize(("streams", "proves"), [(4, True), (7, False)])
def test_a_sum_that_only_its_own_order_keeps_inside_proves_nothing(streams: int, proves: bool) -> None:
    """Four terms of a quarter of the largest number cannot overflow; of seven, those of one sign that come first may."""
    axes = DEFINITION.bind_axes({"M": 2, "C": streams, "H": 512})
    cases = [Case(axes, {"T": "bfloat16"}, {}, distribution="max_quarter", seed=seed) for seed in SEEDS]
    assert any(expect(DEFINITION, case, "cpu") is not None for case in cases) is proves


def test_terms_of_any_sign_are_tried_where_they_are_small() -> None:
    axes = DEFINITION.bind_axes({"M": 2, "C": 7, "H": 512})
    expected = expect(DEFINITION, Case(axes, {"T": "bfloat16"}, {}, distribution="row_scale", seed=1), "cpu")
    assert expected is not None
    assert torch.isfinite(expected.outputs["grad_x"]).all()
