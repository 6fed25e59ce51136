"""Writes ``workloads/checked-records.json``: which shipped files are valid, so that a new home need not judge them all before its
first answer.

Run it where records, kernels, Workloads or traces changed; until then those that did are judged as a user's own are, which takes
longer (:mod:`tilegym_db.published.snapshot`).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from tilegym_db.catalog import Catalog
from tilegym_db.catalog.record_files import visible
from tilegym_db.files import read_bytes, write_atomically
from tilegym_db.paths import shipped_root
from tilegym_db.published.snapshot import Checked, checked_file


def judged(catalog: Catalog, doubted: set[str]) -> dict[str, dict[str, Any]]:
    """Judge everything and return the list. ``doubted`` are the Definitions of passes whose figures cannot be true."""
    checked, root = Checked(catalog), shipped_root()
    definitions, files = {}, {}
    for name, record in catalog.definitions.items():
        path = catalog.definition_paths[name]
        stated = json.loads(read_bytes(path, "definition"))
        stated.pop("schema_version", None)
        if stated == record.to_dict():
            definitions[name] = [checked.definition_key(name), record.digest]
        workloads = [workload.to_dict() for workload in catalog.workloads_for(name)]
        for path in visible(root / "workloads", f"*/{name}.jsonl"):
            if [json.loads(line) for line in read_bytes(path, "workload file").splitlines()] == workloads:
                files[path] = checked.workloads_key(path, name)
    for name, solution in catalog.solutions.items():
        path = catalog.solution_paths[name]
        if checked.stated_solution(path) == solution.record.to_dict():
            files[path] = checked.solution_key(path, solution.record.definition, solution.sources)
    for name, keys in checked.trace_keys().items():
        files |= keys if name in catalog.definitions and name not in doubted else {}
    named = {path.relative_to(root).as_posix(): key for path, key in files.items()}
    return {"definitions": dict(sorted(definitions.items())), "files": dict(sorted(named.items()))}


def doubted_definitions(home: Path) -> set[str]:
    """Return the Definitions of shipped traces that are doubted, by a database that is made without the list."""
    from tilegym_db.store.opening import open_store

    checked_file().unlink(missing_ok=True)
    with open_store(home, read_only=True) as store:
        return {
            row["definition"] for row in store.rows("SELECT DISTINCT definition FROM traces WHERE doubt IS NOT NULL")
        }


def main() -> int:
    """Judge every shipped record and write which are valid, a line for each."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TILEGYM_DB_HOME"] = folder
        found = judged(Catalog((shipped_root(),)), doubted_definitions(Path(folder)))
    write_atomically(checked_file(), (json.dumps(found, indent=0) + "\n").encode())
    print(f"{checked_file()}: {len(found['definitions'])} definitions, {len(found['files'])} other files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
