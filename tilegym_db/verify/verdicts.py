"""What a comparison says of one output: the gate that failed, the figures, and where to look."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["PASSED", "OutputVerdict", "failed", "row_of_most"]


@dataclass(frozen=True)
class OutputVerdict:
    """How one output compares with the oracle. ``gate`` names the one that failed, or is None where all hold.

    ``rel_fro``, ``worst_row_rel``: relative, no unit. ``max_abs``: in the output's own units. ``reason``: for a person,
    with the first wrong index, what was expected and what was there; the fields after it hold the same for a report.
    ``worst_row`` counts rows over all axes but the last.
    """

    gate: str | None
    reason: str
    rel_fro: float
    worst_row_rel: float
    max_abs: float
    matched_ratio: float
    index: tuple[int, ...] = ()
    expected: str = ""
    got: str = ""
    worst_row: int | None = None

    @property
    def passed(self) -> bool:
        """True where every gate holds."""
        return self.gate is None


PASSED = OutputVerdict(None, "", 0.0, 0.0, 0.0, 1.0)


def failed(
    gate: str,
    what: str,
    figures: tuple[float, float, float, float],
    wrong: torch.Tensor,
    actual: torch.Tensor,
    oracle: torch.Tensor,
    worst_row: int,
) -> OutputVerdict:
    """A verdict on a failed gate that shows the first wrong element.

    Args:
        gate: which one.
        what: the sentence for a person, without the element.
        figures: ``rel_fro``, ``worst_row_rel``, ``max_abs`` and ``matched_ratio`` of the verdict.
        wrong: True where an element is wrong; at least one is.
        actual: what was there.
        oracle: what was expected.
        worst_row: as in the verdict.
    """
    index = tuple(int(i) for i in torch.nonzero(wrong)[0]) if wrong.dim() else ()
    expected, got = (f"{float(value[index].double()):.6g}" for value in (oracle, actual))
    reason = f"{what}; first at {list(index)}: expected {expected}, got {got}"
    return OutputVerdict(gate, reason, *figures, index=index, expected=expected, got=got, worst_row=worst_row)


def row_of_most(wrong: torch.Tensor) -> int:
    """The row, counted over all axes but the last, with most elements flagged."""
    columns = wrong.shape[-1] if wrong.dim() else 1
    return int(wrong.reshape(-1, columns).sum(dim=1).argmax())
