"""Functions that a forward calls and that Definitions state by their code: tokens and logits are those of the stock model."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from tilegym_db import Catalog, patched

pytestmark = pytest.mark.sweep

TINY = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}  # fmt: skip
GROWING = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0,
    "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3, "original_max_position_embeddings": 8,
}  # fmt: skip


def tiny(kind: str, name: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    cls = getattr(importlib.import_module(f"transformers.models.{kind}.modeling_{kind}"), name)
    return cls(CONFIG_MAPPING[kind](**{**TINY, "rope_parameters": dict(GROWING), **changes})).eval()


@pytest.mark.skipif("mistral4" not in CONFIG_MAPPING, reason="this transformers has not both of them")
@pytest.mark.parametrize(
    ("kind", "name", "changes"),
    [("ministral3", "Ministral3ForCausalLM", {}), ("mistral4", "Mistral4ForCausalLM", LATENT)],
)
def test_queries_grow_with_their_position_as_in_stock(
    kind: str, name: str, changes: dict[str, Any], kernels: Catalog
) -> None:
    model = tiny(kind, name, **changes)
    ids = torch.randint(1, 96, (2, 11), generator=torch.Generator().manual_seed(0))
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    with torch.no_grad():
        stock, tokens = model(ids).logits, model.generate(ids, **options)
        with patched(model, catalog=kernels, ops=["position_scale"]) as handle:
            assert torch.equal(model(ids).logits, stock)
            assert torch.equal(model.generate(ids, **options), tokens)
    (site,) = [one for one in handle.report().sites if one.definition == "position_scale"]
    assert (site.kind, dict(site.bypassed), site.counts.kernel_calls) == ("function", {}, 2 + 2 * 4)
