from __future__ import annotations

import pytest
from raising import raises

from tilegym_db.errors import RecordError
from tilegym_db.records import Definition


@pytest.fixture
def make(definition_record):
    return lambda **changes: Definition.from_dict(definition_record(**changes), "row_scale.json")


def refused(make, code, *names, **changes):
    with raises(RecordError, code, *names) as raised:
        make(**changes)
    assert str(raised.value).startswith("row_scale.json: ")


def test_axes_are_bound_in_the_definitions_order(make):
    assert list(make().bind_axes({"N": 8, "M": 4})) == ["M", "N"]


def test_a_const_axis_need_not_be_given_and_cannot_be_changed(make):
    record = make(axes={"M": {"type": "var"}, "N": {"type": "const", "value": 64}})
    assert record.bind_axes({"M": 1}) == {"M": 1, "N": 64}
    assert record.var_axes == ("M",)
    with raises(RecordError, "axis_fixed", "'N'", "64"):
        record.bind_axes({"M": 1, "N": 65})


@pytest.mark.parametrize("size", [-1, True, 1.5, "4"])
def test_an_axis_size_is_a_whole_number(make, size):
    with raises(RecordError, "axis_size_invalid", "'M'"):
        make().bind_axes({"M": size, "N": 4})


def test_a_single_dtype_need_not_be_given(make):
    assert make(dtypes={"T": ["float16"]}).bind_dtypes({}) == {"T": "float16"}
    with raises(RecordError, "dtype_missing", "'T'"):
        make().bind_dtypes({})
    with raises(RecordError, "dtype_variable_unknown", "'U'"):
        make().bind_dtypes({"T": "float32", "U": "float32"})


def test_shapes_and_cost_follow_the_binding(make):
    record = make(outputs={"out": {"shape": ["M", "ceil_div(N, 128)"], "dtype": "T"}})
    assert record.shape_of("out", {"M": 2, "N": 130}) == (2, 2)
    assert record.cost_of({"M": 2, "N": 8}, {"T": "bfloat16"}) == (32.0, 80.0)
    assert make(cost=None).cost_of({"M": 2, "N": 8}, {}) == (0.0, 0.0)


def test_in_place_outputs_are_not_arguments(make):
    both = {"out": {"shape": ["M", "N"], "dtype": "T"}, "x_out": {"shape": ["M", "N"], "dtype": "T"}}
    assert make(outputs=both, in_place={"x": "x_out"}).written_outputs == ("out",)
    refused(make, "in_place_unknown", "'gone'", in_place={"x": "gone"})
    refused(make, "in_place_differs", "'weight'", "'x_out'", outputs=both, in_place={"weight": "x_out"})
    refused(make, "name_clash", "'x'", outputs={"x": {"shape": ["M", "N"], "dtype": "T"}})


SEMANTIC = {
    "constraint": {"constraints": []},
    "dtype": {"dtypes": {"T": ["float32"]}},
    "reference": {"reference": "# Source: https://example.org\ndef run(x, weight, factor):\n    return x\n"},
    "oracle": {"oracle": "as_written"},
    "version": {"version": "1.0.1"},
    "order of inputs": {
        "inputs": {
            "weight": {"shape": ["N"], "dtype": "T"},
            "x": {"shape": ["M", "N"], "dtype": "T"},
            "factor": {"shape": None, "dtype": "float32"},
        },
        "reference": "# Source: https://example.org\ndef run(weight, x, factor):\n    return x\n",
    },
}
NOT_SEMANTIC = {
    "description": {"description": "other words"},
    "tags": {"tags": ["status:open"]},
    "axis description": {"axes": {"M": {"type": "var", "description": "tokens"}, "N": {"type": "var"}}},
}


@pytest.mark.parametrize("changes", SEMANTIC.values(), ids=SEMANTIC.keys())
def test_the_digest_changes_with_the_meaning(make, changes):
    assert make(**changes).digest != make().digest


@pytest.mark.parametrize("changes", NOT_SEMANTIC.values(), ids=NOT_SEMANTIC.keys())
def test_the_digest_ignores_what_is_for_people(make, changes):
    assert make(**changes).digest == make().digest


def test_the_record_survives_a_round_trip(make):
    record = make()
    again = Definition.from_json(record.to_json())
    assert again == record
    assert again.digest == record.digest
    assert record.to_json().startswith('{"schema_version": 1, "name": "row_scale"')


def test_a_const_axis_has_a_value_and_a_var_axis_has_none(make):
    refused(make, "axis_value_mismatch", "axes.M", axes={"M": {"type": "const"}, "N": {"type": "var"}})
    refused(make, "axis_value_mismatch", "axes.M", axes={"M": {"type": "var", "value": 3}, "N": {"type": "var"}})
    refused(make, "axis_size_invalid", "axes.M", axes={"M": {"type": "const", "value": -3}, "N": {"type": "var"}})


