from __future__ import annotations

from dataclasses import replace

import pytest

from tilegym_db.catalog import Catalog
from tilegym_db.paths import shipped_root
from tilegym_db.records import Definition
from tilegym_db.records.definition import LIMITS, Limits, limits_for

CATALOG = Catalog((shipped_root(),))
REASON = "because the test says so"


def test_limits_grow_with_the_coarseness_of_the_dtype():
    ordered = ["float64", "float32", "tf32", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float4_e2m1"]
    taus = [LIMITS[name].tau for name in ordered]
    assert taus == sorted(taus)
    assert LIMITS["float16"].tau < LIMITS["bfloat16"].tau


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint8", "bool", "float8_e8m0fnu"])
def test_integers_booleans_and_scales_have_no_room(dtype, operator):
    assert limits_for(operator(), dtype) is None


def test_tf32_is_allowed_only_in_declared_float32_products(operator):
    assert limits_for(CATALOG.definition("gemm"), "float32", "tf32") == LIMITS["tf32"]
    assert limits_for(operator(), "float32", "tf32") == LIMITS["float32"]
    assert limits_for(operator(), "float32") == LIMITS["float32"]
    assert limits_for(operator(), "float16", "tf32") == LIMITS["float16"]


def test_definition_overrides_only_what_it_names_for_its_dtype(operator):
    definition = operator(tolerance={"bfloat16": {"tau": 0.01, "reason": REASON}})
    assert limits_for(definition, "bfloat16") == Limits(0.01, LIMITS["bfloat16"].rtol, LIMITS["bfloat16"].a)
    assert limits_for(definition, "float32") == LIMITS["float32"]


def test_absolute_error_is_forgiven_only_if_a_definition_says_so(operator):
    assert all(limits.atol == 0 for limits in LIMITS.values())
    definition = operator(tolerance={"bfloat16": {"atol": 1e-6, "reason": REASON}})
    assert limits_for(definition, "bfloat16") == replace(LIMITS["bfloat16"], atol=1e-6)


def test_an_override_of_float32_does_not_widen_declared_tf32():
    tolerance = {"float32": {"tau": 2e-5, "reason": REASON}}
    definition = Definition.from_dict({**CATALOG.definition("gemm").to_dict(), "tolerance": tolerance})
    assert limits_for(definition, "float32").tau == 2e-5
    assert limits_for(definition, "float32", "tf32").tau >= LIMITS["tf32"].tau


def test_the_scales_of_a_quantiser_are_compared_bit_for_bit():
    casts = [record for record in CATALOG.definitions.values() if record.op_type == "quant" and record.codes]
    assert casts
    for definition in casts:
        assert limits_for(definition, "float32") is None
        assert limits_for(definition, "float8_e4m3fn").codes == 8


def test_scales_of_computed_values_may_be_off_as_declared():
    assert limits_for(CATALOG.definition("swiglu_and_per_token_cast"), "float32").rtol == 2e-6


def test_a_float32_output_beside_no_codes_keeps_its_room():
    assert limits_for(CATALOG.definition("mhc_sinkhorn"), "float32") == LIMITS["float32"]
