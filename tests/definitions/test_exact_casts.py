"""Casts whose codes and scales are exact: edges of each format, and mistakes of rounding that must not pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilegym_db.backends.load import load_entry
from tilegym_db.catalog import Catalog
from tilegym_db.records import Definition
from tilegym_db.verification.comparison import check_outputs
from tilegym_db.verification.gates import EXACTLY
from tilegym_db.verification.oracle import run_reference

pytestmark = pytest.mark.records("name")  # where a test has one

CASTS = ["per_token_cast_ue8m0", "per_token_cast_fp4", "per_token_cast_e5m6"]
FP4_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def every_bfloat16() -> torch.Tensor:
    """Each finite bfloat16 once, in rows of 128 neighbours [512, 128]; as many rows again with all exponents in one."""
    every = torch.arange(1 << 16).to(torch.int16).view(torch.bfloat16)
    every = torch.where(torch.isfinite(every), every, 0)
    return torch.cat([every.view(512, 128), every.view(128, 512).t().contiguous().view(512, 128)])


def given(definition: Definition, x: torch.Tensor, round_scale: bool = True) -> dict[str, Any]:
    return {name: x if name == "x" else round_scale for name in definition.inputs}


def accepted(definition: Definition, inputs: dict[str, Any], outputs: dict[str, torch.Tensor]) -> dict[str, bool]:
    truth, dtypes = run_reference(definition, inputs), {"T": "bfloat16"}
    found = check_outputs(definition, dtypes, inputs, truth, outputs, dict.fromkeys(truth, EXACTLY))
    return {name: verdict.passed for name, verdict in found.items()}


def in_fp32(x: torch.Tensor) -> torch.Tensor:
    return x.float() * (1 + 2.0**-20)  # no bfloat16 any more, and no tie


@pytest.mark.parametrize("name", CASTS)
@pytest.mark.parametrize("widen", [torch.clone, in_fp32])
def test_formulation_and_stock_code_agree_on_every_bfloat16(name, widen, catalog: Catalog):
    definition = catalog.definition(name)
    inputs = given(definition, widen(every_bfloat16()))
    assert definition.self_test is not None
    independent = run_reference(definition, inputs, source=definition.self_test.independent)
    assert set(accepted(definition, inputs, independent).values()) == {True}
    stock = load_entry(catalog.solution(f"{name}_stock"))(*inputs.values())
    assert set(accepted(definition, inputs, dict(zip(definition.outputs, stock, strict=True))).values()) == {True}


@pytest.mark.parametrize(
    ("name", "find", "replace", "output"),
    [
        (
            "per_token_cast_ue8m0",
            "scaled.view(tokens",  # to three bits of mantissa, ties away from zero
            "(scaled.view(torch.int32) + 0x80000 & -0x100000).view(torch.float32).view(tokens",
            "out",
        ),
        ("per_token_cast_ue8m0", "clamp(min=1e-4)", "clamp(min=1e-10)", "scale"),
        ("per_token_cast_ue8m0", "(0, -groups % 4))", "(0, -groups % 4), value=1)", "scale"),
        ("per_token_cast_e5m6", "(code & 1) + (bits & 0x1FFFF) > 0x10000", "(bits & 0x1FFFF) >= 0x10000", "out"),
        ("per_token_cast_e5m6", "clamp(min=1e-4)", "clamp(min=1e-10)", "scale"),
        ("per_token_cast_fp4", "size > bound", "size >= bound", "out"),
        ("per_token_cast_fp4", "SMALLEST = 6 * 2.0**-126", "SMALLEST = 1e-4", "scale"),
        ("per_token_cast_fp4", "scale = round_up_to_power_of_two(scale)", "pass", "scale"),
    ],
)
def test_mistakes_in_rounding_floors_and_unused_bytes_fail(name, find, replace, output, catalog: Catalog):
    definition = catalog.definition(name)
    ties = torch.arange(64 * 128).view(64, 128).remainder(511).sub(255).to(torch.bfloat16)
    ties[3] = 0  # a row of zeros: the floor
    inputs = given(definition, ties)
    source = definition.reference.replace(find, replace)
    assert source != definition.reference
    verdicts = accepted(definition, inputs, run_reference(definition, inputs, source=source))
    assert not verdicts[output]


def dequantised_ue8m0(codes: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    exponents = words.contiguous().view(torch.uint8)[:, : -(-codes.shape[1] // 128)].int()
    scales = (exponents << 23).view(torch.float32).repeat_interleave(128, dim=1)
    return codes.double() * scales[:, : codes.shape[1]]


def dequantised_fp4(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1).long()
    values = FP4_VALUES[codes & 7] * torch.where(codes >= 8, -1.0, 1.0)
    return values.double() * scales.repeat_interleave(32, dim=1)[:, : codes.shape[1]]


def dequantised_e5m6(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    words = packed.contiguous().view(torch.int32).long().view(packed.shape[0], -1, 3) & 0xFFFFFFFF
    string = [
        (words[..., 0] << 16) + (words[..., 1] >> 16),
        ((words[..., 1] & 0xFFFF) << 32) + words[..., 2],
    ]  # 48 bits each
    codes = torch.stack([half >> place & 0xFFF for half in string for place in (36, 24, 12, 0)], dim=-1).flatten(1)
    return (codes << 4).to(torch.int16).view(torch.float16).double() * scales


DEQUANTISED = list(zip(CASTS, (dequantised_ue8m0, dequantised_fp4, dequantised_e5m6), strict=True))


@pytest.mark.parametrize(("name", "dequantise"), DEQUANTISED)
def test_casting_twice_changes_no_value_and_errors_have_no_sign(name, dequantise, catalog: Catalog):
    definition = catalog.definition(name)
    x = torch.randn(64, 576, generator=torch.Generator().manual_seed(2))
    once = dequantise(*run_reference(definition, given(definition, x)).values())
    again = dequantise(*run_reference(definition, given(definition, once.float())).values())
    assert torch.equal(once, again)
    below = float((once < x).double().mean() + (once == x).double().mean() / 2)
    assert abs(below - 0.5) < 10 / x.numel() ** 0.5


def test_fp4_rounds_ties_to_even_saturates_and_keeps_signed_zero(catalog: Catalog):
    definition = catalog.definition("per_token_cast_fp4")
    ties = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.0, -0.25, -5.0, -6.0]])
    packed, scale = run_reference(definition, given(definition, ties)).values()
    assert scale.tolist() == [[1.0]]
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten().tolist()
    assert codes == [0, 2, 2, 4, 4, 6, 6, 7, 8, 8, 14, 15]


def test_the_largest_bfloat16_saturates_no_scale(catalog: Catalog):
    largest = torch.full((1, 128), torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16)
    for name, dequantise in DEQUANTISED:
        definition = catalog.definition(name)
        found = dequantise(*run_reference(definition, given(definition, largest)).values())
        assert torch.isfinite(found).all()
        torch.testing.assert_close(found, largest.double(), rtol=0.3, atol=0)


def test_small_twelve_bit_codes_round_by_their_dropped_bits(catalog: Catalog):
    definition = catalog.definition("per_token_cast_e5m6")
    row = torch.tensor(
        [[65024.0, 2.0**-20, 2.0**-14 * 63 / 64, 2.0**-14, 2.0**-20 * 1.015, 2.0**-30, -(2.0**-15), 0.0]]
    )
    packed, scale = run_reference(definition, given(definition, row)).values()
    assert scale.tolist() == [[1.0]]
    found = dequantised_e5m6(packed, scale)[0].tolist()
    # 2^-20 * 1.015 is nearest to 2^-20, and yet goes up: its last 17 bits exceed half of what they count up to.
    assert found == [65024.0, 2.0**-20, 2.0**-14 * 63 / 64, 2.0**-14, 2.0**-19, 0.0, -(2.0**-15), 0.0]
