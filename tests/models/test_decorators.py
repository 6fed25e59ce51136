"""A forward whose arguments were renamed goes on taking the old names, patched or not, and is recognised under its decorator."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.models.llama import modeling_llama
from transformers.models.siglip.modeling_siglip import SiglipEncoderLayer
from transformers.utils import auto_docstring
from transformers.utils.deprecation import deprecate_kwarg

from tilegym_db import Catalog, patched
from tilegym_db.models.found import WRAPPED
from tilegym_db.models.rewrite import fused_norms, parsed, plain_forward
from tilegym_db.models.upstream_code import decorated_alike, is_known_decorator, undecorated, without_checkpointing

renamed = deprecate_kwarg("states", "99.0.0", new_name="hidden_states")


class Layer(torch.nn.Module):
    """As a layer of transformers 5.24: its source has the decorator."""

    @deprecate_kwarg("past_key_values", "99.0.0", new_name="cache")
    @deprecate_kwarg("states", "99.0.0", new_name="hidden")
    def forward(self, hidden: Any, cache: Any = None) -> Any:
        residual = hidden
        hidden = self.mix(hidden, cache)
        hidden = residual + hidden
        residual = hidden
        hidden = self.norm(hidden)
        return residual + hidden


def traced(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def around(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return around


class Traced(torch.nn.Module):
    @deprecate_kwarg("states", "99.0.0", new_name="hidden")
    @traced
    def forward(self, hidden: Any) -> Any:
        return hidden


def test_undecorated_forward_is_the_function_of_the_source() -> None:
    plain = plain_forward(Layer)
    assert plain is not None
    assert plain is inspect.unwrap(Layer.forward)
    assert undecorated(plain) is plain
    assert fused_norms(plain) == ("norm",)


def test_decorated_alike_function_accepts_the_old_names() -> None:
    seen = decorated_alike(Layer.forward, lambda self, hidden, cache=None: (hidden, cache))
    with pytest.warns(FutureWarning, match="is deprecated"):
        assert seen(None, states=1, past_key_values=2) == (1, 2)
    assert seen(None, 1, cache=2) == (1, 2)
    with pytest.warns(FutureWarning):  # the decorated class is itself
        assert Traced().forward(states=3) == 3


def test_without_such_a_decorator_a_function_is_left_as_it_is() -> None:
    def plain(self: Any, hidden: Any) -> Any:
        return hidden

    assert undecorated(plain) is plain
    assert decorated_alike(plain, print) is print
    assert without_checkpointing(plain) is plain


def test_another_decorator_stays_unknown() -> None:
    assert plain_forward(Traced) is None
    assert parsed(inspect.unwrap(Traced.forward)) is None
    assert undecorated(traced(print)) is not print


@pytest.mark.parametrize("source", ["deprecate_kwarg", "other('a')", "module.deprecate_kwarg('a')", "missing('a')"])
def test_only_a_call_of_the_decorator_itself_is_known(source: str) -> None:
    scope = {"deprecate_kwarg": deprecate_kwarg, "other": traced}
    assert not is_known_decorator(ast.parse(source, mode="eval").body, scope)
    assert is_known_decorator(ast.parse("deprecate_kwarg('a', '1', new_name='b')", mode="eval").body, scope)


def test_a_decorator_that_only_documents_is_known() -> None:
    scope = {"auto_docstring": auto_docstring, "other": traced}
    assert is_known_decorator(ast.parse("auto_docstring", mode="eval").body, scope)
    assert is_known_decorator(ast.parse("auto_docstring(checkpoint='a')", mode="eval").body, scope)
    assert not is_known_decorator(ast.parse("other", mode="eval").body, scope)
    assert not is_known_decorator(ast.parse("missing", mode="eval").body, scope)
    forward = plain_forward(SiglipEncoderLayer)
    assert forward is not None
    assert fused_norms(forward) == ("layer_norm2",)


def test_a_model_is_served_under_them_and_takes_the_old_names(
    monkeypatch: pytest.MonkeyPatch, kernels: Catalog, build: Any, prompt: Any, logits: Any
) -> None:
    for cls in (modeling_llama.LlamaAttention, modeling_llama.LlamaDecoderLayer):
        monkeypatch.setattr(cls, "forward", renamed(inspect.unwrap(cls.forward)))
    model, ids = build(), prompt()
    stock = logits(model, ids)
    with patched(model, catalog=kernels) as handle:
        assert torch.equal(logits(model, ids), stock)
        report = handle.report()
        layer = model.model.layers[0]
        hidden = torch.randn(1, 5, layer.hidden_size)
        tables = model.model.rotary_emb(hidden, torch.arange(5)[None])
        with torch.no_grad(), pytest.warns(FutureWarning, match="states"):
            found = layer(states=hidden, position_embeddings=tables)
    assert WRAPPED not in {site.reason for site in report.sites}
    hits = report.hits()
    assert all(hits[name] for name in ("rope_neox", "attention_prefill", "fused_add_rms_norm"))
    with torch.no_grad():
        assert torch.equal(layer(hidden, position_embeddings=tables), found)
