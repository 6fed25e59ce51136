"""A call site that nothing can serve costs nothing: it is never put in, or leaves the model again."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import transformers
from raising import raises

from tilegym_db import Catalog, patch, patched, patched_init
from tilegym_db.errors import UsageError
from tilegym_db.models import handle as patch_handle
from tilegym_db.models.call_site import change_class, is_patched, subclass
from tilegym_db.resolver import device

pytestmark = pytest.mark.sweep

OUT_OF_RANGE = 128  # the smallest size that was measured; the tiny models are smaller


def classes(model: Any) -> list[type]:
    return [type(module) for module in model.modules()]


def wrapped(model: Any) -> set[str]:
    return {type(module).__name__ for module in model.modules() if is_patched(module)}


def run(model: Any, ids: torch.Tensor, times: int = 1) -> None:
    with torch.no_grad():
        for _ in range(times):
            model(ids, use_cache=False)


# -- never put in -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma3", "phi3"])
def test_modules_stay_unchanged_if_nothing_is_published(name: str, build: Any) -> None:
    model = build(name)
    before = classes(model), [module.forward.__func__ for module in model.modules()]
    handle = patch(model)
    assert (classes(model), [module.forward.__func__ for module in model.modules()]) == before
    reasons = {site.reason for site in handle.report().sites if site.definition}
    assert reasons <= {
        "nothing is published for cpu",
        *(reason for reason in reasons if reason.startswith("no definition")),
    }
    assert "nothing is published for cpu" in str(handle.report())
    assert handle.report().note.endswith("tilegym-db fit CONFIG, or tilegym_db.fit(model, inputs)")
    patch(model).unpatch()  # it is not patched, so that it may be patched again


def test_a_dtype_that_nothing_was_measured_in_is_left_alone(shop: Any, build: Any) -> None:
    catalog = shop.offer()
    shop.entries = [entry for entry in shop.entries if entry["dtypes"].get("T") == "bfloat16"]
    shop.republish()
    precise, rounded = build(), build(dtype=torch.bfloat16)
    reasons = {site.reason for site in patch(precise, catalog=catalog).report().sites}
    assert not wrapped(precise)
    assert all("was not measured on cpu with float32 (measured: T=bfloat16)" in reason for reason in reasons)
    patch(rounded, catalog=catalog)
    assert wrapped(rounded) == {"LlamaRMSNorm", "LlamaMLP", "LlamaAttention", "LlamaDecoderLayer", "LlamaForCausalLM"}


def test_modules_stay_unchanged_if_no_kernel_is_faster(shop: Any, build: Any) -> None:
    catalog = shop.offer()
    for candidate in (one for entry in shop.entries for one in entry["candidates"]):
        candidate["speedup_ci_low"] = 0.9
    shop.republish()
    model = build()
    reasons = {site.reason for site in patch(model, catalog=catalog).report().sites}
    assert not wrapped(model)
    assert all(reason.startswith("no verified solution of ") and "CI low 0.900" in reason for reason in reasons)


def test_only_what_can_be_served_is_put_in(shop: Any, build: Any, prompt: Any, logits: Any) -> None:
    model, ids = build(), prompt()
    stock = logits(model, ids)
    with patched(model, catalog=shop.offer(ops=("swiglu", "rope_neox"))) as handle:
        assert wrapped(model) == {"LlamaMLP", "LlamaAttention"}
        assert torch.equal(logits(model, ids), stock)
    assert handle.report().hits() == {"swiglu": 2, "rope_neox": 2}


def test_a_patch_that_is_proved_captures_the_calls_all_the_same(build: Any) -> None:
    model = build()
    handle = patch(model, verify=True)
    assert not wrapped(model)
    assert {workload.definition for workload in handle.workloads} >= {"rms_norm", "swiglu", "rope_neox"}
    assert {site.reason for site in handle.report().sites} == {"nothing is published for cpu"}


ATTENTION = ("attention_prefill", "attention_decode", "attention_masked_prefill", "attention_masked_decode")


# -- leaves the model again -------------------------------------------------------------------------------------------


def forget_compiled_code() -> None:
    """Call sites stay while code that torch.compile made is about, such as that of the tests before."""
    torch._dynamo.reset()


def test_call_sites_whose_calls_never_match_leave_the_model(shop: Any, build: Any, prompt: Any, logits: Any) -> None:
    forget_compiled_code()
    model, ids = build(), prompt()
    before, stock = classes(model), logits(model, ids)
    handle = patch(model, catalog=shop.offer(smallest=OUT_OF_RANGE))
    # A forward of two layers has three sums with a norm after them, so their call site gives up first.
    run(model, ids, patch_handle.PATIENCE * 2 // 3 - 1)
    assert wrapped(model) == {"LlamaRMSNorm", "LlamaMLP", "LlamaAttention", "LlamaDecoderLayer", "LlamaForCausalLM"}
    run(model, ids, 2)
    assert torch.equal(logits(model, ids), stock)
    run(model, ids, patch_handle.PATIENCE)
    assert wrapped(model) <= {"LlamaAttention", "LlamaForCausalLM"}  # single positions and the loss were never called
    reasons = {site.definition: site.reason for site in handle.report().sites}
    never_called = ("attention_decode", "attention_masked_prefill", "attention_masked_decode", "cross_entropy")
    for definition in (*never_called, "kv_cache_concat", "kv_cache_prefill"):
        assert reasons.pop(definition) == ""
    assert all("calls; it runs the model's own code" in reason for reason in reasons.values())
    handle.unpatch()
    assert classes(model) == before


def test_sites_that_nothing_asks_leave_long_after_others(
    shop: Any, build: Any, prompt: Any, logits: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_compiled_code()
    monkeypatch.setattr(patch_handle, "LONGER", 8)
    model, ids = build(), prompt()
    monkeypatch.setattr(model, "can_generate", lambda: False, raising=False)  # as of a vision tower
    stock = logits(model, ids)
    with patched(model, catalog=shop.offer(ops=ATTENTION, smallest=OUT_OF_RANGE), ops=ATTENTION) as handle:
        run(model, ids, patch_handle.PATIENCE + 7)
        assert wrapped(model) == {"LlamaAttention"}
        run(model, ids, 2)
        assert not wrapped(model)
        assert torch.equal(logits(model, ids), stock)
    reasons = {site.definition: site.reason for site in handle.report().sites if site.definition in ATTENTION}
    assert reasons.pop("attention_prefill").startswith("no kernel could serve any of its first")
    assert {*reasons.values()} == {patch_handle.NEVER_ASKED}


def test_sites_of_steps_stay_in_a_model_that_generates(
    shop: Any, build: Any, prompt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_compiled_code()
    monkeypatch.setattr(patch_handle, "LONGER", 8)
    model, ids = build(), prompt()
    catalog = shop.offer(ops=ATTENTION, smallest_of=(("attention_prefill", OUT_OF_RANGE),))
    with patched(model, catalog=catalog, ops=ATTENTION) as handle:
        run(model, ids, patch_handle.PATIENCE + 20)
        model.generate(ids, max_new_tokens=3, do_sample=False)
        assert handle.report().hits()["attention_decode"] == 4


def test_a_site_that_was_asked_does_not_leave_with_others(shop: Any, build: Any, prompt: Any) -> None:
    forget_compiled_code()
    model, ids = build(), prompt()
    catalog = shop.offer(ops=ATTENTION, smallest_of=(("attention_prefill", OUT_OF_RANGE),))
    with patched(model, catalog=catalog, ops=ATTENTION) as handle, pytest.MonkeyPatch.context() as changed:
        changed.setattr(patch_handle, "LONGER", 2)
        model.generate(ids, max_new_tokens=3, do_sample=False)
        run(model, ids, 2 * patch_handle.PATIENCE)
        assert wrapped(model) == {"LlamaAttention"}
        before = handle.report().hits()["attention_decode"]
        model.generate(ids, max_new_tokens=3, do_sample=False)
    assert handle.report().hits()["attention_decode"] == before + 4


def test_a_class_on_top_of_the_patched_one_is_not_forgotten(shop: Any, build: Any, prompt: Any) -> None:
    """The class that decodes in graphs on a GPU is on top of that of the loss while other call sites leave the model."""
    forget_compiled_code()
    model, ids = build(), prompt()
    before = classes(model)
    handle = patch(model, catalog=shop.offer(smallest=OUT_OF_RANGE))
    patched_class = type(model)
    change_class(model, subclass(patched_class, patched_class.forward))
    run(model, ids, 2 * patch_handle.PATIENCE)
    change_class(model, patched_class)
    handle.unpatch()
    assert classes(model) == before


def test_a_call_site_that_was_served_once_stays(shop: Any, build: Any, prompt: Any) -> None:
    model = build("llama")
    catalog = shop.offer(ops=("swiglu",))
    for entry in shop.entries:
        entry["axes"]["M"] = min(entry["axes"]["M"], 9)
    shop.republish()
    with patched(model, catalog=catalog) as handle:
        run(model, prompt(1, 9))
        run(model, prompt(1, 40), 3 * patch_handle.PATIENCE)
        assert wrapped(model) == {"LlamaMLP"}
        run(model, prompt(1, 9))
    assert handle.report().hits() == {"swiglu": 4}


def test_nothing_leaves_while_compiled_code_is_about(shop: Any, build: Any, prompt: Any) -> None:
    model, ids = build(), prompt()
    torch.compiler.reset()
    try:
        with patched(model, catalog=shop.offer(ops=("swiglu",), smallest=OUT_OF_RANGE)):
            compiled: Any = torch.compile(model.model.layers[0].mlp, backend="eager")
            with torch.no_grad():
                compiled(torch.randn(1, 9, 64))
            run(model, ids, 2 * patch_handle.PATIENCE)
            assert wrapped(model) == {"LlamaMLP"}
            torch.compiler.reset()
            run(model, ids, 2)
            assert not wrapped(model)
    finally:
        torch.compiler.reset()


def test_nothing_leaves_while_a_graph_is_captured(
    shop: Any, build: Any, prompt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.compiler.reset()
    model, ids = build(), prompt()
    with patched(model, catalog=shop.offer(ops=("swiglu",), smallest=OUT_OF_RANGE)):
        run(model, ids, patch_handle.PATIENCE - 1)
        monkeypatch.setattr(device, "is_capturing", lambda: True)
        run(model, ids, 2)
        assert wrapped(model) == {"LlamaMLP"}
        monkeypatch.undo()
        run(model, ids, 2)
        assert not wrapped(model)


def test_calls_that_ask_for_no_kernel_are_no_evidence(poison: Catalog, build: Any, prompt: Any) -> None:
    model, ids = build(), prompt()
    with patched(model, catalog=poison, ops=["swiglu"]):
        for _ in range(2 * patch_handle.PATIENCE):
            model(ids, use_cache=False)  # grad is enabled
        assert wrapped(model) == {"LlamaMLP"}


# -- what cannot be patched -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [None, "meta-llama/Llama-3.2-1B", torch.nn.Linear, 3])
def test_what_is_no_model_is_refused(model: Any) -> None:
    with raises(UsageError, "model_kind", "torch.nn.Module", "Try: patch("):
        patch(model)


@pytest.mark.parametrize("model", [torch.nn.Linear(4, 4), torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())])
def test_a_model_without_any_part_is_refused(model: Any) -> None:
    with raises(UsageError, "nothing_to_patch", type(model).__name__):
        patch(model)


def test_patched_init_accepts_models_without_parts(build: Any) -> None:
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1])
    with patched_init() as handles:
        without = transformers.ResNetModel(config)
        kept = build()
    assert [len(handle.report().sites) > 0 for handle in handles] == [False, True]
    assert without is not kept


# -- what a patch costs -----------------------------------------------------------------------------------------------


@pytest.mark.alone  # 0.11 to 0.19 s beside other tests
def test_a_second_patch_of_a_deep_model_is_quick(shop: Any, build: Any) -> None:
    shop.offer()
    model = build("llama", num_hidden_layers=32)
    patch(model).unpatch()
    spent_s = []
    for _ in range(3):
        start = time.process_time()
        patch(model).unpatch()
        spent_s.append(time.process_time() - start)
    assert min(spent_s) < 0.15  # 0.03 s on an idle machine; reading the catalog anew took 0.25 s
