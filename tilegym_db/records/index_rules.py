"""What outputs of indices point into, what other outputs follow from them, and which of them are drawn at random.

Each rule raises :class:`ValueError` with the culprit's key.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

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
            raise ValueError(f"gathers '{output}': no such output")
        indices, values = outputs[output], {**inputs, **outputs}.get(source)
        choices = dtypes.get(indices.dtype, (indices.dtype,))
        if not INTEGER_DTYPES.issuperset(choices):
            raise ValueError(f"gathers '{output}': its dtype is {', '.join(choices)}, and indices are integers")
        if values is None and source.isidentifier() and function_parameters(reference, source) is not None:
            if not indices.shape:
                raise ValueError(f"gathers '{output}': it has no axis of choices")
            _check_function(f"gathers '{output}'", source, reference, tuple(inputs), (output,))
            continue
        if values is None or source == output:
            raise ValueError(
                f"gathers '{output}': '{source}' must be an input or another output, or a function of the reference"
            )
        if not indices.shape or not values.shape or indices.shape[:-1] != values.shape[:-1]:
            raise ValueError(f"gathers '{output}': '{source}' must have its shape but for the last axis")
    for output in unordered:
        if output not in gathers or gathers[output] in {**inputs, **outputs}:
            raise ValueError(f"unordered names '{output}', which gathers no values of a function of the reference")


def check_follows(
    follows: Mapping[str, str], gathers: Mapping[str, str], inputs: Specs, outputs: Specs, reference: str
) -> None:
    """An output that follows from indices is given by a function of the inputs and the indices."""
    for output, function in follows.items():
        if output not in outputs or output in gathers:
            raise ValueError(f"follows '{output}': it must be an output that is no output of indices")
        if not gathers:
            raise ValueError(f"follows '{output}': no output of indices is named in 'gathers'")
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
            raise ValueError(f"{where}: it must be an output that 'gathers' and 'in_place' do not name")
        if spec.shape is None or len(spec.shape) != 1:
            raise ValueError(f"{where}: it must have one index a row, and so one axis")
        if spec.dtype not in ("int32", "int64"):
            raise ValueError(f"{where}: its dtype is {spec.dtype}; indices that are drawn are int32 or int64")
        if numbers is None or numbers.shape != spec.shape or numbers.dtype != "float32":
            raise ValueError(f"{where}: '{stated.uniforms}' must be a float32 input of its shape, {list(spec.shape)}")
        if generators.get(stated.uniforms) != InputGenerator(kind="uniform"):
            raise ValueError(f'{where}: input_generators.{stated.uniforms} must be {{"kind": "uniform"}}, from 0 to 1')
        _check_function(where, stated.law, reference, tuple(inputs), ())


def _check_function(
    where: str, function: str, reference: str, inputs: tuple[str, ...], indices: tuple[str, ...]
) -> None:
    found = function_parameters(reference, function)
    if found is None:
        raise ValueError(f"{where}: the reference defines no function '{function}'")
    allowed = (*indices, ROUNDING)
    if found[: len(inputs)] != inputs or not set(found[len(inputs) :]) <= set(allowed):
        raise ValueError(
            f"{where}: {function}({', '.join(found)}) must take the inputs in order ({', '.join(inputs)}), and then "
            f"none, some or all of {', '.join(allowed)}"
        )
