"""Scores of a light indexer: kernels compute them, and the keys that are chosen by them are those of the stock model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilegym_db import patched
from tilegym_db.models.call_site import AUTOCAST
from tilegym_db.models.parts import indexer
from tilegym_db.models.parts.indexer import NOT_POSITIVE, statements_of
from tilegym_db.models.upstream_code import decorated_alike, undecorated

OP = "index_scores"
TOKENS = {"max_new_tokens": 4, "do_sample": False}
MODELS = ("deepseek_v32", "glm_moe_dsa", "deepseek_v4")


def row(handle: Any) -> Any:
    (found,) = (one for one in handle.report().sites if one.kind == indexer.KIND)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_scores_of_an_indexer_give_the_bits_of_stock(
    name: str, dtype: torch.dtype, shop: Any, logits: Any, build: Any, prompt: Any
) -> None:
    model, ids = build(name, dtype), prompt(2, 24)
    stock = logits(model, ids)
    with patched(model, catalog=shop.offer(ops=(OP,)), ops=[OP]) as handle:
        assert torch.equal(logits(model, ids), stock)
    assert (row(handle).reason, dict(row(handle).bypassed)) == ("", {})
    assert handle.report().hits()[OP] == row(handle).modules
    assert torch.equal(logits(model, ids), stock)


@pytest.mark.parametrize("name", MODELS[:2])
def test_tokens_chosen_by_served_scores_are_those_of_stock(name: str, shop: Any, build: Any, prompt: Any) -> None:
    model, ids = build(name), prompt(2, 12)
    stock = model.generate(ids, **TOKENS)
    with patched(model, catalog=shop.offer(ops=(OP,)), ops=[OP]) as handle:
        assert torch.equal(model.generate(ids, **TOKENS), stock)
    assert row(handle).counts.kernel_calls == TOKENS["max_new_tokens"] * row(handle).modules


def test_wrong_scores_change_which_keys_are_seen(shop: Any, logits: Any, build: Any, prompt: Any) -> None:
    model, ids = build("deepseek_v32"), prompt(2, 24)
    stock = logits(model, ids)
    with patched(model, catalog=shop.offer("    {outputs}.fill_(0)\n".format(outputs="out"), ops=(OP,)), ops=[OP]):
        assert not torch.equal(logits(model, ids), stock)


def test_autocast_and_other_factors_leave_scores_to_stock(shop: Any, build: Any, prompt: Any) -> None:
    model, ids = build("deepseek_v32"), prompt(2, 24)
    with torch.no_grad(), patched(model, catalog=shop.offer(ops=(OP,)), ops=[OP]) as handle:
        with torch.autocast("cpu", torch.bfloat16):
            model(ids)
        for layer in model.model.layers:
            layer.self_attn.indexer.softmax_scale = -1.0
        model(ids)
    assert dict(row(handle).bypassed) == {AUTOCAST: row(handle).modules, NOT_POSITIVE: row(handle).modules}


def test_a_served_indexer_still_keeps_no_gradient(shop: Any, build: Any, prompt: Any, gradients: Any) -> None:
    model, ids = build("deepseek_v32"), prompt(2, 24)
    stock = gradients(model, ids)
    with patched(model, catalog=shop.offer(ops=(OP,)), ops=[OP]) as handle:
        assert all(map(torch.equal, gradients(model, ids), stock))
    assert not row(handle).bypassed


class Scores(torch.nn.Module):
    """As DeepSeek-V4: the last statement returns the scores."""

    scale = 0.5

    @torch.no_grad()
    def forward(self, q: Any, k: Any, states: Any) -> Any:
        found = torch.matmul(q.float(), k.transpose(-1, -2).float().unsqueeze(1))
        found = torch.nn.functional.relu(found) * self.scale
        weights = states.float() * 0.1
        return (found * weights.unsqueeze(-1)).sum(dim=2)


class Kept(Scores):
    """The products are read once more."""

    def forward(self, q: Any, k: Any, weights: Any) -> Any:
        found = torch.matmul(q.float(), k.transpose(-1, -2).float().unsqueeze(1))
        positive = torch.nn.functional.relu(found)
        total = (positive * weights.unsqueeze(-1)).sum(dim=2)
        return total, found


class Changed(Scores):
    """The keys change between the statements."""

    def forward(self, q: Any, k: Any, weights: Any) -> Any:
        found = torch.matmul(q.float(), k.transpose(-1, -2).float().unsqueeze(1))
        k = k + 1
        found = torch.nn.functional.relu(found)
        total = (found * weights.unsqueeze(-1)).sum(dim=2)
        return total, k


class Signed(Scores):
    """Products below zero count."""

    def forward(self, q: Any, k: Any, weights: Any) -> Any:
        found = torch.matmul(q.float(), k.transpose(-1, -2).float().unsqueeze(1))
        return (found * weights.unsqueeze(-1)).sum(dim=2)


@pytest.mark.parametrize("cls", [Kept, Changed, Signed])
def test_other_statements_are_no_scores_of_an_indexer(cls: Any) -> None:
    assert statements_of(cls.forward) is None


def test_statements_between_those_of_the_scores_stay() -> None:
    found = statements_of(undecorated(Scores.forward))
    assert found is not None
    assert (found.places, found.operands, found.attribute, found.sets) == (
        (0, 1, 3),
        ("q", "k", "weights"),
        "scale",
        "",
    )


def test_a_forward_without_gradients_is_recognised_and_stays_one() -> None:
    plain = undecorated(Scores.forward)
    assert plain is not Scores.forward
    assert undecorated(plain) is plain
    again = decorated_alike(Scores.forward, lambda: torch.is_grad_enabled())
    assert again() is False
    with_gradients = torch.enable_grad()(plain)
    assert undecorated(with_gradients) is with_gradients
