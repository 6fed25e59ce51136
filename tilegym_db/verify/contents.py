"""What the calls of one workload are fed with, and what they must give: drawn once, shared by every Solution."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tilegym_db.records import Definition, Workload
from tilegym_db.records.case import Case
from tilegym_db.sandbox.shared_buffers import plan_slot
from tilegym_db.verify.distributions import RANGES, VARIED, vary_scalars
from tilegym_db.verify.expected import Expected, expect
from tilegym_db.verify.inputs import BlobReader, draws_noise, draws_spread, spreads_otherwise
from tilegym_db.verify.phases import ORACLE, Phases

CONTENT_SETS = ("normal", "row_scale", "outliers", "small_integers")

# Seeds of one run are one secret number plus these, so that no two cases share contents.
_OWN_SHAPE, _UNUSUAL, _OTHER, _FRESH = 1_000, 1_500, 2_000, 1_000_000


UNUSUAL_BYTES = 4 << 30
"""What the unusual sets of one workload may take together; of larger ones there is one, which differs from run to run."""


def unusual_distributions(
    definition: Definition, workload: Workload, seed: int, max_bytes: int = UNUSUAL_BYTES
) -> tuple[str, ...]:
    """Return the content sets that are verified beside those that are timed: whose ids or lengths are spread otherwise
    than they mostly are, which are none where there are no such inputs; and all, where a file holds inputs of what is
    timed.
    """
    others = tuple(name for name in CONTENT_SETS if workload.files() or spreads_otherwise(definition, name))
    if not others:
        return ()
    case = Case.of_workload(definition, workload, distribution=others[0], seed=0)
    if len(others) * plan_slot(definition, case).size <= max_bytes:
        return others
    return (others[(seed + int(workload.uuid.replace("-", ""), 16)) % len(others)],)


class ExpectedCache:
    """Oracle results, computed once per case and shared by every runner; safe to ask from several threads."""

    def __init__(
        self, definition: Definition, device: str, phases: Phases | None = None, *, roots: Sequence[Path] = ()
    ) -> None:
        """For one Definition on one device; how long its callers wait is added to ``phases``.

        Files that hold inputs lie below one of ``roots``. Each is read once.
        """
        self._definition = definition
        self._blobs = BlobReader(roots)
        self._phases = phases or Phases()
        self.device = device
        self._lock = threading.Lock()
        self._known: dict[str, Expected | None] = {}

    def get(self, case: Case) -> Expected | None:
        """Return the case with its oracle, or None if the reference itself does not pass it."""
        with self._phases(ORACLE), self._lock:
            key = case.key
            if key not in self._known:
                self._known[key] = expect(self._definition, case, self.device, self._blobs)
            return self._known[key]

    def once(self, case: Case) -> Expected | None:
        """As :meth:`get`, for a case that is used once, and not kept."""
        return expect(self._definition, case, self.device, self._blobs)

    def clear(self) -> None:
        """Forget everything; the tensors of large workloads must not pile up."""
        with self._lock:
            self._known.clear()
            self._blobs.clear()


@dataclass
class WorkloadContents:
    """Contents of one Workload's own shape.

    ``sets`` are verified by every Solution and then used, over and over, while timing; ``dropped`` are those that the
    reference itself does not pass. ``fresh`` draws more, which a Solution sees once.

    Where ids or lengths decide how much there is to do, they are spread in all of these as they mostly are in a model, so that
    all are one call's time (``docs/decisions/inputs.md``, 0035). ``unusual`` are verified and never timed.

    Inputs that a file holds are the same in all ``sets``, and are drawn in all that is verified and not timed.
    """

    definition: Definition
    workload: Workload
    seed: int
    cache: ExpectedCache
    sets: list[Expected] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    unusual: list[Expected] = field(default_factory=list)
    """Calls whose ids or lengths are spread otherwise: over few groups, or all in one."""
    other: Expected | None = None
    """A second call of the shape, with other ranges and scalars, that is verified in turn with the first."""
    _fresh: dict[int, list[Expected]] = field(default_factory=dict)

    @classmethod
    def draw(
        cls, definition: Definition, workload: Workload, seed: int, cache: ExpectedCache, *, in_turn: bool = False
    ) -> WorkloadContents:
        """Return every content set; with ``in_turn``, the second call too.

        Raises:
            RecordError: there is no oracle for this workload.
            torch.OutOfMemoryError: there is not enough memory for it here.
        """
        contents = cls(definition, workload, seed, cache)
        others = unusual_distributions(definition, workload, seed)
        for kept, distributions, typical, offset in (
            (contents.sets, CONTENT_SETS[:1] if contents.is_fixed else CONTENT_SETS, True, _OWN_SHAPE),
            (contents.unusual, others, False, _UNUSUAL),
        ):
            for number, distribution in enumerate(distributions):
                case = contents._case(distribution, offset + number, typical=typical, drawn=kept is contents.unusual)
                expected = cache.get(case)
                if expected is None:
                    contents.dropped.append(str(case))
                else:
                    kept.append(expected)
        if in_turn:
            case = contents._case(VARIED, _OTHER, typical=False, drawn=True)
            scalars = vary_scalars(definition, case.call.scalars, VARIED, case.seed)
            contents.other = cache.get(replace(case, call=replace(case.call, scalars=scalars)))
        return contents

    @property
    def verified(self) -> list[Expected]:
        """Every set that a pass stands for at this shape: those that are timed, then the unusual ones."""
        return [*self.sets, *self.unusual]

    def fresh(self, attempt: int, count: int) -> Sequence[Expected]:
        """Up to ``count`` contents that no Solution has seen before this attempt; the same ones for every Solution."""
        # Where the author had to draw noise, ranges make the maths ill-conditioned for some elements of millions.
        varies = not draws_noise(self.definition)
        # Every Solution makes the first attempt, few a later one: of those only the newest is kept.
        self._fresh = {number: found for number, found in self._fresh.items() if number in (0, attempt)}
        known, tried = self._fresh.setdefault(attempt, []), 0
        while len(known) < count and tried < 4 * count:
            ranges = tuple(RANGES)
            known_good = self.sets[tried // 2 % len(self.sets)].case.distribution
            distribution = ranges[(self.seed + tried // 2) % len(ranges)] if tried % 2 and varies else known_good
            case = self._case(distribution, _FRESH * (attempt + 1) + tried, drawn=self.is_fixed)
            drawn = self.cache.once(case)
            known += [] if drawn is None else [drawn]
            tried += 1
        return known[:count]

    @property
    def is_fixed(self) -> bool:
        """Whether files hold every tensor: there is one content set then, and what is drawn may be another amount of work."""
        drawn = {*self.definition.tensor_inputs} - {*self.definition.saved}
        return bool(drawn) and drawn <= {*self.workload.files()}

    def _case(self, distribution: str, offset: int, *, typical: bool = True, drawn: bool = False) -> Case:
        case = Case.of_workload(self.definition, self.workload, distribution=distribution, seed=self.seed + offset)
        files = {} if drawn else case.files
        return replace(case, typical=typical and draws_spread(self.definition), files=files)
