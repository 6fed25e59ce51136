"""Training a patched model: the gradients of stock, by kernels forward and backward, and stock code wherever one is missing."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tilegym_db import Catalog, patched
from tilegym_db.models.handle import Handle
from tilegym_db.models.parts import attention

pytestmark = [pytest.mark.slow, pytest.mark.sweep]

BACKWARDS = ("rms_norm_backward", "swiglu_backward", "rope_neox_backward")
# Kernels and stock round at the same places; what differs is the order of a few sums.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def gradients(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}


def assert_close(found: dict[str, torch.Tensor], stock: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    assert found.keys() == stock.keys()
    for name, want in stock.items():
        assert found[name].dtype == want.dtype
        error = (found[name].double() - want.double()).norm() / want.double().norm().clamp_min(1e-30)
        assert error <= TOLERANCE[dtype], f"{name}: relative error {float(error):.2g}"


def reasons(handle: Handle) -> str:
    texts = [text for site in handle.report().sites for text in site.bypassed]
    texts += [key.reason for site in handle.report().sites for counts in site.all_counts for key in counts.keys]
    return " | ".join(texts)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_gradients_are_those_of_stock(
    name: str, dtype: torch.dtype, training: bool, training_kernels: Catalog, build: Any, prompt: Any
) -> None:
    model, ids = build(name, dtype).train(training), prompt(2)
    stock = gradients(model, ids)
    with patched(model, catalog=training_kernels) as handle:
        assert_close(gradients(model, ids), stock, dtype)
    hits = handle.report().hits()
    norms = {"llama": 5, "qwen3": 9}[name]
    assert {op: hits[op] for op in BACKWARDS} == {
        "rms_norm_backward": norms,
        "swiglu_backward": 2,
        "rope_neox_backward": 2,
    }
    assert {op: hits[op] for op in ("rms_norm", "swiglu", "rope_neox")} == {
        "rms_norm": norms,
        "swiglu": 2,
        "rope_neox": 2,
    }


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("cache", [True, False])
def test_causal_attention_trains_with_the_gradients_of_stock(
    cache: bool, dtype: torch.dtype, training_kernels: Catalog, build: Any, prompt: Any
) -> None:
    model, ids = build("llama", dtype).train(), prompt(2)
    model.config.use_cache = cache
    stock = gradients(model, ids)
    with patched(model, catalog=training_kernels, ops=["attention_prefill"]) as handle:
        assert_close(gradients(model, ids), stock, dtype)
    hits = handle.report().hits()
    assert (hits["attention_prefill"], hits["attention_prefill_backward"]) == (2, 2)


def test_attention_with_a_mask_or_dropout_trains_on_stock(
    training_kernels: Catalog, build: Any, prompt: Any, left_padded: Any
) -> None:
    model, ids = build().train(), prompt(2)
    padded = left_padded((9, 4))

    def masked() -> torch.Tensor:
        found: torch.Tensor = model(**padded).logits
        return found

    stock = masked()
    with patched(model, catalog=training_kernels, ops=["attention_prefill"]) as handle:
        assert torch.equal(masked(), stock)
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.5
        gradients(model, ids)
    assert handle.report().hits()["attention_prefill"] == 0
    assert attention.MASKED in reasons(handle)
    assert attention.DROPOUT in reasons(handle)


def test_attention_without_a_verified_backward_is_stock(
    training_kernels: Catalog, shop: Any, build: Any, prompt: Any
) -> None:
    model, ids = build().train(), prompt(2)
    stock = gradients(model, ids)
    without = shop.offer(without=("attention_prefill_backward",))
    with patched(model, catalog=without, ops=["attention_prefill"]) as handle:
        assert_close(gradients(model, ids), stock, torch.float32)
    assert handle.report().hits()["attention_prefill"] == 0
    assert "it has no verified backward: attention_prefill_backward was not measured on cpu" in reasons(handle)


def test_steps_of_training_go_where_stock_goes(training_kernels: Catalog, build: Any, prompt: Any) -> None:
    def train(model: Any) -> list[float]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        losses = []
        for step in range(4):
            optimizer.zero_grad()
            ids = prompt(2, seed=step % 2)
            loss = model(ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    model, twin = build().train(), build().train()
    stock = train(twin)
    with patched(model, catalog=training_kernels) as handle:
        assert train(model) == pytest.approx(stock, rel=1e-4)
    assert stock[-1] < stock[0]
    assert handle.report().hits()["rms_norm_backward"] == 20
    for got, want in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_runs_the_same_kernels_twice(
    reentrant: bool, training_kernels: Catalog, build: Any, prompt: Any
) -> None:
    model, ids = build().train(), prompt(2)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    stock = gradients(model, ids)
    with patched(model, catalog=training_kernels) as handle:
        assert_close(gradients(model, ids), stock, torch.float32)
    hits = handle.report().hits()
    assert hits["swiglu"] == 2 * hits["swiglu_backward"] == 4
    assert hits["rope_neox"] == 2 * hits["rope_neox_backward"] == 4


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_checkpoint_without_a_backward_runs_stock_both_times(poison: Catalog, build: Any, prompt: Any) -> None:
    model, ids = build().train(), prompt(2)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model.enable_input_require_grads()
    stock = gradients(model, ids)
    with patched(model, catalog=poison):
        found = gradients(model, ids)
    assert all(torch.equal(found[name], stock[name]) for name in stock)


def test_frozen_norms_get_no_gradient_and_pass_one_on(training_kernels: Catalog, build: Any, prompt: Any) -> None:
    model, ids = build().train(), prompt(2)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" not in name)
    stock = gradients(model, ids)
    assert not any("norm" in name for name in stock)
    with patched(model, catalog=training_kernels) as handle:
        assert_close(gradients(model, ids), stock, torch.float32)
    hits = handle.report().hits()
    assert hits["rms_norm_backward_x"] == 5
    assert "rms_norm_backward" not in hits


def test_gradient_without_its_own_measurement_is_left_to_stock(
    training_kernels: Catalog, build: Any, prompt: Any
) -> None:
    model, ids = build().requires_grad_(False), prompt()
    for parameter in model.model.layers[0].mlp.up_proj.parameters():
        parameter.requires_grad_()
    stock = gradients(model, ids)
    with patched(model, catalog=training_kernels) as handle:
        assert_close(gradients(model, ids), stock, torch.float32)
    assert "no definition computes the gradient of b alone" in reasons(handle)
    assert handle.report().hits()["swiglu_backward"] == 1  # in the layer above, through which both gradients flow


@pytest.mark.parametrize("training", [True, False])
def test_call_without_gradients_is_shown_how_to_say_so(
    training: bool, kernels: Catalog, build: Any, prompt: Any
) -> None:
    model = build().train(training)
    with patched(model, catalog=kernels) as handle:
        model(prompt())
    assert handle.report().kernel_calls == 0
    assert ("torch.no_grad()" in reasons(handle)) is not training


@pytest.mark.parametrize("op", ["rms_norm", "swiglu", "rope_neox"])
def test_without_a_verified_backward_the_forward_is_stock_too(
    op: str, training_kernels: Catalog, shop: Any, build: Any, prompt: Any
) -> None:
    model, ids = build().train(), prompt(2)
    stock = gradients(model, ids)
    with patched(model, catalog=shop.offer(without=(f"{op}_backward",))) as handle:
        assert_close(gradients(model, ids), stock, torch.float32)
    hits = handle.report().hits()
    assert hits[op] == 0
    assert f"{op}_backward" not in hits
    assert f"it has no verified backward: {op}_backward was not measured on cpu" in reasons(handle)
    assert all(hits[other] > 0 for other in BACKWARDS if other != f"{op}_backward")


def test_without_a_verified_forward_the_backward_is_stock_too(
    training_kernels: Catalog, shop: Any, build: Any, prompt: Any
) -> None:
    model, ids = build().train(), prompt(2)
    stock = gradients(model, ids)
    with patched(model, catalog=shop.offer(without=("swiglu",))) as handle:
        assert_close(gradients(model, ids), stock, torch.float32)
    assert "swiglu_backward" not in handle.report().hits()


def test_inference_after_training_is_what_it_was(
    training_kernels: Catalog, logits: Any, build: Any, prompt: Any
) -> None:
    model, ids = build(), prompt(2)
    stock = logits(model, ids)
    with patched(model, catalog=training_kernels) as handle:
        gradients(model.train(), ids)
        assert torch.equal(logits(model.eval(), ids), stock)
        assert handle.report().hits()["fused_add_rms_norm"] == 3
        model.train()
        assert torch.equal(logits(model, ids), stock)
        assert handle.report().hits()["fused_add_rms_norm"] == 3


def test_the_report_says_which_backward_served(training_kernels: Catalog, build: Any, prompt: Any) -> None:
    model = build().train()
    with patched(model, catalog=training_kernels) as handle:
        gradients(model, prompt(2))
    shown = str(handle.report())
    for op in BACKWARDS:
        assert f"{op}_cpu" in shown
    (mlp,) = [site for site in handle.report().to_dict()["sites"] if site["kind"] == "mlp"]
    assert [counts["definition"] for counts in mlp["training"]] == ["swiglu", "swiglu_backward"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_training_under_autocast_gives_the_gradients_of_stock(
    dtype: torch.dtype, training_kernels: Catalog, build: Any, prompt: Any
) -> None:
    model, ids = build().train(), prompt(2)
    with torch.autocast("cpu", dtype):
        stock = gradients(model, ids)
        with patched(model, catalog=training_kernels) as handle:
            assert_close(gradients(model, ids), stock, dtype)
    hits = handle.report().hits()
    assert (hits["rms_norm"], hits["swiglu"], hits["swiglu_backward"]) == (5, 2, 2)
    assert hits["rope_neox"] == 0  # heads in half precision, and tables in float32, which no definition describes
    assert "'cos' of rope_neox must be" in reasons(handle)


def test_what_a_backward_kernel_writes_is_the_gradient(
    training_kernels: Catalog, shop: Any, build: Any, prompt: Any
) -> None:
    model, ids = build().train(), prompt(2)
    wrong = "    for value in {outputs}:\n        value.fill_(float('nan'))\n"
    with patched(model, catalog=shop.offer(wrong, ops=("swiglu_backward",))):
        found = gradients(model, ids)
    assert found["model.layers.1.mlp.gate_proj.weight"].isnan().all()
    assert found["model.layers.1.mlp.down_proj.weight"].isfinite().all()


def test_raising_backward_is_quarantined_and_stock_runs(
    training_kernels: Catalog, shop: Any, build: Any, prompt: Any
) -> None:
    model, ids = build().train(), prompt(2)
    stock = gradients(model, ids)
    catalog = shop.offer("    raise ValueError('boom')\n", ops=("swiglu_backward",))
    with patched(model, catalog=catalog) as handle:
        with pytest.warns(RuntimeWarning, match="boom"):
            assert_close(gradients(model, ids), stock, torch.float32)
        assert_close(gradients(model, ids), stock, torch.float32)
    assert handle.report().hits()["swiglu_backward"] == 0
    assert [failure.definition for failure in handle.report().failures] == ["swiglu_backward"]


INTERPRETED = """
import json
import torch
from transformers import LlamaConfig, LlamaForCausalLM
import tilegym_db

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=96, hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
)
model, ids = LlamaForCausalLM(config).train(), torch.arange(1, 19).view(2, 9)
for name, parameter in model.named_parameters():
    torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3 if "norm" in name else 0.2)


