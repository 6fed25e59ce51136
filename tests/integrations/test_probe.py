"""The probe tells rounding variants apart where the model's own weights and dtype would not."""

from __future__ import annotations

import pytest
import torch
from transformers.models.glm4.modeling_glm4 import apply_rotary_pos_emb as rotate_pairs
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as rotate_halves
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from tilegym_db import Catalog, Definition
from tilegym_db.integrations.transformers.probe import probe_mlp, probe_norm, probe_rope
from tilegym_db.paths import shipped_root

CPU = torch.device("cpu")


def definition(name: str) -> Definition:
    return Catalog((shipped_root(),)).definition(name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_is_told_from_one_that_rounds_once(dtype: torch.dtype) -> None:
    two_rounds, one_round = LlamaRMSNorm(64).to(dtype), Olmo2RMSNorm(64).to(dtype)
    assert probe_norm(two_rounds, definition("rms_norm"), "variance_epsilon") is None
    assert "'out' differs" in str(probe_norm(one_round, definition("rms_norm"), "variance_epsilon"))
    assert two_rounds.weight.dtype == dtype
    assert two_rounds.weight.eq(1).all()


def test_silu_is_told_from_other_gates() -> None:
    swiglu = definition("swiglu")
    assert probe_mlp(torch.nn.SiLU(), swiglu, CPU) is None
    assert probe_mlp(torch.nn.functional.silu, swiglu, CPU) is None
    for other in (torch.nn.GELU(), torch.sigmoid, torch.nn.Identity()):
        assert "'out' differs" in str(probe_mlp(other, swiglu, CPU))


def test_rotated_halves_are_told_from_rotated_pairs() -> None:
    assert probe_rope(rotate_halves, definition("rope_neox"), CPU) is None
    assert "differs" in str(probe_rope(rotate_pairs, definition("rope_neox"), CPU))
