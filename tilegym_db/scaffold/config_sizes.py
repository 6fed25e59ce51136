"""Sizes in a model's config that are there by mistake: zero, text, petabytes. Refused before anything large is imported."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tilegym_db.errors import UsageError

__all__ = ["check_config_sizes"]

# Keys of configs that count something -> the most that any model has by far.
LARGEST: dict[str, int] = {
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "num_hidden_layers": 1 << 12,
    "num_attention_heads": 1 << 14,
    "num_key_value_heads": 1 << 14,
    "head_dim": 1 << 14,
    "vocab_size": 1 << 26,
    "type_vocab_size": 1 << 26,
    "num_labels": 1 << 20,
    "num_experts": 1 << 16,
    "num_local_experts": 1 << 16,
    "n_routed_experts": 1 << 16,
    "moe_intermediate_size": 1 << 22,
    "kv_lora_rank": 1 << 20,
    "q_lora_rank": 1 << 20,
    "max_position_embeddings": 1 << 32,
}


def check_config_sizes(content: Mapping[str, Any], file: Path) -> None:
    """Raise :class:`UsageError` for a size that is no whole number between 1 and :data:`LARGEST`; null is left alone."""
    for key, value in _entries(content):
        most = LARGEST.get(key)
        if most is None or value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise UsageError(
                f"{file}: {key} must be a whole number from 1 to {most}, not {json.dumps(value)[:40]}.",
                code="config_size_invalid",
            )


def _entries(content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The entries of a config and of the configs inside it (``text_config``)."""
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from _entries(value)
        elif key in ("hidden_size", "vocab_size", "num_hidden_layers") or not isinstance(value, list):
            yield key, value
