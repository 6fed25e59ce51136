"""The config of every architecture, as the installed transformers saves it: commands read it, and keep few layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from raising import raises
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from tilegym_db.cli.kit.options import config_file
from tilegym_db.errors import UsageError
from tilegym_db.models.capture import of_one_gpu, with_few_layers
from tilegym_db.models.random_model import config_content, load_config, model_class, unchecked_model
from tilegym_db.records.text import canonical_json
from tilegym_db.scaffold.model_config import read_model_config

TYPES = sorted(CONFIG_MAPPING)


def saved(config: Any, folder: Path) -> Path:
    path = folder / "config.json"
    path.write_text(config.to_json_string(use_diff=False))
    return path


def on_meta(path: Path, layers: int | None) -> Any:
    with torch.device("meta"):
        factory, config = model_class(config := load_config(path, layers)), config
        make = factory.from_config if hasattr(factory, "_model_mapping") else factory._from_config
        return make(config)


def stacks(model: torch.nn.Module) -> dict[str, int]:
    return {name: len(one) for name, one in model.named_modules() if isinstance(one, torch.nn.ModuleList)}


@pytest.mark.sweep(32)
@pytest.mark.parametrize("kind", TYPES)
def test_a_config_that_transformers_saves_is_read(kind: str, tmp_path: Path) -> None:
    try:
        path = saved(CONFIG_MAPPING[kind](), tmp_path)
        AutoConfig.from_pretrained(path)
    except Exception as error:  # each config class refuses its own defaults in its own way
        pytest.skip(f"transformers itself does not read it: {error}")
    config_file(path)
    read_model_config(path)
    one, full = load_config(path, 1), load_config(path)
    assert type(one) is type(full)
    canonical_json(config_content(one))


# kind -> the layers of each kind that one command keeps
FEW = {
    "qwen3_5": {"model.layers": 2},
    "jamba": {"model.layers": 5},
    "mamba": {"backbone.layers": 1},
    "falcon_mamba": {"backbone.layers": 1},
    "recurrent_gemma": {"model.layers": 3},
    "bart": {"model.encoder.layers": 1, "model.decoder.layers": 1},
    "whisper": {"model.encoder.layers": 1, "model.decoder.layers": 1},
    "rwkv": {"rwkv.blocks": 2},  # the first block has a norm more
    "deepseek_v3": {"model.layers": 4},  # three dense layers come first
    "bert": {"bert.encoder.layer": 1},
}


@pytest.mark.parametrize("kind", FEW)
def test_one_layer_of_every_kind_remains(kind: str, tmp_path: Path) -> None:
    model = on_meta(saved(CONFIG_MAPPING[kind](), tmp_path), 1)
    assert stacks(model).items() >= FEW[kind].items()


def test_the_first_layers_remain_if_they_are_of_every_kind(tmp_path: Path) -> None:
    path = saved(CONFIG_MAPPING["qwen3_5_text"](num_hidden_layers=12), tmp_path)
    assert load_config(path, 6).layer_types == load_config(path).layer_types[:6]


def test_a_vision_tower_keeps_its_layers(tmp_path: Path) -> None:
    path = saved(CONFIG_MAPPING["qwen3_vl"](), tmp_path)
    config = load_config(path, 1)
    assert config.text_config.num_hidden_layers == 1
    assert config.vision_config == load_config(path).vision_config


def test_a_config_whose_model_cannot_be_built_stays_as_it_is() -> None:
    config = CONFIG_MAPPING["llama"]()
    assert with_few_layers(config, 1, lambda _: None) is config


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("mamba2", {"time_step_limit": (0.0, float("inf"))}),
        ("glm5_next_text", {}),
        ("deberta-v2", {"type_vocab_size": 0}),
    ],
)
def test_values_that_only_transformers_writes_are_read(kind: str, content: dict[str, Any], tmp_path: Path) -> None:
    path = saved(CONFIG_MAPPING[kind](**content), tmp_path)
    config_file(path)
    for name, value in content.items():
        assert getattr(load_config(path), name) in (value, list(value) if isinstance(value, tuple) else value)


def test_the_model_that_a_config_names_is_built(tmp_path: Path) -> None:
    config = CONFIG_MAPPING["bert"](architectures=["BertForSequenceClassification"])
    assert model_class(config).__name__ == "BertForSequenceClassification"
    config.architectures = ["LlamaForCausalLM"]  # the model of another config
    assert model_class(config).__name__ == "AutoModelForMaskedLM"


def test_a_config_without_a_model_is_refused() -> None:
    class Unknown(PreTrainedConfig):
        model_type = "unknown_to_transformers"

    with raises(UsageError, "model_absent", "unknown_to_transformers"):
        unchecked_model(Unknown(), "cpu", "float32")


def test_part_of_one_gpu_has_its_share_of_heads_and_widths() -> None:
    config = CONFIG_MAPPING["llama"](
        hidden_size=64, num_attention_heads=8, num_key_value_heads=2, intermediate_size=96, num_hidden_layers=1
    )
    part = of_one_gpu(config, 4)
    sizes = (
        part.hidden_size,
        part.head_dim,
        part.num_attention_heads,
        part.num_key_value_heads,
        part.intermediate_size,
    )
    assert sizes == (64, 8, 2, 1, 24)
    assert of_one_gpu(config, 1) is config
    with raises(UsageError, "parallel_indivisible", "--tp 5", "num_attention_heads"):
        of_one_gpu(config, 5)
