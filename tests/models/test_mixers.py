"""Mixers of hybrid models: kernels for their functions and norms give the tokens of stock, and other calls run stock code."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilegym_db import Catalog, patch, patched

MODELS = ("qwen3_5", "qwen3_next")
OPS = (
    "gated_delta_rule_chunk",
    "gated_delta_rule_recurrent",
    "causal_conv1d",
    "causal_conv1d_update",
    "rms_norm_gated_silu",
)


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_stock(name: str, kernels: Catalog, build: Any, prompt: Any) -> None:
    model, options = build(name), {"max_new_tokens": 12, "do_sample": False}
    stock = model.generate(prompt(2), **options)
    with patched(model, catalog=kernels, ops=OPS) as handle:
        print(handle.report())
        assert torch.equal(model.generate(prompt(2), **options), stock)
        print(handle.report())
    assert all(count > 0 for count in handle.report().hits().values())
