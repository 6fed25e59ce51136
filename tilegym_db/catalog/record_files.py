"""Reads record files: Solutions with their sources, files of Workloads, broken records, and the cache of parsed sources."""

from __future__ import annotations

import ast
import fnmatch
import json
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilegym_db.errors import RecordError, TilegymDBError
from tilegym_db.files import decode, read_bytes, write_atomically
from tilegym_db.paths import shipped_root
from tilegym_db.records.expressions import headers_of_large_sources, parse_source, recall_headers
from tilegym_db.records.text import NAME_PATTERN, canonical_json, parse_object

if TYPE_CHECKING:
    from tilegym_db.records import Definition, Solution, Workload
    from tilegym_db.records.solution import Family


@dataclass(frozen=True)
class SolutionFiles:
    """A Solution, the place of its record, and the bytes of its sources when they were read."""

    record: Solution
    path: Path
    sources: Mapping[str, bytes] = field(repr=False)

    def __repr__(self) -> str:
        """Return the names of the Solution and its Definition, and its language."""
        return f"<Solution {self.name} of {self.record.definition}, {self.record.spec.language}>"

    @property
    def name(self) -> str:
        """The Solution's name."""
        return self.record.name

    @property
    def folder(self) -> Path:
        """The folder of its sources, which a family shares."""
        return self.path.parent

    def source_file(self, name: str) -> Path:
        """Return the file of one of its sources; see :func:`source_file`."""
        return source_file(self.path, name)

    @cached_property
    def folders(self) -> tuple[Path, ...]:
        """The folders that hold its sources: its own, and those of shared code."""
        outside = {
            file.parent for name in self.sources if not (file := self.source_file(name)).is_relative_to(self.folder)
        }
        return (self.folder, *sorted(outside))

    @property
    def root(self) -> Path:
        """The catalog root that holds it, with links resolved."""
        return root_of(self.folder.resolve() / self.path.name)

    @cached_property
    def digest(self) -> str:
        """The digest of these sources under this spec."""
        return self.record.digest(self.sources)

    @cached_property
    def uses_torch_compile(self) -> bool:
        """True if a source mentions ``torch.compile``, which takes long to compile."""
        return any(b"torch.compile" in source for source in self.sources.values())

    @classmethod
    def read(cls, place: Path, known: dict[Path, bytes] | None = None) -> SolutionFiles:
        """Read a record and every source it lists.

        Args:
            known: path -> bytes of sources that were read before; sources read now are added. A family shares them.
        """
        path = record_path(place)
        record = read_record(path)
        names = (source.path for source in record.sources)
        sources = read_sources(path, names, {} if known is None else known)
        check_entry_point(record, sources, path)
        return cls(record, path, sources)


def write_sources(folder: Path, sources: Mapping[str, bytes]) -> None:
    """Write sources into a folder, with shared code beside the others; existing files are replaced."""
    for name, content in sources.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def write_solution(folder: Path, record: Solution, sources: Mapping[str, bytes]) -> SolutionFiles:
    """Write a Solution into a scratch folder, so that a worker can read it. A catalog is changed by ``writers`` only."""
    write_sources(folder, sources)
    (folder / RECORD_NAME).write_text(record.to_json(indent=2) + "\n", encoding="utf-8")
    return SolutionFiles.read(folder)


def stock_of(solutions: Iterable[SolutionFiles]) -> SolutionFiles | None:
    """Return the stock code with the fewest constraints, which is the fallback of all calls; None without stock code.

    A model may have several stock implementations, as transformers has for experts. Kernels must beat all of them.
    """
    stock = [files for files in solutions if files.record.spec.provides == "stock"]
    return min(stock, key=lambda files: (len(files.record.spec.constraints), files.name), default=None)


def source_file(record_path: Path, name: str) -> Path:
    """Return the file of a source: beside the record, or in a catalog's shared code if ``name`` begins with ``_lib/``.

    A copy of shared code beside the record comes first, since an exported Solution carries its own. Then come
    ``solutions/_lib/`` of the record's root and of the package.
    """
    path = record_path.parent / name
    if name.startswith(f"{LIBRARY}/") and not path.exists():
        roots = [root_of(record_path)] if len(record_path.parents) > 4 else []
        return library_file(roots, name) or path
    return path


def library_file(roots: Iterable[Path], name: str) -> Path | None:
    """Return the file of a source ``_lib/<language>/<module>.py`` in the shared code of roots or the package, or None."""
    files = (root / "solutions" / name for root in (*roots, shipped_root()))
    return next((file for file in files if file.is_file()), None)


