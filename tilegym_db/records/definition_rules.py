"""Consistency rules of a Definition: tensors, inputs, indices, quantised formats, self-test and tolerances.

Each rule raises :class:`RecordError` with the key that breaks it.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from tilegym_db.errors import RecordError
from tilegym_db.records.base import problems_of
from tilegym_db.records.definition_parts import (
    Axis,
    Cost,
    InputGenerator,
    JointInputs,
    SampledOutput,
    SelfTest,
    TensorSpec,
    Tolerance,
    parse_layout,
)
from tilegym_db.records.dtypes import CODE_DTYPES, DTYPE_BYTES, FLOAT_DTYPES, INTEGER_DTYPES, RECORD_DTYPES
from tilegym_db.records.expressions import (
    check_function,
    evaluate_bool,
    function_parameters,
    names_in,
    parse_expression,
)
from tilegym_db.records.text import shown

GRADIENT = "grad_"
"""Prefix of a gradient's name in a backward Definition."""

Specs = Mapping[str, TensorSpec]
DTypes = Mapping[str, tuple[str, ...]]


def check_tensors(axes: Mapping[str, Axis], dtypes: DTypes, inputs: Specs, outputs: Specs) -> None:
    """Check that tensors use declared dtypes and axes, and that outputs are tensors."""
    for group, specs in (("inputs", inputs), ("outputs", outputs)):
        for name, spec in specs.items():
            where = f"{group}.{name}"
            if spec.dtype not in dtypes and spec.dtype not in RECORD_DTYPES:
                known = ", ".join([*dtypes, "or a dtype such as bfloat16"])
                raise RecordError(
                    f"{where} uses undeclared dtype '{spec.dtype}' (known: {known})", code="dtype_undeclared"
                )
            if spec.shape is None and group == "outputs":
                raise RecordError(f"{where} has no shape: an output is a tensor", code="output_without_shape")
            for entry in spec.shape or ():
                if isinstance(entry, int):
                    continue
                used, _ = _names(entry, where)
                for axis in sorted(used - set(axes)):
                    raise RecordError(f"{where} uses undeclared axis '{axis}'", code="axis_undeclared")


def check_optional_outputs(
    optional: tuple[str, ...],
    outputs: tuple[str, ...],
    in_place: Collection[str],
    sampled: Collection[str],
    gathers: Mapping[str, str],
    follows: Collection[str],
) -> None:
    """Check that optional outputs are the last ones, in order, not all, and not used by other fields."""
    if not optional:
        return
    for name in optional:
        if name not in outputs:
            raise RecordError(f"optional_outputs names the undeclared output '{name}'", code="output_undeclared")
    if len(optional) >= len(outputs):
        raise RecordError("optional_outputs names every output; a call gives at least one", code="optional_all")
    if outputs[-len(optional) :] != optional:
        raise RecordError(
            f"optional_outputs must be the last outputs, in order ({', '.join(outputs)})", code="optional_order"
        )
    needed = {"in_place": in_place, "sampled": sampled, "gathers": {*gathers, *gathers.values()}, "follows": follows}
    for key, names in needed.items():
        for name in optional:
            if name in names:
                raise RecordError(f"optional_outputs names '{name}', which {key} relies on", code="optional_needed")


def check_sizes(axes: Mapping[str, Axis], dtypes: DTypes, inputs: Specs) -> None:
    """Check that an axis with a scalar names a whole-number input, which states no other axis."""
    stated: dict[str, str] = {}
    for name, axis in axes.items():
        if axis.scalar is None:
            continue
        where, spec = f"axes.{name}: scalar '{axis.scalar}'", inputs.get(axis.scalar)
        if spec is None or not spec.is_scalar:
            raise RecordError(f"{where} must be an input without a shape", code="size_scalar_not_input")
        choices = dtypes.get(spec.dtype, (spec.dtype,))
        if not INTEGER_DTYPES.issuperset(choices):
            raise RecordError(
                f"{where} is {', '.join(choices)}, and a size is a whole number", code="size_scalar_not_whole"
            )
        if axis.scalar in stated:
            raise RecordError(f"{where} is the size of '{stated[axis.scalar]}' already", code="size_scalar_repeated")
        stated[axis.scalar] = name


