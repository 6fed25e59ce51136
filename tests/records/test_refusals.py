"""What records used to accept in silence, and what they say of it now."""

from __future__ import annotations

import json
import time

import pytest
from raising import raises

from tilegym_db.errors import RecordError
from tilegym_db.records import Definition, Solution, Workload
from tilegym_db.records.expressions import parse_expression


@pytest.mark.parametrize("size", ["4", True, 4.0, "4.0", None, [4]])
def test_size_of_an_axis_must_be_a_whole_number(size, workload_record, definition_record):
    with raises(RecordError, "value_type", "axes.M: "):
        Workload.from_dict(workload_record(axes={"M": size, "N": 8}))
    if size is not None:
        axes = {"M": {"type": "const", "value": size}, "N": {"type": "var"}}
        with raises(RecordError, "value_type", "axes.M.value: "):
            Definition.from_dict(definition_record(axes=axes))


@pytest.mark.parametrize(
    ("axes", "code", "name"),
    [
        ({"M": 2**63, "N": 8}, "number_out_of_range", "axes.M: "),
        ({"M": 10**400, "N": 8}, "number_out_of_range", "axes.M: "),
        ({"M": 2**62, "N": 8}, "axis_too_large", str(2**40)),
        ({"M": 2**30, "N": 2**30}, "tensor_too_large", "[1073741824, 1073741824]"),
    ],
)
def test_a_size_that_no_gpu_holds_is_refused(axes, code, name, workload_record, definition_record):
    definition = Definition.from_dict(definition_record())
    with raises(RecordError, code, name):
        Workload.from_dict(workload_record(axes=axes)).check_against(definition)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('{"definition": "a", "axes": {}, "definition": "b"}', "definition"),
        ('{"definition": "a", "axes": {"M": 1, "N": 2, "M": 3}}', "M"),
        ('{"definition": "a", "axes": {}, "inputs": {"x": {"type": "random", "type": "scalar"}}}', "type"),
        ('{"definition": "a", "axes": {"M": 1, "\\u004d": 3}}', "M"),
    ],
)
def test_a_key_that_is_given_twice_is_refused(text, key):
    with raises(RecordError, "key_repeated", "x.json: ", f"'{key}'"):
        Workload.from_json(text, "x.json")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("N < 9**9**9**9", "9**9**9"),
        ("9**9**9", "9**9**9"),
        ("N ** (9**9**9)", "9**9**9"),
        ("N + 2**65", "2**65"),
        ("10**64 * 10**64 + N", "10**64 * 10**64"),
        ("N // 0", None),
        ("N * (1 // 0)", "1 // 0"),
        ("N + " + "9" * 390, "9" * 390),
    ],
)
def test_expression_of_unbounded_cost_is_refused_on_reading(text, part, definition_record):
    begun = time.process_time()
    if part is None:
        parse_expression(text)
    else:
        code = "division_by_zero" if part.endswith("// 0") else "number_out_of_range"
        with raises(RecordError, code, repr(part)):
            parse_expression(text)
        with raises(RecordError, code, "constraints.0"):
            Definition.from_dict(definition_record(constraints=[text]))
    assert time.process_time() - begun < 1


@pytest.mark.parametrize(
    ("dependency", "code"),
    [
        ("; rm -rf /", "requirement_syntax"),
        ("", "requirement_syntax"),
        ("triton>=", "requirement_syntax"),
        ("triton>=3.4; rm", "requirement_syntax"),
        ("x @ file:///etc/passwd", "requirement_address"),
        ("x @ https://example.org/x.whl", "requirement_address"),
        ("a\nb", "character_not_allowed"),
        ("--index-url x", "requirement_syntax"),
    ],
)
def test_a_dependency_is_a_package_with_versions(dependency, code, solution_record):
    with raises(RecordError, code, "spec.dependencies"):
        Solution.from_dict(solution_record(spec={"dependencies": [dependency]}))


@pytest.mark.parametrize(
    ("tag", "code", "place", "name"),
    [
        ("x" * 10_000_000, "text_too_long", "tags[1]: ", "10000000"),
        ("x" * 1000, "text_too_long", "tags.1: ", "500"),
        ("two\nlines", "character_not_allowed", "tags.1: ", r"'\n' at position 3"),
        ("bell\a", "character_not_allowed", "tags.1: ", r"'\x07' at position 4"),
        ("nul\0", "character_not_allowed", "tags.1: ", r"'\x00' at position 3"),
        ("line\u2028", "character_not_allowed", "tags.1: ", r"'\u2028' at position 4"),
    ],
)
def test_a_tag_is_one_short_line(tag, code, place, name, workload_record, definition_record):
    for read, record in (
        (Workload, workload_record(tags=["tiny", tag])),
        (Definition, definition_record(tags=["a", tag])),
    ):
        with raises(RecordError, code, place, name):
            read.from_dict(record)
        with raises(RecordError, code, place, name):
            read.from_json(json.dumps(record))


