"""Compares every output of one call with the oracle, each by the rules that its Definition gives it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch

from tilegym_db.records import Definition
from tilegym_db.records.quantised import codes_are_exact
from tilegym_db.records.tolerance import limits_for
from tilegym_db.verify.distance import EXACTLY, BaseError, compare_rows
from tilegym_db.verify.gates import check_output, is_well_conditioned, must_be_exact
from tilegym_db.verify.indices import check_gathered
from tilegym_db.verify.laws import check_sampled_outputs
from tilegym_db.verify.ranking import check_ranked_outputs, followed
from tilegym_db.verify.verdicts import OutputVerdict

__all__ = ["check_lifted", "check_outputs", "check_reference", "exact_outputs", "reference_errors"]

Outputs = Mapping[str, torch.Tensor]


def check_outputs(
    definition: Definition,
    dtypes: Mapping[str, str],
    inputs: Mapping[str, Any],
    truth: Outputs,
    outputs: Outputs,
    e_base: Mapping[str, BaseError],
    *,
    math: str = "ieee",
    exact: Collection[str] = (),
    conditioned: Collection[str] = (),
) -> dict[str, OutputVerdict]:
    """A verdict for each output.

    Args:
        definition: tolerances, and which outputs are indices into which tensor.
        dtypes: dtype variable -> dtype.
        inputs: what the call was given (not what it left there).
        truth: the oracle's outputs.
        outputs: the call's, in the same shapes and the declared dtypes.
        e_base: what the reference itself is off by, per output.
        math: ``tf32`` where the Solution declares it.
        exact: outputs in which every element must have the oracle's value (see :func:`exact_outputs`).
        conditioned: outputs whose every element is judged by its own size (see :func:`reference_errors`).
    """
    verdicts = _check_indices(definition, dtypes, inputs, truth, outputs, math)
    truth = followed(definition, inputs, truth, outputs, [name for name, found in verdicts.items() if not found.passed])
    for name, value in outputs.items():
        if name not in verdicts:
            limits = limits_for(definition, definition.dtype_of(name, dtypes), math)
            if limits is not None and codes_are_exact(definition.codes, name, inputs):
                limits = replace(limits, codes_equal=1.0)
            verdicts[name] = check_output(
                name,
                value,
                truth[name],
                limits,
                e_base[name] if math == "ieee" else e_base[name].plain,
                exact=name in exact,
                conditioned=name in conditioned,
            )
    return {name: verdicts[name] for name in outputs}


def check_reference(
    definition: Definition,
    dtypes: Mapping[str, str],
    inputs: Mapping[str, Any],
    truth: Outputs,
    as_written: Outputs,
    e_base: Mapping[str, BaseError],
) -> dict[str, OutputVerdict]:
    """As :func:`check_outputs`, for the reference as written: its own worst row and element widen no bound for it."""
    plain = {name: error.plain for name, error in e_base.items()}
    return check_outputs(definition, dtypes, inputs, truth, as_written, plain)


def check_lifted(
    definition: Definition, inputs: Mapping[str, Any], truth: Outputs, outputs: Outputs
) -> dict[str, OutputVerdict]:
    """As :func:`check_outputs`, for another formulation that was lifted to fp64 as the oracle was."""
    # Scalars such as eps are fp32 constants in some library calls; fp64 agreement ends there.
    limits = limits_for(definition, "float32")
    if limits is not None:
        limits = replace(limits, share=1.0)  # in fp64 no sum ends beside a border by rounding
    verdicts = _check_indices(definition, None, inputs, truth, outputs)
    truth = followed(definition, inputs, truth, outputs, [name for name, found in verdicts.items() if not found.passed])
    for name, value in outputs.items():
        if name not in verdicts:
            verdicts[name] = check_output(name, value.double(), truth[name].double(), limits)
    return {name: verdicts[name] for name in outputs}


def _check_indices(
    definition: Definition,
    dtypes: Mapping[str, str] | None,
    inputs: Mapping[str, Any],
    truth: Outputs,
    outputs: Outputs,
    math: str = "ieee",
) -> dict[str, OutputVerdict]:
    """A verdict for each output of indices; without ``dtypes``, what they point into was computed in fp64."""
    verdicts = check_ranked_outputs(definition, inputs, outputs)
    verdicts |= check_sampled_outputs(definition, inputs, truth, [outputs])
    for name, source in definition.gathers.items():
        if name not in outputs or name in verdicts:
            continue
        if source in definition.inputs:
            verdicts[name] = check_gathered(name, outputs[name], truth[name], inputs[source])
        else:
            dtype = "float32" if dtypes is None else definition.dtype_of(source, dtypes)
            limits = limits_for(definition, dtype, math)
            verdicts[name] = check_gathered(name, outputs[name], truth[name], truth[source], limits)
    return verdicts


def reference_errors(
    definition: Definition, dtypes: Mapping[str, str], as_written: Outputs, truth: Outputs
) -> tuple[dict[str, BaseError], frozenset[str]]:
    """What the reference as written is off by itself, per output; nothing where equality or codes are compared.

    Also the outputs of which it gives every element, however small, to a relative error of its own: so must every Solution.
    """
    errors, conditioned = dict.fromkeys(as_written, EXACTLY), set()
    for name, value in as_written.items():
        limits = limits_for(definition, definition.dtype_of(name, dtypes))
        if limits is None or limits.codes or not value.numel():
            continue
        rows = compare_rows(value, truth[name], limits)
        errors[name] = rows.base_error
        if name not in definition.gathers and is_well_conditioned(value, truth[name], limits, rows):
            conditioned.add(name)
    return errors, frozenset(conditioned)


def exact_outputs(as_written: Outputs, truth: Outputs) -> frozenset[str]:
    """The outputs that every Solution must give exactly, on contents whose sums and products round nowhere."""
    return frozenset(name for name, value in as_written.items() if must_be_exact(value, truth[name]))
