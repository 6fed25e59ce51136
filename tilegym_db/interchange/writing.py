"""Writes an export: whole or not at all, into a folder of its own; and imported data sets, byte for byte."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tilegym_db.errors import StoreError, UsageError
from tilegym_db.files import reason_of, write_folder
from tilegym_db.paths import scratch_folder
from tilegym_db.store.imported import DataSet, StoredRecord, paths_of


def refuse_taken(folder: Path) -> None:
    """Refuse a folder that nothing can be exported to; ask before an export is put together, which takes seconds.

    Raises:
        UsageError: it exists and holds something, or is no folder.
        StoreError: it cannot be looked at.
    """
    try:
        if os.path.lexists(folder) and not folder.is_dir():
            raise UsageError(f"{folder} exists and is no folder. Export into a new folder.", code="folder_irregular")
        if folder.is_dir() and any(folder.iterdir()):
            raise UsageError(f"{folder} exists and is not empty. Export into a new folder.", code="folder_occupied")
    except OSError as error:
        raise StoreError(_cannot_write(folder, error), code="write_failed") from None


@contextmanager
def folder_beside(folder: Path) -> Iterator[Path]:
    """A scratch folder on the file system that an export goes to, removed at the end.

    Raises:
        UsageError: the export's folder exists and holds something.
        StoreError: nothing can be written there.
    """
    refuse_taken(folder)
    with ExitStack() as stack:
        try:
            beside = Path(os.path.realpath(folder)).parent  # that of "." is "." itself
            beside.mkdir(parents=True, exist_ok=True)
            scratch = stack.enter_context(scratch_folder(beside))
        except OSError as error:
            raise StoreError(_cannot_write(folder, error), code="write_failed") from None
        yield scratch


def _cannot_write(folder: Path, error: OSError) -> str:
    return f"cannot write {folder}: {reason_of(error)}. Nothing was exported."


def write_tree(folder: Path, files: Mapping[str, bytes], copies: Mapping[str, Path] | None = None) -> None:
    """Write every file below ``folder``, which appears with all of them or not at all.

    Args:
        folder: one that does not exist yet, or is empty.
        files: path below it -> content.
        copies: path below it -> file to copy.

    Raises:
        UsageError: the folder exists and holds something.
        StoreError: it cannot be written. Nothing is left behind.
    """
    refuse_taken(folder)
    write_folder(folder, files, copies, may_be_empty=True)


def imported_files(found: DataSet, op_type: str | None = None) -> dict[str, bytes]:
    """Return the files of an imported data set, as they were.

    A line that was refused is not in its file. With ``op_type`` only what belongs to that family is there: its records, and the
    tensors that its Workloads name.
    """
    families = {item.name: item.record.get("op_type") for item in found.of_kind("definition")}

    def wanted(item: StoredRecord) -> bool:
        return op_type is None or families.get(item.definition) == op_type

    records = paths_of(found.records)
    named = {
        os.path.normpath(spec["path"])
        for item in found.of_kind("workload")
        if wanted(item)
        for spec in item.record["inputs"].values()
        if spec.get("type") == "safetensors"
    }
    files: dict[str, bytes] = {}
    for file in found.files:
        if file.role != "records":
            if op_type is None or file.path in named:
                files[file.path] = found.content(file.path)
            continue
        content = _kept_lines(found, file.path, records.get(file.path, []), wanted)
        if content is not None:
            files[file.path] = content
    return files


def _kept_lines(
    found: DataSet, path: str, records: list[StoredRecord], wanted: Callable[[StoredRecord], bool]
) -> bytes | None:
    """Return a file of records without the lines that were refused or are not wanted; None if nothing is left."""
    content = found.content(path)
    refused = {refusal.path for refusal in found.refused}
    whole = not any(f"{path}:" in place for place in refused) and all(wanted(item) for item in records)
    if whole:
        return content
    kept = [item for item in records if wanted(item)]
    if not kept:
        return None
    lines = [content[item.offset : item.offset + item.length] for item in kept]
    if records[0].line is None:
        return lines[0]
    return b"\n".join(lines) + (b"\n" if content.endswith(b"\n") else b"")
