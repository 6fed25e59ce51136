"""Import a data set: detect its dialect, read it without executing anything, and store it in one step."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilegym_db.errors import RecordError, UsageError
from tilegym_db.interchange import fi_trace_dumps, flashinfer_trace, sol_execbench, tilegym_inventory
from tilegym_db.interchange.unread_forms import unread_form
from tilegym_db.paths import home as default_home
from tilegym_db.store.imported import DataSet, add_data_set, check_addable, check_name, import_lock

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


def recognise(path: Path) -> Any:
    """Return the module of a data set's dialect.

    Raises:
        UsageError: the path does not exist, or its dialect is not recognised.
    """
    if not path.exists():
        raise UsageError(f"{path} does not exist.", code="data_set_missing")
    for dialect in DIALECTS.values():
        if dialect.is_this(path):
            return dialect
    if form := unread_form(path):
        raise UsageError(f"{path} is {form}.", code="dialect_unread")
    raise UsageError(
        f"{path} is not in a known dialect ({', '.join(DIALECTS)}). Give the root of the data set: the folder that "
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
) -> ImportReport:
    """Read a data set and store it. Nothing of it is executed or added to the catalog.

    Args:
        path: root of the data set, or one file of a dump.
        name: name of the data set; by default its folder's name.
        dialect: one of :data:`DIALECTS`; by default it is detected.
        replace: replace another data set of that origin.
        strict: raise if a record is refused, and store nothing.
        dry_run: only read and report.
        home: the store's folder; ``$TILEGYM_DB_HOME`` or the user data folder by default.

    Raises:
        UsageError: the path or dialect is unknown, or the name is invalid or taken by other content.
        RecordError: two records have the same name, nothing in it is a record, or ``strict`` is set and a record is refused.
        StoreError: the data set cannot be stored. Nothing was changed.
    """
    if dialect is not None and dialect not in DIALECTS:
        raise UsageError(f"unknown dialect '{dialect}'; known: {', '.join(DIALECTS)}.", code="dialect_unknown")
    chosen = DIALECTS[dialect] if dialect else recognise(path)
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
        raise RecordError(f"{path}: {what}: {some}. Nothing was imported.", code="records_refused")
    if not found.records:
        raise RecordError(
            f"{path}: no records of the dialect {dialect} are in it. Nothing was imported.", code="records_missing"
        )


def default_name(path: Path) -> str:
    """Return a name for a data set, derived from its folder or file."""
    return (
        re.sub(r"[^a-z0-9_.-]+", "-", path.stem.lower() if path.is_file() else path.name.lower()).strip("-._") or "data"
    )
