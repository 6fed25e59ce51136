"""JSON Schema of the records, generated from their models: ``python -m tilegym_db.records.schema [--check] DIR``.

The files let an editor or another language check a record. They say what a schema can say; what ties fields together
(an axis that a shape uses must be declared) only the models check.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from tilegym_db.records.base import Record
from tilegym_db.records.definition import Definition
from tilegym_db.records.model_run import ModelRun
from tilegym_db.records.peaks import GpuPeaks
from tilegym_db.records.solution import Solution
from tilegym_db.records.trace import Trace
from tilegym_db.records.workload import Workload

__all__ = ["RECORDS", "json_schema", "schema_files"]

RECORDS: tuple[type[Record], ...] = (Definition, Solution, Workload, Trace, GpuPeaks, ModelRun)
DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema(record: type[Record]) -> dict[str, Any]:
    """The JSON Schema of one record."""
    return {"$schema": DIALECT, **record.model_json_schema(by_alias=True)}


def schema_files() -> dict[str, str]:
    """File name -> text of every schema."""
    return {
        f"{record.kind}.schema.json": json.dumps(json_schema(record), indent=2, ensure_ascii=False) + "\n"
        for record in RECORDS
    }


def main() -> int:
    """Write the files, or with ``--check`` only compare them; returns 1 where one differs."""
    parser = argparse.ArgumentParser(description="Generate the JSON Schema of the records.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is not current")
    arguments = parser.parse_args()
    stale = [
        name
        for name, text in schema_files().items()
        if not (arguments.folder / name).is_file() or (arguments.folder / name).read_text(encoding="utf-8") != text
    ]
    for name in stale:
        if arguments.check:
            print(f"{arguments.folder / name} is not what the records say. Run: make schema", file=sys.stderr)
        else:
            arguments.folder.mkdir(parents=True, exist_ok=True)
            (arguments.folder / name).write_text(schema_files()[name], encoding="utf-8")
            print(arguments.folder / name)
    return 1 if arguments.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
