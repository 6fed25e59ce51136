"""A Solution as it lies on disk: its record, its folder, and the bytes of its sources."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from tilegym_db.catalog.broken import RECORD_NAME
from tilegym_db.errors import RecordError
from tilegym_db.files import decode, read_bytes
from tilegym_db.records import Solution
from tilegym_db.records.python_source import parse_source

__all__ = ["SolutionFiles", "check_entry_point", "read_source"]


@dataclass(frozen=True)
class SolutionFiles:
    """A Solution with the folder it was read from and the bytes of its sources at that moment."""

    record: Solution
    folder: Path
    sources: Mapping[str, bytes] = field(repr=False)

    @property
    def name(self) -> str:
        """The Solution's name."""
        return self.record.name

    @cached_property
    def digest(self) -> str:
        """Identity of exactly this source under exactly this spec."""
        return self.record.digest(self.sources)

    @cached_property
    def uses_torch_compile(self) -> bool:
        """Whether it compiles through inductor, which takes long, by what its text says."""
        return any(b"torch.compile" in source for source in self.sources.values())

    @classmethod
    def read(cls, folder: Path) -> SolutionFiles:
        """Read ``solution.json`` and every source it lists.

        Raises:
            RecordError: the record is not valid, a source is missing, is a link out of the folder, is no Python in UTF-8, or
                does not define the entry point.
        """
        path = folder / RECORD_NAME
        record = Solution.from_json(read_bytes(path, "solution"), path)
        sources = {source.path: read_source(folder, source.path, path) for source in record.sources}
        check_entry_point(record, sources, path)
        return cls(record, folder, sources)


def read_source(folder: Path, name: str, record_path: Path) -> bytes:
    """A source file of a Solution; refuses a link that leads out of the folder."""
    path = folder / name
    if not path.exists():
        raise RecordError(f"{record_path}: sources: '{name}' does not exist beside solution.json.")
    if not path.resolve().is_relative_to(folder.resolve()):
        raise RecordError(
            f"{record_path}: sources: '{name}' is a link out of the folder ({path.resolve()}). Copy the file."
        )
    return read_bytes(path, "source")


def check_entry_point(record: Solution, sources: Mapping[str, bytes], where: Path) -> None:
    """Raise :class:`RecordError` unless every Python source is UTF-8, and the entry point's parses and defines its function."""
    for name, content in sources.items():
        if name.endswith(".py"):
            decode(content, f"{where}: source '{name}'")
    path, function = record.spec.entry_path, record.spec.entry_function
    try:
        tree = parse_source(sources[path])
    except ValueError as error:
        raise RecordError(f"{where}: source '{path}' is not valid Python: {error}.") from None
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    if any(isinstance(node, ast.AsyncFunctionDef) and node.name == function for node in tree.body):
        raise RecordError(
            f"{where}: entry_point '{function}' in '{path}' is an async function. Write it without 'async'."
        )
    if function not in names:
        found = ", ".join(names) or "no function"
        raise RecordError(f"{where}: entry_point '{function}' is missing in '{path}', which defines {found}.")
