"""Residual sums and their norms in training: one kernel forward and one backward, into tensors that nothing else holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tilegym_db import Catalog, patched
from tilegym_db.models.parts.add_norm import DROPPED, LEAVES
from tilegym_db.resolver.training import training_of
from tilegym_db.verification.check import catalog_findings

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
# model -> the sums of its layers, which are all but the first of two layers, and their number
MODELS = {"llama": ("add_rms_norm", 2), "gpt_oss": ("add_rms_norm_fp32", 2), "gemma3": ("add_rms_norm_gemma", 2)}


@pytest.fixture
def sums(sum_kernels: Any) -> Catalog:
    """Kernels for inference, their gradients, and what training asks for in place of sums."""
    found: Catalog = sum_kernels()
    return found


def gradients(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}


def assert_close(found: dict[str, torch.Tensor], stock: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    assert found.keys() == stock.keys()
    for name, want in stock.items():
        error = (found[name].double() - want.double()).norm() / want.double().norm().clamp_min(1e-30)
        assert error <= TOLERANCE[dtype], f"{name}: relative error {float(error):.2g}"


@pytest.mark.sweep(4)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("name", MODELS)
def test_sums_train_with_the_gradients_of_stock(
    name: str, dtype: torch.dtype, training: bool, sums: Catalog, build: Any, prompt: Any
) -> None:
    model, ids = build(name, dtype).train(training), prompt(2)
    definition, calls = MODELS[name]
    stock = gradients(model, ids)
    with patched(model, catalog=sums, ops=[f"fused_{definition}"]) as handle:
        assert_close(gradients(model, ids), stock, dtype)
    hits = handle.report().hits()
    assert {hits[definition], hits[f"{definition}_backward"]} == {calls}
    assert hits[f"fused_{definition}"] == 0


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("rms_norm", "inputs are x, weight, eps"),
        ("add_layer_norm", "inputs are x, residual, weight, bias, eps"),
        ("fused_add_rms_norm_fp32", "overwrites its input 'residual'"),
        ("add_rms_norms", "no definition 'add_rms_norms'"),
    ],
)
def test_check_finds_another_operator_in_training(name: str, reason: str, restated: Any) -> None:
    catalog = restated("fused_add_rms_norm", in_training=name)
    (found,) = catalog_findings(catalog, ["fused_add_rms_norm"], runs=False)
    assert found.startswith("fused_add_rms_norm: serving.in_training: ")
    assert reason in found
    assert training_of(catalog.definition("fused_add_rms_norm"), catalog) is None


def test_what_else_holds_the_output_is_no_reason(sums: Catalog, build: Any, prompt: Any) -> None:
    model, ids, kept = build().train(), prompt(2), []
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(lambda module, args, out: kept.append(out))
    stock = gradients(model, ids)
    before = [one.clone() for one in kept]
    kept.clear()
    with patched(model, catalog=sums, ops=["fused_add_rms_norm"]) as handle:
        assert_close(gradients(model, ids), stock, torch.float32)
    assert handle.report().hits()["add_rms_norm"] == 2
    assert all(torch.equal(one, want) for one, want in zip(kept, before, strict=True))


@pytest.mark.parametrize("of_all", [False, True])
@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_hooks_of_the_backward_are_called(register: str, of_all: bool, sums: Catalog, build: Any, prompt: Any) -> None:
    model, ids, seen = build().train(), prompt(2), list[str]()
    layer, called = model.model.layers[0], lambda module, *_: seen.append(type(module).__name__)
    if of_all:
        handles = [getattr(torch.nn.modules.module, register.replace("_full", "_module_full"))(called)]
    else:
        handles = [getattr(one, register)(called) for one in (layer.post_attention_layernorm, layer.mlp.act_fn)]
    try:
        stock = gradients(model, ids)
        wanted = sorted(seen)
        seen.clear()
        with patched(model, catalog=sums):
            assert_close(gradients(model, ids), stock, torch.float32)
    finally:
        for one in handles:
            one.remove()
    assert {"LlamaRMSNorm", "SiLUActivation"} <= set(wanted)
    assert sorted(seen) == wanted


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_checkpoints_run_the_sum_twice(reentrant: bool, sums: Catalog, build: Any, prompt: Any) -> None:
    model, ids = build().train(), prompt(2)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    stock = gradients(model, ids)
    with patched(model, catalog=sums) as handle:
        assert_close(gradients(model, ids), stock, torch.float32)
    hits = handle.report().hits()
    assert (hits["add_rms_norm"], hits["add_rms_norm_backward"]) == (4, 2)


@pytest.mark.parametrize("missing", ["add_rms_norm", "add_rms_norm_backward"])
def test_without_either_kernel_the_norm_alone_is_served(
    missing: str, sum_kernels: Any, build: Any, prompt: Any
) -> None:
    model, ids = build().train(), prompt(2)
    stock = gradients(model, ids)
    with patched(model, catalog=sum_kernels(without=(missing,))) as handle:
        assert_close(gradients(model, ids), stock, torch.float32)
    hits = handle.report().hits()
    assert (hits["rms_norm"], hits["rms_norm_backward"], hits["add_rms_norm"]) == (5, 5, 0)


def test_second_derivatives_of_a_sum_are_those_of_stock(sums: Catalog, build: Any, prompt: Any) -> None:
    def twice(model: Any) -> torch.Tensor:
        embedded = model.model.embed_tokens(ids).detach().requires_grad_()
        (first,) = torch.autograd.grad(
            model(inputs_embeds=embedded).logits.square().mean(), embedded, create_graph=True
        )
        (second,) = torch.autograd.grad(first.square().sum(), embedded)
        return second

    model, ids = build().train(), prompt(2)
    model.set_attn_implementation("eager")
    stock = twice(model)
    with patched(model, catalog=sums, ops=["fused_add_rms_norm"]) as handle:
        torch.testing.assert_close(twice(model), stock, rtol=1e-3, atol=1e-7)
    assert handle.report().hits()["add_rms_norm"] == 2


def test_a_layer_that_drops_the_sum_has_its_norm_alone_served(sums: Catalog) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = BertForMaskedLM(BertConfig(vocab_size=96, **sizes, **rates)).train()
    ids = torch.randint(3, 96, (2, 9))
    stock = gradients(model, ids)
    with patched(model, catalog=sums) as handle:
        assert_close(gradients(model, ids), stock, torch.float32)
    hits = handle.report().hits()
    assert (hits.get("add_layer_norm", 0), hits["layer_norm"], hits["layer_norm_backward"]) == (0, 6, 6)
    reasons = {text for site in handle.report().sites for text in site.bypassed}
    assert DROPPED in reasons


class Passing(torch.nn.Module):
    """A layer that gets both operands, as one that passes on the residual stream beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = LlamaRMSNorm(64)

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = residual + hidden
        normed = self.norm(total)
        return normed, total


def test_gradients_that_operands_keep_share_no_memory(sums: Catalog) -> None:
    torch.manual_seed(0)
    layer, given = Passing().train(), torch.randn(2, 2, 3, 64)

    def kept() -> list[torch.Tensor]:
        operands = [one.clone().requires_grad_() for one in given]
        for _ in range(2):
            normed, total = layer(*operands)
            (normed.square().sum() + total.sum()).backward()
        return [one.grad for one in operands]  # type: ignore[misc]

    stock = kept()
    with patched(layer, catalog=sums, ops=["fused_add_rms_norm"]) as handle:
        for got, want in zip(kept(), stock, strict=True):
            torch.testing.assert_close(got, want)
        (one, _other), embedded = given.clone().requires_grad_(), given[0].clone().requires_grad_()
        layer(one, embedded)[1].sum().backward()
    (site,) = (site for site in handle.report().sites if site.kind == "add_norm")
    assert (dict(site.bypassed), handle.report().hits()["add_rms_norm"]) == ({LEAVES: 2}, 1)
