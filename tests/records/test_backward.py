"""How a Definition of gradients belongs to the one that it names."""

from __future__ import annotations

from typing import Any

import pytest
from raising import raises

from tilegym_db.errors import RecordError
from tilegym_db.records import Definition
from tilegym_db.records.call import Call, backward_call, backward_problem, differentiated

ROWS = {"shape": ["M", "N"], "dtype": "T"}
COLUMNS = {"shape": ["N"], "dtype": "T"}
NUMBER = {"shape": None, "dtype": "float32"}


@pytest.fixture
def forward(definition_record: Any) -> Definition:
    return Definition.from_dict(definition_record())


@pytest.fixture
def backward(definition_record: Any) -> Any:
    """Make the backward of row_scale, with changes."""

    def make(**changes: Any) -> Definition:
        arguments = list(changes.get("inputs", {"weight": 0, "grad_out": 0, "factor": 0}))
        record = definition_record(
            name="row_scale_backward",
            backward_of="row_scale",
            inputs={"weight": COLUMNS, "grad_out": ROWS, "factor": NUMBER},
            outputs={"grad_x": ROWS},
            reference=f"# Source: https://example.org\ndef run({', '.join(arguments)}):\n    return grad_out\n",
        )
        return Definition.from_dict({**record, **changes})

    return make


def test_a_backward_names_the_inputs_that_it_differentiates(forward: Definition, backward: Any) -> None:
    assert backward_problem(forward, backward()) == ""
    assert differentiated(backward()) == ("x",)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"inputs": {"other": ROWS, "grad_out": ROWS}}, "inputs.other belongs to no tensor of row_scale"),
        ({"inputs": {"x": COLUMNS, "grad_out": ROWS}}, "inputs.x differs in shape or dtype"),
        ({"inputs": {"x": ROWS, "grad_x": ROWS}, "outputs": {"grad_weight": COLUMNS}}, "inputs.grad_x belongs to no"),
        ({"outputs": {"grad_other": ROWS}}, "outputs.grad_other belongs to no tensor"),
        ({"outputs": {"grad_weight": ROWS}}, "outputs.grad_weight differs"),
        ({"dtypes": {"T": ["float16"]}}, "its dtypes of 'T' are not among those of row_scale"),
    ],
)
def test_a_backward_that_does_not_fit_says_where(
    forward: Definition, backward: Any, changes: dict[str, Any], problem: str
) -> None:
    assert problem in backward_problem(forward, backward(**changes))


def test_an_operator_that_overwrites_an_input_has_no_backward(definition_record: Any, backward: Any) -> None:
    outputs = {"out": ROWS, "x_out": ROWS}
    forward = Definition.from_dict(definition_record(outputs=outputs, in_place={"x": "x_out"}))
    assert "overwrites its input 'x'" in backward_problem(forward, backward())


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"backward_of": "row_scale_backward"}, "backward_of_itself"),
        ({"inputs": {"weight": COLUMNS, "x": ROWS}}, "gradient_missing"),
        ({"outputs": {"out": ROWS}}, "gradient_name"),
        (
            {"inputs": {"grad_out": ROWS, "x": ROWS}, "in_place": {"x": "grad_x"}},
            "backward_in_place",
        ),
    ],
)
def test_a_record_that_can_be_no_backward_is_refused(backward: Any, changes: dict[str, Any], code: str) -> None:
    with raises(RecordError, code):
        backward(**changes)


def test_other_definitions_keep_their_meaning(forward: Definition, backward: Any) -> None:
    assert "backward_of" not in forward.model_dump(exclude_defaults=True)
    assert backward().digest != backward(backward_of="row_scale_2").digest


def test_the_call_of_a_backward_is_known_at_the_forward(backward: Any) -> None:
    call = Call(
        "forward",
        axes={"M": 4, "N": 8},
        dtypes={"T": "float32"},
        layouts={"x": "row_contiguous", "weight": "contiguous", "out": "strided"},
        scalars={"factor": 2.0},
    )
    asked = backward_call(backward(), call)
    assert (asked.axes, asked.dtypes, asked.scalars) == (call.axes, call.dtypes, call.scalars)
    assert asked.layouts == {"weight": "contiguous", "grad_out": "strided"}
