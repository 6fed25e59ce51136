"""Runs a Definition's reference: as written, or lifted to fp64 to serve as the oracle."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from tilegym_db.errors import RecordError
from tilegym_db.records import Definition
from tilegym_db.records.python_source import function_parameters
from tilegym_db.verify.lifting import LIFTED_DTYPES, Lifted, SlicedInput
from tilegym_db.verify.slicing import ORACLE_BYTES, sliced

__all__ = [
    "Lifted",
    "as_written",
    "evaluate_function",
    "in_fp64",
    "lift",
    "load_function",
    "oracle",
    "run_lifted",
    "run_reference",
]

Inputs = Mapping[str, Any]
Outputs = dict[str, torch.Tensor]


@functools.lru_cache(maxsize=512)
def load_function(source: str, where: str, name: str = "run") -> Callable[..., Any]:
    """The function, ``run`` or another, that a reference's source text defines.

    Raises:
        RecordError: the text raises when it is executed; carries the last lines of the traceback.
    """
    scope: dict[str, Any] = {}  # without a __name__: torch.compile of PyTorch 2.11 would import the module of that name
    try:
        # Definitions are reviewed records, admitted by the self-test; a Solution's source never takes this road.
        exec(compile(source, where, "exec"), scope)
    except (Exception, SystemExit) as error:
        raise RecordError(
            f"{where}: the reference raises when it is loaded: {error!r}.", code="reference_load_failed"
        ) from None
    function: Callable[..., Any] = scope[name]
    return function


def run_reference(definition: Definition, inputs: Inputs, *, source: str | None = None, label: str = "") -> Outputs:
    """Every output of the Definition by name, in-place ones included, computed as the reference is written.

    Args:
        definition: the Definition.
        inputs: input name -> tensor or scalar. Tensors are never modified: in-place ones are copied first.
        source: another text that defines ``run``, such as the self-test's independent formulation.
        label: what an error calls that text.

    Raises:
        RecordError: the reference raises, or returns another number of outputs, shape or kind than declared.
    """
    where = f"{definition.name}: {label or ('reference' if source is None else 'alternative formulation')}"
    function = load_function(source or definition.reference, where)
    given = {
        name: value.clone() if name in definition.in_place and isinstance(value, torch.Tensor) else value
        for name, value in inputs.items()
    }
    try:
        with torch.no_grad():
            returned = function(*(given[name] for name in definition.inputs))
    except (Exception, SystemExit):
        raise RecordError(f"{where} raises:\n{traceback.format_exc(limit=-3)}", code="reference_raises") from None
    return name_outputs(definition, returned, given, where)


def evaluate_function(definition: Definition, name: str, inputs: Inputs, known: Inputs) -> Any:
    """What a function of the reference beside ``run`` returns for some inputs.

    Args:
        definition: its reference defines the function.
        name: of the function, which takes the inputs in order.
        inputs: input name -> tensor or scalar.
        known: further parameters by name; the function is given those that it takes.

    Raises:
        RecordError: the function raises.
    """
    where = f"{definition.name}: {name} of the reference"
    function = load_function(definition.reference, where, name)
    more = [parameter for parameter in function_parameters(definition.reference, name) or () if parameter in known]
    try:
        with torch.no_grad():
            return function(*(inputs[given] for given in definition.inputs), **{key: known[key] for key in more})
    except (Exception, SystemExit):
        raise RecordError(f"{where} raises:\n{traceback.format_exc(limit=-3)}", code="reference_raises") from None


def name_outputs(definition: Definition, returned: Any, given: Inputs, where: str) -> Outputs:
    """Match what a function returned with the Definition's outputs.

    A function may return every output, or only those that are not written in place.
    """
    values = returned if isinstance(returned, tuple | list) else (returned,)
    replaced = {target: source for source, target in definition.in_place.items()}
    names: Iterable[str]
    if len(values) == len(definition.outputs):
        names = definition.outputs
    elif len(values) == len(definition.written_outputs):
        names = definition.written_outputs
    else:
        raise RecordError(
            f"{where} returns {len(values)} values; {definition.name} has outputs {', '.join(definition.outputs)}.",
            code="output_count_differs",
        )
    outputs = dict(zip(names, values, strict=True))
    for target, source in replaced.items():
        outputs.setdefault(target, given[source])
    for name, value in outputs.items():
        if not isinstance(value, torch.Tensor):
            raise RecordError(
                f"{where} returns a {type(value).__name__} for '{name}', not a tensor.", code="output_not_tensor"
            )
    return {name: outputs[name] for name in definition.outputs}


def run_lifted(definition: Definition, inputs: Inputs, *, source: str | None = None, label: str = "") -> Outputs:
    """As :func:`run_reference`, with every floating input and every cast in the reference lifted to fp64.

    Of ``sliced_inputs`` each slice is lifted when the reference takes it.

    Raises:
        RecordError: as :func:`run_reference`; the reference takes more of a sliced input than one slice.
    """
    whole, slices = {}, []
    for name, value in inputs.items():
        axis = definition.sliced_inputs.get(name)
        if axis is not None and isinstance(value, torch.Tensor) and value.dtype in LIFTED_DTYPES:
            slices.append(SlicedInput(name, value, (definition.inputs[name].shape or ()).index(axis)))
        else:
            whole[name] = value
    lifted = lift(whole)
    mode: Any = Lifted
    with mode(slices):
        return run_reference(
            definition, {name: lifted.get(name, value) for name, value in inputs.items()}, source=source, label=label
        )


def lift(inputs: Inputs) -> dict[str, Any]:
    """Inputs with every floating-point tensor in fp64."""
    return {
        name: value.double() if isinstance(value, torch.Tensor) and value.dtype in LIFTED_DTYPES else value
        for name, value in inputs.items()
    }


def as_written(definition: Definition, inputs: Inputs, *, budget_bytes: int = ORACLE_BYTES) -> Outputs:
    """The outputs of the reference in the dtypes it is given, as :func:`run_reference`, but in slices as :func:`oracle`."""
    return sliced(definition, inputs, run_reference, budget_bytes=budget_bytes)


def oracle(definition: Definition, inputs: Inputs, *, budget_bytes: int = ORACLE_BYTES) -> Outputs:
    """The outputs that a Solution is compared with: fp64 on the same quantised bits, or as written for quantisers.

    Args:
        definition: evaluated slice by slice along its ``independent_axes`` where that saves memory.
        inputs: input name -> tensor or scalar.
        budget_bytes: what an evaluation may take, by the estimate of :func:`sliced`.
    """
    if definition.oracle == "as_written":
        return as_written(definition, inputs, budget_bytes=budget_bytes)
    return in_fp64(definition, inputs, budget_bytes=budget_bytes)


def in_fp64(definition: Definition, inputs: Inputs, *, budget_bytes: int = ORACLE_BYTES) -> Outputs:
    """The outputs of the reference as :func:`run_lifted`, but in slices as :func:`oracle`."""
    return sliced(definition, inputs, run_lifted, budget_bytes=budget_bytes)
