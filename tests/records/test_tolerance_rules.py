"""A share is for float outputs of low-precision inputs, has a reason, and changes no digest where it is absent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from raising import raises
from verification.low_precision import RECORD, TOLERANCE

from tilegym_db.errors import RecordError
from tilegym_db.published.snapshot import bounds_of, why_implausible
from tilegym_db.records import Definition
from tilegym_db.records.definition import limits_for

AXES = {"M": 64, "K": 64, "I": 64, "N": 64}


def layer(tolerance: Mapping[str, Any], **changes: Any) -> Definition:
    return Definition.from_dict({**RECORD, **changes, "tolerance": {"bfloat16": tolerance}})


def without(*keys: str) -> dict[str, Any]:
    return {key: value for key, value in TOLERANCE.items() if key not in keys}


def test_a_share_is_part_of_what_an_operator_means():
    assert layer(TOLERANCE).digest != layer(without("share")).digest
    assert limits_for(layer(TOLERANCE), "bfloat16").share == 0.95


def test_an_absent_share_is_in_no_record():
    record = layer(without("share"))
    assert "share" not in record.to_json()
    assert record.digest == layer({**without("share"), "share": None}).digest
    assert limits_for(record, "bfloat16").share == 1.0


@pytest.mark.parametrize("share", [0.9, 0.5, 0.0, 1.0, 1.5, -0.95])
def test_a_share_is_above_nine_tenths_and_below_one(share):
    with raises(RecordError, "value_range", "tolerance.bfloat16.share: "):
        layer({**TOLERANCE, "share": share})


def test_a_share_has_a_reason():
    with raises(RecordError, "key_missing", "'tolerance.bfloat16.reason'"):
        layer(without("reason"))


def test_only_low_precision_inputs_make_strays(definition_record):
    given = {"share": 0.95, "reason": TOLERANCE["reason"]}
    with raises(RecordError, "share_without_input", "tolerance.bfloat16.share: "):
        Definition.from_dict(definition_record(tolerance={"bfloat16": given}))


@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn", "int32", "float8_e8m0fnu"])
def test_only_outputs_compared_element_by_element_have_strays(dtype):
    outputs = {"out": {"shape": ["M", "N"], "dtype": "bfloat16" if dtype == "float32" else dtype}}
    with raises(RecordError, "share_without_output", f"tolerance.{dtype}.share: "):
        Definition.from_dict({**RECORD, "outputs": outputs, "tolerance": {dtype: TOLERANCE}})


def test_trace_may_match_down_to_the_share_and_no_less():
    bounds = bounds_of(layer(TOLERANCE), AXES, {}, None, cold_l2=True, timer="events")
    assert bounds.matched_ratio == 0.95
    assert why_implausible(bounds, **figures(0.951)) is None
    assert "only 0.949 of the elements match; a pass needs 0.95" in (why_implausible(bounds, **figures(0.949)) or "")
    assert bounds_of(layer(without("share")), AXES, {}, None, cold_l2=True, timer="events").matched_ratio == 1.0


def figures(matched: float) -> dict[str, float | None]:
    times = {"latency_us": None, "ci_low_us": None, "ci_high_us": None}
    return {**times, "rel_fro": None, "worst_row_rel": None, "matched_ratio": matched}
