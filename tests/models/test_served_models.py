"""Models that run kernels: the same bits and the same tokens as stock, in every way that a model is called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.utils import parametrize

from tilegym_db import Catalog, patch, patched
from tilegym_db.paths import shipped_root

pytestmark = pytest.mark.sweep


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_is_served(dtype: torch.dtype, kernels: Catalog, logits: Any, build: Any, prompt: Any) -> None:
    model, ids = build("qwen3", dtype), prompt(3)
    stock = logits(model, ids)
    with patched(model, catalog=kernels) as handle:
        assert torch.equal(logits(model, ids), stock)
    hits = handle.report().hits()
    others = (
        "attention_decode",
        "attention_masked_prefill",
        "attention_masked_decode",
        "cross_entropy",
        "kv_cache_concat",
    )
    for definition in others:
        assert hits.pop(definition) == 0  # a prompt alone, without padding and labels
    assert all(count > 0 for count in hits.values())


def test_autocast_keeps_its_dtypes(kernels: Catalog, build: Any, prompt: Any) -> None:
    model, ids = build(), prompt(2)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        stock = model(ids, output_hidden_states=True)
        with patched(model, catalog=kernels) as handle:
            found = model(ids, output_hidden_states=True)
    for want, got in zip(stock.hidden_states, found.hidden_states, strict=True):
        assert want.dtype == got.dtype
        assert torch.equal(want, got)
    hits = handle.report().hits()
    assert hits["swiglu"] == 2
    assert hits["rope_neox"] == 0  # q is bf16 and its tables are fp32 here: another operator, without a measurement


def test_outputs_are_recorded_as_ever(kernels: Catalog, build: Any, prompt: Any) -> None:
    model, ids = build(attn_implementation="eager"), prompt()
    options = {"output_attentions": True, "output_hidden_states": True}
    with torch.no_grad():
        stock = model(ids, **options)
        with patched(model, catalog=kernels):
            found = model(ids, **options)
    for name in ("attentions", "hidden_states"):
        assert len(found[name]) == len(stock[name]) > 0
        assert all(torch.equal(got, want) for got, want in zip(found[name], stock[name], strict=True))


def test_a_model_follows_its_dtype_after_the_patch(kernels: Catalog, logits: Any, build: Any, prompt: Any) -> None:
    model, ids = build(), prompt()
    with patched(model, catalog=kernels) as handle:
        model.to(torch.bfloat16)
        served = logits(model, ids)
    assert handle.report().hits()["rms_norm"] == 2
    assert torch.equal(served, logits(model, ids))


def test_only_the_ops_asked_for_are_served(kernels: Catalog, logits: Any, build: Any, prompt: Any) -> None:
    model = build()
    with patched(model, catalog=kernels, ops=["swiglu"]) as handle:
        logits(model, prompt())
    assert handle.report().hits() == {"swiglu": 2}
    assert {site.reason for site in handle.report().sites} == {"", "not among the ops asked for"}


def test_raising_kernel_is_quarantined_and_stock_runs(shop: Any, logits: Any, build: Any, prompt: Any) -> None:
    model, ids = build("qwen3"), prompt()
    stock = logits(model, ids)
    with patched(model, catalog=shop.offer("    raise ValueError('boom')\n")) as handle:
        with pytest.warns(RuntimeWarning, match="boom"):
            assert torch.equal(logits(model, ids), stock)
        assert torch.equal(logits(model, ids), stock)
    report = handle.report()
    assert report.kernel_calls == 0
    failures = {site.definition: len(site.counts.failures) for site in report.sites if site.counts}
    assert failures == {  # one a key, not one a call
        **{"rope_neox": 1, "swiglu": 1, "rms_norm": 3, "fused_add_rms_norm": 1},
        **{"attention_prefill": 1, "attention_decode": 0, "cross_entropy": 0},
        **{"attention_masked_prefill": 0, "attention_masked_decode": 0, "kv_cache_concat": 0, "kv_cache_prefill": 1},
    }


def test_model_without_measurements_reports_stock_code(logits: Any, build: Any, prompt: Any) -> None:
    model, ids = build(), prompt()
    stock = logits(model, ids)
    with patched(model) as handle:
        assert torch.equal(logits(model, ids), stock)
    assert {site.reason for site in handle.report().sites} == {"nothing is published for cpu"}


class Doubled(torch.nn.Module):
    """A parametrization: the weight is computed from another parameter at each call."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def _replaced(model: Any, weights: dict[str, torch.Tensor]) -> Any:
    return lambda ids: torch.func.functional_call(model, weights, (ids,)).logits


