"""TileGym's kernel inventory: ``kernel_definitions/`` and ``kernel_solutions/``, whose sources are files of its repository."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from tilegym_db.interchange.checks import (
    Problem,
    Rules,
    check_definition,
    check_solution,
    leads_out,
    path_problem,
    walk,
)
from tilegym_db.interchange.collecting import Collection
from tilegym_db.interchange.flashinfer_trace import defaults_filled

DIALECT = "tilegym"
RULES = Rules(languages=frozenset({"cuda-tile", "cutile", "python", "triton", "tilelang", "cuda", "cpp"}))
_FOLDERS = ("kernel_definitions", "kernel_solutions")


def is_this(root: Path) -> bool:
    """Return True if the root or a folder below it is an inventory."""
    return root.is_dir() and (root.name in _FOLDERS or any(next(root.rglob(name), None) for name in _FOLDERS))


def read(root: Path) -> Collection:
    """Read every record of the inventory with the content of its sources. Other files are not kept."""
    repository = _repository(root)
    found = Collection(DIALECT, RULES, repository)
    paths, refused = walk(root)
    prefix = root.relative_to(repository)
    # A checkout has links that no record names. Those of sources are checked with their Solution.
    found.refused += [one for one in refused if PurePosixPath(one.path).parent.name in _FOLDERS]
    for below, file in paths:
        path = (PurePosixPath(prefix.as_posix()) / below).as_posix()
        if file.parent.name not in _FOLDERS or found.refuse_spelling(path, file, ".json") or file.suffix != ".json":
            continue
        content = file.read_bytes()
        parsed = found.parse(path, content)
        if parsed is not None and file.parent.name == "kernel_definitions":
            _definition(found, path, file, *parsed, len(content))
        elif parsed is not None:
            _solution(found, path, file, *parsed, len(content))
    return found


def _repository(root: Path) -> Path:
    """Return the folder that source paths are relative to: the nearest parent with ``src``, else the inventory itself."""
    folder = root.resolve()
    for candidate in (folder, *folder.parents):
        if (candidate / "src").is_dir():
            return candidate
    return folder


def _definition(found: Collection, path: str, file: Path, record: dict[str, Any], digest: str, size: int) -> None:
    problems = check_definition(record, RULES)
    if problems:
        found.refuse(path, problems)
        return
    found.carry(path, file, "records")
    found.add("definition", record, digest, path, (0, size))


def _solution(found: Collection, path: str, file: Path, record: dict[str, Any], digest: str, size: int) -> None:
    problems, sources = _sources(found, record)
    filled = {**record, "sources": sources}
    problems = problems or check_solution(filled, RULES)
    if problems:
        found.refuse(path, problems)
        return
    for source in sources:
        found.carry(source["path"], found.root / source["path"])
    found.carry(path, file, "records")
    filled, unset = defaults_filled(filled, RULES)
    found.add("solution", filled, digest, path, (0, size), unset=[*unset, "sources.content"])


def _sources(found: Collection, record: Mapping[str, Any]) -> tuple[list[Problem], list[dict[str, str]]]:
    """Return the sources with their contents, and the problems of those that cannot be read."""
    given = record.get("sources")
    paths = given.get("path") if isinstance(given, dict) else None
    if not isinstance(paths, list) or not paths or not all(isinstance(path, str) for path in paths):
        return [("sources.path", "must be a list of paths in the repository")], []
    problems: list[Problem] = []
    sources = []
    for number, path in enumerate(paths):
        file = found.root / path
        reason = path_problem(path)
        if reason is None and leads_out(file, found.root):
            reason = f"{path!r} leads out of its folder"
        if reason is None and not os.path.isfile(file):
            reason = f"{path!r} does not exist below {found.root}"
        if reason is not None:
            problems.append((f"sources.path[{number}]", reason))
            continue
        try:
            sources.append({"path": path, "content": file.read_text(encoding="utf-8")})
        except UnicodeDecodeError:
            problems.append((f"sources.path[{number}]", f"{path!r} is not UTF-8 text"))
    return problems, sources
