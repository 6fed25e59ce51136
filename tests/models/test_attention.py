"""Attention: a kernel serves exactly the calls that a Definition describes, all others run stock, with unchanged results.

The kernels here give the bits of stock for their own Definition, causal or one position, so that a call served by mistake
(with a mask, a window, other lengths) changes the result.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import json
import os
import subprocess
import sys
import threading
import types
import weakref
from typing import Any

import pytest
import torch
import transformers
from transformers.models.llama import modeling_llama

from tilegym_db import Catalog, patch, patched
from tilegym_db.models.parts import attention as part
from tilegym_db.models.parts.attention import other_options, why_stock
from tilegym_db.models.upstream_code import undecorated

pytestmark = pytest.mark.sweep

OPS = PREFILL, DECODE = ("attention_prefill", "attention_decode")
LATENT = ("mla_prefill", "mla_expanded_decode")
STEPS = 4
WAYS: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {
    # generate's options, and the layers' calls that kernels serve of a prompt and of three steps after it (two layers)
    "dynamic cache": ({}, (2, 6)),
    "no cache": ({"use_cache": False}, (8, 0)),
    "static cache": (
        {"cache_implementation": "static", "disable_compile": True},
        (2, 0),
    ),  # empty at first, then masked
    "chunked prefill": ({"prefill_chunk_size": 4}, (2, 8)),  # of chunks of 4, 4 and 1: the first, and the last
}


def attention_report(handle: Any) -> dict[str, tuple[int, dict[str, int]]]:
    """Definition -> calls that a kernel served, and the calls left to stock by reason."""
    found = {}
    for site in handle.report().sites:
        if site.kind == "attention" and site.counts is not None:
            stock = {
                key.reason: key.calls - key.kernel_calls for key in site.counts.keys if key.calls > key.kernel_calls
            }
            found[site.definition] = (site.counts.kernel_calls, {**stock, **site.bypassed})
    return found


def hits(handle: Any) -> tuple[int, int]:
    report = attention_report(handle)
    return report[PREFILL][0], report[DECODE][0]


def reasons(handle: Any) -> set[str]:
    return {reason for _, left in attention_report(handle).values() for reason in left}


def generate(model: Any, inputs: dict[str, torch.Tensor], **options: Any) -> list[list[int]]:
    tokens: list[list[int]] = model.generate(**inputs, max_new_tokens=STEPS, do_sample=False, **options).tolist()
    return tokens


# -- served, and served right -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_prompt_and_decoding_give_the_tokens_of_stock(
    name: str, batch: int, way: str, kernels: Catalog, build: Any, prompt: Any
) -> None:
    model, inputs = build(name), {"input_ids": prompt(batch)}
    options, served = WAYS[way]
    stock = generate(model, inputs, **options)
    with patched(model, catalog=kernels, ops=OPS) as handle:
        assert generate(model, inputs, **options) == stock
    assert hits(handle) == served
    assert reasons(handle) <= {part.MASKED}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_left_padding_runs_stock(name: str, way: str, kernels: Catalog, build: Any, left_padded: Any) -> None:
    model, inputs = build(name), left_padded((9, 4, 7))
    options, _ = WAYS[way]
    stock = generate(model, inputs, **options)
    with patched(model, catalog=kernels, ops=OPS) as handle:
        assert generate(model, inputs, **options) == stock
    assert hits(handle) == (0, 0)
    assert reasons(handle) == {part.MASKED}


@pytest.mark.parametrize(("length", "served"), [(3, (2, 4)), (9, (0, 0))])  # of windows of 6: until they are full
def test_a_window_is_served_while_it_holds_the_whole_sequence(
    length: int, served: tuple[int, int], kernels: Catalog, build: Any, prompt: Any
) -> None:
    model, inputs = build("mistral"), {"input_ids": prompt(2, length)}
    stock = generate(model, inputs)
    with patched(model, catalog=kernels, ops=OPS) as handle:
        assert generate(model, inputs) == stock
    assert hits(handle) == served
    assert reasons(handle) == {part.MASKED}


def test_layers_with_and_without_a_window_are_distinguished(
    kernels: Catalog, logits: Any, build: Any, prompt: Any
) -> None:
    model, ids = build("gemma3"), prompt(2)
    stock = logits(model, ids)
    with patched(model, catalog=kernels, ops=OPS) as handle:
        assert torch.equal(logits(model, ids), stock)
    assert hits(handle) == (1, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_gives_the_bits_of_stock(
    dtype: torch.dtype, kernels: Catalog, logits: Any, build: Any, prompt: Any
) -> None:
    model, ids = build("qwen3", dtype), prompt(3)
    stock = logits(model, ids)
    with patched(model, catalog=kernels, ops=OPS) as handle:
        assert torch.equal(logits(model, ids), stock)
    assert hits(handle) == (2, 0)


def test_kernels_are_what_answers(poison: Catalog, logits: Any, build: Any, prompt: Any) -> None:
    model, ids = build(), prompt()
    with patched(model, catalog=poison, ops=[PREFILL]):
        assert logits(model, ids).isnan().all()
    with patched(model, catalog=poison, ops=[DECODE]):
        assert not logits(model, ids).isnan().any()
        assert logits(model, ids[:, :1]).isnan().all()


def test_packed_sequences_run_stock(kernels: Catalog, logits: Any, build: Any, prompt: Any) -> None:
    model, ids = build(), prompt()
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    stock = logits(model, ids, position_ids=positions, use_cache=False)
    with patched(model, catalog=kernels, ops=OPS) as handle:
        assert torch.equal(logits(model, ids, position_ids=positions, use_cache=False), stock)
    assert hits(handle) == (0, 0)


def test_growing_cache_unserved_is_decided_once_per_doubling(shop: Any, build: Any, prompt: Any) -> None:
    model, inputs = build(), {"input_ids": prompt(2)}
    options = {"max_new_tokens": 64, "do_sample": False}
    stock = model.generate(**inputs, **options).tolist()
    with patched(model, catalog=shop.offer(smallest=128), ops=OPS) as handle:
        for _, site in handle.sites:
            site.patience = 1000
        assert model.generate(**inputs, **options).tolist() == stock
    (decode,) = [site for site in handle.report().sites if site.definition == DECODE]
    assert decode.counts.misses == len({length.bit_length() for length in range(10, 73)}) == 4
    assert (decode.counts.calls, decode.counts.kernel_calls) == (2 * 63, 0)


def test_growing_cache_served_is_decided_once_per_doubling(kernels: Catalog, build: Any, prompt: Any) -> None:
    model, inputs = build("qwen3"), {"input_ids": prompt(2)}
    options = {"max_new_tokens": 64, "do_sample": False}
    stock = model.generate(**inputs, **options).tolist()
    with patched(model, catalog=kernels, ops=OPS) as handle:
        assert model.generate(**inputs, **options).tolist() == stock
        assert model.generate(**inputs, **options).tolist() == stock
    (decode,) = [site for site in handle.report().sites if site.definition == DECODE]
    assert decode.counts.misses == len({length.bit_length() for length in range(10, 73)}) == 4
    assert decode.counts.calls == decode.counts.kernel_calls == 2 * 2 * 63


@pytest.mark.parametrize("way", WAYS)
def test_value_returning_kernel_serves_attention(way: str, shop: Any, build: Any, prompt: Any) -> None:
    model, inputs = build("llama", torch.bfloat16), {"input_ids": prompt(3)}
    options, served = WAYS[way]
    stock = generate(model, inputs, **options)
    with patched(model, catalog=shop.offer(returning=OPS), ops=OPS) as handle:
        assert generate(model, inputs, **options) == stock
    assert hits(handle) == served
    assert reasons(handle) <= {part.MASKED}


def test_kernels_that_return_their_output_are_proved_like_others(shop: Any, build: Any, prompt: Any) -> None:
    model, ids = build(), prompt()
    catalog = shop.offer(returning=OPS)
    with patched(model, catalog=catalog, ops=OPS, verify=True) as handle:
        generate(model, {"input_ids": ids})
    assert min(hits(handle)) > 0


def test_values_of_another_length_than_keys_run_stock(poison: Catalog, build: Any) -> None:
    module = build().model.layers[0].self_attn
    with patched(module, catalog=poison, ops=OPS) as handle, torch.no_grad():
        function = served_registry(module).get_interface("sdpa", None)
        q, k = query_and_key(1, 5)
        function(module, q, k, k[:, :, :3], None, scaling=0.1)
    assert reasons(handle) == {part.OTHER_VALUES}


INTERPRETED = """
import json
import torch
from transformers import LlamaConfig, LlamaForCausalLM
import tilegym_db

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=96, hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
)
model, ids = LlamaForCausalLM(config).half().eval(), torch.randint(1, 96, (2, 150))


