"""What is recognised, what is not, and the reason that reaches the report."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
import torch
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.llama import modeling_llama

from tilegym_db import Catalog, patch, patched


def reason_of(model: Any, module_class: str, catalog: Catalog, kind: str = "") -> str:
    """Why the one call site of a class, or of one of its kinds, stays stock."""
    sites = patch(model, catalog=catalog, dry_run=True).report().sites
    (reason,) = {site.reason for site in sites if site.module_class == module_class and (not kind or site.kind == kind)}
    return reason


def test_known_forward_with_another_activation_fails_the_probe(kernels: Catalog, build: Any) -> None:
    reason = reason_of(build(hidden_act="relu"), "LlamaMLP", kernels)
    assert reason == "the results of its probe are not the bits of swiglu or gelu_tanh_and_mul"
    reason = reason_of(build("phi3", hidden_act="gelu_pytorch_tanh"), "Phi3MLP", kernels)
    assert reason == "the results of its probe are not the bits of silu_and_mul"


def test_activation_decides_the_definition_of_a_gated_mlp(kernels: Catalog, build: Any) -> None:
    report = patch(build(hidden_act="gelu_pytorch_tanh"), catalog=kernels, dry_run=True).report()
    assert {site.definition for site in report.sites if site.kind == "mlp"} == {"gelu_tanh_and_mul"}


def test_norm_with_the_bits_of_another_fails_the_probe(restated: Any, build: Any) -> None:
    llama = {"fingerprint": "a7dfd4f03eb3ea7f", "attributes": {"eps": "variance_epsilon"}}
    restated("rms_norm", code=[])
    reason = reason_of(build(), "LlamaRMSNorm", restated("rms_norm_fp32", code=[llama]))
    assert reason == "the results of its probe are the bits of rms_norm, not of rms_norm_fp32 alone"


def of_the_variance(self: Any, x: Any) -> Any:
    return x * torch.rsqrt(x.var(-1, keepdim=True) + self.eps)


def test_a_norm_with_another_method_has_other_bits(
    kernels: Catalog, monkeypatch: pytest.MonkeyPatch, build: Any
) -> None:
    monkeypatch.setattr(modeling_gemma3.Gemma3RMSNorm, "_norm", of_the_variance)
    assert "are not the bits of" in reason_of(build("gemma3"), "Gemma3RMSNorm", kernels)


def test_two_activations_of_one_class_do_not_share_a_site(kernels: Catalog, build: Any) -> None:
    model = build()
    model.model.layers[1].mlp.act_fn = torch.nn.GELU(approximate="tanh")
    sites = patch(model, catalog=kernels, dry_run=True).report().sites
    assert {site.definition: site.modules for site in sites if site.kind == "mlp"} == {
        "swiglu": 1,
        "gelu_tanh_and_mul": 1,
    }


def test_second_rotary_function_of_a_forward_is_served(kernels: Catalog, logits: Any, build: Any, prompt: Any) -> None:
    model, ids = build("deepseek_v3", rope_interleave=False), prompt(2)
    stock = logits(model, ids)
    with patched(model, catalog=kernels) as handle:
        assert torch.equal(logits(model, ids), stock)
    assert handle.report().hits()["rope_neox"] == 2


def test_a_wrapped_forward_is_not_what_its_source_says(
    kernels: Catalog, monkeypatch: pytest.MonkeyPatch, build: Any
) -> None:
    original = modeling_llama.LlamaRMSNorm.forward
    doubled = functools.wraps(original)(lambda self, hidden_states: 2 * original(self, hidden_states))
    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", doubled)
    assert "wrapped by a decorator" in reason_of(build(), "LlamaRMSNorm", kernels)


def test_a_rotary_function_replaced_by_a_module_is_left_alone(
    kernels: Catalog, monkeypatch: pytest.MonkeyPatch, build: Any
) -> None:
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", torch.nn.Identity())
    assert "is of type Identity, neither a function" in reason_of(build(), "LlamaAttention", kernels, "rope")


def test_a_rotary_function_that_calls_another_one_has_other_bits(
    kernels: Catalog, monkeypatch: pytest.MonkeyPatch, build: Any
) -> None:
    def rotate_half(x: torch.Tensor) -> torch.Tensor:
        return torch.roll(x, 1)

    monkeypatch.setattr(modeling_llama, "rotate_half", rotate_half)
    assert "are the bits of no definition" in reason_of(build(), "LlamaAttention", kernels, "rope")


def test_a_rotary_function_of_another_package_stays_stock(
    kernels: Catalog, monkeypatch: pytest.MonkeyPatch, build: Any
) -> None:
    original = modeling_llama.apply_rotary_pos_emb

    def fused(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
        return original(q, k, cos, sin, unsqueeze_dim)

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", fused)
    assert "is that of" in reason_of(build(), "LlamaAttention", kernels, "rope")


def test_weights_that_are_not_in_memory_are_not_probed(kernels: Catalog, build: Any) -> None:
    sites = patch(build().to("meta"), catalog=kernels).report().sites
    reason = "its weights are not in memory"
    assert {site.reason for site in sites} == {reason, f"its post_attention_layernorm stays stock: {reason}"}


def test_quantised_norm_weights_stay_stock(kernels: Catalog, build: Any) -> None:
    model = build()
    for module in model.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            module.weight = torch.nn.Parameter(torch.ones(64, dtype=torch.int8), requires_grad=False)
    assert "torch.int8, not plain floating point" in reason_of(model, "LlamaRMSNorm", kernels)


def test_discovery_changes_nothing_and_runs_no_hook(kernels: Catalog, build: Any) -> None:
    model, seen = build(), []
    for module in model.modules():
        module.register_forward_hook(lambda *args: seen.append(args))
    weights, state = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    handle = patch(model, catalog=kernels, dry_run=True)
    assert {site.reason for site in handle.report().sites} == {"dry run"}
    assert {site.definition for site in handle.report().sites} == {
        "cross_entropy",
        "rms_norm",
        "fused_add_rms_norm",
        "swiglu",
        "rope_neox",
        "attention_prefill",
        "attention_decode",
        "attention_masked_prefill",
        "attention_masked_decode",
        "kv_cache_concat",
        "kv_cache_prefill",
    }
    assert not seen
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_the_report_is_data_and_text(kernels: Catalog, logits: Any, build: Any, prompt: Any) -> None:
    model = build()
    with patched(model, catalog=kernels) as handle:
        logits(model, prompt())
        model.model.norm(torch.ones(1, 64))
    content = json.loads(json.dumps(handle.report().to_dict()))
    (norm,) = [site for site in content["sites"] if site["definition"] == "rms_norm"]
    assert (norm["modules"], norm["counts"]["kernel_calls"], list(norm["bypassed"].values())) == (5, 2, [1])
    text = handle.report().text(220)
    assert "rms_norm_cpu" in text
    assert "the call may need a gradient" in text
