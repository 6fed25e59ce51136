"""Hyper-connections and n-gram memory in models: what a kernel computes is one call, the rest is stock."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import DeepseekV4Config, HYV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection
from transformers.models.hy_v4.modeling_hy_v4 import HYV4HyperConnection

from tilegym_db import Catalog, patch, patched
from tilegym_db.models.call_site import AUTOCAST, HAS_HOOKS, IN_TRAINING, NEEDS_GRAD, NOT_ROWS

pytestmark = pytest.mark.sweep

STREAMS, HIDDEN = 4, 64
CONNECTIONS = ("mhc_pre_fused", "mhc_post_hf")
OPS = (*CONNECTIONS, "mhc_head_fused", "engram_gate_hf")
MODELS = {
    "deepseek_v4": {**dict.fromkeys(CONNECTIONS, 4), "mhc_head_fused": 1},
    "glm5_next": dict.fromkeys(CONNECTIONS, 4),  # its head is a mean
    "qwen4_exp": {"engram_gate_hf": 1},  # its hyper-connections are another operator
}
FLOAT32 = ("hc.fn", "hc.base", "hc.scale", "hc_fn", "hc_base", "hc_scale")
"""What kernels take in float32 only. DeepSeek-V4 keeps all of it so whatever its dtype is, GLM-5-Next all but fn."""


@pytest.fixture
def hyper(shop: Any) -> Catalog:
    """Kernels of the hyper-connections alone."""
    catalog: Catalog = shop.offer(ops=OPS)
    return catalog


def built(build: Any, name: str, dtype: torch.dtype = torch.float32) -> Any:
    """A tiny model whose coefficients are in float32."""
    model, precise = build(name, dtype), build(name)
    for (key, parameter), original in zip(model.named_parameters(), precise.parameters(), strict=True):
        if key.endswith(FLOAT32):
            parameter.data = original.data
    return model


def outputs(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(ids)[0]
    return found


def connection(**changes: Any) -> Any:
    config = DeepseekV4Config(hidden_size=HIDDEN, hc_mult=STREAMS, hc_sinkhorn_iters=2, num_hidden_layers=1, **changes)
    return filled(DeepseekV4HyperConnection(config))


def filled(module: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
    return module.eval()


def streams(*leading: int) -> torch.Tensor:
    drawn = torch.randn(*(leading or (2, 5)), STREAMS, HIDDEN, generator=torch.Generator().manual_seed(1))
    return drawn.to(torch.bfloat16)


def call(module: Any) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        found: tuple[torch.Tensor, ...] = module(streams())
    return found


def same(found: Any, stock: Any) -> bool:
    return all(torch.equal(got, want) for got, want in zip(found, stock, strict=True))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_call_is_served_with_the_bits_of_stock(
    name: str, dtype: torch.dtype, hyper: Catalog, build: Any, prompt: Any
) -> None:
    model, ids = built(build, name, dtype), prompt(2)
    stock = outputs(model, ids)
    with patched(model, catalog=hyper, ops=OPS) as handle:
        assert torch.equal(outputs(model, ids), stock)
    assert handle.report().hits() == MODELS[name]
    assert torch.equal(outputs(model, ids), stock)


def test_a_projection_in_bf16_is_left_to_stock(hyper: Catalog, build: Any, prompt: Any) -> None:
    model, ids = build("glm5_next", torch.bfloat16), prompt(2)
    stock = outputs(model, ids)
    with patched(model, catalog=hyper, ops=CONNECTIONS) as handle:
        assert torch.equal(outputs(model, ids), stock)
    assert handle.report().hits() == {"mhc_pre_fused": 0, "mhc_post_hf": 4}


@pytest.mark.parametrize("name", ["deepseek_v4", "qwen4_exp"])
def test_greedy_tokens_are_those_of_stock(name: str, hyper: Catalog, build: Any, prompt: Any) -> None:
    model = built(build, name)
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    stock = model.generate(prompt(2), **options).tolist()
    with patched(model, catalog=hyper, ops=OPS) as handle:
        assert model.generate(prompt(2), **options).tolist() == stock
    assert handle.report().hits() == {op: 4 * calls for op, calls in MODELS[name].items()}  # a prompt and three steps


@pytest.mark.parametrize("name", ["deepseek_v4", "qwen4_exp"])
def test_a_training_step_is_that_of_stock(name: str, shop: Any, build: Any, prompt: Any) -> None:
    poison = shop.offer("    for value in {outputs}:\n        value.fill_(float('nan'))\n", ops=OPS)

    def gradients(model: Any) -> list[torch.Tensor]:
        model.train()(prompt(2), labels=prompt(2)).loss.backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    stock = gradients(built(build, name))
    model = built(build, name)
    with patched(model, catalog=poison, ops=OPS) as handle:
        assert same(gradients(model), stock)
    assert handle.report().kernel_calls == 0
    assert {reason for site in handle.report().sites for reason in site.bypassed} == {IN_TRAINING}


@pytest.mark.parametrize("what", ["gradient", "autocast", "strides", "hook"])
def test_what_no_kernel_was_verified_for_is_left_to_stock(what: str, hyper: Catalog) -> None:
    given = streams(2, 10)[:, ::2] if what == "strides" else streams()

    def run(module: Any) -> Any:
        with torch.set_grad_enabled(what == "gradient"), torch.autocast("cpu", enabled=what == "autocast"):
            return module(given)

    module = connection()
    if what == "hook":
        module.input_norm.register_forward_hook(lambda *_: None)
    stock = run(copy.deepcopy(module))
    with patched(torch.nn.ModuleList([module]), catalog=hyper) as handle:
        assert same(run(module), stock)
    (site,) = (site for site in handle.report().sites if site.definition.startswith("mhc"))
    reasons = {"gradient": NEEDS_GRAD, "autocast": AUTOCAST, "strides": NOT_ROWS, "hook": HAS_HOOKS}
    assert set(site.bypassed) == {reasons[what]}


def test_settings_that_change_after_the_patch_are_honoured(hyper: Catalog) -> None:
    module = connection()
    with patched(torch.nn.ModuleList([module]), catalog=hyper) as handle:
        before = call(module)
        module.hc_sinkhorn_iters, module.input_norm.eps = 10, 0.5
        module.base.data = -module.base.data
        found = call(module)
    assert same(found, call(module))
    assert not any(torch.equal(got, old) for got, old in zip(found, before, strict=True))
    assert handle.report().hits() == {"mhc_pre_fused": 2}


def test_compiled_code_has_the_operator(hyper: Catalog) -> None:
    module = connection()
    stock = call(module)
    with patched(torch.nn.ModuleList([module]), catalog=hyper) as handle:
        assert same(call(torch.compile(module, backend="aot_eager", fullgraph=True)), stock)
    torch.compiler.reset()
    assert handle.report().hits() == {"mhc_pre_fused": 1}


def test_weights_in_float32_do_not_say_what_the_streams_are(shop: Any) -> None:
    """A table of bf16 alone serves a model in bf16, whose hyper-connections keep their weights in float32."""
    module = connection()
    catalog = shop.offer(ops=OPS)
    shop.entries = [entry for entry in shop.entries if entry["dtypes"] == {"T": "bfloat16"}]
    shop.republish()
    with patched(torch.nn.ModuleList([module]), catalog=catalog) as handle:
        call(module)
    assert handle.report().hits() == {"mhc_pre_fused": 1}


def test_other_forms_say_why_they_stay_stock(hyper: Catalog) -> None:
    class Replaced(torch.nn.Module):
        eps = 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    other = HYV4HyperConnection(HYV4Config(hidden_size=HIDDEN, num_hidden_layers=1))
    normed = connection()
    normed.input_norm = Replaced()
    for module, told in (
        (other, "without a mixing matrix"),
        (normed, "relies on a input_norm that is not the one known"),
    ):
        sites = patch(torch.nn.ModuleList([filled(module)]), catalog=hyper, dry_run=True).report().sites
        assert any(told in site.reason for site in sites)


@pytest.mark.parametrize("what", ["", "gradient", "autocast", "strides", "hook", "eps"])
def test_a_gate_of_ngram_memory_is_served_or_left_to_stock(what: str, hyper: Catalog, build: Any, prompt: Any) -> None:
    module, ids = build("qwen4_exp").model.layers[0].ple, prompt(2, 5)
    hidden = torch.randn(2, 5, 2 * STREAMS * HIDDEN, generator=torch.Generator().manual_seed(1))
    given = hidden[..., : STREAMS * HIDDEN] if what == "strides" else hidden[..., ::2].contiguous()

    def run(module: Any) -> torch.Tensor:
        with torch.set_grad_enabled(what == "gradient"), torch.autocast("cpu", enabled=what == "autocast"):
            found: torch.Tensor = module(given, ids, None).detach()
        return found

    if what == "hook":
        module.norm_query.register_forward_hook(lambda *_: None)
    with patched(torch.nn.ModuleList([module]), catalog=hyper, ops=OPS) as handle:
        if what == "eps":
            module.norm_key.eps = 0.5
        stock = run(copy.deepcopy(module))  # a copy is not patched
        assert torch.equal(run(module), stock)
    (site,) = [site for site in handle.report().sites if site.kind == "engram_gate"]
    reasons = {
        "gradient": NEEDS_GRAD, "autocast": AUTOCAST, "strides": NOT_ROWS, "hook": HAS_HOOKS,
        "eps": "its norms have different eps",
    }  # fmt: skip
    assert set(site.bypassed) == ({reasons[what]} if what else set())
    assert handle.report().hits() == {"engram_gate_hf": int(not what)}
