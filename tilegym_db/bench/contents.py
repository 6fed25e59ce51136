"""What the calls of one workload are fed with, and what they must give: drawn once, shared by every Solution."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tilegym_db.bench.phases import ORACLE, Phases
from tilegym_db.records import Definition, Workload
from tilegym_db.records.base import canonical_json
from tilegym_db.verify.distributions import RANGES, VARIED
from tilegym_db.verify.expected import Expected, expect
from tilegym_db.verify.inputs import Case, draws_noise, draws_spread
from tilegym_db.verify.variation import vary_scalars

__all__ = ["CONTENT_SETS", "ExpectedCache", "WorkloadContents"]

CONTENT_SETS = ("normal", "row_scale", "outliers", "small_integers")

# Seeds of one run are one secret number plus these, so that no two cases share contents.
_OWN_SHAPE, _UNUSUAL, _OTHER, _FRESH = 1_000, 1_500, 2_000, 1_000_000


class ExpectedCache:
    """Oracle results, computed once per case and shared by every runner; safe to ask from several threads."""

    def __init__(self, definition: Definition, device: str, phases: Phases | None = None) -> None:
        """For one Definition on one device; how long its callers wait is added to ``phases``."""
        self._definition = definition
        self._phases = phases or Phases()
        self.device = device
        self._lock = threading.Lock()
        self._known: dict[str, Expected | None] = {}

    def get(self, case: Case) -> Expected | None:
        """The case with its oracle, or None where the reference itself does not pass it."""
        key = f"{case} {case.seed} {canonical_json(case.layouts)} {canonical_json(case.scalars)}"
        with self._phases(ORACLE), self._lock:
            if key not in self._known:
                self._known[key] = expect(self._definition, case, self.device)
            return self._known[key]

    def clear(self) -> None:
        """Forget everything; the tensors of large workloads must not pile up."""
        with self._lock:
            self._known.clear()


@dataclass
class WorkloadContents:
    """Contents of one Workload's own shape.

    ``sets`` are verified by every Solution and then used, over and over, while timing; ``dropped`` are those that the
    reference itself does not pass. ``fresh`` draws more, which a Solution sees once.

    Where ids or lengths decide how much there is to do, they are spread in all of these as they mostly are in a model, so that
    all are one call's time (``docs/decisions/0035-contents-that-are-timed.md``). ``unusual`` is verified and never timed.
    """

    definition: Definition
    workload: Workload
    seed: int
    cache: ExpectedCache
    sets: list[Expected] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    unusual: Expected | None = None
    """A call whose ids or lengths are spread otherwise: over few groups, or all in one; another kind in another run."""
    other: Expected | None = None
    """A second call of the shape, with other ranges and scalars, that is verified in turn with the first."""
    _fresh: dict[int, list[Expected]] = field(default_factory=dict)

    @classmethod
    def draw(
        cls, definition: Definition, workload: Workload, seed: int, cache: ExpectedCache, *, in_turn: bool = False
    ) -> WorkloadContents:
        """Every content set; with ``in_turn``, the second call too.

        Raises:
            RecordError: there is no oracle for this workload.
            torch.OutOfMemoryError: there is not enough memory for it here.
        """
        contents = cls(definition, workload, seed, cache)
        for number, distribution in enumerate(CONTENT_SETS):
            case = contents._case(distribution, _OWN_SHAPE + number)
            expected = cache.get(case)
            if expected is None:
                contents.dropped.append(str(case))
            else:
                contents.sets.append(expected)
        if draws_spread(definition):
            unusual = CONTENT_SETS[1 + seed % (len(CONTENT_SETS) - 1)]
            contents.unusual = cache.get(contents._case(unusual, _UNUSUAL, typical=False))
        if in_turn:
            case = contents._case(VARIED, _OTHER, typical=False)
            scalars = vary_scalars(definition, case.scalars, VARIED, case.seed)
            contents.other = cache.get(replace(case, scalars=scalars))
        return contents

    @property
    def verified(self) -> list[Expected]:
        """Every set that a pass stands for at this shape: those that are timed, and the unusual one."""
        return [*self.sets, *([] if self.unusual is None else [self.unusual])]

    def fresh(self, attempt: int, count: int) -> Sequence[Expected]:
        """Up to ``count`` contents that no Solution has seen before this attempt; the same ones for every Solution."""
        # Where the author had to draw noise, ranges make the maths ill-conditioned for some elements of millions.
        varies = not draws_noise(self.definition)
        known, tried = self._fresh.setdefault(attempt, []), 0
        while len(known) < count and tried < 4 * count:
            ranges = tuple(RANGES)
            known_good = self.sets[tried // 2 % len(self.sets)].case.distribution
            distribution = ranges[(self.seed + tried // 2) % len(ranges)] if tried % 2 and varies else known_good
            case = self._case(distribution, _FRESH * (attempt + 1) + tried)
            drawn = expect(self.definition, case, self.cache.device)  # not through the cache: it is used once
            known += [] if drawn is None else [drawn]
            tried += 1
        return known[:count]

    def _case(self, distribution: str, offset: int, *, typical: bool = True) -> Case:
        case = Case.of_workload(self.definition, self.workload, distribution=distribution, seed=self.seed + offset)
        return replace(case, typical=typical and draws_spread(self.definition))
