"""The tolerances of other projects, by name: what they call correct, beside what our gates do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tilegym_db.integrations.interchange import sol_execbench
from tilegym_db.integrations.interchange.adapt import why_not_by_element
from tilegym_db.store.imported import StoredRecord

__all__ = ["ForeignRule", "rule_for"]


@dataclass(frozen=True)
class ForeignRule:
    """``both``: an element is wrong if it breaks the absolute and the relative bound, else if it is off by more than
    ``atol + rtol * |reference|``. ``share``: of elements that must be right. ``cap``: no element may be off by more."""

    name: str
    atol: float
    rtol: float
    share: float = 1.0
    both: bool = True
    cap: float | None = None
    negative_infinity: bool = False

    def problem(self, outputs: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor]) -> str | None:
        """Why outputs are wrong by this rule; None where they are not."""
        for name, wanted in reference.items():
            reason = self._problem(outputs[name], wanted)
            if reason is not None:
                return f"{name}: {reason}"
        return None

    def _problem(self, found: torch.Tensor, wanted: torch.Tensor) -> str | None:
        if found.shape != wanted.shape or found.dtype != wanted.dtype:
            return f"has shape {list(found.shape)} and dtype {found.dtype}"
        a, b = found.double(), wanted.double()
        if self.negative_infinity:
            same = (a == -torch.inf) & (b == -torch.inf)
            a, b = a.masked_fill(same, 0.0), b.masked_fill(same, 0.0)
        if bool(a.isinf().any()):
            return "has infinities"
        if bool(a.isnan().any()):
            return "has NaNs"
        if a.numel() == 0:
            return None
        error = (a - b).abs()
        if self.both:
            wrong = (error > self.atol) & (error / (b.abs() + 1e-8) > self.rtol)
        else:
            wrong = error > self.atol + self.rtol * b.abs()
        right = 1.0 - float(wrong.double().mean())
        if right < self.share:
            return f"{right:.4%} of elements are right, and {self.share:.0%} must be; off by {float(error.max()):.3g} at most"
        if self.cap is not None and float(error.max()) > self.cap:
            return f"an element is off by {float(error.max()):.3g}, and {self.cap:g} is the most"
        return None


def rule_for(dialect: str, definition: StoredRecord, workload: Mapping[str, Any]) -> ForeignRule | str:
    """The rule that a data set judges a Definition by, or why it is not known here."""
    if dialect == sol_execbench.DIALECT:
        given = {**sol_execbench.TOLERANCE, **(workload.get("tolerance") or {})}
        return ForeignRule(
            "sol-execbench", given["max_atol"], given["max_rtol"], given["required_matched_ratio"], both=False,
            cap=given["max_error_cap"], negative_infinity=bool(given["allow_negative_inf"]),
        )  # fmt: skip
    reason = why_not_by_element(dialect, definition)
    if reason is not None:
        return reason
    if "moe_fp8_block_scale" in definition.name:
        return ForeignRule("flashinfer-bench low-bit", 1e-2, 1e-2, share=0.95)
    return ForeignRule("flashinfer-bench default", 1e-2, 1e-2)
