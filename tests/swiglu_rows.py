"""Inputs of the backward of the experts' activation, some of whose rows and choices have nothing to do with each other."""

from __future__ import annotations

from typing import Any

import torch


def backward_inputs(rows: int, tokens: int, group: int = 32, limit: float = 1.0) -> dict[str, Any]:
    """Half of the choices of `tokens` with three each have a row, as far as there are any; H = 64."""
    generator = torch.Generator().manual_seed(rows)
    pairs = min(rows, tokens * 3 // 2)
    row, choice = (torch.randperm(count, generator=generator)[:pairs] for count in (rows, tokens * 3))
    weight_of_row, row_of_choice = torch.full((rows,), -1), torch.full((tokens * 3,), -1)
    weight_of_row[row], row_of_choice[choice] = choice, row
    return {
        "x": (40 * torch.randn(rows, 128, generator=generator)).to(torch.float8_e4m3fn),
        "x_scale": torch.rand(rows, 128 // group, generator=generator) * 0.05,
        "grad_out": torch.randn(rows, 64, generator=generator).bfloat16(),
        "topk_weights": torch.rand(tokens, 3, generator=generator),
        "weight_of_row": weight_of_row.int(),
        "row_of_choice": row_of_choice.view(tokens, 3).int(),
        **{"group": group, "limit": limit, "round_scale": True},
    }
