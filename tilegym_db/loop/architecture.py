"""Check the whole catalog and the pattern base, and report each finding as one line."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tilegym_db.catalog import Catalog, SolutionFiles
from tilegym_db.records import TILE_LANGUAGES, Definition
from tilegym_db.records.loop import UNMEASURED, Pattern
from tilegym_db.store.connection import open_store
from tilegym_db.store.database import Store
from tilegym_db.store.loop import cited_cases, cited_searches, cited_traces, read_patterns, traced_digests

MAX_SHARED_TOKENS = 0.8
"""Maximum share of a source's tokens that may also be in another source. Above it, the source counts as a copy."""
SHINGLE = 8
_NAMED = re.compile(r"^[a-z][a-z0-9_]*$")


def architecture_findings(catalog: Catalog, names: Sequence[str] = ()) -> list[str]:
    """Return the problems of the catalog, or of some of its Definitions.

    Without names, problems of the pattern base are included.
    """
    chosen = [catalog.definition(name) for name in names] if names else list(catalog.definitions.values())
    findings: list[str] = []
    with open_store(read_only=True, catalog=catalog) as store:
        traced = traced_digests(store)
        for definition in chosen:
            solutions = catalog.solutions_for(definition.name)
            count = len(catalog.workloads_for(definition.name))
            findings += definition_findings(definition, solutions, count, traced.get(definition.name, set()))
            findings += copies(solutions)
        if not names:
            findings += pattern_findings(catalog, store)
    return findings


def definition_findings(
    definition: Definition, solutions: Sequence[SolutionFiles], workloads: int, traced: Iterable[str]
) -> list[str]:
    """Return the problems of one Definition. Pure.

    Args:
        definition: the operator.
        solutions: its Solutions.
        workloads: the number of its Workloads.
        traced: digests of the Definition that have traces.
    """
    name, found = definition.name, []
    if not _NAMED.match(name):
        found.append(f"{name}: its name must consist of lower-case letters, digits and underscores.")
    if not workloads:
        found.append(f"{name}: it has no workload. Try: tilegym-db new workload {name} --from-config config.json")
    if not definition.is_open:
        if not any(item.record.spec.provides == "stock" for item in solutions):
            found.append(f"{name}: no solution provides the stock code. Try: tilegym-db new solution {name} --stock")
        languages = {item.record.spec.language for item in solutions if item.record.spec.role == "kernel"}
        missing = [language for language in TILE_LANGUAGES if language not in languages]
        if missing:
            found.append(f"{name}: no kernel in {', '.join(missing)}, and no tag 'status:open'.")
    old = set(traced) - {definition.digest}
    if old and definition.digest not in traced:
        found.append(
            f"{name}: every trace belongs to an older version. Measure again: tilegym-db bench {name} --verify"
        )
    for item in solutions:
        spec = item.record.spec
        if not item.name.startswith(name):
            found.append(f"{item.name}: its name does not begin with its definition, {name}.")
        if not spec.target_hardware:
            found.append(f"{item.name}: it declares no target hardware.")
    return found


def copies(solutions: Sequence[SolutionFiles]) -> list[str]:
    """Return the kernels of one Definition and language that share more than :data:`MAX_SHARED_TOKENS` of their tokens."""
    kernels = [item for item in solutions if item.record.spec.role == "kernel"]
    shingles = {item.name: _shingles(item.sources.values()) for item in kernels}
    found = []
    for index, one in enumerate(kernels):
        for other in kernels[index + 1 :]:
            same_language = one.record.spec.language == other.record.spec.language
            share = shared_tokens(shingles[one.name], shingles[other.name])
            if same_language and share > MAX_SHARED_TOKENS:
                found.append(
                    f"{other.name}: {share:.0%} of its tokens are also in {one.name}. Make the difference a tunable or a "
                    "constant of one source."
                )
    return found


def shared_tokens(one: frozenset[int], other: frozenset[int]) -> float:
    """Return the share of token runs of the smaller source that the other source also contains."""
    smaller = min(len(one), len(other))
    return len(one & other) / smaller if smaller else 0.0


def _shingles(sources: Iterable[bytes]) -> frozenset[int]:
    tokens = [
        token.string
        for source in sources
        for token in tokenize.tokenize(io.BytesIO(source).readline)
        if token.type in (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)
    ]
    return frozenset(hash(tuple(tokens[start : start + SHINGLE])) for start in range(len(tokens) - SHINGLE + 1))


# ---- Patterns -------------------------------------------------------------------------------------------------------


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
        return "" if known else "was taken back by a later failure, or its source changed"
    row = here.traces[name]
    if not row["is_here"]:
        return "is no trace that is here"
    if row["status"] != "PASSED":
        return f"has the status {row['status']}"
    return "was taken back by a later failure" if row["is_revoked"] else ""


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
