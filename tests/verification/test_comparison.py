from __future__ import annotations

from typing import Any

import pytest
import torch

from tilegym_db.records import Definition
from tilegym_db.records.call import Call
from tilegym_db.records.workload import Case
from tilegym_db.verification.comparison import check_outputs, exact_outputs, reference_errors
from tilegym_db.verification.gates import OutputComparison
from tilegym_db.verification.inputs import draw_inputs
from tilegym_db.verification.oracle import as_written, oracle

ROW = {"shape": ["M", "N"], "dtype": "T"}


def verdicts(
    definition: Definition, dtype: str, changed: dict[str, Any], contents: str = "normal"
) -> dict[str, OutputComparison]:
    """The verdict on the reference's own outputs at 32 x 64, some of them changed."""
    case = Case(
        Call(definition.name, {"M": 32, "N": 64}, {"T": dtype}, scalars={"factor": 2.0}), distribution=contents, seed=3
    )
    inputs = draw_inputs(definition, case, "cpu")
    written, truth = as_written(definition, inputs), oracle(definition, inputs)
    e_base, _ = reference_errors(definition, case.call.dtypes, written, truth)
    exact = exact_outputs(written, truth) if case.exact else frozenset()
    outputs = {name: changed.get(name, lambda value: value)(value.clone()) for name, value in written.items()}
    return check_outputs(definition, case.call.dtypes, inputs, truth, outputs, e_base, exact=exact)


def test_each_output_is_judged_by_its_own_dtype(operator):
    body = "y = (x.float() * weight.float() * factor).to(x.dtype); return y, (y > 0)"
    definition = operator(body, outputs={"out": ROW, "mask": {**ROW, "dtype": "bool"}}, self_test=None)
    assert all(verdict.passed for verdict in verdicts(definition, "bfloat16", {}).values())
    found = verdicts(definition, "bfloat16", {"mask": torch.logical_not, "out": lambda value: value * 1.001})
    assert {name: verdict.gate for name, verdict in found.items()} == {"out": None, "mask": "exact"}


def one_step_up(value: torch.Tensor) -> torch.Tensor:
    """One element of bfloat16 moved to the next number, which is within every tolerance."""
    row = int(value[:, 5].abs().argmax())
    value.view(torch.int16)[row, 5] += 1
    return value


@pytest.mark.parametrize(("contents", "gate"), [("normal", None), ("small_integers", "exact")])
def test_unrounded_output_must_be_exact_on_small_integers_only(contents, gate, operator):
    definition = operator("return (x.float() + weight.float()).to(x.dtype)", self_test=None)
    slightly = {"out": one_step_up}
    found = verdicts(definition, "bfloat16", slightly, contents)["out"]
    assert found.gate == gate


def test_an_output_that_rounds_is_not_held_to_exact_values(operator):
    definition = operator("return torch.sigmoid(x.float()).to(x.dtype)", self_test=None)
    slightly = {"out": one_step_up}
    assert verdicts(definition, "bfloat16", slightly, "small_integers")["out"].passed


ARGMAX = "order = x.float().sort(dim=-1, descending=True, stable=True).indices[:, :4]; return order"
INDEX = {"shape": ["M", "4"], "dtype": "int64"}


def test_indices_compare_by_gathered_values_only_if_declared(operator):
    plain = operator(ARGMAX, outputs={"index": INDEX}, self_test=None)
    gathers = operator(ARGMAX, outputs={"index": INDEX}, gathers={"index": "x"}, self_test=None)
    exchange = {"index": lambda index: index.flip(-1)}  # in ties, any order of equal values is as good
    assert verdicts(plain, "float32", exchange, "constant_rows")["index"].gate == "exact"
    assert verdicts(gathers, "float32", exchange, "constant_rows")["index"].passed
    assert verdicts(gathers, "float32", exchange, "normal")["index"].gate == "exact"


def test_indices_into_another_output_use_the_oracles_values(operator):
    body = "s = torch.sigmoid(x.float() * 1e-9); return s.to(x.dtype), s.argmax(dim=-1, keepdim=True)"
    index = {"shape": ["M", "1"], "dtype": "int64"}
    definition = operator(body, outputs={"s": ROW, "index": index}, gathers={"index": "s"}, self_test=None)
    # The scores differ in fp64 only, which float32 cannot tell; so any index is right, but none outside the row.
    assert verdicts(definition, "float32", {"index": lambda value: (value + 1) % 64})["index"].passed
    assert not verdicts(definition, "float32", {"index": lambda value: value + 64})["index"].passed
