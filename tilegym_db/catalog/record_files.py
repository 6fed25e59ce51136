"""A Solution as it lies on disk: its record, where that is, and the bytes of its sources."""

from __future__ import annotations

import ast
import json
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from tilegym_db.errors import RecordError, TilegymDBError
from tilegym_db.files import decode, read_bytes, write_atomically
from tilegym_db.paths import shipped_root
from tilegym_db.records import Definition, Solution, Workload
from tilegym_db.records.python_source import headers_of_large_sources, parse_source, recall_headers

if TYPE_CHECKING:
    from tilegym_db.records import Solution


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
    """Return the code that runs where nothing else does: of those that provide what models run, the one with the fewest
    constraints.

    A model may have several ways of running one operator, as transformers has for experts. Kernels must beat all of them.
    """
    stock = [files for files in solutions if files.record.spec.provides == "stock"]
    return min(stock, key=lambda files: (len(files.record.spec.constraints), files.name), default=None)


def read_source(record_path: Path, name: str) -> bytes:
    """Return a source file of the Solution whose record this is; refuses a link that leads out of the folder."""
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


# ---- solution places ------------------------------------------------------------------------------
# Where the record of a Solution lies: in a folder of its own, or beside the kernel that its family shares.
#
# ``solutions/<op_type>/<definition>/<solution>/solution.json`` with the sources beside it, or
# ``solutions/<op_type>/<family>_<language>/<solution>.json`` beside the ``kernel.py`` of all Solutions of that
# folder. A digest covers definition, spec and sources, never the place: a Solution can be moved from one layout to
# the other, or be copied alone.


def record_paths(root: Path) -> Iterator[Path]:
    """Yield every file under a root that is the record of a Solution, or has to be one: not all of them exist."""
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
    """Return the folders ``solutions/<op_type>/<definition or family>`` of a root.

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
    """Return True if a folder has more in it than bytecode, which stays behind where a Solution has moved away."""
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
    """Return the record of a folder of one Solution, or the file itself."""
    return place / RECORD_NAME if place.is_dir() else place


def in_family(path: Path) -> bool:
    """Return True for a record beside the kernel of a family."""
    return path.name != RECORD_NAME


def name_at(path: Path) -> str:
    """What the Solution of a record's file must be called."""
    return path.stem if in_family(path) else path.parent.name


def definition_at(path: Path) -> str:
    """Return the Definition that the Solution of a record's file is for; empty if a family's record does not say."""
    from tilegym_db.records.base import parse_object

    if not in_family(path):
        return path.parent.parent.name
    try:
        value = parse_object(read_bytes(path, "solution"), "solution", path)
    except RecordError:
        return ""
    name = value.get("definition") if isinstance(value, dict) else None
    return name if isinstance(name, str) else ""


def root_of(path: Path) -> Path:
    """Return the root of the catalog that a record's file belongs to."""
    return path.parents[3 if in_family(path) else 4]


def misplaced(path: Path, record: Solution, op_type: str) -> str | None:
    """Where a Solution of a Definition of ``op_type`` belongs, or None if it lies there."""
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


# ---- workload files -------------------------------------------------------------------------------
# Files of Workloads: one JSON object a line, each judged by itself.

WORKLOAD_BYTES = 256 << 20
"""The most that one file of Workloads may hold."""


def workloads_stated(path: Path) -> set[str | bytes]:
    """What tells the Workloads of a file apart, a uuid or a line, without judging them: to count them in a tenth of the time."""
    try:
        lines = read_bytes(path, "workload file", WORKLOAD_BYTES).splitlines()
    except RecordError:
        return set()
    found: set[str | bytes] = set()
    for line in lines:
        with suppress(ValueError, RecursionError):
            record = json.loads(line)
            if isinstance(record, dict):
                uuid = record.get("uuid")
                found.add(uuid if uuid and isinstance(uuid, str) else line)
    return found


