"""What does not fit into a device is refused before anything is allocated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tilegym_db.errors import UsageError

__all__ = ["available_bytes", "check_fits", "check_run_fits"]


def check_fits(model: torch.nn.Module, device: str) -> None:
    """Raise :class:`UsageError` where the weights of a model on the meta device are more than a device's free memory."""
    weights = _weights(model)
    fix = "Keep fewer layers (--layers), or take a smaller model."
    repeated = max(
        (part for part in model.modules() if isinstance(part, torch.nn.ModuleList)), key=_weights, default=None
    )
    if weights > available_bytes(device) and repeated is not None and len(repeated) and _weights(repeated):
        free = available_bytes(device) - (weights - _weights(repeated))
        layers = max(0, min(len(repeated), int(free * len(repeated) // _weights(repeated))))
        fix = f"{layers} of its {len(repeated)} layers would fit{f': --layers {layers}' if layers else ''}."
    _check_bytes(weights, device, "the weights", fix)


def _weights(part: torch.nn.Module) -> int:
    """Bytes of its parameters; layers of a model are taken for equally large."""
    return sum(parameter.numel() * parameter.element_size() for parameter in part.parameters())


def check_run_fits(config: Any, device: str, dtype: str, batch: int, prompt: int, new: int = 0) -> None:
    """Raise :class:`UsageError` where not even the hidden states and the cache of a run fit into a device's free memory."""
    text = config.get_text_config()
    width, layers, heads = (
        int(getattr(text, name, None) or 1) for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")
    )
    cached = (getattr(text, "num_key_value_heads", None) or heads) * (getattr(text, "head_dim", None) or width // heads)
    element = getattr(torch, dtype).itemsize
    # Token ids, hidden states of one layer; a cache of a sliding window may be smaller, so it counts once.
    needed = batch * prompt * (8 + width * element) + batch * (prompt + new) * cached * element * (2 if layers else 0)
    _check_bytes(needed, device, f"batch {batch}, prompt {prompt} and {new} new tokens", "Ask for fewer.")


def _check_bytes(needed: int, device: str, what: str, fix: str) -> None:
    free = available_bytes(device)
    if needed > free:
        raise UsageError(
            f"{what} take {needed / 1e9:,.1f} GB at least, and {device} has {free / 1e9:,.1f} GB free. {fix}",
            code="memory_short",
        )


def available_bytes(device: str) -> int:
    """What is free on a device: what the driver says of a GPU, what Linux calls available of a CPU's memory."""
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 1 << 62
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else 1 << 62
