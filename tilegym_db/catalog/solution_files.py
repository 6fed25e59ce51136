"""A Solution as it lies on disk: its record, where that is, and the bytes of its sources."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from tilegym_db.catalog.solution_places import in_family, record_path, root_of
from tilegym_db.errors import RecordError
from tilegym_db.files import decode, read_bytes
from tilegym_db.records import Solution
from tilegym_db.records.python_source import parse_source

__all__ = ["SolutionFiles", "check_entry_point", "read_source", "stock_of"]


@dataclass(frozen=True)
class SolutionFiles:
    """A Solution with the file that its record was read from and the bytes of its sources at that moment."""

    record: Solution
    path: Path
    sources: Mapping[str, bytes] = field(repr=False)

    @property
    def name(self) -> str:
        """The Solution's name."""
        return self.record.name

    @property
    def folder(self) -> Path:
        """Where its sources lie, and those of its family."""
        return self.path.parent

    @property
    def root(self) -> Path:
        """The root of the catalog that holds it, links resolved."""
        return root_of(self.folder.resolve() / self.path.name)

    @cached_property
    def digest(self) -> str:
        """Identity of exactly this source under exactly this spec."""
        return self.record.digest(self.sources)

    @cached_property
    def uses_torch_compile(self) -> bool:
        """Whether it compiles through inductor, which takes long, by what its text says."""
        return any(b"torch.compile" in source for source in self.sources.values())

    @classmethod
    def read(cls, place: Path) -> SolutionFiles:
        """Read a record and every source it lists.

        Args:
            place: the file of the record, or a folder with ``solution.json``.

        Raises:
            RecordError: the record is not valid, a source is missing, is a link out of the folder, is no Python in UTF-8, or
                does not define the entry point.
        """
        path = record_path(place)
        content = read_bytes(path, "solution")
        try:
            record = Solution.from_json(content, path)
        except RecordError as error:
            if in_family(path):
                raise RecordError(
                    f"{error} Every .json beside a kernel is the record of a solution.", code=error.code
                ) from None
            raise
        sources = {source.path: read_source(path, source.path) for source in record.sources}
        check_entry_point(record, sources, path)
        return cls(record, path, sources)


def stock_of(solutions: Iterable[SolutionFiles]) -> SolutionFiles | None:
    """The code that runs where nothing else does: of those that provide what models run, the one with the fewest constraints.

    A model may have several ways of running one operator, as transformers has for experts. Kernels must beat all of them.
    """
    stock = [files for files in solutions if files.record.spec.provides == "stock"]
    return min(stock, key=lambda files: (len(files.record.spec.constraints), files.name), default=None)


def read_source(record_path: Path, name: str) -> bytes:
    """A source file of the Solution whose record this is; refuses a link that leads out of the folder."""
    folder = record_path.parent
    path = folder / name
    if not path.exists():
        raise RecordError(
            f"{record_path}: sources: '{name}' does not exist beside {record_path.name}.", code="source_missing"
        )
    # a plain name that is no link lies in the folder, whatever leads there
    if ("/" in name or path.is_symlink()) and not path.resolve().is_relative_to(folder.resolve()):
        raise RecordError(
            f"{record_path}: sources: '{name}' is a link out of the folder ({path.resolve()}). Copy the file.",
            code="link_outside",
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
    except RecordError as error:
        raise RecordError(f"{where}: source '{path}' is not valid Python: {error}.", code="python_syntax") from None
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    if any(isinstance(node, ast.AsyncFunctionDef) and node.name == function for node in tree.body):
        raise RecordError(
            f"{where}: entry_point '{function}' in '{path}' is an async function. Write it without 'async'.",
            code="entry_point_async",
        )
    if function not in names:
        found = ", ".join(names) or "no function"
        raise RecordError(
            f"{where}: entry_point '{function}' is missing in '{path}', which defines {found}.",
            code="entry_point_missing",
        )
