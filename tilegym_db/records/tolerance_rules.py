"""What a Definition's ``tolerance`` may say: known dtypes, and strays only where low-precision formats are multiplied.

Each rule raises :class:`RecordError` with the culprit's key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tilegym_db.errors import RecordError
from tilegym_db.records.definition_parts import TensorSpec, Tolerance
from tilegym_db.records.dtypes import CODE_DTYPES, DTYPE_BYTES, FLOAT_DTYPES

__all__ = ["check_tolerance"]

_LOW_PRECISION = CODE_DTYPES | {"int8", "uint8"}
_ROUNDED = frozenset(name for name in FLOAT_DTYPES if DTYPE_BYTES[name] > 1)
"""Outputs that are compared element by element; codes have a share of their own, and scales are exact."""

Specs = Mapping[str, TensorSpec]
Variables = Mapping[str, tuple[str, ...]]


def check_tolerance(tolerance: Mapping[str, Tolerance], inputs: Specs, outputs: Specs, dtypes: Variables) -> None:
    """Raise for an unknown dtype, and for a ``share`` on what is no float output of low-precision inputs."""
    for dtype, given in tolerance.items():
        if dtype not in DTYPE_BYTES:
            raise RecordError(f"tolerance names the undeclared dtype '{dtype}'", code="dtype_undeclared")
        if given.share is None:
            continue
        if dtype not in _ROUNDED or dtype not in _dtypes_of(outputs.values(), dtypes):
            raise RecordError(
                f"tolerance.{dtype}.share: no output is a float of that dtype, compared element by element; "
                "codes and integers have rules of their own",
                code="share_without_output",
            )
        tensors = (spec for spec in inputs.values() if not spec.is_scalar)
        if _LOW_PRECISION.isdisjoint(_dtypes_of(tensors, dtypes)):
            known = ", ".join(sorted(_LOW_PRECISION))
            raise RecordError(
                f"tolerance.{dtype}.share: only products of low-precision formats have strays, and no input is of {known}",
                code="share_without_input",
            )


def _dtypes_of(specs: Iterable[TensorSpec], dtypes: Variables) -> set[str]:
    return {choice for spec in specs for choice in dtypes.get(spec.dtype, (spec.dtype,))}
