"""Every architecture, without a line that knows it: what is served, what stays stock and why, with unchanged results."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilegym_db import Catalog, Definition, patched
from tilegym_db.resolver.hot_path import allocate_of

pytestmark = pytest.mark.slow

STEPS = ("causal_conv1d_update", "gated_delta_rule_recurrent")
"""Operators of single tokens."""
PAIRS = {"rms_norm": 2, "fused_add_rms_norm": 3, "swiglu": 2, "rope_neox": 2}
ONCE = ("causal_conv1d", "gated_delta_rule_chunk", "rms_norm_gated_silu", "gdn_gates", "sigmoid_mul")
MIXER = {**dict.fromkeys(ONCE, 1), **dict.fromkeys(STEPS, 0)}


def fused(kind: str, name: str = "qk_norm_rope") -> dict[tuple[str, str], str]:
    """Norms and rotation of heads, which only ``test_normed_rope.py`` publishes as one operator."""
    return {(kind, "normed_rope"): f"{name} was not measured on cpu"}


def narrow_only(router: str) -> dict[tuple[str, str], str]:
    """Products of routers that widen nothing, because these models are in float32."""
    reason = "gemm_widened was not measured on cpu with float32 (measured: T=bfloat16; T=float16)"
    return {(router, "widened_product"): reason}


# The second layer takes its first norm from the sum at the end of the first one.
# name -> calls of each operator in one forward of two layers, and what stays stock: (class, part) -> the reason
DENSE: dict[str, tuple[dict[str, int], dict[tuple[str, str], str]]] = {
    "llama": (PAIRS, {}),
    "mistral": (PAIRS, {}),
    "qwen2": (PAIRS, {}),
    "qwen3": ({**PAIRS, "rms_norm": 6}, fused("Qwen3Attention")),  # normalises q and k per head
    "phi3": ({"rms_norm": 2, "fused_add_rms_norm": 3, "silu_and_mul": 2, "rope_partial": 2}, {}),
    "olmo2": ({"rms_norm_fp32": 9, "swiglu": 2, "rope_neox_fp32": 2}, {}),
    "olmo3": ({"rms_norm_fp32": 9, "swiglu": 2, "rope_neox_fp32": 2}, {}),
    # What the layers of these two add is a view that the norm before it made, of memory that nothing else holds.
    "glm4": ({"rms_norm": 6, "fused_add_rms_norm": 3, "silu_and_mul": 2, "rope_pairs": 2}, {}),
    "gemma3": (
        {"rms_norm_gemma": 10, "fused_add_rms_norm_gemma": 3, "gelu_tanh_and_mul": 2, "rope_neox": 2},
        fused("Gemma3Attention", "qk_norm_rope_gemma"),
    ),
}
OTHER: dict[str, tuple[dict[str, int], dict[tuple[str, str], str]]] = {
    "qwen3_moe": (
        {"rms_norm": 6, "fused_add_rms_norm": 3, "rope_neox": 2, "moe_experts": 2, "topk_softmax": 2},
        fused("Qwen3MoeAttention"),
    ),
    "olmoe": ({"rms_norm": 6, "fused_add_rms_norm": 3, "rope_neox": 2, "moe_experts": 2, "topk_softmax": 2}, {}),
    "mixtral": ({"rms_norm": 2, "fused_add_rms_norm": 3, "rope_neox": 2, "moe_experts": 2, "topk_softmax": 2}, {}),
    "deepseek_v2": (
        {
            "rms_norm": 6,
            "fused_add_rms_norm": 3,
            "swiglu": 2,
            "rope_complex_pairs": 2,
            "mla_expand_keys": 2,
            "moe_experts": 1,
            "topk_softmax_groups": 1,
        },
        narrow_only("DeepseekV2TopkRouter"),
    ),
    "deepseek_v3": (
        # Its other rotary function would be served; this config does not call it.
        {
            "rms_norm": 6,
            "fused_add_rms_norm": 3,
            "swiglu": 2,
            "rope_neox": 0,
            "rope_pairs_to_halves": 2,
            "mla_expand_keys": 2,
            "moe_experts": 1,
            "topk_sigmoid_bias_groups": 1,
        },
        narrow_only("DeepseekV3TopkRouter"),
    ),
    "gpt_oss": (
        {
            "rms_norm_fp32": 2,
            "fused_add_rms_norm_fp32": 3,
            "rope_half_tables": 2,
            "topk_then_softmax": 2,
            "moe_experts_oai": 2,
        },
        {},
    ),
    "qwen3_next": (
        {
            "rms_norm_gemma": 4,
            "fused_add_rms_norm_gemma": 3,
            "swiglu": 2,
            "rope_partial": 1,
            "moe_experts": 2,
            "topk_softmax": 2,
            "shared_expert_gate": 2,
            **MIXER,
        },
        {},
    ),
    "qwen3_5": (
        {"rms_norm_gemma": 4, "fused_add_rms_norm_gemma": 3, "swiglu": 2, "rope_partial": 1, **MIXER},
        {},
    ),
}
ALL = {**DENSE, **OTHER}
# Layers whose prompt of nine tokens needs no mask; six is the window of those that have one. Those of gpt-oss have sinks, and a
# mask that is plain.
UNMASKED = {
    **dict.fromkeys(ALL, 2), "mistral": 0, "phi3": 0, "olmo3": 1, "gemma3": 1, "qwen3_next": 1, "qwen3_5": 1,
}  # fmt: skip
PREFILL = {**dict.fromkeys(ALL, "attention_prefill"), "gpt_oss": "attention_sink_prefill"}
WAYS: dict[str, dict[str, Any]] = {
    "dynamic cache": {},
    "static cache": {"cache_implementation": "static", "disable_compile": True},
    "chunked prefill": {"prefill_chunk_size": 4},
    "no cache": {"use_cache": False},
}

GROWING = ("dynamic cache", "chunked prefill")
"""Ways with a cache that grows by new tensors."""


def beside_attention(report: Any) -> tuple[dict[str, int], list[Any]]:
    """Calls by a kernel, and the call sites, of all that depends neither on masks, caches nor labels."""
    sites = [site for site in report.sites if site.counts and not site.kind.startswith(("attention", "cache", "loss"))]
    hits = report.hits()
    return {op: hits[op] for site in sites for op in (counts.definition for counts in site.all_counts)}, sites


def generate(model: Any, inputs: dict[str, torch.Tensor], **options: Any) -> list[list[int]]:
    tokens: list[list[int]] = model.generate(**inputs, max_new_tokens=4, do_sample=False, **options).tolist()
    return tokens


@pytest.mark.sweep
@pytest.mark.parametrize("name", ALL)
def test_forward_runs_kernels_with_the_bits_of_stock(
    name: str, kernels: Catalog, logits: Any, build: Any, prompt: Any
) -> None:
    model, ids = build(name), prompt(2)
    served, left = ALL[name]
    stock = logits(model, ids)
    with patched(model, catalog=kernels) as handle:
        found = logits(model, ids)
    if (
        "moe_experts" in served
    ):  # the kernel's products are other calls than those of the model, and add in another order
        torch.testing.assert_close(found, stock)
    else:
        assert torch.equal(found, stock)
    report = handle.report()
    hits, sites = beside_attention(report)
    assert hits == served
    assert report.hits()[PREFILL[name]] == UNMASKED[name]
    assert {(site.module_class, site.kind): site.reason for site in report.sites if site.reason} == left
    assert all(site.counts.stock_calls == 0 and not site.bypassed for site in sites)


@pytest.mark.sweep(16)
@pytest.mark.parametrize(("name", "way"), [*((name, way) for name in DENSE for way in WAYS), *((n, "") for n in OTHER)])
def test_greedy_tokens_are_those_of_stock(
    name: str, way: str, kernels: Catalog, build: Any, prompt: Any, left_padded: Any
) -> None:
    model, options = build(name), WAYS[way or "static cache"]
    batches = [{"input_ids": prompt()}, left_padded((9, 4, 7))]  # longer than the window of those that have one
    for inputs in batches if way else batches[1:]:
        stock = generate(model, inputs, **options)
        with patched(model, catalog=kernels) as handle:
            assert generate(model, inputs, **options) == stock
        report = handle.report()
        hits, sites = beside_attention(report)
        served = {op for op, calls in ALL[name][0].items() if calls or op in STEPS}
        assert {op for op, calls in hits.items() if calls} == served
        assert all(site.counts.stock_calls == 0 and not site.bypassed for site in sites)


@pytest.mark.sweep
@pytest.mark.parametrize("name", DENSE)
def test_logits_in_bf16_are_as_close_to_fp32_as_those_of_stock(
    name: str, shop: Any, logits: Any, build: Any, prompt: Any
) -> None:
    model, precise, ids = build(name, torch.bfloat16), build(name), prompt(3)
    for parameter, rounded in zip(precise.parameters(), model.parameters(), strict=True):
        parameter.data.copy_(rounded.data)
    want, stock = logits(precise, ids), logits(model, ids)
    with patched(model, catalog=shop.offer(rounding="reference")) as handle:
        found = logits(model, ids)
    assert handle.report().kernel_calls > 0
    assert (found - want).norm() <= 1.5 * (stock - want).norm()


@pytest.mark.parametrize("name", ["olmo2", "olmo3"])
def test_fp32_tables_for_bf16_heads_are_served(
    name: str, kernels: Catalog, logits: Any, build: Any, prompt: Any
) -> None:
    model, ids = build(name, torch.bfloat16), prompt()
    stock = logits(model, ids)
    with patched(model, catalog=kernels) as handle:
        assert torch.equal(logits(model, ids), stock)
    (rope,) = [site.counts for site in handle.report().sites if site.kind == "rope" and site.counts]
    assert (rope.calls, rope.kernel_calls) == (2, 2)


def training_step(model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    """The parameters after one step of gradient descent, and the loss."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    return [loss.detach(), *(parameter.detach().clone() for parameter in model.parameters())]


@pytest.mark.sweep
@pytest.mark.parametrize("name", ALL)
def test_a_training_step_on_a_patched_model_is_that_of_stock(
    name: str, poison: Catalog, build: Any, prompt: Any
) -> None:
    stock = training_step(build(name), prompt(2))
    model = build(name)
    with patched(model, catalog=poison) as handle:
        found = training_step(model, prompt(2))
    assert all(torch.equal(got, want) for got, want in zip(found, stock, strict=True))
    assert handle.report().kernel_calls == 0


def test_a_call_left_to_stock_allocates_no_output(
    shop: Any, build: Any, prompt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tilegym_db.models import operators

    devices: list[str] = []

    def noting(definition: Definition) -> Any:
        def noted(*inputs: Any) -> Any:
            devices.append(inputs[0].device.type)
            return allocate_of(definition)(*inputs)

        return noted

    monkeypatch.setattr(operators, "allocate_of", noting)
    model, measured = build(), shop.offer(smallest=128)
    with patched(model, catalog=measured) as handle, torch.no_grad():
        model(prompt())
        model(prompt())
    assert sum(site.counts.calls for site in handle.report().sites if site.counts) == 32
    assert set(devices) == {"meta"}  # to learn about a new kind of call, without memory
