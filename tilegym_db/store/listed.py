"""What ``tilegym-db list`` printed, kept in the home folder for as long as the catalog's files and this package stay as they are.

Reading a catalog to count it takes most of what ``list`` would. A catalog of which something was left out is read every time, so
that the warning is given every time. Whatever is wrong with the file, or with writing it, costs time and nothing else.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilegym_db.errors import TilegymDBError
from tilegym_db.files import read_bytes, write_atomically
from tilegym_db.store.fingerprints import fingerprint
from tilegym_db.store.input_files import record_files

if TYPE_CHECKING:
    from tilegym_db.catalog import Catalog

__all__ = ["FILE_NAME", "keep_rows", "kept_rows", "state_of"]

FILE_NAME = "listed.json"
MAX_BYTES = 8 << 20


def state_of(catalog: Catalog) -> str:
    """What the rows follow from: names, sizes and times of the records and of the modules that judge them."""
    package = Path(__file__).parents[1]
    modules = [path for name in ("catalog", "records") for path in package.glob(f"{name}/*.py")]
    return fingerprint([*record_files(catalog), *modules, package / "cli" / "list.py"])


def kept_rows(home: Path, state: str) -> list[dict[str, Any]] | None:
    """The rows that were kept at this state; None where there are none."""
    with suppress(TilegymDBError, ValueError, LookupError, TypeError, RecursionError):
        content = json.loads(read_bytes(home / FILE_NAME, "list of the catalog", MAX_BYTES))
        if content["state"] == state and all(isinstance(row, dict) for row in content["rows"]):
            return list(content["rows"])
    return None


def keep_rows(home: Path, state: str, rows: list[dict[str, Any]]) -> None:
    """Keep rows; ``state`` is that from before the catalog was read."""
    with suppress(TilegymDBError):
        write_atomically(home / FILE_NAME, json.dumps({"state": state, "rows": rows}).encode())
