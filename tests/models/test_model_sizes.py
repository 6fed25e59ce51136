from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest
from raising import raises
from transformers import Gemma4TextConfig, LlamaConfig

from tilegym_db.errors import UsageError
from tilegym_db.models.random_model import build_model, check_run_fits, load_config

TINY = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": -64}, "hidden_size"),
        ({"hidden_size": "64"}, 'hidden_size.* from 1 to 1048576.*"64"'),
        ({"hidden_size": True}, "hidden_size"),
        ({"hidden_size": [64]}, "hidden_size"),
        ({"hidden_size": 10**16}, "hidden_size"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"vocab_size": 1 << 26, "hidden_size": 1 << 20}, "memory_short"),
        ({"rope_theta": "x"}, "^(config_refused|model_not_built)"),
        ({"pad_token_id": 99_999}, "Padding_idx"),
        ({"_attn_implementation": "flash_attention_2"}, "^(config_refused|model_not_built)"),
        ({"layer_types": ["nope"]}, "^(config_refused|model_not_built)"),
        ({"hidden_size": None}, "^(config_refused|model_not_built)"),
    ],
)
def test_config_without_a_model_is_refused_with_a_reason(tmp_path, change, fact):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**TINY, **change}))
    with pytest.raises(UsageError) as refused:
        build_model(load_config(path), "cpu", "float32")
    assert re.search(fact, f"{refused.value.code}: {refused.value}")


def test_a_model_that_cannot_be_called_is_refused(tmp_path):
    experts = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 9, "moe_intermediate_size": 32}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**TINY, **experts}))
    with raises(UsageError, "model_does_not_run", "selected index k out of range"):
        build_model(load_config(path), "cpu", "float32")


def test_a_config_nested_too_deeply_is_refused(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("[" * 100_000)
    with pytest.raises(UsageError, match=r"config\.json"):
        load_config(path)


@pytest.mark.parametrize(("batch", "prompt", "new"), [(10**9, 512, 64), (1, 10**20, 0), (1, 1, 10**15)])
def test_a_run_that_cannot_fit_is_refused_before_it_starts(batch, prompt, new):
    with raises(UsageError, "memory_short", "GB", "cpu"):
        check_run_fits(LlamaConfig(**TINY), "cpu", "float32", batch, prompt, new)


def test_layers_of_several_sizes_count_by_the_smallest():
    config = Gemma4TextConfig(
        num_hidden_layers=2, head_dim=64, global_head_dim=128, layer_types=["sliding_attention", "full_attention"]
    )
    assert {one.head_dim for one in config.per_layer_config} == {64, 128}
    check_run_fits(config, "cpu", "float32", 1, 16, 2)
    with raises(UsageError, "memory_short", "GB", "cpu"):
        check_run_fits(config, "cpu", "float32", 1, 10**20, 0)


def test_a_run_that_may_fit_is_let_through():
    check_run_fits(LlamaConfig(**TINY), "cpu", "float32", 2, 128, 64)
    check_run_fits(SimpleNamespace(get_text_config=lambda: SimpleNamespace()), "cpu", "float32", 1, 8)
