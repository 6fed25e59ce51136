"""The configs of real models in ``benchmarks/configs``: what `model-bench` is given on a GPU can be built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tilegym_db.integrations.transformers.experts_wrapper import wrapper_of
from tilegym_db.integrations.transformers.random_model import load_config
from tilegym_db.paths import shipped_root

CONFIGS = sorted((shipped_root() / "benchmarks" / "configs").glob("*.json"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_eight_layers_of_a_mixture_are_a_model_of_transformers(path: Path) -> None:
    factory: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model = factory.from_config(load_config(path, 8))
    experts = [module for module in model.modules() if wrapper_of(type(module).forward) is not None]
    assert 5 <= len(experts) <= 8  # the first layers of some are dense
    assert model.config._experts_implementation == "grouped_mm"
