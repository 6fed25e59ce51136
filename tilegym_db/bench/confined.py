"""What may be promoted where workers cannot be confined: sources that the package ships, for the user of that machine alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from tilegym_db.bench.machine import Machine
from tilegym_db.bench.tier_policy import MIN_SANDBOX_LEVEL
from tilegym_db.catalog import Catalog, SolutionFiles
from tilegym_db.confinement.landlock import MINIMAL_VERSION, landlock_version
from tilegym_db.confinement.levels import Sandbox
from tilegym_db.errors import HardwareError
from tilegym_db.store.confinement_rule import source_key, why_not_believed
from tilegym_db.store.shipped_sources import shipped_keys
from tilegym_db.verify.worker.process import best_level

__all__ = ["limits_here", "may_lack_confinement", "note_of", "refused_unconfined", "require_sandbox"]


def may_lack_confinement() -> bool:
    """Whether the kernel says at once that it cannot confine a worker; what else could fail is found out by trying."""
    return landlock_version() < MINIMAL_VERSION


def require_sandbox(machine: Machine) -> None:
    """Return where workers for this device can be confined as a promotion asks for.

    Raises:
        HardwareError: they cannot; the message says what the kernel refused.
    """
    sandbox = best_level(machine.device)
    if sandbox.level < MIN_SANDBOX_LEVEL:
        raise _too_weak(sandbox, "")


def limits_here(machine: Machine, catalog: Catalog, names: Collection[str]) -> dict[str, str] | None:
    """Name of a Solution -> why it may not be promoted on this machine; None where workers are confined.

    Args:
        machine: where it would run.
        catalog: the records.
        names: Definitions or Solutions that are to be promoted; empty means all.

    Raises:
        HardwareError: that leaves no kernel of those; the message says what the kernel of this machine refused.
    """
    sandbox = best_level(machine.device)
    if sandbox.level >= MIN_SANDBOX_LEVEL:
        return None
    found = catalog.solutions
    asked = [files for files in found.values() if not names or {files.name, files.record.definition} & set(names)]
    definitions = {files.record.definition for files in asked}
    digests = {name: catalog.definitions[name].digest for name in definitions if name in catalog.definitions}
    concerned = [files for files in found.values() if files.record.definition in digests]
    refused = refused_unconfined(sandbox.level, concerned, digests, shipped_keys(definitions))
    kernels = [files.name for files in asked if files.record.spec.role == "kernel"]
    if refused and all(name in refused for name in kernels):
        of = "" if not kernels else f" No source of {', '.join(sorted(kernels)[:5])} is one that the package ships."
        raise _too_weak(sandbox, of)
    return refused


def refused_unconfined(
    level: int, solutions: Iterable[SolutionFiles], digests: Mapping[str, str], shipped: Collection[str]
) -> dict[str, str]:
    """Name -> why a source may not be promoted at a level. Pure; ``digests`` are those of the Definitions."""
    reasons = {
        files.name: why_not_believed(
            level,
            is_shipped=source_key(digests[files.record.definition], files.digest) in shipped,
            audience="this user",
        )
        for files in solutions
    }
    return {name: f"not promoted: {reason}" for name, reason in reasons.items() if reason is not None}


def note_of(machine: Machine, refused: Collection[str]) -> str:
    """What a report says of a promotion without confinement."""
    sandbox = best_level(machine.device)
    left = f" Left out: {len(refused)} sources that it does not ship." if refused else ""
    return (
        f"workers cannot be confined here (sandbox level {sandbox.level}: {'; '.join(sandbox.reasons)}). Sources that the "
        f"package ships are promoted all the same: they may serve you on this machine, and are not shared.{left}"
    )


def _too_weak(sandbox: Sandbox, of: str) -> HardwareError:
    return HardwareError(
        f"promotion needs workers confined at level {MIN_SANDBOX_LEVEL} or better, and this machine reaches "
        f"{sandbox.level}: {'; '.join(sandbox.reasons)}. With --allow-unsandboxed the traces are recorded as such "
        f"and never published.{of}",
        code="sandbox_too_weak",
    )
