"""The variants of modules and functions that are recognised, by fingerprint of their source.

A variant says which Definition a piece of a model may compute, or why none describes it. The fingerprints are those of
transformers 5.17 to 5.23; a model whose code changes is no longer recognised and stays stock, and the report says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["ATTENTIONS", "FUSED_WITH_ADD", "MLPS", "NORMS", "ROPES", "Variant", "rivals"]


@dataclass(frozen=True)
class Variant:
    """What a piece of code is known to be.

    ``definitions`` are the Definitions it may compute: more than one where that depends on a part of the model (the activation
    of an MLP), which the probe tells apart. ``calls`` are the functions that the code relies on, by name, with their
    fingerprints. ``eps_attribute`` is where a norm keeps its epsilon, ``activation_attribute`` where an MLP keeps its
    activation; it is ``packed`` where gate and up are halves of one projection. A rotation is ``partial`` where its tables may be
    narrower than a head. ``reason`` says why no Definition describes the code.
    """

    models: str
    definitions: tuple[str, ...] = ()
    calls: Mapping[str, str] = field(default_factory=dict)
    eps_attribute: str = ""
    activation_attribute: str = ""
    packed: bool = False
    partial: bool = False
    reason: str = ""


ROTATE_HALVES = {"rotate_half": "3a581a793982b0d2"}

# forward of the norm. They differ in what is rounded to the activation's dtype, and where.
NORMS: dict[str, Variant] = {
    "a7dfd4f03eb3ea7f": Variant(
        "Llama, Mistral, Qwen2, Qwen3, Phi-3, GLM-4, OLMoE, DeepSeek", ("rms_norm",), eps_attribute="variance_epsilon"
    ),
    "603e270858977916": Variant("OLMo-2, OLMo-3, gpt-oss", ("rms_norm_fp32",), eps_attribute="variance_epsilon"),
    "ef437a855f8bab51": Variant(
        "Gemma-3, Qwen3-Next, Qwen3.5", ("rms_norm_gemma",), {"_norm": "16394bbee632b172"}, eps_attribute="eps"
    ),
    "e6269c6dba95d139": Variant("Qwen3-Next, Qwen3.5", reason="no definition describes a norm with a gate"),
}

# forward of the gated MLP: separate gate and up projections, or both packed in one; the activation itself is probed.
MLPS: dict[str, Variant] = {
    "3d02dbd242fed4ec": Variant(
        "Llama, Mistral, Qwen, OLMo, DeepSeek; Gemma-3",
        ("swiglu", "gelu_tanh_and_mul"),
        activation_attribute="act_fn",
    ),
    "98e938ff3b010de1": Variant("Phi-3, GLM-4", ("silu_and_mul",), activation_attribute="activation_fn", packed=True),
}

# The rotary function that an attention forward calls.
ROPES: dict[str, Variant] = {
    "2418abfc5d155e5e": Variant("Llama, Mistral, Qwen2, Qwen3, Gemma-3, OLMoE", ("rope_neox",), ROTATE_HALVES),
    # Casts its results to the dtype of q and k, which only matters with tables of another dtype: those calls fit no Definition.
    "d282a97c9513c6c7": Variant("OLMo-2, OLMo-3", ("rope_neox",), ROTATE_HALVES),
    "e71dc51b10e9b9e3": Variant("Phi-3", ("rope_partial",), ROTATE_HALVES, partial=True),
    "d95d1553510f40c2": Variant("Qwen3-Next, Qwen3.5", ("rope_partial",), ROTATE_HALVES, partial=True),
    "1a72c09163754437": Variant("GLM-4", reason="no definition describes a rotation of neighbouring pairs"),
    "0ee4cb7cefddc29f": Variant("gpt-oss", reason="no definition describes tables of half a head's width"),
    "00d77be10c0d365b": Variant("DeepSeek-V3", reason="no definition describes pairs that are rotated into halves"),
    "d0f83947eb0ace84": Variant("DeepSeek-V2", reason="no definition describes a rotation by complex tables"),
}

# What transformers' registry has for "sdpa".
ATTENTIONS: dict[str, Variant] = {
    "b059c6f860790c0f": Variant(
        "transformers 5.23", ("attention_prefill", "attention_decode"), {"use_gqa_in_sdpa": "7dfc74e5cfca4ce8"}
    ),
    "ad5f22ba56ea79ab": Variant(
        "transformers 5.17", ("attention_prefill", "attention_decode"), {"use_gqa_in_sdpa": "4e95fba91f6553d4"}
    ),
}


# Definition of a norm -> that of a residual add and this norm.
FUSED_WITH_ADD: dict[str, str] = {"rms_norm": "fused_add_rms_norm"}


def rivals(variants: Mapping[str, Variant]) -> tuple[str, ...]:
    """Every Definition that a table of variants knows: the ones that a probe has to tell apart."""
    return tuple(dict.fromkeys(name for variant in variants.values() for name in variant.definitions))
