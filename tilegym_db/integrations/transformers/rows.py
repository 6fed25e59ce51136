"""Activations as the rows of a matrix: a view, or nothing. Nothing here is ever copied."""

from __future__ import annotations

import itertools

import torch

__all__ = ["are_rows", "rows"]


def rows(value: torch.Tensor) -> torch.Tensor | None:
    """[..., N] as [M, N] without a copy; None where the strides do not allow it, or N is not the innermost one."""
    if value.dim() == 2 and value.stride(1) == 1:
        return value
    return value.view(-1, value.shape[-1]) if are_rows(value) else None


def are_rows(value: torch.Tensor) -> bool:
    """Whether :func:`rows` has an answer; a matrix counts only where it is not empty."""
    if value.dim() < 2 or value.numel() == 0:
        return False
    return value.is_contiguous() or _has_mergeable_rows(value)


def _has_mergeable_rows(value: torch.Tensor) -> bool:
    """Whether the leading axes, from the last to the first, are steps of one constant stride."""
    *leading, last = zip(value.shape, value.stride(), strict=True)
    steps = [(size, stride) for size, stride in leading if size != 1]
    follow = all(outer[1] == inner[0] * inner[1] for outer, inner in itertools.pairwise(steps))
    return last[1] == 1 and follow
