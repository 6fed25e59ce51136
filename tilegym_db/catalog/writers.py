"""Adds records to a catalog. Under the lock of the root, each function checks the root again and writes in one step."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from tilegym_db.catalog.reader import LOCK_FILE, Catalog, Locked, add_blobs, lock_path, read_lock
from tilegym_db.catalog.record_files import (
    CHECKED_RECORDS,
    RECORD_NAME,
    WORKLOAD_BYTES,
    SolutionFiles,
    check_entry_point,
    definition_at,
    file_of,
    in_family,
    source_file,
)
from tilegym_db.errors import ConflictError, NotFoundError, RecordError, check_kind, did_you_mean
from tilegym_db.files import read_bytes, remove_folder, replace_folder, write_atomically, write_folder, writing
from tilegym_db.records import Definition, Solution, Workload
from tilegym_db.records.base import problems_of
from tilegym_db.records.definition_parts import overlap_words
from tilegym_db.records.dtypes import Scalar
from tilegym_db.records.solution import signature_problem
from tilegym_db.records.text import parse_object


def add_definition(catalog: Catalog, record: Definition) -> Path:
    """Write a new Definition, or a new version of one, and lock it.

    Raises:
        ConflictError: the version exists with another meaning, or is not newer than the existing one.
        StoreError: the file cannot be written, or another process holds the catalog's lock.
    """
    check_kind(record, Definition, "add_definition takes a Definition")
    root = catalog.write_root
    _check_new_definition(catalog, record, root)  # before any file is created, including the lock file
    with writing(root):
        locked = _check_new_definition(catalog.reread(root), record, root)
        target = root / "definitions" / record.op_type / f"{record.name}.json"
        write_atomically(target, (record.to_json(indent=2) + "\n").encode())
        locked.setdefault(record.name, {})[record.version] = record.digest
        write_lock(root, locked)
    return target


def _check_new_definition(now: Catalog, record: Definition, root: Path) -> dict[str, dict[str, str]]:
    """Return the lock of the root; raise :class:`ConflictError` if the Definition cannot be added."""
    locked = read_lock(root)
    known = locked.get(record.name, {}).get(record.version)
    path = now.definition_paths.get(record.name)
    if path is not None:
        _check_successor(now, record, path, root, is_locked=known == record.digest)
    if known not in (None, record.digest):
        raise ConflictError(
            f"definition '{record.name}' {record.version} is locked with another meaning in {root / 'definitions'}. "
            "Raise 'version'.",
            code="lock_differs",
        )
    return locked


def _check_successor(now: Catalog, record: Definition, path: Path, root: Path, *, is_locked: bool) -> None:
    """Raise :class:`ConflictError` unless a Definition may replace the existing one of its name."""
    if not path.is_relative_to(root):
        raise ConflictError(
            f"definition '{record.name}' is shipped in {path} and cannot be shadowed. Use another name.",
            code="definition_shipped",
        )
    try:
        existing = now.read_definition(path)
    except RecordError as error:
        raise ConflictError(
            f"definition '{record.name}' exists, but is broken: {error} Mend or remove that file first.",
            code="definition_broken",
        ) from None
    if existing.digest == record.digest:
        # If it is not locked, a process was killed between the two writes, and this call completes them.
        if is_locked and existing != record:
            raise ConflictError(
                f"definition '{record.name}' {existing.version} exists at {path} with other words and the same meaning. "
                "Raise 'version' to replace them.",
                code="definition_exists",
            )
        return
    if existing.op_type != record.op_type:
        raise ConflictError(
            f"definition '{record.name}' exists at {path} with op_type '{existing.op_type}', and a new version "
            f"keeps it. Use another name, or move the file and its solutions and workloads first.",
            code="op_type_differs",
        )
    if version_tuple(record.version) <= version_tuple(existing.version):
        raise ConflictError(
            f"definition '{record.name}' {existing.version} exists at {path} with another meaning. "
            f"Raise 'version' above {existing.version}.",
            code="version_not_raised",
        )


def add_solution(
    catalog: Catalog, record: Solution, sources: Mapping[str, bytes], root: Path | None = None, *, replace: bool = False
) -> Path:
    """Write a new Solution folder in one step, and return it: it appears whole or not at all.

    ``root`` is the catalog to write to, by default :attr:`Catalog.write_root`. A Solution that the catalog has with the
    same record and bytes is left as it is. ``replace`` allows to replace a Solution of the user's that has other content.
    Its traces then belong to a source that is not in the catalog.

    Raises:
        ConflictError: a Solution of that name exists with other content, or is shipped; or a folder or file is in the way.
        StoreError: the folder cannot be written, or another process holds the catalog's lock.
    """
    root = root or catalog.write_root
    check_kind(record, Solution, "add_solution takes a Solution")
    check_kind(sources, Mapping, "the sources of a solution are a mapping of paths to bytes")
    for name, content in sources.items():
        check_kind(content, bytes, f"the source '{name}' is bytes")
    same = _same_solution(catalog, record, sources)
    if same is not None:
        return same
    _folder_for(catalog, record, root, replace=replace)  # before any file is created, including the lock file
    lacking = [source.path for source in record.sources if source.path not in sources]
    if lacking:
        raise RecordError(
            f"{record.name}: the record declares the source '{lacking[0]}', and no bytes were given for it.",
            code="source_missing",
        )
    check_entry_point(record, sources, Path(record.name))
    check_fits(record, sources, catalog.definition(record.definition), record.name)
    with writing(root):
        now = catalog.reread(root)
        same = _same_solution(now, record, sources)
        if same is not None:  # another process added it since
            return same
        folder = _folder_for(now, record, root, replace=replace)
        content = (record.to_json(indent=2) + "\n").encode()
        own = {name: source for name, source in sources.items() if not _is_shared(folder / RECORD_NAME, name, source)}
        if replace and folder.is_dir():
            replace_folder(folder, {**own, RECORD_NAME: content})
        else:
            write_folder(folder, {**own, RECORD_NAME: content})
    return folder


def _same_solution(now: Catalog, record: Solution, sources: Mapping[str, bytes]) -> Path | None:
    """Return the folder of a Solution that the catalog has already, with the same record and the same bytes; else None."""
    place = now.solution_paths.get(record.name)
    if place is None or not file_of(place).is_file():
        return None
    try:
        known = SolutionFiles.read(place)
    except RecordError:
        return None
    return known.folder if (known.record, dict(known.sources)) == (record, dict(sources)) else None


def _is_shared(record_path: Path, name: str, content: bytes) -> bool:
    """Return True if a source is shared code that the catalog has already, with the same bytes."""
    path = source_file(record_path, name)
    return path != record_path.parent / name and path.read_bytes() == content


def _folder_for(now: Catalog, record: Solution, root: Path, *, replace: bool) -> Path:
    """Return the folder of a new Solution; raise :class:`ConflictError` if its name is taken and may not be replaced."""
    definition = now.definition(record.definition)
    folder = root / "solutions" / definition.op_type / record.definition / record.name
    existing = now.solution_paths.get(record.name)
    if existing is not None and os.path.lexists(file_of(existing)):
        if not replace:
            raise ConflictError(
                f"solution '{record.name}' already exists at {existing.parent}, with other content. "
                "Replace it with --replace, or choose another name with --name.",
                code="solution_exists",
            )
        _check_own(record.name, existing, root)
        if existing != folder / RECORD_NAME:
            raise ConflictError(
                f"solution '{record.name}' exists at {file_of(existing)}, and --replace would write {folder}. "
                "Edit that file, or choose another name with --name.",
                code="solution_elsewhere",
            )
        return folder
    if existing is not None or os.path.lexists(folder):
        taken = existing.parent if existing is not None else folder
        raise ConflictError(
            f"{taken} exists and holds no {RECORD_NAME}. It was left as it is. Nothing was added. "
            "Choose another name with --name, or move it away.",
            code="folder_occupied",
        )
    return folder


def remove(catalog: Catalog, name: str) -> tuple[Path, ...]:
    """Remove a Solution or a Definition of the user's, and return the folder or files that are gone. Traces stay.

    A Definition goes with its Workloads and its versions in the lock. Make a new catalog to see the change.

    Raises:
        ConflictError: the record is shipped, is listed in the file of a family, or is a Definition that other records use.
        NotFoundError: there is no such record.
        StoreError: a file cannot be removed, or another process holds the catalog's lock.
    """
    known = {*catalog.definition_paths, *catalog.solution_paths}
    if name not in known:
        raise NotFoundError(
            f"'{name}' is not a definition or a solution.{did_you_mean(name, known)} Try: tilegym-db list",
            code="name_unknown",
        )
    if name in catalog.definition_paths:
        return _remove_definition(catalog, name, catalog.write_root)
    return _remove_solution(catalog, name, catalog.write_root)


def _remove_solution(catalog: Catalog, name: str, root: Path) -> tuple[Path, ...]:
    """Remove the folder of a Solution."""
    with writing(root):
        place = catalog.reread(root).solution_paths.get(name, catalog.solution_paths[name])
        _check_own(name, place, root)
        if in_family(place):
            raise ConflictError(
                f"solution '{name}' is one of a family in {file_of(place)}. Edit that file to remove it.",
                code="solution_of_family",
            )
        remove_folder(place.parent)
    return (place.parent,)


def _remove_definition(catalog: Catalog, name: str, root: Path) -> tuple[Path, ...]:
    """Remove the files of a Definition."""
    with writing(root):
        now = catalog.reread(root)
        path = now.definition_paths.get(name, catalog.definition_paths[name])
        _check_own(name, path, root)
        of_it = sorted(other for other, place in now.solution_paths.items() if definition_at(place) == name)
        of_it += [other for other, record in now.definitions.items() if record.backward_of == name]
        if of_it:
            shown = ", ".join(of_it[:3]) + (f" and {len(of_it) - 3} more" if len(of_it) > 3 else "")
            raise ConflictError(
                f"definition '{name}' is used by {shown}. Remove those first: tilegym-db remove {of_it[0]}",
                code="definition_used",
            )
        sizes = root / "workloads" / path.parent.name / f"{name}.jsonl"
        removed = [file for file in (sizes, path) if os.path.lexists(file)]
        for file in removed:
            file.unlink()
        locked = read_lock(root)
        if locked.pop(name, None) is not None:
            write_lock(root, locked)
    return tuple(removed)


def _check_own(name: str, place: Path, root: Path) -> None:
    """Raise :class:`ConflictError` unless a record lies in the root that is written to and is no shipped one."""
    file = file_of(place)
    if not file.is_relative_to(root) or place.relative_to(root).as_posix() in _listed(root):
        raise ConflictError(
            f"'{name}' is shipped, in {file}, and is neither replaced nor removed. Add yours under another name (--name).",
            code="record_shipped",
        )


def _listed(root: Path) -> Collection[str]:
    """Return the paths of the shipped records of a root; empty for a folder that only a user writes to."""
    path = root / CHECKED_RECORDS
    if not path.is_file():
        return ()
    content = parse_object(read_bytes(path, "list of checked records"), "list of checked records", path)
    files = content.get("files") if isinstance(content, dict) else None
    return files if isinstance(files, dict) else ()


def add_workloads(
    catalog: Catalog, workloads: Iterable[Workload], root: Path | None = None, blobs_from: Path | None = None
) -> list[tuple[Path, Workload]]:
    """Append new Workloads to their files and return them; existing ones are skipped.

    ``root`` is the catalog to write to, by default :attr:`Catalog.write_root`. Files that hold inputs are copied from
    ``blobs_from``; without it, they must already be in the catalog.

    Raises:
        RecordError: a Workload does not fit its Definition, or a file is missing or differs; nothing is added.
        ConflictError: the catalog has a different file of that name.
        StoreError: a file cannot be written, or another process holds the catalog's lock.
    """
    root = root or catalog.write_root
    groups: dict[str, dict[str, Workload]] = {}
    check_kind(workloads, Iterable, "add_workloads takes several Workloads")
    for workload in workloads:
        check_kind(workload, Workload, "add_workloads takes Workloads")
        operator = catalog.definition(workload.definition)
        check_call(operator, workload)
        groups.setdefault(workload.definition, {}).setdefault(workload.uuid, workload)
    added = []
    with writing(root):
        now = catalog.reread(root)
        # Blobs come before the lines that name them: a process killed in between leaves only unused files.
        add_blobs([workload for group in groups.values() for workload in group.values()], blobs_from, root)
        for name, group in groups.items():
            known = {item.uuid for item in now.workloads_for(name)}
            new = [workload for uuid, workload in group.items() if uuid not in known]
            if new:
                path = root / "workloads" / now.definition(name).op_type / f"{name}.jsonl"
                before = read_bytes(path, "workload file", WORKLOAD_BYTES) if os.path.lexists(path) else b""
                if before and not before.endswith(b"\n"):
                    before += b"\n"
                lines = "".join(workload.to_json() + "\n" for workload in new)
                write_atomically(path, before + lines.encode())
                added += [(path, workload) for workload in new]
    return added


def version_tuple(version: str) -> tuple[int, ...]:
    """Return a version as a tuple to compare: ``1.10.0`` -> (1, 10, 0)."""
    return tuple(int(part) for part in version.split("."))


# ---- definitions lock -----------------------------------------------------------------------------


def lock_findings(catalog: Catalog) -> list[str]:
    """Return the differences between the valid Definitions of a catalog and the locks of its roots; empty if they agree."""
    found = []
    for root in catalog.roots:
        try:
            locked = read_lock(root)
        except RecordError as error:
            found.append(str(error))
            continue
        for name, record in catalog.definitions.items():
            path = catalog.definition_paths[name]
            if not path.is_relative_to(root):
                continue
            known = locked.get(name, {})
            if record.version not in known:
                found.append(
                    f"{path}: version {record.version} is not in {LOCK_FILE}. Try: tilegym-db check --update-lock"
                )
            elif known[record.version] != record.digest:
                found.append(
                    f"{path}: its meaning changed but its version is still {record.version}. "
                    "Raise 'version' (a semantic change needs a new one), or restore the content."
                )
    return found


def update_lock(catalog: Catalog, root: Path) -> list[str]:
    """Add versions that the lock of a root does not have, and return them as ``name version``; never change a locked digest.

    Raises:
        RecordError: the lock is damaged.
        StoreError: the lock cannot be written.
    """
    with writing(root):
        locked = read_lock(root)
        added = []
        for name, record in catalog.definitions.items():
            if catalog.definition_paths[name].is_relative_to(root) and record.version not in locked.get(name, {}):
                locked.setdefault(name, {})[record.version] = record.digest
                added.append(f"{name} {record.version}")
        if added:
            write_lock(root, locked)
    return added


def write_lock(root: Path, locked: Locked) -> None:
    """Replace the lock of a root; the caller holds the folder lock."""
    write_atomically(lock_path(root), (json.dumps(locked, indent=2, sort_keys=True) + "\n").encode())


# ---- call rules -----------------------------------------------------------------------------------
# Rules that a Definition does not state: values of scalars by their names, and layouts of tensors.
#
# A record bounds only axes. A negative eps or count fits its dtype, but its results are NaN or meaningless.
# Two elements of a tensor must not share an address: contents could not be drawn, and outputs could not be written.

# Pattern over the name of a scalar -> why it is not negative.
NOT_NEGATIVE: tuple[tuple[str, str], ...] = (
    (r"(^|_)eps(ilon)?$", "it keeps a divisor or a root above zero"),
    (r"^(num|block)_|^(top_k|group|groups|kept_groups|block|alignment|streams|repeat|shifts)$", "it counts something"),
)


def check_fits(record: Solution, sources: Mapping[str, bytes], definition: Definition, where: str | Path) -> None:
    """Raise :class:`RecordError` if a Solution contradicts its Definition, or its entry point takes other arguments."""
    problems = problems_of(lambda: record.check_against(definition))
    if problems:
        raise RecordError(f"{where}: {problems[0]}.", code=problems[0].code)
    problem = signature_problem(record, sources[record.spec.entry_path], definition)
    if problem is not None:
        raise RecordError(f"{where}: entry_point {problem}.", code="signature_differs")


def check_call(definition: Definition, workload: Workload) -> None:
    """Raise :class:`RecordError` if a Workload does not fit its Definition, or has an invalid scalar or layout."""
    workload.check_against(definition)
    check_scalar_values(definition, workload.scalars())
    check_layouts(definition, workload.axes, workload.layouts)


def check_scalar_values(definition: Definition, scalars: Mapping[str, Scalar]) -> None:
    """Raise :class:`RecordError` for a scalar that is negative though its name forbids it, or a bool instead of a number."""
    for name, value in scalars.items():
        spec = definition.inputs.get(name)
        if spec is not None and isinstance(value, bool) and spec.dtype != "bool":
            raise RecordError(
                f"inputs.{name}: {str(value).lower()} is not a number ({spec.dtype}).", code="scalar_not_number"
            )
        why = next((reason for pattern, reason in NOT_NEGATIVE if re.search(pattern, name)), None)
        if why is not None and isinstance(value, int | float) and value < 0:
            raise RecordError(
                f"inputs.{name}: {value!r} is negative, and '{name}' of {definition.name} is not: {why}.",
                code="scalar_negative",
            )


def check_layouts(
    definition: Definition, axes: Mapping[str, int], layouts: Mapping[str, str], *, expanded: bool = False
) -> None:
    """Raise :class:`RecordError` if a layout is invalid or overlaps itself in memory.

    With ``expanded``, an input that is not written may have strides of zero, as in fuzz cases.
    """
    sizes = definition.bind_axes(dict(axes)) if layouts else {}
    for name, text in layouts.items():
        if name in definition.tensor_inputs or name in definition.outputs:
            shape = definition.shape_of(name, sizes)
            try:
                strides = definition.strides_of(name, sizes, text)
                if expanded and name in definition.tensor_inputs and name not in definition.in_place:
                    shape = tuple(1 if step == 0 else size for size, step in zip(shape, strides, strict=True))
                shared = overlap_words(text, shape, strides)
            except RecordError as error:
                raise RecordError(f"layouts.{name}: {str(error).rstrip('.')}.", code=error.code) from None
            if shared is not None:
                raise RecordError(f"layouts.{name}: {shared}.", code="layout_overlap")
