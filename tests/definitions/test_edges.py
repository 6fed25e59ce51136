"""What the descriptions promise about zero rows, infinities, ties and in-place tensors, checked on the references."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilegym_db.catalog import Catalog
from tilegym_db.verify.reference import run_reference

INF = float("inf")


def outputs(catalog: Catalog, name: str, *values: Any) -> dict[str, torch.Tensor]:
    """The reference's outputs for the given inputs, in order."""
    definition = catalog.definition(name)
    return run_reference(definition, dict(zip(definition.inputs, values, strict=True)))


def test_rms_norm_of_a_zero_row_is_zero_and_nan_stays_in_its_row(catalog: Catalog) -> None:
    x = torch.ones(3, 8)
    x[0] = 0
    x[1, 3] = torch.nan
    out = outputs(catalog, "rms_norm", x, torch.full((8,), 2.0), 1e-5)["out"]
    assert out[0].eq(0).all()
    assert out[1].isnan().all()
    torch.testing.assert_close(out[2], torch.full((8,), 2.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rms_norm_rounds_before_it_multiplies_with_the_weight(dtype: torch.dtype, catalog: Catalog) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(64, 64, generator=generator).to(dtype), torch.randn(64, generator=generator).to(dtype)
    out = outputs(catalog, "rms_norm", x, weight, 1e-5)["out"]
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
    assert torch.equal(out, (normed.to(dtype).float() * weight.float()).to(dtype))
    assert not torch.equal(out, (normed * weight.float()).to(dtype))


def test_fused_add_rms_norm_normalises_the_rounded_sum(catalog: Catalog) -> None:
    x = torch.full((1, 4), 1.0, dtype=torch.bfloat16)
    residual = torch.tensor([[2.0**-9, 0.0, -1.0, 1.0]], dtype=torch.bfloat16)
    result = outputs(catalog, "fused_add_rms_norm", x, residual, torch.ones(4, dtype=torch.bfloat16), 1e-6)
    assert result["residual_out"].tolist() == [[1.0, 1.0, 0.0, 2.0]]
    assert result["out"][0, 0] == result["out"][0, 1]
    assert residual[0, 3] == 1.0  # the reference works on a copy


@pytest.mark.parametrize("name", ["silu_and_mul", "swiglu"])
def test_gate_saturates_without_nan(name: str, catalog: Catalog) -> None:
    gate, up = torch.tensor([[-1e4, 1e4, INF, -INF]]), torch.ones(1, 4)
    inputs = (torch.cat((gate, up), dim=-1),) if name == "silu_and_mul" else (gate, up)
    out = outputs(catalog, name, *inputs)["out"][0]
    assert out[0] == 0
    assert torch.signbit(out[0])
    assert out[1] == 1e4
    assert out[2] == INF
    assert out[3].isnan()


def test_rope_reads_both_halves_of_the_tables(catalog: Catalog) -> None:
    q = k = torch.tensor([1.0, 10.0]).view(1, 1, 1, 2)
    cos, sin = torch.tensor([[[2.0, 3.0]]]), torch.tensor([[[5.0, 7.0]]])
    assert outputs(catalog, "rope_neox", q, k, cos, sin)["q_out"].flatten().tolist() == [2 - 50, 30 + 7]


def test_softmax_of_infinities(catalog: Catalog) -> None:
    x = torch.tensor([[-INF, 0.0, 0.0], [-INF, -INF, -INF], [INF, 0.0, 0.0]])
    out = outputs(catalog, "softmax", x)["out"]
    assert out[0].tolist() == [0.0, 0.5, 0.5]
    assert out[1:].isnan().all()


def test_topk_gate_prefers_the_smaller_index_of_equal_scores(catalog: Catalog) -> None:
    scores = torch.zeros(2, 12)
    scores[1, 9], scores[1, 0] = 1.0, -INF
    chosen = outputs(catalog, "topk_gate", scores)["topk_idx"]
    assert chosen.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7], [9, 1, 2, 3, 4, 5, 6, 7]]


@pytest.mark.parametrize("name", ["per_token_cast", "per_block_cast", "per_channel_cast"])
def test_cast_of_zeros_has_the_smallest_scale(name: str, catalog: Catalog) -> None:
    result = outputs(catalog, name, torch.zeros(128, 192, dtype=torch.bfloat16), False)
    assert result["out"].float().eq(0).all()
    torch.testing.assert_close(result["scale"], torch.full_like(result["scale"], 1e-4 / 448), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["per_token_cast", "per_block_cast", "per_channel_cast"])
def test_rounded_scale_is_the_next_power_of_two(name: str, catalog: Catalog) -> None:
    x = torch.full((128, 128), 448.0)
    assert set(outputs(catalog, name, x, True)["scale"].flatten().tolist()) == {1.0}
    slightly_more = outputs(catalog, name, x * (1 + 2**-20), True)
    assert set(slightly_more["scale"].flatten().tolist()) == {2.0}
    assert set(slightly_more["out"].float().flatten().tolist()) == {224.0}


def test_batched_transpose_keeps_every_bit(catalog: Catalog) -> None:
    payload = torch.tensor([0x7FC1, 0x8000 - 0x10000, 0x0001, 0x3F80], dtype=torch.int16).view(torch.bfloat16)
    out = outputs(catalog, "batched_transpose", payload.view(1, 1, 4))["out"]
    assert torch.equal(out.view(torch.int16).flatten(), payload.view(torch.int16))


def test_engram_gate_of_orthogonal_key_is_a_half(catalog: Catalog) -> None:
    hidden, key = torch.zeros(1, 1, 4, dtype=torch.bfloat16), torch.zeros(1, 1, 4, dtype=torch.bfloat16)
    hidden[..., 0], key[..., 1] = 1, 1
    ones = torch.ones(1, 4, dtype=torch.bfloat16)
    out = outputs(catalog, "engram_gate_fwd", hidden, key, ones, ones, ones, 1e-6, 1e-20)["out"]
    assert out.flatten().tolist() == [1.5, 0.5, 0.5, 0.5]


def test_sinkhorn_ends_with_a_column_step(catalog: Catalog) -> None:
    z = torch.randn(16, 4, 4, generator=torch.Generator().manual_seed(0))
    one, many = (outputs(catalog, "mhc_sinkhorn", z, repeat, 1e-6)["out"] for repeat in (1, 20))
    torch.testing.assert_close(one.sum(-2), torch.ones(16, 4), rtol=0, atol=1e-5)
    assert (one.sum(-1) - 1).abs().max() > 0.1
    torch.testing.assert_close(many.sum(-1), torch.ones(16, 4), rtol=0, atol=1e-3)
