"""What a case must give: drawn inputs, the oracle's outputs, and how far off the reference itself is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tilegym_db.backends.torch_dtypes import storage_dtype
from tilegym_db.errors import RecordError
from tilegym_db.records import Definition
from tilegym_db.records.case import Case
from tilegym_db.records.expressions import Unknown, holds
from tilegym_db.verify.comparison import check_reference, exact_outputs, followed, reference_errors
from tilegym_db.verify.distributions import REFERENCE_MAY_FAIL
from tilegym_db.verify.gates import BaseError
from tilegym_db.verify.inputs import BlobReader, draw_inputs, draws_noise
from tilegym_db.verify.oracle import as_written, oracle


@dataclass(frozen=True)
class Expected:
    """What a case must give: its inputs, the oracle's outputs and what the reference itself is off by per output."""

    case: Case
    inputs: Mapping[str, Any]
    outputs: Mapping[str, torch.Tensor]
    e_base: Mapping[str, BaseError]
    exact: frozenset[str] = frozenset()
    """Outputs that leave no room for rounding: they must equal the oracle's, rounded to their dtype."""
    conditioned: frozenset[str] = frozenset()
    """Outputs that the reference gives to their last digits, small elements included: so must everybody."""


def expect(
    definition: Definition,
    case: Case,
    device: str,
    blobs: BlobReader | None = None,
    *,
    inputs: Mapping[str, Any] | None = None,
) -> Expected | None:
    """Draw a case and evaluate the oracle; None if it proves nothing: its contents are none that the operator is called
    with, or the reference as written fails it.

    Args:
        definition: the operator.
        case: sizes and contents.
        device: where inputs are drawn and the oracle runs.
        blobs: reads what the case has in files.
        inputs: take the place of what would be drawn, by name.

    Raises:
        RecordError: the reference raises, or returns another shape or dtype than the Definition declares; or what the case has
            in files cannot be had, or is nothing that the operator is called with.
    """
    if inputs is None:
        inputs = draw_inputs(definition, case, device, blobs=blobs)
    broken = broken_constraint(definition, case.call.axes, inputs)
    if broken is not None:
        if case.files:
            raise RecordError(
                f"{definition.name} requires {broken}, which the contents break at {case}.",
                code="content_constraint_broken",
            )
        return None
    written = as_written(definition, inputs)
    _check_declared(definition, case, written)
    truth = written if definition.oracle == "as_written" else oracle(definition, inputs)
    # Beside the choice that the reference made: of equal values, another is as right.
    own = followed(definition, inputs, truth, written)
    e_base, conditioned = reference_errors(definition, case.call.dtypes, written, own)
    verdicts = check_reference(definition, case.call.dtypes, inputs, truth, written, e_base)
    if not all(verdict.passed for verdict in verdicts.values()) or _may_overflow(definition, case, inputs, written):
        return None
    exact = exact_outputs(written, own) if case.exact and not draws_noise(definition) else frozenset()
    return Expected(case, inputs, truth, e_base, exact, conditioned)


def broken_constraint(definition: Definition, axes: Mapping[str, int], inputs: Mapping[str, Any]) -> str | None:
    """Return the first of the Definition's rules about contents that these inputs break, or None.

    Raises:
        RecordError: one cannot be evaluated on them.
    """
    for text in definition.content_constraints:
        try:
            if not holds(text, {**axes, **inputs}):
                return text
        except Unknown as error:
            raise RecordError(
                f"{definition.name}: content_constraints: {error}.", code="content_constraint_failed"
            ) from None
    return None


def _may_overflow(definition: Definition, case: Case, inputs: Mapping[str, Any], written: Mapping[str, Any]) -> bool:
    """Return True if operations in another order leave the range of a dtype at contents near its end.

    A reference that is its own oracle says so itself. Of another one a sum is known to stay inside in its own order alone, unless
    it does so as well where all of its terms have one sign.
    """
    if case.distribution not in REFERENCE_MAY_FAIL or not all(map(_is_finite, inputs.values())):
        return False
    if definition.oracle == "as_written":
        return not all(map(_is_finite, written.values()))
    of_one_sign = {name: value.abs() if _has_signs(value) else value for name, value in inputs.items()}
    sums = as_written(definition, of_one_sign)
    return any(
        bool((value.isfinite() & ~sums[name].isfinite()).any()) for name, value in written.items() if _has_signs(value)
    )


def _has_signs(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.element_size() > 1


def _is_finite(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) or not value.is_floating_point() or bool(value.float().isfinite().all())


def _check_declared(definition: Definition, case: Case, outputs: Mapping[str, torch.Tensor]) -> None:
    for name, value in outputs.items():
        found = (tuple(value.shape), value.dtype)
        declared = (
            definition.shape_of(name, case.call.axes),
            storage_dtype(definition.dtype_of(name, case.call.dtypes)),
        )
        if found != declared:
            raise RecordError(
                f"{definition.name}: reference: '{name}' has shape {found[0]} and dtype {found[1]} at {case}, "
                f"but outputs.{name} declares {declared[0]} and {declared[1]}.",
                code="output_differs",
            )
