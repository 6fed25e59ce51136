"""Models that run kernels: the same bits and the same tokens as stock, in every way that a model is called."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilegym_db import Catalog, patched


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_is_served(dtype: torch.dtype, kernels: Catalog, logits: Any, build: Any, prompt: Any) -> None:
    model, ids = build("qwen3", dtype), prompt(3)
    stock = logits(model, ids)
    with patched(model, catalog=kernels) as handle:
        assert torch.equal(logits(model, ids), stock)
    hits = handle.report().hits()
    for definition in ("attention_decode", "attention_masked_prefill", "attention_masked_decode", "cross_entropy"):
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
    assert handle.report().hits()["rms_norm"] == 3
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
        **{"attention_masked_prefill": 0, "attention_masked_decode": 0},
    }


def test_model_without_measurements_reports_stock_code(logits: Any, build: Any, prompt: Any) -> None:
    model, ids = build(), prompt()
    stock = logits(model, ids)
    with patched(model) as handle:
        assert torch.equal(logits(model, ids), stock)
    assert {site.reason for site in handle.report().sites} == {"nothing is published for cpu"}
