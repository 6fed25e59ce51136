"""Norms and rotations in other words: found by what they hold and compute, served with the bits of stock, trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from tilegym_db import Catalog, patch, patched

pytestmark = pytest.mark.sweep

SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
IMAGES = {"image_size": 16, "patch_size": 8, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2}
IMAGES |= {"num_attention_heads": 4, "num_channels": 3}
GEMMA4 = {
    **SMALL,
    "global_head_dim": 32,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 16,
    "vocab_size_per_layer_input": 96,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 0,
}
# name -> (config class, model class, config, Definitions of its norms and rotations with the calls of one forward)
MODELS: dict[str, tuple[str, str, dict[str, Any], dict[str, int]]] = {
    "gemma4": (
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        GEMMA4,
        {"rms_norm_fp32": 14, "fused_add_rms_norm_fp32": 2, "rms_norm": 2, "rope_neox_single": 4},
    ),
    "llama4": (
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {**SMALL, "num_local_experts": 2, "intermediate_size_mlp": 48},
        {"rms_norm": 6, "fused_add_rms_norm": 3, "rope_complex_pairs": 2},
    ),
    "nanochat": ("NanoChatConfig", "NanoChatForCausalLM", SMALL, {"rms_norm": 7, "fused_add_rms_norm": 3}),
    "helium": (
        "HeliumConfig",
        "HeliumForCausalLM",
        SMALL,
        {"rms_norm_fp32": 2, "fused_add_rms_norm_fp32": 3, "rope_pairs": 2},
    ),
    "cohere": (
        "CohereConfig",
        "CohereForCausalLM",
        {**SMALL, "use_qk_norm": False},
        {"layer_norm_no_bias": 3, "rope_interleaved_fp32": 2},
    ),
    "olmo": ("OlmoConfig", "OlmoForCausalLM", SMALL, {"layer_norm_no_bias": 5, "rope_neox_fp32": 2}),
    "ernie": ("Ernie4_5Config", "Ernie4_5ForCausalLM", SMALL, {"rope_pairs_fp32": 2}),
    "modernbert": (
        "ModernBertConfig",
        "ModernBertModel",
        {**SMALL, "cls_token_id": 1, "sep_token_id": 2, "eos_token_id": 2},
        {"rope_neox_fp32": 2},
    ),
    "dinov3": ("DINOv3ViTConfig", "DINOv3ViTModel", IMAGES, {"rope_neox": 2}),
    "pixtral": ("PixtralVisionConfig", "PixtralVisionModel", {**IMAGES, "head_dim": 16}, {"rope_neox": 2}),
}

DTYPES = [torch.float32, torch.bfloat16]


def made(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """Build a tiny model in eval mode whose norms have random weights."""
    config, cls, changes, _ = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, cls)(getattr(transformers, config)(**changes))
    for parameter_name, parameter in model.named_parameters():
        if "norm" in parameter_name:
            nn.init.normal_(parameter, 1.0, 0.3)
    return model.to(dtype).eval()


def output(model: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    if model.main_input_name == "pixel_values":
        found: torch.Tensor = model(torch.randn(2, 3, 16, 16, generator=generator).to(model.dtype))[0]
        return found
    found = model(torch.randint(3, 96, (2, 9), generator=generator))[0]
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_model_has_stock_bits_and_is_served(name: str, dtype: torch.dtype, kernels: Catalog) -> None:
    model = made(name, dtype)
    with torch.no_grad():
        stock = output(model)
        with patched(model, catalog=kernels) as handle:
            served = output(model)
        assert torch.equal(output(model), stock)
    if "layer_norm_no_bias" in MODELS[name][3] and dtype == torch.float32:  # written out, in another order of additions
        torch.testing.assert_close(served, stock, rtol=1e-5, atol=1e-6)
    elif dtype == torch.float32 or name not in ("cohere", "olmo"):
        assert torch.equal(served, stock)
    hits = handle.report().hits()
    expected = MODELS[name][3]
    assert {definition: hits.get(definition) for definition in expected} == expected


@pytest.mark.parametrize("op", ["rms_norm", "rms_norm_fp32", "rope_neox_single"])
def test_kernels_answer_in_gemma4(op: str, poison: Catalog) -> None:
    model = made("gemma4")
    with torch.no_grad():
        stock = output(model)
        with patched(model, catalog=poison, ops=[op]):
            assert not torch.equal(output(model), stock)  # attention turns scores of NaN into zeros


def gradients(model: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    output(model).float().square().mean().backward()
    return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}


@pytest.mark.parametrize("name", ["gemma4", "llama4", "olmo", "modernbert"])
def test_model_trains_with_the_gradients_of_stock(name: str, training_kernels: Catalog) -> None:
    model = made(name).train()
    stock = gradients(model)
    with patched(model, catalog=training_kernels):
        found = gradients(model)
    assert found.keys() == stock.keys()
    for parameter, want in stock.items():
        torch.testing.assert_close(found[parameter], want, rtol=1e-3, atol=1e-5)


def test_unweighted_norm_rounds_its_scale(kernels: Catalog, build: Any, prompt: Any, logits: Any) -> None:
    model, ids = build("deepseek_v4", torch.bfloat16), prompt(2)
    stock = logits(model, ids)
    with patched(model, catalog=kernels) as handle:
        assert torch.equal(logits(model, ids), stock)
    assert handle.report().hits()["rms_norm_unweighted"]


class Norm(nn.Module):
    """A norm of the usual kind, whose weight has another name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.tiny = nn.Parameter(torch.randn(64)), 1e-6

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        wide = states.float()
        scale = (wide.pow(2).mean(-1, keepdim=True) + self.tiny) ** -0.5 if self.tiny else torch.rsqrt(wide)
        return self.weight * (wide * scale).to(states.dtype)


