"""Sequences of calls as models make them, in one process: many shapes, lengths that grow, threads, long runs and chains.

A kernel that keeps something from call to call may be right in every single call of a verification. Here one memory holds the
tensors of many calls, and the worker makes them in a drawn order. The harness judges some of them, also drawn.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from tilegym_db.errors import RecordError
from tilegym_db.records import Definition
from tilegym_db.records.call import scalars_with_axes
from tilegym_db.records.workload import Case
from tilegym_db.sandbox.protocol import Reply
from tilegym_db.sandbox.shared_buffers import (
    SharedBuffers,
    SlotPlan,
    fill_with_garbage,
    plan_slot,
    same_bytes,
    tensor_view,
)
from tilegym_db.verification.expected import ExpectedCache, OracleCase, make_oracle_case
from tilegym_db.verification.inputs import draw_inputs
from tilegym_db.verification.verifier import (
    Failure,
    changed_byte,
    incorrect,
    judge,
    mismatch_failure,
    outputs_in,
    written_tensors,
)
from tilegym_db.verification.worker_handle import WorkerHandle

SHAPES, PAIRS = 300, 6
"""Shapes in one process, and pairs among them, of a size and the next larger one, whose results are judged."""
SHAPES_S = 3.0
"""Seconds for all shapes: a kernel that is compiled for each gets through some of them only."""
DRAWN_S = 1.0
"""Processor seconds for drawing their contents, which takes a tenth of it unless inputs are drawn jointly."""
LARGEST_SIZE, LARGEST_ELEMENTS = 1000, 1 << 15
"""Maximum size of the axis, and maximum elements of a tensor; calls of this size take the time of a launch."""
LONG_RUN_CALLS, LONG_RUN_S, LONG_RUN_SHAPES = 30_000, 0.6, 2
IN_A_ROW = 2, 40
"""Range of the number of calls of a shape before the other one has its turn."""
WARM_UP_CALLS = 200
"""Calls after which memory should not grow any more."""
THREADS = 4, 8
"""Range of the number of threads that call at the same time, as in a server with a model for several users."""
CHAINED_CALLS = 8
EQUAL_PAIRS = 2
"""Pairs of shapes whose largest input has as many elements."""

BLOCKS_PER_CALL, BLOCKS, DEVICE_BYTES, HOST_BYTES = 0.5, 4000, 1 << 16, 64 << 20
"""Growth of memory that a long run may cause: Python's blocks per call, or these at least, and bytes on the device and host.

A call that keeps nothing needs no more memory than the call before. Languages fill caches, and the host's allocators keep some
of what is freed.
"""

STEADY_PER_CALL, STEADY_BLOCKS = 0.02, 256
"""Growth in both halves of a long run above which it is a leak: blocks per call, and these at least."""
STEADY_BYTES_PER_CALL, STEADY_BYTES = 1.0, 1 << 15
"""The same bounds in bytes that the C library has handed out. They show one object that grows."""


def check_sequences(
    handle: WorkerHandle, cases: Sequence[Case], seed: int, cache: ExpectedCache
) -> list[str] | Failure:
    """Make all sequences, in a worker that has the source loaded.

    Args:
        cases: its fuzz cases, which give the sizes of the other axes.

    Returns:
        A line for each sequence that was judged; or the first failure.
    """
    drawn = random.Random(f"sequences {seed}")
    shapes = _many_shapes(handle, cases, drawn, cache)
    if isinstance(shapes, Failure):
        return shapes
    chain = _chain(handle, cases, drawn, cache)
    if isinstance(chain, Failure):
        return chain
    equal = _equal_sizes(handle, cases, drawn, cache)
    return equal if isinstance(equal, Failure) else [*shapes, *chain, *equal]


T = TypeVar("T")


def _while_wanted(handle: WorkerHandle, items: Iterable[T]) -> Iterator[T]:
    """Yield items until the worker is aborted because the Solution has failed elsewhere; the next request then says so."""
    return itertools.takewhile(lambda _: not handle.aborted, items)


# ---- memory of a sequence -------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One call of a sequence: its case, the positions of its tensors, its contents, and what it must give if it is judged."""

    case: Case
    plan: SlotPlan
    inputs: Mapping[str, Any]
    expected: OracleCase | None = None


