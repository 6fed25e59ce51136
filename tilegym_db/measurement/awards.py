"""Awards: the rules by which a verified pass earns an award, and the records of those that do."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tilegym_db.catalog import Catalog, SolutionFiles
from tilegym_db.errors import HardwareError
from tilegym_db.measurement.machine import Machine
from tilegym_db.published.entries import why_unconfined
from tilegym_db.published.snapshot import shipped_keys, source_key
from tilegym_db.records import Trace
from tilegym_db.records.loop import Award
from tilegym_db.records.solution import config_id
from tilegym_db.records.trace import Comparison
from tilegym_db.records.verdicts import MIN_SPEEDUP, PUBLISHED_SANDBOX_LEVEL
from tilegym_db.sandbox.confine import MINIMAL_VERSION, Sandbox, landlock_version
from tilegym_db.sandbox.worker import best_level
from tilegym_db.store.connection import Store
from tilegym_db.store.queries.loop import award_rows, cited_traces, verified_baselines
from tilegym_db.store.side_files import append, journaled, loop_lock
from tilegym_db.verification.worker_handle import MIN_SANDBOX_LEVEL

BASELINES = ("stock", "library", "compile")
"""Kinds of baselines that count in a comparison. The current best is another kernel and does not count."""

BaselineLatencies = Mapping[str, float]
"""Verified baseline -> latency in microseconds on the same workload."""


@dataclass(frozen=True)
class AwardClaim:
    """The baseline that a trace beats by the minimum speedup, or the reason why it earns nothing."""

    baseline: Comparison | None
    reason: str = ""


def claim_of(
    trace: Trace, verified: BaselineLatencies, min_speedup: float = MIN_SPEEDUP, *, is_shipped: bool = False
) -> AwardClaim:
    """Return the award that a trace claims, or the reason why it earns nothing.

    Args:
        verified: the baselines that are verified on its workload and GPU. If a fast one took no part in the rounds, the
            claim is refused until both are measured together.
        is_shipped: true if the package ships its source; used only if the worker was not confined.
    """
    if trace.tier != "promotion" or trace.status != "PASSED" or trace.performance is None:
        return AwardClaim(None, f"a {trace.tier} trace with the status {trace.status} earns nothing")
    if trace.role != "kernel":
        return AwardClaim(None, "a baseline earns no award: others are measured against it")
    unconfined = why_unconfined(trace.sandbox_level, is_shipped=is_shipped, audience="this user")
    if unconfined is not None:
        return AwardClaim(None, unconfined.reason)
    against = [item for item in trace.performance.comparisons if item.provides in BASELINES]
    if not against:
        return AwardClaim(None, "no baseline took part in its rounds")
    best = min(against, key=lambda item: (item.ci_low, item.other))
    if best.ci_low < min_speedup:
        interval = f"99% interval {best.ci_low:.3f} to {best.ci_high:.3f}"
        return AwardClaim(
            None, f"{best.ratio:.3f}x over {best.other} ({interval}), but the lower end must reach {min_speedup:.2f}x"
        )
    taken = {item.other for item in against}
    for name, latency_us in sorted(verified.items()):
        if name not in taken and latency_us < min_speedup * trace.performance.latency_us:
            return AwardClaim(
                None,
                f"{name}, verified here at {latency_us:.4g} us, took no part in its rounds and may be the best baseline. "
                f"Measure them together: tilegym-db verify {trace.solution} {name} --force",
            )
    return AwardClaim(best)


def record_awards(
    store: Store, traces: Collection[Trace], home: Path, min_speedup: float = MIN_SPEEDUP
) -> tuple[list[Award], dict[str, str]]:
    """Write an Award for every trace that earns one and whose source has none yet.

    Returns:
        The awards of these traces, including earlier ones; and the reason for each trace of a kernel without one.
    """
    awards: list[Award] = []
    reasons: dict[str, str] = {}
    shipped = shipped_keys({trace.definition for trace in traces if trace.sandbox_level < PUBLISHED_SANDBOX_LEVEL})
    with loop_lock(home):
        rows = award_rows(store)
        known = _known(rows, {trace.definition for trace in traces}, home)
        standing = {row["id"] for row in rows if row["status"] == "standing"}
        baselines = verified_baselines(store, {trace.definition_digest for trace in traces})
        revoked = {
            row["trace_id"]
            for row in cited_traces(store, [trace.trace_id for trace in traces if trace.status == "PASSED"])
            if row["is_revoked"]
        }
        for trace in sorted(traces, key=lambda item: (_prefix(item), item.solution_digest, item.trace_id)):
            verified = baselines.get((trace.definition_digest, trace.workload_uuid, trace.gpu), {})
            is_shipped = source_key(trace.definition_digest, trace.solution_digest) in shipped
            claim = claim_of(trace, verified, min_speedup, is_shipped=is_shipped)
            if trace.trace_id in revoked:
                claim = AwardClaim(
                    None, f"a failure of this source takes the pass back: tilegym-db show {trace.trace_id[:8]}"
                )
            if claim.baseline is not None:
                award = next((one for one in known if _is_of(one, trace) and one.id in standing), None)
                if award is None:
                    award = _award(trace, claim.baseline, known)
                    append(award, home)
                    known.append(award)
                    standing.add(award.id)
                awards.append(award)
            elif trace.role == "kernel" and trace.tier == "promotion":
                reasons[trace.trace_id] = claim.reason
    return awards, reasons


def _known(rows: Sequence[Mapping[str, Any]], definitions: Collection[str], home: Path) -> list[Award]:
    """Return the awards in the journal, and those that shipped traces of some Definitions have earned."""
    found = journaled(Award, home)
    ids = {one.id for one in found}
    earned = [row for row in rows if row["definition"] in definitions and row["id"] not in ids]
    return found + [Award.from_json(row["record"], f"award {row['id']}") for row in earned]


def _is_of(award: Award, trace: Trace) -> bool:
    return (
        award.solution_digest == trace.solution_digest
        and award.definition_digest == trace.definition_digest
        and (award.gpu, award.workload_uuid) == (trace.gpu, trace.workload_uuid)
        and config_id(award.config) == config_id(trace.config)
    )


def _award(trace: Trace, baseline: Comparison, known: Sequence[Award]) -> Award:
    prefix = _prefix(trace)
    number = 1 + sum(other.prefix == prefix for other in known)
    content = {
        name: getattr(trace, name)
        for name in (
            "solution", "solution_digest", "definition", "definition_digest", "language", "config", "gpu",
            "workload_uuid", "axes", "dtypes", "trace_id",
        )
    }  # fmt: skip
    interval = {"ratio": baseline.ratio, "ci_low": baseline.ci_low, "ci_high": baseline.ci_high}
    record = {
        "id": f"{prefix}_v{number}",
        **content,
        "baseline": baseline.other,
        **interval,
        "created": datetime.now(UTC),
    }
    return Award.from_dict(record, f"award of {trace.solution}")


def _prefix(trace: Trace) -> str:
    """Return the start of an id: ``triton_rms_norm_h200_bfloat16_M4096-N4096``."""
    dtypes = "-".join(dict.fromkeys(trace.dtypes[name] for name in sorted(trace.dtypes))) or "any"
    shape = "-".join(f"{name}{size}" for name, size in sorted(trace.axes.items())) or "scalar"
    return "_".join((trace.language, trace.definition, trace.gpu, dtypes, re.sub(r"[^A-Za-z0-9_.-]", "", shape)[:120]))


# ---- missing confinement --------------------------------------------------------------------------
# Rules for a machine that cannot confine workers: it verifies only sources that the package ships, for its own user.


def may_lack_confinement() -> bool:
    """Return True if the kernel states that it cannot confine a worker. Other obstacles show only in a trial."""
    return landlock_version() < MINIMAL_VERSION


def require_sandbox(machine: Machine) -> None:
    """Raise :class:`HardwareError` if workers for this device cannot be confined as verification requires."""
    sandbox = best_level(machine.device)
    if sandbox.level < MIN_SANDBOX_LEVEL:
        raise _too_weak(sandbox, "")


def unverifiable_here(machine: Machine, catalog: Catalog, names: Collection[str]) -> dict[str, str] | None:
    """Return the Solutions that may not be verified on this machine, with reasons; None if workers are confined.

    Raises:
        HardwareError: they may not be verified; the message states what the kernel of this machine refused.
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
        of = "" if not kernels else f" The package ships no source of {', '.join(sorted(kernels)[:5])}."
        raise _too_weak(sandbox, of)
    return refused


