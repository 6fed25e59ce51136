"""Parts of a Definition: axes, tensors, cost, tolerances, input generators and the self-test."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from tilegym_db.errors import RecordError
from tilegym_db.records.base import MAX_AXIS, Flag, Int64, Line, Prose, Real, RecordPart
from tilegym_db.records.expressions import parse_expression


def _arithmetic(text: str) -> str:
    parse_expression(text)
    return text


ExpressionText = Annotated[str, AfterValidator(_arithmetic)]
Size = Annotated[Int64, Field(ge=0, le=MAX_AXIS)]


class Axis(RecordPart):
    """An axis: ``var`` (bound by a Workload) or ``const`` (``value``)."""

    type: Literal["var", "const"]
    value: Int64 | None = None
    scalar: str | None = None
    """The whole-number input that has this size, if no input's shape shows it (K of a top-k)."""
    description: Prose = ""

    @model_validator(mode="after")
    def _const_has_value(self) -> Self:
        if (self.type == "const") != (self.value is not None):
            raise RecordError("a const axis needs 'value', a var axis has none", code="axis_value_mismatch")
        if self.type == "const" and self.scalar is not None:
            raise RecordError(
                f"a const axis has the size in the record, not that of a scalar ('{self.scalar}')",
                code="axis_scalar_const",
            )
        if self.value is not None and self.value < 0:
            raise RecordError(f"'value' must not be negative, not {self.value}", code="axis_size_invalid")
        if self.value is not None and self.value > MAX_AXIS:
            raise RecordError(
                f"'value' {self.value} is more than {MAX_AXIS}, the largest size of an axis", code="axis_too_large"
            )
        return self


class TensorSpec(RecordPart):
    """One input or output. ``shape`` null is a Python scalar, ``[]`` a 0-d tensor; entries are axes or expressions."""

    shape: tuple[str | Size, ...] | None
    dtype: str
    description: Prose = ""

    @property
    def is_scalar(self) -> bool:
        """True for a Python number, which is passed by value and has no layout."""
        return self.shape is None


class Cost(RecordPart):
    """Compulsory work of one call: ``flops`` and ``bytes`` (each tensor moved once) over axes and ``sizeof(T)``."""

    flops: ExpressionText
    bytes: ExpressionText


class Tolerance(RecordPart):
    """Overrides of the verifier's default tolerances for one output dtype, with the reason."""

    tau: Real | None = Field(default=None, gt=0)
    rtol: Real | None = Field(default=None, gt=0)
    a: Real | None = Field(default=None, gt=0)
    atol: Real | None = Field(default=None, gt=0)
    """Absolute error that counts as zero: if terms cancel, the result is undetermined below their rounding error."""
    share: Real | None = Field(default=None, gt=0.9, lt=1)
    """Share of elements that must lie within ``rtol`` and ``a``; low-precision products have single outliers."""
    reason: Prose = Field(min_length=10)


class InputGenerator(RecordPart):
    """A distribution for an input that cannot be drawn from N(0, 1).

    ``normal`` (scale), ``uniform`` (low, high), ``integers`` (low, high exclusive; expressions over axes),
    ``rotary_cos`` / ``rotary_sin`` (tables of real rotary angles, base ``scale``), ``distinct_ids`` (rows of different
    whole numbers from low to below high; with ``none``, some are -1), ``offsets`` (sums of lengths that add up to high;
    with ``leading``, the first is low), ``powers_of_two`` (exponents from low to high), ``positive`` (about ``scale``),
    ``probabilities`` (rows that sum to one), ``log_decay`` (at most 0, down to low), ``codes`` (every code of an 8-bit
    dtype; NaN with ``nan``) and ``unit_rows`` (rows of norm one).
    """

    kind: Literal[
        "normal", "uniform", "integers", "rotary_cos", "rotary_sin", "distinct_ids", "offsets", "powers_of_two",
        "positive", "probabilities", "log_decay", "codes", "unit_rows",
    ]  # fmt: skip
    scale: Real = 1.0
    low: Real | str = 0.0
    high: Real | str = 1.0
    none: Flag = False
    leading: Flag = False
    nan: Flag = False


class JointInputs(RecordPart):
    """Inputs that depend on each other, drawn by one function.

    ``source`` defines ``draw(axes, scalars, dtypes, generator, contents)``: sizes by axis, scalar inputs by name, the
    ``torch.dtype`` of each input, a generator on the device of the tensors, and one of ``contents``. It returns a dict with
    exactly ``inputs``. Common contents come first.
    """

    inputs: tuple[str, ...] = Field(min_length=1)
    contents: tuple[Line, ...] = Field(default=("normal",), min_length=1)
    source: str


class SampledOutput(RecordPart):
    """An output of randomly drawn indices, and their distribution.

    ``law`` names a function of the reference that takes the inputs in order, and optionally ``rounding``. It returns the
    probability of each index of a row, up to a factor per row; 0 means never. If sums decide which indices are allowed,
    ``rounding`` moves that border relative to the sum: above 0 it allows more, below 0 fewer, and 0 is the exact border.
    ``uniforms`` names an input of the output's shape with random numbers, uniform in [0, 1).
    """

    law: str
    uniforms: str


class PlantedError(RecordPart):
    """A mistake in the maths, as a text replacement in ``reference``, which the verifier must reject."""

    find: str = Field(min_length=1)
    replace: str
    why: Prose = Field(min_length=5)


class SelfTest(RecordPart):
    """The self-test of a Definition: another formulation that must agree, and planted mistakes that must fail."""

    independent: str
    planted_errors: tuple[PlantedError, ...] = Field(min_length=3)
