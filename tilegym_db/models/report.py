"""The report of a patched model: one entry per call site, as data and as a table."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from tilegym_db.errors import UsageError
from tilegym_db.models.decoding import DecodingReport
from tilegym_db.models.forward_graphs import ForwardReport
from tilegym_db.models.found import Undescribed
from tilegym_db.models.gpu_time import GpuTime
from tilegym_db.models.proof import Proof, QuantisationReport
from tilegym_db.records import axes_key
from tilegym_db.resolver.decide import NOTHING_PUBLISHED
from tilegym_db.resolver.dispatch import DispatchReport, KernelFailure

if TYPE_CHECKING:
    from rich.table import Table

PROOF_COLUMNS = ("site", "definition", "stage", "call", "tried", "kernel error", "stock error", "allowed", "verdict")
"""Errors are relative, against fp64."""


@dataclass(frozen=True)
class CallSiteReport:
    """One group of modules.

    Attributes:
        reason: the reason if the whole site is stock; ``counts`` is None then.
        training: counts of calls that may need a derivative, and of gradients, each under its own Definition.
        bypassed: reason -> calls that ran stock code without asking for a kernel, for example in a tracer. Compiled code
            counts its calls of an operator when they run; stock code in it has no counters. A CUDA graph counts once, when
            it is captured, because its replays run no Python.
        proofs: one per kind of call that the model made; empty unless the patch was made with ``verify=True``.
        own_code: execution mode -> eager calls that stock code ran in it, or would have run. It is for code with several
            modes, for example experts, and shows what a speedup is relative to. The mode at patch time is always in it.
    """

    kind: str
    module_class: str
    modules: int
    definition: str
    reason: str
    counts: DispatchReport | None = None
    training: tuple[DispatchReport, ...] = ()
    bypassed: Mapping[str, int] = field(default_factory=dict)
    proofs: tuple[Proof, ...] = ()
    own_code: Mapping[str, int] = field(default_factory=dict)

    @property
    def all_counts(self) -> tuple[DispatchReport, ...]:
        """``counts`` and ``training``; empty if the whole site is stock."""
        return () if self.counts is None else (self.counts, *self.training)


def why_fit(reasons: Iterable[str]) -> str:
    """Return one line that names ``fit`` if nothing is published for the GPU of a model; else ""."""
    absent = next((reason for reason in reasons if reason.startswith(NOTHING_PUBLISHED)), "")
    return (
        f"{absent}. To measure this model's calls here: tilegym-db fit CONFIG, or tilegym_db.fit(model, inputs)"
        if absent
        else ""
    )


SITE_COLUMNS = ("site", "definition", "call", "calls", "by kernel", "served by", "why")
"""Headings of the table of call sites."""
MIN_TABLE_WIDTH = 80
"""Characters per line from which on call sites are a table."""


@dataclass(frozen=True, repr=False)
class PatchReport:
    """The call sites of a model, patched or not, and the GPU time of a call if one was profiled.

    ``quantised`` reports the numbers of a quantised model; it is None for other models, whose numbers do not change.
    ``decoding`` reports the CUDA graphs of ``generate``, and ``forwards`` those of the caller's forwards; each is None for a
    model without them.
    ``undescribed`` are the other modules that compute, by class. ``note`` says so if ``verify=True`` proved nothing, because the
    model asked for no kernel, or if nothing is published for the GPU.
    """

    sites: tuple[CallSiteReport, ...]
    gpu_time: GpuTime | None = None
    quantised: QuantisationReport | None = None
    note: str = ""
    undescribed: tuple[Undescribed, ...] = ()
    decoding: DecodingReport | None = None
    forwards: ForwardReport | None = None

    @property
    def kernel_calls(self) -> int:
        """Number of calls that ran a verified kernel, over all sites, including gradients."""
        return sum(self.hits().values())

    def hits(self) -> dict[str, int]:
        """Return Definition -> calls that ran a verified kernel. Gradients have separate Definitions."""
        totals: dict[str, int] = {}
        for site in self.sites:
            for counts in site.all_counts:
                totals[counts.definition] = totals.get(counts.definition, 0) + counts.kernel_calls
        return totals

    @property
    def failed_proofs(self) -> tuple[Proof, ...]:
        """The kernels that failed on this model and must not be used, with the reason."""
        return tuple(proof for site in self.sites for proof in site.proofs if proof.failed)

    @property
    def failures(self) -> tuple[KernelFailure, ...]:
        """The kernels that raised and have been in quarantine since."""
        return tuple(failure for site in self.sites for counts in site.all_counts for failure in counts.failures)

    @property
    def problems(self) -> list[str]:
        """One line for each kernel that failed its proof or raised, with the reason."""
        return [f"{proof.kernel}: {proof.reason}" for proof in self.failed_proofs] + [str(one) for one in self.failures]

    def __repr__(self) -> str:
        """Return the number of call sites and of calls; ``str`` has the tables."""
        served = sum(1 for site in self.sites if site.counts is not None)
        return f"<PatchReport: {served} of {len(self.sites)} call sites patched, {self.kernel_calls} calls by kernels>"

    def _repr_html_(self) -> str:
        """Return the table of the call sites."""
        from tilegym_db.store.answer import html_table  # only a notebook needs it

        rows = self.site_rows()
        return html_table(SITE_COLUMNS, rows, self.note or repr(self), len(rows))

    def to_dict(self) -> dict[str, Any]:
        """Return the content, ready for JSON."""
        profiled = {} if self.gpu_time is None else {"gpu_time": self.gpu_time.to_dict()}
        quantised = {} if self.quantised is None else {"quantised": asdict(self.quantised)}
        noted = {"note": self.note} if self.note else {}
        others = {"undescribed": [one._asdict() for one in self.undescribed]} if self.undescribed else {}
        graphs = {"decoding": self.decoding, "forwards": self.forwards}
        decoding = {name: asdict(one) for name, one in graphs.items() if one is not None}
        sites = [asdict(site) for site in self.sites]
        return {"sites": sites, **others, **profiled, **quantised, **noted, **decoding}

    @property
    def has_rows(self) -> bool:
        """True if the table of call sites has a row."""
        return bool(self.sites or self.undescribed)

    def site_rows(self) -> list[tuple[str, ...]]:
        """Return one row per call site and kind of call, and one per class of other modules, with :data:`SITE_COLUMNS`."""
        rows: list[tuple[str, ...]] = [
            (f"{site.module_class} x{site.modules}", *row) for site in self.sites for row in _rows(site)
        ]
        return rows + [
            (f"{one.module_class} x{one.modules}", "", "", "", "", "stock", one.reason) for one in self.undescribed
        ]

    def table(self) -> Table:
        """Return the :meth:`site_rows` as a table for a terminal, without the columns that no row fills."""
        from rich.table import Table

        table, rows = Table(title="call sites"), self.site_rows()
        filled = [at for at in range(len(SITE_COLUMNS)) if not rows or any(row[at] for row in rows)]
        for at in filled:
            table.add_column(
                SITE_COLUMNS[at], justify="right" if SITE_COLUMNS[at] in ("calls", "by kernel") else "left"
            )
        for row in rows:
            table.add_row(*(row[at] for at in filled))
        return table

    def lines(self) -> str:
        """Return the :meth:`site_rows` for a narrow terminal: what serves each call, and the reason below it."""
        found = []
        for site, definition, call, calls, by_kernel, served, why in self.site_rows():
            counted = f"{by_kernel} of {calls} calls by kernels" if calls and by_kernel else ""
            said = ", ".join(filter(None, (definition, call, counted)))
            found += [f"{site}: {served or 'not called'}", *(f"  {part}" for part in (said, why) if part)]
        return "\n".join(found)

    def proof_rows(self) -> list[tuple[Any, ...]]:
        """Return one row per captured call, with the columns :data:`PROOF_COLUMNS`; errors are None if no kernel was tried."""
        return [
            (
                f"{site.module_class} x{site.modules}",
                site.definition,
                proof.stage,
                axes_key(dict(proof.axes)),
                proof.kernel or "stock",
                proof.kernel_error,
                proof.stock_error,
                proof.allowed,
                proof.reason or "proved",
            )
            for site in self.sites
            for proof in site.proofs
        ]

    def proof_table(self) -> Table:
        """Return the :meth:`proof_rows` as a table for a terminal."""
        from rich.table import Table

        table = Table(title="proofs: relative error against fp64")
        for heading in PROOF_COLUMNS:
            table.add_column(heading)
        for row in self.proof_rows():
            cells = ("" if cell is None else f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row)
            table.add_row(*cells)
        return table

    def gpu_table(self) -> Table:
        """Return a table for a terminal with the GPU time of the profiled call, by Definition."""
        from rich.table import Table

        time = self.gpu_time
        if time is None:
            raise UsageError(
                "no call was profiled. Try: handle.report(profile=lambda: model.generate(...))", code="nothing_profiled"
            )
        if time.share is None:
            unknown = Table("GPU time of the profiled call")
            unknown.add_row(time.reason)
            return unknown
        table = Table(title=f"GPU time: {time.share:.1%} in verified kernels")
        for heading in ("launched by", "us", "share"):
            table.add_column(heading, justify="left" if heading == "launched by" else "right")
        others = time.total_us - sum(time.by_definition.values()) - time.replayed_us
        rows = [(name, time.by_definition[name]) for name in time.shares]
        rows += [("replays of CUDA graphs", time.replayed_us)] if time.replayed_us else []
        for name, spent_us in [*rows, ("everything else", others), ("all", time.total_us)]:
            table.add_row(name, f"{spent_us:.1f}", f"{spent_us / time.total_us:.1%}")
        return table

    def __str__(self) -> str:
        """Return the tables as text, in the width of the terminal or of ``COLUMNS``, or else in 160 characters."""
        return self.text(min(160, shutil.get_terminal_size((160, 24)).columns))

    def text(self, width: int) -> str:
        """Return the tables as text, in lines of ``width`` characters.

        In less than 80 characters, a line per call site has its reason below it.
        """
        from rich.console import Console

        console = Console(width=width)
        with console.capture() as capture:
            if width < MIN_TABLE_WIDTH and self.has_rows:
                console.print(self.lines(), highlight=False, markup=False)
            elif self.has_rows:
                console.print(self.table())
            if any(site.proofs for site in self.sites):
                console.print(self.proof_table())
            for graphs in (self.decoding, self.forwards):
                if graphs is not None:
                    console.print(graphs.summary(), highlight=False)
            if self.note:
                console.print(self.note, highlight=False)
            if self.gpu_time is not None:
                console.print(self.gpu_table())
            if self.quantised is not None:
                console.print(self.quantised.table())
                console.print(self.quantised.summary(), highlight=False)
        return capture.get()


def _rows(site: CallSiteReport) -> Sequence[tuple[str, str, str, str, str, str]]:
    name = site.definition or site.kind
    if site.counts is None:
        return [(name, "", "", "", "stock", site.reason), *_own_code_rows(site, name)]
    merged: dict[tuple[str, str, str, str], list[int]] = {}
    for counts in site.all_counts:
        for key in counts.keys:
            sizes = " ".join(f"{axis}={size}" for axis, size in key.axes.items())
            totals = merged.setdefault((counts.definition, sizes, key.solution or "stock", key.reason), [0, 0])
            totals[0] += key.calls
            totals[1] += key.kernel_calls
    rows = [
        (definition, sizes, str(calls), str(kernel_calls), solution, reason)
        for (definition, sizes, solution, reason), (calls, kernel_calls) in merged.items()
    ]
    rows += [(name, "", str(calls), "0", "stock", reason) for reason, calls in site.bypassed.items()]
    return [*(rows or [(name, "", "0", "0", "", "not called yet")]), *_own_code_rows(site, name)]


def _own_code_rows(site: CallSiteReport, name: str) -> list[tuple[str, str, str, str, str, str]]:
    return [
        (name, "", str(calls) if calls else "", "", "", f"the model's own code is {way}")
        for way, calls in site.own_code.items()
    ]
