"""The pattern base: pages ``docs/patterns/<language>/<name>.md`` of the catalog's roots, each with its front matter in TOML.

A page begins with ``+++``, the keys of :class:`~tilegym_db.records.loop.Pattern` that are not its text, and ``+++``; the title
is its first heading.
"""

from __future__ import annotations

import hashlib
import tomllib
from pathlib import Path

from tilegym_db.catalog import Catalog
from tilegym_db.errors import RecordError
from tilegym_db.files import decode, read_bytes
from tilegym_db.records.loop import Pattern
from tilegym_db.store.input_files import pattern_files

__all__ = ["read_pattern", "read_patterns"]

FENCE = "+++\n"


def read_patterns(catalog: Catalog) -> tuple[list[Pattern], list[str]]:
    """The patterns, by id, and why each page that is none is left out."""
    found: dict[str, Pattern] = {}
    refused: list[str] = []
    for path in pattern_files(catalog):
        try:
            pattern = read_pattern(path)
            found.setdefault(pattern.id, pattern)
        except RecordError as error:
            refused.append(str(error))
    return [found[name] for name in sorted(found)], refused


def read_pattern(path: Path) -> Pattern:
    """The pattern of a page.

    Raises:
        RecordError: it has no front matter, no heading, or the record is not valid; names the file.
    """
    content = read_bytes(path, "pattern")
    text = decode(content, path)
    parts = text.split(FENCE, 2)
    if len(parts) != 3 or parts[0]:
        raise RecordError(f"{path}: a pattern begins with +++, its keys in TOML, and +++.")
    try:
        keys = tomllib.loads(parts[1])
    except tomllib.TOMLDecodeError as error:
        raise RecordError(f"{path}: its front matter is no TOML: {error}.") from None
    body = parts[2].strip()
    heading, _, rest = body.partition("\n")
    if not heading.startswith("# "):
        raise RecordError(f"{path}: the first line after the front matter is a heading, '# ...'.")
    return Pattern.from_dict(
        {
            **keys,
            "id": f"{path.parent.name}/{path.stem}",
            "title": heading.removeprefix("# ").strip(),
            "digest": hashlib.sha256(content).hexdigest(),
            "text": rest.strip(),
        },
        path,
    )
