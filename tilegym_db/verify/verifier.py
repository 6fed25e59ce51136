"""Verifies calls of one Solution: the harness fills shared memory, the worker calls, the gates decide.

Everything that decides lives here, in the harness: contents, poison, guard bands, the oracle and the comparison.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from typing import Any

import torch

from tilegym_db.records import Definition, Solution
from tilegym_db.records.case import Case
from tilegym_db.records.tolerance import limits_for
from tilegym_db.verify.comparison import check_outputs
from tilegym_db.verify.conditioning import without_uncertain
from tilegym_db.verify.distance import compare_rows
from tilegym_db.verify.drawing import judge_draws
from tilegym_db.verify.expected import Expected
from tilegym_db.verify.gates import OutputVerdict
from tilegym_db.verify.outcome import Failure, Verdict, incorrect
from tilegym_db.verify.worker.losses import WorkerDied, WorkerTimeout
from tilegym_db.verify.worker.process import WorkerProcess
from tilegym_db.verify.worker.shared_buffers import SharedBuffers, fill_with_garbage, tensor_view

__all__ = [
    "Failure",
    "Verdict",
    "call_again",
    "check_memory",
    "fill_slot",
    "judge",
    "one_call",
    "read_outputs",
    "same_bytes",
    "verify_slot",
]

# A comparison widens its output to fp64 several times over; one at a time bounds the memory it takes. Small ones need not wait.
_comparing = threading.Lock()
SMALL_ELEMENTS = 1 << 22

POISON_NAN = 0xFF  # every floating dtype reads all-ones bytes as NaN, every signed integer as -1


def fill_slot(
    buffers: SharedBuffers, index: int, definition: Definition, expected: Expected, poison: int | None
) -> None:
    """Write guard bytes, inputs and poisoned outputs; ``poison`` None draws random bytes, else repeats that byte."""
    slot = buffers.slot(index)
    fill_with_garbage(slot) if poison is None else slot.fill_(poison)
    for plan in buffers.plan.inputs:
        tensor_view(slot, plan).copy_(expected.inputs[plan.name])


def verify_slot(
    worker: WorkerProcess,
    buffers: SharedBuffers,
    index: int,
    definition: Definition,
    solution: Solution,
    expected: Expected,
    *,
    calls: int = 2,
    in_model: int | None = None,
    draws: int = 0,
    timeout_s: float,
) -> tuple[dict[str, OutputVerdict], dict[str, torch.Tensor]] | Failure:
    """Call the Solution on one slot over and over and put the results through every gate.

    The first two calls find different poison in the outputs. Results of a deterministic Solution must be the same bytes
    each time; those of any other must all pass, close together. The call numbered ``in_model`` is made as a model makes it.
    Of an operator that draws at random more calls follow, with other random numbers, until there are ``draws`` draws.

    Returns:
        The verdict and the (contiguous) value of every output, or the failure.
    """
    first = one_call(worker, buffers, index, definition, expected, POISON_NAN, timeout_s)
    if isinstance(first, Failure):
        return first
    judged = judge(definition, solution, expected, first)
    if isinstance(judged, Failure):
        return judged
    for number in range(1, calls):
        poison = None if number == 1 else POISON_NAN
        alike = number == in_model
        again = one_call(worker, buffers, index, definition, expected, poison, timeout_s, as_in_model=alike)
        failure = (
            again if isinstance(again, Failure) else _check_repeat(definition, solution, expected, first, again, number)
        )
        if failure is not None:
            return failure
    failure = judge_draws(
        definition,
        expected,
        first,
        lambda other: one_call(worker, buffers, index, definition, other, POISON_NAN, timeout_s),
        draws,
        deterministic=solution.spec.deterministic,
    )
    return (judged, first) if failure is None else failure


def call_again(
    worker: WorkerProcess,
    buffers: SharedBuffers,
    definition: Definition,
    solution: Solution,
    expected: Expected,
    first: Mapping[str, torch.Tensor],
    *,
    timeout_s: float,
) -> Failure | None:
    """A call that was made before must give the same bytes after one on other inputs of its shape, and without gradients."""
    again = one_call(worker, buffers, 0, definition, expected, None, timeout_s, without_gradients=True)
    if isinstance(again, Failure):
        return again
    if not solution.spec.deterministic:
        return _check_spread(definition, solution, expected, first, again)
    for name, value in first.items():
        if not same_bytes(value, again[name]):
            what = (
                f"{name}: other bytes than before, after a call on other inputs of the same shape, at {expected.case}"
            )
            return incorrect(
                "in turn", f"{what}; something is kept from call to call, or gradients are asked for", expected.case
            )
    return None


def _check_repeat(
    definition: Definition,
    solution: Solution,
    expected: Expected,
    first: Mapping[str, torch.Tensor],
    again: Mapping[str, torch.Tensor],
    number: int,
) -> Failure | None:
    if not solution.spec.deterministic:
        return _check_spread(definition, solution, expected, first, again)
    for name, value in first.items():
        if not same_bytes(value, again[name]):
            what = f"{name}: two calls on the same inputs gave different bytes at {expected.case}"
            if number > 1:
                return incorrect("determinism", f"{what}; the sum's order varies, or a race", expected.case)
            hint = "an element is not written, memory is read before it is written, or the sum's order varies"
            return incorrect("poison", f"{what}; {hint}", expected.case)
    return None


def _check_spread(
    definition: Definition,
    solution: Solution,
    expected: Expected,
    first: Mapping[str, torch.Tensor],
    second: Mapping[str, torch.Tensor],
) -> Failure | None:
    judged = judge(definition, solution, expected, second)
    if isinstance(judged, Failure):
        return judged
    for name, value in first.items():
        limits = limits_for(definition, definition.dtype_of(name, expected.case.dtypes), solution.spec.math)
        if limits is None or limits.codes:
            continue  # the gates leave no room there
        spread = compare_rows(second[name], value, limits).rel_fro if value.numel() else 0.0
        allowed = max(limits.tau / 10, expected.e_base[name].rel_fro)
        if spread > allowed:
            what = f"{name}: two calls on the same inputs lie {spread:.3g} apart, more than {allowed:.3g}"
            return incorrect("spread", f"{what} at {expected.case}", expected.case)
    return None


def one_call(
    worker: WorkerProcess,
    buffers: SharedBuffers,
    index: int,
    definition: Definition,
    expected: Expected,
    poison: int | None,
    timeout_s: float,
    **mode: bool,
) -> dict[str, torch.Tensor] | Failure:
    """Make one call on a slot, which is filled before, and give back what it left, whatever that is."""
    fill_slot(buffers, index, definition, expected, poison)
    before = buffers.slot(index).clone()
    buffers.settle()
    failure = _call(worker, index, expected.case, timeout_s, mode)
    if failure is None:
        failure = check_memory(buffers, index, before, definition, expected.case)
    return read_outputs(buffers, index, definition) if failure is None else failure


def _call(worker: WorkerProcess, index: int, case: Case, timeout_s: float, mode: Mapping[str, Any]) -> Failure | None:
    try:
        reply = worker.request("call", slot=index, timeout_s=timeout_s, **mode)
    except WorkerTimeout as error:
        return Failure("TIMEOUT", f"the call did not return within {timeout_s:g} s at {case}", str(error), case=case)
    except WorkerDied as error:
        return Failure("RUNTIME_ERROR", f"the worker died during a call at {case}", str(error), case=case)
    if not reply.ok:
        reason = f"raised at {case}: {reply.summary}"
        return Failure(reply.failed_as, reason, reply.error, case=case, no_memory=reply.no_memory)
    if reply.mismatch is not None:
        dtype, what = reply.mismatch
        return Failure("INCORRECT_DTYPE" if dtype else "INCORRECT_SHAPE", f"{what} at {case}", gate="shape", case=case)
    return None


def check_memory(
    buffers: SharedBuffers, index: int, before: torch.Tensor, definition: Definition, case: Case
) -> Failure | None:
    """Every byte that is no output must be what it was: inputs, gaps between rows or columns of an output, guard bands."""
    after = buffers.slot(index).clone()
    writable = [
        plan for plan in buffers.plan.tensors if plan in buffers.plan.outputs or plan.name in definition.in_place
    ]
    for plan in writable:
        tensor_view(after, plan).copy_(tensor_view(before, plan))
    if torch.equal(before, after):
        return None
    position = int(torch.nonzero(before != after)[0])
    for plan in buffers.plan.tensors:
        if plan.offset <= position < plan.offset + plan.span:
            where = "a gap between its elements" if plan in writable else "an input"
            what = f"wrote to {plan.name}, {where}, at byte {position - plan.offset} at {case}"
            return incorrect("memory", what, case)
    nearest = min(
        buffers.plan.tensors, key=lambda plan: min(abs(position - plan.offset), abs(position - plan.offset - plan.span))
    )
    return incorrect("memory", f"wrote outside the tensors, near {nearest.name}, at {case}", case)


def read_outputs(buffers: SharedBuffers, index: int, definition: Definition) -> dict[str, torch.Tensor]:
    """A contiguous copy of every output in one slot, in-place ones included."""
    replaced = {target: source for source, target in definition.in_place.items()}
    return {
        name: buffers.tensor(index, replaced.get(name, name)).clone(memory_format=torch.contiguous_format)
        for name in definition.outputs
    }


def judge(
    definition: Definition,
    solution: Solution,
    expected: Expected,
    outputs: Mapping[str, torch.Tensor],
) -> dict[str, OutputVerdict] | Failure:
    """Compare the outputs of one call with the oracle: a verdict for each, or the failure.

    An element that no arithmetic in float32 gives any better refutes nobody (:mod:`tilegym_db.verify.conditioning`).
    """

    def check(outputs: Mapping[str, torch.Tensor]) -> dict[str, OutputVerdict]:
        return check_outputs(
            definition,
            expected.case.dtypes,
            expected.inputs,
            expected.outputs,
            outputs,
            expected.e_base,
            math=solution.spec.math,
            exact=expected.exact,
            conditioned=expected.conditioned,
        )

    large = any(value.numel() > SMALL_ELEMENTS for value in outputs.values())
    with _comparing if large else contextlib.nullcontext():
        verdicts = without_uncertain(definition, expected.inputs, expected.outputs, outputs, check)
    for name, verdict in verdicts.items():
        if verdict.gate is not None:
            return incorrect(verdict.gate, f"{verdict.reason} at {expected.case}", expected.case, name, verdicts)
    return verdicts


def same_bytes(one: torch.Tensor, two: torch.Tensor) -> bool:
    """True where two tensors of one dtype hold the same bytes, NaN payloads and signs of zero included."""
    return bool(torch.equal(one.reshape(-1).view(torch.uint8), two.reshape(-1).view(torch.uint8)))
