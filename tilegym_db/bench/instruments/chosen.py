"""Which Solutions a tool is to run, at which cases."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tilegym_db.bench.instruments.requests import SolutionCalls
from tilegym_db.bench.machine import Machine
from tilegym_db.catalog import Catalog, SolutionFiles
from tilegym_db.errors import NotFoundError, SolutionError, did_you_mean
from tilegym_db.records import TILE_LANGUAGES, Definition, Workload
from tilegym_db.records.base import canonical_json
from tilegym_db.records.case import Case
from tilegym_db.verify.scan import hard_findings, scan_sources
from tilegym_db.verify.shapes import fuzz_cases

__all__ = ["Chosen", "choose_solutions", "require_clean_source", "with_cases"]


@dataclass(frozen=True)
class Chosen:
    """A Solution, its cases, and the Workload that each takes its dtypes and scalars from."""

    files: SolutionFiles
    definition: Definition
    cases: Sequence[Case] = ()
    workloads: Sequence[Workload] = ()
    in_catalog: bool = field(default=True)

    @property
    def calls(self) -> SolutionCalls:
        """As a request has it."""
        return SolutionCalls(
            self.files.name, self.files.path.resolve(), self.files.digest, self.definition.name, self.cases
        )


def choose_solutions(
    catalog: Catalog, names: Sequence[str], machine: Machine, language: str | None = None
) -> list[Chosen]:
    """The Solutions that names stand for: a Solution's, a Definition's, or a folder with a draft; without any, every kernel.

    Of a Definition, and of the whole catalog, the kernels in tile languages that this GPU can run.

    Raises:
        NotFoundError: a name is none of these.
        SolutionError: a source is one that the scan refuses.
    """
    chosen: dict[str, Chosen] = {}
    for name in names or (None,):
        for item in _named(catalog, name, machine):
            if language is None or item.files.record.spec.language == language:
                require_clean_source(item.files)
                chosen.setdefault(item.files.name, item)
    return list(chosen.values())


def _named(catalog: Catalog, name: str | None, machine: Machine) -> list[Chosen]:
    if name is not None and (os.sep in name or name == "."):
        files = SolutionFiles.read(Path(name))
        return [Chosen(files, catalog.definition(files.record.definition), in_catalog=False)]
    if name is not None and name in catalog.solutions:
        files = catalog.solution(name)
        return [Chosen(files, catalog.definition(files.record.definition))]
    if name is not None and name not in catalog.definitions:
        hint = did_you_mean(name, [*catalog.solutions, *catalog.definitions])
        raise NotFoundError(
            f"'{name}' is no solution, no definition and no folder.{hint} Try: tilegym-db list", code="name_unknown"
        )
    wanted = catalog.solutions.values() if name is None else catalog.solutions_for(name)
    return [
        Chosen(files, catalog.definition(files.record.definition))
        for files in wanted
        if files.record.spec.language in TILE_LANGUAGES
        and files.record.spec.role == "kernel"
        and machine.sm in files.record.spec.target_hardware
    ]


def require_clean_source(files: SolutionFiles) -> None:
    """Raise :class:`SolutionError` where the scan refuses a source: it would run outside of the sandbox."""
    found = hard_findings(scan_sources(files.record, files.sources))
    if found:
        raise SolutionError(
            f"{files.name} is not run: a tool attaches to a process outside of the sandbox, and the scan refuses {found[0]}",
            code="scan_refused",
        )


def with_cases(chosen: Chosen, workloads: Sequence[Workload], count: int, seed: int) -> Chosen:
    """The Solution with fuzz cases of its dtype bindings, about ``count`` in all, and sizes of real workloads among them."""
    definition, record = chosen.definition, chosen.files.record
    bindings: dict[str, Workload] = {}
    for workload in workloads:
        dtypes = definition.bind_dtypes(workload.dtypes)
        if record.unsupported(definition.bind_axes(workload.axes), dtypes) is None:
            bindings.setdefault(canonical_json([dtypes, workload.scalars()]), workload)
    generator = random.Random(seed)
    each = max(2, -(-count // max(len(bindings), 1)))
    cases: list[Case] = []
    sources: list[Workload] = []
    for workload in bindings.values():
        drawn = fuzz_cases(
            definition, record, [item.axes for item in workloads], definition.bind_dtypes(workload.dtypes),
            workload.scalars(), count=each, seed=generator.getrandbits(62),
        )  # fmt: skip
        cases += drawn
        sources += [workload] * len(drawn)
    return Chosen(chosen.files, definition, cases[:count], sources[:count], chosen.in_catalog)
