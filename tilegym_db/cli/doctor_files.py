"""What ``tilegym-db doctor`` says of the files of the home folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tilegym_db.cli.doctor_check import Check

if TYPE_CHECKING:
    from tilegym_db.store.broken_files import BrokenFiles
    from tilegym_db.store.installation import RejectedLine

FILES_NAMED = 3


def check_files() -> Iterator[Check]:
    """Every file of measurements in the home folder can be read; says how many cannot, which, and why."""
    from tilegym_db.paths import home
    from tilegym_db.store.broken_files import broken_files

    for found in broken_files(home()):
        yield from files_checks(found)


def check_shared_tables() -> Iterator[Check]:
    """Tables that came from a team: how many serve here, and why the others do not; nothing where there are none."""
    from tilegym_db.paths import home
    from tilegym_db.store.shared_tables import damage_of, tables_in

    tables = [replace(table, problem=damage_of(table)) for table in tables_in(home())]
    used = [table for table in tables if table.counts]
    if used:
        named = sorted({f"{table.gpu} from {table.address} ({table.standing})" for table in used})
        yield Check("team tables", "ok", f"{len(used)} serve here: {', '.join(named)}")
    for table in tables:
        if not table.counts:
            why, _, fix = table.why_unused.partition(". ")
            yield Check("team tables", "problem" if table.problem else "missing", why, fix)


def files_checks(found: BrokenFiles) -> Iterator[Check]:
    """What is wrong with the files of one folder; nothing where there are none, or nothing is."""
    whole = [fault for fault in found.broken if fault.line == 0]
    lines = [fault for fault in found.broken if fault.line != 0]
    if whole:
        which = "is broken and left out" if len(whole) == 1 else "are broken and left out"
        fix = f"mend what is named, or move it out of {found.folder}; what is whole counts all the same"
        yield Check(found.what, "problem", f"{len(whole)} of {found.read} {found.what} {which}: {_named(whole)}", fix)
    if lines:
        which = "has lines that are left out" if len(lines) == 1 else "have lines that are left out"
        fix = "mend or delete the lines that are named, and leave the files where they are: their other lines count"
        yield Check(found.what, "problem", f"{len(lines)} of {found.read} {found.what} {which}: {_named(lines)}", fix)
    if found.cut_off:
        count = "line was" if len(found.cut_off) == 1 else "lines were"
        detail = f"{len(found.cut_off)} {count} cut off when the writer was killed: {_named(found.cut_off)}"
        fix = "nothing has to be done, all other lines count: the same command does again what is lost"
        yield Check(found.what, "missing", detail, fix)
    if found.read < found.files:
        left = f"{found.files - found.read} older {found.what} were not read, which takes too long here"
        yield Check(found.what, "ok", f"{left}; tilegym-db ingest --rebuild reads them all")


def _named(faults: Sequence[RejectedLine]) -> str:
    parts = [f"{fault.path}: {fault.reason}" if fault.line == 0 else str(fault) for fault in faults[:FILES_NAMED]]
    if len(faults) > FILES_NAMED:
        parts.append(f"and {len(faults) - FILES_NAMED} more")
    return "; ".join(part.rstrip(".") for part in parts)
