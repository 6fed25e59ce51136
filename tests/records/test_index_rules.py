"""What a record may say about indices, what follows from them, and how they are drawn."""

from __future__ import annotations

import pytest

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


def test_functions_of_the_reference_say_what_is_ranked_and_what_follows(make):
    record = make()
    assert (record.gathers, record.unordered, record.follows) == (
        {"index": "ranked"}, ("index",), {"out": "weights_of"},
    )  # fmt: skip
    assert record.digest != make(unordered=[]).digest != make(unordered=[], follows={}).digest


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gathers": {"index": "rank"}}, "'rank' must be an input or another output, or a function of the reference"),
        ({"gathers": {"index": "other"}}, "gathers 'index': other(x, weight) must take the inputs in order (x, weight, factor)"),
        ({"gathers": {"out": "ranked"}}, "indices are integers"),
        ({"gathers": {"index": "x"}}, "unordered names 'index', which gathers no values of a function"),
        ({"unordered": ["out"]}, "unordered names 'out'"),
        ({"follows": {"index": "weights_of"}}, "follows 'index': it must be an output that is no output of indices"),
        ({"follows": {"out": "weights"}}, "follows 'out': the reference defines no function 'weights'"),
        ({"gathers": {}, "unordered": []}, "follows 'out': no output of indices is named in 'gathers'"),
    ],
)  # fmt: skip
def test_a_mistake_is_named(make, changes, message):
    with pytest.raises(RecordError) as raised:
        make(**changes)
    assert message in str(raised.value)


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


def test_a_record_names_the_law_of_what_is_drawn_and_its_random_numbers(drawn):
    assert drawn().sampled["index"].law == "law"
    assert drawn().digest != drawn(**sampled("plain")).digest != drawn(sampled={}).digest


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (sampled(output="ids"), "sampled 'ids': it must be an output that 'gathers' and 'in_place' do not name"),
        (sampled("laws"), "sampled 'index': the reference defines no function 'laws'"),
        (sampled("wrong"), "sampled 'index': wrong(x, uniform) must take the inputs in order (x, weight, factor, uniform)"),
        (sampled(uniforms="x"), "sampled 'index': 'x' must be a float32 input of its shape, ['M']"),
        (sampled(uniforms="numbers"), "'numbers' must be a float32 input of its shape"),
        ({"input_generators": {"uniform": {"kind": "normal"}}}, 'input_generators.uniform must be {"kind": "uniform"}'),
        ({"outputs": {"index": {"shape": ["M", "1"], "dtype": "int64"}}}, "it must have one index a row, and so one axis"),
        ({"outputs": {"index": {"shape": ["M"], "dtype": "float32"}}}, "indices that are drawn are int32 or int64"),
    ],
)  # fmt: skip
def test_a_mistake_in_what_is_drawn_is_named(drawn, changes, message):
    with pytest.raises(RecordError) as raised:
        drawn(**changes)
    assert message in str(raised.value)
