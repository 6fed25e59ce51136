"""Reads the pattern pages, and checks them against the traces, searches and package versions that they cite."""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tilegym_db.catalog import Catalog
from tilegym_db.errors import RecordError
from tilegym_db.files import decode, read_bytes
from tilegym_db.published.input_files import pattern_files
from tilegym_db.records.loop import UNMEASURED, Pattern
from tilegym_db.store.connection import Store
from tilegym_db.store.queries.loop import cited_cases, cited_searches, cited_traces


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


# ---- pattern pages --------------------------------------------------------------------------------
# Reads the pages ``docs/patterns/<language>.md`` of the catalog's roots, one section per pattern.
# A section is a second-level heading, then a block of TOML with the ``name`` of the pattern and the keys of
# :class:`~tilegym_db.records.loop.Pattern`, then the advice.

_SECTION = re.compile(
    r"\A## (?P<title>[^\n]+)\n\s*```toml\n(?P<keys>.*?)^```\n(?P<text>.*)\Z", re.DOTALL | re.MULTILINE
)
_LINE = re.compile(r"^(?:(?P<fence>```)|(?P<heading>## ))", re.MULTILINE)


def read_patterns(catalog: Catalog) -> tuple[list[Pattern], list[str]]:
    """Read the patterns, sorted by id, and the reason for each section or page that is left out.

    If two pages have a pattern of the same id, that of the first root counts.
    """
    found: dict[str, Pattern] = {}
    refused: list[str] = []
    for path in pattern_files(catalog):
        try:
            sections = _sections(path)
        except RecordError as error:
            refused.append(str(error))
            continue
        names: set[str] = set()
        for line, section in sections:
            try:
                pattern = _pattern(section, path.stem, f"{path}:{line}")
                if pattern.id in names:
                    raise RecordError(
                        f"{path}:{line}: the page has a pattern {pattern.id} already. Choose another name.",
                        code="pattern_repeated",
                    )
            except RecordError as error:
                refused.append(str(error))
            else:
                names.add(pattern.id)
                found.setdefault(pattern.id, pattern)
    return [found[name] for name in sorted(found)], refused


def _sections(path: Path) -> list[tuple[int, str]]:
    """Split a page at its second-level headings: line number and text of each section."""
    text = decode(read_bytes(path, "pattern"), path)
    starts, fenced = [], False
    for match in _LINE.finditer(text):
        if match["fence"]:
            fenced = not fenced
        elif not fenced:
            starts.append(match.start())
    if not starts:
        raise RecordError(
            f"{path}: each pattern on this page needs a section '## TITLE', and the page has none.",
            code="pattern_missing",
        )
    ends = [*starts[1:], len(text)]
    return [(text.count("\n", 0, start) + 1, text[start:end]) for start, end in zip(starts, ends, strict=True)]


def _pattern(section: str, language: str, place: str) -> Pattern:
    """Return the pattern of a section; an error names the file and the line."""
    parts = _SECTION.match(section.rstrip() + "\n")
    if parts is None:
        raise RecordError(
            f"{place}: a pattern begins with '## TITLE', a block ```toml with its keys, and ```.", code="pattern_syntax"
        )
    try:
        keys = tomllib.loads(parts["keys"])
    except tomllib.TOMLDecodeError as error:
        raise RecordError(f"{place}: its keys are not valid TOML: {error}.", code="toml_syntax") from None
    taken = sorted(keys.keys() & {"digest", "id", "language", "text", "title"})
    if taken:
        raise RecordError(f"{place}: {taken[0]!r} follows from the page. Leave it out of the keys.", code="key_of_page")
    return Pattern.from_dict(
        {
            **{key: value for key, value in keys.items() if key != "name"},
            "id": f"{language}/{keys.get('name', '')}",
            "language": language,
            "title": parts["title"].strip(),
            "digest": hashlib.sha256(section.strip().encode()).hexdigest(),
            "text": parts["text"].strip(),
        },
        place,
    )
