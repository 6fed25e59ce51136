"""Attention with sinks: a kernel serves calls with a plain mask, all others run the model's eager code, with equal results.

The kernels here give the bits of stock for their own Definition, so that a call served by mistake (with padding, another window,
keys of an earlier chunk) changes the result.
"""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
import transformers
from transformers.models.gpt_oss import modeling_gpt_oss

from tilegym_db import Catalog, patch, patched
from tilegym_db.models.call_site import AUTOCAST
from tilegym_db.models.parts import attention, attention_sink
from tilegym_db.models.parts.attention_sink import Masks, plain_mask, why_stock

pytestmark = pytest.mark.sweep

OPS = PREFILL, DECODE = ("attention_sink_prefill", "attention_sink_decode")
MASKED_OPS = MASKED_PREFILL, MASKED_DECODE = ("attention_sink_masked_prefill", "attention_sink_masked_decode")
STEPS = 4
WAYS: dict[str, tuple[dict[str, Any], tuple[int, int], set[str]]] = {
    # generate's options, the calls of two layers that kernels serve of a prompt of nine and of three steps after it, and what
    # the others have: one layer has a window of six
    "dynamic cache": ({}, (2, 6), set()),
    "no cache": ({"use_cache": False}, (8, 0), set()),
    "static cache": (
        {"cache_implementation": "static", "disable_compile": True},
        (
            1,
            4,
        ),  # the layer with a window, whose cache is full after the prompt, and the step that fills that of the other
        {attention_sink.OTHER_LENGTHS, attention_sink.MASKED},
    ),
    "chunked prefill": ({"prefill_chunk_size": 4}, (2, 8), {attention_sink.OTHER_LENGTHS}),  # of 4, 4 and 1
}


def sink_report(handle: Any) -> dict[str, tuple[int, dict[str, int]]]:
    """Definition -> calls that a kernel served, and the calls left to stock by reason."""
    found = {}
    for site in handle.report().sites:
        if site.kind == "attention_sink" and site.counts is not None:
            stock = {
                key.reason: key.calls - key.kernel_calls for key in site.counts.keys if key.calls > key.kernel_calls
            }
            found[site.definition] = (site.counts.kernel_calls, {**stock, **site.bypassed})
    return found


def hits(handle: Any) -> tuple[int, int]:
    report = sink_report(handle)
    return report[PREFILL][0], report[DECODE][0]


def reasons(handle: Any) -> set[str]:
    return {reason for _, left in sink_report(handle).values() for reason in left}


@pytest.fixture
def model(build: Any) -> Any:
    """gpt-oss with sinks that count, which its tiny configuration starts with any numbers of."""
    made = build("gpt_oss")
    for layer in made.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    return made


def generate(model: Any, inputs: dict[str, torch.Tensor], **options: Any) -> list[list[int]]:
    tokens: list[list[int]] = model.generate(**inputs, max_new_tokens=STEPS, do_sample=False, **options).tolist()
    return tokens


# -- served, and served right -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("batch", [1, 3])
def test_prompt_and_decoding_give_the_tokens_of_stock(
    batch: int, way: str, kernels: Catalog, model: Any, prompt: Any
) -> None:
    inputs = {"input_ids": prompt(batch)}
    options, served, left = WAYS[way]
    stock = generate(model, inputs, **options)
    with patched(model, catalog=kernels, ops=OPS) as handle:
        assert generate(model, inputs, **options) == stock
    assert (hits(handle), reasons(handle)) == (served, left)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_gives_the_bits_of_stock(
    dtype: torch.dtype, kernels: Catalog, logits: Any, model: Any, prompt: Any
) -> None:
    model, ids = model.to(dtype), prompt(3)
    stock = logits(model, ids)
    with patched(model, catalog=kernels, ops=OPS) as handle:
        assert torch.equal(logits(model, ids), stock)
    assert hits(handle) == (2, 0)


def test_kernels_are_what_answers(poison: Catalog, logits: Any, model: Any, prompt: Any) -> None:
    with patched(model, catalog=poison, ops=OPS):
        assert logits(model, prompt()).isnan().all()
    assert logits(model, prompt()).isfinite().all()


def test_inference_mode_is_served_too(kernels: Catalog, model: Any, prompt: Any) -> None:
    with torch.inference_mode():
        stock = model(prompt(2)).logits
        with patched(model, catalog=kernels, ops=OPS) as handle:
            assert torch.equal(model(prompt(2)).logits, stock)
    assert hits(handle) == (2, 0)