def refused_unconfined(
    level: int, solutions: Iterable[SolutionFiles], digests: Mapping[str, str], shipped: Collection[str]
) -> dict[str, str]:
    """Return the Solutions that may not be verified at a sandbox level, with reasons. Pure.

    ``digests`` are those of the Definitions, by name.
    """
    reasons = {
        files.name: why_unconfined(
            level,
            is_shipped=source_key(digests[files.record.definition], files.digest) in shipped,
            audience="this user",
        )
        for files in solutions
    }
    return {name: f"not verified: {refusal.reason}" for name, refusal in reasons.items() if refusal is not None}


def sandbox_note(machine: Machine, refused: Collection[str]) -> str:
    """Return the note of a report about verification without confinement."""
    sandbox = best_level(machine.device)
    left = f" Left out: {len(refused)} sources that it does not ship." if refused else ""
    return (
        f"workers cannot be confined here (sandbox level {sandbox.level}: {'; '.join(sandbox.reasons)}). Sources that the "
        f"package ships are still verified: they may serve you on this machine, and are not shared.{left}"
    )


def _too_weak(sandbox: Sandbox, of: str) -> HardwareError:
    return HardwareError(
        f"verification needs workers confined at level {MIN_SANDBOX_LEVEL} or better, and this machine reaches "
        f"{sandbox.level}: {'; '.join(sandbox.reasons)}. With --allow-unsandboxed the traces are recorded as such "
        f"and never published.{of}",
        code="sandbox_too_weak",
    )
