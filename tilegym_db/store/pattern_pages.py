"""The pattern base: the pages ``docs/patterns/<language>.md`` of the catalog's roots, one section a pattern.

A section begins with its title as a heading of the second level. A block of TOML follows, with the ``name`` of the pattern and
the keys of :class:`~tilegym_db.records.loop.Pattern`. The advice comes after it.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from pathlib import Path

from tilegym_db.catalog import Catalog
from tilegym_db.errors import RecordError
from tilegym_db.files import decode, read_bytes
from tilegym_db.records.loop import Pattern
from tilegym_db.store.input_files import pattern_files

__all__ = ["read_patterns"]

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
                        f"{path}:{line}: the page has a pattern {pattern.id} already. Choose another name."
                    )
            except RecordError as error:
                refused.append(str(error))
            else:
                names.add(pattern.id)
                found.setdefault(pattern.id, pattern)
    return [found[name] for name in sorted(found)], refused


def _sections(path: Path) -> list[tuple[int, str]]:
    """Cut a page at its headings of the second level: line number and text of each section.

    Raises:
        RecordError: the page cannot be read, or has no section; names the file.
    """
    text = decode(read_bytes(path, "pattern"), path)
    starts, fenced = [], False
    for match in _LINE.finditer(text):
        if match["fence"]:
            fenced = not fenced
        elif not fenced:
            starts.append(match.start())
    if not starts:
        raise RecordError(
            f"{path}: a page of patterns has a section '## TITLE' for each of them; this one has no section."
        )
    ends = [*starts[1:], len(text)]
    return [(text.count("\n", 0, start) + 1, text[start:end]) for start, end in zip(starts, ends, strict=True)]


def _pattern(section: str, language: str, place: str) -> Pattern:
    """Make the pattern of a section.

    Raises:
        RecordError: the section has no block of TOML, or the record is not valid; names the file and the line.
    """
    parts = _SECTION.match(section.rstrip() + "\n")
    if parts is None:
        raise RecordError(f"{place}: a pattern begins with '## TITLE', a block ```toml with its keys, and ```.")
    try:
        keys = tomllib.loads(parts["keys"])
    except tomllib.TOMLDecodeError as error:
        raise RecordError(f"{place}: its keys are not valid TOML: {error}.") from None
    taken = sorted(keys.keys() & {"digest", "id", "language", "text", "title"})
    if taken:
        raise RecordError(f"{place}: {taken[0]!r} follows from the page. Leave it out of the keys.")
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