def test_each_mask_is_read_once_for_all_layers(
    kernels: Catalog, build: Any, logits: Any, prompt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    is_plain = attention_sink.is_plain
    monkeypatch.setattr(attention_sink, "is_plain", lambda mask, window: read.append(window) or is_plain(mask, window))
    kinds = ["sliding_attention", "full_attention"] * 3
    model = build("gpt_oss", num_hidden_layers=6, layer_types=kinds)
    with patched(model, catalog=kernels, ops=OPS) as handle:
        logits(model, prompt(2))
    assert sorted(read) == [6, 9]
    assert hits(handle) == (6, 0)


# -- any mask ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [(9, 9, 9), (9, 4, 7)], ids=["whole", "left padded"])
@pytest.mark.parametrize("way", WAYS)
def test_every_mask_is_served_with_the_tokens_of_stock(
    way: str, lengths: tuple[int, ...], kernels: Catalog, model: Any, left_padded: Any
) -> None:
    inputs, options = left_padded(lengths), WAYS[way][0]
    stock = generate(model, inputs, **options)
    with patched(model, catalog=kernels, ops=OPS) as handle:
        assert generate(model, inputs, **options) == stock
        before = sink_report(handle)
    with patched(model, catalog=kernels, ops=(*OPS, *MASKED_OPS)) as handle:
        assert generate(model, inputs, **options) == stock
        after = sink_report(handle)
    assert reasons_of(after) == set()
    for op, masked in zip(OPS, MASKED_OPS, strict=True):
        assert after[op][0] == before[op][0]  # a plain mask has the kernel that it had
        assert after[masked][0] == sum(before[op][1].values())


def reasons_of(report: dict[str, tuple[int, dict[str, int]]]) -> set[str]:
    return {reason for _, left in report.values() for reason in left}


def test_masked_kernels_alone_serve_plain_masks_unread(
    kernels: Catalog, logits: Any, model: Any, prompt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_sink, "is_plain", lambda *_: pytest.fail("the mask was read"))
    stock = logits(model, prompt(2))
    with patched(model, catalog=kernels, ops=MASKED_OPS) as handle:
        assert torch.equal(logits(model, prompt(2)), stock)
    assert sink_report(handle)[MASKED_PREFILL] == (2, {})


def test_a_captured_step_is_served_with_its_mask_as_data(
    kernels: Catalog, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Masks, "why_other", lambda *_: attention_sink.CAPTURED)
    ids, options = torch.ones(1, 4, dtype=torch.long), {"cache_implementation": "static", "disable_compile": True}
    stock = generate(model, {"input_ids": ids}, **options)
    with patched(model, catalog=kernels, ops=(*OPS, *MASKED_OPS)) as handle:
        assert generate(model, {"input_ids": ids}, **options) == stock
    assert hits(handle) == (0, 0)
    assert sink_report(handle)[MASKED_DECODE] == (6, {})


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        (numbers(2, 1, 3, 5), ""),
        (numbers(1, 1, 1, 5), ""),
        (None, attention_sink.NO_MASK),
        (numbers(2, 1, 3, 5, dtype=torch.bool), attention_sink.OTHER_NUMBERS),
        (numbers(2, 1, 3, 5, dtype=torch.bfloat16), attention_sink.OTHER_NUMBERS),
        (numbers(2, 4, 3, 5), attention.OTHER_MASK),
        (numbers(2, 1, 3, 6), attention.OTHER_MASK),
        (numbers(3, 5), attention.OTHER_MASK),
    ],
)
def test_the_mask_of_numbers_decides(mask: torch.Tensor | None, reason: str) -> None:
    q, k = torch.empty(2, 4, 3, 8), torch.empty(2, 2, 5, 8)
    assert attention_sink.why_other_numbers(mask, q, k) == reason


# -- left to stock ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_left_padding_runs_stock(way: str, kernels: Catalog, model: Any, left_padded: Any) -> None:
    inputs, options = left_padded((9, 4, 7)), WAYS[way][0]
    stock = generate(model, inputs, **options)
    with patched(model, catalog=kernels, ops=OPS) as handle:
        assert generate(model, inputs, **options) == stock
    assert attention_sink.MASKED in reasons(handle)
    # Steps of the layer with a window whose keys are no longer padded are calls like any other.
    assert hits(handle)[0] == 0


