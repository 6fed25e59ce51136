"""What outputs of indices point into, what other outputs follow from them, and which of them are drawn at random.

Each rule raises :class:`RecordError` with the culprit's key.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from tilegym_db.errors import RecordError
from tilegym_db.records.definition_parts import InputGenerator, SampledOutput, TensorSpec
from tilegym_db.records.dtypes import INTEGER_DTYPES
from tilegym_db.records.python_source import function_parameters

__all__ = ["ROUNDING", "check_follows", "check_gathers", "check_sampled"]

ROUNDING = "rounding"
"""The parameter by which a function of a reference is told how far equal values may lie apart, relative to themselves."""

Specs = Mapping[str, TensorSpec]


def check_gathers(
    gathers: Mapping[str, str],
    unordered: Sequence[str],
    inputs: Specs,
    outputs: Specs,
    dtypes: Mapping[str, tuple[str, ...]],
    reference: str,
) -> None:
    """An output of indices is of integers, and has the shape of what they point into but for the last axis."""
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
                f"gathers '{output}': '{source}' must have its shape but for the last axis",
                code="gathers_shape_differs",
            )
    for output in unordered:
        if output not in gathers or gathers[output] in {**inputs, **outputs}:
            raise RecordError(
                f"unordered names '{output}', which gathers no values of a function of the reference",
                code="unordered_not_gathered",
            )


def check_follows(
    follows: Mapping[str, str], gathers: Mapping[str, str], inputs: Specs, outputs: Specs, reference: str
) -> None:
    """An output that follows from indices is given by a function of the inputs and the indices."""
    for output, function in follows.items():
        if output not in outputs or output in gathers:
            raise RecordError(
                f"follows '{output}': it must be an output that is no output of indices", code="follows_not_plain"
            )
        if not gathers:
            raise RecordError(
                f"follows '{output}': no output of indices is named in 'gathers'", code="follows_without_gathers"
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
    """An output drawn at random is of int32 or int64, has random numbers of its own shape, and a law in the reference.

    Args:
        sampled: output -> its law and its random numbers.
        taken: outputs that another rule judges.
        inputs: of the Definition.
        outputs: of the Definition.
        generators: how inputs are drawn.
        reference: the text that defines the law.
    """
    for output, stated in sampled.items():
        where, spec, numbers = f"sampled '{output}'", outputs.get(output), inputs.get(stated.uniforms)
        if spec is None or output in taken:
            raise RecordError(
                f"{where}: it must be an output that 'gathers' and 'in_place' do not name", code="sampled_not_plain"
            )
        if spec.shape is None or len(spec.shape) != 1:
            raise RecordError(f"{where}: it must have one index a row, and so one axis", code="sampled_rank")
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