@dataclass
class SequenceMemory:
    """Shared memory with the tensors of all steps. Steps may share addresses; then only one of them is filled at a time."""

    handle: WorkerHandle
    buffers: SharedBuffers
    steps: list[Step]

    def attach(self) -> Failure | None:
        """Map the memory in the worker, with one slot per step."""
        return self.handle.attach(self.buffers, *(step.case for step in self.steps))

    def play(
        self, order: Sequence[int], judged: Iterable[int], how: str = "", *, threads: int = 1, seconds: float = math.inf
    ) -> int | Failure:
        """Fill the steps of ``order``, call each once, and judge those in ``judged`` that time was left for.

        Returns:
            The number of calls; or the failure of a judged call, or of a call that wrote to other memory than its outputs.
        """
        self.fill(order)
        before = self.buffers.copy_of(0)
        reply = self.repeat(order, len(order), threads=threads, seconds=seconds)
        if isinstance(reply, Failure):
            return reply
        calls = min(whole_number(reply, "calls"), len(order))
        made = order[:calls] if threads == 1 else order
        failure = self._check_memory(before, order) or self.judge([one for one in made if one in set(judged)], how)
        return calls if failure is None else failure

    def fill(self, numbers: Sequence[int]) -> None:
        """Write the inputs of some steps, and garbage into their outputs."""
        for number in numbers:
            step = self.steps[number]
            for plan in step.plan.outputs:
                fill_with_garbage(self.buffers.memory[plan.offset : plan.offset + plan.span])
        for number in numbers:
            step = self.steps[number]
            for plan in step.plan.inputs:
                if plan.name in step.inputs:
                    tensor_view(self.buffers.memory, plan).copy_(step.inputs[plan.name])
        self.buffers.settle()

    def repeat(
        self,
        order: Sequence[int],
        count: int,
        *,
        threads: int = 1,
        seconds: float = math.inf,
        watched: int | None = None,
    ) -> Reply | Failure:
        """Make ``count`` calls in this order, again and again; see :meth:`WorkerHandle.repeat_calls`."""
        reply = self.handle.repeat_calls(order, count, threads=threads, seconds=seconds, watched=watched)
        return reply if isinstance(reply, Failure) else mismatch_failure(reply, self.steps[order[0]].case) or reply

    def judge(self, numbers: Iterable[int], how: str, *, excused: bool = True) -> Failure | None:
        """Compare the outputs of these steps with the oracle; see :func:`tilegym_db.verification.verifier.judge`."""
        for number in numbers:
            expected = self.steps[number].expected
            if expected is not None:
                definition, record = self.handle.definition, self.handle.solution.record
                found = judge(definition, record, expected, self.outputs(number), excused=excused)
                if isinstance(found, Failure):
                    return replace(found, gate="sequence", reason=f"{how}: {found.reason}")
        return None

    def compare(self, known: Mapping[int, Mapping[str, torch.Tensor]], how: str) -> Failure | None:
        """Check that steps left the same bytes as before; the outputs of a Solution that is not deterministic may differ."""
        if not self.handle.solution.record.spec.deterministic:
            return None
        for number, before in known.items():
            after, case = self.outputs(number), self.steps[number].case
            for name, value in before.items():
                if not same_bytes(value, after[name]):
                    return incorrect("sequence", f"{how}: {name} has other bytes than in a call before at {case}", case)
        return None

    def replace_first_inputs(self, numbers: Sequence[int], drawn: random.Random, cache: ExpectedCache) -> None:
        """Give judged steps other contents (:func:`other_activations`)."""
        for number in numbers:
            expected = self.steps[number].expected
            assert expected is not None
            again = other_activations(self.handle.definition, expected, drawn, cache)
            self.steps[number] = replace(self.steps[number], inputs=again.inputs, expected=again)

    def outputs(self, number: int) -> dict[str, torch.Tensor]:
        """Return a contiguous copy of the outputs of a step, including in-place ones."""
        return outputs_in(self.buffers.memory, self.steps[number].plan, self.handle.definition)

    def _check_memory(self, before: torch.Tensor, numbers: Sequence[int]) -> Failure | None:
        plans = [self.steps[number].plan for number in numbers]
        writable = [one for plan in plans for one in written_tensors(plan, self.handle.definition)]
        position = changed_byte(before, self.buffers.memory, writable)
        if position is None:
            return None
        nearest = min(numbers, key=lambda number: _distance(self.steps[number].plan, position))
        case = self.steps[nearest].case
        return incorrect("memory", f"wrote outside of its outputs in a sequence of calls, near {case}", case)


