"""What a record may say about how its inputs are drawn, and how a mistake in it is named."""

from __future__ import annotations

import pytest

from tilegym_db.errors import RecordError
from tilegym_db.records import Definition

AXES = {"M": {"type": "var"}, "K": {"type": "var"}, "E": {"type": "var"}}
INPUTS = {
    "ids": {"shape": ["M", "K"], "dtype": "int64"},
    "scale": {"shape": ["M"], "dtype": "float32"},
    "top_k": {"shape": None, "dtype": "int64"},
}
DRAW = "def draw(axes, scalars, dtypes, generator, contents):\n    return {}\n"


@pytest.fixture
def make(definition_record):
    def record(**changes):
        reference = "# Source: https://example.org\ndef run(ids, scale, top_k):\n    return scale\n"
        outputs = {"out": {"shape": ["M"], "dtype": "float32"}}
        base = {"axes": AXES, "dtypes": {}, "inputs": INPUTS, "outputs": outputs, "constraints": [], "cost": None}
        return Definition.from_dict(definition_record(**{**base, "reference": reference, **changes}))

    return record


@pytest.mark.parametrize(
    ("generators", "message"),
    [
        ({"scale": {"kind": "negative"}}, "input_generators.scale.kind"),
        ({"scale": {"kind": "positive", "low": 1.0}}, "scale: 'positive' has no option 'low' (its options: scale)"),
        ({"scale": {"kind": "unit_rows", "nan": True}}, "'unit_rows' has no option 'nan' (its options: none)"),
        ({"ids": {"kind": "distinct_ids"}}, "'distinct_ids' needs 'high', an expression over axes such as 'E'"),
        ({"ids": {"kind": "distinct_ids", "high": 64.0}}, "input_generators.ids: 'distinct_ids' needs 'high', an expression"),
        ({"ids": {"kind": "offsets"}}, "'offsets' needs 'high', an expression over axes such as 'E': lengths add up to it"),
        ({"ids": {"kind": "distinct_ids", "high": "X"}}, "input_generators.ids.high uses undeclared axis 'X'"),
        ({"ids": {"kind": "integers", "high": "E +"}}, "input_generators.ids.high: 'E +' is not arithmetic over axes"),
        ({"scale": {"kind": "distinct_ids", "high": "E"}}, "'distinct_ids' are whole numbers, and this input is float32"),
        ({"ids": {"kind": "positive"}}, "'positive' are no whole numbers, and this input is int64"),
        ({"scale": {"kind": "codes"}}, "'codes' are those of an 8-bit dtype or of packed 4-bit ones, and this input is float32"),
        ({"top_k": {"kind": "integers", "high": "E"}}, "input_generators.top_k: a scalar has the value that a workload states"),
        ({"scale": {"kind": "log_decay", "low": 1.0}}, "'low' of a log_decay is at most 0, not 1"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_generator_is_named(make, generators, message):
    with pytest.raises(RecordError) as raised:
        make(input_generators=generators)
    assert message in str(raised.value)


def test_every_kind_with_its_own_options_is_accepted(make):
    for name, generator in (
        ("ids", {"kind": "distinct_ids", "low": 0.0, "high": "E", "none": True}),
        ("ids", {"kind": "offsets", "low": 0.0, "high": "M * K", "leading": True}),
        ("scale", {"kind": "powers_of_two", "low": -4.0, "high": 4.0}),
        ("scale", {"kind": "log_decay", "low": -20.0, "scale": 0.1}),
        ("scale", {"kind": "probabilities", "scale": 3.0}),
    ):
        assert make(input_generators={name: generator}).input_generators[name].kind == generator["kind"]


@pytest.mark.parametrize(
    ("joint", "message"),
    [
        ({"inputs": ["ids", "rank"]}, "joint_inputs names 'rank', which is no tensor among the inputs"),
        ({"inputs": ["top_k"]}, "joint_inputs names 'top_k', which is no tensor among the inputs"),
        ({"inputs": ["ids", "ids"]}, "joint_inputs.inputs names something twice"),
        ({"inputs": ["ids"], "source": "def draw(axes):\n    return {}\n"}, "draw(axes) must be draw(axes, scalars, dtypes, "),
        ({"inputs": ["ids"], "source": "def sample():\n    return {}\n"}, "joint_inputs.source defines no function 'draw'"),
        ({"inputs": ["ids"], "source": "def draw(:\n"}, "joint_inputs.source is not valid Python"),
    ],
)  # fmt: skip
def test_a_mistake_in_what_draws_several_inputs_is_named(make, joint, message):
    with pytest.raises(RecordError) as raised:
        make(joint_inputs={"source": DRAW, **joint})
    assert message in str(raised.value)


def test_one_input_is_not_drawn_twice(make):
    generators = {"ids": {"kind": "distinct_ids", "high": "E"}}
    with pytest.raises(RecordError, match="joint_inputs and input_generators both draw 'ids'"):
        make(joint_inputs={"inputs": ["ids"], "source": DRAW}, input_generators=generators)


def test_how_inputs_are_drawn_is_part_of_the_meaning(make):
    assert make(joint_inputs={"inputs": ["ids"], "source": DRAW}).digest != make().digest


def test_a_record_that_went_through_a_dump_with_every_field_is_the_same(make):
    definition = make(input_generators={"scale": {"kind": "positive"}})
    assert type(definition).model_validate(definition.model_dump()) == definition
