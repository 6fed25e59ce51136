"""Refuses a lock of served kernels that cannot be kept on this machine."""

from __future__ import annotations

from collections.abc import Collection

from tilegym_db.backends.toolchains import check_libraries
from tilegym_db.catalog import Catalog
from tilegym_db.errors import RecordError, ToolchainError, UsageError
from tilegym_db.published.entries import Candidate
from tilegym_db.published.table import LockedKernel, ServingLock, table_for, why_no_table
from tilegym_db.resolver.resolve import unavailable_languages

MAX_SHOWN = 3


def refuse_broken_lock(lock: ServingLock, catalog: Catalog, gpus: Collection[str]) -> None:
    """Raise :class:`UsageError` unless every kernel of a lock is here as it was, and runs on one of some GPUs.

    Args:
        lock: the kernels.
        catalog: has their records; its tables must have their measurements.
        gpus: slugs of the devices of a model.
    """
    broken = [
        f"{kernel} for {kernel.definition}: {why}" for kernel in lock.kernels if (why := _why(kernel, catalog, gpus))
    ]
    if broken:
        more = f"; and {len(broken) - MAX_SHOWN} more" if len(broken) > MAX_SHOWN else ""
        raise UsageError(
            f"the lock {lock.source} cannot be kept: {'; '.join(broken[:MAX_SHOWN])}{more}. Restore what changed, or patch "
            "without the lock, run the model and write the lock again: handle.write_lock(path)",
            code="serving_lock_broken",
        )


def _why(kernel: LockedKernel, catalog: Catalog, gpus: Collection[str]) -> str:
    """Return why a kernel cannot serve as it did; empty if it can."""
    if kernel.gpu not in gpus:
        return f"it was locked on {kernel.gpu}, and the model is on {', '.join(sorted(gpus)) or 'no device'}"
    if kernel.definition not in catalog.definition_paths:
        return "the catalog has no such definition"
    if kernel.solution not in catalog.solution_paths:
        return "the catalog has no such solution"
    try:
        definition, files = catalog.definition(kernel.definition), catalog.solution(kernel.solution)
    except RecordError as error:
        return str(error)
    if definition.digest != kernel.definition_digest:
        return "the meaning of the definition has changed"
    if files.digest != kernel.solution_digest:
        return "the source has changed"
    unavailable = unavailable_languages([files])
    if unavailable:
        return next(iter(unavailable.values()))
    table = table_for(catalog, kernel.gpu)
    if table is None:
        return why_no_table(kernel.gpu)
    measured = list(kernel.candidates_in(table))
    if not measured:
        return f"no verified measurement of it is published for {kernel.gpu}"
    reasons = [_library_changed(one, files.record.spec.dependencies) for one in measured]
    return reasons[0] if all(reasons) else ""


def _library_changed(candidate: Candidate, dependencies: tuple[str, ...]) -> str:
    """Return the reason if a declared library is another than in a measurement; else an empty text."""
    try:
        check_libraries(dependencies, candidate.libs, candidate.solution)
    except ToolchainError as error:
        return str(error)
    return ""
