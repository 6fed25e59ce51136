"""Parts of a Definition: axes, tensors, layouts, cost, tolerances, input generators and the self-test.

A Workload states the layout ``contiguous`` or strides such as ``strided(S*Hq*D, D, Hq*D, 1)``, in elements over axes. A Solution
declares a class (:data:`LAYOUT_CLASSES`) per tensor, and :func:`layout_class` returns the class of strides. A Definition
states strides that are part of the operator, such as those of column-major scales.

A fuzz case also states inputs in the memory of another input: ``strided(384, 1)@q+128`` begins 128 elements behind the first
one of ``q``. Such inputs are parts of one projection, lie behind each other, or are one tensor that is passed twice (``@q+0``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, Protocol, Self

from pydantic import AfterValidator, Field, model_validator

from tilegym_db.errors import RecordError
from tilegym_db.records.base import MAX_AXIS, Flag, Int64, Line, Prose, Real, RecordPart
from tilegym_db.records.expressions import evaluate_int, parse_expression

# Each class includes the previous ones.
LAYOUT_CLASSES: tuple[str, ...] = ("contiguous", "row_contiguous", "strided")

Overlap = Literal["none", "possible", "certain"]
MAX_COUNTED_ELEMENTS = 1 << 16
"""Maximum number of elements whose addresses are counted one by one; takes about 10 ms."""

_STRIDED = re.compile(r"^strided\((.*)\)(?:@([A-Za-z_]\w*)\+(\d+))?$", re.DOTALL)


def parse_layout(text: str) -> tuple[str, ...] | None:
    """Return the stride expressions of ``strided(...)``, None for ``contiguous``; raise :class:`RecordError` for other texts."""
    if text == "contiguous":
        return None
    match = _STRIDED.match(text)
    if not match:
        raise RecordError(f"layout {text!r} must be 'contiguous' or 'strided(<stride>, ...)'", code="layout_syntax")
    entries = tuple(part.strip() for part in _split(match.group(1)))
    for entry in entries:
        try:
            parse_expression(entry)
        except RecordError as error:
            raise RecordError(f"layout {text!r}: {error}", code=error.code) from None
    return entries


def shared_place(text: str | None) -> tuple[str, int] | None:
    """Return the tensor in whose memory a layout begins and the elements from its first one; None for separate memory."""
    match = _STRIDED.match(text or "")
    return (match.group(2), int(match.group(3))) if match and match.group(2) else None


def spelled(strides: Sequence[int], place: tuple[str, int] | None = None) -> str:
    """Return the text of a layout, the inverse of :func:`layout_strides` and :func:`shared_place`."""
    return f"strided({', '.join(map(str, strides))})" + (f"@{place[0]}+{place[1]}" if place else "")


def _split(text: str) -> list[str]:
    parts, depth, current = [], 0, ""
    for character in text:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if character == "," and depth == 0:
            parts.append(current)
            current = ""
        else:
            current += character
    return [*parts, current]


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return row-major strides in elements."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def span_of(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the number of elements from the first of a tensor to its last in memory, gaps included; 0 without elements."""
    return 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))


