"""Rewrites published traces of an older layout as trace sets: ``python -m tilegym_db.store.migrate FOLDER...``.

Layout 1 had one whole trace per line, all searches of a GPU in ``tuning.jsonl``, and ``resolver.json``, a copy of data
in the traces. A folder is ``traces/<gpu>`` or ``published/<gpu>``. Migrating a folder declares it trusted: its lock is
signed by this installation, or is the package's own in a checkout.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tilegym_db.catalog import Catalog, read_bytes, write_atomically
from tilegym_db.errors import NotFoundError, RecordError, TilegymDBError
from tilegym_db.paths import home as default_home
from tilegym_db.published.input_files import LOCK_NAME, OLD_TABLE_NAME, OLD_TUNING_NAME, TUNING_SUFFIX, trace_files
from tilegym_db.published.snapshot import lock_folder
from tilegym_db.published.trace_set import is_trace_set
from tilegym_db.published.trace_set_writer import encode_traces
from tilegym_db.published.tuning_set import encode_steps
from tilegym_db.records import Trace
from tilegym_db.store.journal import read_journal
from tilegym_db.store.tuning import TuningStep


def migrate_folder(folder: Path, catalog: Catalog | None = None, home: Path | None = None) -> list[Path]:
    """Rewrite a folder of layout 1 as trace sets, steps by Definition, and a lock. Return the written files.

    Every trace, failure and step stays. ``resolver.json`` and ``tuning.jsonl``, which are then redundant, are removed
    last. A migrated folder stays as it is.

    Raises:
        RecordError: a file is not valid; then nothing was changed.
        StoreError: the folder cannot be written.
    """
    catalog = catalog or Catalog.default()
    old_table, old_steps = folder / OLD_TABLE_NAME, folder / OLD_TUNING_NAME
    table = _table(old_table)
    contents: dict[Path, str] = {}
    for path in trace_files(folder):
        if not is_trace_set(read_bytes(path, "traces")):
            contents[path] = _as_set(path, _provides(table, catalog))
    if old_steps.is_file():
        contents |= _steps(folder, catalog)
    if not contents and not old_table.is_file():
        return []
    first = next((read_journal(path).traces[0] for path in trace_files(folder)), None)
    for path, text in contents.items():
        write_atomically(path, text.encode())
    for path in (old_table, old_steps):
        path.unlink(missing_ok=True)
    lock_folder(
        folder,
        home or default_home(),
        gpu=table.get("gpu", folder.name),
        sm=table.get("sm") or (first.sm if first else ""),
        published=table.get("published") or f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
    )
    return [*contents, folder / LOCK_NAME]


def _table(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_bytes()) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise RecordError(f"{path}: cannot read this resolver table: {error}.", code="table_unreadable") from None
    return content


def _provides(table: dict[str, Any], catalog: Catalog) -> dict[str, str | None]:
    """Return the ``provides`` of each Solution: from the old table, else from the catalog."""
    said = {name: files.record.spec.provides for name, files in catalog.solutions.items()}
    candidates = itertools.chain.from_iterable(entry["candidates"] for entry in table.get("entries", ()))
    return said | {item["solution"]: item.get("provides") for item in candidates}


def _as_set(path: Path, provides: dict[str, str | None]) -> str:
    content = read_journal(path)
    if content.rejected:
        raise RecordError(f"{content.rejected[0]} Nothing was changed.", code="journal_line_invalid")
    return encode_traces([trace.to_dict() for trace in content.traces], provides)


def _steps(folder: Path, catalog: Catalog) -> dict[Path, str]:
    path = folder / OLD_TUNING_NAME
    steps = []
    for number, line in enumerate(read_bytes(path, "steps").splitlines(), start=1):
        step = TuningStep.from_json(line, f"{path}:{number}")
        steps.append((*_place(step, folder, catalog), step))
    contents = {}
    ordered = sorted(steps, key=lambda item: item[:2])  # stable: the order of steps within a Definition stays
    for (op_type, definition), group in itertools.groupby(ordered, key=lambda item: item[:2]):
        target = folder / op_type / f"{definition}{TUNING_SUFFIX}"
        contents[target] = encode_steps(definition, [step.to_dict() for _, _, step in group])
    return contents


def _place(step: TuningStep, folder: Path, catalog: Catalog) -> tuple[str, str]:
    """Return op_type and Definition of a step: by its Solution, or by its traces if the Solution left the catalog."""
    try:
        record = catalog.definition(catalog.solution(step.solution).record.definition)
        return record.op_type, record.name
    except NotFoundError:
        for trace in _first_traces(folder):
            if trace.definition_digest == step.definition_digest:
                return trace.op_type, trace.definition
    raise RecordError(
        f"{folder / OLD_TUNING_NAME}: no Definition is known for a step of '{step.solution}'.",
        code="definition_unknown",
    )


def _first_traces(folder: Path) -> Iterable[Trace]:
    return (content.traces[0] for path in trace_files(folder) if (content := read_journal(path)).traces)


def main(arguments: list[str] | None = None) -> int:
    """Migrate the folders given on the command line; return 1 if one cannot be migrated."""
    parser = argparse.ArgumentParser(description="Write published traces of an older layout as trace sets.")
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER", help="traces/<gpu> or published/<gpu>")
    for folder in parser.parse_args(arguments).folders:
        try:
            written = migrate_folder(folder)
        except TilegymDBError as error:
            print(error, file=sys.stderr)
            return 1
        print(f"{folder}: {len(written)} files written" if written else f"{folder}: nothing to migrate")
    return 0


if __name__ == "__main__":
    sys.exit(main())