def gradients():
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


stock = gradients()
with tilegym_db.patched(model) as handle:
    found = gradients()
errors = {name: float((found[name] - value).norm() / value.norm()) for name, value in stock.items()}
report = handle.report()
print(json.dumps({"errors": errors, "hits": report.hits(), "failures": [str(failure) for failure in report.failures]}))
"""


@pytest.mark.nightly
def test_a_model_trains_on_the_triton_kernels_themselves(shop: Any) -> None:
    """Run in a separate process, in which the interpreter of Triton runs the kernels on the CPU."""
    shop.offer(rounding="triton", ops=("rms_norm", "swiglu", "rope_neox", *BACKWARDS))
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["failures"] == []
    served = {"rms_norm": 5, "swiglu": 2, "rope_neox": 2}
    assert {op: answer["hits"][op] for op in served} == served
    assert {op: answer["hits"][f"{op}_backward"] for op in served} == served
    assert max(answer["errors"].values()) <= TOLERANCE[torch.float32]


# -- one norm alone ---------------------------------------------------------------------------------------------------


class OneNorm(torch.nn.Module):
    """A patched norm behind nothing else, with a random weight."""

    def __init__(self) -> None:
        super().__init__()
        self.config = LlamaConfig()
        self.norm = LlamaRMSNorm(16)
        torch.nn.init.normal_(self.norm.weight, generator=torch.Generator().manual_seed(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.norm(x)
        return found


def random_rows() -> torch.Tensor:
    return torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()


def penalised(model: torch.nn.Module) -> list[torch.Tensor]:
    """The gradients of a penalty on a gradient, which differentiates the backward."""
    x = random_rows()
    (first,) = torch.autograd.grad(model(x).pow(3).sum(), x, create_graph=True)
    return list(torch.autograd.grad(first.pow(2).sum(), [x, *model.parameters()]))


def test_a_second_derivative_is_that_of_stock(training_kernels: Catalog) -> None:
    model = OneNorm()
    stock = penalised(model)
    with patched(model, catalog=training_kernels) as handle:
        for got, want in zip(penalised(model), stock, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert handle.report().hits()["rms_norm"] == 1


def test_gradients_in_batches_are_those_of_stock(training_kernels: Catalog) -> None:
    model, x = OneNorm(), random_rows()

    def batched() -> torch.Tensor:
        directions = torch.randn(4, 3, 5, 16, generator=torch.Generator().manual_seed(2))
        (found,) = torch.autograd.grad(model(x), x, directions, is_grads_batched=True)
        return found

    stock = batched()
    with patched(model, catalog=training_kernels) as handle:
        torch.testing.assert_close(batched(), stock)
        assert handle.report().hits()["rms_norm"] == 1


@pytest.mark.parametrize("scale", [1.0, 0.0])
def test_an_incoming_gradient_of_any_strides_is_answered(scale: float, training_kernels: Catalog) -> None:
    model, x = OneNorm(), random_rows()
    stock = torch.autograd.grad(model(x).mul(scale).sum(), [x, *model.parameters()])
    with patched(model, catalog=training_kernels):
        found = torch.autograd.grad(model(x).mul(scale).sum(), [x, *model.parameters()])
        expanded = torch.autograd.grad(model(x).sum(), [x, *model.parameters()])  # a gradient of strides 0
    for got, want in zip(found, stock, strict=True):
        torch.testing.assert_close(got, want)
    assert [value.shape for value in expanded] == [value.shape for value in stock]
    if scale == 1.0:
        for got, want in zip(expanded, stock, strict=True):
            torch.testing.assert_close(got, want)


def test_an_input_overwritten_before_the_backward_is_an_error(training_kernels: Catalog) -> None:
    model = OneNorm()
    with patched(model, catalog=training_kernels):
        x = random_rows() * 1.0
        out = model(x)
        x.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_the_graph_of_a_call_outlives_the_patch(training_kernels: Catalog) -> None:
    model, x = OneNorm(), random_rows()
    (stock,) = torch.autograd.grad(model(x).pow(2).sum(), x)
    with patched(model, catalog=training_kernels):
        out = model(x)
    (found,) = torch.autograd.grad(out.pow(2).sum(), x)
    torch.testing.assert_close(found, stock)


def test_a_copy_of_a_patched_model_trains_on_its_own(training_kernels: Catalog) -> None:
    model = OneNorm()
    with patched(model, catalog=training_kernels):
        twin = copy.deepcopy(model)
        twin(random_rows()).sum().backward()
    assert model.norm.weight.grad is None
    assert twin.norm.weight.grad is not None


def test_second_derivative_of_a_whole_model_is_that_of_stock(
    training_kernels: Catalog, build: Any, prompt: Any
) -> None:
    model, ids = build(), prompt()
    model.set_attn_implementation("eager")  # PyTorch's sdpa has no second derivative

    def second() -> list[torch.Tensor]:
        parameters = [value for value in model.parameters() if value.requires_grad]
        first = torch.autograd.grad(model(ids, labels=ids).loss, parameters, create_graph=True)
        return list(torch.autograd.grad(sum(one.pow(2).sum() for one in first), parameters))

    stock = second()
    with patched(model, catalog=training_kernels) as handle:
        for got, want in zip(second(), stock, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
    assert handle.report().hits()["swiglu"] == 2