@pytest.mark.parametrize("asked", ["of the call", "of the config"])
def test_weights_that_are_asked_for_are_given(asked: str, poison: Catalog, model: Any, prompt: Any) -> None:
    options = {"output_attentions": True} if asked == "of the call" else {}
    model.config.output_attentions = asked == "of the config"
    with torch.no_grad():
        stock = model(prompt(), **options).attentions
        with patched(model, catalog=poison, ops=OPS) as handle:
            found = model(prompt(), **options).attentions
    assert len(stock) == len(found) == 2
    assert all(torch.equal(got, want) for got, want in zip(found, stock, strict=True))
    assert reasons(handle) == {attention.WEIGHTS}


def test_gradients_without_a_kernel_and_autocast_run_stock(poison: Catalog, model: Any, prompt: Any) -> None:
    with patched(model, catalog=poison, ops=OPS) as handle:
        assert model(prompt()).logits.isfinite().all()
        model.train()
        model(prompt()).logits.sum().backward()
        model.eval()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            assert model(prompt()).logits.isfinite().all()
    assert model.model.layers[0].self_attn.sinks.grad.isfinite().all()
    assert reasons(handle) == {AUTOCAST}
    unserved = "it has no verified backward: attention_sink_prefill_backward was not measured on cpu"
    (site,) = [site for site in handle.report().sites if site.definition == PREFILL]
    assert any(unserved in key.reason for counts in site.training for key in counts.keys)


def sink_gradients(model: Any, given: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    model.zero_grad()
    model(**given, labels=given["input_ids"], use_cache=False).loss.backward()
    return [layer.self_attn.sinks.grad.clone() for layer in model.model.layers]


@pytest.mark.parametrize(("lengths", "dropout", "calls"), [((9, 9), 0.0, 2), ((9, 4), 0.0, 0), ((9, 9), 0.5, 0)])
def test_training_is_served_without_padding_and_dropout(
    lengths: tuple[int, int], dropout: float, calls: int, training_kernels: Catalog, model: Any, left_padded: Any
) -> None:
    for layer in model.train().model.layers:
        layer.self_attn.attention_dropout = dropout
    given = left_padded(lengths)
    torch.manual_seed(3)
    stock = sink_gradients(model, given)
    with patched(model, catalog=training_kernels, ops=OPS) as handle:
        torch.manual_seed(3)
        for got, want in zip(sink_gradients(model, given), stock, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-7)
    assert handle.report().hits().get(f"{PREFILL}_backward", 0) == calls


def test_other_attention_runs_and_the_report_names_it(
    poison: Catalog, logits: Any, model: Any, prompt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry, eager = transformers.AttentionInterface(), modeling_gpt_oss.eager_attention_forward
    registry["mine"] = lambda *args, **kwargs: eager(*args, **kwargs)
    monkeypatch.setattr(modeling_gpt_oss, "ALL_ATTENTION_FUNCTIONS", registry)
    known_masks = transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    monkeypatch.setitem(known_masks._global_mapping, "mine", transformers.masking_utils.eager_mask)
    stock = logits(model, prompt())
    with patched(model, catalog=poison, ops=OPS) as handle:
        model.config._attn_implementation_internal = "mine"
        assert torch.equal(logits(model, prompt()), stock)
    assert reasons(handle) == {"the model's attention is 'mine'; only 'eager' is known to compute a definition"}


MODULE = types.SimpleNamespace(num_key_value_groups=2)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, attention.SCALE_IS_NO_NUMBER),
        ({"scaling": torch.tensor(0.5)}, attention.SCALE_IS_NO_NUMBER),
        ({"scaling": 0.5}, ""),
        ({"scaling": 0.5, "output_attentions": True}, attention.WEIGHTS),
        ({"scaling": 0.5, "dropout": 0.1}, attention.DROPOUT),
        ({"scaling": 0.5, "sliding_window": 3, "dropout": 0.0, "s_aux": None}, ""),
    ],
)
def test_what_a_call_is_given_decides(options: dict[str, Any], reason: str) -> None:
    q, k = torch.empty(1, 4, 5, 8), torch.empty(1, 2, 5, 8)
    assert why_stock(MODULE, q, k, k, options) == reason


def test_heads_and_values_decide() -> None:
    q, k, options = torch.empty(1, 4, 5, 8), torch.empty(1, 2, 5, 8), {"scaling": 0.5}
    assert why_stock(MODULE, q, q, q, options) == attention.OTHER_HEADS
    assert why_stock(MODULE, q, k, k[..., :4], options) == attention.OTHER_VALUES
    assert why_stock(MODULE, q[0], k[0], k[0], options) == attention.NO_HEADS


# -- the mask ---------------------------------------------------------------------------------------------------------


def mask_of(length: int, window: int, batch: int = 2) -> torch.Tensor:
    return plain_mask(length, window, torch.float32, torch.device("cpu")).repeat(batch, 1, 1, 1)


