"""What a record may say about indices, what follows from them, and how they are drawn."""

from __future__ import annotations

import pytest
from raising import raises

from tilegym_db.errors import RecordError
from tilegym_db.records import Definition

REFERENCE = """# Source: https://example.org
def ranked(x, weight, factor):
    return x * weight
def weights_of(x, weight, factor, index, rounding):
    return x.gather(-1, index)
def other(x, weight):
    return x
def run(x, weight, factor):
    return x, x
"""
OUTPUTS = {"out": {"shape": ["M", "4"], "dtype": "T"}, "index": {"shape": ["M", "4"], "dtype": "int64"}}
RIGHT = {"gathers": {"index": "ranked"}, "unordered": ["index"], "follows": {"out": "weights_of"}}


@pytest.fixture
def make(definition_record):
    return lambda **changes: Definition.from_dict(
        definition_record(outputs=OUTPUTS, reference=REFERENCE, **{**RIGHT, **changes})
    )


def test_reference_functions_state_what_is_ranked_or_follows(make):
    record = make()
    assert (record.gathers, record.unordered, record.follows) == (
        {"index": "ranked"}, ("index",), {"out": "weights_of"},
    )  # fmt: skip
    assert record.digest != make(unordered=[]).digest != make(unordered=[], follows={}).digest


@pytest.mark.parametrize(
    ("changes", "code", "name"),
    [
        ({"gathers": {"index": "rank"}}, "gathers_source_unknown", "'rank'"),
        ({"gathers": {"index": "other"}}, "reference_function_parameters", "other(x, weight)"),
        ({"gathers": {"out": "ranked"}}, "gathers_not_integer", "'out'"),
        ({"gathers": {"index": "x"}}, "unordered_not_gathered", "'index'"),
        ({"unordered": ["out"]}, "unordered_not_gathered", "'out'"),
        ({"follows": {"index": "weights_of"}}, "follows_not_plain", "'index'"),
        ({"follows": {"out": "weights"}}, "reference_function_missing", "'weights'"),
        ({"gathers": {}, "unordered": []}, "follows_without_gathers", "'gathers'"),
    ],
)  # fmt: skip
def test_a_mistake_is_named(make, changes, code, name):
    with raises(RecordError, code, name):
        make(**changes)


DRAWN = """# Source: https://example.org
def law(x, weight, factor, uniform, rounding):
    return x
def plain(x, weight, factor, uniform):
    return x
def wrong(x, uniform):
    return x
def run(x, weight, factor, uniform):
    return uniform.long()
"""


@pytest.fixture
def drawn(definition_record):
    """The operator with an output that is drawn at random; changes are of keys of the record."""

    def make(**changes):
        record = definition_record(outputs={"index": {"shape": ["M"], "dtype": "int64"}}, reference=DRAWN)
        record["inputs"]["uniform"] = {"shape": ["M"], "dtype": "float32"}
        record["input_generators"] = {"uniform": {"kind": "uniform"}}
        record["sampled"] = {"index": {"law": "law", "uniforms": "uniform"}}
        return Definition.from_dict({**record, **changes})

    return make


def sampled(law="law", uniforms="uniform", output="index"):
    return {"sampled": {output: {"law": law, "uniforms": uniforms}}}


def test_record_names_the_law_of_draws_and_its_random_numbers(drawn):
    assert drawn().sampled["index"].law == "law"
    assert drawn().digest != drawn(**sampled("plain")).digest != drawn(sampled={}).digest


@pytest.mark.parametrize(
    ("changes", "code", "name"),
    [
        (sampled(output="ids"), "sampled_not_plain", "sampled 'ids': "),
        (sampled("laws"), "reference_function_missing", "'laws'"),
        (sampled("wrong"), "reference_function_parameters", "(x, weight, factor, uniform)"),
        (sampled(uniforms="x"), "sampled_uniform_input", "'x'"),
        (sampled(uniforms="numbers"), "sampled_uniform_input", "'numbers'"),
        ({"input_generators": {"uniform": {"kind": "normal"}}}, "sampled_uniform_range", "input_generators.uniform"),
        ({"outputs": {"index": {"shape": ["M", "1"], "dtype": "int64"}}}, "sampled_rank", "'index'"),
        ({"outputs": {"index": {"shape": ["M"], "dtype": "float32"}}}, "sampled_dtype", "'index'"),
    ],
)  # fmt: skip
def test_a_mistake_in_what_is_drawn_is_named(drawn, changes, code, name):
    with raises(RecordError, code, name):
        drawn(**changes)