class Counted(Norm):
    def forward(self, states: torch.Tensor) -> torch.Tensor:
        self.seen = states.shape
        return super().forward(states)


class Long(Norm):
    def forward(self, states: torch.Tensor) -> torch.Tensor:
        wide = states.float()
        if states.shape[0] > 100:
            wide = wide * 2
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.tiny)).to(states.dtype)


class TwoNumbers(Norm):
    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        wide = states.float() * self.factor
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.tiny)).to(states.dtype)


class Dropping(Norm):
    def forward(self, states: torch.Tensor) -> torch.Tensor:
        wide = nn.functional.dropout(states.float(), 0.1, self.training)
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.tiny)).to(states.dtype)


def sites_of(module: nn.Module, catalog: Catalog) -> list[Any]:
    return list(patch(nn.Sequential(module, nn.LayerNorm(64)), catalog=catalog, dry_run=True).report().sites[:1])


class WithoutWeights(nn.LayerNorm):
    """A norm without weights whose forward calls that of its base."""

    def __init__(self) -> None:
        super().__init__(32, elementwise_affine=False)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return super().forward(states)


def test_norm_of_torch_without_weights_is_served(kernels: Catalog) -> None:
    for module in (nn.LayerNorm(32, elementwise_affine=False), WithoutWeights()):
        (site,) = sites_of(module, kernels)
        assert (site.definition, site.reason) == ("layer_norm_no_bias", "dry run")


def test_norm_of_any_text_is_served(kernels: Catalog) -> None:
    (site,) = sites_of(Norm(), kernels)
    assert (site.definition, site.reason) == ("rms_norm", "dry run")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Counted, "writes to an object"),
        (Long, "takes a decision by its arguments"),
        (TwoNumbers, "reads 2 numbers that may be its epsilon"),
        (Dropping, "uses dropout"),
    ],
)
def test_norm_that_does_more_stays_stock(make: Callable[[], nn.Module], reason: str, kernels: Catalog) -> None:
    (site,) = sites_of(make(), kernels)
    assert reason in site.reason


def test_weight_of_ones_is_made_once(kernels: Catalog) -> None:
    from tilegym_db.models.parts import norm

    model = made("nanochat")
    with torch.inference_mode(), patched(model, catalog=kernels):
        output(model)
        kept = dict(norm._held)
        output(model)
        assert norm._held == kept
    assert not any(value.is_inference() or value.requires_grad for value in kept.values())
