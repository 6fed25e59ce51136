"""The variants of modules and functions that are recognised, by fingerprint of their source.

A variant says which Definition a piece of a model computes. The fingerprints are those of transformers 5.17 to 5.23; a model
whose code changes is no longer recognised and stays stock, and the report says so.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MLPS", "NORMS", "ROPES", "ROTATE_HALF", "Variant"]


@dataclass(frozen=True)
class Variant:
    """``definition`` is what it computes; ``eps_attribute`` where a norm keeps its epsilon."""

    definition: str
    models: str
    eps_attribute: str = ""


# forward of the norm: normalise in fp32, round, multiply by the weight in the activation dtype.
NORMS: dict[str, Variant] = {
    "a7dfd4f03eb3ea7f": Variant("rms_norm", "Llama, Mistral, Qwen2, Qwen3", eps_attribute="variance_epsilon"),
}

# forward of the gated MLP with separate gate and up projections; the activation itself is probed.
MLPS: dict[str, Variant] = {
    "3d02dbd242fed4ec": Variant("swiglu", "Llama, Mistral, Qwen2, Qwen3"),
}

# apply_rotary_pos_emb with half-split rotation; valid only together with ROTATE_HALF.
ROPES: dict[str, Variant] = {
    "2418abfc5d155e5e": Variant("rope_neox", "Llama, Mistral, Qwen2, Qwen3"),
}
ROTATE_HALF = frozenset({"3a581a793982b0d2"})
