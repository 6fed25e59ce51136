"""What parsing the sources of a catalog found, kept from one command to the next: it is most of what ``list`` would take.

The headers of a source's functions are filed under the sha256 of its text and the version of Python that parsed it, so that a
source that changed is parsed again. Whatever is wrong with the file, or with writing it, costs time and nothing else.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tilegym_db.errors import TilegymDBError
from tilegym_db.files import read_bytes, write_atomically
from tilegym_db.records.python_source import headers_of_large_sources, recall_headers

__all__ = ["FILE_NAME", "keeping_parsed_sources"]

FILE_NAME = "parsed-sources.json"
MAX_BYTES = 8 << 20
PARSER = f"{sys.implementation.cache_tag} {sys.hexversion:x}"


@contextmanager
def keeping_parsed_sources(home: Path) -> Iterator[None]:
    """Inside the block, sources that an earlier command parsed need not be parsed; afterwards the new ones are kept too.

    Nothing is kept where there is no home folder yet. Of two processes at once one keeps what it found; the file is whole.
    """
    path = home / FILE_NAME
    known = _read(path)
    recall_headers(known)
    yield
    found = headers_of_large_sources()
    if found.keys() == known.keys() or not home.is_dir():
        return
    content = json.dumps({"parser": PARSER, "headers": found}).encode()
    if len(content) > MAX_BYTES:  # of sources long gone: begin again
        content = json.dumps({"parser": PARSER, "headers": {}}).encode()
    with suppress(TilegymDBError):
        write_atomically(path, content)


def _read(path: Path) -> dict[str, str]:
    try:
        content = json.loads(read_bytes(path, "list of parsed sources", MAX_BYTES))
        headers = content["headers"] if content["parser"] == PARSER else {}
        return {key: text for key, text in headers.items() if isinstance(text, str)}
    except (TilegymDBError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return {}
