"""What a record may say about indices and what follows from them."""

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
