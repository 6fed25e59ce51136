"""Whatever is not plain eager inference runs the model's own code, and the report says so."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from tilegym_db import Catalog, patched
from tilegym_db.models.handle import Handle

pytestmark = pytest.mark.sweep


def bypassed(handle: Handle) -> dict[str, set[str]]:
    return {site.definition: set(site.bypassed) for site in handle.report().sites}


def gradients(model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("training", [True, False])
def test_gradients_are_those_of_stock(training: bool, poison: Catalog, build: Any, prompt: Any) -> None:
    model, ids = build().train(training), prompt(2)
    stock = gradients(model, ids)
    with patched(model, catalog=poison) as handle:
        assert same(gradients(model, ids), stock)
    without = {"kv_cache_prefill"}  # it has no gradient, and in training nothing is cached
    assert not any(reasons for definition, reasons in bypassed(handle).items() if definition not in without)
    asked = {site.definition: site.training for site in handle.report().sites if site.training}
    served = {"rms_norm", "fused_add_rms_norm", "swiglu", "rope_neox", "cross_entropy", "attention_prefill"}
    assert set(asked) == served
    keys = [key for reports in asked.values() for report in reports for key in report.keys]
    assert all(not key.solution and "it has no verified backward" in key.reason for key in keys)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_computes_the_same_twice(
    reentrant: bool, poison: Catalog, build: Any, prompt: Any
) -> None:
    model, ids = build().train(), prompt(2)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    stock = gradients(model, ids)
    with patched(model, catalog=poison):
        assert same(gradients(model, ids), stock)


def test_adapter_in_a_frozen_model_gets_its_gradient(poison: Catalog, build: Any, prompt: Any) -> None:
    class Adapter(torch.nn.Module):
        def __init__(self, base: torch.nn.Linear) -> None:
            super().__init__()
            self.base = base
            self.delta = torch.nn.Parameter(torch.full_like(base.weight, 0.01))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + torch.nn.functional.linear(x, self.delta)

    model, ids = build().requires_grad_(False), prompt()
    mlp = model.model.layers[0].mlp
    mlp.up_proj = Adapter(mlp.up_proj)

    def gradient() -> torch.Tensor:
        (found,) = torch.autograd.grad(model(ids, labels=ids).loss, mlp.up_proj.delta)
        return found

    stock = gradient()
    with patched(model, catalog=poison, ops=["swiglu"]):
        assert torch.equal(gradient(), stock)


def transformed(model: Any, hidden: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:
    """Ways to run one decoder layer's MLP behind its norm that are not plain eager inference."""
    layer = model.model.layers[0]

    def block(x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = layer.mlp(layer.post_attention_layernorm(x))
        return found

    def counted() -> torch.Tensor:
        with FlopCounterMode(display=False):
            return block(hidden)

    def tangent() -> torch.Tensor:
        with forward_ad.dual_level():
            found = forward_ad.unpack_dual(block(forward_ad.make_dual(hidden, torch.ones_like(hidden)))).tangent
            assert found is not None
            return found

    return {
        "dual numbers": tangent,
        "vmap": lambda: torch.vmap(block)(hidden),
        "jvp": lambda: torch.func.jvp(block, (hidden,), (torch.ones_like(hidden),))[1],
        "jit.trace": lambda: torch.jit.trace(block, hidden[:, :1], check_trace=False)(hidden),
        "export": lambda: torch.export.export(layer.mlp, (hidden,)).module()(hidden),
        "dispatch mode": counted,
        "subclass": lambda: block(hidden.as_subclass(Subclass)).as_subclass(torch.Tensor),
    }


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        ("vmap", "must see PyTorch operations"),
        ("jvp", "must see PyTorch operations"),
        ("dual numbers", "must see PyTorch operations"),
        ("jit.trace", "must see PyTorch operations"),
        ("dispatch mode", "must see PyTorch operations"),
        ("subclass", "no plain tensor"),
        ("export", ""),  # a compiler sees no counters
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tracers_and_transforms_see_the_models_own_code(way: str, reason: str, poison: Catalog, build: Any) -> None:
    model, hidden = build().requires_grad_(False), torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        stock = transformed(model, hidden)[way]()
        with patched(model, catalog=poison) as handle:
            assert torch.equal(transformed(model, hidden)[way](), stock)
            assert all(reason in text for texts in bypassed(handle).values() for text in texts)
            assert bool(bypassed(handle)["swiglu"]) == bool(reason)
            assert model.model.norm(hidden).isnan().all()


def test_hooks_fire_on_patched_modules(kernels: Catalog, logits: Any, build: Any, prompt: Any) -> None:
    model = build()
    layer, seen = model.model.layers[0], []
    for module in (layer.input_layernorm, layer.mlp, layer.self_attn):
        module.register_forward_pre_hook(lambda module, args: seen.append(f"before {type(module).__name__}"))
        module.register_forward_hook(lambda module, args, output: seen.append(f"after {type(module).__name__}"))
    logits(model, prompt())
    stock = list(seen)
    with patched(model, catalog=kernels):
        logits(model, prompt())
    assert seen == stock * 2
    assert len(stock) == 6


def add_a_hook(mlp: Any, seen: list[int]) -> None:
    mlp.act_fn.register_forward_hook(lambda module, args, output: seen.append(1))


def replace(mlp: Any, seen: list[int]) -> None:
    class Counted(torch.nn.GELU):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(1)
            return super().forward(x)

    mlp.act_fn = Counted()


@pytest.mark.parametrize("change", [add_a_hook, replace])
def test_an_activation_with_hooks_or_replaced_later_still_runs(
    change: Any, kernels: Catalog, logits: Any, build: Any, prompt: Any
) -> None:
    model, ids, seen = build(), prompt(), []
    with patched(model, catalog=kernels) as handle:
        change(model.model.layers[0].mlp, seen)
        served = logits(model, ids)
    assert seen
    assert torch.equal(served, logits(model, ids))
    assert handle.report().hits()["swiglu"] == 1
    assert "the activation was replaced, or has hooks" in bypassed(handle)["swiglu"]


def test_forward_replaced_on_the_instance_stays_and_is_reported(
    kernels: Catalog, logits: Any, build: Any, prompt: Any
) -> None:
    model, ids, seen = build(), prompt(), []
    norm = model.model.layers[0].input_layernorm
    original = norm.forward

    @functools.wraps(original)
    def hooked(*args: Any) -> Any:
        seen.append(1)
        return original(*args)

    norm.forward = hooked
    with patched(model, catalog=kernels) as handle:
        logits(model, ids)
        assert norm.forward is hooked
    assert len(seen) == 1
    assert handle.report().hits()["rms_norm"] + handle.report().hits()["fused_add_rms_norm"] == 4
    (left,) = [site for site in handle.report().sites if site.reason]
    assert (left.module_class, left.modules) == ("LlamaRMSNorm", 1)
    assert "already replaced on the instance" in left.reason