def read_workloads(path: Path, definition: Definition) -> Iterator[Workload | Broken]:
    """Yield every Workload of a file, in order, and in its place what a line holds that is none of this Definition."""
    try:
        lines = read_bytes(path, "workload file", WORKLOAD_BYTES).splitlines()
    except RecordError as error:
        yield Broken(path, "", definition.name, str(error))
        return
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            workload = Workload.from_json(line, where)
            try:
                if workload.definition != definition.name:
                    raise RecordError(
                        f"definition is '{workload.definition}', but the file is {path.name}.", code="record_misplaced"
                    )
                workload.check_against(definition)
            except RecordError as error:
                raise RecordError(f"{where}: {error}", code=error.code) from None
            yield workload
        except RecordError as error:
            yield Broken(path, "", definition.name, str(error))


# ---- broken ---------------------------------------------------------------------------------------
# Records that cannot be read: left out, named once, and in the way of nothing but the commands that are about them.

RECORD_NAME = "solution.json"
"""The record of a Solution, in the folder that is called as it is."""

DEFINITION_BROKEN = "its definition is broken"

_log = logging.getLogger("tilegym_db.catalog")
_named: set[Path] = set()


@dataclass(frozen=True)
class Broken:
    """A file or folder that should hold a record and does not.

    ``path`` is the file, ``name`` what the record would be called, ``definition`` what it would belong to, and ``reason`` a
    paragraph that names file and key.
    """

    path: Path
    name: str
    definition: str
    reason: str

    @property
    def is_consequence(self) -> bool:
        """True for a Solution of a Definition that is broken itself: mending that mends this."""
        return f": {DEFINITION_BROKEN}: " in self.reason

    def concerns(self, names: tuple[str, ...]) -> bool:
        """Return True if a command that is about ``names`` is about this too; without names it is about all."""
        return not names or self.name in names or self.definition in names


def name_once(broken: Broken) -> None:
    """Warn about a file that is left out, the first time that this process meets it. Python prints that on stderr."""
    if broken.path not in _named:
        _named.add(broken.path)
        if not broken.is_consequence:
            after = f", then: tilegym-db check {broken.definition}" if broken.definition else "."
            _log.warning("warning: left out: %s Mend or remove it%s", broken.reason, after)


# ---- parsed sources -------------------------------------------------------------------------------
# What parsing the sources of a catalog found, kept from one command to the next: it is most of what ``list`` would
# take.
#
# The headers of a source's functions are filed under the sha256 of its text and the version of Python that parsed it,
# so that a source that changed is parsed again. Whatever is wrong with the file, or with writing it, costs time and
# nothing else. A file of the same kind comes with the package, for a home that is new: ``python
# tools/write_parsed_sources.py`` writes it. What the oldest Python parsed, every later one parses alike, and a test
# holds that.

FILE_NAME = "parsed-sources.json"
MAX_BYTES = 8 << 20
PARSER = f"{sys.implementation.cache_tag} {sys.hexversion:x}"
ANY_PARSER = "any"
"""The parser of the file that comes with the package."""


def shipped_file() -> Path:
    """Return the headers of the sources that come with the package."""
    return shipped_root() / "solutions" / FILE_NAME


@contextmanager
def keeping_parsed_sources(home: Path) -> Iterator[None]:
    """Inside the block, sources that an earlier command parsed need not be parsed; afterwards the new ones are kept too.

    Nothing is kept where there is no home folder yet. Of two processes at once one keeps what it found; the file is whole.
    """
    path = home / FILE_NAME
    shipped, known = _read(shipped_file(), ANY_PARSER), _read(path, PARSER)
    recall_headers({**known, **shipped})
    yield
    found = {key: text for key, text in headers_of_large_sources().items() if key not in shipped}
    if found.keys() == known.keys() or not home.is_dir():
        return
    content = json.dumps({"parser": PARSER, "headers": found}).encode()
    if len(content) > MAX_BYTES:  # of sources long gone: begin again
        content = json.dumps({"parser": PARSER, "headers": {}}).encode()
    with suppress(TilegymDBError):
        write_atomically(path, content)


def _read(path: Path, parser: str) -> dict[str, str]:
    try:
        content = json.loads(read_bytes(path, "list of parsed sources", MAX_BYTES))
        headers = content["headers"] if content["parser"] == parser else {}
        return {key: text for key, text in headers.items() if isinstance(text, str)}
    except (TilegymDBError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return {}
