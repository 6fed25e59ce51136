"""What records used to accept in silence, and what they say of it now."""

from __future__ import annotations

import json
import time

import pytest

from tilegym_db.errors import RecordError
from tilegym_db.records import Definition, Solution, Workload
from tilegym_db.records.expressions import parse_expression


@pytest.mark.parametrize("size", ["4", True, 4.0, "4.0", None, [4]])
def test_the_size_of_an_axis_is_a_whole_number_and_nothing_like_it(size, workload_record, definition_record):
    with pytest.raises(RecordError, match=r"axes\.M: Input should be a valid integer"):
        Workload.from_dict(workload_record(axes={"M": size, "N": 8}))
    if size is not None:
        axes = {"M": {"type": "const", "value": size}, "N": {"type": "var"}}
        with pytest.raises(RecordError, match=r"axes\.M\.value: Input should be a valid integer"):
            Definition.from_dict(definition_record(axes=axes))


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"M": 2**63, "N": 8}, "axes.M: this whole number does not fit in 64 bits"),
        ({"M": 10**400, "N": 8}, "axes.M"),
        ({"M": 2**62, "N": 8}, f"axis 'M' of row_scale is {2**62}; no axis is larger than {2**40}"),
        ({"M": 2**30, "N": 2**30}, "'x' of row_scale would have the shape [1073741824, 1073741824] and 4.61e+18 bytes"),
    ],
)
def test_a_size_that_no_gpu_holds_is_refused(axes, message, workload_record, definition_record):
    definition = Definition.from_dict(definition_record())
    with pytest.raises(RecordError) as raised:
        Workload.from_dict(workload_record(axes=axes)).check_against(definition)
    assert message in str(raised.value)


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
    with pytest.raises(RecordError, match=f"x.json: not a valid workload: the key '{key}' occurs twice in one object"):
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
def test_an_expression_of_unbounded_cost_is_refused_when_it_is_read(text, part, definition_record):
    begun = time.process_time()
    if part is None:
        parse_expression(text)
    else:
        with pytest.raises(RecordError) as raised:
            parse_expression(text)
        assert repr(part) in str(raised.value)
        with pytest.raises(RecordError, match=r"constraints\.0"):
            Definition.from_dict(definition_record(constraints=[text]))
    assert time.process_time() - begun < 1


@pytest.mark.parametrize(
    "dependency",
    [
        "; rm -rf /",
        "",
        "triton>=",
        "triton>=3.4; rm",
        "x @ file:///etc/passwd",
        "x @ https://example.org/x.whl",
        "a\nb",
        "--index-url x",
    ],
)
def test_a_dependency_is_a_package_with_versions(dependency, solution_record):
    with pytest.raises(RecordError, match=r"spec\.dependencies"):
        Solution.from_dict(solution_record(spec={"dependencies": [dependency]}))


@pytest.mark.parametrize(
    ("tag", "message"),
    [
        ("x" * 10_000_000, "a text of 10000000 characters"),
        ("x" * 1000, "a text of 1000 characters; at most 500"),
        ("two\nlines", r"the character '\\n' at position 3"),
        ("bell\a", r"the character '\\x07' at position 4"),
        ("nul\0", r"the character '\\x00' at position 3"),
        ("line\u2028", r"the character '\\u2028' at position 4"),
    ],
)
def test_a_tag_is_one_short_line(tag, message, workload_record, definition_record):
    for read, record in (
        (Workload, workload_record(tags=["tiny", tag])),
        (Definition, definition_record(tags=["a", tag])),
    ):
        with pytest.raises(RecordError, match=rf"tags.*1.*{message}"):
            read.from_dict(record)
        with pytest.raises(RecordError, match=rf"tags.*1.*{message}"):
            read.from_json(json.dumps(record))


@pytest.mark.parametrize("name", ["", "a\n", "a\nb", "A", "../a", "a" * 129, "a/b", "a\0"])
def test_a_name_is_a_name(name, definition_record, solution_record):
    for read, record in ((Definition, definition_record(name=name)), (Solution, solution_record(name=name))):
        with pytest.raises(RecordError, match="name: String should match pattern"):
            read.from_dict(record)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"destination_passing_style": "yes"}, "spec.destination_passing_style: Input should be a valid boolean"),
        ({"deterministic": 1}, "spec.deterministic: Input should be a valid boolean"),
        ({"tunables": {f"T{n}": list(range(100)) for n in range(10)}}, "tunables span 1e+20 configs"),
    ],
)
def test_a_spec_says_what_it_means(spec, message, solution_record):
    with pytest.raises(RecordError) as raised:
        Solution.from_dict(solution_record(spec=spec))
    assert message in str(raised.value)


def test_a_source_cannot_take_the_place_of_the_record(solution_record):
    for path in ("solution.json", "a\nb.py", "x" * 300 + ".py"):
        with pytest.raises(RecordError, match="source path"):
            Solution.from_dict(solution_record(sources=[{"path": "kernel.py"}, {"path": path}]))


def test_every_culprit_is_named_and_unknown_keys_come_first(workload_record):
    record = workload_record(tags="x", dtypes=3, layouts=4, inputs=5, uuid=6, axes=7, axis={})
    with pytest.raises(RecordError) as raised:
        Workload.from_dict(record)
    message = str(raised.value)
    assert message.startswith("<value>: not a valid workload: unknown key 'axis' (did you mean 'axes'?); ")
    assert all(f"{key}: " in message for key in ("tags", "dtypes", "layouts", "inputs", "uuid", "axes"))
    assert "more" not in message


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
    with pytest.raises(RecordError, match=r"inputs\.factor: .* is not"):
        workload.check_against(Definition.from_dict(definition))


def test_a_layout_does_not_reach_further_than_any_memory(definition_record, workload_record):
    workload = Workload.from_dict(workload_record(layouts={"x": "strided(N * 10000000000000, 1)"}))
    with pytest.raises(RecordError, match=r"layouts\.x: .* reaches over"):
        workload.check_against(Definition.from_dict(definition_record()))


@pytest.mark.parametrize("version", ["1.0." + "9" * 5000, "1.0.1234567890", "1.0.\N{ARABIC-INDIC DIGIT FOUR}", "1.0"])
def test_a_version_is_three_numbers_that_can_be_compared(version, definition_record):
    with pytest.raises(RecordError, match="version: String should match pattern"):
        Definition.from_dict(definition_record(version=version))


def test_an_axis_is_not_called_a_word_of_pythons_own(definition_record):
    axes = {"M": {"type": "var"}, "N": {"type": "var"}, "lambda": {"type": "var"}}
    with pytest.raises(RecordError, match="'lambda' is a word of Python's own"):
        Definition.from_dict(definition_record(axes=axes))


def test_a_place_in_a_record_is_named_by_its_keys_alone(definition_record):
    with pytest.raises(RecordError) as raised:
        Definition.from_dict(definition_record(outputs={"out": {"shape": ["M", -1], "dtype": "T"}}))
    assert "outputs.out.shape.1: " in str(raised.value)
    assert "function" not in str(raised.value)
