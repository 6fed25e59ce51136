"""Where the record of a Solution lies: in a folder of its own, or beside the kernel that its family shares.

``solutions/<op_type>/<definition>/<solution>/solution.json`` with the sources beside it, or
``solutions/<op_type>/<family>_<language>/<solution>.json`` beside the ``kernel.py`` of all Solutions of that folder. A digest
covers definition, spec and sources, never the place: a Solution can be moved from one layout to the other, or be copied alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tilegym_db.catalog.broken import RECORD_NAME
from tilegym_db.errors import RecordError
from tilegym_db.files import read_bytes

if TYPE_CHECKING:
    from tilegym_db.records import Solution

__all__ = [
    "definition_at",
    "in_family",
    "misplaced",
    "name_at",
    "record_path",
    "record_paths",
    "root_of",
    "solution_folders",
    "visible",
]


def record_paths(root: Path) -> Iterator[Path]:
    """Every file under a root that is the record of a Solution, or has to be one: not all of them exist."""
    for folder in solution_folders(root):
        inside = visible(folder, "*")
        records = [path for path in inside if path.suffix == ".json"]
        sources = [path for path in inside if path.suffix == ".py"]
        if sources and not records:
            yield folder / f"{folder.name}.json"  # a kernel without a record: reading it says what is missing
        yield from records
        for path in inside:
            if path in records or not path.is_dir() or path.name == "__pycache__":
                continue
            # Beside records, a folder without one holds further sources of the family.
            if (path / RECORD_NAME).is_file() or (not records and _holds_something(path)):
                yield path / RECORD_NAME


def solution_folders(root: Path) -> list[Path]:
    """The folders ``solutions/<op_type>/<definition or family>`` of a root.

    A link to a folder that holds the link itself is none: following it would come back here, and may read the whole disk.
    """
    found = visible(root / "solutions", "*/*")
    links = {path for path in {*found, *(path.parent for path in found)} if path.is_symlink()}
    upwards = {path for path in links if _leads_upwards(path)}
    return [path for path in found if path not in upwards and path.parent not in upwards]


def _leads_upwards(link: Path) -> bool:
    try:
        return link.parent.resolve().is_relative_to(link.resolve())
    except (OSError, RuntimeError):  # a loop of links
        return True


def _holds_something(path: Path) -> bool:
    """Whether a folder has more in it than bytecode, which stays behind where a Solution has moved away."""
    return any(inside.name != "__pycache__" for inside in visible(path, "*"))


def visible(folder: Path, pattern: str) -> list[Path]:
    """What matches in a folder, by name; hidden files are nobody's records.

    Give the folder itself, not its root with a longer pattern: a confined worker may read the folders of a root and not the root,
    which Python 3.12 lists for a pattern's first part.
    """
    try:
        return sorted(path for path in folder.glob(pattern) if not path.name.startswith("."))
    except OSError:  # a loop of links, or a folder that cannot be entered
        return []


def record_path(place: Path) -> Path:
    """The record of a folder of one Solution, or the file itself."""
    return place / RECORD_NAME if place.is_dir() else place


def in_family(path: Path) -> bool:
    """True for a record beside the kernel of a family."""
    return path.name != RECORD_NAME


def name_at(path: Path) -> str:
    """What the Solution of a record's file must be called."""
    return path.stem if in_family(path) else path.parent.name


def definition_at(path: Path) -> str:
    """The Definition that the Solution of a record's file is for; empty where a family's record does not say."""
    from tilegym_db.records.parsing import parse_object

    if not in_family(path):
        return path.parent.parent.name
    try:
        value = parse_object(read_bytes(path, "solution"), "solution", path)
    except RecordError:
        return ""
    name = value.get("definition") if isinstance(value, dict) else None
    return name if isinstance(name, str) else ""


def root_of(path: Path) -> Path:
    """The root of the catalog that a record's file belongs to."""
    return path.parents[3 if in_family(path) else 4]


def misplaced(path: Path, record: Solution, op_type: str) -> str | None:
    """Where a Solution of a Definition of ``op_type`` belongs, or None where it lies there."""
    family = f"solutions/{op_type}/<family>_{record.spec.language}"
    if not in_family(path):
        if (record.name, record.definition) == (path.parent.name, path.parent.parent.name):
            return None
        own = f"solutions/<op_type>/{record.definition}/{record.name}/"
        return f"name and definition do not match the path; this record belongs in {own}"
    if record.name != path.stem:
        return f"its name is '{record.name}'; this record belongs at {family}/{record.name}.json"
    if path.parent.parent.name != op_type or not path.parent.name.endswith(f"_{record.spec.language}"):
        return f"op_type and language do not match the path; this record belongs in {family}/"
    return None
