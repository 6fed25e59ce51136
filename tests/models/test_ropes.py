"""Rotations of pairs, and by half tables: found by their code, served with the bits of stock, and distinguished."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from shipped_records import CATALOG
from transformers.models.deepseek_v2.modeling_deepseek_v2 import apply_rotary_emb as multiply_complex
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave as pairs_to_halves
from transformers.models.deepseek_v4.modeling_deepseek_v4 import apply_rotary_pos_emb as rotate_tail
from transformers.models.glm4.modeling_glm4 import apply_rotary_pos_emb as rotate_pairs
from transformers.models.gpt_oss.modeling_gpt_oss import apply_rotary_pos_emb as rotate_by_half_tables

from tilegym_db import Catalog, patched
from tilegym_db.models.call_site import CallSite
from tilegym_db.models.found import KnownCode
from tilegym_db.models.parts import rope
from tilegym_db.models.parts.rope import HEADS_FIRST, RotaryCall, RotaryCode, possible_codes, rotary_code

pytestmark = pytest.mark.sweep

FUNCTIONS = {
    "rope_half_tables": rotate_by_half_tables,
    "rope_pairs": rotate_pairs,
    "rope_pairs_to_halves": pairs_to_halves,
    "rope_complex_pairs": multiply_complex,
    "rope_tail_pairs": rotate_tail,
}
MODELS = {
    "gpt_oss": "rope_half_tables",
    "glm4": "rope_pairs",
    "deepseek_v2": "rope_complex_pairs",
    "deepseek_v3": "rope_pairs_to_halves",
    "deepseek_v4": "rope_tail_pairs",
}


def code_of(function: Any, name: str) -> RotaryCode:
    (code,) = possible_codes(function, [CATALOG.definition(name)])
    return code._replace(calls=(RotaryCall(HEADS_FIRST),))


@pytest.fixture
def ropes(shop: Any) -> Catalog:
    """Kernels of these rotations alone."""
    catalog: Catalog = shop.offer(ops=tuple(FUNCTIONS))
    return catalog


@pytest.mark.parametrize("name", FUNCTIONS)
def test_rotary_code_of_a_model_matches_one_definition(name: str) -> None:
    known = KnownCode(CATALOG)
    code = rotary_code(FUNCTIONS[name], known, torch.device("cpu"), "its rotation")
    assert isinstance(code, RotaryCode)
    assert code.definition.name == name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_every_call_is_served_with_the_bits_of_stock(
    name: str, dtype: torch.dtype, ropes: Catalog, build: Any, prompt: Any
) -> None:
    model, ids = build(name, dtype), prompt(2)
    with torch.no_grad():
        stock = model(ids).logits
        with patched(model, catalog=ropes, ops=tuple(FUNCTIONS)) as handle:
            assert torch.equal(model(ids).logits, stock)
        assert torch.equal(model(ids).logits, stock)
    report = handle.report()
    # DeepSeek-V4 rotates queries, keys, what attention returns, and compressed keys where a layer has them.
    assert report.hits()[MODELS[name]] >= (6 if name == "deepseek_v4" else 2)
    assert all(site.counts.stock_calls == 0 for site in report.sites if site.counts)


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_those_of_stock(name: str, ropes: Catalog, build: Any, prompt: Any) -> None:
    model = build(name)
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    stock = model.generate(prompt(2), **options).tolist()
    with patched(model, catalog=ropes, ops=tuple(FUNCTIONS)) as handle:
        assert model.generate(prompt(2), **options).tolist() == stock
    assert handle.report().hits()[MODELS[name]] >= 8


def test_a_complex_table_reaches_a_kernel_as_it_lies_in_memory() -> None:
    seen: list[torch.Tensor] = []

    def serve(q: torch.Tensor, k: torch.Tensor, turns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(turns)
        return q, k

    q = torch.randn(1, 2, 3, 8)
    table = torch.randn(1, 3, 4, dtype=torch.complex64)
    served = rope.rope_function(multiply_complex, CallSite(serve), code_of(multiply_complex, "rope_complex_pairs"))
    assert served(q, q, table) == (q, q)
    assert seen[0].data_ptr() == table.data_ptr()
    assert torch.equal(seen[0][..., 0::2], table.real)
    assert torch.equal(seen[0][..., 1::2], table.imag)


def test_transposed_tables_reach_a_kernel_as_contiguous_copies() -> None:
    seen: list[tuple[torch.Tensor, ...]] = []

    def serve(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(inputs)
        return inputs[0], inputs[1]

    q, across, rows = torch.randn(1, 2, 3, 8), torch.randn(1, 4, 3).transpose(1, 2), torch.randn(1, 3, 4)
    code = code_of(rotate_by_half_tables, "rope_half_tables")
    rope.rope_function(rotate_by_half_tables, CallSite(serve), code)(q, q, across, rows)
    ((first, _, cos, sin),) = seen
    assert first is q
    assert sin is rows
    assert cos.is_contiguous()
    assert torch.equal(cos, across)


def in_a_module(function: Any) -> torch.nn.Module:
    """Wrap a function as the package ``kernels`` does in its decorators."""

    class Func(torch.nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

    Func.__name__ = function.__name__
    return Func()


def test_rotation_in_a_module_of_kernels_is_served(
    shop: Any, build: Any, prompt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers.models.llama.modeling_llama as modeling

    catalog = shop.offer(ops=("rope_neox",))
    monkeypatch.setattr(modeling, "apply_rotary_pos_emb", in_a_module(modeling.apply_rotary_pos_emb))
    model, ids = build("llama"), prompt(2)
    with torch.no_grad():
        stock = model(ids).logits
        with patched(model, catalog=catalog, ops=("rope_neox",)) as handle:
            assert torch.equal(model(ids).logits, stock)
    assert handle.report().hits()["rope_neox"] >= 2


def test_module_that_does_more_than_its_function_stays_stock() -> None:
    hooked = in_a_module(rotate_pairs)
    hooked.register_forward_pre_hook(lambda *_: None)
    kernelized = in_a_module(rotate_pairs)
    kernelized.forward = lambda *args: args  # type: ignore[method-assign]
    assert rope.stock_function(in_a_module(rotate_pairs)) is rotate_pairs
    assert rope.stock_function(hooked) is hooked
    assert rope.stock_function(kernelized) is kernelized
    assert rope.stock_function(rotate_pairs) is rotate_pairs
