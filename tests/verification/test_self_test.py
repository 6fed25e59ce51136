"""A Definition whose verifier cannot tell right from wrong must be found out."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tilegym_db.records import Definition, Workload
from tilegym_db.verification.self_test import self_test, tiny_workloads


@pytest.fixture
def findings(workload_record) -> Callable[..., list[str]]:
    """The findings on a Definition at 16 x 128."""

    def find(definition: Definition, dtype: str = "bfloat16") -> list[str]:
        workload = Workload.from_dict(workload_record(axes={"M": 16, "N": 128}, dtypes={"T": dtype}))
        return [str(finding) for finding in self_test(definition, [workload])]

    return find


@pytest.fixture
def changed_test(operator) -> Callable[..., Definition]:
    """The operator with parts of its self-test replaced."""

    def change(**changes: object) -> Definition:
        content = operator().model_dump(mode="json", exclude_unset=True)
        return Definition.from_dict({**content, "self_test": {**content["self_test"], **changes}})

    return change


def planted(find: str, replace: str) -> dict[str, str]:
    return {"find": find, "replace": replace, "why": "the planted one"}


def test_a_sound_definition_has_no_findings(operator, findings):
    assert findings(operator()) == []


def test_a_definition_without_a_self_test_is_a_finding(operator, findings):
    assert findings(operator(self_test=None)) == [
        "row_scale: self_test: the record has none; add an independent formulation and planted errors"
    ]


def test_a_definition_without_a_tiny_workload_is_a_finding(operator):
    assert "no workload tagged 'tiny'" in str(self_test(operator(), [])[0])


def test_a_planted_error_that_makes_no_difference_is_a_finding(changed_test, findings):
    harmless = planted("* factor", "* factor * 1.0001")  # less than one rounding of bfloat16
    errors = changed_test().self_test.model_dump()["planted_errors"]
    found = findings(changed_test(planted_errors=[*errors, harmless]))
    assert [text.split(": is accepted")[0] for text in found] == ["row_scale: planted error (the planted one)"]


def test_planted_error_shown_by_other_contents_is_no_finding(changed_test, findings):
    cut = planted("x.float()", "x.float().clamp(-60, 60)")  # nothing of a normal draw is that large
    assert findings(changed_test(planted_errors=[*changed_test().self_test.model_dump()["planted_errors"], cut])) == []


def test_planted_error_must_change_something_in_some_dtype(changed_test, workload_record):
    rounded = planted("x.float()", "x.bfloat16().float()")
    definition = changed_test(planted_errors=[*changed_test().self_test.model_dump()["planted_errors"], rounded])
    half, single = (
        Workload.from_dict(workload_record(axes={"M": 16, "N": 128}, dtypes={"T": dtype}))
        for dtype in ("bfloat16", "float32")
    )
    assert self_test(definition, [half, single]) == []
    (finding,) = self_test(definition, [half])
    assert all(fact in str(finding) for fact in ("row_scale", "(the planted one)", "accepted", "M=16,"))


def test_a_planted_error_that_raises_is_a_finding(changed_test, findings):
    errors = [planted("x.float()", "unknown"), planted("* factor", "/ factor"), planted("* factor", "- factor")]
    found = findings(changed_test(planted_errors=errors))
    assert len(found) == 1
    assert "NameError: name 'unknown' is not defined" in found[0]


def test_an_independent_formulation_that_disagrees_is_a_finding(changed_test, findings):
    other = "def run(x, weight, factor):\n    return (x.float() * weight.float()).to(x.dtype)\n"
    found = findings(changed_test(independent=other))
    assert "row_scale: independent formulation: disagrees in the dtype itself" in found[0]
    assert "(fp64)" in found[1]


def test_disagreement_below_output_precision_is_found_in_fp64(changed_test, findings):
    other = "def run(x, weight, factor):\n    return (x.float() * weight.float() * (factor + 1e-4)).to(x.dtype)\n"
    found = findings(changed_test(independent=other))
    assert len(found) == 1
    assert "independent formulation: out: relative Frobenius error 0.0002" in found[0]


def test_reference_that_loses_its_own_precision_is_a_finding(operator, findings):
    in_half = operator("return (x.half().float() * weight.float() * factor).to(x.dtype)")
    assert "reference: in its own dtype it fails its own comparison" in findings(in_half, "float32")[0]


def test_reference_with_undeclared_shape_or_dtype_is_a_finding(operator, findings):
    body = "return (x.float() * weight.float() * factor)[:1].to(x.dtype)"
    assert "'out' has shape (1, 128)" in findings(operator(body))[0]
    body = "return x.float() * weight.float() * factor"
    assert "dtype torch.float32" in findings(operator(body))[0]


def test_an_operator_that_returns_its_input_cannot_be_verified(operator, findings):
    found = findings(operator("return x * (weight.float() * factor / weight.float() / factor).to(x.dtype)"))
    assert any("the input, copied as out: is accepted" in text for text in found)


def test_a_tolerance_that_accepts_a_coarser_format_is_a_finding(operator, findings):
    loose = {"bfloat16": {"tau": 0.5, "rtol": 0.5, "a": 0.5, "reason": "far too loose, for a test"}}
    found = findings(operator(tolerance=loose))
    assert any("a lower-precision result as out: is accepted" in text for text in found)
    assert not any("zeros" in text for text in found)


def test_second_output_does_not_hide_an_error_of_the_first(operator, findings):
    row = {"shape": ["M", "N"], "dtype": "T"}
    body = "out = (x.float() * weight.float() * factor).to(x.dtype); return out, (x * 0).to(x.dtype)"
    definition = operator(body, outputs={"out": row, "nothing": row})
    found = findings(definition.model_copy(update={"self_test": None}))
    assert len(found) == 1
    independent = f"def run(x, weight, factor):\n    {body.replace('(x * 0)', '(x - x)')}\n"
    test = definition.self_test.model_copy(update={"independent": independent})
    found = findings(definition.model_copy(update={"self_test": test}))
    assert {text.split(": is accepted")[0] for text in found} == {
        "row_scale: zeros as nothing",
        "row_scale: one dropped row as nothing",
        "row_scale: a lower-precision result as nothing",
    }


def test_the_largest_tiny_workload_of_each_dtype_is_tested(operator, workload_record):
    made = [
        Workload.from_dict(workload_record(axes={"M": rows, "N": 8}, dtypes={"T": dtype}, tags=tags))
        for rows, dtype, tags in (
            (2, "float32", ["tiny"]),
            (9, "float32", ["tiny"]),
            (4, "bfloat16", ["tiny"]),
            (99, "bfloat16", ["cpu"]),
        )
    ]
    assert tiny_workloads(operator(), made) == [made[1], made[2]]


TOPK = {
    "outputs": {"index": {"shape": ["M", "4"], "dtype": "int64"}},
    "gathers": {"index": "x"},
    "special_values": ["inf"],
    "self_test": {
        "independent": "import torch\ndef run(x, weight, factor):\n"
        "    return torch.topk(x.float().flip(-1), 4, dim=-1).indices.neg() + x.shape[-1] - 1\n",
        "planted_errors": [
            {"find": "descending=True", "replace": "descending=False", "why": "the smallest scores"},
            {"find": "[:, :4]", "replace": "[:, 1:5]", "why": "one rank too low"},
            {"find": "dim=-1", "replace": "dim=0", "why": "the order of the columns"},
        ],
    },
}
BEST = "return x.float().sort(dim=-1, descending=True, stable=True).indices[:, :4].contiguous()"


def test_index_outputs_are_tested_by_the_values_they_gather(operator, findings):
    assert findings(operator(BEST, **TOPK)) == []


def test_planted_error_among_free_ties_is_a_finding(operator, findings):
    errors = [*TOPK["self_test"]["planted_errors"], planted(".sort(dim=-1,", ".flip(-1).flip(-1).sort(dim=-1,")]
    changed = {**TOPK, "self_test": {**TOPK["self_test"], "planted_errors": errors}}
    found = findings(operator(BEST, **changed))
    assert [text.split(": is accepted")[0] for text in found] == ["row_scale: planted error (the planted one)"]