def layout_strides(text: str, shape: Sequence[int], axes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the strides in elements that a layout gives a tensor of this shape; refuse a layout that does not fit."""
    entries = parse_layout(text)
    if entries is None:
        return contiguous_strides(shape)
    if len(entries) != len(shape):
        raise RecordError(f"layout {text!r} has {len(entries)} strides for {len(shape)} dimensions", code="layout_rank")
    strides = tuple(evaluate_int(entry, axes) for entry in entries)
    if any(stride < 0 for stride in strides):
        raise RecordError(f"layout {text!r} gives a negative stride: {strides}", code="stride_negative")
    return strides


def overlap(shape: Sequence[int], strides: Sequence[int]) -> Overlap:
    """Return ``certain`` if two elements share an address, which must not happen in written tensors; else ``none``.

    The result is ``possible`` if dimensions interleave and the elements are too many to count their addresses.
    """
    reach, interleave = 0, False
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1):
        if stride == 0 and 0 not in shape:
            return "certain"
        interleave |= stride <= reach
        reach += stride * (size - 1)
    if not interleave or 0 in shape:
        return "none"
    if math.prod(shape) > MAX_COUNTED_ELEMENTS:
        return "possible"
    addresses = {0}
    for stride, size in zip(strides, shape, strict=True):
        addresses = {address + stride * index for address in addresses for index in range(size)}
    return "certain" if len(addresses) < math.prod(shape) else "none"


def overlap_words(text: str, shape: Sequence[int], strides: Sequence[int]) -> str | None:
    """Return a message about a layout in which two elements share an address, or may; None for other layouts."""
    found = overlap(shape, strides)
    verb = {"none": "", "possible": "may give", "certain": "gives"}[found]
    return f"{text} {verb} two elements of {list(shape)} one address" if verb else None


def layout_class(shape: Sequence[int], strides: Sequence[int]) -> str:
    """Return the narrowest class of a shape and strides; a dimension of size 1 fits any stride."""
    if 0 in shape:
        return "contiguous"
    expected = contiguous_strides(shape)
    if all(size == 1 or stride == want for size, stride, want in zip(shape, strides, expected, strict=True)):
        return "contiguous"
    if not shape or shape[-1] == 1 or strides[-1] == 1:
        return "row_contiguous"
    return "strided"


def accepts(declared: str, found: str) -> bool:
    """Return True if a Solution that declares one class accepts a tensor of the other."""
    return LAYOUT_CLASSES.index(found) <= LAYOUT_CLASSES.index(declared)


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


# ---- serving inside a model -----------------------------------------------------------------------
# Serving of a Definition inside a model: the part of a model that it computes, known code, and output layouts.
#
# Serving does not change what the operator computes. It is not part of the Definition's digest, so changing it keeps published
# results valid.

Fingerprint = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
Identifier = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class OutputLayout(RecordPart):
    """Memory layout of an output: as that of an input, or dense with its dimensions in another order."""

    like: str | None = None
    """The input whose strides it has."""
    order: tuple[int, ...] | None = None
    """Its dimensions from the outermost in memory to the innermost: ``[0, 2, 1, 3]`` puts heads after tokens."""

    @model_validator(mode="after")
    def _is_one_of_them(self) -> Self:
        if (self.like is None) == (self.order is None):
            raise RecordError("an output layout states either 'like' or 'order'", code="output_layout_ambiguous")
        if self.order is not None and sorted(self.order) != list(range(len(self.order))):
            raise RecordError(
                f"'order' must name every dimension once, from 0, not {list(self.order)}", code="output_layout_order"
            )
        return self


class ModelCode(RecordPart):
    """One version of the model code that computes the Definition."""

    fingerprint: Fingerprint
    """Fingerprint of the source of the forward, or of the function that it calls. ``patch(model, dry_run=True).report()``
    prints it."""
    models: tuple[str, ...] = ()
    """The models that have this code; for readers only."""
    calls: dict[Identifier, Fingerprint] = {}
    """The functions that the code relies on, with their fingerprints."""
    attributes: dict[Identifier, Identifier] = {}
    """An input, or a role that the part names -> the attribute of the module that holds it; by default, the same name."""
    constants: dict[Identifier, Flag | Int64 | Real] = {}
    """An input that is a constant in the code -> its value, instead of an attribute."""
    fixed: dict[Identifier, Flag | Int64 | Line | None] = {}
    """For ``function`` and ``module``: a parameter or attribute that is no input -> its value in every call that is served."""
    returns: tuple[Identifier | None, ...] = ()
    """For ``function`` and ``module``: the outputs in the tuple that the code returns, and null for None. By default it returns
    the outputs in order, and a single one without a tuple."""
    probe: dict[Identifier, Flag | Int64 | Real] = {}
    """For ``function`` and ``module``: the size of each var axis and the value of each scalar in the probe."""


class LinearLayers(RecordPart):
    """Linear layers on the same rows, as the first input and then a weight for each layer in the order of calls."""

    count: int = Field(ge=1)
    """The number of layers."""
    bias: Flag = False
    """True if the bias of the layer, which is the only one, is the last input; without it, layers have no bias."""
    gate: str | None = None
    """The Definition that takes the results of the layers as its inputs, if this one computes it too."""


class Serving(RecordPart):
    """Facts that the resolver and a model integration need to serve the Definition."""

    part: Identifier | None = None
    """The kind of model part that it computes: norm, gated_norm, activation, mlp, rope, normed_rope, attention, attention_sink,
    own_attention, capped_attention, biased_attention, distance_bias, indexer, latent_keys, add_norm, cache, experts, router,
    delta_rule, forget_gate, state_space, causal_conv, inline, hyper_connection, hyper_post, engram_gate, fp8_linear,
    widened_product, loss, head_loss. Two are for any code: ``function`` is one that a forward calls, and ``module`` one without
    submodules. Their inputs are the parameters of the code, or attributes of the module."""
    code: tuple[ModelCode, ...] = ()
    """Code that is known to compute it; a probe confirms it bit for bit."""
    includes: str | None = None
    """The Definition of a single part that this one computes together with its surroundings."""
    after: str | None = None
    """The Definition that is called first and whose outputs are inputs of this one, such as the cast of an activation."""
    linear: LinearLayers | None = None
    """The linear layers that it computes. They ask for a kernel in graphs of ``generate`` alone."""
    in_training: str | None = None
    """The Definition that training asks for instead, because this one overwrites an input. It has the same inputs."""
    same_gradient: dict[Identifier, Identifier] = {}
    """For a backward: an input of the forward -> the output that is its gradient too, such as the other operand of a sum."""
    fixed_cache: Flag = False
    """True if it writes new keys and values into a cache of fixed size, as graphs of ``generate`` do in each step."""
    rows: str | None = None
    """The axis that stands for all leading axes of a tensor, flattened; without it, inputs keep their dimensions."""
    outputs: dict[str, OutputLayout] = {}
    """The outputs that are not contiguous."""
    growing: str | None = None
    """The axis of inputs only that changes its size at each call, such as the positions in a cache."""
    independent: tuple[tuple[str, ...], ...] = ()
    """The axes that only repeat work, such as batch and heads: twice the size is twice the work. Axes of one group, such as
    the heads of queries and of keys, must keep their ratio."""
    lengths: tuple[str, ...] = ()
    """The axes over which kernels loop in tiles, such as positions. Between two measured lengths, cost grows by whole tiles.
    An axis that is neither independent nor a length is a width, which must be measured."""
    follows: dict[Identifier, Identifier] = {}
    """An axis -> the independent axis or length whose size it may have, such as the sequences of tables or a window."""
    eager_only: bool = False
    """True if compiled code keeps the model's own code."""


class ServedDefinition(Protocol):
    """Protocol of the parts of a Definition that serving is checked against; avoids an import cycle with Definition."""

    @property
    def name(self) -> str: ...
    @property
    def serving(self) -> Serving | None: ...
    @property
    def backward_of(self) -> str | None: ...
    @property
    def inputs(self) -> Mapping[str, TensorSpec]: ...
    @property
    def outputs(self) -> Mapping[str, TensorSpec]: ...
    @property
    def tensor_inputs(self) -> tuple[str, ...]: ...
    @property
    def written_outputs(self) -> tuple[str, ...]: ...
    @property
    def var_axes(self) -> tuple[str, ...]: ...
    @property
    def cost(self) -> Cost | None: ...


def serving_problem(definition: ServedDefinition) -> RecordError | None:
    """Return an error for the key of ``serving`` that does not fit its Definition; None if all keys fit."""
    serving = definition.serving
    if serving is None:
        return None
    return (
        _part_problem(definition, serving)
        or _same_gradient_problem(definition, serving)
        or _code_problem(definition, serving)
        or _axes_problem(definition, serving)
        or _independent_problem(definition, serving)
        or _lengths_problem(definition, serving)
        or _layout_problem(definition, serving)
    )


def _part_problem(definition: ServedDefinition, serving: Serving) -> RecordError | None:
    if serving.part is None:
        for key in ("code", "includes", "after", "in_training"):
            if getattr(serving, key):
                return RecordError(
                    f"serving.{key} is about a part of a model; name it in 'serving.part'", code="serving_without_part"
                )
    elif definition.backward_of is not None:
        return RecordError(
            f"serving.part: leave it out; a backward is served with its forward '{definition.backward_of}'",
            code="serving_of_backward",
        )
    for key in ("includes", "after", "in_training"):
        if getattr(serving, key) == definition.name:
            return RecordError(
                f"serving.{key} names the definition itself, '{definition.name}'", code="serving_of_itself"
            )
    known: set[str] = set()
    for index, code in enumerate(serving.code):
        if code.fingerprint in known:
            return RecordError(
                f"serving.code.{index}.fingerprint {code.fingerprint} is stated twice", code="serving_code_repeated"
            )
        known.add(code.fingerprint)
    return None


def _same_gradient_problem(definition: ServedDefinition, serving: Serving) -> RecordError | None:
    """Return an error for a shared gradient of a forward, of an input that has its own, or that no output is."""
    if serving.same_gradient and definition.backward_of is None:
        return RecordError("serving.same_gradient is for backward definitions", code="serving_same_gradient")
    for name, output in serving.same_gradient.items():
        if output not in definition.outputs or f"grad_{name}" in definition.outputs:
            return RecordError(
                f"serving.same_gradient.{name}: '{output}' must be an output, and 'grad_{name}' none",
                code="serving_same_gradient",
            )
    return None


ANY_CODE = ("function", "module")
"""The parts for code of any kind; their signature is in ``serving.code``."""


def _code_problem(definition: ServedDefinition, serving: Serving) -> RecordError | None:
    """Return an error for a signature that is incomplete, or that a part of another kind states."""
    is_generic = serving.part in ANY_CODE
    if is_generic and serving.rows is not None:
        return RecordError(
            f"serving.rows: leave it out for a {serving.part}, whose inputs keep their dimensions", code="serving_rows"
        )
    scalars = set(definition.inputs) - set(definition.tensor_inputs)
    for index, code in enumerate(serving.code):
        where = f"serving.code.{index}"
        stated = next((key for key in ("fixed", "returns", "probe") if getattr(code, key)), None)
        if stated is not None and not is_generic:
            return RecordError(
                f"{where}.{stated} is for the parts {' and '.join(ANY_CODE)}", code="serving_signature_unused"
            )
        wanted = {*definition.var_axes, *scalars}
        if is_generic and set(code.probe) != wanted:
            culprit = min(set(code.probe) ^ wanted)
            return RecordError(
                f"{where}.probe must give each var axis its size and each scalar its value; '{culprit}' is "
                f"{'missing' if culprit in wanted else 'neither'}",
                code="serving_probe",
            )
        named = [name for name in code.returns if name is not None]
        if named and sorted(named) != sorted(definition.outputs):
            return RecordError(
                f"{where}.returns must name each output once: {', '.join(definition.outputs)}", code="serving_returns"
            )
        clash = set(code.fixed) & {code.attributes.get(name, name) for name in definition.inputs}
        if clash:
            return RecordError(f"{where}.fixed.{min(clash)} is an input already", code="serving_fixed_input")
    return None


def _axes_problem(definition: ServedDefinition, serving: Serving) -> RecordError | None:
    tensors = {**{name: definition.inputs[name] for name in definition.tensor_inputs}, **definition.outputs}
    for key in ("rows", "growing"):
        axis = getattr(serving, key)
        if axis is not None and axis not in definition.var_axes:
            return RecordError(f"serving.{key} names '{axis}', which is not a var axis", code="serving_axis_unknown")
    if serving.rows is not None:
        having = [name for name, spec in tensors.items() if serving.rows in (spec.shape or ())]
        misplaced = [name for name in having if tensors[name].shape[0] != serving.rows or len(tensors[name].shape) != 2]  # type: ignore[arg-type,index]
        if misplaced or definition.tensor_inputs[0] not in having:
            culprit = misplaced[0] if misplaced else definition.tensor_inputs[0]
            return RecordError(
                f"serving.rows: '{culprit}' must have two dimensions, and '{serving.rows}' as the first",
                code="serving_rows",
            )
    if serving.growing is not None:
        if any(serving.growing in (definition.outputs[name].shape or ()) for name in definition.outputs):
            return RecordError(
                f"serving.growing: '{serving.growing}' is an axis of an output too", code="growing_in_output"
            )
        if not any(serving.growing in (definition.inputs[name].shape or ()) for name in definition.tensor_inputs):
            return RecordError(
                f"serving.growing: no input has the axis '{serving.growing}' itself", code="growing_in_no_input"
            )
    return None


def _independent_problem(definition: ServedDefinition, serving: Serving) -> RecordError | None:
    if serving.independent and definition.cost is None:
        return RecordError(
            "serving.independent: the definition states no 'cost', by which amounts of work are compared",
            code="cost_missing",
        )
    known: set[str] = set()
    for number, group in enumerate(serving.independent):
        where = f"serving.independent.{number}"
        for axis in group:
            if axis not in definition.var_axes:
                return RecordError(f"{where} names '{axis}', which is not a var axis", code="serving_axis_unknown")
            if axis in known:
                return RecordError(f"{where} names '{axis}', which is stated twice", code="serving_axis_repeated")
            known.add(axis)
        if not any(axis in (output.shape or ()) for axis in group for output in definition.outputs.values()):
            return RecordError(
                f"{where}: no output has one of these axes itself, so that more of it is not more of the same",
                code="serving_axis_in_no_output",
            )
    return None


def _lengths_problem(definition: ServedDefinition, serving: Serving) -> RecordError | None:
    independent = {axis for group in serving.independent for axis in group}
    for number, axis in enumerate(serving.lengths):
        where = f"serving.lengths.{number}"
        if axis not in definition.var_axes:
            return RecordError(f"{where} names '{axis}', which is not a var axis", code="serving_axis_unknown")
        if axis in independent or axis in serving.lengths[:number]:
            return RecordError(f"{where} names '{axis}', which is stated twice", code="serving_axis_repeated")
    lengths = {*serving.lengths, *filter(None, (serving.growing,))}
    for axis, leader in serving.follows.items():
        if axis not in definition.var_axes or axis in independent | lengths:
            return RecordError(
                f"serving.follows names '{axis}', which is no separate var axis", code="serving_axis_unknown"
            )
        if leader not in independent | lengths:
            return RecordError(
                f"serving.follows.{axis} names '{leader}', which is neither independent nor a length",
                code="serving_axis_unknown",
            )
    return None


def _layout_problem(definition: ServedDefinition, serving: Serving) -> RecordError | None:
    for name, layout in serving.outputs.items():
        where = f"serving.outputs.{name}"
        if name not in definition.written_outputs:
            return RecordError(f"{where}: no such output that is written", code="output_unknown")
        output = definition.outputs[name]
        if layout.order is not None and len(layout.order) != len(output.shape or ()):
            return RecordError(
                f"{where}: 'order' has {len(layout.order)} dimensions, the output {len(output.shape or ())}",
                code="output_layout_rank",
            )
        if layout.like is not None and not _same(output, definition.inputs.get(layout.like)):
            return RecordError(
                f"{where}: '{layout.like}' must be an input of the same shape and dtype", code="output_layout_like"
            )
    return None


def _same(output: TensorSpec, other: TensorSpec | None) -> bool:
    return other is not None and (other.shape, other.dtype) == (output.shape, output.dtype)
