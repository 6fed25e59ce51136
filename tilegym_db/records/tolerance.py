"""Tolerances per dtype, and the overrides that a Definition may state.

The limits accept correct kernels (fp32 accumulation, one or two roundings). They reject accumulation in half precision,
dropped elements and lower-precision inputs. ``docs/verification.md`` explains how each was chosen.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilegym_db.records.definition import Definition
from tilegym_db.records.definition_parts import Tolerance

MIN_ELEMENTS_FOR_NORMS = 1024
"""Minimum number of elements for a check of the output's norm, which is too noisy below; the element check stays."""
WORST_ROW_FACTOR = 3.0
TAU_CAP = 10.0
"""Maximum error in units of ``tau``, even if the reference itself has a larger error."""
CODES_EQUAL = 0.99
"""Share of the codes of a quantised output that must be equal, unless its Definition requires all (``codes``)."""
_FLOAT32_STEP = 2.0**-24
"""Half the float32 epsilon; a smaller tolerance means equality."""


@dataclass(frozen=True)
class Limits:
    """Bounds for one output dtype.

    ``tau``: relative Frobenius error. ``rtol`` and ``a``: an element may be off by ``rtol * |y| + a * rms(row)``. ``atol``: an
    error up to this is ignored; only a Definition sets it.
    ``codes_equal``: the share of codes that must be equal; at 1, even the sign of a zero must match.
    ``share``: of the elements that must be within ``rtol`` and ``a``; the others must be isolated and not far off.
    ``row_tau``: replaces ``tau`` when a single row is checked; 0 means the same.
    ``codes``: bits per code of a quantised format, which is compared code by code instead of by element; else 0.
    """

    tau: float
    rtol: float = 0.0
    a: float = 0.0
    atol: float = 0.0
    codes: int = 0
    row_tau: float = 0.0
    codes_equal: float = CODES_EQUAL
    share: float = 1.0


LIMITS: dict[str, Limits] = {
    "float64": Limits(1e-12, 1e-10, 1e-11),
    # Sums of constant rows round the same way at every step (decision 0018), hence the larger tau; a single row does not.
    "float32": Limits(2e-5, 1e-5, 5e-5, row_tau=1e-5),
    "tf32": Limits(1e-3, 2e-3, 5e-3),
    "float16": Limits(6e-4, 2e-3, 4e-3),
    "bfloat16": Limits(4e-3, 1.6e-2, 3e-2),
    "float8_e4m3fn": Limits(4e-2, codes=8),
    "float8_e5m2": Limits(8e-2, codes=8),
    "float4_e2m1": Limits(1.2e-1, codes=4),
}


def limits_for(definition: Definition, dtype: str, math: str = "ieee") -> Limits | None:
    """Return the bounds for an output of this dtype, or None if it must be exact: integers, booleans, scales and moved data.

    Scales are outputs of dtype e8m0, and the float32 outputs of a quantiser: those beside codes, if the oracle is the
    reference as written. If something is computed before the quantisation, such as an activation, the Definition's
    ``tolerance`` allows an error. Moved data is an output in the dtype of an input with a ``tolerance`` below one rounding:
    even the sign of a zero and subnormal numbers must match.

    Args:
        definition: its ``tolerance`` may override the defaults, with a stated reason.
        dtype: the output's concrete dtype.
        math: ``tf32`` if the Solution declares it for its fp32 products; without products it changes nothing.
    """
    tf32 = math == "tf32" and dtype == "float32" and definition.multiplies_float32
    default = LIMITS.get("tf32" if tf32 else dtype)
    override = definition.tolerance.get(dtype)
    exact = override is None or (override.rtol or 0.0) < _FLOAT32_STEP
    if exact and dtype == "float32" and definition.oracle == "as_written" and _has_codes(definition):
        return None
    if override is not None and _leaves_no_room(override) and _is_moved(definition, dtype):
        return None
    if default is None or override is None:
        return default
    found = Limits(
        override.tau or default.tau,
        override.rtol or default.rtol,
        override.a or default.a,
        override.atol or default.atol,
        default.codes,
        0.0 if override.tau else default.row_tau,
        share=override.share or 1.0,
    )
    if not tf32:
        return found
    # A Definition's float32 override is about IEEE products; declared TF32 keeps at least its own tolerance.
    wider = {name: max(getattr(found, name), getattr(default, name)) for name in ("tau", "rtol", "a")}
    return Limits(**wider, atol=found.atol, share=found.share)


def _leaves_no_room(override: Tolerance) -> bool:
    bounds = (override.tau, override.rtol, override.a)
    return (
        override.atol is None
        and override.share is None
        and all(bound is not None and bound < _FLOAT32_STEP for bound in bounds)
    )


def _is_moved(definition: Definition, dtype: str) -> bool:
    """Return True if an input and an output share a dtype variable that allows this dtype."""
    taken, given = ({spec.dtype for spec in specs.values()} for specs in (definition.inputs, definition.outputs))
    return any(dtype in definition.dtypes.get(variable, ()) for variable in taken & given)


def _has_codes(definition: Definition) -> bool:
    dtypes = {name for spec in definition.outputs.values() for name in definition.dtypes.get(spec.dtype, (spec.dtype,))}
    return "uint8" in dtypes or any(LIMITS[name].codes for name in dtypes if name in LIMITS)  # bytes: codes of 12 bits
