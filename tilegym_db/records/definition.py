"""Definition: an operator's axes, dtypes, reference and cost, and the rules by which Solutions are verified.

The second part has the tolerances per dtype, and the overrides that a Definition may state. The limits accept correct kernels
(fp32 accumulation, one or two roundings). They reject accumulation in half precision, dropped elements and lower-precision
inputs. ``docs/verification.md`` explains how each was chosen.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal, Self

from pydantic import Field, PrivateAttr, field_validator, model_validator

from tilegym_db.errors import RecordError, did_you_mean
from tilegym_db.records.base import MAX_AXIS, DType, Line, Prose, Record, problems_of
from tilegym_db.records.definition_parts import (
    Axis,
    Cost,
    ExpressionText,
    InputGenerator,
    JointInputs,
    SampledOutput,
    SelfTest,
    Serving,
    TensorSpec,
    Tolerance,
    layout_strides,
    serving_problem,
)
from tilegym_db.records.definition_rules import (
    check_backward,
    check_codes,
    check_expressions,
    check_follows,
    check_gathers,
    check_generators,
    check_in_place,
    check_joint_inputs,
    check_layouts,
    check_optional_outputs,
    check_packed,
    check_sampled,
    check_self_test,
    check_sizes,
    check_sliced_inputs,
    check_tensors,
    check_tolerance,
)
from tilegym_db.records.dtypes import DTYPE_BYTES, SHORT_NAMES
from tilegym_db.records.expressions import (
    check_content_constraints,
    check_function,
    evaluate,
    evaluate_bool,
    evaluate_int,
    has_product,
    names_in,
)
from tilegym_db.records.text import NAME_PATTERN, canonical_json, shown
from tilegym_db.records.text import length_prefixed_digest as digest_of

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_VERSION = r"^(0|[1-9][0-9]{0,8})\.(0|[1-9][0-9]{0,8})\.(0|[1-9][0-9]{0,8})$"


class Definition(Record):
    """One operator: axes, dtypes, inputs, outputs, PyTorch reference, constraints and cost."""

    kind: ClassVar[str] = "definition"

    schema_version: Literal[1] = 1
    name: str = Field(pattern=NAME_PATTERN)
    version: str = Field(pattern=_VERSION)
    op_type: str = Field(pattern=NAME_PATTERN)
    description: Prose = ""
    tags: tuple[Line, ...] = ()
    dtypes: dict[str, tuple[DType, ...]] = {}
    axes: dict[str, Axis]
    inputs: dict[str, TensorSpec] = Field(min_length=1)
    outputs: dict[str, TensorSpec] = Field(min_length=1)
    optional_outputs: tuple[str, ...] = ()
    """Trailing ``outputs`` that a caller may not need and a Solution may omit."""
    in_place: dict[str, str] = {}
    layouts: dict[str, str] = {}
    """Tensor -> ``strided(...)``, if its strides are part of the operator; every call then has exactly these."""
    constraints: tuple[ExpressionText, ...] = ()
    content_constraints: tuple[Line, ...] = ()
    """Conditions on the contents of every call (``total == indptr[-1].item()``). Drawn contents that break one are not used."""
    cost: Cost | None = None
    tolerance: dict[str, Tolerance] = {}
    oracle: Literal["lifted", "as_written"] = "lifted"
    codes: dict[str, str] = {}
    """Quantised output -> ``exact``, or ``exact when <flag>``: every code must be equal. By default 99% must be equal."""
    independent_axes: tuple[str, ...] = ()
    sliced_inputs: dict[str, str] = {}
    """Input -> the axis (experts) along which the reference reads one slice at a time; the oracle widens one slice at a time."""
    special_values: tuple[Literal["nan", "inf"], ...] = ("nan", "inf")
    """Special inputs for which the operator is defined; every Solution must treat them as the reference does."""
    input_generators: dict[str, InputGenerator] = {}
    joint_inputs: JointInputs | None = None
    """Inputs that depend on each other, and the function that draws them."""
    backward_of: str | None = Field(default=None, pattern=NAME_PATTERN)
    """The Definition whose gradients this one computes; see :mod:`tilegym_db.records.call`."""
    saved: tuple[str, ...] = ()
    """Inputs of a backward that are outputs of the forward call; they are drawn by evaluating the forward."""
    gathers: dict[str, str] = {}
    """Index output -> the values whose last axis its indices point into; any choice among equal values is right.

    The values are an input, another output, or a function of the reference that takes the inputs and returns the ranked
    values. For a function, the indices are those of its largest values, in descending order.
    """
    unordered: tuple[str, ...] = ()
    """Index outputs of ranked values that may come in any order within a row."""
    follows: dict[str, str] = {}
    """Output -> the function of the reference that computes it from the inputs and the chosen indices."""
    sampled: dict[str, SampledOutput] = {}
    """Output of randomly drawn indices -> their distribution, against which they are checked instead of reference draws."""
    serving: Serving | None = None
    """How a model is served with it; not part of the digest."""
    reference: str
    self_test: SelfTest | None = None
    _forward: Definition | None = PrivateAttr(default=None)  # of backward_of; see records.backward.bind_forward

    @field_validator("dtypes")
    @classmethod
    def _dtype_variables_have_values(cls, value: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        for variable, choices in value.items():
            if not choices:
                raise RecordError(f"dtype variable '{variable}' lists no dtype", code="dtype_variable_empty")
            if variable in DTYPE_BYTES or not _IDENTIFIER.fullmatch(variable):
                raise RecordError(f"'{variable}' cannot name a dtype variable", code="dtype_variable_name")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for name in (*self.axes, *self.inputs, *self.outputs):
            if not _IDENTIFIER.fullmatch(name):
                raise RecordError(f"'{shown(name)}' is not an identifier of at most 64 characters", code="name_invalid")
            if keyword.iskeyword(name):
                raise RecordError(
                    f"'{name}' is a Python keyword, so no expression or parameter can use it",
                    code="name_reserved",
                )
        clash = set(self.inputs) & set(self.outputs)
        if clash:
            raise RecordError(
                f"'{min(clash)}' is both an input and an output; state an in-place output in 'in_place'",
                code="name_clash",
            )
        checks = (
            lambda: check_tensors(self.axes, self.dtypes, self.inputs, self.outputs),
            lambda: check_sizes(self.axes, self.dtypes, self.inputs),
            lambda: check_in_place(self.in_place, self.inputs, self.outputs),
            lambda: check_backward(self.name, self.backward_of, self.saved, self.inputs, self.outputs, self.in_place),
            self._check_indices,
            lambda: check_expressions(self.constraints, self.cost, self.axes, self.dtypes),
            lambda: check_content_constraints(self.content_constraints, self.axes, self.inputs),
            self._check_inputs_drawn,
            self._check_keys,
            self._check_reference,
            lambda: check_self_test(self.self_test, self.reference, self.inputs),
            lambda: check_layouts(self.layouts, {**self.inputs, **self.outputs}, self.in_place, self.axes),
            lambda: check_sliced_inputs(self.sliced_inputs, self.inputs, self.in_place),
            lambda: check_tolerance(self.tolerance, self.inputs, self.outputs, self.dtypes),
            lambda: check_codes(self.codes, self.oracle, self.inputs, self.outputs, self.dtypes),
            lambda: check_packed({**self.inputs, **self.outputs}, self.dtypes, self.axes, self.constraints),
            self._check_serving,
        )
        problems = [fault for check in checks for fault in problems_of(check)]
        if problems:
            raise RecordError.of(problems)
        return self

    def _check_indices(self) -> None:
        check_gathers(self.gathers, self.unordered, self.inputs, self.outputs, self.dtypes, self.reference)
        check_follows(self.follows, self.gathers, self.inputs, self.outputs, self.reference)
        indices = {name for name in self.outputs if name in self.gathers or name in self.in_place.values()}
        check_sampled(self.sampled, indices, self.inputs, self.outputs, self.input_generators, self.reference)
        tied = (self.in_place.values(), self.sampled, self.gathers, self.follows)
        check_optional_outputs(self.optional_outputs, tuple(self.outputs), *tied)

    def _check_inputs_drawn(self) -> None:
        check_generators(self.input_generators, self.axes, self.inputs, self.dtypes)
        check_joint_inputs(self.joint_inputs, self.input_generators, self.inputs)

    def _check_keys(self) -> None:
        for key, known, what in (("input_generators", self.inputs, "input"), ("independent_axes", self.axes, "axis")):
            for name in getattr(self, key):
                if name not in known:
                    raise RecordError(f"{key} names the undeclared {what} '{name}'", code="name_undeclared")

    def _check_reference(self) -> None:
        check_function(self.reference, "reference", tuple(self.inputs))
        if not self.reference.lstrip().startswith("# Source:"):
            raise RecordError(
                "reference must start with a '# Source: <permalink>' line: where its maths is from",
                code="source_missing",
            )

    def _check_serving(self) -> None:
        problem = serving_problem(self)
        if problem is not None:
            raise problem

    # -- queries ------------------------------------------------------------------------------------------------------

    @cached_property
    def digest(self) -> str:
        """The sha256 of the semantic fields; excludes description, tags, self-test, serving and axis descriptions."""
        content = self.model_dump(
            mode="json",
            exclude={"description", "tags", "self_test", "serving", "schema_version"},
            exclude_defaults=True,  # so a new optional field does not change existing digests
        )
        for group in ("axes", "inputs", "outputs"):
            for item in content.get(group, {}).values():
                item.pop("description", None)
        ordered = {**content, "inputs": list(content["inputs"].items()), "outputs": list(content["outputs"].items())}
        return digest_of([canonical_json(ordered).encode()])

    @property
    def texts(self) -> dict[str, str]:
        """Every Python text in the record, by the name of its file. These texts run in a check, a draw or a comparison."""
        found = {"reference.py": self.reference}
        if self.joint_inputs is not None:
            found["joint_inputs.py"] = self.joint_inputs.source
        if self.self_test is not None:
            found["independent.py"] = self.self_test.independent
            for number, planted in enumerate(self.self_test.planted_errors):
                found[f"planted_error_{number}.py"] = self.reference.replace(planted.find, planted.replace)
        return found

    @property
    def is_open(self) -> bool:
        """True while the operator has no verified kernel (tag ``status:open``)."""
        return "status:open" in self.tags

    @property
    def written_outputs(self) -> tuple[str, ...]:
        """The outputs that are arguments of ``run``: all except in-place ones."""
        replaced = set(self.in_place.values())
        return tuple(name for name in self.outputs if name not in replaced)

    @property
    def tensor_inputs(self) -> tuple[str, ...]:
        """The tensor inputs, in order."""
        return tuple(name for name, spec in self.inputs.items() if not spec.is_scalar)

    @property
    def var_axes(self) -> tuple[str, ...]:
        """The axes that a Workload binds, in order."""
        return tuple(name for name, axis in self.axes.items() if axis.type == "var")

    @cached_property
    def divisible_axes(self) -> tuple[str, ...]:
        """The independent axes that every output has, and that occur only alone and once per tensor."""
        specs = [spec for spec in (*self.inputs.values(), *self.outputs.values()) if spec.shape]
        entangled = {
            name
            for spec in specs
            for entry in spec.shape or ()
            if isinstance(entry, str)
            for name in names_in(entry)[0]
            if entry != name or (spec.shape or ()).count(entry) > 1
        }
        return tuple(
            axis
            for axis in self.independent_axes
            if axis not in entangled and all(axis in (spec.shape or ()) for spec in self.outputs.values())
        )

    @cached_property
    def batch_axis(self) -> str:
        """The axis of tokens or sequences, along which the bits of a slice need not depend on the others; "" without one.

        It is the outermost axis of the outputs if that is independent, its size is no scalar, and no other axis is what grows
        with a model's tokens (``serving``).
        """
        outermost = next(((spec.shape or ("",))[0] for spec in self.outputs.values()), "")
        serving = self.serving
        grows = {*serving.lengths, *(name for group in serving.independent for name in group)} if serving else set()
        allowed = {*self.divisible_axes} & {*self.var_axes} & (grows or {*self.axes}) - {*self.size_scalars.values()}
        return outermost if isinstance(outermost, str) and outermost in allowed else ""

    def sliced_axis(self, ids: str) -> str:
        """Return the axis among whose slices an input of drawn whole numbers chooses, such as that of experts; "" if none."""
        spec = self.input_generators.get(ids)
        if spec is None or spec.kind not in ("integers", "distinct_ids"):
            return ""
        return next((axis for axis in self.sliced_inputs.values() if axis in names_in(str(spec.high))[0]), "")

    @cached_property
    def multiplies_float32(self) -> bool:
        """True if its reference multiplies matrices and an input may be float32, so that TF32 may be declared."""
        dtypes = {
            name for spec in self.inputs.values() for name in self.dtypes.get(spec.dtype, (spec.dtype,)) if spec.shape
        }
        return "float32" in dtypes and has_product(self.reference)

    @cached_property
    def size_scalars(self) -> dict[str, str]:
        """Scalar input -> the axis whose size it is; see :mod:`tilegym_db.records.call`."""
        return {axis.scalar: name for name, axis in self.axes.items() if axis.scalar is not None}

    def bind_axes(self, axes: Mapping[str, int]) -> dict[str, int]:
        """Return every axis with its size, including const axes.

        Raises:
            RecordError: an axis is missing, unknown or negative, differs from a const axis, or breaks a constraint.
        """
        bound = {name: axis.value for name, axis in self.axes.items() if axis.value is not None}
        for name, size in axes.items():
            if name not in self.axes:
                raise RecordError(
                    f"{self.name} has no axis '{shown(str(name))}'; its axes are {', '.join(self.axes)}.",
                    code="axis_unknown",
                )
            if isinstance(size, bool) or not isinstance(size, int) or size < 0:
                raise RecordError(
                    f"axis '{name}' of {self.name} must be a whole number >= 0, not {size!r}.", code="axis_size_invalid"
                )
            if size > MAX_AXIS:
                raise RecordError(
                    f"axis '{name}' of {self.name} is {size}; no axis is larger than {MAX_AXIS}.", code="axis_too_large"
                )
            if name in bound and bound[name] != size:
                raise RecordError(
                    f"axis '{name}' of {self.name} is fixed at {bound[name]}, not {size}.", code="axis_fixed"
                )
            bound[name] = size
        missing = [name for name in self.axes if name not in bound]
        if missing:
            raise RecordError(
                f"{self.name} needs a size for axis {', '.join(repr(name) for name in missing)}.", code="axis_missing"
            )
        for text in self.constraints:
            if not evaluate_bool(text, bound):
                sizes = ", ".join(f"{name}={size}" for name, size in bound.items())
                raise RecordError(f"{self.name} requires {text}, which {sizes} breaks.", code="constraint_broken")
        return {name: bound[name] for name in self.axes}

    def bind_dtypes(self, dtypes: Mapping[str, str]) -> dict[str, str]:
        """Return every dtype variable with its dtype; a variable with a single choice may be left out.

        Raises:
            RecordError: a variable is missing or unknown, or the Definition does not list its dtype.
        """
        bound: dict[str, str] = {}
        for name in dtypes:
            if name not in self.dtypes:
                known = ", ".join(self.dtypes) or "none"
                raise RecordError(
                    f"{self.name} has no dtype variable '{name}' (its variables: {known}).",
                    code="dtype_variable_unknown",
                )
        for name, choices in self.dtypes.items():
            value = dtypes.get(name, choices[0] if len(choices) == 1 else None)
            if value is None:
                raise RecordError(
                    f"{self.name} needs a dtype for '{name}': one of {', '.join(choices)}.", code="dtype_missing"
                )
            if value not in choices:
                hint = did_you_mean(SHORT_NAMES.get(str(value), str(value)), choices)
                raise RecordError(
                    f"dtype '{value}' is not in {self.name}'s set for '{name}': {', '.join(choices)}.{hint}",
                    code="dtype_not_allowed",
                )
            bound[name] = value
        return bound

    def dtype_of(self, name: str, dtypes: Mapping[str, str]) -> str:
        """Return the concrete dtype of an input or output under a dtype binding."""
        spec = self.inputs.get(name) or self.outputs[name]
        return dtypes.get(spec.dtype, spec.dtype)

    def shape_of(self, name: str, axes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the concrete shape of a tensor under an axis binding."""
        spec = self.inputs.get(name) or self.outputs.get(name)
        if spec is None:
            raise RecordError(f"{self.name} has no tensor '{shown(name)}'.", code="tensor_unknown")
        return tuple(evaluate_int(entry, axes) for entry in spec.shape or ())

    def strides_of(self, name: str, axes: Mapping[str, int], layout: str | None = None) -> tuple[int, ...]:
        """Return a tensor's strides in elements: of the given layout, else of the Definition's, else contiguous."""
        return layout_strides(layout or self.layouts.get(name, "contiguous"), self.shape_of(name, axes), axes)

    def cost_of(self, axes: Mapping[str, int], dtypes: Mapping[str, str]) -> tuple[float, float]:
        """Return (flops, compulsory bytes) of one call; (0, 0) if the Definition states no cost."""
        if self.cost is None:
            return 0.0, 0.0
        return float(evaluate(self.cost.flops, axes, dtypes)), float(evaluate(self.cost.bytes, axes, dtypes))


# ---- Tolerances ------------------------------------------------------------------------------------------

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
