"""Outputs that a caller may not want, and the Definition without those that a Solution leaves out (decision 0037)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tilegym_db.errors import RecordError
from tilegym_db.records.definition import Definition

__all__ = ["check_omits", "narrowed", "why_not_timed"]


def check_omits(omits: Sequence[str], definition: Definition, *, role: str, layouts: Collection[str]) -> None:
    """Raise :class:`RecordError` unless a Solution omits the last optional outputs of its Definition, in order."""
    if not omits:
        return
    optional = definition.optional_outputs
    for name in omits:
        if name not in optional:
            known = ", ".join(optional) or "none"
            raise RecordError(
                f"spec.omits names '{name}', which is no optional output of {definition.name} (optional: {known})",
                code="omits_not_optional",
            )
    if tuple(optional[-len(omits) :]) != tuple(omits):
        raise RecordError(
            f"spec.omits must be the last optional outputs, in order ({', '.join(optional)})", code="omits_order"
        )
    if role == "baseline":
        raise RecordError(
            "spec.omits: a baseline omits nothing, since it serves whoever finds nothing else", code="omits_of_baseline"
        )
    for name in omits:
        if name in layouts:
            raise RecordError(f"spec.layouts names '{name}', which the solution omits", code="layout_of_omitted")


def narrowed(definition: Definition, omits: Sequence[str]) -> Definition:
    """The Definition without these outputs, as a Solution that omits them is called and judged; its digest is the whole one's.

    Its cost is the whole one's too: nothing that omits an output is timed.
    """
    if not omits:
        return definition
    left_out = set(omits)
    view = definition.model_copy(
        update={
            "outputs": {name: spec for name, spec in definition.outputs.items() if name not in left_out},
            "optional_outputs": tuple(name for name in definition.optional_outputs if name not in left_out),
            "codes": {name: rule for name, rule in definition.codes.items() if name not in left_out},
            "layouts": {name: layout for name, layout in definition.layouts.items() if name not in left_out},
        }
    )
    view.__dict__["digest"] = definition.digest  # of the operator that the verdict is about
    return view


def why_not_timed(name: str, omits: Sequence[str]) -> str | None:
    """Why a Solution has no times, and with them no promotion and no rank; None where it may have."""
    if not omits:
        return None
    return (
        f"{name} omits {', '.join(omits)}: it is verified without a time, and not promoted, published or resolved, "
        "since there is nothing yet that its times could be compared with"
    )
