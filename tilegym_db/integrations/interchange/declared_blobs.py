"""What an export of ours says of its blobs, so that one that was changed since is told from one that was exported."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tilegym_db.files import reason_of
from tilegym_db.integrations.interchange.reading import LINK_OUT, leads_out

__all__ = ["SIDE_FILE", "DeclaredBlob", "declared_blobs"]

SIDE_FILE = "tilegym_db/blobs.json"
"""Path -> sha256, bytes, seed and inputs of each blob that was drawn."""
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MAX_BYTES = 64 << 20


@dataclass(frozen=True)
class DeclaredBlob:
    """The content that a file had when it was exported."""

    sha256: str
    nbytes: int


def declared_blobs(root: Path) -> dict[str, DeclaredBlob] | str | None:
    """Path -> content at the time of the export; None where the data set says nothing of it, or why it cannot be read."""
    file = root / SIDE_FILE
    try:
        if not os.path.lexists(file):
            return None
        if leads_out(file, root):
            return f"is {LINK_OUT}"
        if not file.is_file():
            return "is no regular file"
        if file.stat().st_size > _MAX_BYTES:
            return f"has more than {_MAX_BYTES} bytes"
        value = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        return f"is not valid JSON: {error}"
    except OSError as error:
        return f"cannot be read: {reason_of(error)}"
    blobs = value.get("blobs") if isinstance(value, dict) else None
    if not isinstance(blobs, dict):
        return "has no object 'blobs'"
    found = {}
    for path, item in blobs.items():
        sha256, nbytes = (item.get(key) for key in ("sha256", "bytes")) if isinstance(item, Mapping) else (None, None)
        if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256) or not isinstance(nbytes, int):
            return f"blobs.{path:.200}: needs 'sha256' and 'bytes'"
        found[path] = DeclaredBlob(sha256, nbytes)
    return found