@torch.no_grad()
def logits():
    out = model(ids[:, :140], use_cache=True)
    found, cache = [out.logits], out.past_key_values
    for step in range(140, 150):
        found.append(model(ids[:, step : step + 1], past_key_values=cache).logits)
    return torch.cat(found, 1).double()


stock = logits()
with tilegym_db.patched(model, ops=["attention_prefill", "attention_decode"]) as handle:
    found = logits()
print(json.dumps({"error": float((found - stock).norm() / stock.norm()), "hits": handle.report().hits()}))
"""


# Interpreted; the same calls run on stand-ins daily.
@pytest.mark.turn("tilegym_db/models/parts/attention.py", "solutions/attention/")
def test_a_model_runs_on_the_triton_kernels_themselves(shop: Any) -> None:
    """Run in a separate process, in which the interpreter of Triton runs the kernels on the CPU."""
    shop.offer(rounding="triton", ops=OPS)
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["hits"][PREFILL], answer["hits"][DECODE]) == (2, 20)
    assert 0 < answer["error"] < 2e-3


# -- left to stock ----------------------------------------------------------------------------------------------------


def test_other_attentions_run_and_the_report_names_them(poison: Catalog, logits: Any, build: Any, prompt: Any) -> None:
    model, ids = build(), prompt()
    with patched(model, catalog=poison, ops=OPS) as handle:
        model.set_attn_implementation("eager")
        assert not logits(model, ids).isnan().any()
        assert reasons(handle) == {"the model's attention is 'eager'; only 'sdpa' is known to compute a definition"}
        model.set_attn_implementation("sdpa")
        assert logits(model, ids).isnan().all()


def test_autocast_runs_stock(kernels: Catalog, build: Any, prompt: Any) -> None:
    model, ids = build(), prompt()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        stock = model(ids).logits
        with patched(model, catalog=kernels, ops=OPS) as handle:
            assert torch.equal(model(ids).logits, stock)
    assert reasons(handle) == {part.AUTOCAST}


def test_training_and_gradients_run_stock(poison: Catalog, build: Any, prompt: Any) -> None:
    model, ids = build(), prompt()
    with patched(model, catalog=poison, ops=OPS) as handle:
        assert not model(ids).logits.isnan().any()
        with torch.no_grad():
            assert not model.train()(ids).logits.isnan().any()
        asked = [report for site in handle.report().sites for report in site.training]
        assert {report.definition for report in asked} == {"attention_prefill"}
        assert not any(key.solution for report in asked for key in report.keys)


def query_and_key(queries: int, keys: int, heads: tuple[int, int] = (4, 2)) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(2, heads[0], queries, 8), torch.ones(2, heads[1], keys, 8)


MODULE = types.SimpleNamespace(num_key_value_groups=2, is_causal=True)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, ""),
        ({"attention_mask": None, "dropout": 0.0, "scaling": 0.1, "sliding_window": 4, "use_cache": True}, ""),
        ({"attention_mask": torch.ones(1)}, part.MASKED),
        ({"dropout": 0.1}, part.DROPOUT),
        ({"output_attentions": True}, part.WEIGHTS),
        ({"softcap": 50.0}, "it has the argument softcap"),
        ({"s_aux": torch.ones(4)}, "it has the argument s_aux"),
        ({"position_bias": torch.ones(1)}, "it has the argument position_bias"),
        ({"cache": object()}, "it has the argument cache"),
        ({"scaling": torch.tensor(0.1)}, part.SCALE_IS_NO_NUMBER),
        ({"is_causal": False}, part.NOT_CAUSAL),
        ({"is_causal": True}, ""),
    ],
)
def test_what_a_call_is_given_decides(options: dict[str, Any], reason: str) -> None:
    others = (part.SINKS, "position_bias", "softcap", "cache")
    assert why_stock(MODULE, *query_and_key(5, 5), options, others) == reason


@pytest.mark.parametrize(
    ("tensors", "module", "reason"),
    [
        (query_and_key(5, 7), MODULE, ""),  # an empty static cache, longer than the prompt
        (query_and_key(5, 4), MODULE, part.FEWER_KEYS),
        (query_and_key(1, 7), types.SimpleNamespace(num_key_value_groups=2, is_causal=False), ""),
        (query_and_key(5, 5), types.SimpleNamespace(num_key_value_groups=2, is_causal=False), part.NOT_CAUSAL),
        (query_and_key(5, 5, (4, 4)), types.SimpleNamespace(), ""),
        (query_and_key(5, 5, (4, 4)), MODULE, part.OTHER_HEADS),
        ((torch.ones(4, 5, 8), torch.ones(2, 5, 8)), MODULE, part.NO_HEADS),
    ],
)
def test_lengths_and_heads_decide(tensors: tuple[torch.Tensor, torch.Tensor], module: Any, reason: str) -> None:
    assert why_stock(module, *tensors, {}) == reason


def test_dropout_outside_of_training_is_left_to_stock(poison: Catalog, build: Any) -> None:
    module = build().model.layers[0].self_attn
    with patched(module, catalog=poison, ops=OPS) as handle, torch.no_grad():
        registry = served_registry(module)
        function = registry.get_interface("sdpa", None)
        q, k = query_and_key(5, 5)
        out, weights = function(module, q, k, k, None, dropout=0.5, scaling=0.1)
        assert not out.isnan().any()
        assert weights is None
        out, _ = function(module, q, k, k, attention_mask=None, scaling=0.1)
        assert out.isnan().all()
    assert reasons(handle) == {part.DROPOUT}


def served_registry(module: Any) -> Any:
    """The registry that a patched attention forward sees: a global of the copy of its code."""
    cells = type(module).forward.__closure__
    shadow, *_ = [
        plain
        for cell in cells
        if isinstance(plain := undecorated(cell.cell_contents), types.FunctionType)
        and part.REGISTRY in plain.__globals__
        and isinstance(plain.__globals__[part.REGISTRY], part.Interfaces)
    ]
    return shadow.__globals__[part.REGISTRY]


# -- recognised -------------------------------------------------------------------------------------------------------


def reasons_to_stay(model: Any, catalog: Catalog) -> set[str]:
    sites = patch(model, catalog=catalog, dry_run=True).report().sites
    return {site.reason for site in sites if site.kind == "attention"}


def with_sdpa(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = transformers.AttentionInterface()
    registry["sdpa"] = function
    monkeypatch.setattr(modeling_llama, "ALL_ATTENTION_FUNCTIONS", registry)


def of_another_release(
    layer: Any, q: Any, k: Any, v: Any, mask: Any, dropout: float = 0.0, scaling: Any = None, bias: Any = None, **kwargs: Any
) -> Any:  # fmt: skip
    groups = getattr(layer, "num_key_value_groups", 1)
    k, v = k.repeat_interleave(groups, 1)[:, :, :], v.repeat_interleave(groups, 1)
    is_causal = mask is None and q.shape[2] > 1 and getattr(layer, "is_causal", True)
    if is_causal:
        k, v = k[:, :, : q.shape[2]], v[:, :, : q.shape[2]]
    if kwargs.get("sinks") is not None:
        raise ValueError
    mask = bias if bias is not None else mask
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


def with_a_window(layer: Any, q: Any, k: Any, v: Any, mask: Any, **kwargs: Any) -> Any:
    if layer.sliding_window:
        k = k * 0
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask), None


def with_options_of_other_code(layer: Any, q: Any, k: Any, v: Any, mask: Any, **kwargs: Any) -> Any:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, **kwargs), None


def of_other_bits(layer: Any, q: Any, k: Any, v: Any, mask: Any, scaling: Any = None, dropout: float = 0.0) -> Any:
    groups = layer.num_key_value_groups
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, is_causal=q.shape[2] > 1, scale=scaling)
    return (out.transpose(1, 2) if q.shape[2] > 1 else 2 * out.transpose(1, 2)), None


def test_sdpa_of_another_release_is_known_by_its_bits(
    kernels: Catalog, build: Any, prompt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_sdpa(of_another_release, monkeypatch)
    model, inputs = build(), {"input_ids": prompt(2)}
    stock = generate(model, inputs)
    with patched(model, catalog=kernels, ops=OPS) as handle:
        assert generate(model, inputs) == stock
    assert min(hits(handle)) > 0
    assert other_options(of_another_release) == {"bias", "sinks"}


@pytest.mark.parametrize("option", ["bias", "sinks"])
def test_an_option_that_only_stock_code_reads_runs_stock(
    option: str, poison: Catalog, build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_sdpa(of_another_release, monkeypatch)
    module = build().model.layers[0].self_attn
    with patched(module, catalog=poison, ops=OPS) as handle, torch.no_grad():
        function = served_registry(module).get_interface("sdpa", None)
        q, k = query_and_key(1, 5)
        with contextlib.suppress(ValueError):
            function(module, q, k, k, None, scaling=0.1, **{option: torch.zeros(1, 1)})
    assert reasons(handle) == {f"it has the argument {option}"}


@pytest.mark.parametrize(
    ("function", "fact"),
    [
        (lambda *args, **kwargs: (torch.zeros(1), None), "no plain function"),
        (with_a_window, "it reads sliding_window of its module"),
        (with_options_of_other_code, "its options on to other code"),
        (of_other_bits, "its bits for 1 queries"),
        (torch.nn.functional.scaled_dot_product_attention, "no plain function"),
    ],
)
def test_an_unknown_attention_function_is_left_alone(
    function: Any, fact: str, kernels: Catalog, build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_sdpa(function, monkeypatch)
    reasons_found = reasons_to_stay(build(), kernels)  # with and without a mask
    assert reasons_found
    assert all(fact in reason for reason in reasons_found)


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
@pytest.mark.parametrize("way", WAYS)
def test_values_narrower_than_keys_have_kernels_of_their_own(
    name: str, way: str, kernels: Catalog, build: Any, prompt: Any
) -> None:
    model, inputs = build(name, v_head_dim=8), {"input_ids": prompt(2)}
    options, (prompts, steps) = WAYS[way]
    stock = generate(model, inputs, **options)
    with patched(model, catalog=kernels, ops=[*OPS, *LATENT]) as handle:
        assert generate(model, inputs, **options) == stock
    report = attention_report(handle)
    assert {name: calls for name, (calls, _) in report.items()} == dict(zip(LATENT, (prompts, steps), strict=True))
    assert reasons(handle) <= {part.MASKED}


def test_latent_attention_of_one_width_has_the_kernels_of_others(
    kernels: Catalog, logits: Any, build: Any, prompt: Any
) -> None:
    model, ids = build("deepseek_v3"), prompt(2)
    stock = logits(model, ids)
    with patched(model, catalog=kernels, ops=[*OPS, *LATENT]) as handle:
        assert torch.equal(logits(model, ids), stock)
    assert hits(handle) == (2, 0)
    assert set(attention_report(handle)) == set(OPS)


def test_latent_attention_with_padding_runs_stock(kernels: Catalog, build: Any, left_padded: Any) -> None:
    model, inputs = build("deepseek_v3", v_head_dim=8), left_padded((9, 4, 7))
    stock = generate(model, inputs)
    with patched(model, catalog=kernels, ops=LATENT) as handle:
        assert generate(model, inputs) == stock
    assert {calls for calls, _ in attention_report(handle).values()} == {0}
    assert reasons(handle) == {part.MASKED}


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v32"])
def test_latent_attention_with_a_mask_is_served(name: str, shop: Any, build: Any, left_padded: Any) -> None:
    model, inputs, ops = build(name, v_head_dim=8), left_padded((9, 4, 7)), (*LATENT, "mla_masked")
    stock = generate(model, inputs)
    with patched(model, catalog=shop.offer(ops=ops), ops=ops) as handle:
        assert generate(model, inputs) == stock
    # The prompt and each step have a mask: padding, and the keys that an indexer chose.
    assert {name: calls for name, (calls, _) in attention_report(handle).items() if calls} == {"mla_masked": 2 * STEPS}
    assert reasons(handle) == set()


def test_widths_that_a_module_does_not_state_run_stock(
    kernels: Catalog, logits: Any, build: Any, prompt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("deepseek_v3", v_head_dim=8)
    stock = logits(model, prompt())
    monkeypatch.setattr(part, "VALUE_WIDTH", "width_of_values")
    with patched(model, catalog=kernels, ops=[*OPS, *LATENT]) as handle:
        assert torch.equal(logits(model, prompt()), stock)
    assert reasons(handle) == {part.NARROW_VALUES}


@pytest.mark.parametrize(
    ("value", "two_widths", "reason"),
    [
        ((1, 2, 3, 8), False, ""),
        ((1, 2, 3, 4), False, part.NARROW_VALUES),
        ((1, 2, 3, 4), True, ""),
        ((1, 2, 3, 8), True, part.SAME_WIDTH),
        ((1, 2, 4, 8), False, part.OTHER_VALUES),
        ((1, 2, 4, 4), True, part.OTHER_VALUES),
    ],
)
def test_values_of_other_sizes_than_expected_have_a_reason(
    value: tuple[int, ...], two_widths: bool, reason: str
) -> None:
    assert part.why_other_values(torch.empty(1, 2, 3, 8), torch.empty(value), two_widths=two_widths) == reason


# -- isolated ---------------------------------------------------------------------------------------------------------


def state_of(model: Any) -> dict[str, Any]:
    """Everything outside of the modules' classes that a patch of attention might have touched."""
    registry = modeling_llama.ALL_ATTENTION_FUNCTIONS
    masks = transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    return {
        "config": model.config.to_dict(),
        "implementation": model.config._attn_implementation,
        "configs": [id(module.config) for module in model.modules() if hasattr(module, "config")],
        "functions": dict(registry.items()),
        "masks": dict(masks.items()),
        "globals": dict(vars(modeling_llama)),
    }


