"""Oracles of several contents that are evaluated together, for references that loop."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tilegym_db.catalog import Catalog
from tilegym_db.records import Workload
from tilegym_db.records.workload import Case
from tilegym_db.verification import conditioning, expected, oracle
from tilegym_db.verification.conditioning import Uncertainties
from tilegym_db.verification.expected import (
    CONTENT_SETS,
    ExpectedCache,
    WorkloadContents,
    make_oracle_case,
    make_oracle_cases,
    stacking_axis,
)

WORKLOAD = Workload.from_dict(
    {
        "definition": "gated_delta_rule_chunk",
        "axes": {"B": 2, "T": 5, "Hk": 1, "Hv": 2, "K": 4, "V": 3},
        "dtypes": {"T": "bfloat16"},
        "inputs": {},
        "tags": ["cpu"],
    }
)


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return Catalog.default(warns=False)


@pytest.fixture
def definition(catalog: Catalog) -> Any:
    return catalog.definition("gated_delta_rule_chunk")


def cases_of(definition: Any, count: int = 4) -> list[Case]:
    return [
        Case.of_workload(definition, WORKLOAD, distribution=CONTENT_SETS[number % 4], seed=number)
        for number in range(count)
    ]


def test_stacked_oracles_are_those_of_single_cases(definition: Any) -> None:
    cases = cases_of(definition)
    assert stacking_axis(definition, cases) == "B"
    together = make_oracle_cases(definition, cases, "cpu")
    for case, found in zip(cases, together, strict=True):
        alone = make_oracle_case(definition, case, "cpu")
        assert found is not None
        assert alone is not None
        assert (found.case, found.exact, found.conditioned) == (alone.case, alone.exact, alone.conditioned)
        for name, value in alone.outputs.items():
            torch.testing.assert_close(found.outputs[name], value, rtol=1e-12, atol=1e-12)
            assert found.e_base[name].rel_fro == pytest.approx(alone.e_base[name].rel_fro, rel=1e-3)
        assert all(torch.equal(found.inputs[name], alone.inputs[name]) for name in definition.tensor_inputs)


def test_moves_of_joined_calls_are_those_of_single_calls(definition: Any, monkeypatch: Any) -> None:
    case = make_oracle_case(definition, cases_of(definition)[0], "cpu")
    assert case is not None
    together = Uncertainties().after(4, definition, case.inputs, case.outputs)
    monkeypatch.setattr(conditioning, "joining_axis", lambda definition: None)
    monkeypatch.setattr(oracle, "joining_axis", lambda definition: None)
    alone = Uncertainties().after(4, definition, case.inputs, case.outputs)
    assert together is not None
    assert alone is not None
    assert together.keys() == alone.keys() != set()
    for name, value in alone.items():
        torch.testing.assert_close(together[name], value, rtol=1e-6, atol=1e-12)


def test_cases_that_differ_in_more_than_contents_are_not_stacked(definition: Any, catalog: Catalog) -> None:
    one, other = cases_of(definition, 2)
    assert stacking_axis(definition, [one]) is None
    longer = replace(other, call=replace(other.call, axes={**other.call.axes, "T": 7}))
    assert stacking_axis(definition, [one, longer]) is None
    plain = catalog.definition("softmax")  # without a loop
    workload = catalog.workloads_for("softmax")[0]
    assert (
        stacking_axis(plain, [Case.of_workload(plain, workload, distribution="normal", seed=n) for n in (1, 2)]) is None
    )


@pytest.mark.turn("tilegym_db/verification/")  # oracles of many cases
def test_cases_without_memory_for_all_are_evaluated_one_by_one(definition: Any, monkeypatch: Any) -> None:
    def none_left(*_: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(expected, "_make_stacked", none_left)
    assert all(make_oracle_cases(definition, cases_of(definition), "cpu"))


def test_an_oracle_without_memory_is_tried_once_more(definition: Any, monkeypatch: Any) -> None:
    case, make = cases_of(definition, 1)[0], expected.make_oracle_case
    failures = [torch.OutOfMemoryError()]

    def short_of_memory(*arguments: Any) -> Any:
        if failures:
            raise failures.pop()
        return make(*arguments)

    monkeypatch.setattr(expected, "make_oracle_case", short_of_memory)
    assert ExpectedCache(definition, "cpu").once(case) is not None
    failures += [torch.OutOfMemoryError()] * 2
    with pytest.raises(torch.OutOfMemoryError):
        ExpectedCache(definition, "cpu").once(case)


def test_outputs_made_again_without_memory_are_tried_once_more(definition: Any, monkeypatch: Any) -> None:
    case, evaluate = make_oracle_case(definition, cases_of(definition, 1)[0], "cpu"), expected.oracle
    assert case is not None
    failures = [torch.OutOfMemoryError()]

    def short_of_memory(*arguments: Any) -> Any:
        if failures:
            raise failures.pop()
        return evaluate(*arguments)

    monkeypatch.setattr(expected, "oracle", short_of_memory)
    again = ExpectedCache(definition, "cpu").outputs_of(case.inputs)
    assert all(torch.equal(again[name], value) for name, value in case.outputs.items())
    failures += [torch.OutOfMemoryError()] * 2
    with pytest.raises(torch.OutOfMemoryError):
        ExpectedCache(definition, "cpu").outputs_of(case.inputs)


@pytest.mark.parametrize("slow", [False, True])
def test_slow_oracles_of_a_workload_are_evaluated_together(definition: Any, monkeypatch: Any, slow: bool) -> None:
    monkeypatch.setattr(expected, "SLOW_ORACLE_S", 0.0 if slow else 60.0)
    together: list[int] = []
    make = expected.make_oracle_cases

    def counted(*arguments: Any) -> Any:
        together.append(len(arguments[1]))
        return make(*arguments)

    monkeypatch.setattr(expected, "make_oracle_cases", counted)
    drawn = WorkloadContents.draw(definition, WORKLOAD, 5, ExpectedCache(definition, "cpu"))
    assert len(drawn.sets) + len(drawn.dropped) >= len(CONTENT_SETS)
    assert len(drawn.fresh(0, 9)) == 9
    assert together[:1] == ([len(CONTENT_SETS) - 1] if slow else [])
    seeds = [case.case.seed for case in drawn.fresh(0, 12)]
    assert len({*seeds}) == 12  # no contents twice


def test_fresh_contents_drawn_ahead_are_used(definition: Any) -> None:
    drawn = WorkloadContents.draw(definition, WORKLOAD, 5, ExpectedCache(definition, "cpu"))
    drawn.draw_ahead(3, lambda: False)
    ahead = [case.case for case in drawn.fresh(0, 3)]
    again = WorkloadContents.draw(definition, WORKLOAD, 5, ExpectedCache(definition, "cpu"))
    again.draw_ahead(3, lambda: True)
    assert [case.case for case in again.fresh(0, 3)] == ahead
