"""``patch(model, verify=True)``: every kernel is tried on the model's own numbers before it serves."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from raising import raises
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from tilegym_db import Catalog, Definition, patch, patched
from tilegym_db.errors import UsageError
from tilegym_db.models.call_site import HELD
from tilegym_db.models.capture import (
    CapturedCall,
    captured_calls,
    copied,
    new_workloads,
    of_unreached,
    unreached_parts,
    workload_of,
)
from tilegym_db.models.proof import allowed_error
from tilegym_db.records import Workload
from tilegym_db.records.definition import LIMITS
from tilegym_db.records.definition_parts import layout_strides
from tilegym_db.resolver.hot_path import allocate_of

pytestmark = pytest.mark.sweep

OF_STOCK = """\
    computed = stock.run({inputs})
    values = computed if isinstance(computed, tuple) else (computed,)
    for out, value in zip({outputs}, values, strict=True):
        out.copy_(CHANGE)
"""
INACCURATE = OF_STOCK.replace("CHANGE", "value * 1.02")
WRONG_FOR_ONE_TOKEN = OF_STOCK.replace("CHANGE", "value if value.numel() > 1000 else value * 1.02")
ONE_ELEMENT_WRONG = OF_STOCK.replace("CHANGE", "value").replace(
    "copy_(value)", "copy_(value)\n        out[(0,) * out.dim()] += 4 * value.float().abs().mean()"
)
ROUNDS_ONCE = OF_STOCK.replace("CHANGE", "value").replace(
    "run({inputs})", "run(*(given.float() if hasattr(given, 'float') else given for given in ({inputs},)))"
)
EVERY_OTHER_CALL = "    run.calls = getattr(run, 'calls', 0) + 1\n" + OF_STOCK.replace(
    "CHANGE", "value * (1 + run.calls % 2)"
)
CHANGES_AN_INPUT = (
    OF_STOCK.replace("CHANGE", "value") + "    first = ({inputs},)[0]\n    first[(0,) * first.dim()] = 9\n"
)
LEAVES_ITS_OUTPUT = "    pass\n"
WRONG_IN_INFERENCE_MODE = "    import torch\n" + OF_STOCK.replace(
    "CHANGE", "value * 1.02 if torch.is_inference_mode_enabled() else value"
)
RIGHT_WITH_GRADIENTS_ALONE = "    import torch\n" + OF_STOCK.replace(
    "CHANGE", "value if torch.is_grad_enabled() else value * 1.02"
)
KEEPS_THE_TABLES = (
    "    run.kept = getattr(run, 'kept', {})\n"
    + ("    cos, sin = run.kept.setdefault((q.shape, q.dtype), (cos.clone(), sin.clone()))\n")
    + OF_STOCK.replace("CHANGE", "value")
)
ROUGH = {
    "inaccurate": (INACCURATE, "times that of stock; at most"),
    "one wrong element": (ONE_ELEMENT_WRONG, "against fp64 is|relative error|elements exceed"),
    "not deterministic": (EVERY_OTHER_CALL, "two runs on the same inputs differ"),
    "changes an input": (CHANGES_AN_INPUT, "it changes its input '(x|q|a|k|past_k)'"),
    "writes nothing": (LEAVES_ITS_OUTPUT, "two runs|NaN or infinite|residual_out against fp64|k_out: .* values differ"),
    "wrong in inference mode": (
        WRONG_IN_INFERENCE_MODE,
        "two runs on the same inputs differ; the second is in inference mode",
    ),
    "right with gradients alone": (RIGHT_WITH_GRADIENTS_ALONE, "times that of stock; at most"),
    "raises": ("    raise ValueError('boom')\n", "it raises ValueError: boom"),
}


def proofs_of(handle: Any) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for site in handle.report().sites:
        found.setdefault(site.definition, []).extend(site.proofs)
    return found


@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3", "gemma3", "olmo2", "qwen3_moe", "deepseek_v3"])
def test_each_kind_of_call_is_proved_in_prefill_and_decode(
    name: str, kernels: Catalog, logits: Any, build: Any, prompt: Any
) -> None:
    model, ids = build(name, torch.bfloat16), prompt()
    stock = logits(model, ids)
    with patched(model, catalog=kernels, verify=True) as handle:
        before = handle.report()
        found = logits(model, ids)
        if name in ("qwen3_moe", "deepseek_v3"):  # experts: products of other calls than those of the model
            torch.testing.assert_close(found, stock, atol=0.05, rtol=0.05)
        else:
            assert torch.equal(found, stock)
        if any(proofs for op, proofs in proofs_of(handle).items() if op.startswith("attention")):
            with (
                torch.no_grad()
            ):  # one position more: what attention calls decoding, with a mask where a window is full
                model(ids[:, :1], past_key_values=model(ids, use_cache=True).past_key_values)
    assert before.kernel_calls == 0  # trying a kernel is no call of the model
    assert handle.report().kernel_calls > 0
    assert before.failed_proofs == ()
    for site in before.sites:
        if site.counts is not None and site.proofs:
            stages = {"prefill", "decode"}
            if site.kind == "attention" or site.definition == "kv_cache_prefill":
                stages = {site.definition.split("_")[-1]}
            elif site.kind == "cache":
                stages = {"decode"}  # a prompt has no earlier positions
            assert {proof.stage for proof in site.proofs} == stages
            for proof in site.proofs:
                # OLMo rotates with tables of another dtype, and .to() made a bias of another one: no call of the definition.
                assert (
                    proof.holds
                    or (name == "olmo2" and "must be bfloat16, not float32" in proof.reason)
                    or (site.kind == "normed_rope" and "was not measured on cpu" in proof.reason)  # see TOGETHER
                    or (site.kind == "router" and "'bias' of topk_sigmoid_bias_groups must be float32" in proof.reason)
                )
                assert not proof.holds or site.kind == "experts" or proof.kernel_error == proof.stock_error
    report = handle.report()
    assert not any(HELD in site.bypassed for site in report.sites)
    assert {op for op, proofs in proofs_of(handle).items() if any(p.holds for p in proofs)} == {
        op for op, hits in report.hits().items() if hits
    }


@pytest.mark.parametrize("fault", ROUGH)
def test_failing_kernel_is_left_out_with_a_reason(fault: str, shop: Any, logits: Any, build: Any, prompt: Any) -> None:
    body, reason = ROUGH[fault]
    model, ids = build("qwen3", torch.bfloat16), prompt()
    stock = logits(model, ids)
    with patched(model, catalog=shop.offer(body), verify=True) as handle:
        assert torch.equal(logits(model, ids), stock)
    report = handle.report()
    assert report.kernel_calls == 0
    failed = {proof.kernel for proof in report.failed_proofs}
    ops = (
        "rms_norm",
        "fused_add_rms_norm",
        "swiglu",
        "rope_neox",
        "attention_prefill",
        "attention_decode",
        "kv_cache_concat",
        "kv_cache_prefill",
    )
    assert failed == {f"{op}_cpu" for op in ops}
    assert [proof.reason for proof in report.failed_proofs if not re.search(reason, proof.reason)] == []
    told = {key.reason for site in report.sites if site.counts for key in site.counts.keys}
    assert told
    assert all(text.startswith("verification on this model failed: ") for text in told)
    assert "verification on this model failed" in str(report)


def test_kernel_caching_rotary_tables_is_left_out(shop: Any, logits: Any, build: Any, prompt: Any) -> None:
    model, ids = build("llama", torch.bfloat16), prompt()
    stock = logits(model, ids)
    with patched(model, catalog=shop.offer(KEEPS_THE_TABLES, ops=("rope_neox",)), verify=True) as handle:
        assert torch.equal(logits(model, ids), stock)
    proofs = proofs_of(handle)["rope_neox"]
    assert {proof.stage: proof.failed for proof in proofs} == {"prefill": False, "decode": True}
    assert all("against fp64" in proof.reason for proof in proofs if proof.failed)
    assert handle.report().kernel_calls == 0


def test_two_batches_and_two_positions_of_each_are_captured(kernels: Catalog, build: Any, prompt: Any) -> None:
    model = build("llama", torch.float32)
    handle = patch(model, catalog=kernels, ops=["rope_neox", "rms_norm"])
    sites = [site for _, site in handle.sites]
    for site, calls in zip(sites, captured_calls(model, sites, prompt(2, 5)), strict=True):
        kept = {call.stage: call.all_inputs for call in calls}
        if site.dispatcher is not None:
            assert {stage: len(inputs) for stage, inputs in kept.items()} == {"prefill": 2, "decode": 4}
        if site.dispatcher is not None and site.dispatcher.definition.name == "rope_neox":
            tables = [inputs[2] for inputs in kept["decode"]]
            assert not torch.equal(tables[0], tables[1])
            assert torch.equal(tables[0], tables[2])
            assert not torch.equal(kept["prefill"][0][0], kept["prefill"][1][0])
    handle.unpatch()


def test_kernel_failing_at_one_size_serves_no_size(shop: Any, logits: Any, build: Any, prompt: Any) -> None:
    model, ids = build(dtype=torch.bfloat16), prompt(3, 20)
    stock = logits(model, ids)
    with patched(model, catalog=shop.offer(WRONG_FOR_ONE_TOKEN), verify=True, ops=["rms_norm"]) as handle:
        assert torch.equal(logits(model, ids), stock)
    (norm,) = [site for site in handle.report().sites if site.proofs]
    assert {proof.stage: proof.failed for proof in norm.proofs} == {"prefill": False, "decode": True}
    assert handle.report().kernel_calls == 0


def test_kernel_rounding_less_than_stock_has_smaller_errors(shop: Any, build: Any) -> None:
    model = build("llama", torch.bfloat16)
    # A copy rounds nothing.
    rounding = shop.offer(ROUNDS_ONCE, without=("fused_add_rms_norm", "kv_cache_concat", "kv_cache_prefill"))
    with patched(model, catalog=rounding, verify=True) as handle:
        report = handle.report()
    assert report.failed_proofs == ()
    proofs = [proof for site in report.sites for proof in site.proofs]
    tried = [proof for proof in proofs if proof.kernel is not None]
    assert len(tried) == 9  # two of attention_decode: a position more is another length
    assert all(0 < proof.kernel_error < proof.stock_error for proof in tried)


@pytest.mark.turn("tilegym_db/models/proof.py")  # compilation; eager code is compared daily
def test_a_compiled_model_runs_no_kernel_that_failed(shop: Any, logits: Any, build: Any, prompt: Any) -> None:
    model, ids = build(dtype=torch.bfloat16), prompt()
    stock = logits(model, ids)
    with patched(model, catalog=shop.offer(INACCURATE), verify=True) as handle:
        compiled = torch.compile(model, backend="eager")
        assert torch.equal(logits(compiled, ids), stock)
    assert handle.report().kernel_calls == 0


def test_verify_on_a_failing_model_undoes_the_patch(kernels: Catalog, build: Any) -> None:
    model = build()
    classes = [type(module) for module in model.modules()]
    with raises(UsageError, "options_clash", "dry_run"):
        patch(model, catalog=kernels, verify=True, dry_run=True)
    assert [type(module) for module in model.modules()] == classes
    with raises(UsageError, "model_does_not_run", "Expected tensor for argument"):  # no token ids
        patch(model, catalog=kernels, verify=True, inputs=torch.ones(1, 2))
    assert [type(module) for module in model.modules()] == classes
    with raises(UsageError, "options_clash", "inputs", "verify=True"):
        patch(model, catalog=kernels, inputs=torch.ones(1, 2, dtype=torch.long))
    with raises(UsageError, "model_in_training", "model.eval()"):
        patch(model.train(), catalog=kernels, verify=True)
    assert [type(module) for module in model.modules()] == classes


def test_a_model_without_generate_is_proved_on_one_forward(kernels: Catalog, build: Any, prompt: Any) -> None:
    body = build("llama").model
    with patched(body, catalog=kernels, verify=True, inputs={"input_ids": prompt(2, 5)}) as handle:
        proofs = [proof for site in handle.report().sites for proof in site.proofs]
    assert {proof.stage for proof in proofs} == {"prefill"}
    assert all(proof.holds for proof in proofs)


def test_nothing_is_tried_where_nothing_is_published(build: Any) -> None:
    with patched(build(), verify=True) as handle:
        proofs = [proof for site in handle.report().sites for proof in site.proofs]
    assert len(proofs) > 0
    assert {(proof.kernel, proof.reason) for proof in proofs} == {(None, "nothing is published for cpu")}


def test_verify_uses_the_left_padding_of_the_inputs(kernels: Catalog, build: Any, left_padded: Any) -> None:
    with patched(build(), catalog=kernels, verify=True, inputs=left_padded((9, 4, 7))) as handle:
        axes = {(p.stage, p.axes["M"]) for p in proofs_of(handle)["rms_norm"]}
    assert axes == {("prefill", 27), ("decode", 3)}


# -- what is captured -------------------------------------------------------------------------------------------------


def test_a_copy_keeps_strides_overlaps_and_alignment() -> None:
    memory = torch.randn(200)
    for tensor in (
        memory[3:].as_strided((2, 3, 5), (30, 5, 1)),
        memory[1:].as_strided((4, 7), (0, 2)),
        memory.view(20, 10).t(),
        torch.empty(0, 3),
        torch.tensor(2.0),
    ):
        copy = copied(tensor)
        assert torch.equal(copy, tensor)
        assert copy.stride() == tensor.stride()
        assert copy.numel() == 0 or (copy.data_ptr() - tensor.data_ptr()) % 64 == 0
        assert copy.numel() == 0 or copy.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()


def test_capture_runs_stock_code_and_leaves_no_hook(poison: Catalog, logits: Any, build: Any, prompt: Any) -> None:
    model, ids = build(), prompt()
    stock = logits(model, ids)
    handle = patch(model, catalog=poison)
    sites = [site for _, site in handle.sites]
    calls = captured_calls(model, sites, ids)
    assert not model._forward_pre_hooks
    assert all(value.isfinite().all() for kept in calls for call in kept for value in call.inputs if _is_tensor(value))
    assert logits(model, ids).isnan().all()  # and serves as before
    handle.unpatch()
    assert torch.equal(logits(model, ids), stock)


def test_parts_that_tokens_do_not_run_are_named() -> None:
    text = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 16,
    }
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32}
    config = Qwen3VLConfig(
        text_config={**text, "num_key_value_heads": 1, "vocab_size": 64},
        vision_config={**vision, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    )
    model: Any = Qwen3VLForConditionalGeneration(config).eval()
    ids = torch.ones(1, 4, dtype=torch.long)
    assert unreached_parts(model, ids) == ("model.visual (Qwen3VLVisionModel)",)
    assert unreached_parts(model.model.language_model, ids) == ()
    assert of_unreached(()) == ""


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def test_allowed_error_follows_stock_and_one_rounding() -> None:
    assert allowed_error(3e-3, 1e-3, torch.bfloat16) == pytest.approx(6e-3)
    assert allowed_error(0.0, 1e-3, torch.bfloat16) == pytest.approx(2e-3)
    assert allowed_error(5e-8, 2e-8, torch.float32) == LIMITS["float32"].tau


# -- captured calls as workloads --------------------------------------------------------------------------------------


def test_workloads_say_sizes_scalars_strides_and_the_stage(kernels: Catalog, build: Any, prompt: Any) -> None:
    model = build("qwen3", torch.bfloat16)
    with patched(model, catalog=kernels, verify=True, inputs=prompt(2, 5)) as handle:
        workloads = handle.workloads
    for workload in workloads:
        workload.check_against(kernels.definition(workload.definition))
    norms = [w for w in workloads if w.definition == "rms_norm"]
    sizes = {(w.axes["M"], w.axes["N"], w.tags[0]) for w in norms}
    tokens = {"stage:prefill": 10, "stage:decode": 2}
    assert sizes == {
        (count * heads, width, stage)
        for (stage, count), (heads, width) in itertools.product(tokens.items(), ((1, 64), (4, 16), (2, 16)))
    }
    assert {w.scalars()["eps"] for w in norms} == {1e-6}
    (rope,) = [w for w in workloads if w.definition == "rope_neox" and w.axes["S"] == 5]
    definition = kernels.definition("rope_neox")
    axes = definition.bind_axes(rope.axes)
    assert layout_strides(rope.layouts["q"], (2, 4, 5, 16), axes) == (320, 16, 64, 1)
    assert layout_strides(rope.layouts["k_out"], (2, 2, 5, 16), axes) == (160, 16, 32, 1)


def test_workload_in_another_spelling_is_not_new(kernels: Catalog) -> None:
    (known, *_) = [w for w in kernels.workloads_for("rope_neox") if "strided" in w.layouts.get("q", "")]
    definition = kernels.definition("rope_neox")
    axes = definition.bind_axes(known.axes)
    layouts = {
        name: f"strided({', '.join(map(str, layout_strides(text, definition.shape_of(name, axes), axes)))})"
        for name, text in known.layouts.items()
    }
    respelled = Workload.from_dict({**known.to_dict(), "uuid": "", "layouts": layouts})
    assert respelled.uuid != known.uuid
    other = Workload.from_dict({**respelled.to_dict(), "uuid": "", "axes": {**known.axes, "D": 2 * known.axes["D"]}})
    assert new_workloads([respelled], kernels) == []
    assert [w.axes for w in new_workloads([other, other], kernels, ["model:x"])] == [other.axes]
    assert new_workloads([other], kernels, ["model:x"])[0].tags[0] == "model:x"


def test_what_a_workload_cannot_say_is_left_out(kernels: Catalog) -> None:
    definition: Definition = kernels.definition("rms_norm")
    weight, allocate = torch.ones(8), allocate_of(Catalog.default().definition("rms_norm"))
    repeated = torch.randn(1, 8).expand(4, 8)
    assert workload_of(definition, CapturedCall("prefill", (repeated, weight, 1e-6)), allocate) is None
    other_dtype = torch.randn(4, 8, dtype=torch.float64)
    assert workload_of(definition, CapturedCall("prefill", (other_dtype, weight, 1e-6)), allocate) is None
    fits = workload_of(definition, CapturedCall("prefill", (torch.randn(4, 16)[:, :8], weight, 1e-6)), allocate)
    assert fits is not None
    assert fits.layouts == {"x": "strided(16, 1)"}