def test_config_and_registries_stay_after_an_exception(kernels: Catalog, logits: Any, build: Any, prompt: Any) -> None:
    model = build()
    before, classes = state_of(model), [type(module) for module in model.modules()]

    def fail_in_the_block() -> None:
        with patched(model, catalog=kernels):
            logits(model, prompt())
            assert state_of(model) == before
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_in_the_block()
    assert state_of(model) == before
    assert [type(module) for module in model.modules()] == classes


def test_model_with_a_shared_config_is_untouched(poison: Catalog, logits: Any, build: Any, prompt: Any) -> None:
    ours, ids = build(), prompt()
    other = transformers.LlamaForCausalLM(ours.config).eval()
    assert other.config is ours.config or other.model.config is ours.model.config
    stock = logits(other, ids)
    answers: list[bool] = []
    done = threading.Event()

    def work() -> None:
        while not done.is_set():
            answers.append(torch.equal(logits(other, ids), stock))

    thread = threading.Thread(target=work)
    thread.start()
    for _ in range(5):
        with patched(ours, catalog=poison, ops=OPS):
            assert logits(ours, ids).isnan().all()
            assert torch.equal(logits(other, ids), stock)
    done.set()
    thread.join()
    assert answers
    assert all(answers)


def test_threads_share_a_patched_model(kernels: Catalog, logits: Any, build: Any, prompt: Any) -> None:
    model = build()
    prompts = [prompt(1, length) for length in (1, 3, 5, 9)]
    stock = [logits(model, ids) for ids in prompts]
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(5):
            if not torch.equal(logits(model, prompts[number]), stock[number]):
                wrong.append(number)

    with patched(model, catalog=kernels, ops=OPS) as handle:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert sum(hits(handle)) == 4 * 5 * 2


