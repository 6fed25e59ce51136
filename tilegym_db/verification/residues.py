"""Successive sizes of each axis: mistakes at certain remainders of a size, such as in the part of a tile at its end.

Of 128 successive sizes, some leave any remainder by any divisor up to 128. So all remainders are tried, and not only those of
the tiles that a list names. Where results at fewer indices are parts of those at more, as along an independent axis or of a
causal prompt, one oracle serves all sizes: the contents of each are some of its rows. Elsewhere each size has an oracle, but the
error of the reference as written is only measured after a result is outside the bounds of one that rounds nothing.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tilegym_db.records import Definition
from tilegym_db.records.expressions import names_in, repaired
from tilegym_db.records.workload import Case
from tilegym_db.sandbox.shared_buffers import plan_slot
from tilegym_db.verification.expected import ExpectedCache, OracleCase, broken_constraint, make_oracle_case
from tilegym_db.verification.gates import EXACTLY
from tilegym_db.verification.inputs import draw_inputs
from tilegym_db.verification.oracle import as_written, at_indices, in_fp64, loops, oracle
from tilegym_db.verification.sequences import SequenceMemory, Step, resized, shared_memory, starting_at
from tilegym_db.verification.verifier import Failure
from tilegym_db.verification.worker_handle import WorkerHandle

SIZES = 128
"""Number of successive sizes, and the largest divisor all of whose remainders are tried."""
MAX_EXCUSED = 2
"""Maximum number of sizes of an axis that stock code may fail too."""
FEWEST = 8
"""Sizes that the constraints must allow, for an axis to be tried."""
LARGEST_START, LARGEST_START_OF_LOOP = 1 << 10, 1 << 4
"""Maximum first size; the second one if the reference has a loop, such as over tokens, which takes longer for each index."""
INTERPRETED = 2
"""Sizes of an axis in an interpreter, whose calls take up to a second. They lie above 64, so that there are several tiles."""
LARGEST_ELEMENTS = 1 << 16
"""Maximum elements of a tensor; a call and its comparison then take a few milliseconds."""
QUICK_S, TIMED_BASES = 0.01, 4
"""Seconds of a reference at the largest size that are few, and the sizes of the other axes of which the quickest are taken."""
SPARE = 64
"""Indices of the shared contents beyond the largest size, so that calls differ in the index that they begin at."""
AT_ONCE = 8
"""Sizes that are called in one request, each at other addresses. The next request has other sizes there."""
AXIS_S, ALL_S, COMPILED = 3.0, 15.0, 3
"""Seconds for one axis, without its slowest requests, which compile, and for all axes. A kernel that is compiled for each size
gets through some of them only. The harness counts its processor time, so that a busy machine does not cut sizes."""
REQUEST_S = 1.0
"""Seconds after which a request makes no further call. What is left of it comes in the next one."""
LONGEST_S = 45.0
"""Seconds for all axes by the clock."""
PLAIN_KINDS = ("normal", "uniform", "positive", "log_decay")
"""Kinds of drawn numbers of which some are such numbers too."""
PROBES = 3
"""Sizes at which parts of a larger result are compared with what the reference gives for them, before they serve as an oracle."""


def all_s(handle: WorkerHandle) -> float:
    """Return the seconds for all axes."""
    return min(ALL_S, ALL_S / AXIS_S * handle.limits.series_s)


def check_residues(
    handle: WorkerHandle,
    cases: Sequence[Case],
    seed: int,
    cache: ExpectedCache,
    excuses: Callable[[Failure, OracleCase], bool] | None = None,
) -> list[str] | Failure:
    """Call with successive sizes of each axis in a drawn order, and judge all results.

    Args:
        cases: its fuzz cases, which give the sizes of the other axes.
        excuses: returns True if stock code fails a case about as far, such as a row of one column.

    Returns:
        A line for each axis; or the first failure.
    """
    drawn, lines, began, spent = random.Random(f"residues {seed}"), list[str](), time.monotonic(), 0.0
    axes = list(handle.definition.var_axes)
    for axis in drawn.sample(axes, len(axes)):
        shapes = successive(handle, cases, axis, drawn)
        if handle.aborted or (spent >= all_s(handle) and not handle.interpret) or time.monotonic() - began > LONGEST_S:
            break
        if shapes and handle.interpret:
            larger = sorted(shapes)[len(shapes) // 2 :]
            shapes = {size: shapes[size] for size in drawn.sample(larger, min(INTERPRETED, len(larger)))}
        if shapes:
            run = _Run(handle, axis, shapes, drawn, cache, excuses)
            found = run.outcome()
            spent += run.seconds
            if isinstance(found, Failure):
                return found
            lines.append(f"sequence: {found} of {len(shapes)} successive sizes of {axis} from {min(shapes)} on")
    return lines


def successive(handle: WorkerHandle, cases: Sequence[Case], axis: str, drawn: random.Random) -> dict[int, Case]:
    """Return size -> a case, for successive sizes of one axis from a drawn one on; empty if the constraints allow few."""
    names = handle.definition.var_axes
    full = [case for case in cases if all(case.call.axes[name] for name in names)]
    small = sorted(full, key=lambda case: math.prod(case.call.axes[name] for name in names if name != axis))
    start = int((LARGEST_START_OF_LOOP if loops(handle.definition.reference) else LARGEST_START) ** drawn.random())
    bases = small[: len(small) // (8 if handle.interpret else 2) + 1]
    slow = dict[float, dict[int, Case]]()
    for first in (1,) if handle.interpret else dict.fromkeys((start, drawn.randint(1, SIZES), 1)):
        for base in drawn.sample(bases, min(FEWEST, len(bases))):
            sizes = range(first, first + SIZES)
            allowed = _allowed(handle, base, axis, sizes)
            if len(allowed) < SIZES:  # another axis may bound this one, or be a multiple of it
                beside = _allowed(handle, _beside(handle, base, axis, sizes[-1], drawn), axis, sizes)
                allowed = max(allowed, beside, key=len)
            if len(allowed) < FEWEST or max(allowed) <= first + SIZES // 2:
                continue
            seconds = _seconds_of_reference(handle, allowed[max(allowed)])
            slow[seconds] = {size: replace(case, seed=drawn.getrandbits(62)) for size, case in allowed.items()}
            if seconds < QUICK_S or len(slow) == TIMED_BASES:
                return slow[min(slow)]
    return slow[min(slow)] if slow else {}


def _allowed(handle: WorkerHandle, base: Case, axis: str, sizes: range) -> dict[int, Case]:
    found = {size: resized(handle, base, axis, size, LARGEST_ELEMENTS) for size in sizes}
    return {size: case for size, case in found.items() if case is not None}


def _beside(handle: WorkerHandle, base: Case, axis: str, size: int, drawn: random.Random) -> Case:
    """Return a case with a size of one axis, and with other axes changed as the constraints then require, if that is possible."""
    definition, call = handle.definition, base.call
    constraints = (*definition.constraints, *handle.solution.record.spec.constraints)
    fixed = {name: value for name, value in call.axes.items() if name not in definition.var_axes} | {axis: size}
    others = {name: call.axes[name] for name in definition.var_axes if name != axis}
    axes = repaired(constraints, others, fixed, call.dtypes, drawn)
    return replace(base, call=replace(call, axes={**call.axes, **axes}))


def _seconds_of_reference(handle: WorkerHandle, case: Case) -> float:
    """Return the processor seconds of a reference: it may loop over heads, or hold the scores of all pairs of positions."""
    inputs, began = draw_inputs(handle.definition, case, handle.device), time.thread_time()
    as_written(handle.definition, inputs)
    return time.thread_time() - began


@dataclass
class _Run:
    """Calls with successive sizes of one axis, all at the same addresses."""

    handle: WorkerHandle
    axis: str
    shapes: Mapping[int, Case]
    drawn: random.Random
    cache: ExpectedCache
    excuses: Callable[[Failure, OracleCase], bool] | None
    excused: int = 0
    seconds: float = 0.0
    """Processor seconds of this thread, and seconds that it waited for the worker."""

    def outcome(self) -> int | Failure:
        """Return the number of sizes that were judged, or the first failure."""
        definition, order = self.handle.definition, self.drawn.sample(list(self.shapes), len(self.shapes))
        steps, start = list[Step](), 0
        for number, size in enumerate(order):
            start = 0 if number % AT_ONCE == 0 else start
            plan = starting_at(plan_slot(definition, self.shapes[size]), start)
            steps.append(Step(self.shapes[size], plan, {}))
            start = plan.size
        with self.handle.mapping(shared_memory(self.handle, steps)) as buffers:
            memory = SequenceMemory(self.handle, buffers, steps)
            return memory.attach() or self._calls(memory, order)

    def _calls(self, memory: SequenceMemory, order: Sequence[int]) -> int | Failure:
        """Make a call for each size, several in one request, until time is up."""
        spent, judged, oracle_of = list[float](), 0, self._oracles(order)
        waiting, ready = list(range(len(order))), set[int]()
        axis_s = min(AXIS_S, self.handle.limits.series_s)
        while waiting:
            before, began = self.seconds, time.thread_time()
            for number in [number for number in waiting if number // AT_ONCE == waiting[0] // AT_ONCE]:
                if number not in ready and ready & {*waiting} and time.thread_time() - began > REQUEST_S:
                    break  # a slow oracle; the others come in the next request
                found = None if number in ready else oracle_of(order[number])
                if found is not None:
                    memory.steps[number] = replace(memory.steps[number], inputs=found.inputs, expected=found)
                    ready.add(number)
                elif number not in ready:
                    waiting.remove(number)
            batch = [number for number in waiting if number in ready]
            made = self._call(memory, batch) if batch else 0
            if isinstance(made, Failure):
                return made
            judged += made
            waiting = [number for number in waiting if number not in batch[:made]]
            self.seconds += time.thread_time() - began
            spent.append(self.seconds - before)
            if (
                self.handle.aborted
                or (batch and not made)
                or sum(spent) > all_s(self.handle)
                or _is_over(spent, axis_s)
            ):
                break
        return judged

    def _call(self, memory: SequenceMemory, batch: Sequence[int]) -> int | Failure:
        """Make the calls of one request, and return how many there was time for, or the failure of one."""
        how = f"at one of {len(memory.steps)} successive sizes of {self.axis}"
        began, working = time.monotonic(), time.thread_time()
        made = memory.play(batch, (), how, seconds=REQUEST_S)
        self.seconds += max(0.0, time.monotonic() - began - (time.thread_time() - working))
        for number in () if isinstance(made, Failure) else batch[:made]:
            # Judged by its own oracle, few results need the evaluations that excuse elements.
            if memory.judge([number], how, excused=False) is not None:
                failure = self._judge_alone(memory, number, how)
                if failure is not None:
                    return failure
        return made

    def _judge_alone(self, memory: SequenceMemory, number: int, how: str) -> Failure | None:
        """Judge a call by the oracle of its contents alone, and the error that the reference as written makes there."""
        step = memory.steps[number]
        alone = make_oracle_case(self.handle.definition, step.case, self.cache.device, inputs=step.inputs)
        memory.steps[number] = replace(step, expected=alone)
        failure = memory.judge([number], how)
        if failure is None or alone is None or self.excuses is None or self.excused >= MAX_EXCUSED:
            return failure
        if not self.excuses(failure, alone):
            return failure
        self.excused += 1
        return None

    def _oracles(self, order: Sequence[int]) -> Callable[[int], OracleCase | None]:
        """Return a function of a size that gives its case with the oracle; None if that proves nothing."""
        definition, device = self.handle.definition, self.cache.device
        whole = self._whole(max(order))
        starts = None if whole is None else starts_of_parts(definition, whole, self.axis, order, self.drawn)
        if whole is None:
            whole = make_oracle_case(definition, self.shapes[max(order)], device)

        def oracle_of(size: int) -> OracleCase | None:
            case = self.shapes[size]
            if whole is None:
                return make_oracle_case(definition, case, device)
            if starts is None:
                inputs = draw_inputs(definition, case, device)
                is_right = broken_constraint(definition, case.call.axes, inputs) is None
                return _as_strict(whole, case, inputs, oracle(definition, inputs)) if is_right else None
            start = 0 if len(starts) == 1 else self.drawn.randint(0, starts[-1] - size)
            part = part_of(definition, whole, case, self.axis, range(start, start + size))
            return part if broken_constraint(definition, case.call.axes, part.inputs) is None else None

        return oracle_of

    def _whole(self, largest: int) -> OracleCase | None:
        """Return a case with more indices than the largest size; None if there is none, or if no part of it can be a call."""
        definition = self.handle.definition
        if self.axis not in definition.divisible_axes and not may_be_parted(definition, self.axis):
            return None
        case = resized(self.handle, self.shapes[largest], self.axis, largest + SPARE, 2 * LARGEST_ELEMENTS)
        if case is None:
            return None
        return make_oracle_case(definition, replace(case, seed=self.drawn.getrandbits(62)), self.cache.device)


def _is_over(spent: Sequence[float], axis_s: float) -> bool:
    """Return True if the requests of an axis took its time. Those that compiled count as the quickest one."""
    kept = sorted(spent)[:-COMPILED]
    return bool(kept) and sum(kept) + COMPILED * kept[0] > axis_s


def _as_strict(
    whole: OracleCase, case: Case, inputs: Mapping[str, Any], outputs: Mapping[str, torch.Tensor]
) -> OracleCase:
    """Return a case whose bounds are those of a reference that rounds nothing."""
    return OracleCase(case, inputs, outputs, dict.fromkeys(outputs, EXACTLY), conditioned=whole.conditioned)


def may_be_parted(definition: Definition, axis: str) -> bool:
    """Return True if some indices of an axis are inputs of a call too, as far as the Definition says.

    Each output has the axis, and no tensor has it twice or in an expression. Inputs are floating-point numbers without an order
    along it: whole numbers may be ids or lengths.
    """
    specs = [spec for spec in (*definition.inputs.values(), *definition.outputs.values()) if spec.shape]
    entries = [entry for spec in specs for entry in spec.shape or () if isinstance(entry, str)]
    plain = all(axis not in names_in(entry)[0] for entry in entries if entry != axis)
    once = all((spec.shape or ()).count(axis) <= 1 for spec in specs)
    everywhere = all(axis in (spec.shape or ()) for spec in definition.outputs.values())
    drawn = [spec.kind for name, spec in definition.input_generators.items() if name in definition.tensor_inputs]
    bound = definition.saved or definition.sampled or definition.gathers or axis in definition.size_scalars.values()
    return plain and once and everywhere and not bound and all(kind in PLAIN_KINDS for kind in drawn)


def starts_of_parts(
    definition: Definition, whole: OracleCase, axis: str, sizes: Sequence[int], drawn: random.Random
) -> Sequence[int] | None:
    """Return where parts of a case may begin so that its results there are theirs; None if they are not.

    Along a declared independent axis that is anywhere. Else a few sizes are tried, with parts from anywhere and from the first
    index on: a causal prompt has the results of its beginning.
    """
    size_of_whole = whole.case.call.axes[axis]
    anywhere = range(size_of_whole + 1)
    if axis in definition.divisible_axes:
        return anywhere
    tensors = [whole.inputs[name] for name in definition.tensor_inputs]
    if not all(value.is_floating_point() and value.isfinite().all() for value in tensors):
        return None
    if any(value.dtype is not torch.float64 for value in whole.outputs.values()):
        return None
    for starts in (anywhere, range(1)):
        if all(
            _is_part(definition, whole, axis, size, drawn.randint(0, starts[-1] - size) if len(starts) > 1 else 0)
            for size in drawn.sample(list(sizes), min(PROBES, len(sizes)))
        ):
            return starts
    return None


def _is_part(definition: Definition, whole: OracleCase, axis: str, size: int, start: int) -> bool:
    """Return True if the results of a whole at some indices are those of these indices alone."""
    case = replace(whole.case, call=replace(whole.case.call, axes={**whole.case.call.axes, axis: size}))
    part = part_of(definition, whole, case, axis, range(start, start + size))
    if broken_constraint(definition, case.call.axes, part.inputs) is not None:
        return False
    alone = in_fp64(definition, part.inputs)
    return all(torch.allclose(part.outputs[name], value, rtol=1e-9, atol=1e-12) for name, value in alone.items())


def part_of(definition: Definition, whole: OracleCase, case: Case, axis: str, indices: range) -> OracleCase:
    """Return a case whose contents and results are those of another at some indices of an independent axis."""
    chosen = {axis: torch.tensor(indices, device=next(iter(whole.outputs.values())).device)}
    inputs = {**at_indices(definition, whole.inputs, chosen), **case.call.scalars}
    outputs = at_indices(definition, whole.outputs, chosen)
    return OracleCase(case, inputs, outputs, whole.e_base, whole.exact, whole.conditioned)