def check_expressions(
    constraints: tuple[str, ...], cost: Cost | None, axes: Mapping[str, Axis], dtypes: DTypes
) -> None:
    """Check that constraints and cost only use declared axes and dtype variables."""
    named = [(f"constraints[{i}]", text) for i, text in enumerate(constraints)]
    if cost is not None:
        named += [("cost.flops", cost.flops), ("cost.bytes", cost.bytes)]
    for where, text in named:
        used, variables = names_in(text)
        for axis in sorted(used - set(axes)):
            raise RecordError(f"{where} uses undeclared axis '{axis}'", code="axis_undeclared")
        for variable in sorted(variables - set(dtypes)):
            raise RecordError(f"{where} uses undeclared dtype variable '{variable}'", code="dtype_variable_undeclared")


def _names(entry: str, where: str) -> tuple[frozenset[str], frozenset[str]]:
    try:
        return names_in(entry)
    except RecordError as error:
        raise RecordError(f"{where}: {error}", code=error.code) from None


def check_in_place(in_place: Mapping[str, str], inputs: Specs, outputs: Specs) -> None:
    """Check that an output written over an input has its shape and dtype."""
    for source, target in in_place.items():
        if source not in inputs or target not in outputs:
            raise RecordError(
                f"in_place '{source}': '{target}' must map an input to an output", code="in_place_unknown"
            )
        one, two = inputs[source], outputs[target]
        if one.shape != two.shape or one.dtype != two.dtype:
            raise RecordError(f"in_place '{source}' and '{target}' differ in shape or dtype", code="in_place_differs")


def check_backward(
    name: str,
    backward_of: str | None,
    saved: Collection[str],
    inputs: Specs,
    outputs: Specs,
    in_place: Mapping[str, str],
) -> None:
    """Check that a backward takes and returns gradients, names its saved tensors, and overwrites nothing."""
    for tensor in saved:
        if backward_of is None:
            raise RecordError(
                "saved names outputs of the forward definition; 'backward_of' must name that",
                code="saved_without_backward",
            )
        if tensor not in inputs or inputs[tensor].is_scalar or tensor.startswith(GRADIENT):
            raise RecordError(
                f"saved names '{tensor}', which is not a tensor input or not an output of {backward_of}",
                code="saved_unknown",
            )
    if backward_of is None:
        return
    if backward_of == name:
        raise RecordError(f"backward_of names the definition itself, '{name}'", code="backward_of_itself")
    if not any(tensor.startswith(GRADIENT) for tensor in inputs):
        raise RecordError(f"backward_of needs an input '{GRADIENT}<output of {backward_of}>'", code="gradient_missing")
    for tensor in outputs:
        if not tensor.startswith(GRADIENT):
            raise RecordError(
                f"outputs.{tensor} of a backward must be named '{GRADIENT}<input of {backward_of}>'",
                code="gradient_name",
            )
    if in_place:
        raise RecordError(
            "a backward must not overwrite its inputs, because others may read them after it", code="backward_in_place"
        )


def check_layouts(
    layouts: Mapping[str, str], tensors: Specs, in_place: Mapping[str, str], axes: Collection[str]
) -> None:
    """Check that declared strides belong to a tensor that is not in place, one per dimension, over declared axes."""
    for name, text in layouts.items():
        spec = tensors.get(name)
        if spec is None or spec.shape is None:
            raise RecordError(f"layouts.{name}: no such tensor", code="tensor_unknown")
        if name in in_place or name in in_place.values():
            raise RecordError(
                f"layouts.{name}: a tensor that is written in place has the strides that its caller gives it",
                code="layout_of_in_place",
            )
        entries = parse_layout(text)
        if entries is None:
            raise RecordError(f"layouts.{name}: 'contiguous' is the default; leave it out", code="layout_contiguous")
        if len(entries) != len(spec.shape):
            raise RecordError(
                f"layouts.{name}: {text!r} has {len(entries)} strides for {len(spec.shape)} dimensions",
                code="layout_rank",
            )
        unknown = sorted({axis for entry in entries for axis in names_in(entry)[0]} - set(axes))
        if unknown:
            raise RecordError(
                f"layouts.{name}: {text!r} uses the undeclared axis '{unknown[0]}'", code="axis_undeclared"
            )


def check_sliced_inputs(sliced: Mapping[str, str], inputs: Specs, in_place: Mapping[str, str]) -> None:
    """Check that a sliced input has its axis exactly once and is not written in place."""
    for name, axis in sliced.items():
        spec = inputs.get(name)
        if spec is None or spec.shape is None:
            raise RecordError(f"sliced_inputs.{name}: no such tensor among the inputs", code="tensor_unknown")
        if spec.shape.count(axis) != 1:
            raise RecordError(f"sliced_inputs.{name}: its shape must have the axis '{axis}' once", code="slice_axis")
        if name in in_place:
            raise RecordError(f"sliced_inputs.{name} is written in place", code="slice_in_place")