@pytest.mark.parametrize("name", ["", "a\n", "a\nb", "A", "../a", "a" * 129, "a/b", "a\0"])
def test_a_name_is_a_name(name, definition_record, solution_record):
    for read, record in ((Definition, definition_record(name=name)), (Solution, solution_record(name=name))):
        with raises(RecordError, "text_pattern", "name: "):
            read.from_dict(record)


@pytest.mark.parametrize(
    ("spec", "code", "name"),
    [
        ({"destination_passing_style": "yes"}, "value_type", "spec.destination_passing_style: "),
        ({"deterministic": 1}, "value_type", "spec.deterministic: "),
        ({"tunables": {f"T{n}": list(range(100)) for n in range(10)}}, "tunables_too_many", "1e+20"),
    ],
)
def test_a_spec_says_what_it_means(spec, code, name, solution_record):
    with raises(RecordError, code, name):
        Solution.from_dict(solution_record(spec=spec))


def test_a_source_cannot_take_the_place_of_the_record(solution_record):
    for path, code in (
        ("solution.json", "source_path_reserved"),
        ("a\nb.py", "source_path_invalid"),
        ("x" * 300 + ".py", "source_path_invalid"),
    ):
        with raises(RecordError, code):
            Solution.from_dict(solution_record(sources=[{"path": "kernel.py"}, {"path": path}]))


def test_every_culprit_is_named_and_unknown_keys_come_first(workload_record):
    record = workload_record(tags="x", dtypes=3, layouts=4, inputs=5, uuid=6, axes=7, axis={})
    with raises(
        RecordError, "key_unknown", "'axes'", "tags: ", "dtypes: ", "layouts: ", "inputs: ", "uuid: "
    ) as raised:
        Workload.from_dict(record)
    assert isinstance(raised.value, RecordError)
    assert raised.value.codes[0] == "key_unknown"
    assert "'axis'" in raised.value.problems[0]
    assert len(raised.value.problems) == 7


def test_refused_item_does_not_shorten_its_list(definition_record):
    record = definition_record()
    planted = {"find": "x", "replace": "-x", "why": "the sign is lost"}
    test = {"independent": "def run(x): ...", "planted_errors": [planted, {**planted, "why": "a"}, planted]}
    with raises(RecordError, "value_invalid", "planted_errors.1.why") as raised:
        Definition.from_dict({**record, "self_test": test})
    assert isinstance(raised.value, RecordError)
    assert "list_too_short" not in raised.value.codes
    with raises(RecordError, "list_too_short", "planted_errors"):
        Definition.from_dict({**record, "self_test": {**test, "planted_errors": [planted]}})


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("float32", "nan"),
        ("float32", "0.5"),
        ("float32", True),
        ("int64", 1.5),
        ("int64", False),
        ("int32", "1"),
        ("bool", 1),
        ("bool", "true"),
    ],
)
def test_a_scalar_is_of_the_kind_that_its_input_declares(dtype, value, definition_record, workload_record):
    definition = definition_record()
    definition["inputs"]["factor"]["dtype"] = dtype
    workload = Workload.from_dict(workload_record(inputs={"factor": {"type": "scalar", "value": value}}))
    with raises(RecordError, "scalar_kind", "inputs.factor: "):
        workload.check_against(Definition.from_dict(definition))


def test_a_layout_does_not_reach_further_than_any_memory(definition_record, workload_record):
    workload = Workload.from_dict(workload_record(layouts={"x": "strided(N * 10000000000000, 1)"}))
    with raises(RecordError, "layout_too_wide", "layouts.x: "):
        workload.check_against(Definition.from_dict(definition_record()))


@pytest.mark.parametrize("version", ["1.0." + "9" * 5000, "1.0.1234567890", "1.0.\N{ARABIC-INDIC DIGIT FOUR}", "1.0"])
def test_a_version_is_three_numbers_that_can_be_compared(version, definition_record):
    with raises(RecordError, "text_pattern", "version: "):
        Definition.from_dict(definition_record(version=version))


def test_an_axis_is_not_called_a_word_of_pythons_own(definition_record):
    axes = {"M": {"type": "var"}, "N": {"type": "var"}, "lambda": {"type": "var"}}
    with raises(RecordError, "name_reserved", "'lambda'"):
        Definition.from_dict(definition_record(axes=axes))


def test_a_place_in_a_record_is_named_by_its_keys_alone(definition_record):
    with raises(RecordError, "value_range", "outputs.out.shape.1: ") as raised:
        Definition.from_dict(definition_record(outputs={"out": {"shape": ["M", -1], "dtype": "T"}}))
    assert "function" not in str(raised.value)
