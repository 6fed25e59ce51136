"""The catalog of submissions that have not passed yet. It lies next to the journals, apart from the user's catalog.

Only commands about submissions read it. Refused submissions stay, so that their failing cases can be reproduced. A
submission that passed moves to a catalog. The loop marks those that it added itself, and only these can be withdrawn again.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from tilegym_db.catalog import Catalog, SolutionFiles, writers
from tilegym_db.catalog.record_files import RECORD_NAME
from tilegym_db.files import write_folder, writing
from tilegym_db.paths import home as default_home
from tilegym_db.published.input_files import loop_folder
from tilegym_db.records import Definition, Solution


def candidate_root(home: Path | None = None) -> Path:
    """Return the root of the candidates' catalog."""
    return loop_folder(home) / "candidates"


def with_candidates(catalog: Catalog | None = None, home: Path | None = None) -> Catalog:
    """Return the catalog extended by the submissions that are on disk now."""
    catalog = catalog or Catalog.default()
    return catalog.reread(candidate_root(home or default_home()))


def candidate_name(record: Solution, digest: str) -> str:
    """Return the name of a submission. It depends on the source only, so equal sources share a name and others do not."""
    return f"{record.definition}_{record.spec.language}_{digest[:12]}"


def enter(definition: Definition, files: SolutionFiles, catalog: Catalog, home: Path) -> SolutionFiles:
    """Add a submission to the candidates under its candidate name, unless it is there or in the catalog."""
    name = candidate_name(files.record, files.digest)
    present = catalog.solution_paths.get(name)
    if present is not None:
        _forget(definition, name, home)  # left by a process that was killed while it moved the files
        return SolutionFiles.read(present)
    record = Solution.from_dict({**files.record.to_dict(), "name": name}, files.path)
    folder = _folder(definition, name, home)
    with writing(candidate_root(home)):
        if not folder.is_dir():
            content = {RECORD_NAME: (record.to_json(indent=2) + "\n").encode(), **files.sources}
            write_folder(folder, content)
    return SolutionFiles(record, folder / RECORD_NAME, dict(files.sources))


def leave(
    definition: Definition, candidate: SolutionFiles, catalog: Catalog, home: Path, root: Path | None = None
) -> Path:
    """Move a candidate into the user's catalog or, for the loop, into ``root``. Idempotent.

    Raises:
        ConflictError: the catalog has another Solution of that name.
    """
    present, mark = catalog.solution_paths.get(candidate.name), _mark(candidate.name, home)
    if root is None:
        mark.unlink(missing_ok=True)
    elif present is None:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    if present is not None and SolutionFiles.read(present).digest == candidate.digest:
        target = present.parent
    else:
        target = writers.add_solution(catalog, candidate.record, candidate.sources, root or catalog.write_root)
    _forget(definition, candidate.name, home)
    return target


def withdraw(definition: Definition, name: str, root: Path, home: Path) -> None:
    """Move a Solution that the loop added from ``root`` back to the candidates.

    A Solution that ``task submit`` added stays.
    """
    mark = _mark(name, home)
    if not mark.is_file():
        return
    folder = root / "solutions" / definition.op_type / definition.name / name
    target = _folder(definition, name, home)
    with writing(root), writing(candidate_root(home)):
        if folder.is_dir() and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            folder.rename(target)
    mark.unlink(missing_ok=True)


def _mark(name: str, home: Path) -> Path:
    """Return the marker file that exists if only the loop added the Solution."""
    return loop_folder(home) / "added" / name


def _forget(definition: Definition, name: str, home: Path) -> None:
    with writing(candidate_root(home)):
        shutil.rmtree(_folder(definition, name, home), ignore_errors=True)


def _folder(definition: Definition, name: str, home: Path) -> Path:
    return candidate_root(home) / "solutions" / definition.op_type / definition.name / name
