"""Models that run kernels: the same bits and the same tokens as stock, in every way that a model is called."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilegym_db import Catalog, patched

OPS = ("rms_norm", "swiglu", "rope_neox")
MODELS = ("llama", "mistral", "qwen2", "qwen3")
GENERATE: dict[str, dict[str, Any]] = {
    "dynamic cache": {},
    "static cache": {"cache_implementation": "static", "disable_compile": True},
    "chunked prefill": {"prefill_chunk_size": 4},
    "no cache": {"use_cache": False},
}


def left_padded(prompt: Any, lengths: tuple[int, ...]) -> dict[str, torch.Tensor]:
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, -length:] = prompt(1, length, seed=row)
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def generate(model: Any, inputs: dict[str, torch.Tensor], **options: Any) -> list[list[int]]:
    tokens: list[list[int]] = model.generate(**inputs, max_new_tokens=6, do_sample=False, **options).tolist()
    return tokens


@pytest.mark.parametrize("name", MODELS)
def test_prefill_runs_a_kernel_at_every_call_site_and_gives_the_bits_of_stock(
    name: str, kernels: Catalog, logits: Any, build: Any, prompt: Any
) -> None:
    model, ids = build(name), prompt(2)
    stock = logits(model, ids)
    with patched(model, catalog=kernels) as handle:
        assert torch.equal(logits(model, ids), stock)
    norms = {"qwen3": 9}.get(name, 5)  # Qwen3 normalises q and k per head too
    assert handle.report().hits() == {"rope_neox": 2, "rms_norm": norms, "swiglu": 2}


@pytest.mark.parametrize("way", GENERATE)
@pytest.mark.parametrize("name", MODELS)
def test_greedy_generation_gives_the_tokens_of_stock(
    name: str, way: str, kernels: Catalog, build: Any, prompt: Any
) -> None:
    model, options = build(name), GENERATE[way]
    for inputs in ({"input_ids": prompt()}, left_padded(prompt, (9, 4, 7))):
        stock = generate(model, inputs, **options)
        with patched(model, catalog=kernels) as handle:
            assert generate(model, inputs, **options) == stock
        report = handle.report()
        assert set(report.hits()) == set(OPS)
        assert all(site.counts and site.counts.stock_calls == 0 and not site.bypassed for site in report.sites)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_is_served(dtype: torch.dtype, kernels: Catalog, logits: Any, build: Any, prompt: Any) -> None:
    model, ids = build("qwen3", dtype), prompt(3)
    stock = logits(model, ids)
    with patched(model, catalog=kernels) as handle:
        assert torch.equal(logits(model, ids), stock)
    assert all(count > 0 for count in handle.report().hits().values())


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
    assert hits["rope_neox"] == 0  # q is bf16 and its tables are fp32 here: another operator, which nobody measured


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
    assert handle.report().hits()["rms_norm"] == 5
    assert torch.equal(served, logits(model, ids))


def test_only_the_ops_asked_for_are_served(kernels: Catalog, logits: Any, build: Any, prompt: Any) -> None:
    model = build()
    with patched(model, catalog=kernels, ops=["swiglu"]) as handle:
        logits(model, prompt())
    assert handle.report().hits() == {"swiglu": 2}
    assert {site.reason for site in handle.report().sites} == {"", "not among the ops asked for"}


def test_a_kernel_that_raises_is_quarantined_and_stock_code_answers(
    shop: Any, logits: Any, build: Any, prompt: Any
) -> None:
    model, ids = build("qwen3"), prompt()
    stock = logits(model, ids)
    with patched(model, catalog=shop.offer("    raise ValueError('boom')\n")) as handle:
        with pytest.warns(RuntimeWarning, match="boom"):
            assert torch.equal(logits(model, ids), stock)
        assert torch.equal(logits(model, ids), stock)
    report = handle.report()
    assert report.kernel_calls == 0
    assert [len(site.counts.failures) for site in report.sites if site.counts] == [1, 3, 1]  # one a key, not one a call


def test_without_measurements_the_model_runs_its_own_code_and_says_why(logits: Any, build: Any, prompt: Any) -> None:
    model, ids = build(), prompt()
    stock = logits(model, ids)
    with patched(model) as handle:
        assert torch.equal(logits(model, ids), stock)
    reasons = {key.reason for site in handle.report().sites if site.counts for key in site.counts.keys}
    assert reasons == {"nothing is published for cpu"}