def library_files(root: Path) -> list[Path]:
    """Return the files of code that Solutions of a root share: ``solutions/_lib/<language>/*.py``."""
    return visible(root / "solutions" / LIBRARY, "*/*.py")


def read_sources(record_path: Path, names: Iterable[str], known: dict[Path, bytes]) -> dict[str, bytes]:
    """Return name -> bytes of every source of a Solution. Sources in ``known`` are not read again; others are added."""
    sources = {}
    for name in names:
        file = record_path.parent / name
        if file not in known:
            known[file] = read_source(record_path, name)
        sources[name] = known[file]
    return sources


def read_source(record_path: Path, name: str) -> bytes:
    """Return the bytes of a source of a Solution's record; refuse a link that leads out of its folder."""
    path = source_file(record_path, name)
    folder = record_path.parent if path == record_path.parent / name else path.parents[name.count("/")]
    if not path.exists():
        raise RecordError(
            f"{record_path}: sources: '{name}' does not exist beside {file_of(record_path).name}.",
            code="source_missing",
        )
    # A plain name that is not a link lies in the folder, even if links lead to the folder.
    if ("/" in name or path.is_symlink()) and not path.resolve().is_relative_to(folder.resolve()):
        raise RecordError(
            f"{record_path}: sources: '{name}' is a link out of the folder ({path.resolve()}). Copy the file.",
            code="link_outside",
        )
    return read_bytes(path, "source")


def check_entry_point(record: Solution, sources: Mapping[str, bytes], where: Path) -> None:
    """Raise :class:`RecordError` unless every Python source is UTF-8 and the entry file parses and defines its function."""
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
# The record of a Solution lies in its own folder, or beside the kernel that its family shares:
#
# ``solutions/<op_type>/<definition>/<solution>/solution.json`` with the sources beside it, or
# ``solutions/<op_type>/<family>_<language>/family.json`` beside the ``kernel.py`` of all Solutions of that folder, or
# ``solutions/<op_type>/<family>_<language>/<solution>.json`` for one more Solution of the same ``kernel.py``.
#
# A digest covers definition, spec and sources, but not the path. A Solution can move between the layouts or be copied
# alone. The place of a Solution in a ``family.json`` is written as a path with a fragment, ``family.json#<solution>``:
# messages, requests to workers and the list of checked records name it so. A name contains no ``#``.


def record_paths(root: Path) -> Iterator[Path]:
    """Yield the place of every Solution's record below a root; its file need not exist if only sources are there."""
    for folder in solution_folders(root):
        inside = visible(folder, "*")
        records = [path for path in inside if path.suffix == ".json"]
        sources = [path for path in inside if path.suffix == ".py"]
        if sources and not records:
            yield folder / f"{folder.name}.json"  # a kernel without a record: reading it reports the missing file
        for path in records:
            yield from family_places(path) if path.name == FAMILY_NAME else (path,)
        for path in inside:
            if path.suffix == ".json" or path.name == "__pycache__" or not path.is_dir():
                continue
            # A folder beside records and without a record holds further sources of the family.
            if (path / RECORD_NAME).is_file() or (not records and _holds_something(path)):
                yield path / RECORD_NAME


def solution_folders(root: Path) -> list[Path]:
    """Return the folders ``solutions/<op_type>/<definition or family>`` of a root.

    Skip a link to a folder that contains the link: following it would loop, or read the whole disk.
    """
    found = [path for path in visible(root / "solutions", "*/*") if path.parent.name != LIBRARY]
    links = {path for path in {*found, *(path.parent for path in found)} if path.is_symlink()}
    upwards = {path for path in links if _leads_upwards(path)}
    return [path for path in found if path not in upwards and path.parent not in upwards]


def _leads_upwards(link: Path) -> bool:
    try:
        return link.parent.resolve().is_relative_to(link.resolve())
    except (OSError, RuntimeError):  # a loop of links
        return True


def _holds_something(path: Path) -> bool:
    """Return True if a folder holds more than bytecode, which stays after a Solution was moved away."""
    return any(inside.name != "__pycache__" for inside in visible(path, "*"))


def visible(folder: Path, pattern: str) -> list[Path]:
    """Return the files and folders that match a pattern, sorted by name and without hidden ones.

    Pass the folder itself, not its root with a longer pattern: Python 3.12 lists the root for the first part of a pattern, and
    a confined worker may not read the root.
    """
    places = [folder]
    for part in pattern.split("/"):  # Path.glob takes several times as long
        places = [place / name for place in places for name in fnmatch.filter(_names(place), part)]
    return [place for place in places if not place.name.startswith(".")]


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:  # a file, a loop of links, or a folder that cannot be entered
        return []


