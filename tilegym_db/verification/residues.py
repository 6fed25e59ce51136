"""Successive sizes of each axis: mistakes at certain remainders of a size, such as in the part of a tile at its end.

Of 128 successive sizes, some leave any remainder by any divisor up to 128. So all remainders are tried, and not only those of
the tiles that a list names. Along an independent axis one oracle serves all sizes: the contents of each are some of its rows.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from tilegym_db.records import Definition
from tilegym_db.records.case import Case
from tilegym_db.sandbox.shared_buffers import plan_slot
from tilegym_db.verification.contents import ExpectedCache
from tilegym_db.verification.expected import OracleCase, broken_constraint, make_oracle_case
from tilegym_db.verification.oracle import at_indices
from tilegym_db.verification.sequences import SequenceMemory, Step, resized, shared_memory
from tilegym_db.verification.verifier import Failure
from tilegym_db.verification.worker_handle import WorkerHandle

SIZES = 128
"""Number of successive sizes, and the largest divisor all of whose remainders are tried."""
MAX_EXCUSED = 2
"""Maximum number of sizes of an axis that stock code may fail too."""
FEWEST = 8
"""Sizes that the constraints must allow, for an axis to be tried."""
LARGEST_START = 1 << 10
LARGEST_ELEMENTS = 1 << 16
"""Maximum elements of a tensor; a call and its comparison then take a few milliseconds."""
SPARE = 64
"""Indices of the shared contents beyond the largest size, so that calls differ in the index that they begin at."""
AXIS_S, ALL_S, COMPILED = 5.0, 15.0, 4
"""Seconds for one axis, without its slowest calls, which compile, and for all axes. A kernel that is compiled for each size
gets through some of them only. ``RunnerLimits.series_s`` may be less than the seconds for one axis."""


def all_s(handle: WorkerHandle) -> float:
    """Return the seconds for all axes."""
    return min(ALL_S, ALL_S / AXIS_S * handle.limits.series_s)


def check_residues(
    handle: WorkerHandle,
    cases: Sequence[Case],
    seed: int,
    cache: ExpectedCache,
    fails_in_stock_code: Callable[[OracleCase], bool] = lambda case: False,
) -> list[str] | Failure:
    """Call with successive sizes of each axis in a drawn order, and judge all results.

    Args:
        handle: of the Solution, in a worker that has the source loaded.
        cases: its fuzz cases, which give the sizes of the other axes.
        seed: secret of this run.
        cache: has the device of the oracle.
        fails_in_stock_code: asks whether stock code fails a case too, such as a row of one column.

    Returns:
        A line for each axis; or the first failure.
    """
    drawn, lines, began = random.Random(f"residues {seed}"), list[str](), time.monotonic()
    axes = list(handle.definition.var_axes)
    for axis in drawn.sample(axes, len(axes)):
        shapes = successive(handle, cases, axis, drawn)
        if handle.aborted or time.monotonic() - began > all_s(handle):
            break
        if shapes:
            found = _Run(handle, axis, shapes, drawn, cache, fails_in_stock_code).outcome()
            if isinstance(found, Failure):
                return found
            lines.append(f"sequence: {found} successive sizes of {axis} from {min(shapes)} on")
    return lines


def successive(handle: WorkerHandle, cases: Sequence[Case], axis: str, drawn: random.Random) -> dict[int, Case]:
    """Return size -> a case, for successive sizes of one axis from a drawn one on; empty if the constraints allow few."""
    names = handle.definition.var_axes
    full = [case for case in cases if all(case.call.axes[name] for name in names)]
    small = sorted(full, key=lambda case: math.prod(case.call.axes[name] for name in names if name != axis))
    start = int(LARGEST_START ** drawn.random())
    for first in dict.fromkeys((start, drawn.randint(1, SIZES), 1)):
        for base in drawn.sample(small[: len(small) // 2 + 1], min(FEWEST, len(small) // 2 + 1)) if small else ():
            sizes = range(first, first + SIZES)
            found = {size: resized(handle, base, axis, size, LARGEST_ELEMENTS) for size in sizes}
            allowed = {size: case for size, case in found.items() if case is not None}
            if len(allowed) >= FEWEST and max(allowed) > first + SIZES // 2:
                return {size: replace(case, seed=drawn.getrandbits(62)) for size, case in allowed.items()}
    return {}


@dataclass
class _Run:
    """Calls with successive sizes of one axis, all at the same addresses."""

    handle: WorkerHandle
    axis: str
    shapes: Mapping[int, Case]
    drawn: random.Random
    cache: ExpectedCache
    fails_in_stock_code: Callable[[OracleCase], bool]
    excused: int = 0

    def outcome(self) -> int | Failure:
        """Return the number of sizes that were judged, or the first failure."""
        definition, order = self.handle.definition, self.drawn.sample(list(self.shapes), len(self.shapes))
        steps = [Step(self.shapes[size], plan_slot(definition, self.shapes[size]), {}) for size in order]
        with self.handle.mapping(shared_memory(self.handle, steps)) as buffers:
            memory = SequenceMemory(self.handle, buffers, steps)
            return memory.attach() or self._calls(memory, order)

    def _calls(self, memory: SequenceMemory, order: Sequence[int]) -> int | Failure:
        """Make a call for each size until time is up."""
        spent, judged, axis_s = list[float](), 0, min(AXIS_S, self.handle.limits.series_s)
        for number, expected in enumerate(self._expected(order)):
            began = time.monotonic()
            if expected is not None:
                memory.steps[number] = replace(memory.steps[number], inputs=expected.inputs, expected=expected)
                failure = self._call(memory, number)
                if failure is not None:
                    return failure
                judged += 1
            spent.append(time.monotonic() - began)
            if self.handle.aborted or sum(sorted(spent)[:-COMPILED]) > axis_s or sum(spent) > all_s(self.handle):
                break
        return judged

    def _call(self, memory: SequenceMemory, number: int) -> Failure | None:
        how = f"at one of {len(memory.steps)} successive sizes of {self.axis}"
        played = memory.play([number], [number], how)
        if not isinstance(played, Failure) or played.gate != "sequence":
            return played if isinstance(played, Failure) else None
        # The error of the reference is that of all rows together; these rows alone may have a larger one.
        step = memory.steps[number]
        alone = make_oracle_case(self.handle.definition, step.case, self.cache.device, inputs=step.inputs)
        memory.steps[number] = replace(step, expected=alone)
        failure = memory.judge([number], how)
        if failure is None or alone is None or self.excused >= MAX_EXCUSED or not self.fails_in_stock_code(alone):
            return failure
        self.excused += 1
        return None

    def _expected(self, order: Sequence[int]) -> Iterator[OracleCase | None]:
        """Yield the case of each size with its oracle; None if that proves nothing."""
        definition = self.handle.definition
        whole = self._whole(max(order)) if self.axis in definition.divisible_axes else None
        for size in order:
            case = self.shapes[size]
            if whole is None:
                yield make_oracle_case(definition, case, self.cache.device)
                continue
            start = self.drawn.randint(0, whole.case.call.axes[self.axis] - size)
            part = part_of(definition, whole, case, self.axis, range(start, start + size))
            yield part if broken_constraint(definition, case.call.axes, part.inputs) is None else None

    def _whole(self, largest: int) -> OracleCase | None:
        """Return a case with more indices than the largest size; None if there is none."""
        case = resized(self.handle, self.shapes[largest], self.axis, largest + SPARE, 2 * LARGEST_ELEMENTS)
        if case is None:
            return None
        return make_oracle_case(
            self.handle.definition, replace(case, seed=self.drawn.getrandbits(62)), self.cache.device
        )


def part_of(definition: Definition, whole: OracleCase, case: Case, axis: str, indices: range) -> OracleCase:
    """Return a case whose contents and results are those of another at some indices of an independent axis."""
    chosen = {axis: torch.tensor(indices, device=next(iter(whole.outputs.values())).device)}
    inputs = {**at_indices(definition, whole.inputs, chosen), **case.call.scalars}
    outputs = at_indices(definition, whole.outputs, chosen)
    return OracleCase(case, inputs, outputs, whole.e_base, whole.exact, whole.conditioned)
