"""The probe tells rounding variants apart where the model's own weights and dtype would not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.glm4.modeling_glm4 import apply_rotary_pos_emb as rotate_pairs
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as rotate_halves
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.olmo2.modeling_olmo2 import apply_rotary_pos_emb as rotate_in_fp32
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb as rotate_a_part

from tilegym_db import Catalog
from tilegym_db.integrations.transformers.probe import Probe, matches, probe_mlp, probe_norm, probe_rope
from tilegym_db.paths import shipped_root

CPU = torch.device("cpu")
NORMS = ("rms_norm", "rms_norm_fp32", "rms_norm_gemma")
GATES = ("swiglu", "gelu_tanh_and_mul")
ROPES = ("rope_neox", "rope_partial")


def matched(probe: Probe, names: Sequence[str]) -> list[str]:
    return matches(probe, names, Catalog((shipped_root(),)))


@pytest.mark.parametrize("size", [4, 64, 1024])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("norm_class", "eps", "definition"),
    [
        (LlamaRMSNorm, "variance_epsilon", "rms_norm"),
        (Olmo2RMSNorm, "variance_epsilon", "rms_norm_fp32"),
        (Gemma3RMSNorm, "eps", "rms_norm_gemma"),
    ],
)
def test_a_norm_is_told_from_those_that_round_elsewhere(
    norm_class: Any, eps: str, definition: str, dtype: torch.dtype, size: int
) -> None:
    norm = norm_class(size).to(dtype)
    before = norm.weight.clone()
    assert matched(probe_norm(norm, eps), NORMS) == [definition]
    assert norm.weight.dtype == dtype
    assert torch.equal(norm.weight, before)


@pytest.mark.parametrize("packed", [False, True])
def test_an_activation_is_told_from_other_gates(packed: bool) -> None:
    names = ("silu_and_mul",) if packed else GATES
    silu = "silu_and_mul" if packed else "swiglu"
    assert matched(probe_mlp(torch.nn.SiLU(), CPU, packed=packed), names) == [silu]
    assert matched(probe_mlp(torch.nn.functional.silu, CPU, packed=packed), names) == [silu]
    tanh_form = torch.nn.GELU(approximate="tanh")
    assert matched(probe_mlp(tanh_form, CPU, packed=packed), names) == ([] if packed else ["gelu_tanh_and_mul"])
    for other in (torch.nn.GELU(), torch.sigmoid, torch.nn.Identity()):
        assert matched(probe_mlp(other, CPU, packed=packed), names) == []


@pytest.mark.parametrize(
    ("function", "full_width", "part"),
    [
        (rotate_halves, ["rope_neox", "rope_partial"], None),
        (rotate_in_fp32, ["rope_neox", "rope_partial"], None),
        (rotate_a_part, ["rope_neox", "rope_partial"], ["rope_partial"]),
        (rotate_pairs, [], []),
    ],
)
def test_rotations_are_told_apart(function: Any, full_width: list[str], part: list[str] | None) -> None:
    assert matched(probe_rope(function, CPU, partial=False), ROPES) == full_width
    if part is not None:
        assert matched(probe_rope(function, CPU, partial=True), ["rope_partial"]) == part
