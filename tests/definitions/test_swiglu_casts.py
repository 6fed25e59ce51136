"""The activation of experts with its casts for training: every bfloat16, operands that are cut, no rows at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from swiglu_rows import backward_inputs

from tilegym_db.backends.load import load_entry
from tilegym_db.catalog import Catalog
from tilegym_db.verification.oracle import run_reference

PER_CHANNEL = ["swiglu_and_per_channel_cast", "swiglu_and_per_channel_cast_transpose"]
BACKWARD = "swiglu_backward_and_per_token_cast"
OPEN = 64.0
"""A gate whose silu is the gate itself: exp(-64) is nothing beside one."""


def same(found: Any, wanted: Any) -> bool:
    """Whether all bytes are equal."""
    pairs = list(zip(found, wanted, strict=True))
    return all(
        torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8)) for got, want in pairs
    )


def every_bfloat16() -> torch.Tensor:
    """Each bfloat16 that is finite 64 times over, in columns of 128 neighbours and in such that have all exponents."""
    every = torch.arange(1 << 16).to(torch.int16).view(torch.bfloat16)
    every = torch.where(torch.isfinite(every * OPEN), every, 0)
    return torch.cat([every.view(512, 128).t(), every.view(128, 512)], dim=1).contiguous()


@pytest.mark.parametrize("round_scale", [False, True])
@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("name", PER_CHANNEL)
@pytest.mark.records("name")
def test_open_gate_casts_every_bfloat16_as_the_cast_alone(
    name: str, group: int, round_scale: bool, catalog: Catalog
) -> None:
    up = every_bfloat16()
    alone = catalog.definition("per_channel_cast_and_transpose")
    codes, scale = run_reference(alone, {"x": up * OPEN, "group": group, "round_scale": round_scale}).values()
    wanted = (codes if name.endswith("transpose") else codes.T, scale)
    x = torch.cat([torch.full_like(up, OPEN), up], dim=1)
    inputs = {"x": x, "group": group, "limit": float("inf"), "round_scale": round_scale}
    assert same(run_reference(catalog.definition(name), inputs).values(), wanted)
    assert same(load_entry(catalog.solution(f"{name}_stock"))(*inputs.values()), wanted)


@pytest.mark.parametrize("name", PER_CHANNEL)
@pytest.mark.records("name")
def test_the_activation_of_every_gate_is_the_nearest_bfloat16(name: str, catalog: Catalog) -> None:
    gate = torch.arange(1 << 16).to(torch.int16).view(torch.bfloat16)
    gate = torch.where(torch.isfinite(gate) & (gate.abs() < 80), gate, 0).view(128, 512)
    inputs = {"x": torch.cat([gate, torch.ones_like(gate)], dim=1), "group": 128, "limit": 1e30, "round_scale": True}
    definition = catalog.definition(name)
    codes, scale = run_reference(definition, inputs).values()
    found = (codes.T if name.endswith("transpose") else codes).double() * scale.double()
    exact = torch.nn.functional.silu(gate.double()).bfloat16().double()
    nearest = (exact / scale.double()).float().to(torch.float8_e4m3fn).double() * scale.double()
    assert (found != nearest).double().mean() < 1e-3  # silu in float32 lies beside a tie


def outputs_of(catalog: Catalog, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The reference's outputs, which stock code gives as well."""
    definition = catalog.definition(BACKWARD)
    found = run_reference(definition, inputs)
    stock = dict(zip(found, load_entry(catalog.solution(f"{BACKWARD}_stock"))(*inputs.values()), strict=True))
    for name, value in found.items():
        torch.testing.assert_close(stock[name].float(), value.float(), rtol=1e-5, atol=1e-6)
    return found


def test_without_rows_the_gradients_of_all_weights_are_zero(catalog: Catalog) -> None:
    found = outputs_of(catalog, backward_inputs(0, 5))
    assert found["grad_weights"].tolist() == [[0.0] * 3] * 5
    assert found["grad_x"].shape == (0, 128)


def test_choices_and_rows_without_a_partner_have_no_gradient(catalog: Catalog) -> None:
    inputs = backward_inputs(30, 10)
    found = outputs_of(catalog, inputs)
    assert torch.equal(found["grad_weights"] == 0, inputs["row_of_choice"] < 0)
    idle = inputs["weight_of_row"] < 0
    assert idle.any()
    for name in ("out", "grad_x", "grad_x_codes"):
        assert not found[name][idle].float().any()
    assert (found["grad_x_scale"][idle] == 2.0**-22).all()  # the floor over 448, as a power of two


def test_clipped_operands_have_no_gradient_unless_at_the_limit(catalog: Catalog) -> None:
    inputs = backward_inputs(4, 4, limit=1.0)
    inputs["x_scale"] = torch.full_like(inputs["x_scale"], 0.25)
    inputs["x"] = torch.tensor([[4.0, 4.5, -4.5, 2.0] * 16 + [4.0, 4.5, -4.0, -4.5] * 16] * 4).to(torch.float8_e4m3fn)
    inputs["grad_out"] = torch.ones_like(inputs["grad_out"])
    grad = outputs_of(catalog, inputs)["grad_x"][inputs["weight_of_row"] >= 0].float()
    assert ((grad[:, :64] != 0) == torch.tensor([True, False, True, True] * 16)).all()
    assert ((grad[:, 64:] != 0) == torch.tensor([True, False, True, False] * 16)).all()
