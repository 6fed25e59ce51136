"""Compares every output of one call with the oracle, each by the rules of its Definition."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch

from tilegym_db.backends.torch_dtypes import dtype_name
from tilegym_db.errors import RecordError
from tilegym_db.records import Definition
from tilegym_db.records.definition import LIMITS, Limits, limits_for
from tilegym_db.records.definition_rules import ROUNDING, codes_are_exact
from tilegym_db.verification.distributions import chosen_from, is_index
from tilegym_db.verification.gates import (
    EXACTLY,
    PASSED,
    OutputComparison,
    ReferenceDeviation,
    bias_of,
    check_output,
    compare_rows,
    failed,
    is_well_conditioned,
    must_be_exact,
    row_of_most,
)
from tilegym_db.verification.oracle import Lifted, evaluate_function, lift
from tilegym_db.verification.sampling import check_sampled_outputs

Outputs = Mapping[str, torch.Tensor]


def check_outputs(
    definition: Definition,
    dtypes: Mapping[str, str],
    inputs: Mapping[str, Any],
    truth: Outputs,
    outputs: Outputs,
    e_base: Mapping[str, ReferenceDeviation],
    *,
    math: str = "ieee",
    exact: Collection[str] = (),
    conditioned: Collection[str] = (),
) -> dict[str, OutputComparison]:
    """Return a comparison for each output.

    Args:
        definition: has the tolerances, and the index outputs with the tensors they point into.
        dtypes: dtype variable -> dtype.
        inputs: of the call, before it ran.
        truth: the oracle's outputs.
        outputs: the call's, in the same shapes and the declared dtypes.
        e_base: error of the reference itself, per output.
        math: ``tf32`` if the Solution declares it.
        exact: outputs in which every element must have the oracle's value (see :func:`exact_outputs`).
        conditioned: outputs whose elements are each checked relative to their size (see :func:`reference_errors`).
    """
    if is_undefined(definition, inputs):
        return _check_valid(definition, inputs, outputs)
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
    e_base: Mapping[str, ReferenceDeviation],
) -> dict[str, OutputComparison]:
    """Check the reference as written; see :func:`check_outputs`. Its own worst row and element widen no bound."""
    plain = {name: error.plain for name, error in e_base.items()}
    return check_outputs(definition, dtypes, inputs, truth, as_written, plain)


def check_lifted(
    definition: Definition, inputs: Mapping[str, Any], truth: Outputs, outputs: Outputs
) -> dict[str, OutputComparison]:
    """Check another formulation that was lifted to fp64 like the oracle; see :func:`check_outputs`."""
    # Scalars such as eps are fp32 constants in some library calls, so fp64 results may differ by fp32 rounding.
    limits = limits_for(definition, "float32")
    if limits is not None:
        limits = replace(limits, share=1.0)  # fp64 sums do not cross borders by rounding
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
) -> dict[str, OutputComparison]:
    """Return a comparison for each index output; ``dtypes`` None means that the values were computed in fp64."""
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
) -> tuple[dict[str, ReferenceDeviation], frozenset[str]]:
    """Return the error of the reference as written, per output; 0 if equality or codes are compared.

    Also return the outputs of which the reference gives every element, however small, to a relative error; Solutions must
    do so too.
    """
    errors, conditioned = dict.fromkeys(as_written, EXACTLY), set()
    for name, value in as_written.items():
        limits = limits_for(definition, definition.dtype_of(name, dtypes))
        if limits is None or limits.codes or not value.numel():
            continue
        rows = compare_rows(value, truth[name], limits)
        errors[name] = rows.deviation._replace(bias=bias_of(value, rows)[0])
        if name not in definition.gathers and is_well_conditioned(value, truth[name], limits, rows):
            conditioned.add(name)
    return errors, frozenset(conditioned)


def exact_outputs(as_written: Outputs, truth: Outputs) -> frozenset[str]:
    """Return the outputs that every Solution must give exactly, for contents whose sums and products never round."""
    return frozenset(name for name, value in as_written.items() if must_be_exact(value, truth[name]))


# ---- indices --------------------------------------------------------------------------------------
# Indices are compared by the values they point at, so that any choice among equal values passes.


def check_gathered(
    name: str, actual: torch.Tensor, oracle: torch.Tensor, source: torch.Tensor, limits: Limits | None = None
) -> OutputComparison:
    """Compare indices by the values they point at; any choice among equal values is right.

    Indices must lie in the last axis of ``source``, be distinct in a row, and each gather the value that the oracle's gathers.
    A negative index of the oracle means "none", and must be equal.

    Args:
        name: the output's name, for the reason.
        actual: indices ``[..., K]``.
        oracle: the reference's indices, same shape.
        source: the tensor pointed into, ``[..., E]``: an input, or the oracle's value of another output.
        limits: bounds of the dtype of ``source`` if it is computed, because values within its rounding count as equal; None
            if it is an input.
    """
    if actual.numel() == 0:
        return PASSED
    got_index, want_index = actual.long(), oracle.long()
    none = want_index < 0
    outside = torch.where(none, got_index != want_index, (got_index < 0) | (got_index >= source.shape[-1]))
    repeated = _repeated(got_index) & ~none
    got, want = (source.gather(-1, index.clamp(0, source.shape[-1] - 1)) for index in (got_index, want_index))
    allowed = want.double().abs() * (limits.rtol if limits is not None else 0.0)
    both_nan = torch.isnan(got) & torch.isnan(want) if source.dtype.is_floating_point else torch.zeros_like(none)
    near = (got == want) | both_nan | ((got.double() - want.double()).abs() <= allowed)
    return _verdict(
        name,
        actual,
        oracle,
        (outside, "indices point outside the row"),
        (repeated, "indices occur twice in their row"),
        (~near & ~none, "indices point at another value than the reference's do"),
    )


def check_ranked(
    name: str, actual: torch.Tensor, ranked: torch.Tensor, limits: Limits, smallest: float, *, ordered: bool
) -> OutputComparison:
    """Check that indices are those of the largest ranked values of their row; any choice among equal values is right.

    Values count as equal if they differ by the rounding of the ranking dtype, or if both are below its normal numbers.

    Args:
        name: the output's name, for the reason.
        actual: indices ``[..., K]``, distinct in a row.
        ranked: the values, ``[..., E]`` with E >= K, in fp64.
        limits: bounds of the dtype in which the reference as written ranks them.
        smallest: smallest normal number of that dtype.
        ordered: True if they must come in descending order of their values.
    """
    if actual.numel() == 0:
        return PASSED
    index = actual.long()
    best = ranked.topk(index.shape[-1], dim=-1)
    outside = (index < 0) | (index >= ranked.shape[-1])
    got = ranked.gather(-1, index.clamp(0, ranked.shape[-1] - 1))
    order = torch.arange(index.shape[-1], device=index.device).expand_as(index)
    if not ordered:
        got, order = got.sort(dim=-1, descending=True)
    both_nan = torch.isnan(got) & torch.isnan(best.values)
    allowed = (best.values.abs() * limits.rtol).clamp_min(smallest)
    near = (got == best.values) | both_nan | ((got - best.values).abs() <= allowed)
    wrong = torch.zeros_like(near).scatter_(-1, order, ~near)
    return _verdict(
        name,
        actual,
        best.indices,
        (outside, "indices point outside the row"),
        (_repeated(index), "indices occur twice in their row"),
        (wrong, "indices point at values that are not the largest of their row"),
    )


def _verdict(
    name: str, actual: torch.Tensor, wanted: torch.Tensor, *found: tuple[torch.Tensor, str], gate: str = "exact"
) -> OutputComparison:
    for wrong, what in found:
        if bool(wrong.any()):
            count = int(wrong.sum())
            figures = (math.inf, math.inf, math.inf, 1.0 - count / actual.numel())
            reason = f"{name}: {count} of {actual.numel()} {what}"
            return failed(gate, reason, figures, wrong, actual, wanted, row_of_most(wrong))
    return PASSED


def _repeated(index: torch.Tensor) -> torch.Tensor:
    ordered, order = index.sort(dim=-1, stable=True)
    again = torch.zeros_like(index, dtype=torch.bool)
    again[..., 1:] = ordered[..., 1:] == ordered[..., :-1]
    return torch.zeros_like(again).scatter_(-1, order, again)


# ---- undefined choices ----------------------------------------------------------------------------
# A choice among NaN is undefined unless the Definition promises one. Its indices must still exist and differ within a row,
# because a model reads the weights of what they choose.


def is_undefined(definition: Definition, inputs: Mapping[str, Any]) -> bool:
    """Return True if the Definition chooses indices among values that are NaN, for which it promises nothing."""
    source = chosen_from(definition) if "nan" not in definition.special_values else None
    return source is not None and bool(torch.isnan(inputs[source]).any())


def _check_valid(definition: Definition, inputs: Mapping[str, Any], outputs: Outputs) -> dict[str, OutputComparison]:
    """Check that indices lie in their row and that several of one row differ; other outputs pass."""
    shape = inputs[chosen_from(definition) or ""].shape
    verdicts = dict.fromkeys(outputs, PASSED)
    for name, index in outputs.items():
        if not is_index(definition, name) or not index.numel():
            continue
        several = index.shape != shape[:-1]
        columns = shape[index.dim() - 1] if several else shape[-1]
        outside = (index < 0) | (index >= columns)
        repeated = _repeated(index.long()) if several else torch.zeros_like(outside)
        verdicts[name] = _verdict(
            name,
            index,
            index.clamp(0, columns - 1),
            (outside, f"indices point outside the {columns} columns, in a call with NaN"),
            (repeated, "indices occur twice in their row, in a call with NaN"),
            gate="indices",
        )
    return verdicts


# ---- ranking --------------------------------------------------------------------------------------
# A router may rank values that are neither input nor output, such as scores with a bias. No tensor of the call can then
# confirm its indices.
#
# The Definition names a function of its reference that returns these values (``gathers``), and one for each output that
# depends on the choice among equal values (``follows``). Both run as the oracle does, in fp64 or as written, on the
# inputs of the call. From the Solution they take only the chosen indices.

Inputs = Mapping[str, Any]


def check_ranked_outputs(definition: Definition, inputs: Inputs, outputs: Outputs) -> dict[str, OutputComparison]:
    """Return a comparison for each output of indices into values that a function of the reference ranks.

    Args:
        definition: names these outputs.
        inputs: of the call.
        outputs: the call's, in the declared shapes.

    Raises:
        RecordError: a function of the reference raises, or does not return a row of values per row of indices.
    """
    verdicts = {}
    for name, source in definition.gathers.items():
        if name not in outputs or source in definition.inputs or source in definition.outputs:
            continue
        index, rounding = outputs[name].long(), LIMITS["float32"].rtol
        # Values count as equal if the rounding of the dtype in which the reference ranks cannot separate them.
        written = _ranked(definition, source, inputs, name, torch.zeros_like(index), rounding)
        limits, columns = LIMITS[dtype_name(written.dtype)], written.shape[-1]
        chosen = index.clamp(0, columns - 1)  # check_ranked reports indices outside the row; here they must not index
        if definition.oracle == "as_written":
            ranked = _ranked(definition, source, inputs, name, chosen, limits.rtol).double()
        else:
            with _lifted():
                ranked = _ranked(definition, source, lift(inputs), name, chosen, limits.rtol).double()
        smallest, ordered = float(torch.finfo(written.dtype).tiny), name not in definition.unordered
        verdicts[name] = check_ranked(name, outputs[name], ranked, limits, smallest, ordered=ordered)
    return verdicts


def followed(
    definition: Definition, inputs: Inputs, truth: Outputs, outputs: Outputs, wrong: Collection[str] = ()
) -> dict[str, torch.Tensor]:
    """Return the oracle's outputs; those that follow from indices are computed for the indices that a call chose.

    Args:
        definition: names these outputs and their functions.
        inputs: of the call.
        truth: the oracle's outputs.
        outputs: the call's.
        wrong: index outputs that failed already; the oracle's are used instead.
    """
    found = dict(truth)
    if not definition.follows or any(name not in outputs for name in definition.gathers):
        return found
    indices = {name: (truth if name in wrong else outputs)[name].long() for name in definition.gathers}
    rounding = LIMITS["float32"].rtol
    for name, function in definition.follows.items():
        if name not in outputs:
            continue
        if definition.oracle == "as_written":
            value = evaluate_function(definition, function, inputs, indices | {ROUNDING: rounding})
        else:
            with _lifted():
                value = evaluate_function(definition, function, lift(inputs), indices | {ROUNDING: rounding})
        if not isinstance(value, torch.Tensor) or value.shape != truth[name].shape:
            raise RecordError(
                f"{definition.name}: {function} does not give '{name}' in the shape that run gives it.",
                code="follows_shape_differs",
            )
        found[name] = value
    return found


def _lifted() -> Any:
    mode: Any = Lifted
    return mode()


def _ranked(
    definition: Definition, function: str, inputs: Inputs, name: str, index: torch.Tensor, rounding: float
) -> torch.Tensor:
    value = evaluate_function(definition, function, inputs, {name: index, ROUNDING: rounding})
    rows = index.shape[:-1]
    if not isinstance(value, torch.Tensor) or value.shape[:-1] != rows or not value.dtype.is_floating_point:
        found = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise RecordError(
            f"{definition.name}: {function} gives {found}, not a row of values for each of {list(rows)}.",
            code="ranking_shape_differs",
        )
    if value.shape[-1] < index.shape[-1]:
        raise RecordError(
            f"{definition.name}: {function} ranks {value.shape[-1]} values, fewer than '{name}' chooses.",
            code="ranking_too_short",
        )
    return value
