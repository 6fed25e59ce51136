"""LoRA adapters as PEFT inserts them, before and after the patch.

peft is no dependency. ``Linear`` and ``adapted`` do what its ``lora.Linear`` and ``get_peft_model`` do to a model.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

from tilegym_db import Catalog, patch, patched

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Linear(torch.nn.Module):
    """A linear layer with a low-rank update beside it."""

    def __init__(self, base_layer: torch.nn.Linear, rank: int = 4, alpha: int = 8) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.in_features, self.out_features = base_layer.in_features, base_layer.out_features
        self.active_adapters, self.disable_adapters = ["default"], False
        self.scaling = {"default": alpha / rank}
        self.lora_dropout = torch.nn.ModuleDict({"default": torch.nn.Identity()})
        down, up = (
            torch.nn.Linear(base_layer.in_features, rank, bias=False),
            torch.nn.Linear(rank, base_layer.out_features, bias=False),
        )
        torch.nn.init.kaiming_uniform_(down.weight, a=math.sqrt(5))
        torch.nn.init.normal_(up.weight, std=0.1)
        self.lora_A, self.lora_B = torch.nn.ModuleDict({"default": down}), torch.nn.ModuleDict({"default": up})
        self.train(base_layer.training)

    @property
    def weight(self) -> torch.Tensor:
        return self.base_layer.weight

    @property
    def bias(self) -> torch.Tensor | None:
        return self.base_layer.bias

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.disable_adapters:
            return self.base_layer(x, *args, **kwargs)
        result = self.base_layer(x, *args, **kwargs)
        dtype = result.dtype
        for name in self.active_adapters:
            x = x.to(self.lora_A[name].weight.dtype)  # adapters are kept in float32
            result = result + self.lora_B[name](self.lora_A[name](self.lora_dropout[name](x))) * self.scaling[name]
        return result.to(dtype)


class LoraModel(torch.nn.Module):
    """What holds the model: calls and attributes go through."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.forward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)


class PeftModel(torch.nn.Module):
    """What ``get_peft_model`` returns."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.base_model = LoraModel(model)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base_model"), name)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model.generate(*args, **kwargs)


def adapted(model: Any, targets: tuple[str, ...] = TARGETS) -> Any:
    """Insert adapters into a model and wrap it."""
    torch.manual_seed(7)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if name in targets and isinstance(child, torch.nn.Linear):
                setattr(parent, name, Linear(child))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    return PeftModel(model)


class ModulesToSaveWrapper(torch.nn.Module):
    """A trained copy beside the original module."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.original_module = module
        self.modules_to_save = torch.nn.ModuleDict({"default": copy.deepcopy(module)})

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.modules_to_save["default"](*args, **kwargs)


SERVED = {"rope_neox": 2, "attention_prefill": 2, "swiglu": 2, "rms_norm": 3, "fused_add_rms_norm": 2}


def patched_in_order(model: Any, order: str, kernels: Catalog) -> tuple[Any, Any]:
    if order == "before":
        handle = patch(model, catalog=kernels)
        return adapted(model), handle
    wrapper = adapted(model)
    return wrapper, patch(wrapper, catalog=kernels)


def hits(handle: Any) -> dict[str, int]:
    return {name: count for name, count in handle.report().hits().items() if count}


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapted_model_is_served(
    order: str, dtype: Any, kernels: Catalog, build: Any, prompt: Any, logits: Any
) -> None:
    stock = logits(adapted(build(dtype=dtype)), prompt(), use_cache=False)
    plain = logits(build(dtype=dtype), prompt(), use_cache=False)
    wrapper, handle = patched_in_order(build(dtype=dtype), order, kernels)
    assert torch.equal(logits(wrapper, prompt(), use_cache=False), stock)
    assert not torch.equal(plain, stock)
    assert hits(handle) == SERVED
    handle.unpatch()
    assert torch.equal(logits(wrapper, prompt(), use_cache=False), stock)


@pytest.mark.parametrize("order", ["before", "after"])
def test_adapted_model_generates_with_kernels(order: str, kernels: Catalog, build: Any, prompt: Any) -> None:
    stock = adapted(build()).generate(prompt(), max_new_tokens=3, do_sample=False)
    wrapper, handle = patched_in_order(build(), order, kernels)
    assert torch.equal(wrapper.generate(prompt(), max_new_tokens=3, do_sample=False), stock)
    assert handle.report().hits()["swiglu"] == 6


@pytest.mark.parametrize("order", ["before", "after"])
def test_every_site_of_an_adapted_model_in_training_has_a_reason(
    order: str, kernels: Catalog, build: Any, prompt: Any
) -> None:
    wrapper, handle = patched_in_order(build(), order, kernels)
    wrapper.train()
    wrapper(prompt(), use_cache=False).logits.sum().backward()
    trained = {name for name, value in wrapper.named_parameters() if value.grad is not None}
    assert trained
    assert all("lora_" in name for name in trained)
    called = [site for site in handle.report().sites if site.definition in SERVED]
    for site in called:
        reasons = [*site.bypassed, *(key.reason for counts in site.all_counts for key in counts.keys)]
        assert reasons, site.definition
        assert all(reasons)


def test_switched_off_adapters_give_the_plain_model(kernels: Catalog, build: Any, prompt: Any, logits: Any) -> None:
    plain = logits(build(), prompt(), use_cache=False)
    wrapper, handle = patched_in_order(build(), "before", kernels)
    for module in wrapper.modules():
        if isinstance(module, Linear):
            module.disable_adapters = True
    assert torch.equal(logits(wrapper, prompt(), use_cache=False), plain)
    assert hits(handle) == SERVED


def test_copies_that_were_added_after_the_patch_have_a_reason(
    kernels: Catalog, build: Any, prompt: Any, logits: Any
) -> None:
    model = build()
    handle = patch(model, catalog=kernels)
    for layer in model.model.layers:
        layer.input_layernorm = ModulesToSaveWrapper(layer.input_layernorm)
    logits(adapted(model), prompt(), use_cache=False)
    added = [one for one in handle.report().undescribed if "after the patch" in one.reason]
    assert [(one.module_class, one.modules) for one in added] == [("LlamaRMSNorm", 2)]
    assert "unpatch() and patch() again" in added[0].reason
    handle.unpatch()
    with patched(model, catalog=kernels) as again:
        logits(model, prompt(), use_cache=False)
        assert not [one for one in again.report().undescribed if "after the patch" in one.reason]
        assert hits(again) == SERVED
