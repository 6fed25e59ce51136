"""Products of float32 in TF32: honest ones pass every case, and operands of fewer bits do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from raising import raises

from tilegym_db.catalog import Catalog
from tilegym_db.errors import RecordError
from tilegym_db.records import Solution
from tilegym_db.records.expressions import has_product
from tilegym_db.verification.cases import fuzz_cases
from tilegym_db.verification.expected import make_oracle_case
from tilegym_db.verification.verifier import Failure, judge

CATALOG = Catalog.default()
GEMM = CATALOG.definition("gemm")
ANCHORS = [GEMM.bind_axes(workload.axes) for workload in CATALOG.workloads_for("gemm")]


def solution(definition: str, math: str = "tf32") -> Solution:
    spec = {"language": "python", "entry_point": "kernel.py::run", "math": math}
    sources = [{"path": "kernel.py"}]
    return Solution.from_dict(
        {"name": "x", "definition": definition, "author": "tests", "spec": spec, "sources": sources}
    )


def bits(value: torch.Tensor, added: int) -> torch.Tensor:
    """Keep ten bits of the mantissa, after a number was added to it."""
    return torch.where(value.isfinite(), ((value.view(torch.int32) + added) & ~0x1FFF).view(torch.float32), value)


def to_nearest_even(value: torch.Tensor) -> torch.Tensor:
    return bits(value, 0xFFF + ((value.view(torch.int32) >> 13) & 1))


def refusals(operand: Callable[[torch.Tensor], torch.Tensor], math: str, seed: int) -> list[str]:
    """Return the refusals in the cases of one verification."""
    record, found = solution("gemm", math), []
    for case in fuzz_cases(GEMM, record, ANCHORS, {"T": "float32"}, {}, count=24, seed=seed):
        expected = make_oracle_case(GEMM, case, "cpu")
        if expected is not None:
            out = operand(expected.inputs["a"].contiguous()) @ operand(expected.inputs["b"].contiguous()).T
            outcome = judge(GEMM, record, expected, {"out": out})
            found += [outcome.reason] if isinstance(outcome, Failure) else []
    return found


@pytest.mark.sweep(3)
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(
    "operand",
    [
        pytest.param(to_nearest_even, id="rounded to nearest even"),
        pytest.param(lambda value: bits(value, 0x1000), id="rounded away from zero"),
        pytest.param(lambda value: bits(value, 0), id="cut off"),
    ],
)
def test_correct_product_in_tf32_passes_all_cases(operand: Callable[[torch.Tensor], torch.Tensor], seed: int) -> None:
    assert refusals(operand, "tf32", seed) == []
    assert refusals(operand, "ieee", seed) != []


@pytest.mark.sweep(2)
@pytest.mark.parametrize("seed", [1, 2])
def test_operands_in_bfloat16_are_no_declared_tf32(seed: int) -> None:
    assert len(refusals(lambda value: value.bfloat16().float(), "tf32", seed)) > 3


@pytest.mark.parametrize("name", ["rms_norm", "softmax", "swiglu"])
def test_tf32_is_declared_only_for_products_of_float32(name: str) -> None:
    with raises(RecordError, "math_unfit", name):
        solution(name).check_against(CATALOG.definition(name))
    solution("gemm").check_against(GEMM)


@pytest.mark.parametrize(
    ("text", "has"),
    [
        ("a @ b", True),
        ("a @= b", True),
        ("torch.nn.functional.linear(a, b)", True),
        ("einsum('mk,nk->mn', a, b)", True),
        ("a * b", False),
        ("a.outer(b).sum()", False),
    ],
)
def test_products_are_found_in_the_reference(text: str, has: bool) -> None:
    assert has_product(f"def run(a, b):\n    {text}\n") is has
