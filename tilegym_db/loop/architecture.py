"""Checks the catalog as a whole, and reports each finding as one line."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tilegym_db.catalog import Catalog, SolutionFiles
from tilegym_db.errors import RecordError
from tilegym_db.records import TILE_LANGUAGES, Definition, axes_key
from tilegym_db.records.roofline import share_of_stated_light
from tilegym_db.store.opening import open_store
from tilegym_db.store.queries.loop import timed_passes, traced_digests
from tilegym_db.verification.check import pattern_findings

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
        timed = timed_passes(store)
        for definition in chosen:
            solutions = catalog.solutions_for(definition.name)
            count = len(catalog.workloads_for(definition.name))
            findings += definition_findings(definition, solutions, count, traced.get(definition.name, set()))
            findings += copies(solutions)
            findings += above_light(definition, timed.get(definition.digest, ()))
        if not names:
            findings += pattern_findings(catalog, store)
    return findings


def definition_findings(
    definition: Definition, solutions: Sequence[SolutionFiles], workloads: int, traced: Iterable[str]
) -> list[str]:
    """Return the problems of one Definition. ``traced`` has the digests of it that have traces. Pure."""
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


def above_light(definition: Definition, timed: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the verified passes that are faster than the speed of light at the stated peaks of their GPU. Pure.

    The cost of the Definition then counts more than the call did, or the time is wrong.
    """
    found = []
    for row in timed:
        try:
            light = share_of_stated_light(definition, row["axes"], row["dtypes"], row["gpu"], row["latency_us"])
        except (
            RecordError
        ):  # a Definition of the same digest allows its own shapes; one that was traced elsewhere may not
            continue
        if light is not None and light[1] > 1:
            found.append(
                f"{row['solution']}: {row['latency_us']:.4g} us at {axes_key(row['axes'])} on {row['gpu']} are {light[1]:.2f} of "
                f"the speed of light. The cost of {definition.name} counts more than this call did, or the time is wrong."
            )
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
