"""LoRA adapters as PEFT inserts them, before and after the patch.

peft is no dependency; ``lora`` does what it does to a model.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from lora import Linear, adapted

from tilegym_db import Catalog, patch, patched


class ModulesToSaveWrapper(torch.nn.Module):
    """A trained copy beside the original module."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.original_module = module
        self.modules_to_save = torch.nn.ModuleDict({"default": copy.deepcopy(module)})

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.modules_to_save["default"](*args, **kwargs)


# Two layers. The last sum of the first is normed for the second, so only the first norm and the model's last stay alone.
SERVED = {"rope_neox": 2, "attention_prefill": 2, "swiglu": 2, "rms_norm": 2, "fused_add_rms_norm": 3}


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


@pytest.mark.turn("tilegym_db/models/call_site.py", "tilegym_db/models/patch.py")  # patches several models
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
        # A layer whose norm is wrapped norms its own input.
        assert hits(again) == SERVED | {"rms_norm": 3, "fused_add_rms_norm": 2}
