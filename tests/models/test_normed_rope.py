"""Norms of heads and the rotary embedding behind them are one call where a model has both, and stay apart everywhere else."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tilegym_db import Catalog, patch
from tilegym_db.models.call_site import HAS_HOOKS
from tilegym_db.models.parts.normed_rope import OTHER_NORMS, NormedRope, _place_in
from tilegym_db.models.patch import discover
from tilegym_db.paths import shipped_root

NAME = "qk_norm_rope"
OF_MODEL = {"qwen3": NAME, "qwen3_moe": NAME, "gemma3": "qk_norm_rope_gemma"}
PARTS = ("rms_norm", "rms_norm_gemma", "rope_neox")


def offer(shop: Any, body: str | None = None) -> Catalog:
    """Publish a kernel of each fused operator for the CPU beside those of its parts."""
    shop.offer(ops=PARTS)
    for name in {*OF_MODEL.values()}:
        shop._write(name, body, "stock", returns=False)
    catalog = Catalog((shipped_root(), shop.root))
    for name in {*OF_MODEL.values()}:
        shop.entries += shop._entries(catalog, name, 1)
    shop.republish()
    return catalog


def row(handle: Any) -> Any:
    (found,) = [site for site in handle.report().sites if site.kind == "normed_rope"]
    return found


@pytest.mark.parametrize("name", [*OF_MODEL, "llama", "olmoe", "deepseek_v3", "qwen3_5", "phi3"])
def test_it_is_found_by_structure(name: str, build: Callable[..., Any]) -> None:
    model = build(name)
    found = [group for group in discover(model, Catalog.default()) if group.kind == "normed_rope"]
    expected = [(OF_MODEL[name], "", len(model.model.layers))] if name in OF_MODEL else []
    assert [(group.definition, group.reason, len(group.modules)) for group in found] == expected


@pytest.mark.parametrize("name", OF_MODEL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_call_gives_the_bits_of_stock(
    name: str, dtype: torch.dtype, shop: Any, build: Callable[..., Any], prompt: Callable[..., torch.Tensor]
) -> None:
    stock, model = build(name, dtype), build(name, dtype)
    handle = patch(model, catalog=offer(shop))
    with torch.no_grad():
        for ids in (prompt(2), prompt(1, 1), prompt(3, 5)):
            assert torch.equal(model(ids).logits, stock(ids).logits)
    calls = row(handle).counts
    assert calls.kernel_calls == calls.calls == 3 * row(handle).modules
    assert handle.report().hits()["rope_neox"] == 0
    options = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(model.generate(prompt(2), **options), stock.generate(prompt(2), **options))
    handle.unpatch()
    assert type(model.model.layers[0].self_attn) is type(stock.model.layers[0].self_attn)


def test_without_a_fused_kernel_both_parts_serve(
    shop: Any, build: Callable[..., Any], prompt: Callable[..., torch.Tensor]
) -> None:
    stock, model = build("qwen3"), build("qwen3")
    handle = patch(model, catalog=offer(shop, "    raise ValueError('no such size')\n"))
    with torch.no_grad(), pytest.warns(RuntimeWarning, match=NAME):
        assert torch.equal(model(prompt(2)).logits, stock(prompt(2)).logits)
    hits = handle.report().hits()
    assert (hits[NAME], hits["rope_neox"]) == (0, 2)
    assert hits["rms_norm"] > 4


@pytest.mark.parametrize("name", ["a hook", "another epsilon"])
def test_norms_that_differ_run_apart_with_a_reason(
    name: str, shop: Any, build: Callable[..., Any], prompt: Callable[..., torch.Tensor]
) -> None:
    stock, model, calls = build("qwen3"), build("qwen3"), []
    handle = patch(model, catalog=offer(shop))
    for one in (stock, model):
        norm = one.model.layers[0].self_attn.k_norm
        if name == "a hook":
            norm.register_forward_hook(lambda *_: calls.append(1))
        else:
            norm.variance_epsilon = 0.5
    with torch.no_grad():
        assert torch.equal(model(prompt(2)).logits, stock(prompt(2)).logits)
    assert row(handle).bypassed == {HAS_HOOKS if name == "a hook" else OTHER_NORMS: 1}
    assert row(handle).counts.kernel_calls == 1
    assert len(calls) == (2 if name == "a hook" else 0)


def test_training_runs_the_models_own_code(
    shop: Any, build: Callable[..., Any], prompt: Callable[..., torch.Tensor], gradients: Callable[..., Any]
) -> None:
    stock, model = build("qwen3"), build("qwen3")
    handle = patch(model, catalog=offer(shop))
    for one in (stock, model):
        one.train()
    assert all(map(torch.equal, gradients(model, prompt(2)), gradients(stock, prompt(2))))
    assert row(handle).counts.calls == 0


# ---- the source of a forward --------------------------------------------------------------------------------------

SOURCES = {
    "turned after": ("q = self.a(self.p(x)).transpose(1, 2)", "k = self.b(self.r(x)).transpose(1, 2)", "pass"),
    "turned before": ("q = self.a(q)", "k = self.b(k)", "pass"),
    "of one norm": ("q = self.a(q)", "k = self.a(k)", "pass"),
    "read in between": ("q = self.a(q)", "k = self.b(k)", "v = q.sum()"),
    "turned one alone": ("q = self.a(q).transpose(1, 2)", "k = self.b(k)", "pass"),
    "turned later": ("q = self.a(q)", "k = self.b(k)", "q = q.view(2)"),
    "only one normed": ("q = self.a(q)", "k = k + 1", "pass"),
    "in a branch": ("if x:\n        q = self.a(q)", "k = self.b(k)", "pass"),
}
MATCHED = {
    "turned after": NormedRope(("a", "b"), "apply_rotary", is_turned=True),
    "turned before": NormedRope(("a", "b"), "apply_rotary", is_turned=False),
    "of one norm": NormedRope(("a", "a"), "apply_rotary", is_turned=False),
}


@pytest.mark.parametrize("name", SOURCES)
def test_only_two_norms_right_before_a_rotation_match(name: str, tmp_path: Path) -> None:
    lines = textwrap.indent("\n".join(SOURCES[name]), "    ").replace(
        "    if x:\n            q", "    if x:\n        q"
    )
    path = tmp_path / "own.py"
    path.write_text(f"def forward(self, x, q, k, cos, sin):\n{lines}\n    q, k = apply_rotary(q, k, cos, sin)\n")
    scope: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), scope)
    assert _place_in(scope["forward"]) == MATCHED.get(name)