def test_names_that_refer_to_nothing_are_refused(make):
    refused(make, "name_undeclared", "input_generators", "'y'", input_generators={"y": {"kind": "normal"}})
    refused(make, "name_undeclared", "independent_axes", "'K'", independent_axes=["K"])
    refused(make, "dtype_undeclared", "tolerance", "'half'", tolerance={"half": {"reason": "because it is"}})
    refused(make, "dtype_variable_undeclared", "cost.bytes", "'U'", cost={"flops": "M", "bytes": "sizeof(U)"})
    refused(make, "name_invalid", "'x-y'", axes={"M": {"type": "var"}, "N": {"type": "var"}, "x-y": {"type": "var"}})
    refused(make, "dtype_variable_empty", "'T'", dtypes={"T": []})
    refused(make, "output_without_shape", "out", outputs={"out": {"shape": None, "dtype": "T"}})


def test_indices_gather_from_a_tensor_with_their_own_rows(make):
    index = {"shape": ["M", "4"], "dtype": "int64"}
    outputs = {"index": index, "out": {"shape": ["M", "N"], "dtype": "T"}}
    assert make(outputs=outputs, gathers={"index": "x"}).gathers == {"index": "x"}
    assert make(outputs=outputs, gathers={"index": "out"}).digest != make(outputs=outputs).digest
    refused(make, "gathers_output_unknown", "'choice'", outputs=outputs, gathers={"choice": "x"})
    refused(make, "gathers_not_integer", "'out'", outputs=outputs, gathers={"out": "x"})
    refused(make, "gathers_source_unknown", "'scores'", outputs=outputs, gathers={"index": "scores"})
    refused(make, "gathers_source_unknown", "'index'", outputs=outputs, gathers={"index": "index"})
    for source in ("weight", "factor"):
        refused(make, "gathers_shape_differs", f"'{source}'", outputs=outputs, gathers={"index": source})


def test_a_planted_error_must_occur_in_the_reference(make):
    planted = [{"find": text, "replace": "0", "why": "a mistake"} for text in ("weight", "factor", "sqrt")]
    independent = "def run(x, weight, factor):\n    return x\n"
    refused(
        make,
        "planted_error_absent",
        "self_test.planted_errors[2]: 'sqrt'",
        self_test={"independent": independent, "planted_errors": planted},
    )
    refused(
        make,
        "list_too_short",
        "self_test.planted_errors",
        self_test={"independent": independent, "planted_errors": planted[:2]},
    )


def test_many_mistakes_are_counted_not_poured_out():
    with raises(RecordError, "key_missing", "'key2'", "'name'", "'reference'") as raised:
        Definition.from_dict({f"key{index}": 1 for index in range(3)}, "x.json")
    assert raised.value.code == "key_unknown"
    assert str(raised.value).count("known: ") == 1
    with raises(RecordError, "key_unknown", "'key19'", "87"):
        Definition.from_dict({f"key{index}": 1 for index in range(100)}, "x.json")


def test_an_unknown_key_is_named_before_all_that_is_missing(definition_record):
    record = definition_record(op_type=None, version=None, op_tpye="norm", axes={"M": {"type": "var", "value": "4"}})
    with raises(RecordError, "key_missing", "'op_tpye'", "'op_type'") as raised:
        Definition.from_dict(record, "x.json")
    assert raised.value.codes[0] == "key_unknown"
    assert "'op_tpye'" in raised.value.problems[0]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("M == K", "'K'"),
        ("x.__class__ == 1", "'.__class__'"),
        ("x.item == 1", "'.item'"),
        ("x.max(dim=0) == 1", "'x.max(dim=0)'"),
        ("[x for x in x] == 1", "'[x for x in x] == 1'"),
        ("x @ x == 1", "'x @ x'"),
        ("open('x') == 1", "'open'"),
        ("(lambda: 1)() == 1", "lambda: 1"),
        ("M ==", "'M =='"),
    ],
)
def test_rule_about_contents_that_cannot_be_evaluated_is_refused(definition_record, text, name):
    with raises(RecordError, "content_constraint", "content_constraints[0]: ", name):
        Definition.from_dict(definition_record(content_constraints=[text]))


def test_a_rule_about_contents_is_part_of_what_the_operator_is(definition_record):
    plain = Definition.from_dict(definition_record())
    ruled = Definition.from_dict(
        definition_record(content_constraints=["x.shape[0] == M", "abs(x[-1, 0].item()) <= max(M, N)", "all(x == x)"])
    )
    assert plain.digest != ruled.digest
    assert Definition.from_dict(definition_record(content_constraints=[])).digest == plain.digest
