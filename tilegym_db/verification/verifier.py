"""Verifies calls of one Solution: the harness fills shared memory, the worker calls, and the gates decide.

All checks run in the harness: contents, poison, guard bands, the oracle and the comparison. The module also has the
outcomes of verification, and the checks of random draws.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from tilegym_db.errors import RecordError, StoreError
from tilegym_db.records import Definition, Solution
from tilegym_db.records.definition import limits_for
from tilegym_db.records.hardware import CPU
from tilegym_db.records.trace import Correctness
from tilegym_db.records.verdicts import Status
from tilegym_db.records.workload import Case
from tilegym_db.sandbox.protocol import Reply
from tilegym_db.sandbox.shared_buffers import (
    SharedBuffers,
    SlotPlan,
    TensorPlan,
    each_once,
    fill_tensor,
    fill_with_garbage,
    same_bytes,
    tensor_view,
)
from tilegym_db.sandbox.situation import PLAIN, Situation
from tilegym_db.sandbox.worker import WorkerDied, WorkerProcess, WorkerTimeout
from tilegym_db.verification.comparison import check_outputs, check_sampled_outputs, is_undefined
from tilegym_db.verification.conditioning import excuse_ill_conditioned
from tilegym_db.verification.expected import LargeOracleCase, OracleCase
from tilegym_db.verification.gates import OutputComparison, compare_rows

# A comparison widens its output to fp64 several times, so only one large one runs at a time, to bound memory.
_comparing = threading.Lock()
SMALL_ELEMENTS = 1 << 22

COPIED_BYTES = 64 << 20
"""Bytes of a memory on a GPU up to which it is compared whole."""

POISON_NAN = 0xFF  # all-ones bytes are NaN in every floating dtype and -1 in every signed integer


def fill_slot(
    buffers: SharedBuffers, index: int, definition: Definition, expected: OracleCase, poison: int | None
) -> None:
    """Write guard bytes, inputs and poisoned outputs; ``poison`` is the byte to repeat, or None for random bytes."""
    slot = buffers.slot(index)
    fill_with_garbage(slot) if poison is None else slot.fill_(poison)
    for plan in buffers.plan.inputs:
        fill_tensor(tensor_view(slot, plan), expected.inputs[plan.name])


def verify_slot(
    worker: WorkerProcess,
    buffers: SharedBuffers,
    index: int,
    definition: Definition,
    solution: Solution,
    expected: OracleCase,
    *,
    calls: int = 2,
    situations: Sequence[Situation] = (),
    first_in: Situation = PLAIN,
    draws: int = 0,
    timeout_s: float,
) -> tuple[dict[str, OutputComparison], dict[str, torch.Tensor]] | Failure:
    """Call the Solution on one slot repeatedly and check the results by every gate.

    The first two calls find different poison in the outputs. A deterministic Solution must give the same bytes each time; the
    results of another must all pass and lie close together. The first call is made in ``first_in``, each one after it in the
    next of ``situations``, if there is one. For random draws, more calls with other random numbers follow until there are
    ``draws`` draws.

    Returns:
        The comparison and the (contiguous) value of every output, or the failure.
    """
    first = one_call(worker, buffers, index, definition, expected, POISON_NAN, timeout_s, first_in)
    judged = first if isinstance(first, Failure) else judge(definition, solution, expected, first)
    if isinstance(judged, Failure) and first_in != PLAIN:
        plain = one_call(worker, buffers, index, definition, expected, POISON_NAN, timeout_s)
        if not isinstance(plain, Failure) and not isinstance(judge(definition, solution, expected, plain), Failure):
            return in_situation(judged, first_in)
    if isinstance(first, Failure):
        return first
    if isinstance(judged, Failure):
        return judged
    for number in range(1, calls):
        poison = None if number == 1 else POISON_NAN
        situation = situations[number - 1] if number <= len(situations) else PLAIN
        again = one_call(worker, buffers, index, definition, expected, poison, timeout_s, situation)
        failure = (
            again if isinstance(again, Failure) else _check_repeat(definition, solution, expected, first, again, number)
        )
        if failure is not None and situation != PLAIN:
            plain = one_call(worker, buffers, index, definition, expected, poison, timeout_s)
            if (
                isinstance(plain, Failure)
                or _check_repeat(definition, solution, expected, first, plain, number) is None
            ):
                failure = in_situation(failure, situation)
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
    expected: OracleCase,
    first: Mapping[str, torch.Tensor],
    situation: Situation,
    *,
    timeout_s: float,
) -> Failure | None:
    """Check that a call gives the same bytes as before, after a call on other inputs of its shape and in another situation."""
    again = one_call(worker, buffers, 0, definition, expected, None, timeout_s, situation)
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
                "in turn",
                f"{what}; something is kept from call to call, or asked about the call ({situation})",
                expected.case,
            )
    return None


def _check_repeat(
    definition: Definition,
    solution: Solution,
    expected: OracleCase,
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
            hint = "an element is not written, memory is read before it is written, the sum's order varies, or a race"
            return incorrect("poison", f"{what}; {hint}", expected.case)
    return None


def _check_spread(
    definition: Definition,
    solution: Solution,
    expected: OracleCase,
    first: Mapping[str, torch.Tensor],
    second: Mapping[str, torch.Tensor],
) -> Failure | None:
    judged = judge(definition, solution, expected, second)
    if isinstance(judged, Failure):
        return judged
    for name, value in first.items():
        limits = limits_for(definition, definition.dtype_of(name, expected.case.call.dtypes), solution.spec.math)
        if limits is None or limits.codes:
            continue  # the gates accept no spread there
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
    expected: OracleCase,
    poison: int | None,
    timeout_s: float,
    situation: Situation = PLAIN,
) -> dict[str, torch.Tensor] | Failure:
    """Fill a slot, make one call on it in a situation, and return the outputs without comparing them."""
    fill_slot(buffers, index, definition, expected, poison)
    before = buffers.copy_of(index)
    buffers.settle()
    failure = _call(worker, index, expected.case, timeout_s, situation)
    if failure is None:
        failure = check_memory(buffers, index, before, definition, expected.case)
    return read_outputs(buffers, index, definition) if failure is None else failure


def _call(worker: WorkerProcess, index: int, case: Case, timeout_s: float, situation: Situation) -> Failure | None:
    try:
        reply = worker.request("call", slot=index, timeout_s=timeout_s, situation=vars(situation))
    except WorkerTimeout as error:
        return Failure("TIMEOUT", f"the call did not return within {timeout_s:g} s at {case}", str(error), case=case)
    except WorkerDied as error:
        return Failure("RUNTIME_ERROR", f"the worker died during a call at {case}", str(error), case=case)
    if not reply.ok:
        reason = f"raised at {case}: {reply.summary}"
        return Failure(reply.failed_as, reason, reply.error, case=case, no_memory=reply.no_memory)
    return mismatch_failure(reply, case)


def mismatch_failure(reply: Reply, case: Case) -> Failure | None:
    """Return the failure of a call whose returned value, or what it left of its arguments, has another form than it must."""
    if reply.mismatch is None:
        return None
    kind, what = reply.mismatch
    if kind == "argument":
        return incorrect("arguments", f"{what} at {case}; a call may only write its outputs", case)
    return Failure(
        "INCORRECT_DTYPE" if kind == "dtype" else "INCORRECT_SHAPE", f"{what} at {case}", gate="shape", case=case
    )


def in_situation(failure: Failure, situation: Situation) -> Failure:
    """Return the failure of a call that does what it must in a plain call, and not in this situation."""
    what = f"only in the situation that it was called in ({situation}): {failure.reason}"
    return replace(failure, reason=what, gate=failure.gate if failure.gate == "arguments" else "situation")


def check_memory(
    buffers: SharedBuffers, index: int, before: torch.Tensor, definition: Definition, case: Case
) -> Failure | None:
    """Check that no byte outside the outputs changed: inputs, gaps between rows or columns of an output, guard bands."""
    writable = written_tensors(buffers.plan, definition)
    position = changed_byte(before, buffers.slot(index), writable)
    if position is None:
        return None
    within = [plan for plan in buffers.plan.tensors if plan.offset <= position < plan.offset + plan.span]
    if within:
        # Inputs of one memory interleave: one may lie in the gaps of another.
        plan = next((plan for plan in within if _holds(before, plan, position)), within[0])
        where = "a gap between its elements" if plan in writable else "an input"
        what = f"wrote to {plan.name}, {where}, at byte {position - plan.offset} at {case}"
        return incorrect("memory", what, case)
    nearest = min(
        buffers.plan.tensors, key=lambda plan: min(abs(position - plan.offset), abs(position - plan.offset - plan.span))
    )
    return incorrect("memory", f"wrote outside the tensors, near {nearest.name}, at {case}", case)


def written_tensors(plan: SlotPlan, definition: Definition) -> list[TensorPlan]:
    """Return the tensors of a call that it may write: its outputs, and inputs that it replaces."""
    return [one for one in plan.tensors if one in plan.outputs or one.name in definition.in_place]


def changed_byte(before: torch.Tensor, now: torch.Tensor, writable: Iterable[TensorPlan]) -> int | None:
    """Return the first byte of a memory that differs from a copy, without the elements of some tensors; None if none does.

    Only the memory of these tensors is copied, as a call may have hundreds of megabytes of inputs. A GPU copies a little memory
    whole, and answers one question instead of one for each gap between tensors.
    """
    plans = sorted(writable, key=lambda plan: plan.offset)
    if before.device.type != CPU and before.numel() <= COPIED_BYTES and is_same_outside(before, now, plans):
        return None
    begin = 0
    while begin < before.numel():
        # What lies up to the next tensor that may change, and then all such tensors that reach into each other.
        end = plans[0].offset if plans else before.numel()
        if not torch.equal(before[begin:end], now[begin:end]):
            return begin + int(torch.nonzero(before[begin:end] != now[begin:end])[0])
        begin, together = end, list[TensorPlan]()
        while plans and plans[0].offset <= end:
            together.append(plans.pop(0))
            end = max(end, together[-1].offset + together[-1].span)
        if any(each_once(tensor_view(before, plan)).nbytes != plan.span for plan in together) or len(together) > 1:
            after = now[begin:end].clone()
            for plan in together:
                there = replace(plan, offset=plan.offset - begin)
                tensor_view(after, there).copy_(tensor_view(before, plan))
            if not torch.equal(before[begin:end], after):
                return begin + int(torch.nonzero(before[begin:end] != after)[0])
        begin = end
    return None


def is_same_outside(before: torch.Tensor, now: torch.Tensor, writable: Iterable[TensorPlan]) -> bool:
    """Return True if a memory equals a copy beside the elements of some tensors."""
    after = now.clone()
    for plan in writable:
        fill_tensor(tensor_view(after, plan), tensor_view(before, plan))
    return bool(torch.equal(before, after))


def _holds(slot: torch.Tensor, plan: TensorPlan, position: int) -> bool:
    """Return True if a byte of a slot belongs to an element of the tensor."""
    marks = torch.ones_like(slot)
    each_once(tensor_view(marks, plan)).zero_()
    return not marks[position]


def read_outputs(buffers: SharedBuffers, index: int, definition: Definition) -> dict[str, torch.Tensor]:
    """Return a contiguous copy of every output in one slot, including in-place ones."""
    return outputs_in(buffers.slot(index), buffers.plan, definition)


def outputs_in(memory: torch.Tensor, plan: SlotPlan, definition: Definition) -> dict[str, torch.Tensor]:
    """Return a contiguous copy of every output of a call whose tensors lie in a memory, including in-place ones."""
    replaced = {target: source for source, target in definition.in_place.items()}
    tensors = {one.name: tensor_view(memory, one) for one in plan.tensors}
    return {
        name: tensors[replaced.get(name, name)].clone(memory_format=torch.contiguous_format)
        for name in definition.outputs
    }


def judge(
    definition: Definition,
    solution: Solution,
    expected: OracleCase,
    outputs: Mapping[str, torch.Tensor],
    *,
    excused: bool = True,
) -> dict[str, OutputComparison] | Failure:
    """Compare the outputs of one call with the oracle; return a comparison for each, or the failure.

    Elements that are ill-conditioned in float32 do not fail the check (:mod:`tilegym_db.verification.conditioning`) unless
    ``excused`` is False: to find them takes ten evaluations of the oracle.
    """

    def check(outputs: Mapping[str, torch.Tensor]) -> dict[str, OutputComparison]:
        return check_outputs(
            definition,
            expected.case.call.dtypes,
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
        verdicts = (
            excuse_ill_conditioned(
                definition,
                expected.inputs,
                expected.outputs,
                outputs,
                check,
                math=solution.spec.math,
                uncertainties=expected.uncertainties,
            )
            if excused
            else check(outputs)
        )
    for name, verdict in verdicts.items():
        if verdict.gate is not None:
            return incorrect(verdict.gate, f"{verdict.reason} at {expected.case}", expected.case, name, verdicts)
    return verdicts


def judge_large(
    definition: Definition, solution: Solution, large: LargeOracleCase, outputs: Mapping[str, torch.Tensor]
) -> Failure | None:
    """Return a failure if a large call left poison in an output, or is wrong at the compared rows."""
    case = large.given.case
    for name, value in outputs.items():
        words = {2: torch.int16, 4: torch.int32, 8: torch.int64}.get(value.element_size())
        if words is None or not value.is_floating_point() or name in definition.in_place.values():
            continue
        if bool((value.view(words) == -1).any()):
            return incorrect("poison", f"{name}: an element is not written at {case}", case)
    judged = judge(definition, solution, large.compared, large.outputs_at(definition, outputs))
    if isinstance(judged, Failure):
        return replace(judged, reason=f"{judged.reason}, some rows of {case}", case=case)
    return None


# ---- outcome --------------------------------------------------------------------------------------

CANNOT_VERIFY = (RecordError, StoreError, torch.OutOfMemoryError)
"""Errors of a workload without an oracle, or without memory for it here; other workloads can go on."""


@dataclass(frozen=True)
class Failure:
    """A failed verification: the status, the gate, the case, and a reason for the author."""

    status: Status
    reason: str
    log: str = ""
    gate: str | None = None
    correctness: Correctness | None = None
    case: Case | None = None
    output: str | None = None
    """Name of the compared output that failed; ``verdict`` has its comparison."""
    verdict: OutputComparison | None = None
    excused: bool = False
    """True if stock code in the same dtype fails the same case."""
    no_memory: bool = False
    """True if the GPU had no memory left, which other workers may have held."""


@dataclass
class WorstErrors:
    """The worst figures over the cases that passed."""

    rel_fro: float = 0.0
    worst_row_rel: float = 0.0
    max_abs: float = 0.0
    matched_ratio: float = 1.0
    cases: int = 0
    deterministic: bool = True
    slices: int = 0
    """Slices that had the same bits alone as in their call."""

    def add(self, outputs: Mapping[str, OutputComparison]) -> None:
        """Include one passed case."""
        self.cases += 1
        for verdict in outputs.values():
            self.rel_fro = max(self.rel_fro, verdict.rel_fro)
            self.worst_row_rel = max(self.worst_row_rel, verdict.worst_row_rel)
            self.max_abs = max(self.max_abs, verdict.max_abs)
            self.matched_ratio = min(self.matched_ratio, verdict.matched_ratio)

    def correctness(self, oracle_name: str = "fp64") -> Correctness:
        """Return the figures as a Trace stores them."""
        return Correctness(
            rel_fro=_finite(self.rel_fro),
            worst_row_rel=_finite(self.worst_row_rel),
            max_abs=_finite(self.max_abs),
            matched_ratio=self.matched_ratio,
            deterministic=self.deterministic,
            oracle=oracle_name,
            cases=self.cases,
        )


def incorrect(
    gate: str,
    reason: str,
    case: Case,
    output: str | None = None,
    verdicts: Mapping[str, OutputComparison] | None = None,
) -> Failure:
    """Return the failure of a wrong result: its gate, reason, and figures if an output was compared."""
    worst = WorstErrors()
    worst.add(verdicts or {})
    if verdicts is None:
        correctness = Correctness(gate=gate, cases=1)
    else:
        correctness = Correctness(
            rel_fro=_finite(worst.rel_fro),
            worst_row_rel=_finite(worst.worst_row_rel),
            max_abs=_finite(worst.max_abs),
            matched_ratio=worst.matched_ratio,
            gate=gate,
            cases=1,
        )
    verdict = verdicts[output] if verdicts and output else None
    return Failure("INCORRECT_NUMERICAL", reason, "", gate, correctness, case, output, verdict)


def cannot_verify(error: BaseException) -> Failure:
    """Return the failure for one of the errors in :data:`CANNOT_VERIFY`."""
    no_memory = isinstance(error, torch.OutOfMemoryError)
    return Failure("UNSUPPORTED", f"cannot be verified on this machine: {error}", no_memory=no_memory)


def not_set_up(failure: Failure) -> Failure:
    """Turn the failure of a worker before it loads a source into UNSUPPORTED, because the Solution is not the cause."""
    return replace(failure, status="UNSUPPORTED", reason=f"this machine could not set up a worker: {failure.reason}")


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


# ---- draws ----------------------------------------------------------------------------------------
# Operators that draw at random are called again with other random numbers, and all draws are checked together.

DRAWS_PER_CALL = 64
"""Wanted draws per additional call at least, which limits the number of calls; one call is always made."""
MAX_DRAWN_AT_ONCE = 1 << 14
"""Maximum input elements of a cheap call, of which more are made if there are few rows."""
_SHARE_OF_SMALL = 16
"""With few rows, calls are made until there is at least this fraction (1 / 16) of the wanted draws."""
PROBED_ROWS = 8
"""Rows whose random number is changed alone, one call per row; no other row may then draw another index."""
LAST_BELOW_ONE = 1 - 2.0**-24
"""The last float32 below 1; a product with a sum may round up to the whole sum."""

Outputs = Mapping[str, torch.Tensor]


def calls_for(rows: int, draws: int, elements: int) -> int:
    """Return the number of additional calls, with this many rows and input elements, for about this many draws."""
    rows = max(rows, 1)
    calls = min(-(-draws // rows), draws // DRAWS_PER_CALL)
    if elements <= MAX_DRAWN_AT_ONCE:
        calls = max(calls, -(-draws // (rows * _SHARE_OF_SMALL)))
    return max(1, calls)


def judge_draws(
    definition: Definition,
    expected: OracleCase,
    first: Outputs,
    call: Callable[[OracleCase], dict[str, torch.Tensor] | Failure],
    draws: int,
    *,
    deterministic: bool = True,
) -> Failure | None:
    """Return a failure if the draws of several calls are not those of a correct sampler; None at once if nothing is drawn.

    One more call gets 0 and the largest number below 1 in turn: its draws must be allowed, and are not counted. Further calls
    change the number of a single row; they are not made if the Solution is not deterministic.

    Args:
        first: the outputs of the first call.
        call: makes a call with the inputs of a case.
        draws: wanted number of draws; 0 skips the check.
    """
    if not definition.sampled or not draws or is_undefined(definition, expected.inputs):
        return None
    rows = min(first[name].numel() for name in definition.sampled)
    if not rows:
        return None
    elements = sum(value.numel() for value in expected.inputs.values() if isinstance(value, torch.Tensor))
    outputs: list[Outputs] = [first]
    for number in range(calls_for(rows, draws, elements)):
        found = call(_with_numbers(definition, expected, number))
        if isinstance(found, Failure):
            return found
        outputs.append(found)
    failure = _judge(definition, expected, outputs)
    if failure is not None:
        return failure
    at_the_ends = call(_with_numbers(definition, expected, None))
    if isinstance(at_the_ends, Failure):
        return at_the_ends
    failure = _judge(definition, expected, [at_the_ends], "support")
    return failure or (_row_by_row(definition, expected, first, call) if deterministic else None)


def _row_by_row(
    definition: Definition,
    expected: OracleCase,
    first: Outputs,
    call: Callable[[OracleCase], dict[str, torch.Tensor] | Failure],
) -> Failure | None:
    """Return a failure if another random number for one row changes the draw of any other row.

    Any row may use any number, and may compute its index from it in any way, but rows must be independent.
    """
    for name, sampled in definition.sampled.items():
        given = expected.inputs[sampled.uniforms]
        rows = given.numel()
        chosen = torch.randperm(rows, generator=torch.Generator().manual_seed(expected.case.seed))[:PROBED_ROWS]
        for row in chosen.tolist() if rows > 1 else ():
            other = given.clone()
            other.view(-1)[row] = (other.view(-1)[row] + 0.5) % 1
            found = call(replace(expected, inputs={**expected.inputs, sampled.uniforms: other}))
            if isinstance(found, Failure):
                return found
            changed = int((found[name] != first[name]).sum())
            if changed > 1:
                what = f"{name}: another random number for row {row} alone changes what {changed} rows draw"
                return incorrect("distribution", f"{what} at {expected.case}", expected.case)
    return None


def _judge(
    definition: Definition, expected: OracleCase, outputs: list[Outputs], gate: str | None = None
) -> Failure | None:
    verdicts = check_sampled_outputs(definition, expected.inputs, expected.outputs, outputs)
    for name, verdict in verdicts.items():
        if verdict.gate is not None and gate in (None, verdict.gate):
            return incorrect(verdict.gate, f"{verdict.reason} at {expected.case}", expected.case, name, verdicts)
    return None


def _with_numbers(definition: Definition, expected: OracleCase, number: int | None) -> OracleCase:
    """Return the case with other random numbers, which depend on its seed; None sets the ends of their range."""
    inputs = dict(expected.inputs)
    for name in {sampled.uniforms for sampled in definition.sampled.values()}:
        given = inputs[name]
        if number is None:
            inputs[name] = (
                torch.arange(given.numel(), device=given.device).remainder(2).to(given.dtype) * LAST_BELOW_ONE
            )
        else:
            generator = torch.Generator(given.device).manual_seed((expected.case.seed * 1009 + number + 1) % (1 << 62))
            inputs[name] = torch.rand(given.shape, generator=generator, dtype=given.dtype, device=given.device)
    return replace(expected, inputs=inputs)
