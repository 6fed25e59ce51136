"""What a bench run found, as its caller gets it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from tilegym_db.bench.machine import Machine
from tilegym_db.bench.phases import added
from tilegym_db.bench.plan import Plan
from tilegym_db.bench.summary import summarise
from tilegym_db.records import Trace
from tilegym_db.records.loop import Promotion
from tilegym_db.store.html_table import html_table

__all__ = ["BenchReport"]


@dataclass
class BenchReport:
    """What a run did. ``interrupted`` is true after Ctrl-C; what was measured before it is kept."""

    run_id: str
    machine: Machine
    plan: Plan
    traces: list[Trace] = field(default_factory=list)
    interrupted: bool = False
    notes: list[str] = field(default_factory=list)
    """What its traces lack, or why they may be wrong."""
    unfinished: list[str] = field(default_factory=list)
    """What could not be measured because device after device was lost with it, and how."""
    devices: Counter[str] = field(default_factory=Counter)
    """How many traces each device measured, where there are several."""
    seconds: dict[str, dict[str, float]] = field(default_factory=dict)
    """Where the time of each of them went, by the names of :mod:`tilegym_db.bench.phases`."""
    promotions: list[Promotion] = field(default_factory=list)
    """Those that its traces earned, and those of the same sources that stood before."""

    def followed_by(self, later: BenchReport) -> BenchReport:
        """This run and the one after it on the same machine, as one report named after the later."""
        traces = [*self.traces, *later.traces]
        notes = list(dict.fromkeys([*self.notes, *later.notes]))
        unfinished = [*self.unfinished, *later.unfinished]
        return replace(
            later,
            traces=traces,
            notes=notes,
            unfinished=unfinished,
            devices=self.devices + later.devices,
            seconds={device: added(self.seconds.get(device, {}), found) for device, found in later.seconds.items()},
        )

    @property
    def counts(self) -> Counter[str]:
        """How many traces ended with each status."""
        return Counter(trace.status for trace in self.traces)

    def _repr_html_(self) -> str:
        """One row per Solution, as the command prints it; the caption names the device and the tiers."""
        tiers = " and ".join(dict.fromkeys(trace.tier for trace in self.traces)) or "nothing new"
        rows = [
            (row.solution, row.language, f"{row.passed}/{row.total}", row.speedup, row.sol_ratio, row.note)
            for row in summarise(self.traces)
        ]
        columns = ("solution", "language", "passed", "speedup over stock", "of the speed of light", "note")
        return html_table(columns, rows, f"{self.machine.gpu_name} ({self.machine.gpu}), {tiers}, run {self.run_id}")