def record_path(place: Path) -> Path:
    """Return the record file of a place: ``solution.json`` in a folder, or the file itself."""
    return place / RECORD_NAME if not of_family_file(place) and place.is_dir() else place


def in_family(path: Path) -> bool:
    """Return True for a record beside the kernel of a family."""
    return path.name != RECORD_NAME


def of_family_file(path: Path) -> bool:
    """Return True for a ``family.json``, and for the place of a Solution in one."""
    return path.name.partition("#")[0] == FAMILY_NAME


def file_of(path: Path) -> Path:
    """Return the file that holds the record of a place."""
    return path.with_name(FAMILY_NAME) if of_family_file(path) else path


def name_at(path: Path) -> str:
    """Return the name that the Solution at a place must have. A ``family.json`` without names has that of its folder."""
    if of_family_file(path):
        return path.name.partition("#")[2] or path.parent.name
    return path.stem if in_family(path) else path.parent.name


def definition_at(path: Path) -> str:
    """Return the Definition that a record belongs to; empty if the record of a family does not name one."""
    if not in_family(path):
        return path.parent.parent.name
    try:
        content = read_bytes(file_of(path), "solution")
        if of_family_file(path):
            value = _narrowed(content, file_of(path), name_at(path))["solutions"][0]
        else:
            value = parse_object(content, "solution", path)
    except RecordError:
        return ""
    name = value.get("definition") if isinstance(value, dict) else None
    return name if isinstance(name, str) else ""


def root_of(path: Path) -> Path:
    """Return the catalog root that a record file belongs to."""
    return path.parents[3 if in_family(path) else 4]


def misplaced(path: Path, record: Solution, op_type: str) -> str | None:
    """Return the place where a Solution of a Definition of ``op_type`` belongs, or None if it lies there."""
    family = f"solutions/{op_type}/<family>_{record.spec.language}"
    if not in_family(path):
        if (record.name, record.definition) == (path.parent.name, path.parent.parent.name):
            return None
        own = f"solutions/<op_type>/{record.definition}/{record.name}/"
        return f"name and definition do not match the path; this record belongs in {own}"
    if record.name != name_at(path):
        return f"its name is '{record.name}'; this record belongs at {family}/{record.name}.json"
    if path.parent.parent.name != op_type or not path.parent.name.endswith(f"_{record.spec.language}"):
        return f"op_type and language do not match the path; this record belongs in {family}/"
    return None


# ---- family files ---------------------------------------------------------------------------------
# A ``family.json`` is parsed once per content. Its Solutions are validated one by one, so that a fault in one of them
# leaves the others.

FAMILY_NAME = "family.json"
"""Name of the file with the records of several Solutions of a family."""

_NAME = re.compile(NAME_PATTERN)


def family_places(file: Path) -> list[Path]:
    """Return the places of the Solutions in a ``family.json``; the file itself if it names none."""
    try:
        names = family_names(read_bytes(file, "family"), file)
    except RecordError:  # reading the place reports the fault
        names = []
    return [file.with_name(f"{FAMILY_NAME}#{name}") for name in names] or [file]


def read_record(path: Path) -> Solution:
    """Return the validated record at a place; raise :class:`RecordError` if it is not valid."""
    from tilegym_db.records import Solution

    if of_family_file(path):
        file = file_of(path)
        return solution_of_family(read_bytes(file, "family"), file, "" if path == file else name_at(path))
    try:
        content = read_bytes(path, "solution")
    except RecordError as error:
        if path.name != RECORD_NAME or path.exists():
            raise
        raise RecordError(
            f"{error} To write one: tilegym-db new solution DEFINITION --language triton", code=error.code
        ) from None
    try:
        return Solution.from_json(content, path)
    except RecordError as error:
        if in_family(path):
            raise RecordError(
                f"{error} Every .json beside a kernel is the record of a solution.", code=error.code
            ) from None
        raise


def family_content(content: bytes, path: Path) -> bytes:
    """Return the part of a ``family.json`` that decides if the Solution at ``path`` is valid."""
    return canonical_json(_narrowed(content, file_of(path), name_at(path))).encode()


def family_names(content: bytes, file: Path | str) -> list[str]:
    """Return the valid names in the content of a ``family.json``, each once; raise :class:`RecordError` if it is not JSON."""
    return [name for name in _members(content, file) if name]


