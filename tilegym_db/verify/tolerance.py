"""Per-dtype tolerances, and how far a Definition may override them.

The figures separate honest kernels (fp32 accumulation, one or two roundings) from accumulation in half precision, dropped
elements and lower-precision inputs; ``docs/verification.md`` says how each was chosen.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilegym_db.records import Definition

__all__ = ["LIMITS", "Limits", "limits_for"]


@dataclass(frozen=True)
class Limits:
    """Bounds for one output dtype.

    ``tau``: relative Frobenius error. ``rtol`` and ``a``: an element may be off by ``rtol * |y| + a * rms(row)``.
    ``codes``: the output is a quantised format, compared code by code instead of element by element.
    """

    tau: float
    rtol: float = 0.0
    a: float = 0.0
    codes: bool = False


LIMITS: dict[str, Limits] = {
    "float64": Limits(1e-12, 1e-10, 1e-11),
    "float32": Limits(1e-5, 1e-5, 5e-5),
    "tf32": Limits(1e-3, 2e-3, 5e-3),
    "float16": Limits(6e-4, 2e-3, 4e-3),
    "bfloat16": Limits(4e-3, 1.6e-2, 3e-2),
    "float8_e4m3fn": Limits(4e-2, codes=True),
    "float8_e5m2": Limits(8e-2, codes=True),
    "float4_e2m1": Limits(1.2e-1, codes=True),
}


def limits_for(definition: Definition, dtype: str, math: str = "ieee") -> Limits | None:
    """The bounds for an output of this dtype, or None for integers, booleans and e8m0 scales, which must be exact.

    Args:
        definition: its ``tolerance`` may override the defaults, with a stated reason.
        dtype: the output's concrete dtype.
        math: ``tf32`` where the Solution declares that its fp32 products use it.
    """
    default = LIMITS.get("tf32" if dtype == "float32" and math == "tf32" else dtype)
    override = definition.tolerance.get(dtype)
    if default is None or override is None:
        return default
    return Limits(override.tau or default.tau, override.rtol or default.rtol, override.a or default.a, default.codes)
