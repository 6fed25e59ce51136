"""The contents of a Workload's calls with their oracle outputs: drawn once and shared by every Solution."""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tilegym_db.errors import StoreError
from tilegym_db.records import Definition, Workload
from tilegym_db.records.workload import Case
from tilegym_db.sandbox.processes import available_memory
from tilegym_db.sandbox.shared_buffers import plan_slot
from tilegym_db.verification.conditioning import may_be_moved
from tilegym_db.verification.distributions import BLANK, RANGES, ROW_SCALE, VARIED, allowed_modifiers, vary_scalars
from tilegym_db.verification.expected import OracleCase, make_oracle_case, make_oracle_cases, tied
from tilegym_db.verification.inputs import BlobReader, draw_inputs, draws_noise, draws_spread, spreads_otherwise
from tilegym_db.verification.phases import MAKE_ORACLE, ORACLE, Phases

SLOW_ORACLE_S = 0.5
"""Seconds of an oracle above which those of several contents are evaluated together."""
MAX_FRESH_AT_ONCE = 8
KEPT_BYTES = 2 << 30
"""Bytes of inputs above which fresh contents are drawn one at a time, and again when they are used."""

CONTENT_SETS = ("normal", ROW_SCALE, "outliers", "small_integers")

_FOR_LARGE_CALLS = tuple(name for name in CONTENT_SETS if name != ROW_SCALE)

# The seeds of one run are one secret number plus these offsets, so that no two cases share contents.
_OWN_SHAPE, _UNUSUAL, _OTHER, _FRESH = 1_000, 1_500, 2_000, 1_000_000


UNUSUAL_BYTES = 4 << 30
"""Maximum bytes of all unusual sets of one workload; above it, one set is used, which differs from run to run."""


def unusual_distributions(
    definition: Definition, workload: Workload, seed: int, max_bytes: int = UNUSUAL_BYTES
) -> tuple[str, ...]:
    """Return the content sets that are verified but not timed: those with an unusual spread of ids or lengths.

    Without such inputs there are none; if a file holds timed inputs, there are all.
    """
    others = tuple(name for name in CONTENT_SETS if workload.files() or spreads_otherwise(definition, name))
    if not others:
        return ()
    case = Case.of_workload(definition, workload, distribution=others[0], seed=0)
    if len(others) * plan_slot(definition, case).size <= max_bytes:
        return others
    return (others[(seed + int(workload.uuid.replace("-", ""), 16)) % len(others)],)


class ExpectedCache:
    """A cache of oracle cases, computed once per case and shared by every runner; thread-safe."""

    def __init__(
        self, definition: Definition, device: str, phases: Phases | None = None, *, roots: Sequence[Path] = ()
    ) -> None:
        """Create the cache for one Definition on one device; waiting time is added to ``phases``.

        Files with inputs lie below one of ``roots`` and are read once each.
        """
        self._definition = definition
        self._blobs = BlobReader(roots)
        self._phases = phases or Phases()
        self.device = device
        self._lock = threading.Lock()
        self._known: dict[str, Future[OracleCase | None]] = {}
        self._is_slow = False

    def get(self, case: Case) -> OracleCase | None:
        """Return the case with its oracle, or None if the reference itself fails it.

        Threads that ask for different cases do not wait for each other. An error is raised in every thread that waits for the
        case, and is not cached.
        """
        with self._phases(ORACLE):
            key, mine = case.key, Future[OracleCase | None]()
            with self._lock:
                found = self._known.setdefault(key, mine)
            if found is mine:
                try:
                    mine.set_result(self.once(case))
                except BaseException as error:
                    with self._lock:
                        self._known.pop(key, None)
                    mine.set_exception(error)
            try:
                return found.result()
            finally:
                del found, mine  # the frames of an error hold the tensors of the case, and would hold the error here

    def several(self, cases: Sequence[Case]) -> list[OracleCase | None]:
        """Return cases of one shape with their oracles without caching them; together if one of them takes long."""
        found: list[OracleCase | None] = []
        while not self._is_slow and len(found) < len(cases):
            began = time.perf_counter()
            found.append(self.once(cases[len(found)]))
            self._is_slow = time.perf_counter() - began > SLOW_ORACLE_S
        if len(found) < len(cases):
            with self._phases(MAKE_ORACLE, self._definition.name):
                found += make_oracle_cases(self._definition, cases[len(found) :], self.device, self._blobs)
        return found

    def once(self, case: Case) -> OracleCase | None:
        """Return the case with its oracle without caching it; see :meth:`get`."""
        with self._phases(MAKE_ORACLE, self._definition.name):
            return make_oracle_case(self._definition, case, self.device, self._blobs)

    def inputs_of(self, case: Case) -> Mapping[str, Any]:
        """Draw the inputs of a case, without its oracle."""
        return tied(case, draw_inputs(self._definition, case, self.device, blobs=self._blobs))

    def clear(self) -> None:
        """Forget everything, so that tensors of large workloads do not pile up."""
        with self._lock:
            self._known.clear()
            self._blobs.clear()