# ---- input rules ----------------------------------------------------------------------------------
# Options of input generators, and the signature of a function that draws several inputs.

DRAW = ("axes", "scalars", "dtypes", "generator", "contents")
"""Parameters of the function ``draw`` of joint inputs."""

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
"""Kind of generator -> its options."""

_WHOLE = frozenset({"integers", "distinct_ids", "offsets"})
_FLOATING = frozenset({"powers_of_two", "positive", "probabilities", "log_decay", "unit_rows"})
_BY_ROWS = frozenset({"distinct_ids", "offsets", "probabilities", "unit_rows"})
_OVER_AXES = {"distinct_ids": "ids are drawn below it", "offsets": "lengths add up to it"}


def check_generators(
    generators: Mapping[str, InputGenerator],
    axes: Mapping[str, Axis],
    inputs: Specs,
    dtypes: Mapping[str, tuple[str, ...]],
) -> None:
    """Check that each generator has only options of its kind, bounds over declared axes, and a shape and dtype it can fill."""
    for name, generator in generators.items():
        if name not in inputs:
            continue  # _check_keys reports it
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
    # A dumped record states every field, so a field with its default counts as not stated.
    stated = {name for name, field in type(generator).model_fields.items() if getattr(generator, name) != field.default}
    for option in sorted(stated - known - {"kind"}):
        options = ", ".join(sorted(known)) or "none"
        raise RecordError(
            f"{where}: '{generator.kind}' has no option '{option}' (its options: {options})",
            code="generator_option_unknown",
        )


def _check_bounds(where: str, generator: InputGenerator, axes: Mapping[str, Axis]) -> None:
    for option in ("low", "high"):
        for axis in sorted(_names(str(getattr(generator, option)), f"{where}.{option}")[0] - set(axes)):
            raise RecordError(f"{where}.{option} uses undeclared axis '{axis}'", code="axis_undeclared")
    why = _OVER_AXES.get(generator.kind)
    if why is not None and not _names(str(generator.high), f"{where}.high")[0]:
        raise RecordError(
            f"{where}: '{generator.kind}' needs 'high', an expression over axes such as 'E': {why}",
            code="generator_bound_missing",
        )
    if generator.kind == "log_decay" and isinstance(generator.low, float) and generator.low > 0:
        raise RecordError(
            f"{where}: 'low' of a log_decay is at most 0, not {generator.low:g}", code="generator_bound_sign"
        )


def _check_dtype(where: str, generator: InputGenerator, dtype: str) -> None:
    kind = generator.kind
    if kind in _WHOLE and dtype not in INTEGER_DTYPES:
        raise RecordError(
            f"{where}: '{kind}' draws whole numbers, but this input is {dtype}", code="generator_needs_integers"
        )
    if kind in _FLOATING and dtype not in FLOAT_DTYPES - {"float4_e2m1"}:
        raise RecordError(f"{where}: '{kind}' draws floats, but this input is {dtype}", code="generator_needs_floats")
    if kind == "codes" and (DTYPE_BYTES[dtype] > 1 or dtype == "bool"):
        raise RecordError(
            f"{where}: 'codes' are those of an 8-bit dtype or of packed 4-bit ones, and this input is {dtype}",
            code="generator_needs_codes",
        )


def check_joint_inputs(joint: JointInputs | None, generators: Mapping[str, InputGenerator], inputs: Specs) -> None:
    """Check that joint inputs are tensors without another generator, and that ``draw`` has the right parameters."""
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
            raise RecordError(f"joint_inputs.{what} has a name twice", code="joint_input_repeated")
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


# ---- index rules ----------------------------------------------------------------------------------
# Rules for outputs of indices, outputs that follow from them, and indices drawn at random.

ROUNDING = "rounding"
"""Optional parameter of a function of the reference: the relative distance within which values count as equal."""


