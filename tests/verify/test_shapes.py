from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tilegym_db.records import Definition, Solution
from tilegym_db.verify.shapes import MAX_ELEMENTS, fuzz_axes

ANCHORS = ({"M": 1000, "N": 4096},)


def solution(*constraints: str) -> Solution:
    spec = {"language": "python", "entry_point": "kernel.py::run", "constraints": list(constraints)}
    return Solution.from_dict(
        {"name": "any", "definition": "row_scale", "author": "tests", "spec": spec, "sources": [{"path": "kernel.py"}]}
    )


def fuzz(definition: Definition, *constraints: str, count: int = 8, seed: int = 1) -> list[dict[str, int]]:
    return fuzz_axes(definition, solution(*constraints), ANCHORS, {"T": "float32"}, count, seed)


def test_the_same_seed_gives_the_same_sizes_and_another_seed_others(operator):
    assert fuzz(operator(), seed=1) == fuzz(operator(), seed=1) != fuzz(operator(), seed=2)


def test_sizes_are_distinct_and_some_come_from_a_real_workload(operator):
    sizes = fuzz(operator(), count=16)
    assert len({(axes["M"], axes["N"]) for axes in sizes}) == 16
    assert any(axes["M"] == 1000 or axes["N"] == 4096 for axes in sizes)
    assert any(axes["M"] != 1000 and axes["N"] != 4096 for axes in sizes)


@pytest.mark.parametrize(
    "constraints",
    [("N % 8 == 0",), ("N % 2 == 0", "M >= 3"), ("M == N",), ("N == 64 or N == 128",), ("N >= 100",)],
    ids=" and ".join,
)
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**62), own=st.sampled_from(("N <= 128", "M > 1")))
def test_every_constraint_of_the_definition_and_of_the_solution_holds(constraints, seed, own, operator):
    sizes = fuzz(operator(constraints=constraints), own, seed=seed, count=4)
    assert len(sizes) == 4
    for axes in sizes:
        assert all(eval(text, {}, dict(axes)) for text in (*constraints, own))
        assert axes["M"] * axes["N"] <= MAX_ELEMENTS


def test_few_sizes_are_found_where_the_constraints_leave_few(operator):
    assert fuzz(operator(), "M == 3", "N == 5") == [{"M": 3, "N": 5}]
    assert fuzz(operator(), "M == 12345", "N == 54321") == []


def test_an_operator_without_free_axes_has_one_size(operator):
    fixed = {"M": {"type": "const", "value": 4}, "N": {"type": "const", "value": 8}}
    assert fuzz(operator(axes=fixed)) == [{}]


def test_a_shape_that_is_no_whole_number_is_left_out(operator):
    halves = {"x": {"shape": ["M", "N / 2"], "dtype": "T"}}
    definition = operator("return x", inputs=halves, outputs={"out": halves["x"]}, self_test=None, cost=None)
    assert {axes["N"] % 2 for axes in fuzz(definition)} == {0}
