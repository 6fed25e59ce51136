"""Attention with a mask of flags: kernels serve it as data, in eager calls and in graphs, and tokens stay those of stock.

The kernels give the bits of stock. A mask that was read wrong, or given to another call, changes the result.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

from tilegym_db import Catalog, patched
from tilegym_db.models.decoding import Decoding
from tilegym_db.models.next_inputs import CapturedForward
from tilegym_db.models.parts import attention as part

pytestmark = pytest.mark.sweep

OPS = PREFILL, DECODE, MASKED_PREFILL, MASKED_DECODE = (
    "attention_prefill", "attention_decode", "attention_masked_prefill", "attention_masked_decode",
)  # fmt: skip
STEPS, LAYERS = 4, 2
STATIC = {"cache_implementation": "static", "disable_compile": True}
WAYS: dict[str, dict[str, Any]] = {
    "dynamic cache": {},
    "no cache": {"use_cache": False},
    "static cache": STATIC,
    "chunked prefill": {"prefill_chunk_size": 4},
    "chunks on a static cache": {"prefill_chunk_size": 4, **STATIC},
}
MODELS = ("llama", "mistral", "gemma3")
"""Without a window, with one, and with layers of both kinds."""


def served_and_stock(handle: Any) -> tuple[dict[str, int], dict[str, int]]:
    """Return the calls that kernels served by Definition, and the calls left to stock by reason."""
    served: dict[str, int] = {}
    stock: Counter[str] = Counter()
    for site in handle.report().sites:
        if site.kind == "attention" and site.counts is not None:
            served[site.definition] = site.counts.kernel_calls
            stock.update({key.reason: key.calls - key.kernel_calls for key in site.counts.keys})
            stock.update(site.bypassed)
    return served, +stock  # only reasons that occurred


def generate(model: Any, inputs: Mapping[str, torch.Tensor], **options: Any) -> list[list[int]]:
    tokens: list[list[int]] = model.generate(**inputs, max_new_tokens=STEPS, do_sample=False, **options).tolist()
    return tokens


@pytest.mark.parametrize("lengths", [(9, 9, 9), (9, 4, 7)], ids=["whole", "left padded"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_every_attention_call_is_served_with_the_tokens_of_stock(
    name: str, way: str, lengths: tuple[int, ...], kernels: Catalog, build: Any, left_padded: Any
) -> None:
    model, inputs = build(name), left_padded(lengths)
    stock = generate(model, inputs, **WAYS[way])
    with patched(model, catalog=kernels, ops=OPS[:2]) as handle:
        assert generate(model, inputs, **WAYS[way]) == stock
        before, left = served_and_stock(handle)
    with patched(model, catalog=kernels, ops=OPS) as handle:
        assert generate(model, inputs, **WAYS[way]) == stock
        after, left_after = served_and_stock(handle)
    assert not left_after
    assert set(left) <= {part.MASKED}
    assert sum(after.values()) == sum(before.values()) + sum(left.values())
    assert after.items() >= before.items()  # what was served before has the same kernels


def test_packed_documents_are_served(kernels: Catalog, logits: Any, build: Any, prompt: Any) -> None:
    model, ids = build(), prompt()
    options = {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]), "use_cache": False}
    stock = logits(model, ids, **options)
    with patched(model, catalog=kernels, ops=OPS) as handle:
        assert torch.equal(logits(model, ids, **options), stock)
    assert served_and_stock(handle)[0][MASKED_PREFILL] == LAYERS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_gives_the_bits_of_stock(
    dtype: torch.dtype, kernels: Catalog, logits: Any, build: Any, left_padded: Any
) -> None:
    model, inputs = build("qwen3", dtype), left_padded((5, 9))
    mask = inputs["attention_mask"]
    stock = logits(model, inputs["input_ids"], attention_mask=mask)
    with patched(model, catalog=kernels, ops=OPS) as handle:
        assert torch.equal(logits(model, inputs["input_ids"], attention_mask=mask), stock)
    assert served_and_stock(handle)[0][MASKED_PREFILL] == LAYERS


def test_masked_kernels_are_what_answers(poison: Catalog, logits: Any, build: Any, left_padded: Any) -> None:
    model, inputs = build(), left_padded((5, 9))
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    with patched(model, catalog=poison, ops=[MASKED_PREFILL]):
        assert logits(model, ids, attention_mask=mask).isnan().any()
        assert not logits(model, ids).isnan().any()
    with patched(model, catalog=poison, ops=[MASKED_DECODE]):
        assert not logits(model, ids, attention_mask=mask).isnan().any()


@pytest.mark.parametrize("lengths", [(9, 9, 9), (9, 4, 7)], ids=["whole", "left padded"])
def test_steps_in_graphs_are_served(lengths: tuple[int, ...], kernels: Catalog, build: Any, left_padded: Any) -> None:
    model, inputs, new = build(), left_padded(lengths), 16
    options = {"max_new_tokens": new, "do_sample": False}
    stock = model.generate(**inputs, **options).tolist()
    with patched(model, catalog=kernels, ops=OPS) as handle:
        decoding = Decoding(model, repeated)
        decoding.install()
        try:
            assert model.generate(**inputs, **options).tolist() == stock
            assert decoding.report().replayed > 0
        finally:
            decoding.remove()
    served, left = served_and_stock(handle)
    assert not left
    assert served[MASKED_DECODE] >= LAYERS * (new - 3)  # the first steps fill the cache of transformers


def repeated(model: Any, inputs: Mapping[str, Any]) -> CapturedForward:
    """Return the forward as a graph would: on copies of its inputs, with the same outputs object for every replay."""
    leaves, structure = torch.utils._pytree.tree_flatten({k: v for k, v in inputs.items() if k != "past_key_values"})
    kept = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    cache, outputs = inputs["past_key_values"], CausalLMOutputWithPast()

    def replay() -> None:
        found = model(**torch.utils._pytree.tree_unflatten(kept, structure), past_key_values=cache)
        outputs["logits"], outputs["past_key_values"] = found.logits, cache

    return CapturedForward(replay, [leaf for leaf in kept if isinstance(leaf, torch.Tensor)], outputs)


# -- left to stock ----------------------------------------------------------------------------------------------------


def tensors(queries: int, keys: int, batch: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(batch, 4, queries, 8), torch.ones(batch, 2, keys, 8)


def flags(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.bool)


MODULE = types.SimpleNamespace(num_key_value_groups=2, is_causal=True)


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        (flags(2, 1, 3, 5), ""),
        (flags(1, 1, 3, 5), ""),
        (flags(2, 1, 1, 5), ""),
        (torch.zeros(2, 1, 3, 5), part.NO_FLAGS),
        ([[True]], part.NO_FLAGS),
        (flags(2, 4, 3, 5), part.OTHER_MASK),
        (flags(3, 1, 3, 5), part.OTHER_MASK),
        (flags(2, 1, 3, 1), part.OTHER_MASK),
        (flags(3, 5), part.OTHER_MASK),
    ],
)
def test_the_mask_of_a_call_decides(mask: Any, reason: str) -> None:
    assert part.why_stock_with_mask(MODULE, *tensors(3, 5), {"attention_mask": mask}) == reason


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"is_causal": False, "sliding_window": 2}, ""),  # the mask says what is seen
        ({"dropout": 0.1}, part.DROPOUT),
        ({"output_attentions": True}, part.WEIGHTS),
        ({"s_aux": torch.ones(4)}, "it has the argument s_aux"),
    ],
)
def test_other_options_of_a_call_with_a_mask_decide(options: dict[str, Any], reason: str) -> None:
    given = {"attention_mask": flags(2, 1, 3, 5), **options}
    assert part.why_stock_with_mask(MODULE, *tensors(3, 5), given, (part.SINKS,)) == reason


def test_more_queries_than_keys_with_a_mask_run_stock() -> None:
    given = {"attention_mask": flags(2, 1, 5, 3)}
    assert part.why_stock_with_mask(MODULE, *tensors(5, 3), given) == part.FEWER_KEYS


def test_a_shared_mask_is_given_whole() -> None:
    mask = flags(1, 1, 3, 5).tril()
    found = part.whole_mask(mask, *tensors(3, 5))
    assert found.is_contiguous()
    assert torch.equal(found, mask.expand(2, 1, 3, 5))
    assert part.whole_mask(mask, *tensors(3, 5, batch=1)) is not None


def test_a_mask_of_numbers_runs_stock(poison: Catalog, logits: Any, build: Any, prompt: Any) -> None:
    model, ids = build(), prompt(2)
    mask = torch.zeros(2, 1, 9, 9).masked_fill(torch.ones(9, 9, dtype=torch.bool).triu(1), -1e30)
    stock = logits(model, ids, attention_mask=mask)
    with patched(model, catalog=poison, ops=OPS) as handle:
        assert torch.equal(logits(model, ids, attention_mask=mask), stock)
    assert set(served_and_stock(handle)[1]) == {part.NO_FLAGS}


def test_gradients_with_a_mask_run_stock(poison: Catalog, build: Any, left_padded: Any) -> None:
    model, inputs = build(), left_padded((5, 9))
    with patched(model, catalog=poison, ops=OPS) as handle:
        assert not model(**inputs).logits.isnan().any()
    assert {reason.split(";")[0] for reason in served_and_stock(handle)[1]} == {"the call may need a gradient"}


# -- the kernels themselves -------------------------------------------------------------------------------------------

INTERPRETED = """
import json
import torch
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache
import tilegym_db

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=96, hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
)
model, ids = LlamaForCausalLM(config).half().eval(), torch.randint(1, 96, (2, 150))
mask = torch.ones(2, 150, dtype=torch.long)
mask[1, :70] = 0


@torch.no_grad()
def logits():
    cache = StaticCache(config=config, max_cache_len=400)
    found = [model(ids[:, :140], attention_mask=mask[:, :140], past_key_values=cache).logits]
    for step in range(140, 150):
        one = model(ids[:, step : step + 1], attention_mask=mask[:, : step + 1], past_key_values=cache)
        found.append(one.logits)
    return torch.cat(found, 1).double()


stock = logits()
with tilegym_db.patched(model, ops=["attention_masked_prefill", "attention_masked_decode"]) as handle:
    found = logits()
assert found.isfinite().all()
found, stock = found[mask.bool()], stock[mask.bool()]
print(json.dumps({"error": float((found - stock).norm() / stock.norm()), "hits": handle.report().hits()}))
"""


@pytest.mark.nightly  # "test_attention.py" runs a model on such kernels daily
def test_a_model_with_padding_runs_on_the_triton_kernels(shop: Any) -> None:
    """Run in a separate process, in which the interpreter of Triton runs the kernels on the CPU."""
    shop.offer(rounding="triton", ops=OPS[2:])
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["hits"][MASKED_PREFILL], answer["hits"][MASKED_DECODE]) == (2, 20)
    assert 0 < answer["error"] < 2e-3