def why_other(mask: torch.Tensor | None, queries: int, keys: int, window: int, masks: Masks | None = None) -> str:
    return (masks or Masks()).why_other(mask, torch.empty(2, 4, queries, 8), torch.empty(2, 2, keys, 8), window)


def test_the_masks_of_transformers_are_plain_ones() -> None:
    config = transformers.GptOssConfig(sliding_window=4, attn_implementation="eager")
    given = {"config": config, "inputs_embeds": torch.empty(2, 9, 8), "attention_mask": None, "past_key_values": None}
    made = transformers.masking_utils.create_causal_mask(**given, position_ids=None)
    assert why_other(made, 9, 9, 9) == ""
    made = transformers.masking_utils.create_sliding_window_causal_mask(**given, position_ids=None)
    assert why_other(made, 9, 9, 4) == ""
    assert why_other(made, 9, 9, 5) == attention_sink.MASKED


def test_one_number_of_one_sequence_makes_a_mask_another() -> None:
    for place in [(1, 0, 4, 2), (0, 0, 2, 2), (1, 0, 0, 4)]:
        mask = mask_of(5, 3)
        assert why_other(mask, 5, 5, 3) == ""
        mask[place] = 0.25
        assert why_other(mask, 5, 5, 3) == attention_sink.MASKED


def test_a_step_sees_all_keys_or_runs_stock() -> None:
    mask = torch.zeros(2, 1, 1, 7)
    assert why_other(mask, 1, 7, 1) == why_other(None, 1, 7, 1) == ""
    mask[1, 0, 0, 3] = torch.finfo(torch.float32).min
    assert why_other(mask, 1, 7, 1) == attention_sink.MASKED
    assert why_other(None, 5, 5, 5) == attention_sink.NO_MASK
    assert why_other(mask_of(5, 5), 5, 9, 5) == attention_sink.OTHER_LENGTHS
    assert why_other(mask_of(5, 5)[:, 0], 5, 5, 5) == attention_sink.MASKED
    assert why_other(mask_of(5, 5).bool(), 5, 5, 5) == attention_sink.MASKED


def test_a_mask_that_was_written_to_is_read_again() -> None:
    masks, mask = Masks(), mask_of(5, 3)
    assert why_other(mask, 5, 5, 3, masks) == why_other(mask, 5, 5, 3, masks) == ""
    mask[0, 0, 1, 0] = 0.5
    assert why_other(mask, 5, 5, 3, masks) == attention_sink.MASKED
    with torch.inference_mode():
        mask = mask_of(5, 3)
        assert why_other(mask, 5, 5, 3, masks) == ""
        mask[0, 0, 1, 0] = 0.5
        assert why_other(mask, 5, 5, 3, masks) == attention_sink.MASKED


# -- found, and given back --------------------------------------------------------------------------------------------


def test_the_probe_must_give_the_bits_of_the_definition(
    restated: Any, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tilegym_db.models.upstream_code import fingerprint

    eager = modeling_gpt_oss.eager_attention_forward

    def without_a_sink(module: Any, q: Any, k: Any, v: Any, mask: Any, **options: Any) -> Any:
        sinks = torch.full_like(module.sinks, -torch.inf)
        groups = module.num_key_value_groups
        return eager(
            types.SimpleNamespace(num_key_value_groups=groups, sinks=sinks, training=False), q, k, v, mask, **options
        )

    monkeypatch.setattr(modeling_gpt_oss, "eager_attention_forward", without_a_sink)
    catalogs = [restated(name, code=[{"fingerprint": fingerprint(without_a_sink)}]) for name in (*OPS, *MASKED_OPS)]
    handle = patch(model, catalog=catalogs[-1], ops=(*OPS, *MASKED_OPS), dry_run=True)
    told = {site.reason for site in handle.report().sites if site.kind == "attention_sink"}
    assert told == {f"the results of its probe are not the bits of {name}" for name in (*OPS, *MASKED_OPS)}


def test_registry_module_and_config_are_as_before(kernels: Catalog, logits: Any, model: Any, prompt: Any) -> None:
    before = dict(vars(modeling_gpt_oss)), model.config.to_dict(), type(model.model.layers[0].self_attn).forward
    with patched(model, catalog=kernels, ops=OPS):
        logits(model, prompt())
        assert dict(vars(modeling_gpt_oss)) == before[0]
    assert (dict(vars(modeling_gpt_oss)), model.config.to_dict()) == before[:2]
    assert type(model.model.layers[0].self_attn).forward is before[2]