@dataclass
class WorkloadContents:
    """Contents of one Workload's own shape.

    ``sets`` are verified by every Solution and then reused for timing; ``dropped`` are those that the reference itself fails.
    ``fresh`` draws further contents, which a Solution sees once.

    If ids or lengths decide the amount of work, all of these spread them as usual in a model, so that every call takes the
    same time (``docs/decisions/inputs.md``, 0035). ``unusual`` are verified but never timed.

    Inputs from files are the same in all ``sets``, and are drawn in contents that are verified but not timed.
    """

    definition: Definition
    workload: Workload
    seed: int
    cache: ExpectedCache
    sets: list[OracleCase] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    unusual: list[OracleCase] = field(default_factory=list)
    """Calls with an unusual spread of ids or lengths: over few groups, or all in one."""
    other: OracleCase | None = None
    """A second call of the shape with other ranges and scalars, verified in turn with the first."""
    kept_bytes: int = KEPT_BYTES
    """Fresh contents with larger inputs are kept without them."""
    _fresh: dict[int, tuple[list[OracleCase], int]] = field(default_factory=dict)
    """By attempt: the contents, and how many were tried."""
    _seconds: float = 0.0
    _drawn: int = 0
    """How many contents all attempts drew, in ``_seconds``."""

    @classmethod
    def draw(
        cls, definition: Definition, workload: Workload, seed: int, cache: ExpectedCache, *, in_turn: bool = False
    ) -> WorkloadContents:
        """Return every content set; with ``in_turn``, the second call too.

        Raises:
            RecordError: this workload has no oracle.
            StoreError: the contents cannot fit in the memory of this machine.
            torch.OutOfMemoryError: the oracle does not fit in memory here.
        """
        contents = cls(definition, workload, seed, cache)
        contents._check_memory()
        others = unusual_distributions(definition, workload, seed)
        for kept, distributions, typical, offset in (
            (contents.sets, contents._distributions(), True, _OWN_SHAPE),
            (contents.unusual, others, False, _UNUSUAL),
        ):
            cases = [
                contents._case(distribution, offset + number, typical=typical, drawn=kept is contents.unusual)
                for number, distribution in enumerate(distributions)
            ]
            for case, expected in zip(cases, cache.several(cases), strict=True):
                if expected is None:
                    contents.dropped.append(str(case))
                else:
                    kept.append(expected)
        if in_turn:
            blank = f"{VARIED}+{BLANK}" if BLANK in allowed_modifiers(definition, VARIED) else VARIED
            case = contents._case(blank, _OTHER, typical=False, drawn=True)
            scalars = vary_scalars(definition, case.call.scalars, VARIED, case.seed)
            contents.other = cache.once(replace(case, call=replace(case.call, scalars=scalars)))
        return contents

    def _distributions(self) -> tuple[str, ...]:
        """Return the content sets of the workload's own shape.

        Rows far apart in scale leave a few elements among millions that are right only within what moving the inputs shows.
        A call that is too large to be moved goes without them; fuzz cases have them at smaller shapes.
        """
        if self.is_fixed:
            return CONTENT_SETS[:1]
        axes = self._case(CONTENT_SETS[0], _OWN_SHAPE).call.axes
        return CONTENT_SETS if may_be_moved(self.definition, axes) else _FOR_LARGE_CALLS

    @property
    def verified(self) -> list[OracleCase]:
        """Every set that is verified at this shape: the timed ones, then the unusual ones."""
        return [*self.sets, *self.unusual]

    def fresh(self, attempt: int, count: int) -> Sequence[OracleCase]:
        """Return up to ``count`` contents that no Solution has seen before this attempt; the same ones for every Solution."""
        # Every Solution makes the first attempt, but few make later ones: of those only the newest is kept.
        self._fresh = {number: found for number, found in self._fresh.items() if number in (0, attempt)}
        self._draw_fresh(attempt, count)
        return self._fresh[attempt][0][:count]

    @property
    def seconds_of_fresh(self) -> float:
        """Seconds that one content of :meth:`fresh` took so far, with its oracle; 0 before the first."""
        return self._seconds / self._drawn if self._drawn else 0.0

    def draw_ahead(self, count: int, stopped: Callable[[], bool]) -> None:
        """Draw contents for the first attempt of :meth:`fresh` before they are needed, until ``stopped``.

        Drawing must have ended before :meth:`fresh` is called.
        """
        self._draw_fresh(0, count, stopped)

    def _draw_fresh(self, attempt: int, count: int, stopped: Callable[[], bool] = lambda: False) -> None:
        # Inputs that the Definition draws as noise keep their range: other ranges may be ill-conditioned for some elements.
        varies, ranges = not draws_noise(self.definition), tuple(RANGES)
        known, tried = self._fresh.setdefault(attempt, ([], 0))
        while len(known) < count and tried < 4 * count and not stopped():
            cases = []
            for number in range(tried, min(tried + min(count - len(known), MAX_FRESH_AT_ONCE), 4 * count)):
                known_good = self.sets[number // 2 % len(self.sets)].case.distribution
                distribution = ranges[(self.seed + number // 2) % len(ranges)] if number % 2 and varies else known_good
                cases.append(self._case(distribution, _FRESH * (attempt + 1) + number, drawn=self.is_fixed))
            began = time.perf_counter()
            known += self._without_large_inputs(cases) if self._is_large(cases[0]) else self._kept(cases)
            self._seconds += time.perf_counter() - began
            self._drawn += len(cases)
            tried += len(cases)
            self._fresh[attempt] = known, tried

    def _kept(self, cases: Sequence[Case]) -> list[OracleCase]:
        return [drawn for drawn in self.cache.several(cases) if drawn is not None]

    def _without_large_inputs(self, cases: Sequence[Case]) -> list[OracleCase]:
        """Return cases with their oracles, of which only one has its inputs in memory at a time."""
        found = []
        for case in cases:
            drawn = self.cache.once(case)
            if drawn is not None:
                found.append(drawn.without_inputs(functools.partial(self.cache.inputs_of, case)))
            del drawn
        return found

    def _is_large(self, case: Case) -> bool:
        return sum(tensor.span for tensor in plan_slot(self.definition, case).inputs) > self.kept_bytes

    def free_verified(self) -> None:
        """Free the memory of contents that are verified and not timed. Call it when every Solution is verified."""
        self.unusual = [replace(expected, inputs={}, outputs={}) for expected in self.unusual]
        if self.other is not None:
            self.other = replace(self.other, inputs={}, outputs={})

    @property
    def is_fixed(self) -> bool:
        """True if files hold every tensor: there is one content set, and drawn contents may differ in the amount of work."""
        drawn = {*self.definition.tensor_inputs} - {*self.definition.saved}
        return bool(drawn) and drawn <= {*self.workload.files()}

    def _check_memory(self) -> None:
        """Refuse contents larger than the memory: on a CPU, the kernel would end the process instead of the allocation."""
        slot = plan_slot(self.definition, self._case(CONTENT_SETS[0], _OWN_SHAPE))
        oracle = sum(8 * math.prod(tensor.shape) for tensor in slot.outputs)  # in float64
        inputs = sum(tensor.span for tensor in slot.inputs)
        needed = (1 if self.is_fixed else len(CONTENT_SETS)) * (inputs + oracle)
        device = self.cache.device
        available = available_memory() if device == "cpu" else torch.cuda.mem_get_info(device)[1]
        if needed > available:
            raise StoreError(
                f"the contents of this workload need {needed / 1e9:.1f} GB of memory, and there are {available / 1e9:.1f} GB.",
                code="memory_short",
            )

    def _case(self, distribution: str, offset: int, *, typical: bool = True, drawn: bool = False) -> Case:
        case = Case.of_workload(self.definition, self.workload, distribution=distribution, seed=self.seed + offset)
        files = {} if drawn else case.files
        return replace(case, typical=typical and draws_spread(self.definition), files=files)
