"""Which shipped files were judged when the package was made: ``workloads/checked-records.json``.

It names each file that was valid, with a digest of all that this depends on: its content, that of its sources, of its Definition,
and of the forward of a Definition that has one. A file of traces is on it where every figure was plausible by its Definition and
the published peaks. What is not on the list, or has another digest, is judged anew, which costs time and nothing else.
``python tools/write_checked_records.py`` writes the list. Only the database is filled by it: ``check``, and all that runs or
serves a kernel, judges every record itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from tilegym_db.catalog import Catalog
from tilegym_db.errors import RecordError
from tilegym_db.files import read_bytes
from tilegym_db.paths import shipped_root
from tilegym_db.records import Solution
from tilegym_db.records.base import length_prefixed_digest
from tilegym_db.store.input_files import PEAKS_NAME, published_folders, trace_files
from tilegym_db.store.snapshot import open_snapshot

__all__ = ["Checked", "checked_file"]

MAX_BYTES = 8 << 20
_NOTHING: Mapping[str, Any] = {"definitions": {}, "files": {}}


def checked_file() -> Path:
    """The list that comes with the package."""
    return shipped_root() / "workloads" / "checked-records.json"


class Checked:
    """The list, asked about the files of one catalog. Files are read once."""

    def __init__(self, catalog: Catalog) -> None:
        """For a catalog whose first root is what was shipped."""
        self._catalog = catalog
        self._root = shipped_root()
        self._contents: dict[Path, bytes] = {}
        self._keys: dict[str, str] = {}

    def content(self, path: Path) -> bytes:
        """The bytes of a file.

        Raises:
            RecordError: it cannot be read.
        """
        if path not in self._contents:
            self._contents[path] = read_bytes(path, "record")
        return self._contents[path]

    def lists(self, path: Path) -> bool:
        """Whether a file is on the list, changed or not."""
        return str(path) in self._files

    def definition_digest(self, name: str) -> str | None:
        """The digest of a Definition that is known to be valid; None for another."""
        known = self._listed["definitions"].get(name)
        return known[1] if known and known[0] == self.definition_key(name) else None

    def solution(self, path: Path, record: Solution, sources: Mapping[str, bytes]) -> bool:
        """Whether a Solution is known to be valid."""
        return self._is(path, lambda: self.solution_key(path, record, sources))

    def workloads(self, path: Path, definition: str) -> bool:
        """Whether every line of a file is known to be a Workload of this Definition, as it is written."""
        return self._is(path, lambda: self.workloads_key(path, definition))

    def plausible(self) -> frozenset[str]:
        """The Definitions of whose shipped traces none can be doubted."""
        keys = self.trace_keys()
        return frozenset(
            name
            for name, of in keys.items()
            if all(self._files.get(str(path)) == key != "" for path, key in of.items())
        )

    # -- what validity depends on ------------------------------------------------------------------------------------

    def definition_key(self, name: str) -> str:
        """A digest of the file of a Definition, and of that of its forward; '' where there is none or it cannot be read."""
        if name not in self._keys:
            self._keys[name] = self._definition_key(name)
        return self._keys[name]

    def _definition_key(self, name: str) -> str:
        path = self._catalog.definition_paths.get(name)
        if path is None or not path.is_relative_to(self._root):
            return ""
        try:
            content = self.content(path)
            forward = from_json(content).get("backward_of")
            of_forward = self._catalog.definition_paths.get(forward)
            return _key(path.name, content, self.content(of_forward) if of_forward else b"")
        except (RecordError, ValueError, AttributeError, TypeError):
            return ""

    def solution_key(self, path: Path, record: Solution, sources: Mapping[str, bytes]) -> str:
        """A digest of the record of a Solution, of its sources, and of its Definition."""
        parts = (part for name in sorted(sources) for part in (name.encode(), sources[name]))
        return self._of_definition(record.definition, self.content(path), *parts)

    def workloads_key(self, path: Path, definition: str) -> str:
        """A digest of a file of Workloads and of their Definition."""
        try:
            return self._of_definition(definition, self.content(path))
        except RecordError:
            return ""

    def trace_keys(self) -> dict[str, dict[Path, str]]:
        """Definition -> its shipped files of traces, each with a digest of it, of all published peaks, and of the Definition."""
        folders = published_folders(self._catalog)
        if not all(folder.is_relative_to(self._root) for folder in folders):
            return {}  # other peaks were published, which count where they are newer
        try:
            locks = {folder: open_snapshot(folder, self._root).files for folder in folders}
        except RecordError:
            return {}
        peaks = "".join(files.get(PEAKS_NAME, "") for files in locks.values()).encode()
        found: dict[str, dict[Path, str]] = {}
        for folder, files in locks.items():
            for path in trace_files(folder):
                locked = files.get(path.relative_to(folder).as_posix(), "").encode()
                found.setdefault(path.stem, {})[path] = self._of_definition(path.stem, locked, peaks)
        return found

    def _of_definition(self, name: str, *parts: bytes) -> str:
        key = self.definition_key(name)
        return _key(key, *parts) if key else ""

    # -- the list ----------------------------------------------------------------------------------------------------

    def _is(self, path: Path, key: Callable[[], str]) -> bool:
        expected = self._files.get(str(path))
        return expected is not None and expected == key()

    @cached_property
    def _files(self) -> Mapping[str, str]:
        return {f"{self._root}/{name}": key for name, key in self._listed["files"].items()}

    @cached_property
    def _listed(self) -> Mapping[str, Any]:
        try:
            content = from_json(read_bytes(checked_file(), "list of checked records", MAX_BYTES))
        except (RecordError, ValueError):
            return _NOTHING
        return content if _is_list(content) else _NOTHING


def _is_list(content: Any) -> bool:
    if not isinstance(content, dict) or not all(isinstance(content.get(key), dict) for key in _NOTHING):
        return False
    pairs = content["definitions"].values()
    return all(isinstance(pair, list) and len(pair) == 2 for pair in pairs)


def _key(name: str, *parts: bytes) -> str:
    return length_prefixed_digest([name.encode(), *parts])[:32]
