"""Writes ``solutions/parsed-sources.json``: the headers of the functions in the shipped sources, which a new home need not parse.

Run it where kernels changed; until then those are parsed, which takes longer (:mod:`tilegym_db.catalog.record_files`).
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from tilegym_db.catalog import Catalog
from tilegym_db.catalog.record_files import ANY_PARSER, shipped_file
from tilegym_db.files import write_atomically
from tilegym_db.paths import shipped_root, use_root
from tilegym_db.records.expressions import headers_of_large_sources


def main() -> None:
    """Parse every shipped source and write what was found, a line for each."""
    catalog = Catalog((shipped_root(),))
    with tempfile.TemporaryDirectory() as nothing, use_root(Path(nothing)):  # what was written before is not recalled
        _ = catalog.solutions
    found = headers_of_large_sources()
    content = {"parser": ANY_PARSER, "headers": dict(sorted(found.items()))}
    write_atomically(shipped_file(), (json.dumps(content, indent=0) + "\n").encode())
    print(f"{shipped_file()}: {len(found)} sources")


if __name__ == "__main__":
    main()
