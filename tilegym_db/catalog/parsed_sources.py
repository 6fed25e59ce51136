"""What parsing the sources of a catalog found, kept from one command to the next: it is most of what ``list`` would take.

The headers of a source's functions are filed under the sha256 of its text and the version of Python that parsed it, so that a
source that changed is parsed again. Whatever is wrong with the file, or with writing it, costs time and nothing else. A file of
the same kind comes with the package, for a home that is new: ``python tools/write_parsed_sources.py`` writes it. What the oldest
Python parsed, every later one parses alike, and a test holds that.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tilegym_db.errors import TilegymDBError
from tilegym_db.files import read_bytes, write_atomically
from tilegym_db.paths import shipped_root
from tilegym_db.records.python_source import headers_of_large_sources, recall_headers

__all__ = ["ANY_PARSER", "FILE_NAME", "keeping_parsed_sources", "shipped_file"]

FILE_NAME = "parsed-sources.json"
MAX_BYTES = 8 << 20
PARSER = f"{sys.implementation.cache_tag} {sys.hexversion:x}"
ANY_PARSER = "any"
"""The parser of the file that comes with the package."""


def shipped_file() -> Path:
    """The headers of the sources that come with the package."""
    return shipped_root() / "solutions" / FILE_NAME


@contextmanager
def keeping_parsed_sources(home: Path) -> Iterator[None]:
    """Inside the block, sources that an earlier command parsed need not be parsed; afterwards the new ones are kept too.

    Nothing is kept where there is no home folder yet. Of two processes at once one keeps what it found; the file is whole.
    """
    path = home / FILE_NAME
    shipped, known = _read(shipped_file(), ANY_PARSER), _read(path, PARSER)
    recall_headers({**known, **shipped})
    yield
    found = {key: text for key, text in headers_of_large_sources().items() if key not in shipped}
    if found.keys() == known.keys() or not home.is_dir():
        return
    content = json.dumps({"parser": PARSER, "headers": found}).encode()
    if len(content) > MAX_BYTES:  # of sources long gone: begin again
        content = json.dumps({"parser": PARSER, "headers": {}}).encode()
    with suppress(TilegymDBError):
        write_atomically(path, content)


def _read(path: Path, parser: str) -> dict[str, str]:
    try:
        content = json.loads(read_bytes(path, "list of parsed sources", MAX_BYTES))
        headers = content["headers"] if content["parser"] == parser else {}
        return {key: text for key, text in headers.items() if isinstance(text, str)}
    except (TilegymDBError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return {}