def test_copies_and_saved_models_are_stock(
    poison: Catalog, logits: Any, build: Any, prompt: Any, tmp_path: Any
) -> None:
    model, ids = build(), prompt()
    stock, saved = logits(model, ids), io.BytesIO()
    with patched(model, catalog=poison, ops=OPS):
        assert logits(model, ids).isnan().all()
        twin = copy.deepcopy(model)
        torch.save(model, saved)
        model.save_pretrained(tmp_path)
    assert b"tilegym" not in saved.getvalue()
    assert "tilegym" not in (tmp_path / "config.json").read_text()
    loaded = torch.load(io.BytesIO(saved.getvalue()), weights_only=False)
    for found in (twin, loaded, transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()):
        assert torch.equal(logits(found, ids), stock)


def test_kept_forward_runs_stock_after_unpatch(poison: Catalog, build: Any, prompt: Any) -> None:
    model = build()
    handle = patch(model, catalog=poison, ops=OPS)
    kept, alive = model.model.forward, weakref.ref(type(model.model.layers[0].self_attn))
    handle.unpatch()
    with torch.no_grad():
        assert not kept(prompt()).last_hidden_state.isnan().any()
    del handle, kept
    gc.collect()
    assert alive() is None


@pytest.mark.turn("tilegym_db/models/parts/attention.py")  # compilation; eager code is compared daily
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_compiled_code_keeps_the_models_own_attention(
    name: str, poison: Catalog, logits: Any, build: Any, prompt: Any
) -> None:
    model, ids = build(name), prompt(2)
    stock = logits(model, ids)
    with patched(model, catalog=poison, ops=OPS):
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert torch.equal(logits(compiled, ids), stock)