def _distance(plan: SlotPlan, position: int) -> int:
    return min(max(one.offset - position, position - one.offset - one.span, 0) for one in plan.tensors)


def _at(plan: SlotPlan, starts: Mapping[str, int], size: int) -> SlotPlan:
    """Return a plan of another size whose tensors begin at other bytes, by name."""
    inputs, outputs = (
        tuple(replace(one, offset=starts[one.name]) for one in part) for part in (plan.inputs, plan.outputs)
    )
    return SlotPlan(inputs, outputs, size)


def starting_at(plan: SlotPlan, start: int) -> SlotPlan:
    """Return a plan whose tensors lie ``start`` bytes further."""
    return _at(plan, {one.name: one.offset + start for one in plan.tensors}, plan.size + start)


def _like(plan: SlotPlan, larger: SlotPlan) -> SlotPlan:
    """Return a plan whose tensors begin where those of a larger call do."""
    return _at(plan, {one.name: one.offset for one in larger.tensors}, larger.size)


def shared_memory(handle: WorkerHandle, steps: Sequence[Step]) -> SharedBuffers:
    """Return memory for all steps, filled with garbage."""
    size = max(step.plan.size for step in steps)
    plans = [SlotPlan(step.plan.inputs, step.plan.outputs, size) for step in steps]
    buffers = SharedBuffers(SlotPlan((), (), size), 1, handle.device, plans)
    fill_with_garbage(buffers.memory)
    return buffers


def whole_number(reply: Reply, name: str) -> int:
    """Return a whole number of a reply; 0 for anything else."""
    value = reply.content.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


# ---- many shapes ----------------------------------------------------------------------------------
# Hundreds of shapes that differ in the size of one axis, as prompts do, and then more rounds on the same memory.


def _many_shapes(
    handle: WorkerHandle, cases: Sequence[Case], drawn: random.Random, cache: ExpectedCache
) -> list[str] | Failure:
    axis, shapes = shapes_along(handle, cases, drawn)
    pairs = drawn_pairs(sorted(shapes), drawn)
    lower, upper = (
        {size: expected for size in _while_wanted(handle, sizes) if (expected := cache.get(shapes[size])) is not None}
        for sizes in (pairs, pairs.values())
    )
    if not lower:
        return []
    steps, start = list[Step](), 0
    for low, high in pairs.items():
        larger = starting_at(plan_slot(handle.definition, shapes[high]), start)
        smaller = _like(plan_slot(handle.definition, shapes[low]), larger)
        for size, plan, judged in ((low, smaller, lower), (high, larger, upper)):
            if size in judged:
                steps.append(Step(shapes[size], plan, judged[size].inputs, judged[size]))
        start = larger.size
    others, began = [size for size in shapes if size not in {*pairs, *pairs.values()}], time.thread_time()
    for size in _while_wanted(handle, others):
        if time.thread_time() - began > DRAWN_S:
            break
        plan = starting_at(plan_slot(handle.definition, shapes[size]), start)
        steps.append(Step(shapes[size], plan, draw_inputs(handle.definition, shapes[size], handle.device)))
        start = plan.size
    with handle.mapping(shared_memory(handle, steps)) as buffers:
        memory = SequenceMemory(handle, buffers, steps)
        outcome = memory.attach() or _rounds(memory, axis, {*lower}, {*upper}, drawn, cache)
    return outcome


def _rounds(
    memory: SequenceMemory, axis: str, lower: set[int], upper: set[int], drawn: random.Random, cache: ExpectedCache
) -> list[str] | Failure:
    """Make the rounds. The tensors of the sizes in ``upper`` lie where those of the next smaller size in ``lower`` do."""
    sizes = [step.case.call.axes[axis] for step in memory.steps]
    first = [number for number, size in enumerate(sizes) if size in lower]
    second = [number for number, size in enumerate(sizes) if size in upper]
    everything = [number for number, size in enumerate(sizes) if size not in upper]
    drawn.shuffle(everything)
    shapes = memory.play(
        everything, first, "after calls of other shapes", seconds=min(SHAPES_S, memory.handle.limits.series_s)
    )
    if isinstance(shapes, Failure):
        return shapes
    alone = {number: memory.outputs(number) for number in everything[:shapes] if number not in first}
    failure = memory.play(second, second, "at the addresses of calls of a smaller size") if second else None
    if isinstance(failure, Failure):
        return failure
    failure = memory.play(first, ())
    memory.replace_first_inputs(first, drawn, cache)
    if not isinstance(failure, Failure):
        failure = memory.play(first, first, "with other first inputs and the same last ones")
    if isinstance(failure, Failure):
        return failure
    threads = drawn.randint(*THREADS)
    failure = memory.play([*alone, *first], first, f"called by {threads} threads", threads=threads)
    if not isinstance(failure, Failure):
        failure = memory.compare(alone, f"called by {threads} threads")
    if isinstance(failure, Failure):
        return failure
    calls = _long_run(memory, drawn.sample(first, min(LONG_RUN_SHAPES, len(first))), drawn)
    return (
        calls if isinstance(calls, Failure) else [f"sequence: {shapes} shapes along {axis}; {calls} calls of a shape"]
    )


