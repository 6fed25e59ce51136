"""What a record may say about how its inputs are drawn, and how a mistake in it is named."""

from __future__ import annotations

import pytest
from raising import raises

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
    ("generators", "code", "name"),
    [
        ({"scale": {"kind": "negative"}}, "value_unknown", "input_generators.scale.kind"),
        ({"scale": {"kind": "positive", "low": 1.0}}, "generator_option_unknown", "'low' (its options: scale)"),
        ({"scale": {"kind": "unit_rows", "nan": True}}, "generator_option_unknown", "'nan' (its options: none)"),
        ({"ids": {"kind": "distinct_ids"}}, "generator_bound_missing", "'high'"),
        ({"ids": {"kind": "distinct_ids", "high": 64.0}}, "generator_bound_missing", "input_generators.ids: "),
        ({"ids": {"kind": "offsets"}}, "generator_bound_missing", "'high'"),
        ({"ids": {"kind": "distinct_ids", "high": "X"}}, "axis_undeclared", "input_generators.ids.high"),
        ({"ids": {"kind": "integers", "high": "E +"}}, "expression_syntax", "input_generators.ids.high: 'E +'"),
        ({"scale": {"kind": "distinct_ids", "high": "E"}}, "generator_needs_integers", "float32"),
        ({"ids": {"kind": "positive"}}, "generator_needs_floats", "int64"),
        ({"scale": {"kind": "codes"}}, "generator_needs_codes", "float32"),
        ({"top_k": {"kind": "integers", "high": "E"}}, "generator_of_scalar", "input_generators.top_k: "),
        ({"scale": {"kind": "log_decay", "low": 1.0}}, "generator_bound_sign", "'low'"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_generator_is_named(make, generators, code, name):
    with raises(RecordError, code, name):
        make(input_generators=generators)


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
    ("joint", "code", "name"),
    [
        ({"inputs": ["ids", "rank"]}, "joint_input_unknown", "'rank'"),
        ({"inputs": ["top_k"]}, "joint_input_unknown", "'top_k'"),
        ({"inputs": ["ids", "ids"]}, "joint_input_repeated", "joint_inputs.inputs"),
        ({"inputs": ["ids"], "source": "def draw(axes):\n    return {}\n"}, "parameters_differ", "draw(axes, scalars, dtypes, "),
        ({"inputs": ["ids"], "source": "def sample():\n    return {}\n"}, "function_missing", "joint_inputs.source"),
        ({"inputs": ["ids"], "source": "def draw(:\n"}, "python_syntax", "joint_inputs.source"),
    ],
)  # fmt: skip
def test_a_mistake_in_what_draws_several_inputs_is_named(make, joint, code, name):
    with raises(RecordError, code, name):
        make(joint_inputs={"source": DRAW, **joint})


def test_one_input_is_not_drawn_twice(make):
    generators = {"ids": {"kind": "distinct_ids", "high": "E"}}
    with raises(RecordError, "joint_input_drawn_twice", "joint_inputs", "input_generators", "'ids'"):
        make(joint_inputs={"inputs": ["ids"], "source": DRAW}, input_generators=generators)


def test_how_inputs_are_drawn_is_part_of_the_meaning(make):
    assert make(joint_inputs={"inputs": ["ids"], "source": DRAW}).digest != make().digest


def test_record_is_unchanged_by_a_dump_with_every_field(make):
    definition = make(input_generators={"scale": {"kind": "positive"}})
    assert type(definition).model_validate(definition.model_dump()) == definition