def check_gathers(
    gathers: Mapping[str, str],
    unordered: Sequence[str],
    inputs: Specs,
    outputs: Specs,
    dtypes: Mapping[str, tuple[str, ...]],
    reference: str,
) -> None:
    """Check that an output of indices is of integers and has the shape of its values except for the last axis."""
    for output, source in gathers.items():
        if output not in outputs:
            raise RecordError(f"gathers '{output}': no such output", code="gathers_output_unknown")
        indices, values = outputs[output], {**inputs, **outputs}.get(source)
        choices = dtypes.get(indices.dtype, (indices.dtype,))
        if not INTEGER_DTYPES.issuperset(choices):
            raise RecordError(
                f"gathers '{output}': its dtype is {', '.join(choices)}, and indices are integers",
                code="gathers_not_integer",
            )
        if values is None and source.isidentifier() and function_parameters(reference, source) is not None:
            if not indices.shape:
                raise RecordError(f"gathers '{output}': it has no axis of choices", code="gathers_no_choices")
            _check_function(f"gathers '{output}'", source, reference, tuple(inputs), (output,))
            continue
        if values is None or source == output:
            raise RecordError(
                f"gathers '{output}': '{source}' must be an input or another output, or a function of the reference",
                code="gathers_source_unknown",
            )
        if not indices.shape or not values.shape or indices.shape[:-1] != values.shape[:-1]:
            raise RecordError(
                f"gathers '{output}': '{source}' must have the same shape except for the last axis",
                code="gathers_shape_differs",
            )
    for output in unordered:
        if output not in gathers or gathers[output] in {**inputs, **outputs}:
            raise RecordError(
                f"unordered names '{output}', whose 'gathers' is not a function of the reference",
                code="unordered_not_gathered",
            )


def check_follows(
    follows: Mapping[str, str], gathers: Mapping[str, str], inputs: Specs, outputs: Specs, reference: str
) -> None:
    """Check that an output that follows from indices has a function of the inputs and the indices."""
    for output, function in follows.items():
        if output not in outputs or output in gathers:
            raise RecordError(
                f"follows '{output}': it must be an output that 'gathers' does not name", code="follows_not_plain"
            )
        if not gathers:
            raise RecordError(
                f"follows '{output}': 'gathers' names no output of indices", code="follows_without_gathers"
            )
        _check_function(f"follows '{output}'", function, reference, tuple(inputs), tuple(gathers))


def check_sampled(
    sampled: Mapping[str, SampledOutput],
    taken: Collection[str],
    inputs: Specs,
    outputs: Specs,
    generators: Mapping[str, InputGenerator],
    reference: str,
) -> None:
    """Check that a sampled output is of int32 or int64, and has random numbers of its shape and a law in the reference.

    Args:
        taken: outputs that another rule checks.
    """
    for output, stated in sampled.items():
        where, spec, numbers = f"sampled '{output}'", outputs.get(output), inputs.get(stated.uniforms)
        if spec is None or output in taken:
            raise RecordError(
                f"{where}: it must be an output that 'gathers' and 'in_place' do not name", code="sampled_not_plain"
            )
        if spec.shape is None or len(spec.shape) != 1:
            raise RecordError(
                f"{where}: it must have one axis, because it holds one index per row", code="sampled_rank"
            )
        if spec.dtype not in ("int32", "int64"):
            raise RecordError(
                f"{where}: its dtype is {spec.dtype}; indices that are drawn are int32 or int64", code="sampled_dtype"
            )
        if numbers is None or numbers.shape != spec.shape or numbers.dtype != "float32":
            raise RecordError(
                f"{where}: '{stated.uniforms}' must be a float32 input of its shape, {list(spec.shape)}",
                code="sampled_uniform_input",
            )
        if generators.get(stated.uniforms) != InputGenerator(kind="uniform"):
            raise RecordError(
                f'{where}: input_generators.{stated.uniforms} must be {{"kind": "uniform"}}, from 0 to 1',
                code="sampled_uniform_range",
            )
        _check_function(where, stated.law, reference, tuple(inputs), ())


def _check_function(
    where: str, function: str, reference: str, inputs: tuple[str, ...], indices: tuple[str, ...]
) -> None:
    found = function_parameters(reference, function)
    if found is None:
        raise RecordError(f"{where}: the reference defines no function '{function}'", code="reference_function_missing")
    allowed = (*indices, ROUNDING)
    if found[: len(inputs)] != inputs or not set(found[len(inputs) :]) <= set(allowed):
        raise RecordError(
            f"{where}: {function}({', '.join(found)}) must take the inputs in order ({', '.join(inputs)}), and then "
            f"none, some or all of {', '.join(allowed)}",
            code="reference_function_parameters",
        )


# ---- quantised formats ----------------------------------------------------------------------------
# Packing of codes in bytes, and outputs whose codes must all be equal.
#
# A packed tensor's shape counts bytes: two codes of ``float4_e2m1`` per byte (``[M, H // 2]``), or two codes of 12 bits
# in three bytes of ``uint8`` (``[M, 3 * H // 2]``).

