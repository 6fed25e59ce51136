"""How inputs may be drawn: which options each kind of generator has, and what a function for several inputs looks like.

Each rule raises :class:`RecordError` with the culprit's key.
"""

from __future__ import annotations

from collections.abc import Mapping

from tilegym_db.errors import RecordError
from tilegym_db.records.definition_parts import Axis, InputGenerator, JointInputs, TensorSpec
from tilegym_db.records.dtypes import DTYPE_BYTES, FLOAT_DTYPES, INTEGER_DTYPES
from tilegym_db.records.expressions import names_in
from tilegym_db.records.fields import shown
from tilegym_db.records.python_source import function_parameters

__all__ = ["DRAW", "OPTIONS", "check_generators", "check_joint_inputs"]

DRAW = ("axes", "scalars", "dtypes", "generator", "contents")
"""The parameters of the function ``draw`` that draws several inputs together."""

OPTIONS: dict[str, frozenset[str]] = {
    "normal": frozenset({"scale"}),
    "uniform": frozenset({"low", "high"}),
    "integers": frozenset({"low", "high"}),
    "rotary_cos": frozenset({"scale"}),
    "rotary_sin": frozenset({"scale"}),
    "distinct_ids": frozenset({"low", "high", "none"}),
    "offsets": frozenset({"low", "high", "leading"}),
    "powers_of_two": frozenset({"low", "high"}),
    "positive": frozenset({"scale"}),
    "probabilities": frozenset({"scale"}),
    "log_decay": frozenset({"low", "scale"}),
    "codes": frozenset({"nan"}),
    "unit_rows": frozenset(),
}
"""Kind -> the options that it has."""

_WHOLE = frozenset({"integers", "distinct_ids", "offsets"})
_FLOATING = frozenset({"powers_of_two", "positive", "probabilities", "log_decay", "unit_rows"})
_BY_ROWS = frozenset({"distinct_ids", "offsets", "probabilities", "unit_rows"})
_OVER_AXES = {"distinct_ids": "ids are drawn below it", "offsets": "lengths add up to it"}

Specs = Mapping[str, TensorSpec]


def check_generators(
    generators: Mapping[str, InputGenerator],
    axes: Mapping[str, Axis],
    inputs: Specs,
    dtypes: Mapping[str, tuple[str, ...]],
) -> None:
    """Each has options of its kind, bounds over declared axes, and an input of a shape and dtype that it can fill."""
    for name, generator in generators.items():
        if name not in inputs:
            continue  # another rule names it
        where, spec = f"input_generators.{name}", inputs[name]
        _check_options(where, generator)
        _check_bounds(where, generator, axes)
        choices = dtypes.get(spec.dtype, (spec.dtype,))
        if spec.is_scalar:
            raise RecordError(
                f"{where}: a scalar has the value that a workload states, and is not drawn", code="generator_of_scalar"
            )
        if generator.kind in _BY_ROWS and not spec.shape:
            raise RecordError(
                f"{where}: '{generator.kind}' fills rows, and this input has no axis", code="generator_without_axis"
            )
        for dtype in choices:
            _check_dtype(where, generator, dtype)


def _check_options(where: str, generator: InputGenerator) -> None:
    known = OPTIONS[generator.kind]
    # A record that went through a dump states every field: one that has its default says nothing.
    stated = {name for name, field in type(generator).model_fields.items() if getattr(generator, name) != field.default}
    for option in sorted(stated - known - {"kind"}):
        options = ", ".join(sorted(known)) or "none"
        raise RecordError(
            f"{where}: '{generator.kind}' has no option '{option}' (its options: {options})",
            code="generator_option_unknown",
        )


def _check_bounds(where: str, generator: InputGenerator, axes: Mapping[str, Axis]) -> None:
    for option in ("low", "high"):
        for axis in sorted(_axes_in(f"{where}.{option}", getattr(generator, option)) - set(axes)):
            raise RecordError(f"{where}.{option} uses undeclared axis '{axis}'", code="axis_undeclared")
    why = _OVER_AXES.get(generator.kind)
    if why is not None and not _axes_in(f"{where}.high", generator.high):
        raise RecordError(
            f"{where}: '{generator.kind}' needs 'high', an expression over axes such as 'E': {why}",
            code="generator_bound_missing",
        )
    if generator.kind == "log_decay" and isinstance(generator.low, float) and generator.low > 0:
        raise RecordError(
            f"{where}: 'low' of a log_decay is at most 0, not {generator.low:g}", code="generator_bound_sign"
        )


def _axes_in(where: str, bound: float | str) -> frozenset[str]:
    try:
        return names_in(str(bound))[0]
    except RecordError as error:
        raise RecordError(f"{where}: {error}", code=error.code) from None


def _check_dtype(where: str, generator: InputGenerator, dtype: str) -> None:
    kind = generator.kind
    if kind in _WHOLE and dtype not in INTEGER_DTYPES:
        raise RecordError(
            f"{where}: '{kind}' are whole numbers, and this input is {dtype}", code="generator_needs_integers"
        )
    if kind in _FLOATING and dtype not in FLOAT_DTYPES - {"float4_e2m1"}:
        raise RecordError(
            f"{where}: '{kind}' are no whole numbers, and this input is {dtype}", code="generator_needs_floats"
        )
    if kind == "codes" and (DTYPE_BYTES[dtype] > 1 or dtype == "bool"):
        raise RecordError(
            f"{where}: 'codes' are those of an 8-bit dtype or of packed 4-bit ones, and this input is {dtype}",
            code="generator_needs_codes",
        )


def check_joint_inputs(joint: JointInputs | None, generators: Mapping[str, InputGenerator], inputs: Specs) -> None:
    """The inputs are tensors that nothing else draws, and the function has the parameters that it is called with."""
    if joint is None:
        return
    for name in joint.inputs:
        if name not in inputs or inputs[name].is_scalar:
            raise RecordError(
                f"joint_inputs names '{shown(name)}', which is no tensor among the inputs", code="joint_input_unknown"
            )
        if name in generators:
            raise RecordError(f"joint_inputs and input_generators both draw '{name}'", code="joint_input_drawn_twice")
    for what, names in (("inputs", joint.inputs), ("contents", joint.contents)):
        if len(set(names)) != len(names):
            raise RecordError(f"joint_inputs.{what} names something twice", code="joint_input_repeated")
    try:
        found = function_parameters(joint.source, "draw")
    except RecordError as error:
        raise RecordError(f"joint_inputs.source is not valid Python: {error}", code="python_syntax") from None
    if found is None:
        raise RecordError("joint_inputs.source defines no function 'draw'", code="function_missing")
    if found != DRAW:
        raise RecordError(
            f"joint_inputs.source: draw({', '.join(found)}) must be draw({', '.join(DRAW)})", code="parameters_differ"
        )
