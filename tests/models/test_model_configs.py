"""The configs of real models in ``benchmarks/configs``: what `model-bench` is given on a GPU can be built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tilegym_db.models.random_model import load_config
from tilegym_db.models.upstream_code import wrapper_of
from tilegym_db.paths import shipped_root

CONFIGS = sorted((shipped_root() / "benchmarks" / "configs").glob("*.json"))
DENSE = {"llama-3.2-1b": 1_235_814_400, "llama-3.1-8b": 8_030_261_248, "qwen3-8b": 8_190_735_360}
"""Parameters of those without experts, as their publishers state them."""
OTHERS = ("falcon-h1-0.5b", "gemma-2-9b", "qwen3.5-0.8b")
"""Without experts, of sizes that the publishers state in other words."""
MIXTURES = [path for path in CONFIGS if path.stem not in (*DENSE, *OTHERS)]


@pytest.mark.parametrize("path", MIXTURES, ids=lambda path: path.stem)
def test_eight_layers_of_a_mixture_are_a_model_of_transformers(path: Path) -> None:
    factory: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model = factory.from_config(load_config(path, 8))
    experts = [module for module in model.modules() if wrapper_of(type(module).forward) is not None]
    assert 5 <= len(experts) <= 8  # the first layers of some are dense
    assert model.config._experts_implementation == "grouped_mm"


@pytest.mark.parametrize("name", DENSE)
def test_a_dense_model_has_the_parameters_of_the_published_one(name: str) -> None:
    (path,) = (path for path in CONFIGS if path.stem == name)
    factory: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model = factory.from_config(load_config(path, None))
    assert sum(parameter.numel() for parameter in model.parameters()) == DENSE[name]


@pytest.mark.parametrize("name", OTHERS)
def test_one_layer_of_each_kind_is_a_model_of_transformers(name: str) -> None:
    (path,) = (path for path in CONFIGS if path.stem == name)
    factory: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model = factory.from_config(load_config(path, 4))
    assert model.config.num_hidden_layers == 4
