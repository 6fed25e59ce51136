"""Modules with hooks as accelerate sets them: kernels serve inside the hooks, and after they are removed.

accelerate is no dependency; these are its functions ``add_hook_to_module`` and ``remove_hook_from_module`` without the options.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tilegym_db import Catalog, patched

pytestmark = [pytest.mark.slow, pytest.mark.sweep]


class Hook:
    """Counts calls; with ``offloads`` the weights of the module are in memory only during a call, as with AlignDevicesHook."""

    def __init__(self, module: Any, *, offloads: bool) -> None:
        self.calls = 0
        self.weights = {name: value.data for name, value in module.named_parameters(recurse=False)} if offloads else {}
        self.post_forward(module, None)

    def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        self._set(module, lambda value: value)
        return args, kwargs

    def post_forward(self, module: Any, output: Any) -> Any:
        self._set(module, lambda value: value.to("meta"))
        return output

    def _set(self, module: Any, place: Any) -> None:
        for name, value in self.weights.items():
            module._parameters[name] = torch.nn.Parameter(place(value), requires_grad=False)


def add_hook(module: Any, *, offloads: bool = False) -> None:
    module._old_forward = module.forward
    module._hf_hook = Hook(module, offloads=offloads)

    def new_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = module._hf_hook.pre_forward(module, *args, **kwargs)
        output = module._old_forward(*args, **kwargs)
        return module._hf_hook.post_forward(module, output)

    module.forward = functools.update_wrapper(functools.partial(new_forward, module), module._old_forward)


def remove_hook(module: Any) -> None:
    hook = vars(module).pop("_hf_hook")
    hook.pre_forward(module)
    module.forward = vars(module).pop("_old_forward")


def hooked(model: Any, *, offloads: bool = False) -> list[Any]:
    modules = [module for module in model.modules() if module._parameters or type(module).__name__.endswith("Layer")]
    for module in modules:
        add_hook(module, offloads=offloads)
    return modules


def own(model: Any) -> list[dict[str, Any]]:
    """The entries of all instances, without weights, which offloading replaces."""
    kept = []
    for module in model.modules():
        kept.append({key: value for key, value in vars(module).items() if key not in ("_parameters", "_modules")})
    return kept


@pytest.mark.parametrize("offloads", [False, True])
def test_kernels_serve_inside_the_hooks(offloads: bool, kernels: Catalog, build: Any, prompt: Any, logits: Any) -> None:
    model = build()
    stock = logits(model, prompt())
    modules = hooked(model, offloads=offloads)
    before = own(model)
    with patched(model, catalog=kernels) as handle:
        assert torch.equal(logits(model, prompt()), stock)
        hits = handle.report().hits()
    assert own(model) == before
    assert {name: hits[name] for name in ("rms_norm", "swiglu", "rope_neox")} == {
        "rms_norm": 5,
        "swiglu": 2,
        "rope_neox": 2,
    }
    assert all(module._hf_hook.calls == 1 for module in modules)
    assert torch.equal(logits(model, prompt()), stock)


def test_a_model_is_served_after_its_hooks_were_removed(kernels: Catalog, build: Any, prompt: Any, logits: Any) -> None:
    model = build()
    stock = logits(model, prompt())
    for module in hooked(model):
        remove_hook(module)
    before = own(model)
    with patched(model, catalog=kernels) as handle:
        assert torch.equal(logits(model, prompt()), stock)
        assert handle.report().hits()["fused_add_rms_norm"] == 3
    assert own(model) == before


def test_hooks_may_be_removed_while_patched(kernels: Catalog, build: Any, prompt: Any, logits: Any) -> None:
    model = build()
    stock = logits(model, prompt())
    modules = hooked(model)
    with patched(model, catalog=kernels) as handle:
        for module in modules:
            remove_hook(module)
        assert torch.equal(logits(model, prompt()), stock)
        assert handle.report().hits()["rms_norm"] >= 2
    assert all(module.forward.__func__ is type(module).forward for module in modules)


def test_another_forward_on_an_instance_is_left_alone(kernels: Catalog, build: Any) -> None:
    model = build()
    model.model.norm.forward = lambda x: x
    with patched(model, catalog=kernels) as handle:
        (site,) = (site for site in handle.report().sites if "already replaced" in site.reason)
        assert site.modules == 1


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "qwen3_moe"])
def test_a_patched_model_runs_on_the_meta_device(name: str, kernels: Catalog, build: Any, prompt: Any) -> None:
    model = build(name)
    with patched(model, catalog=kernels) as handle, torch.no_grad():
        out = model.to("meta")(prompt().to("meta"))
        assert out.logits.is_meta
        assert handle.report().kernel_calls == 0
