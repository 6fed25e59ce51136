"""Per-dtype tolerances, and how far a Definition may override them.

The figures separate honest kernels (fp32 accumulation, one or two roundings) from accumulation in half precision, dropped
elements and lower-precision inputs; ``docs/verification.md`` says how each was chosen.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilegym_db.records.definition import Definition
from tilegym_db.records.definition_parts import Tolerance

MIN_ELEMENTS_FOR_NORMS = 1024
"""Below this many elements a norm over the output is too noisy to gate on; the element-wise bound stays."""
WORST_ROW_FACTOR = 3.0
TAU_CAP = 10.0
"""However far the reference itself is off, an error of more than this many ``tau`` never passes."""
CODES_EQUAL = 0.99
"""Share of the codes of a quantised output that must be equal, unless its Definition asks for all of them (``codes``)."""
_FLOAT32_STEP = 2.0**-24
"""The relative distance of two float32 numbers is larger, so that a smaller tolerance asks for equality."""


@dataclass(frozen=True)
class Limits:
    """Bounds for one output dtype.

    ``tau``: relative Frobenius error. ``rtol`` and ``a``: an element may be off by ``rtol * |y| + a * rms(row)``. An error of at
    most ``atol`` is none, whatever the rest; only a Definition says so.
    ``codes_equal``: the share of them that must be equal; 1 where not even the sign of a zero may differ.
    ``share``: of the elements that must be within ``rtol`` and ``a``; the others must lie apart, and not far off.
    ``row_tau``: what stands for ``tau`` where a single row is judged; 0 for the same.
    ``codes``: bits of a code where the output is a quantised format, which is compared code by code instead of element by
    element; else 0.
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
    # Constant rows sum with the same rounding at every step (decision 0018); a row of its own has no such excuse.
    "float32": Limits(2e-5, 1e-5, 5e-5, row_tau=1e-5),
    "tf32": Limits(1e-3, 2e-3, 5e-3),
    "float16": Limits(6e-4, 2e-3, 4e-3),
    "bfloat16": Limits(4e-3, 1.6e-2, 3e-2),
    "float8_e4m3fn": Limits(4e-2, codes=8),
    "float8_e5m2": Limits(8e-2, codes=8),
    "float4_e2m1": Limits(1.2e-1, codes=4),
}


def limits_for(definition: Definition, dtype: str, math: str = "ieee") -> Limits | None:
    """Return the bounds for an output of this dtype, or None for integers, booleans, scales and what is only moved,
    which must be exact.

    Scales are all of dtype e8m0, and the float32 outputs of a quantiser: beside codes, under an oracle that is the
    reference as written. Only where something else is computed first, as an activation is, may they be off by what the
    Definition's ``tolerance`` says. Moved is what that leaves no room for, in the dtype of an input: the sign of a zero
    counts there, and a number that is too small to be normal.

    Args:
        definition: its ``tolerance`` may override the defaults, with a stated reason.
        dtype: the output's concrete dtype.
        math: ``tf32`` where the Solution declares that its fp32 products use it.
    """
    default = LIMITS.get("tf32" if dtype == "float32" and math == "tf32" else dtype)
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
    if math != "tf32" or dtype != "float32":
        return found
    # What a Definition says of float32 is said of IEEE products; declared TF32 keeps at least its own room.
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
    """Return True if a dtype variable with this choice is that of an input and of an output."""
    taken, given = ({spec.dtype for spec in specs.values()} for specs in (definition.inputs, definition.outputs))
    return any(dtype in definition.dtypes.get(variable, ()) for variable in taken & given)


def _has_codes(definition: Definition) -> bool:
    dtypes = {name for spec in definition.outputs.values() for name in definition.dtypes.get(spec.dtype, (spec.dtype,))}
    return "uint8" in dtypes or any(LIMITS[name].codes for name in dtypes if name in LIMITS)  # bytes: codes of 12 bits
