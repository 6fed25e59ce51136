"""Checks the pattern pages against the traces, searches and package versions that they cite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tilegym_db.catalog import Catalog
from tilegym_db.records.loop import UNMEASURED, Pattern
from tilegym_db.store.connection import Store
from tilegym_db.store.side_files import cited_cases, cited_searches, cited_traces, read_patterns


def pattern_findings(catalog: Catalog, store: Store) -> list[str]:
    """Return problems of the pattern pages: invalid pages, lost evidence, and package versions other than the pinned ones."""
    patterns, found = read_patterns(catalog)
    known = {*catalog.definitions, *(item.op_type for item in catalog.definitions.values()), "*"}
    cited = sorted(
        {text.removeprefix("trace:") for item in patterns for text in item.evidence if text.startswith("trace:")}
    )
    here = Cited(
        {row["trace_id"]: row for row in cited_traces(store, [name for name in cited if "/" not in name])},
        cited_cases(store, [name for name in cited if "/" in name]),
        cited_searches(store),
    )
    pinned = _pinned(catalog.roots)
    for pattern in patterns:
        found += [
            f"{pattern.id}: applies_to names '{name}', which is nothing here."
            for name in pattern.applies_to
            if name not in known
        ]
        for text in pattern.evidence:
            reason = _why_gone(text, here)
            if reason:
                found.append(f"{pattern.id}: its evidence {text} {reason}. Measure it again, or write 'unmeasured'.")
        found += _version_findings(pattern, pinned)
    return found


@dataclass(frozen=True)
class Cited:
    """The cited evidence that exists here: traces by id, cases with their verification state, and searches."""

    traces: Mapping[str, Mapping[str, object]]
    cases: Mapping[str, bool]
    searches: set[str]


def _why_gone(text: str, here: Cited) -> str:
    """Return why a citation is no longer valid; empty if it is valid.

    A cited case, ``trace:GPU/SOLUTION/AXES``, stays valid after a new measurement. A cited trace id does not.
    """
    kind, _, name = text.partition(":")
    if text == UNMEASURED:
        return ""
    if kind == "search":
        return "" if name in here.searches else "is no search that is recorded with today's sources"
    if "/" in name:
        known = here.cases.get(name)
        if known is None:
            return "is no GPU/SOLUTION/AXES that was verified (AXES as `best` prints them: M=1,N=4096)"
        return "" if known else "was taken back by a failure, or its source changed"
    row = here.traces[name]
    if not row["is_here"]:
        return "is no trace that is here"
    if row["status"] != "PASSED":
        return f"has the status {row['status']}"
    return "was taken back by a failure" if row["is_revoked"] else ""


def _version_findings(pattern: Pattern, pinned: Mapping[str, str]) -> list[str]:
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    found = []
    for package, text in pattern.versions.items():
        try:
            fits = package not in pinned or SpecifierSet(text).contains(pinned[package], prereleases=True)
        except InvalidSpecifier:
            found.append(f"{pattern.id}: versions.{package} {text!r} must read as a requirement does, such as '>=3.6'.")
            continue
        if not fits:
            found.append(
                f"{pattern.id}: it was measured with {package}{text}, and {pinned[package]} is pinned. Measure it again."
            )
    return found


def _pinned(roots: Sequence[Path]) -> dict[str, str]:
    """Read the pinned version of each package from ``constraints.txt``; empty if no root contains that file."""
    lines = [
        line for root in roots if (root / "constraints.txt").is_file() for line in (root / "constraints.txt").open()
    ]
    pairs = (line.strip().partition("==") for line in lines if "==" in line and not line.startswith("#"))
    return {name.lower(): version for name, _, version in pairs}