WEIGHTS: dict[str, Callable[[Any], Any]] = {
    "another parameter": lambda norm: setattr(norm, "weight", torch.nn.Parameter(2 * norm.weight, requires_grad=False)),
    "other data": lambda norm: setattr(norm.weight, "data", 2 * norm.weight.data),
    "in place": lambda norm: norm.weight.data.mul_(2),
    "a parametrization": lambda norm: parametrize.register_parametrization(norm, "weight", Doubled()),
    "an attribute": lambda norm: (
        doubled := 2 * norm.weight.data,
        delattr(norm, "weight"),
        setattr(norm, "weight", doubled),
    ),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_changed_weights_of_norms_are_read(name: str, kernels: Catalog, build: Any, prompt: Any, logits: Any) -> None:
    stock, model = build(), build()
    handle = patch(model, catalog=kernels)  # a parametrization leaves nothing that a block could restore
    logits(model, prompt())
    served = handle.report().hits()["rms_norm"]
    for one in (stock, model):
        for layer in one.model.layers:
            WEIGHTS[name](layer.input_layernorm)
    assert torch.equal(logits(model, prompt()), logits(stock, prompt()))
    assert handle.report().hits()["rms_norm"] > served


def test_weights_of_a_functional_call_are_read(kernels: Catalog, build: Any, prompt: Any) -> None:
    stock, model = build(), build()
    weights = {name: 2 * weight.detach() for name, weight in stock.named_parameters() if "norm" in name}
    with patched(model, catalog=kernels) as handle, torch.no_grad():
        assert torch.equal(_replaced(model, weights)(prompt()), _replaced(stock, weights)(prompt()))
        assert handle.report().hits()["rms_norm"] > 0


def test_hooks_of_all_modules_see_every_module(kernels: Catalog, build: Any, prompt: Any, logits: Any) -> None:
    stock, model, seen = build(), build(), list[str]()
    with patched(model, catalog=kernels):
        hook = torch.nn.modules.module.register_module_forward_hook(lambda one, *_: seen.append(type(one).__name__))
        try:
            expected, of_stock = logits(stock, prompt()), Counter(seen)
            seen.clear()
            found = logits(model, prompt())
        finally:
            hook.remove()
    assert torch.equal(found, expected)
    assert Counter(seen) == of_stock


def test_a_served_call_enters_few_functions(monkeypatch: pytest.MonkeyPatch, shop: Any) -> None:
    monkeypatch.syspath_prepend(str(shipped_root() / "benchmarks"))
    import call_site_host

    stock, model = call_site_host.tiny(1), call_site_host.tiny(1)
    with (
        torch.no_grad(),
        patched(model, catalog=shop.offer(call_site_host.NOTHING, ops=call_site_host.PARTS)) as handle,
    ):
        model(prompt_of(8))
        entered = {}
        for name, pair in call_site_host.pairs_of(stock, model, 8).items():
            pair.patched()
            before = handle.report().hits()[name]
            entered[name] = call_site_host.entered(pair.patched)
            assert (name, handle.report().hits()[name]) == (name, before + 1)
    most = {"rms_norm": 18, "fused_add_rms_norm": 20, "rope_neox": 13, "attention_prefill": 24, "swiglu": 42}
    assert {name: entered[name] for name, count in most.items() if entered[name] > count} == {}


def prompt_of(tokens: int) -> torch.Tensor:
    return torch.arange(1, tokens + 1)[None]
