"""Files of Workloads: one JSON object a line, each judged by itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tilegym_db.catalog.broken import Broken
from tilegym_db.errors import RecordError
from tilegym_db.files import read_bytes
from tilegym_db.records import Definition, Workload

__all__ = ["WORKLOAD_BYTES", "read_workloads", "workloads_stated"]

WORKLOAD_BYTES = 256 << 20
"""The most that one file of Workloads may hold."""


def workloads_stated(path: Path) -> set[str | bytes]:
    """What tells the Workloads of a file apart, a uuid or a line, without judging them: to count them in a tenth of the time."""
    try:
        lines = read_bytes(path, "workload file", WORKLOAD_BYTES).splitlines()
    except RecordError:
        return set()
    found: set[str | bytes] = set()
    for line in lines:
        with suppress(ValueError, RecursionError):
            record = json.loads(line)
            if isinstance(record, dict):
                uuid = record.get("uuid")
                found.add(uuid if uuid and isinstance(uuid, str) else line)
    return found


def read_workloads(path: Path, definition: Definition) -> Iterator[Workload | Broken]:
    """Every Workload of a file, in order, and in its place what a line holds that is none of this Definition."""
    try:
        lines = read_bytes(path, "workload file", WORKLOAD_BYTES).splitlines()
    except RecordError as error:
        yield Broken(path, "", definition.name, str(error))
        return
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            workload = Workload.from_json(line, where)
            try:
                if workload.definition != definition.name:
                    raise RecordError(
                        f"definition is '{workload.definition}', but the file is {path.name}.", code="record_misplaced"
                    )
                workload.check_against(definition)
            except RecordError as error:
                raise RecordError(f"{where}: {error}", code=error.code) from None
            yield workload
        except RecordError as error:
            yield Broken(path, "", definition.name, str(error))
