"""A case that stock code fails as well is dropped with a note; nothing else is excused by it.

PyTorch's own linear layer in bfloat16 gives NaN for a row of -inf on some CPUs at some sizes. Here stock code always does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tilegym_db.catalog import SolutionFiles
from tilegym_db.records import Definition, Workload
from tilegym_db.verification.expected import ExpectedCache, WorkloadContents
from tilegym_db.verification.session import BaselineCheck, Verification, VerifiedWorkload
from tilegym_db.verification.verifier import Failure
from tilegym_db.verification.worker_handle import PROMOTION, WorkerHandle

SCALED: dict[str, Any] = {
    "name": "scaled",
    "version": "1.0.0",
    "op_type": "elementwise",
    "dtypes": {"T": ["float32"]},
    "axes": {"M": {"type": "var"}, "N": {"type": "var"}},
    "inputs": {"x": {"shape": ["M", "N"], "dtype": "T"}, "weight": {"shape": ["N"], "dtype": "T"}},
    "outputs": {"out": {"shape": ["M", "N"], "dtype": "T"}},
    "constraints": ["N >= 1"],
    "special_values": ["inf"],
    "cost": {"flops": "M * N", "bytes": "(2 * M * N + N) * sizeof(T)"},
    "reference": "# Source: https://example.org/scaled.py#L1\ndef run(x, weight):\n    return x * weight * 0.3\n",
}
WORKLOAD = {"definition": "scaled", "axes": {"M": 16, "N": 33}, "dtypes": {"T": "float32"}, "tags": ["cpu"]}
POLICY = replace(PROMOTION, fuzz_cases=12, calls=2, audited=False, fuzz_rows=64)
RIGHT = "import torch\ndef run(x, weight, out):\n    out.copy_(x * weight * 0.3)\n"
NAN_AT_INFINITY = RIGHT + "    out[(x == -torch.inf).all(-1) & torch.tensor(x.shape[1] > 1)] = torch.nan\n"
WORSE_AT_INFINITY = RIGHT + "    if (x == -torch.inf).all(-1).any() and x.shape[1] > 1:\n        out.fill_(torch.nan)\n"
WRONG_ELSEWHERE = NAN_AT_INFINITY + "    out[:, -1:] += 1\n"
SEED = 20_261_122


@pytest.fixture
def make(tmp_path: Path, write_solution: Callable[..., SolutionFiles]) -> Iterator[Any]:
    """Return a verification of a source, in a separate worker."""
    with ExitStack() as stack:

        def verification(name: str, source: str, **spec: Any) -> Verification:
            solution = write_solution(tmp_path / "solutions" / name, "scaled", source, **spec)
            definition = Definition.from_dict(SCALED)
            handle = WorkerHandle(definition, solution, "cpu", tmp_path / "workers", policy=POLICY)
            stack.callback(handle.close)
            return Verification(handle)

        yield verification


def verified(subject: Verification) -> VerifiedWorkload | Failure:
    definition, workload = subject.handle.definition, Workload.from_dict(WORKLOAD)
    cache = ExpectedCache(definition, "cpu")
    contents = WorkloadContents.draw(definition, workload, SEED, cache, in_turn=True)
    return subject.verify(contents, [workload], SEED, cache)


@pytest.mark.turn("tilegym_db/verification/session.py")  # a whole bench run
def test_case_that_stock_code_fails_too_is_dropped_with_a_note(make: Any) -> None:
    stock = make("scaled_stock", NAN_AT_INFINITY, role="baseline", provides="stock")
    subject = make("scaled_same", NAN_AT_INFINITY)
    alone = verified(subject)
    assert isinstance(alone, Failure)
    assert alone.gate == "nan_inf_mask"

    baseline_check = BaselineCheck(lambda: stock)
    subject.baseline_check, subject.fuzz_outcomes = baseline_check, {}
    outcome = verified(subject)
    assert isinstance(outcome, VerifiedWorkload), outcome
    noted = [note for note in outcome.fuzz.dropped if note.endswith("stock code fails it as well")]
    assert noted
    assert all("planted_special_values" in note or "padded" in note for note in noted)
    assert not set(outcome.fuzz.passed) & {note.partition(": ")[0] for note in noted}

    other = make("scaled_other", WRONG_ELSEWHERE)
    other.baseline_check = baseline_check
    refused = verified(other)
    assert isinstance(refused, Failure)
    assert not refused.excused
    baseline_check.close()


def test_what_is_worse_than_stock_code_at_its_cases_is_refused(make: Any) -> None:
    stock = make("scaled_stock", NAN_AT_INFINITY, role="baseline", provides="stock")
    subject = make("scaled_worse", WORSE_AT_INFINITY)
    subject.baseline_check = BaselineCheck(lambda: stock)
    outcome = verified(subject)
    subject.baseline_check.close()
    assert isinstance(outcome, Failure)
    assert outcome.gate == "nan_inf_mask"
    assert not outcome.excused


def test_without_stock_code_nothing_is_excused(make: Any) -> None:
    subject = make("scaled_same", NAN_AT_INFINITY)
    subject.baseline_check = BaselineCheck(lambda: None)
    outcome = verified(subject)
    assert isinstance(outcome, Failure)
    assert outcome.gate == "nan_inf_mask"


def test_result_of_stock_code_on_other_contents_is_not_reused(make: Any) -> None:
    """A first seed at which it fails, and another of the same shape and kind of contents at which it does not."""
    wrong_once = "def run(x, weight, out):\n    out.copy_(x * weight * (0.3 if x.sum() > 0 else 3.0))\n"
    stock = make("scaled_stock", wrong_once, role="baseline", provides="stock")
    cache = ExpectedCache(Definition.from_dict(SCALED), "cpu")
    case = WorkloadContents.draw(stock.handle.definition, Workload.from_dict(WORKLOAD), SEED, cache).sets[0].case
    drawn = [cache.get(replace(case, seed=seed)) for seed in range(12)]
    baseline_check = BaselineCheck(lambda: stock)
    said = {baseline_check.fails(expected): expected for expected in drawn if expected is not None}
    assert set(said) == {True, False}
    assert str(said[True].case) == str(said[False].case)
    baseline_check.close()


def test_stock_code_gives_its_result_even_if_it_is_wrong(make: Any) -> None:
    stock = make("scaled_stock", RIGHT.replace("0.3", "3.0"), role="baseline", provides="stock")
    cache = ExpectedCache(Definition.from_dict(SCALED), "cpu")
    expected = WorkloadContents.draw(stock.handle.definition, Workload.from_dict(WORKLOAD), SEED, cache).sets[0]
    baseline_check = BaselineCheck(lambda: stock)
    given = baseline_check.outputs(expected)
    assert given is not None
    assert torch.allclose(given["out"].double(), expected.outputs["out"] * 10, rtol=1e-5)
    assert baseline_check.fails(expected)
    baseline_check.close()
    assert BaselineCheck(lambda: None).outputs(expected) is None


@pytest.mark.turn("tilegym_db/verification/")  # a promotion; one case is dropped daily
def test_contents_in_turn_that_stock_code_fails_are_replaced(make: Any) -> None:
    definition, workload = Definition.from_dict(SCALED), Workload.from_dict(WORKLOAD)
    contents = WorkloadContents.draw(definition, workload, SEED, ExpectedCache(definition, "cpu"), in_turn=True)
    assert contents.other is not None
    there = float(contents.other.inputs["x"].double().sum())
    wrong_there = f"{RIGHT}    out += x.double().sum() == {there!r}\n"
    subject = make("scaled_same", wrong_there)
    alone = verified(subject)
    assert isinstance(alone, Failure)
    assert alone.case == contents.other.case

    for name, source, excused in (("scaled_right", RIGHT, False), ("scaled_stock", wrong_there, True)):
        stock = make(name, source, role="baseline", provides="stock")
        subject.baseline_check = BaselineCheck(lambda stock=stock: stock)
        outcome = verified(subject)
        assert isinstance(outcome, VerifiedWorkload) == excused, outcome
        if isinstance(outcome, VerifiedWorkload):
            assert outcome.is_other_excused
            ((_, fuzz),) = subject.fuzz_outcomes.items()
            assert [*{*outcome.fuzz.dropped} - {*fuzz.dropped}] == [f"{alone.case}: stock code fails it as well"]
        subject.baseline_check.close()
