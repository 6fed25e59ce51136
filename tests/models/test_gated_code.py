"""Gated MLPs are known by the structure of their code, and served if a probe gives the bits of a Definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional

from tilegym_db import Catalog, patched
from tilegym_db.models.gate_product import gate_product, gated_code

pytestmark = [pytest.mark.slow, pytest.mark.sweep]


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


class ByLayer(Gated):
    """A second argument, a multiplier before the activation, and a norm after the product, which comes last in the source."""

    def __init__(self) -> None:
        super().__init__()
        self.act, self.norm, self.factor = nn.SiLU(), nn.LayerNorm(48), 0.7

    def forward(self, x: torch.Tensor, layer: int = 0) -> torch.Tensor:
        up = self.w3(x).clamp(min=-1, max=1)
        out: torch.Tensor = self.w2(self.norm(up * self.act(self.w1(x) * self.factor))) * self.factor
        return out + layer


class InVariables(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = functional.silu(self.w1(x))
        up = self.w3(x)
        product = functional.dropout(gate * up, 0.5, training=self.training)
        return self.w2(product)  # type: ignore[no-any-return]


class UsedTwice(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = functional.silu(self.w1(x))
        return self.w2(gate * self.w3(x) + gate)  # type: ignore[no-any-return]


class OfTwoProducts(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, two = functional.silu(self.w1(x)) * self.w3(x), functional.silu(self.w3(x)) * self.w1(x)
        return self.w2(one + two)  # type: ignore[no-any-return]


class OfVectors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.silu(x) * self.weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cls", [Clamped, OneProjection, DoesMore, ByLayer, InVariables])
def test_a_product_in_the_middle_is_served(cls: Any, dtype: torch.dtype, kernels: Catalog) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(cls()).to(dtype).eval(), torch.randn(2, 5, 64, dtype=dtype)
    forward = cls.forward
    with torch.no_grad():
        stock = model(x)
        with patched(model, catalog=kernels) as handle:
            assert torch.equal(model(x), stock)
        assert torch.equal(model(x), stock)
    assert handle.report().hits()["swiglu"] == 1
    assert cls.forward is forward
    assert type(model[0]) is cls


@pytest.mark.parametrize("cls", [UsedTwice, OfTwoProducts, OfVectors])
def test_other_products_are_left_alone(cls: Any) -> None:
    assert gate_product(cls()) is None


def test_a_kernel_answers_for_a_product(poison: Catalog) -> None:
    model = nn.Sequential(ByLayer()).eval()
    with torch.no_grad(), patched(model, catalog=poison, ops=["swiglu"]):
        assert model(torch.randn(2, 5, 64)).isnan().any()


def test_a_product_trains_with_the_gradients_of_stock(training_kernels: Catalog) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(ByLayer()).train(), torch.randn(2, 5, 64)

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(x).square().mean().backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    stock = gradients()
    with patched(model, catalog=training_kernels) as handle:
        found = gradients()
    assert handle.report().hits()["swiglu_backward"] == 1
    for got, want in zip(found, stock, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


def test_hooks_and_replaced_activations_of_a_product_run_stock(kernels: Catalog) -> None:
    model, x, seen = nn.Sequential(ByLayer()).eval(), torch.randn(2, 5, 64), []
    with torch.no_grad(), patched(model, catalog=kernels) as handle:
        hook = model[0].act.register_forward_hook(lambda *_: seen.append(1))
        model(x)
        hook.remove()
        model[0].act = nn.ReLU()
        served = model(x)
    with torch.no_grad():
        assert torch.equal(served, model(x))
    assert seen == [1]
    assert handle.report().hits()["swiglu"] == 0


MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "seed_oss": ("SeedOssConfig", "SeedOssForCausalLM", {}),
    "deepseek_v4": ("", "", {}),
    "llama4": ("Llama4TextConfig", "Llama4ForCausalLM", {"num_local_experts": 2, "intermediate_size_mlp": 48}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_products_of_models_are_served(
    name: str, dtype: torch.dtype, kernels: Catalog, build: Any, prompt: Any, logits: Any
) -> None:
    config, cls, changes = MODELS[name]
    if config:
        torch.manual_seed(0)
        sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
        model = getattr(transformers, cls)(getattr(transformers, config)(**sizes, **changes)).to(dtype).eval()
    else:
        model = build(name, dtype)
    stock = logits(model, prompt(2))
    with patched(model, catalog=kernels, ops=["swiglu"]) as handle:
        assert torch.equal(logits(model, prompt(2)), stock)
    assert handle.report().hits()["swiglu"] == 2