def content_of_family(content: bytes, path: Path) -> dict[str, Any]:
    """Return the content of one Solution's record in a ``family.json``, which is known to be valid."""
    from tilegym_db.records.solution import expanded

    family = _narrowed(content, file_of(path), name_at(path))
    return expanded(family, family["solutions"][0])


def solution_of_family(content: bytes, file: Path | str, name: str) -> Solution:
    """Return one Solution of a ``family.json``, which must list it once; ``file`` is for messages."""
    from tilegym_db.records.solution import Family, FamilyMember

    place = f"{file}#{name}"
    family = _valid_family(content, file)
    if family is None and name and all(map(_stated_name, _entries(parse_object(content, "family", file)))):
        narrowed = _narrowed(content, file, name)
        FamilyMember.from_parsed(narrowed["solutions"][0], place)
        return Family.from_parsed(narrowed, file).solution(name, place)
    family = family or Family.from_json(content, file)
    if not name:
        listed = [member.name for member in family.solutions]
        raise RecordError(
            f"{file}: a family of several solutions ({', '.join(listed)}). Name one of them: {FAMILY_NAME}#{listed[0]}",
            code="solution_unnamed",
        )
    return family.solution(name, place)


def _narrowed(content: bytes, file: Path | str, name: str) -> dict[str, Any]:
    """Return the content of a ``family.json`` with one of its Solutions."""
    found = _members(content, file).get(name, [])
    if len(found) > 1:
        raise RecordError(
            f"{file}: solutions: '{name}' is listed twice. Rename or remove one of them.", code="solution_repeated"
        )
    if not found:
        raise RecordError(f"{file}: solutions: '{name}' is not listed.", code="solution_unlisted")
    return {**_parsed_family(content, file), "solutions": found}


@lru_cache(maxsize=1024)
def _valid_family(content: bytes, file: Path | str) -> Family | None:
    """Return the whole family, or None if a part of it is not valid."""
    from tilegym_db.records.solution import Family

    try:
        return Family.from_json(content, file)
    except RecordError:
        return None


@lru_cache(maxsize=1024)
def _parsed_family(content: bytes, file: Path | str) -> Any:
    from pydantic_core import from_json  # its import takes a tenth of the time of ``best``

    try:
        return from_json(content)  # faster than parse_object, which also refuses repeated keys
    except ValueError:
        return parse_object(content, "family", file)


@lru_cache(maxsize=1024)
def _members(content: bytes, file: Path | str) -> dict[str, list[Any]]:
    """Return name -> entries of that name in ``solutions``; those without a valid name are under the empty one."""
    members: dict[str, list[Any]] = {}
    for entry in _entries(_parsed_family(content, file)):
        members.setdefault(_stated_name(entry), []).append(entry)
    return members


def _entries(family: Any) -> list[Any]:
    entries = family.get("solutions") if isinstance(family, dict) else None
    return entries if isinstance(entries, list) else []


def _stated_name(entry: Any) -> str:
    """Return the name of an entry in ``solutions``; empty unless it is a valid name."""
    name = entry.get("name") if isinstance(entry, dict) else None
    return name if isinstance(name, str) and _NAME.fullmatch(name) else ""


# ---- workload files -------------------------------------------------------------------------------
# Files of Workloads have one JSON object per line. Each line is validated alone.

WORKLOAD_BYTES = 256 << 20
"""Largest file of Workloads that is read, in bytes."""


def workloads_stated(path: Path) -> set[str | bytes]:
    """Return the uuid of each Workload in a file, or its line without a uuid; takes a tenth of the time of validation."""
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
    """Yield each line of a file in order, as a Workload of this Definition or as a :class:`Broken`."""
    try:
        content = read_bytes(path, "workload file", WORKLOAD_BYTES)
    except RecordError as error:
        yield Broken(path, "", definition.name, str(error))
        return
    yield from _workloads(content, path, _Judge(definition.name, definition.digest, definition))


@dataclass(frozen=True)
class _Judge:
    """A Definition as a part of a key: its digest stands for all that a Workload must fit."""

    name: str
    digest: str
    definition: Definition = field(compare=False, repr=False)


@lru_cache(maxsize=512)
def _workloads(content: bytes, path: Path, judge: _Judge) -> tuple[Workload | Broken, ...]:
    """Return the lines of a file's content. Every reader of a process shares them, as checking a line takes 0.3 ms."""
    return tuple(
        _workload(line, f"{path}:{number}", path, judge.definition)
        for number, line in enumerate(content.splitlines(), start=1)
        if line.strip()
    )


