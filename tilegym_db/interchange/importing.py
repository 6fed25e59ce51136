"""Import a data set: detect its dialect, read it without executing anything, and store it in one step.

The second part writes an export atomically into a new folder, and writes imported data sets byte for byte.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilegym_db.errors import RecordError, StoreError, UsageError
from tilegym_db.files import reason_of, write_folder
from tilegym_db.interchange import fi_trace_dumps, flashinfer_trace, sol_execbench, tilegym_inventory
from tilegym_db.paths import home as default_home
from tilegym_db.paths import scratch_folder
from tilegym_db.store.imported import (
    DataSet,
    StoredRecord,
    add_data_set,
    check_addable,
    check_name,
    import_lock,
    paths_of,
)

DIALECTS: dict[str, Any] = {
    module.DIALECT: module for module in (flashinfer_trace, tilegym_inventory, sol_execbench, fi_trace_dumps)
}
"""Modules with ``is_this(root) -> bool`` and ``read(root) -> Collection``, by dialect, in the order in which they are tried.

A FlashInfer-Trace tree may contain files of the others, but not the reverse.
"""


@dataclass(frozen=True)
class ImportReport:
    """The imported data set. ``changed`` is False if the same content was stored before, or in a dry run."""

    data_set: DataSet
    changed: bool


def recognise(path: Path, dialects: Mapping[str, Any] = DIALECTS) -> Any:
    """Return the module of a data set's dialect."""
    if not path.exists():
        raise UsageError(f"{path} does not exist.", code="data_set_missing")
    for dialect in dialects.values():
        if dialect.is_this(path):
            return dialect
    if form := unread_form(path):
        raise UsageError(f"{path} is {form}.", code="dialect_unread")
    raise UsageError(
        f"{path} is not in a known dialect ({', '.join(dialects)}). Give the root of the data set: the folder that "
        "holds definitions/, kernel_definitions/, the folders of the problems, or the dumps.",
        code="dialect_unrecognised",
    )


def import_data_set(
    path: Path,
    *,
    name: str | None = None,
    dialect: str | None = None,
    replace: bool = False,
    strict: bool = False,
    dry_run: bool = False,
    home: Path | None = None,
    more: Mapping[str, Any] | None = None,
) -> ImportReport:
    """Read a data set and store it. Nothing of it is executed or added to the catalog.

    Args:
        path: root of the data set, or one file of a dump.
        dialect: one of :data:`DIALECTS`; by default it is detected.
        more: modules of more dialects, tried after those of :data:`DIALECTS`.

    Raises:
        UsageError: the path or dialect is unknown, or the name is invalid or taken by other content.
        RecordError: two records have the same name, nothing in it is a record, or ``strict`` is set and a record is refused.
        StoreError: the data set cannot be stored. Nothing was changed.
    """
    dialects = {**DIALECTS, **(more or {})}
    if dialect is not None and dialect not in dialects:
        raise UsageError(f"unknown dialect '{dialect}'; known: {', '.join(dialects)}.", code="dialect_unknown")
    chosen = dialects[dialect] if dialect else recognise(path, dialects)
    if not path.exists():
        raise UsageError(f"{path} does not exist.", code="data_set_missing")
    root = path.resolve()
    folder = home or default_home()
    if name is not None:
        check_name(name)  # before anything is read
    try:
        collection = chosen.read(root)
        found = collection.finish(default_name(root) if name is None else name, folder)
    except OSError as error:
        raise RecordError(
            f"{error.filename or path}: cannot be read: {error.strerror}. Nothing was imported.", code="file_unreadable"
        ) from None
    _refuse(path, found, chosen.DIALECT, strict)
    if dry_run:
        check_addable(found, folder, replace=replace)
        return ImportReport(found, False)
    with import_lock(folder):
        changed = add_data_set(found, collection.sources, folder, replace=replace)
    return ImportReport(found, changed)


def _refuse(path: Path, found: DataSet, dialect: str, strict: bool) -> None:
    """Raise :class:`RecordError` if nothing was accepted or, with ``strict``, if something was refused."""
    if found.refused and (strict or not found.records):
        some = "; ".join(str(refusal) for refusal in found.refused[:5])
        what = "nothing in it can be imported" if not found.records else f"{len(found.refused)} refused, and --strict"
        raise RecordError(
            f"{path}: {what}: {some}. Nothing was imported. Mend what is named, then run the command again.",
            code="records_refused",
        )
    if not found.records:
        raise RecordError(
            f"{path}: no records of the dialect {dialect} are in it. Nothing was imported.", code="records_missing"
        )


def default_name(path: Path) -> str:
    """Return a name for a data set, derived from its folder or file."""
    return (
        re.sub(r"[^a-z0-9_.-]+", "-", path.stem.lower() if path.is_file() else path.name.lower()).strip("-._") or "data"
    )


# ---- Writing ---------------------------------------------------------------------------------------------


def refuse_taken(folder: Path) -> None:
    """Raise if a folder is not free for an export. Call it before building the export, which takes seconds."""
    try:
        if os.path.lexists(folder) and not folder.is_dir():
            raise UsageError(f"{folder} exists and is not a folder. Export into a new folder.", code="folder_irregular")
        if folder.is_dir() and any(folder.iterdir()):
            raise UsageError(f"{folder} exists and is not empty. Export into a new folder.", code="folder_occupied")
    except OSError as error:
        raise StoreError(_cannot_write(folder, error), code="write_failed") from None


@contextmanager
def folder_beside(folder: Path) -> Iterator[Path]:
    """Yield a scratch folder on the file system of an export; it is removed at the end."""
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
    """Write files and copies by their paths below ``folder``, which is empty or does not exist: all or none."""
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


# ---- forms that nothing reads ---------------------------------------------------------------------
# Recognises files of other projects that no dialect reads, so that a refusal can say the reason and the way in by hand.

MAX_FILES = 200
"""Maximum number of files of a folder that are looked at."""
_TILE_SIZES = re.compile(r"E=\d+,N=\d+,device_name=[^,]+(,.*)?\.json")
TILE_SIZES = (
    "tuned tile sizes of vLLM's fused_moe: they are tunables of that kernel, and no measurement. To search the kernels here from "
    "their nearest configs: tilegym-db tune moe_experts --start {}"
)


def unread_form(path: Path) -> str | None:
    """Return what a file or folder is, and how to bring it in; None if it is not known. Nothing is executed."""
    files: Iterable[Path] = [path]
    if path.is_dir():
        files = itertools.islice((one for one in path.rglob("*.json") if one.is_file()), MAX_FILES)
    found = next((file for file in files if _TILE_SIZES.fullmatch(file.name)), None)
    return None if found is None else TILE_SIZES.format(shlex.quote(str(found)))
