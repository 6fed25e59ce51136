"""The catalog as rows of the database, without judging again what was judged when the package was made.

What took a new home longest were rules that shipped records are known to keep. :mod:`tilegym_db.store.checked` knows which files
were valid then; one that changed, or that depends on one that did, is read and judged as a user's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from tilegym_db.catalog import Catalog
from tilegym_db.catalog.solution_files import read_source
from tilegym_db.catalog.solution_places import definition_at, visible
from tilegym_db.errors import RecordError
from tilegym_db.records import Solution, axes_key
from tilegym_db.store.checked import Checked

__all__ = ["definition_rows", "solution_rows", "workload_rows"]

Row = dict[str, Any]


def definition_rows(catalog: Catalog, checked: Checked) -> list[Row]:
    """Every valid Definition, by name. What is broken is left out, and named as :attr:`Catalog.definitions` does."""
    rows = []
    for name, path in sorted(catalog.definition_paths.items()):
        digest = checked.definition_digest(name)
        if digest is None:
            try:
                definition = catalog.definition(name)
            except RecordError:
                return [_definition_row(one.digest, one.to_dict()) for one in catalog.definitions.values()]
            rows.append(_definition_row(definition.digest, definition.to_dict()))
        else:
            rows.append(_definition_row(digest, from_json(checked.content(path))))
    return rows


def solution_rows(catalog: Catalog, checked: Checked) -> list[Row]:
    """Every valid Solution, by name. What is broken is left out, and named as :attr:`Catalog.solutions` does."""
    rows, unknown = {}, set()
    for name, path in catalog.solution_paths.items():
        row = _checked_solution(path, checked)
        if row is None:
            unknown.add(definition_at(path))
        else:
            rows[name] = row
    if unknown <= catalog.definition_paths.keys():
        read = [files for definition in sorted(unknown) for files in catalog.solutions_for(definition)]
    else:
        read = list(catalog.solutions.values())
    rows |= {files.name: _solution_row(files.record, files.digest) for files in read}
    return [rows[name] for name in sorted(rows)]


def workload_rows(catalog: Catalog, checked: Checked, definitions: list[str]) -> list[Row]:
    """Every valid Workload of these Definitions. What is broken is left out and named."""
    rows = []
    for name in definitions:
        records = _checked_workloads(catalog, name, checked)
        if records is None:
            records = [workload.to_dict() for workload in catalog.workloads_for(name)]
        rows += [_workload_row(record) for record in records]
    return rows


def _checked_solution(path: Path, checked: Checked) -> Row | None:
    if not checked.lists(path):
        return None
    try:
        record = Solution.model_validate(from_json(checked.content(path)))
        sources = {source.path: read_source(path, source.path) for source in record.sources}
    except (RecordError, ValueError):
        return None  # reading it as any other says what is wrong
    return _solution_row(record, record.digest(sources)) if checked.solution(path, record, sources) else None


def _checked_workloads(catalog: Catalog, definition: str, checked: Checked) -> list[Row] | None:
    """The Workloads of a Definition as its files state them; None unless all of these are known to be valid."""
    found: dict[str, Row] = {}
    for root in catalog.roots:
        for path in visible(root / "workloads", f"*/{definition}.jsonl"):
            if not checked.workloads(path, definition):
                return None
            for record in map(from_json, checked.content(path).splitlines()):
                found.setdefault(record["uuid"], record)
    return list(found.values())


def _definition_row(digest: str, record: Row) -> Row:
    record.pop("schema_version", None)  # what is kept of a record is what it says, without defaults
    return {key: record[key] for key in ("name", "version", "op_type")} | {"digest": digest, "record": record}


def _solution_row(record: Solution, digest: str) -> Row:
    return {"name": record.name, "definition": record.definition, "digest": digest, "record": record.to_dict()}


def _workload_row(record: Row) -> Row:
    dtypes: Mapping[str, str] = record.get("dtypes", {})
    return {
        "uuid": record["uuid"],
        "definition": record["definition"],
        "axes_key": axes_key(record["axes"]),
        "dtypes_key": ",".join(f"{name}={dtypes[name]}" for name in sorted(dtypes)),
        "record": record,
    }
