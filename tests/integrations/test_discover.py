"""What is recognised, what is not, and the reason that reaches the report."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
import torch
import transformers
from transformers.models.llama import modeling_llama

from tilegym_db import Catalog, patch, patched

MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# model -> what is served, and what is not (class -> part of the reason)
OTHERS: dict[str, tuple[set[str], dict[str, str]]] = {
    "Gemma3": ({"rope_neox"}, {"Gemma3RMSNorm": "norm forward", "Gemma3MLP": "does not give the bits of swiglu"}),
    "GptOss": (set(), {"GptOssRMSNorm": "norm forward", "GptOssAttention": "apply_rotary_pos_emb"}),
    "Olmo2": ({"swiglu"}, {"Olmo2RMSNorm": "norm forward", "Olmo2Attention": "apply_rotary_pos_emb"}),
    "Phi3": ({"rms_norm"}, {"Phi3MLP": "mlp forward", "Phi3Attention": "apply_rotary_pos_emb"}),
    "Qwen3Moe": ({"rms_norm", "rope_neox"}, {"Qwen3MoeExperts": "wrapped by a decorator"}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_variants_that_are_not_recognised_stay_stock_with_a_reason(
    name: str, kernels: Catalog, logits: Any, prompt: Any, sizes: Any
) -> None:
    config_class = getattr(transformers, f"{name}TextConfig" if name == "Gemma3" else f"{name}Config")
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config_class(**sizes, **MOE)).eval()
    ids, (served, reasons) = prompt(2), OTHERS[name]
    stock = logits(model, ids)
    with patched(model, catalog=kernels) as handle:
        assert torch.equal(logits(model, ids), stock)
    report = handle.report()
    assert {op for op, hits in report.hits().items() if hits} == served
    found = {site.module_class: site.reason for site in report.sites if site.reason}
    assert set(found) == set(reasons)
    assert all(part in found[cls] for cls, part in reasons.items())


def reason_of(model: Any, module_class: str, catalog: Catalog) -> str:
    sites = {site.module_class: site.reason for site in patch(model, catalog=catalog, dry_run=True).report().sites}
    return sites[module_class]


def test_a_known_forward_with_another_activation_is_found_out_by_the_probe(kernels: Catalog, build: Any) -> None:
    reason = reason_of(build(hidden_act="gelu_pytorch_tanh"), "LlamaMLP", kernels)
    assert reason == "probed, it does not give the bits of swiglu ('out' differs)"


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
    assert "is of type Identity, not a plain function" in reason_of(build(), "LlamaAttention", kernels)


def test_a_rotary_function_is_only_known_with_what_it_calls(
    kernels: Catalog, monkeypatch: pytest.MonkeyPatch, build: Any
) -> None:
    def rotate_half(x: torch.Tensor) -> torch.Tensor:
        return torch.roll(x, 1)

    monkeypatch.setattr(modeling_llama, "rotate_half", rotate_half)
    assert "rotates in no way that is known" in reason_of(build(), "LlamaAttention", kernels)


def test_weights_that_are_not_in_memory_are_not_probed(kernels: Catalog, build: Any) -> None:
    sites = patch(build().to("meta"), catalog=kernels).report().sites
    assert {site.reason for site in sites} == {"its weights are not in memory"}


def test_quantised_norm_weights_stay_stock(kernels: Catalog, build: Any) -> None:
    model = build()
    for module in model.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            module.weight = torch.nn.Parameter(torch.ones(64, dtype=torch.int8), requires_grad=False)
    assert "torch.int8, not plain floating point" in reason_of(model, "LlamaRMSNorm", kernels)


def test_looking_changes_neither_the_model_nor_the_random_state_and_runs_no_hook(kernels: Catalog, build: Any) -> None:
    model, seen = build(), []
    for module in model.modules():
        module.register_forward_hook(lambda *args: seen.append(args))
    weights, state = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    handle = patch(model, catalog=kernels, dry_run=True)
    assert {site.reason for site in handle.report().sites} == {"dry run"}
    assert {site.definition for site in handle.report().sites} == {"rms_norm", "swiglu", "rope_neox"}
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
    assert (norm["modules"], norm["counts"]["kernel_calls"], list(norm["bypassed"].values())) == (5, 5, [1])
    text = str(handle.report())
    assert "rms_norm_cpu" in text
    assert "a gradient may be asked for" in text
