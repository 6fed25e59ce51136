"""Encoders, vision models and GPT-2: layer norms and activations without a gate, served and trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.models.t5.modeling_t5 import T5LayerNorm

from tilegym_db import Catalog, patch, patched
from tilegym_db.models.call_site import AUTOCAST
from tilegym_db.models.parts.norm import CAST_CALLS

pytestmark = pytest.mark.sweep

SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
_HALF = {"attention_heads": 4, "ffn_dim": 96}
# name -> (prefix of the classes in transformers, class, config, Definitions of its sites with the calls of one forward)
ENCODERS: dict[str, tuple[str, str, dict[str, Any], dict[str, int]]] = {
    "bert": (
        "Bert",
        "Model",
        SMALL,
        {"layer_norm": 1, "fused_add_layer_norm": 4, "gelu": 2, "attention_bidirectional": 2},
    ),
    "modernbert": (
        "ModernBert",
        "Model",
        {**SMALL, "pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2},
        {"layer_norm_no_bias": 5},
    ),
    "vit": (
        "ViT",
        "Model",
        {**SMALL, "image_size": 16, "patch_size": 8},
        {"layer_norm": 2, "fused_add_layer_norm": 3, "gelu": 2, "attention_bidirectional": 2},
    ),
    # Its patches are transposed, and so is the residual stream up to the first sum: until then, norms copy as stock code does.
    "siglip": (
        "SiglipVision",
        "Model",
        {**SMALL, "image_size": 16, "patch_size": 8},
        {"gelu_tanh": 3, "layer_norm": 3, "fused_add_layer_norm": 3, "attention_bidirectional": 2},
    ),
    "siglip_text": (
        "SiglipText",
        "Model",
        {**SMALL, "projection_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
        {"gelu_tanh": 2, "layer_norm": 2, "fused_add_layer_norm": 3},
    ),
    "t5": (
        "T5",
        "EncoderModel",
        {"vocab_size": 96, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4},
        {"rms_norm": 5},
    ),
    "clip": (
        "CLIPVision",
        "Model",
        {**SMALL, "image_size": 16, "patch_size": 8},
        {"quick_gelu": 2, "layer_norm": 3, "fused_add_layer_norm": 3, "attention_bidirectional": 2},
    ),
    "gpt2": (
        "GPT2",
        "LMHeadModel",
        {"vocab_size": 96, "n_embd": 64, "n_layer": 2, "n_head": 4},
        {"layer_norm": 2, "fused_add_layer_norm": 3, "gelu_new": 2},
    ),
    # Three sums of a layer of the decoder, and an "if" between them.
    "bart": (
        "Bart",
        "Model",
        {
            **{
                "vocab_size": 96,
                "d_model": 64,
                "encoder_layers": 2,
                "decoder_layers": 2,
                "max_position_embeddings": 64,
            },
            **{f"{half}_{name}": size for half in ("encoder", "decoder") for name, size in _HALF.items()},
        },
        {"layer_norm": 2, "fused_add_layer_norm": 10, "gelu": 4},
    ),
    "phi": ("Phi", "ForCausalLM", SMALL, {"layer_norm": 3, "gelu_new": 2}),
    "nemotron": ("Nemotron", "ForCausalLM", {**SMALL, "num_key_value_heads": 2, "head_dim": 16}, {"relu_squared": 2}),
}
DTYPES = [torch.float32, torch.bfloat16]


def build(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """Build a tiny model in eval mode, with random norms, so that a forgotten weight or bias shows."""
    prefix, suffix, config, _ = ENCODERS[name]
    torch.manual_seed(0)
    model = getattr(transformers, prefix + suffix)(getattr(transformers, f"{prefix}Config")(**config))
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm | T5LayerNorm):
            for parameter in module.parameters():
                torch.nn.init.normal_(parameter, 1.0, 0.3)
    return model.to(dtype).eval()


def inputs_of(model: Any) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator).to(model.dtype)}
    return {"input_ids": torch.randint(3, 96, (2, 9), generator=generator)}


def output(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(**inputs_of(model))[0]
    return found


def hits_of(handle: Any) -> dict[str, int]:
    return {name: count for name, count in handle.report().hits().items() if count}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ENCODERS)
def test_encoder_has_stock_bits_and_is_served(name: str, dtype: torch.dtype, kernels: Catalog) -> None:
    model = build(name, dtype)
    stock = output(model)
    with patched(model, catalog=kernels) as handle:
        assert torch.equal(output(model), stock)
    hits = hits_of(handle)
    expected = ENCODERS[name][3]
    assert {definition: hits.get(definition) for definition in expected} == expected
    assert torch.equal(output(model), stock)
    assert all("tilegym" not in str(vars(type(module))) for module in model.modules())


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_kernels_really_run_in_encoders(name: str, poison: Catalog) -> None:
    model = build(name)
    with patched(model, catalog=poison):
        assert output(model).isnan().any()
    assert not output(model).isnan().any()


def gradients(model: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(**inputs_of(model))[0].float().square().mean().backward()
    return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}


@pytest.mark.parametrize("name", ["bert", "vit", "gpt2", "siglip_text"])
def test_encoder_trains_with_the_gradients_of_stock(name: str, training_kernels: Catalog) -> None:
    model = build(name)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model.train()
    stock = gradients(model)
    with patched(model, catalog=training_kernels) as handle:
        found = gradients(model)
    assert found.keys() == stock.keys()
    for parameter, want in stock.items():
        torch.testing.assert_close(found[parameter], want, rtol=1e-4, atol=1e-6)
    hits = hits_of(handle)
    assert hits["layer_norm"] == hits["layer_norm_backward"] == 5
    activation = {"gpt2": "gelu_new", "clip": "quick_gelu", "siglip_text": "gelu_tanh"}.get(name, "gelu")
    assert hits[activation] == hits[f"{activation}_backward"] == 2


def test_biases_trained_alone_get_their_gradients(training_kernels: Catalog) -> None:
    model = build("clip").requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("layer_norm2.bias"))
    stock = gradients(model)
    with patched(model, catalog=training_kernels):
        found = gradients(model)
    assert found.keys() == stock.keys()
    assert len(stock) == 2
    for parameter, want in stock.items():
        torch.testing.assert_close(found[parameter], want, rtol=1e-4, atol=1e-6)


def test_transposed_input_of_a_layer_norm_is_copied_as_by_stock(training_kernels: Catalog) -> None:
    model, _ = own()
    x = torch.randn(2, 16, 9).transpose(1, 2).requires_grad_()

    def run() -> list[torch.Tensor]:
        out = model.first(x)
        return [out, *torch.autograd.grad(out.square().sum(), [x, *model.first.parameters()])]

    stock = run()
    with patched(model, catalog=training_kernels) as handle:
        found = run()
    assert found[0].stride() == stock[0].stride()
    for got, want in zip(found, stock, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert handle.report().hits()["layer_norm_backward"] == 1


class Own(torch.nn.Module):
    """Two norms, one without a bias, and an activation between two projections."""

    def __init__(self, activation: torch.nn.Module) -> None:
        super().__init__()
        self.first, self.second = torch.nn.LayerNorm(16), torch.nn.LayerNorm(16, bias=False)
        self.up, self.activation, self.down = torch.nn.Linear(16, 32), activation, torch.nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.second(self.down(self.activation(self.up(self.first(x)))))
        return found


def own(activation: torch.nn.Module | None = None) -> tuple[Any, torch.Tensor]:
    torch.manual_seed(0)
    return Own(activation or torch.nn.GELU()).eval(), torch.randn(3, 5, 16)


def definitions_of(model: torch.nn.Module) -> list[str]:
    return [site.definition for site in patch(model, dry_run=True).report().sites]


each_activation = pytest.mark.parametrize(
    ("activation", "definition"),
    [
        (torch.nn.GELU(), "gelu"),
        (torch.nn.GELU(approximate="tanh"), "gelu_tanh"),
        (transformers.activations.ACT2FN["gelu"], "gelu"),
        (transformers.activations.ACT2FN["gelu_pytorch_tanh"], "gelu_tanh"),
        (transformers.activations.ACT2FN["gelu_new"], "gelu_new"),
        (transformers.activations.ACT2FN["quick_gelu"], "quick_gelu"),
        (transformers.activations.ACT2FN["relu2"], "relu_squared"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)


@each_activation
def test_activation_is_found_by_code_and_settings(activation: Any, definition: str) -> None:
    model, _ = own(activation)
    assert definitions_of(model) == ["layer_norm", "layer_norm_no_bias", definition]


@each_activation
def test_one_graph_calls_the_kernel_of_an_activation(activation: Any, definition: str, kernels: Catalog) -> None:
    model, x = own(activation)
    with torch.no_grad():
        stock = model(x)
        with patched(model, catalog=kernels) as handle:
            compiled = torch.compile(model, backend="eager", fullgraph=True)(x)
    torch.testing.assert_close(compiled, stock)
    assert hits_of(handle)[definition] == 1


def test_methods_of_other_objects_are_settings_of_their_own(kernels: Catalog) -> None:
    def model_of(*ways: str) -> Any:
        modules = [transformers.activations.GELUActivation() for _ in ways]
        for module, way in zip(modules, ways, strict=True):
            module.act = torch.nn.GELU(approximate=way).forward
        return torch.nn.Sequential(*modules).eval()

    x = torch.randn(7, 16)
    for ways, changed in ((("none", "tanh"), "none"), (("none",), "tanh")):
        model = model_of(*ways)
        with torch.no_grad(), patched(model, catalog=kernels) as handle:
            stock = model_of(*ways)
            assert torch.equal(model(x), stock(x))
            assert hits_of(handle)["gelu"] == 1
            for one in (model, stock):
                one[0].act = torch.nn.GELU(approximate=changed).forward
            assert torch.equal(model(x), stock(x))


def test_activation_with_other_maths_stays_stock(kernels: Catalog) -> None:
    model, x = own(transformers.activations.ACT2FN["gelu_python"])
    stock = model(x)
    with torch.no_grad(), patched(model, catalog=kernels) as handle:
        assert torch.equal(model(x), stock)
    (site,) = [site for site in handle.report().sites if site.kind == "activation"]
    assert "are not the bits of" in site.reason


def test_activation_of_a_gated_mlp_is_left_to_it(kernels: Catalog) -> None:
    config = {**SMALL, "num_key_value_heads": 2, "head_dim": 16, "query_pre_attn_scalar": 16}
    torch.manual_seed(0)
    model = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**config)).eval()
    with patched(model, catalog=kernels) as handle:
        output(model)
    report = handle.report()
    assert "activation" not in {site.kind for site in report.sites}
    assert report.hits()["gelu_tanh_and_mul"] == 2


def test_activation_that_changes_after_the_patch_runs_stock(kernels: Catalog) -> None:
    model, x = own()
    with torch.no_grad(), patched(model, catalog=kernels) as handle:
        model.activation.approximate = "tanh"
        served = model(x)
    with torch.no_grad():
        assert torch.equal(served, model(x))
    assert handle.report().hits()["gelu"] == 0


def test_hooks_of_norms_and_activations_run(kernels: Catalog) -> None:
    model, x = own()
    seen: list[str] = []
    for name in ("first", "activation"):
        getattr(model, name).register_forward_hook(lambda module, *_: seen.append(type(module).__name__))
    with torch.no_grad():
        stock = model(x)
        with patched(model, catalog=kernels) as handle:
            assert torch.equal(model(x), stock)
    assert seen == ["LayerNorm", "GELU"] * 2
    assert hits_of(handle) == {"layer_norm": 1, "layer_norm_no_bias": 1, "gelu": 1}


def test_autocast_returns_the_dtypes_of_stock(kernels: Catalog) -> None:
    model, x = own(transformers.activations.ACT2FN["gelu_new"])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        stock = model(x)
        with patched(model, catalog=kernels) as handle:
            found = model(x)
    assert found.dtype == stock.dtype
    assert torch.equal(found, stock)
    assert not hits_of(handle)


def test_a_norm_of_torch_is_left_to_autocast(kernels: Catalog) -> None:
    model, x = torch.nn.Sequential(torch.nn.RMSNorm(16, eps=1e-6), torch.nn.LayerNorm(16)).eval(), torch.randn(3, 16)
    with torch.no_grad(), patched(model, catalog=kernels) as handle:
        for enabled in (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                model(x)
    assert hits_of(handle) == {"rms_norm_fp32": 1, "layer_norm": 1}
    assert [site.bypassed for site in handle.report().sites] == [{AUTOCAST: 1}] * 2


def test_autocast_on_a_gpu_returns_these_norms_in_float32() -> None:
    was = torch.is_autocast_enabled("cuda")
    with FakeTensorMode():
        x = torch.empty(2, 8, dtype=torch.bfloat16, device="cuda")
        torch.set_autocast_enabled("cuda", True)
        try:
            dtypes = {name: getattr(torch.nn.functional, name)(x, (8,)).dtype for name in CAST_CALLS}
        finally:
            torch.set_autocast_enabled("cuda", was)
    assert dtypes == dict.fromkeys(CAST_CALLS, torch.float32)


@pytest.mark.slow
def test_compiled_encoder_has_stock_values(kernels: Catalog) -> None:
    model, x = own()
    with torch.no_grad():
        stock = model(x)
        with patched(model, catalog=kernels) as handle:
            compiled: Callable[..., Any] = torch.compile(model, backend="eager", fullgraph=True)
            torch.testing.assert_close(compiled(x), stock)
    assert {"layer_norm", "layer_norm_no_bias", "gelu"} <= hits_of(handle).keys()
