"""The probe tells rounding variants apart where the model's own weights and dtype would not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from shipped_records import CATALOG
from transformers import LlamaConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.glm4.modeling_glm4 import apply_rotary_pos_emb as rotate_pairs
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as rotate_halves
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.olmo2.modeling_olmo2 import apply_rotary_pos_emb as rotate_in_fp32
from transformers.models.phi3.modeling_phi3 import Phi3MLP
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb as rotate_a_part

from tilegym_db.models.found import DefinitionMatch, KnownCode, ModuleGroup
from tilegym_db.models.parts import mlp, norm, rope
from tilegym_db.models.probe import Probe, matching_definitions

CPU = torch.device("cpu")
NORMS, GATES, ROPES = (
    [definition.name for definition in KnownCode(CATALOG).definitions(part)] for part in ("norm", "mlp", "rope")
)


def matched(probe: Probe | str, names: Sequence[str]) -> list[str]:
    assert not isinstance(probe, str), probe
    return matching_definitions(probe, [CATALOG.definition(name) for name in names], CATALOG)


def match(name: str) -> DefinitionMatch:
    """A Definition with the first code that it states."""
    definition = CATALOG.definition(name)
    assert definition.serving is not None
    return DefinitionMatch(definition, definition.serving.code[0])


@pytest.mark.parametrize("size", [4, 64, 1024])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("norm_class", "definition"),
    [(LlamaRMSNorm, "rms_norm"), (Olmo2RMSNorm, "rms_norm_fp32"), (Gemma3RMSNorm, "rms_norm_gemma")],
)
def test_norm_is_distinguished_from_those_that_round_elsewhere(
    norm_class: Any, definition: str, dtype: torch.dtype, size: int
) -> None:
    module = norm_class(size).to(dtype)
    before = module.weight.clone()
    found = ModuleGroup("norm", norm_class, (module,))
    assert matched(norm.probe(found, module, match(definition)), NORMS) == [definition]
    assert module.weight.dtype == dtype
    assert torch.equal(module.weight, before)


@pytest.mark.parametrize("packed", [False, True])
def test_activation_is_distinguished_from_other_gates(packed: bool) -> None:
    silu = "silu_and_mul" if packed else "swiglu"

    def gates(activation: Any) -> list[str]:
        module = (Phi3MLP if packed else LlamaMLP)(
            LlamaConfig(hidden_size=8, intermediate_size=16, num_attention_heads=1)
        )
        name = "activation_fn" if packed else "act_fn"
        delattr(module, name)
        setattr(module, name, activation)
        return matched(mlp.probe(ModuleGroup("mlp", type(module), (module,)), module, match(silu)), GATES)

    assert gates(torch.nn.SiLU()) == [silu]
    assert gates(torch.nn.functional.silu) == [silu]
    assert gates(torch.nn.GELU(approximate="tanh")) == ([] if packed else ["gelu_tanh_and_mul"])
    for other in (torch.nn.GELU(), torch.sigmoid, torch.nn.Identity()):
        assert gates(other) == []


@pytest.mark.parametrize(
    ("function", "full_width", "part"),
    [
        (rotate_halves, ["rope_neox", "rope_partial"], None),
        (rotate_in_fp32, ["rope_neox", "rope_partial"], None),
        (rotate_a_part, ["rope_neox", "rope_partial"], ["rope_partial"]),
        (rotate_pairs, ["rope_pairs"], []),
    ],
)
def test_rotations_are_distinguished(function: Any, full_width: list[str], part: list[str] | None) -> None:
    assert matched(rope.probe_function(function, match("rope_neox"), CPU), ROPES) == full_width
    if part is not None:
        assert matched(rope.probe_function(function, match("rope_partial"), CPU), ["rope_partial"]) == part