def _long_run(memory: SequenceMemory, slots: Sequence[int], drawn: random.Random) -> int | Failure:
    """Return the number of calls of a few shapes that need no more and more memory, and stay right to the end."""
    handle, how = memory.handle, "in a long run of calls"
    memory.fill(slots)
    repeats = handle.solution.record.spec.deterministic and not handle.definition.in_place
    # Watched like the run itself: a GPU loads the code of a comparison when it is first made.
    warm = memory.repeat(slots, WARM_UP_CALLS, seconds=LONG_RUN_S, watched=drawn.getrandbits(62) if repeats else None)
    if isinstance(warm, Failure):
        return warm
    before = handle.ask("memory", handle.limits.call_s)
    if isinstance(before, Failure):
        return before
    on_host, wanted = handle.memory_bytes(), drawn.randint(LONG_RUN_CALLS * 3 // 4, LONG_RUN_CALLS)
    made, reports, differing = list[int](), [before.content], whole_number(warm, "differing")
    in_a_row = [slot for slot in slots for _ in range(drawn.randint(*IN_A_ROW))]
    for _ in range(2):
        watched = drawn.getrandbits(62) if repeats else None
        run = memory.repeat(in_a_row, wanted // 2, seconds=LONG_RUN_S / 2, watched=watched)
        if isinstance(run, Failure):
            return run
        differing += whole_number(run, "differing")
        after = handle.ask("memory", handle.limits.call_s)
        if isinstance(after, Failure):
            return after
        made.append(max(1, whole_number(run, "calls")))
        reports.append(after.content)
    calls, case = sum(made), memory.steps[slots[0]].case
    if differing:
        what = f"{how}: {differing} of {calls} calls gave other bytes than the first ones on the same inputs at {case}"
        return incorrect("sequence", what, case)
    grown = growth(calls, reports[0], reports[-1], handle.memory_bytes() - on_host) or steady_growth(made, reports)
    if grown is not None:
        return Failure(
            "REJECTED", f"{grown}: it keeps something of each call at {case}", gate="memory growth", case=case
        )
    if not handle.definition.in_place:  # otherwise, each call has changed the inputs of the next
        failure = memory.judge(slots, how)
        if failure is not None:
            return failure
    last = memory.play(slots, slots, how)
    return last if isinstance(last, Failure) else calls


def growth(calls: int, before: object, after: object, host_bytes: int) -> str | None:
    """Return a sentence if memory grew with the calls, or None.

    Args:
        before: the worker's report: live bytes on the device, and Python's blocks.
        after: the same after the calls.
        host_bytes: growth of the memory of the worker's processes, as the harness reads it.
    """
    then, now = (report if isinstance(report, dict) else {} for report in (before, after))
    on_device, blocks = (now.get(name, 0) - then.get(name, 0) for name in ("device_bytes", "blocks"))
    if on_device > DEVICE_BYTES:
        return f"{calls} calls left {on_device} more bytes in use on the device"
    if blocks > max(BLOCKS_PER_CALL * calls, BLOCKS):
        return f"{calls} calls left {blocks} more blocks of memory in use by Python"
    if host_bytes > HOST_BYTES:
        return f"{calls} calls left {host_bytes >> 20} MiB more of memory in use"
    return None


def steady_growth(calls: Sequence[int], reports: Sequence[object]) -> str | None:
    """Return a sentence if Python's blocks grew in every part of a run, as leaks do and caches that fill up do not; or None.

    Args:
        reports: the worker's reports, one before each part and one after the last.
    """
    for what, name, per_call, least in (
        ("blocks of memory in use by Python", "blocks", STEADY_PER_CALL, STEADY_BLOCKS),
        ("bytes of memory in use", "bytes", STEADY_BYTES_PER_CALL, STEADY_BYTES),
    ):
        found = [report.get(name, 0) if isinstance(report, dict) else 0 for report in reports]
        grown = [after - before for before, after in itertools.pairwise(found)]
        if all(more > max(per_call * count, least) for count, more in zip(calls, grown, strict=True)):
            return f"{sum(calls)} calls left {sum(grown)} more {what}, in each half of them"
    return None


def shapes_along(handle: WorkerHandle, cases: Sequence[Case], drawn: random.Random) -> tuple[str, dict[int, Case]]:
    """Return an axis, and size -> a case; the cases differ only in this size. Without enough allowed sizes there are no cases.

    An axis that is the last dimension of no input is preferred, because kernels are often compiled for the last dimension.
    """
    definition = handle.definition
    last = {(definition.inputs[name].shape or ("",))[-1] for name in definition.tensor_inputs}
    axes = [name for name in definition.var_axes if name not in last] or list(definition.var_axes)
    drawn.shuffle(axes)
    smallest = sorted(
        cases, key=lambda case: math.prod(case.call.axes[name] or LARGEST_SIZE for name in definition.var_axes)
    )
    sizes = drawn.sample(range(1, LARGEST_SIZE), SHAPES)
    sizes = [*dict.fromkeys([*sizes[:-PAIRS], *(size + 1 for size in sizes[:PAIRS])])]
    for axis, base in itertools.product(axes, smallest[:3]):
        shapes = {size: case for size in sizes if (case := resized(handle, base, axis, size)) is not None}
        if len(shapes) > PAIRS:
            return axis, {size: replace(case, seed=drawn.getrandbits(62)) for size, case in shapes.items()}
    return "", {}


def drawn_pairs(sizes: Sequence[int], drawn: random.Random) -> dict[int, int]:
    """Return some of the sorted sizes, each with the next larger one, preferably larger by one; no size is in two pairs."""
    starts = list(range(len(sizes) - 1))
    drawn.shuffle(starts)
    starts.sort(key=lambda start: sizes[start + 1] - sizes[start])
    pairs: dict[int, int] = {}
    for start in starts:
        low, high = sizes[start], sizes[start + 1]
        if len(pairs) < PAIRS and not {low, high} & {*pairs, *pairs.values()}:
            pairs[low] = high
    return pairs


def resized(
    handle: WorkerHandle, base: Case, axis: str, size: int, largest_elements: int = LARGEST_ELEMENTS
) -> Case | None:
    """Return the contiguous case with another size of one axis, or None if a constraint or its size forbids it."""
    definition = handle.definition
    try:
        axes = definition.bind_axes({name: base.call.axes[name] for name in definition.var_axes} | {axis: size})
    except RecordError:
        return None
    names = (*definition.tensor_inputs, *definition.written_outputs)
    if any(math.prod(definition.shape_of(name, axes)) > largest_elements for name in names):
        return None
    if handle.solution.record.unsupported(axes, base.call.dtypes) is not None:
        return None
    scalars = scalars_with_axes(definition, base.call.scalars, axes)
    return Case(replace(base.call, axes=axes, layouts={}, scalars=scalars))


def other_activations(
    definition: Definition, expected: OracleCase, drawn: random.Random, cache: ExpectedCache
) -> OracleCase:
    """Return the case with the first inputs drawn anew and others kept, as a model calls a layer again.

    Inputs that depend on each other are all drawn anew. The case stays as it is if the reference fails the new one.
    """
    case, names = replace(expected.case, seed=drawn.getrandbits(62)), definition.tensor_inputs
    fresh = draw_inputs(definition, case, cache.device)
    kept = (
        set() if definition.joint_inputs is not None or definition.saved else {*names[drawn.randint(1, len(names)) :]}
    )
    inputs = {name: expected.inputs[name] if name in kept else value for name, value in fresh.items()}
    return make_oracle_case(definition, case, cache.device, inputs=inputs) or expected


# ---- chain ----------------------------------------------------------------------------------------
# The output of each call is an input of the next, without a pause between them, as from layer to layer.


def _chain(
    handle: WorkerHandle, cases: Sequence[Case], drawn: random.Random, cache: ExpectedCache
) -> list[str] | Failure:
    definition = handle.definition
    links = [(output, name) for output in definition.written_outputs for name in fed_by(definition, output)]
    if not links:
        return []
    output, name = drawn.choice(links)
    base = max(cases, key=lambda case: math.prod(definition.shape_of(name, case.call.axes)))
    steps, start, fed = list[Step](), 0, None
    for _ in range(CHAINED_CALLS):
        case = Case(replace(base.call, layouts={}), seed=drawn.getrandbits(62))
        plan, inputs = starting_at(plan_slot(definition, case), start), draw_inputs(definition, case, handle.device)
        start = plan.size
        if fed is not None:  # at the address of the output before, which is not filled
            moved = tuple(replace(one, offset=fed) if one.name == name else one for one in plan.inputs)
            plan = replace(plan, inputs=moved)
            inputs = {key: value for key, value in inputs.items() if key != name}
        fed = next(one.offset for one in plan.outputs if one.name == output)
        steps.append(Step(case, plan, inputs))
    with handle.mapping(shared_memory(handle, steps)) as buffers:
        memory = SequenceMemory(handle, buffers, steps)
        failure = memory.attach() or _forward(memory, output, name) or _backward(memory, name, drawn, cache)
    return failure or [f"sequence: a chain of {CHAINED_CALLS} calls from {output} to {name}"]


def _forward(memory: SequenceMemory, output: str, name: str) -> Failure | None:
    """Call each step on the output of the one before, without a pause, and judge the results by their actual inputs."""
    definition, order = memory.handle.definition, range(len(memory.steps))
    played = memory.play(order, (), "in a chain of calls")
    if isinstance(played, Failure):
        return played
    results = [memory.outputs(number)[output] for number in order]
    for number in order:
        step, inputs = memory.steps[number], memory.steps[number].inputs
        if number:
            before = results[number - 1]
            if before.is_floating_point() and not before.float().isfinite().all():
                return None  # values may run away from call to call
            inputs = {key: before if key == name else inputs[key] for key in definition.inputs}
        expected = make_oracle_case(definition, step.case, memory.handle.device, inputs=inputs)
        if expected is None:
            return None
        memory.steps[number] = replace(step, expected=expected)
        failure = memory.judge([number], f"with {name} from the call before, without a pause between them")
        memory.steps[number] = step
        if failure is not None:
            return failure
    return None


def _backward(memory: SequenceMemory, name: str, drawn: random.Random, cache: ExpectedCache) -> Failure | None:
    """Call the steps again, the last one first: each has new contents where a call before has left its output."""
    for number, step in enumerate(memory.steps):
        case = replace(step.case, seed=drawn.getrandbits(62))
        expected = cache.once(case)
        if expected is not None:
            memory.steps[number] = Step(case, step.plan, expected.inputs, expected)
    order = [number for number, step in enumerate(memory.steps) if step.expected is not None]
    how = f"with new contents of {name} where an earlier call left its output"
    played = memory.play(order[::-1], order, how) if order else None
    return played if isinstance(played, Failure) else None


def fed_by(definition: Definition, output: str) -> list[str]:
    """Return the inputs that an output of the call before may be: those of its shape and dtype with any contents."""
    spec = definition.outputs[output]
    if output in definition.layouts or definition.saved:
        return []
    bound = {*definition.input_generators, *definition.in_place, *definition.layouts}
    bound |= {*(definition.joint_inputs.inputs if definition.joint_inputs is not None else ())}
    inputs = definition.inputs
    return [
        name
        for name in definition.tensor_inputs
        if name not in bound and (inputs[name].shape, inputs[name].dtype) == (spec.shape, spec.dtype)
    ]


# ---- equal sizes, errors and empty calls ------------------------------------------------------------
# Shapes of as many elements are not one shape. A call that raises, or has nothing to do, may not change the calls after it.


def _equal_sizes(
    handle: WorkerHandle, cases: Sequence[Case], drawn: random.Random, cache: ExpectedCache
) -> list[str] | Failure:
    pairs = equal_pairs(handle, cases, drawn)
    empty = next((case for case in cases if 0 in case.call.axes.values()), None)
    known = [(one, cache.once(one)) for one in _while_wanted(handle, itertools.chain.from_iterable(pairs))]
    steps, start = list[Step](), 0
    for case, expected in known:
        if expected is not None:
            plan = starting_at(plan_slot(handle.definition, case), start)
            steps.append(Step(case, plan, expected.inputs, expected))
            start = plan.size
    if not steps:
        return []
    judged = range(len(steps))
    for case in in_other_dtypes(handle, [step.case for step in steps[:2]], drawn):
        plan = starting_at(plan_slot(handle.definition, case), start)
        steps.append(Step(case, plan, draw_inputs(handle.definition, case, handle.device)))
        start = plan.size
    others = range(len(judged), len(steps))
    if empty is not None:
        plain = replace(empty, call=replace(empty.call, layouts={}), offset=0)
        plan = starting_at(plan_slot(handle.definition, plain), start)
        steps.append(Step(plain, plan, draw_inputs(handle.definition, plain, handle.device)))
    with handle.mapping(shared_memory(handle, steps)) as buffers:
        memory = SequenceMemory(handle, buffers, steps)
        outcome = memory.attach() or _after_odd_calls(memory, judged, others, empty is not None)
    return outcome or [f"sequence: {len(judged)} calls of shapes of equal size, after an error and an empty call"]


def in_other_dtypes(handle: WorkerHandle, cases: Sequence[Case], drawn: random.Random) -> list[Case]:
    """Return the cases in other dtypes that the Solution serves, as a process has them that serves two models."""
    definition, found = handle.definition, list[Case]()
    for case in cases:
        dtypes = {
            name: drawn.choice([one for one in choices if one != case.call.dtypes.get(name)] or list(choices))
            for name, choices in definition.dtypes.items()
        }
        call = replace(case.call, dtypes=definition.bind_dtypes(dtypes))
        is_served = handle.solution.record.unsupported(call.axes, call.dtypes) is None
        if call.dtypes != case.call.dtypes and is_served:
            found.append(replace(case, call=call, seed=drawn.getrandbits(62)))
    return found


def _after_odd_calls(
    memory: SequenceMemory, judged: Sequence[int], others: Sequence[int], has_empty: bool
) -> Failure | None:
    """Judge all steps, and again in the other order after an empty call and after calls that raised.

    Calls of the same shapes in other dtypes, which are not judged, come first.
    """
    if others:
        memory.fill(others)
        first = memory.repeat(others, len(others))  # it may raise, as it is judged elsewhere
        if isinstance(first, Failure) and not memory.handle.usable:
            return first
    played = memory.play(judged, judged, "after calls of a shape of as many elements")
    if has_empty and not isinstance(played, Failure):
        played = memory.play([len(judged) + len(others)], ())
        if not isinstance(played, Failure):
            played = memory.play(judged[::-1], judged, "after an empty call")
    if isinstance(played, Failure):
        return played
    memory.fill(judged[:1])
    raised = memory.handle.ask("misuse", memory.handle.limits.call_s)
    if isinstance(raised, Failure):
        return raised
    again = memory.play(judged, judged, "after calls that raised")
    return again if isinstance(again, Failure) else None


def equal_pairs(handle: WorkerHandle, cases: Sequence[Case], drawn: random.Random) -> list[tuple[Case, Case]]:
    """Return pairs of cases in which the input with most dimensions has another shape and the same number of elements."""
    definition, pairs = handle.definition, list[tuple[Case, Case]]()
    shapes = [definition.inputs[name].shape or () for name in definition.tensor_inputs]
    axes = [*{axis: None for axis in max(shapes, key=len, default=()) if axis in definition.var_axes}]
    if len(axes) < 2:
        return []
    for base in drawn.sample(list(cases), len(cases)):
        one, two = drawn.sample(axes, 2)
        first, second = base.call.axes[one], base.call.axes[two]
        others = [(second, first), (2 * first, second / 2), (first / 2, 2 * second), (first * second, 1)]
        for size, other in drawn.sample(others, len(others)):
            if min(size, other) < 1 or size == first or size != int(size) or other != int(other):
                continue
            left = resized(handle, base, one, first)
            halfway = Case(replace(base.call, axes={**base.call.axes, two: int(other)}))
            right = resized(handle, halfway, one, int(size))
            if left is not None and right is not None:
                seeds = drawn.getrandbits(62), drawn.getrandbits(62)
                pairs.append((replace(left, seed=seeds[0]), replace(right, seed=seeds[1])))
                break
        if len(pairs) == EQUAL_PAIRS:
            break
    return pairs
