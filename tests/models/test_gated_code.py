"""Gated MLPs are known by the structure of their code, and served if a probe gives the bits of a Definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tilegym_db import Catalog, patched
from tilegym_db.models.gated_code import gated_code

pytestmark = pytest.mark.slow


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3, self.w2 = nn.Linear(64, 48), nn.Linear(64, 48), nn.Linear(48, 64)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.w2(functional.silu(self.w1(states)) * self.w3(states))
        return out


class InSteps(Gated):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.GELU(approximate="tanh")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Three steps, and the product in the other order."""
        gate = self.act(self.w1(x))
        product = self.w3(x) * gate
        out: torch.Tensor = self.w2(product)
        return out


class OfReLU(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(functional.relu(self.w1(x)) * self.w3(x))  # type: ignore[no-any-return]


class Clamped(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x).clamp(max=1))  # type: ignore[no-any-return]


class OneProjection(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w1(x))  # type: ignore[no-any-return]


class TwiceUsed(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.w1(x)
        return self.w2(functional.silu(gate) * self.w3(gate))  # type: ignore[no-any-return]


class DoesMore(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = x.sum()
        extra = self.w1(x)  # noqa: F841
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))  # type: ignore[no-any-return]


class Unused(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        extra = self.w1(x)  # noqa: F841
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))  # type: ignore[no-any-return]


class Reassigned(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("cls", "found"),
    [
        (Gated, ("w1", "w3", "w2", "")),
        (InSteps, ("w1", "w3", "w2", "act")),
        (OfReLU, ("w1", "w3", "w2", "")),
        (Clamped, None),
        (OneProjection, None),
        (TwiceUsed, None),
        (Reassigned, None),
        (DoesMore, None),
        (Unused, None),
        (nn.Linear, None),
    ],
)
def test_the_structure_is_that_of_a_gated_mlp_or_not(cls: Any, found: Any) -> None:
    assert gated_code(cls.forward) == found


@pytest.mark.parametrize(("cls", "op"), [(Gated, "swiglu"), (InSteps, "gelu_tanh_and_mul")])
def test_projections_of_any_name_are_served(cls: Any, op: str, kernels: Catalog) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(cls()).eval(), torch.randn(2, 5, 64)
    with torch.no_grad():
        stock = model(x)
        with patched(model, catalog=kernels) as handle:
            assert torch.equal(model(x), stock)
            (name,) = [name for name in ("states", "x") if name in cls.forward.__code__.co_varnames]
            assert torch.equal(model[0](**{name: x}), stock)
    assert handle.report().hits()[op] == 1


def test_another_activation_is_left_alone(kernels: Catalog) -> None:
    with patched(nn.Sequential(OfReLU()), catalog=kernels) as handle:
        (site,) = handle.report().sites
    assert "are not the bits of" in site.reason


def test_lfm2_is_served(kernels: Catalog, build: Any, prompt: Any, logits: Any) -> None:
    from transformers import Lfm2Config, Lfm2ForCausalLM

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = Lfm2Config(**sizes, num_hidden_layers=2, layer_types=["conv", "full_attention"], pad_token_id=0)
    model = Lfm2ForCausalLM(config).eval()
    stock = logits(model, prompt())
    with patched(model, catalog=kernels) as handle:
        assert torch.equal(logits(model, prompt()), stock)
    assert handle.report().hits()["swiglu"] == 2
