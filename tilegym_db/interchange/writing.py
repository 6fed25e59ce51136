"""Write an export atomically into a new folder, and write imported data sets byte for byte."""

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
    """Raise if a folder is not free for an export. Call it before building the export, which takes seconds.

    Raises:
        UsageError: the path exists and is not an empty folder.
        StoreError: the path cannot be read.
    """
    try:
        if os.path.lexists(folder) and not folder.is_dir():
            raise UsageError(f"{folder} exists and is not a folder. Export into a new folder.", code="folder_irregular")
        if folder.is_dir() and any(folder.iterdir()):
            raise UsageError(f"{folder} exists and is not empty. Export into a new folder.", code="folder_occupied")
    except OSError as error:
        raise StoreError(_cannot_write(folder, error), code="write_failed") from None


@contextmanager
def folder_beside(folder: Path) -> Iterator[Path]:
    """Yield a scratch folder on the file system of an export; it is removed at the end.

    Raises:
        UsageError: the export's folder exists and is not empty.
        StoreError: the folder cannot be written.
    """
    refuse_taken(folder)
    with ExitStack() as stack:
        try:
            beside = Path(os.path.realpath(folder)).parent  # the parent of "." would be "."
            beside.mkdir(parents=True, exist_ok=True)
            scratch = stack.enter_context(scratch_folder(beside))
        except OSError as error:
            raise StoreError(_cannot_write(folder, error), code="write_failed") from None
        yield scratch


def _cannot_write(folder: Path, error: OSError) -> str:
    return f"cannot write {folder}: {reason_of(error)}. Nothing was exported."


def write_tree(folder: Path, files: Mapping[str, bytes], copies: Mapping[str, Path] | None = None) -> None:
    """Write every file below ``folder``, or none.

    Args:
        folder: a folder that is empty or does not exist.
        files: contents by path below the folder.
        copies: files to copy, by path below the folder.

    Raises:
        UsageError: the folder exists and is not empty.
        StoreError: the folder cannot be written. Nothing is left behind.
    """
    refuse_taken(folder)
    write_folder(folder, files, copies, may_be_empty=True)


def imported_files(found: DataSet, op_type: str | None = None) -> dict[str, bytes]:
    """Return the files of an imported data set with their original bytes.

    Refused lines are missing from their files. With ``op_type``, only the records of that family and the tensor files of its
    Workloads are included.
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
    """Return a file of records without refused or unwanted lines; None if nothing is left."""
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