PACKED_DTYPES = frozenset(("float4_e2m1", "uint8"))
"""Dtypes whose element is a byte that holds several codes or a part of one."""
_EXACT = re.compile(r"exact(?: when ([A-Za-z_]\w*))?")
_TRIED = {1: 256, 2: 24}
"""Number of axes in the size of a packed row -> number of sizes to try per axis."""


def check_codes(
    codes: Mapping[str, str], oracle: str, inputs: Specs, outputs: Specs, dtypes: Mapping[str, tuple[str, ...]]
) -> None:
    """Check that ``codes`` names outputs of quantised formats, and flags that are inputs."""
    for name, text in codes.items():
        spec, match = outputs.get(name), _EXACT.fullmatch(text)
        if spec is None:
            raise RecordError(f"codes names the undeclared output '{name}'", code="output_undeclared")
        if match is None:
            raise RecordError(
                f"codes.{name} must be 'exact' or 'exact when <flag>', not {text!r}", code="codes_rule_unknown"
            )
        choices = dtypes.get(spec.dtype, (spec.dtype,))
        if not CODE_DTYPES.issuperset(choices):
            known = ", ".join(sorted(CODE_DTYPES))
            raise RecordError(
                f"codes.{name}: its dtype is {', '.join(choices)}, but only {known} have codes. "
                "Remove it for integers, which are always exact",
                code="codes_dtype",
            )
        if oracle != "as_written":
            raise RecordError(
                f"codes.{name}: exact codes are those of the reference as written; set 'oracle': 'as_written'",
                code="codes_oracle",
            )
        flag = inputs.get(match[1]) if match[1] else None
        if match[1] and (flag is None or not flag.is_scalar or flag.dtype != "bool"):
            raise RecordError(
                f"codes.{name}: '{match[1]}' must be an input that is a Python bool (shape null, dtype bool)",
                code="codes_flag",
            )


def codes_are_exact(codes: Mapping[str, str], output: str, inputs: Mapping[str, Any]) -> bool:
    """Return True if all codes of an output must be equal in a call with these inputs."""
    match = _EXACT.fullmatch(codes.get(output, ""))
    return match is not None and (match[1] is None or bool(inputs[match[1]]))


def is_packed(spec: TensorSpec, dtypes: Mapping[str, tuple[str, ...]]) -> bool:
    """Return True if the elements of a tensor are bytes that may hold packed codes."""
    return not PACKED_DTYPES.isdisjoint(dtypes.get(spec.dtype, (spec.dtype,)))


def check_packed(
    tensors: Mapping[str, TensorSpec],
    dtypes: Mapping[str, tuple[str, ...]],
    axes: Mapping[str, Axis],
    constraints: Sequence[str],
) -> None:
    """Check that a row of a packed tensor is a whole number of bytes at every size that the constraints allow."""
    fixed = tuple((name, axis.value) for name, axis in axes.items() if axis.value is not None)
    for where, spec in tensors.items():
        entry = spec.shape[-1] if spec.shape else None
        if is_packed(spec, dtypes) and isinstance(entry, str) and not names_in(entry)[0] - set(axes):
            problem = _partial_byte(entry, fixed, tuple(constraints))
            if problem:
                raise RecordError(f"{where}: {problem}", code="packed_row_partial")


@lru_cache(maxsize=256)
def _partial_byte(entry: str, fixed: tuple[tuple[str, int], ...], constraints: tuple[str, ...]) -> str:
    """Return a message about allowed sizes at which a division in ``entry`` rounds down; empty if there are none."""
    known = dict(fixed)
    names = sorted(names_in(entry)[0] - set(known))
    divisions = [
        node
        for node in ast.walk(parse_expression(entry))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv)
    ]
    about = [text for text in constraints if names_in(text)[0] <= {*names, *known}]
    for sizes in _tried(names) if divisions else ():
        bound = {**known, **sizes}
        for node in divisions:
            exact = f"({ast.unparse(node.left)}) % ({ast.unparse(node.right)}) == 0"
            if _holds([*about], bound) and not _holds([exact], bound):
                spelled = ", ".join(f"{name}={size}" for name, size in sizes.items())
                wanted = f"{ast.unparse(node.left)} % {ast.unparse(node.right)} == 0"
                return f"'{entry}' leaves out part of a byte at {spelled}; add the constraint '{wanted}'"
    return ""


