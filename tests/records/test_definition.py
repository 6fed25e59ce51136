from __future__ import annotations

import pytest

from tilegym_db.errors import RecordError
from tilegym_db.records import Definition


@pytest.fixture
def make(definition_record):
    return lambda **changes: Definition.from_dict(definition_record(**changes), "row_scale.json")


def refused(make, message, **changes):
    with pytest.raises(RecordError) as raised:
        make(**changes)
    assert str(raised.value).startswith("row_scale.json: not a valid definition: ")
    assert message in str(raised.value)


def test_axes_are_bound_in_the_definitions_order(make):
    assert list(make().bind_axes({"N": 8, "M": 4})) == ["M", "N"]


def test_a_const_axis_need_not_be_given_and_cannot_be_changed(make):
    record = make(axes={"M": {"type": "var"}, "N": {"type": "const", "value": 64}})
    assert record.bind_axes({"M": 1}) == {"M": 1, "N": 64}
    assert record.var_axes == ("M",)
    with pytest.raises(RecordError, match="axis 'N' of row_scale is fixed at 64, not 65"):
        record.bind_axes({"M": 1, "N": 65})


@pytest.mark.parametrize("size", [-1, True, 1.5, "4"])
def test_an_axis_size_is_a_whole_number(make, size):
    with pytest.raises(RecordError, match="must be a whole number >= 0"):
        make().bind_axes({"M": size, "N": 4})


def test_a_single_dtype_need_not_be_given(make):
    assert make(dtypes={"T": ["float16"]}).bind_dtypes({}) == {"T": "float16"}
    with pytest.raises(RecordError, match="needs a dtype for 'T'"):
        make().bind_dtypes({})
    with pytest.raises(RecordError, match="has no dtype variable 'U'"):
        make().bind_dtypes({"T": "float32", "U": "float32"})


def test_shapes_and_cost_follow_the_binding(make):
    record = make(outputs={"out": {"shape": ["M", "ceil_div(N, 128)"], "dtype": "T"}})
    assert record.shape_of("out", {"M": 2, "N": 130}) == (2, 2)
    assert record.cost_of({"M": 2, "N": 8}, {"T": "bfloat16"}) == (32.0, 80.0)
    assert make(cost=None).cost_of({"M": 2, "N": 8}, {}) == (0.0, 0.0)


def test_in_place_outputs_are_not_arguments(make):
    both = {"out": {"shape": ["M", "N"], "dtype": "T"}, "x_out": {"shape": ["M", "N"], "dtype": "T"}}
    assert make(outputs=both, in_place={"x": "x_out"}).written_outputs == ("out",)
    refused(make, "must map an input to an output", in_place={"x": "gone"})
    refused(make, "differ in shape or dtype", outputs=both, in_place={"weight": "x_out"})
    refused(make, "is both an input and an output", outputs={"x": {"shape": ["M", "N"], "dtype": "T"}})


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
    refused(make, "a const axis needs 'value'", axes={"M": {"type": "const"}, "N": {"type": "var"}})
    refused(make, "a const axis needs 'value'", axes={"M": {"type": "var", "value": 3}, "N": {"type": "var"}})
    refused(
        make, "'value' must not be negative, not -3", axes={"M": {"type": "const", "value": -3}, "N": {"type": "var"}}
    )


def test_names_that_refer_to_nothing_are_refused(make):
    refused(make, "input_generators names the undeclared input 'y'", input_generators={"y": {"kind": "normal"}})
    refused(make, "independent_axes names the undeclared axis 'K'", independent_axes=["K"])
    refused(make, "tolerance names the undeclared dtype 'half'", tolerance={"half": {"reason": "because it is"}})
    refused(make, "cost.bytes uses undeclared dtype variable 'U'", cost={"flops": "M", "bytes": "sizeof(U)"})
    refused(
        make, "'x-y' is not an identifier", axes={"M": {"type": "var"}, "N": {"type": "var"}, "x-y": {"type": "var"}}
    )
    refused(make, "dtype variable 'T' lists no dtype", dtypes={"T": []})
    refused(make, "out has no shape", outputs={"out": {"shape": None, "dtype": "T"}})


