"""The gate for indices: what they point at is compared, so that any choice among equal values passes."""

from __future__ import annotations

import math

import torch

from tilegym_db.records.tolerance import Limits
from tilegym_db.verify.verdicts import PASSED, OutputVerdict, failed, row_of_most

__all__ = ["check_gathered", "check_ranked"]


def check_gathered(
    name: str, actual: torch.Tensor, oracle: torch.Tensor, source: torch.Tensor, limits: Limits | None = None
) -> OutputVerdict:
    """Compare indices by what they point at: any choice among equal values is right.

    Indices must lie in the last axis of ``source``, be distinct in a row, and gather, one by one, what the oracle's gather.
    A negative index of the oracle stands for "none", and must be equal.

    Args:
        name: the output's name, for the reason.
        actual: indices ``[..., K]``.
        oracle: the reference's indices, same shape.
        source: the tensor pointed into, ``[..., E]``: an input as it was given, or the oracle's value of another output.
        limits: bounds of the dtype of ``source`` where it is computed, since values that differ by its rounding may be taken
            for one another; None where it is an input.
    """
    if actual.numel() == 0:
        return PASSED
    got_index, want_index = actual.long(), oracle.long()
    none = want_index < 0
    outside = torch.where(none, got_index != want_index, (got_index < 0) | (got_index >= source.shape[-1]))
    repeated = _repeated(got_index) & ~none
    got, want = (source.gather(-1, index.clamp(0, source.shape[-1] - 1)) for index in (got_index, want_index))
    allowed = want.double().abs() * (limits.rtol if limits is not None else 0.0)
    both_nan = torch.isnan(got) & torch.isnan(want) if source.dtype.is_floating_point else torch.zeros_like(none)
    near = (got == want) | both_nan | ((got.double() - want.double()).abs() <= allowed)
    return _verdict(
        name,
        actual,
        oracle,
        (outside, "indices point outside the row"),
        (repeated, "indices occur twice in their row"),
        (~near & ~none, "indices point at another value than the reference's do"),
    )


def check_ranked(
    name: str, actual: torch.Tensor, ranked: torch.Tensor, limits: Limits, smallest: float, *, ordered: bool
) -> OutputVerdict:
    """Indices must be those of the largest ranked values of their row; any choice among equal values is right.

    Values are equal where they differ by the rounding of the dtype in which they are ranked, or where both are too small to be
    normal numbers there.

    Args:
        name: the output's name, for the reason.
        actual: indices ``[..., K]``, distinct in a row.
        ranked: the values, ``[..., E]`` with E >= K, in fp64.
        limits: bounds of the dtype in which the reference as written ranks them.
        smallest: normal number of that dtype.
        ordered: whether they must come in descending order of their values.
    """
    if actual.numel() == 0:
        return PASSED
    index = actual.long()
    best = ranked.topk(index.shape[-1], dim=-1)
    outside = (index < 0) | (index >= ranked.shape[-1])
    got = ranked.gather(-1, index.clamp(0, ranked.shape[-1] - 1))
    order = torch.arange(index.shape[-1], device=index.device).expand_as(index)
    if not ordered:
        got, order = got.sort(dim=-1, descending=True)
    both_nan = torch.isnan(got) & torch.isnan(best.values)
    allowed = (best.values.abs() * limits.rtol).clamp_min(smallest)
    near = (got == best.values) | both_nan | ((got - best.values).abs() <= allowed)
    wrong = torch.zeros_like(near).scatter_(-1, order, ~near)
    return _verdict(
        name,
        actual,
        best.indices,
        (outside, "indices point outside the row"),
        (_repeated(index), "indices occur twice in their row"),
        (wrong, "indices point at values that are not the largest of their row"),
    )


def _verdict(name: str, actual: torch.Tensor, wanted: torch.Tensor, *found: tuple[torch.Tensor, str]) -> OutputVerdict:
    for wrong, what in found:
        if bool(wrong.any()):
            count = int(wrong.sum())
            figures = (math.inf, math.inf, math.inf, 1.0 - count / actual.numel())
            reason = f"{name}: {count} of {actual.numel()} {what}"
            return failed("exact", reason, figures, wrong, actual, wanted, row_of_most(wrong))
    return PASSED


def _repeated(index: torch.Tensor) -> torch.Tensor:
    ordered, order = index.sort(dim=-1, stable=True)
    again = torch.zeros_like(index, dtype=torch.bool)
    again[..., 1:] = ordered[..., 1:] == ordered[..., :-1]
    return torch.zeros_like(again).scatter_(-1, order, again)