def _tried(names: Sequence[str]) -> Iterator[dict[str, int]]:
    most = _TRIED.get(len(names), 8)
    for sizes in itertools.product(range(1, most + 1), repeat=len(names)):
        yield dict(zip(names, sizes, strict=True))


def _holds(constraints: Sequence[str], axes: Mapping[str, int]) -> bool:
    try:
        return all(evaluate_bool(text, axes) for text in constraints)
    except RecordError:  # a division by zero at this size
        return False


# ---- self-test rules ------------------------------------------------------------------------------


def check_self_test(test: SelfTest | None, reference: str, inputs: Collection[str]) -> None:
    """Raise :class:`RecordError` if the formulation takes other inputs, or a planted mistake does not occur in the reference."""
    if test is None:
        return
    faults = list(problems_of(lambda: check_function(test.independent, "self_test.independent", tuple(inputs))))
    faults += [
        RecordError(
            f"self_test.planted_errors[{index}]: {planted.find!r} does not occur in the reference",
            code="planted_error_absent",
        )
        for index, planted in enumerate(test.planted_errors)
        if planted.find not in reference
    ]
    if faults:
        raise RecordError.of(faults)


def copied_formulation(reference: str, test: SelfTest | None) -> RecordError | None:
    """Return the error if the formulation differs from the reference only by comments, docstrings, spacing and names.

    A new draft has the reference in both places.
    """
    if test is None or _code(test.independent) != _code(reference):
        return None
    return RecordError(
        "self_test.independent: is the reference itself, so they cannot disagree. Write another formulation of the maths.",
        code="independent_copied",
    )


def _code(source: str) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef) and node.body and _is_text(node.body[0]):
            node.body = node.body[1:]
    return ast.dump(_Renamed().visit(tree))


class _Renamed(ast.NodeTransformer):
    """Replaces each name that a function assigns by the place of its first assignment, so that spellings do not differ."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """Number the names of a function; those of its arguments stay."""
        assigned = (
            part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
        )
        given = {part.arg for part in ast.walk(node) if isinstance(part, ast.arg)}
        outside = self.names
        names = [name for name in dict.fromkeys(assigned) if name not in given and name not in outside]
        self.names = outside | {name: f"_{len(outside) + number}" for number, name in enumerate(names)}
        renamed = self.generic_visit(node)
        self.names = outside
        return renamed

    def visit_Name(self, node: ast.Name) -> ast.AST:
        """Rename a use of such a name."""
        return ast.Name(self.names.get(node.id, node.id), node.ctx)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


# ---- tolerance rules ------------------------------------------------------------------------------
# A ``tolerance`` names known dtypes; a ``share`` needs products of low-precision formats.

_LOW_PRECISION = CODE_DTYPES | {"int8", "uint8"}
_ROUNDED = frozenset(name for name in FLOAT_DTYPES if DTYPE_BYTES[name] > 1)
"""Output dtypes that are compared element by element; codes have a fixed share, and scales are exact."""

Variables = Mapping[str, tuple[str, ...]]


def check_tolerance(tolerance: Mapping[str, Tolerance], inputs: Specs, outputs: Specs, dtypes: Variables) -> None:
    """Raise :class:`RecordError` for an unknown dtype, or a ``share`` without a float output and low-precision inputs."""
    for dtype, given in tolerance.items():
        if dtype not in DTYPE_BYTES:
            raise RecordError(f"tolerance names the undeclared dtype '{dtype}'", code="dtype_undeclared")
        if given.share is None:
            continue
        if dtype not in _ROUNDED or dtype not in _dtypes_of(outputs.values(), dtypes):
            raise RecordError(
                f"tolerance.{dtype}.share: no output of that dtype is a float that is compared element by element; "
                "codes and integers have other rules",
                code="share_without_output",
            )
        tensors = (spec for spec in inputs.values() if not spec.is_scalar)
        if _LOW_PRECISION.isdisjoint(_dtypes_of(tensors, dtypes)):
            known = ", ".join(sorted(_LOW_PRECISION))
            raise RecordError(
                f"tolerance.{dtype}.share: only products of low-precision formats may have outliers. Make an input one of "
                f"{known}, or leave it out",
                code="share_without_input",
            )


def _dtypes_of(specs: Iterable[TensorSpec], dtypes: Variables) -> set[str]:
    return {choice for spec in specs for choice in dtypes.get(spec.dtype, (spec.dtype,))}