def test_indices_gather_from_a_tensor_with_their_own_rows(make):
    index = {"shape": ["M", "4"], "dtype": "int64"}
    outputs = {"index": index, "out": {"shape": ["M", "N"], "dtype": "T"}}
    assert make(outputs=outputs, gathers={"index": "x"}).gathers == {"index": "x"}
    assert make(outputs=outputs, gathers={"index": "out"}).digest != make(outputs=outputs).digest
    refused(make, "gathers 'choice': no such output", outputs=outputs, gathers={"choice": "x"})
    refused(make, "indices are integers", outputs=outputs, gathers={"out": "x"})
    refused(make, "'scores' must be an input or another output", outputs=outputs, gathers={"index": "scores"})
    refused(make, "'index' must be an input or another output", outputs=outputs, gathers={"index": "index"})
    for source in ("weight", "factor"):
        refused(make, f"'{source}' must have its shape but for the last", outputs=outputs, gathers={"index": source})


def test_a_planted_error_must_occur_in_the_reference(make):
    planted = [{"find": text, "replace": "0", "why": "a mistake"} for text in ("weight", "factor", "sqrt")]
    independent = "def run(x, weight, factor):\n    return x\n"
    refused(
        make,
        "self_test.planted_errors[2]: 'sqrt' does not occur in the reference",
        self_test={"independent": independent, "planted_errors": planted},
    )
    refused(make, "self_test.planted_errors", self_test={"independent": independent, "planted_errors": planted[:2]})


def test_many_mistakes_are_counted_not_poured_out():
    with pytest.raises(
        RecordError, match=r"unknown key 'key2'; missing key 'name'.*missing key 'reference'\.$"
    ) as raised:
        Definition.from_dict({f"key{index}": 1 for index in range(3)}, "x.json")
    assert str(raised.value).count("known: ") == 1
    with pytest.raises(RecordError, match=r"unknown key 'key19'.*; and 87 more"):
        Definition.from_dict({f"key{index}": 1 for index in range(100)}, "x.json")


def test_an_unknown_key_is_named_before_all_that_is_missing(definition_record):
    record = definition_record(op_type=None, version=None, op_tpye="norm", axes={"M": {"type": "var", "value": "4"}})
    with pytest.raises(RecordError, match=r"definition: unknown key 'op_tpye' \(did you mean 'op_type'\?\); missing"):
        Definition.from_dict(record, "x.json")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("M == K", "uses 'K', which is no axis and no input"),
        ("x.__class__ == 1", "uses '.__class__', which is not known here"),
        ("x.item == 1", "uses '.item', which is not known here"),
        ("x.max(dim=0) == 1", "is not known here"),
        ("[x for x in x] == 1", "is no comparison of sizes and contents"),
        ("x @ x == 1", "is not known here"),
        ("open('x') == 1", "uses 'open', which is no axis and no input"),
        ("(lambda: 1)() == 1", "is not known here"),
        ("M ==", "is no expression"),
    ],
)
def test_a_rule_about_contents_that_nobody_could_evaluate_is_refused(definition_record, text, problem):
    with pytest.raises(RecordError, match=r"content_constraints\[0\]: ") as caught:
        Definition.from_dict(definition_record(content_constraints=[text]))
    assert problem in str(caught.value)


def test_a_rule_about_contents_is_part_of_what_the_operator_is(definition_record):
    plain = Definition.from_dict(definition_record())
    ruled = Definition.from_dict(
        definition_record(content_constraints=["x.shape[0] == M", "abs(x[-1, 0].item()) <= max(M, N)", "all(x == x)"])
    )
    assert plain.digest != ruled.digest
    assert Definition.from_dict(definition_record(content_constraints=[])).digest == plain.digest