def _workload(line: bytes, where: str, path: Path, definition: Definition) -> Workload | Broken:
    from tilegym_db.records import Workload

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
        return workload
    except RecordError as error:
        return Broken(path, "", definition.name, str(error))


# ---- broken records -------------------------------------------------------------------------------
# A broken record is left out and named once. Only commands about that record fail.

LIBRARY = "_lib"
"""Folder of shared code below ``solutions/``; a source ``_lib/triton/scale.py`` lies in it."""

RECORD_NAME = "solution.json"
"""Name of a Solution's record file in its own folder."""

CHECKED_RECORDS = Path("workloads") / "checked-records.json"
"""The list of shipped records, below the shipped root. ``published.snapshot`` says what it proves."""

DEFINITION_BROKEN = "its definition is broken"

_log = logging.getLogger("tilegym_db.catalog")
_named: set[Path | str] = set()


@dataclass(frozen=True)
class Broken:
    """A file or folder that should hold a record and does not.

    ``path`` is the file, ``name`` the record's expected name, ``definition`` the Definition it belongs to, and ``reason`` a
    paragraph that names file and key.
    """

    path: Path
    name: str
    definition: str
    reason: str

    @property
    def is_consequence(self) -> bool:
        """True for a Solution whose Definition is broken: repairing the Definition repairs it."""
        return f": {DEFINITION_BROKEN}: " in self.reason

    def concerns(self, names: tuple[str, ...]) -> bool:
        """Return True if it concerns one of ``names``; without names, always."""
        return not names or self.name in names or self.definition in names


def warn_once(broken: Broken) -> None:
    """Log a warning about a broken record, once per file and process. Python prints it on stderr.

    Each reason of a ``family.json`` is logged once.
    """
    key = broken.reason if of_family_file(broken.path) else broken.path
    if key not in _named:
        _named.add(key)
        if not broken.is_consequence:
            after = f", then: tilegym-db check {broken.definition}" if broken.definition else "."
            _log.warning("warning: left out: %s Mend or remove it%s", broken.reason, after)


# ---- parsed sources -------------------------------------------------------------------------------
# Headers of functions that were parsed from sources, cached between commands: parsing takes most of the time of
# ``list``.
#
# The key is the sha256 of a source's text and the version of Python, so a changed source is parsed again. A damaged or
# unwritable cache costs only time. The package ships such a file for a new home, written by
# ``python tools/write_parsed_sources.py``. Every later Python parses like the oldest one, which a test checks.

FILE_NAME = "parsed-sources.json"
MAX_BYTES = 8 << 20
PARSER = f"{sys.implementation.cache_tag} {sys.hexversion:x}"
ANY_PARSER = "any"
"""Parser name in the file that comes with the package."""


def shipped_file() -> Path:
    """Return the path of the headers that come with the package."""
    return shipped_root() / "solutions" / FILE_NAME


def recall_shipped_sources() -> None:
    """Load the headers that come with the package, which take 3 ms to read and the sources themselves more than a second."""
    recall_headers(_shipped(shipped_file()))


@contextmanager
def keeping_parsed_sources(home: Path) -> Iterator[None]:
    """Load the headers of sources that earlier commands parsed; save the new ones after the block.

    Without a home folder nothing is saved. If two processes save at once, one of the two files stays, complete.
    """
    path = home / FILE_NAME
    shipped, known = _shipped(shipped_file()), _read(path, PARSER)
    recall_headers({**known, **shipped})
    yield
    found = {key: text for key, text in headers_of_large_sources().items() if key not in shipped}
    if found.keys() == known.keys() or not home.is_dir():
        return
    content = json.dumps({"parser": PARSER, "headers": found}).encode()
    if len(content) > MAX_BYTES:  # mostly sources that no longer exist: start again
        content = json.dumps({"parser": PARSER, "headers": {}}).encode()
    with suppress(TilegymDBError):
        write_atomically(path, content)


@lru_cache(maxsize=4)
def _shipped(path: Path) -> dict[str, str]:
    return _read(path, ANY_PARSER)


def _read(path: Path, parser: str) -> dict[str, str]:
    try:
        content = json.loads(read_bytes(path, "list of parsed sources", MAX_BYTES))
        headers = content["headers"] if content["parser"] == parser else {}
        return {key: text for key, text in headers.items() if isinstance(text, str)}
    except (TilegymDBError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return {}
