from __future__ import annotations

import random

import pytest

from tilegym_db.records.expressions import evaluate_bool, repaired

AXES = {"M": 77, "N": 131, "D": 13}


def repair(*constraints: str, seed: int = 0) -> dict[str, int]:
    return repaired(constraints, AXES, {"E": 48}, {"T": "bfloat16"}, random.Random(seed))


@pytest.mark.parametrize(
    ("constraint", "changed"),
    [
        ("N % 8 == 0", {"N": 128}),
        ("2 * N % 16 == 0", {"N": 128}),
        ("N * sizeof(T) % 16 == 0", {"N": 128}),
        ("D % 64 == 0", {"D": 64}),  # up where there is none below
        ("N % M == 0", {"N": 77}),
        ("N <= 100", {"N": 100}),
        ("N < 100", {"N": 99}),
        ("N >= 200", {"N": 200}),
        ("N > 200", {"N": 201}),
        ("200 < N", {"N": 201}),
        ("N <= M", {"N": 77}),
        ("N == M", {"N": 77}),
        ("E <= D", {"D": 48}),  # a const axis stays
        ("M == 1 and N == 2", {"M": 1, "N": 2}),
        ("100 <= M <= N", {"M": 100}),
        ("N % 8 == 3", {}),  # not of a known form
        ("N != 131", {}),
        ("Q == 3", {}),
        ("M <= 100", {}),  # holds already
    ],
)
def test_the_axis_that_breaks_a_constraint_is_moved(constraint, changed):
    assert repair(constraint) == {**AXES, **changed}


def test_each_alternative_is_chosen_now_and_then():
    assert {repair("D == 1 or D == M", seed=seed)["D"] for seed in range(20)} == {1, 77}


def test_constraint_that_breaks_another_is_met_together_with_it():
    constraints = ("N % 2 == 0", "N <= D")
    sizes = repair(*constraints)
    assert all(evaluate_bool(text, sizes) for text in constraints)
