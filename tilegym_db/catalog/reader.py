"""Reads the folders of a catalog into validated records and collects the broken ones.

The second part finds, checks and copies blobs, which are files that hold inputs of Workloads.
"""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Self, TypeVar

from tilegym_db.catalog.other_names import OTHER_NAMES
from tilegym_db.catalog.record_files import (
    DEFINITION_BROKEN,
    RECORD_NAME,
    Broken,
    SolutionFiles,
    definition_at,
    in_family,
    misplaced,
    name_at,
    of_family_file,
    read_workloads,
    recall_shipped_sources,
    record_paths,
    visible,
    warn_once,
    workloads_stated,
)
from tilegym_db.errors import ConflictError, NotFoundError, RecordError, check_kind, did_you_mean
from tilegym_db.files import read_bytes, write_atomically
from tilegym_db.paths import home, shipped_root
from tilegym_db.records.text import parse_object

if TYPE_CHECKING:
    from tilegym_db.records import Definition, Workload
    from tilegym_db.records.workload import SafetensorsInput

T = TypeVar("T")


@dataclass
class Catalog:
    """A catalog over a list of roots. Records are read on first use and cached; make a new one to see changes."""

    roots: tuple[Path, ...]
    warns: bool = True
    """True if a warning on stderr names each broken record. Commands that list broken records turn it off."""
    trust_foreign: bool = False
    """True if foreign traces count (``--trust``), which the package does not ship and this installation did not measure."""
    lock: Any = field(default=None, kw_only=True)
    """The :class:`~tilegym_db.published.table.ServingLock` of the only kernels that may serve; None allows all."""

    required: frozenset[str] = field(default=frozenset(), kw_only=True)
    """What is required of the bits of kernels that serve (:data:`~tilegym_db.published.entries.REQUIREMENTS`)."""

    def __repr__(self) -> str:
        """Return the folders, in the order in which they are read."""
        return f"<{type(self).__name__} {', '.join(map(str, self.roots))}>"

    def reread(self, root: Path) -> Self:
        """Return a new reader of the same roots and ``root``, as they are on disk now."""
        roots = self.roots if root in self.roots else (*self.roots, root)
        return type(self)(roots, self.warns, self.trust_foreign, lock=self.lock, required=self.required)

    def trusting(self, foreign: bool = True) -> Self:
        """Return a reader of the same roots; with ``foreign``, foreign traces count too."""
        same = not foreign or self.trust_foreign
        return self if same else replace(self, trust_foreign=True)

    def locked(self, lock: Any) -> Self:
        """Return a reader of the same roots; only the kernels of ``lock`` may serve."""
        return replace(self, lock=lock) if lock is not None else self

    def requiring(self, required: Collection[str]) -> Self:
        """Return a reader of the same roots; only kernels with these properties may serve."""
        return replace(self, required=frozenset(required)) if required else self

    # -- reading ------------------------------------------------------------------------------------------------------

    @cached_property
    def definition_paths(self) -> dict[str, Path]:
        """Name -> file of every Definition, valid or not."""
        paths = (path for root in self.roots for path in visible(root / "definitions", "*/*.json"))
        return self._unique(((path.stem, path) for path in paths), lambda path: path.parent.name)

    @cached_property
    def solution_paths(self) -> dict[str, Path]:
        """Name -> place of every Solution's record: a file, which may be missing, or ``family.json#<solution>``."""
        paths = (path for root in self.roots for path in record_paths(root))
        return self._unique(((name_at(path), path) for path in paths), definition_at)

    def _unique(self, paths: Iterable[tuple[str, Path]], definition_of: Callable[[Path], str]) -> dict[str, Path]:
        found: dict[str, Path] = {}
        for name, path in paths:
            if name in found:
                reason = f"'{name}' exists twice: {found[name]} and {path}. Rename or remove one of them."
                self._leave_out(Broken(path, "", definition_of(path), f"{path}: {reason}"))
            else:
                found[name] = path
        return found

    @cached_property
    def definitions(self) -> dict[str, Definition]:
        """Name -> valid Definition, sorted by name."""
        kept = ((name, self._kept(self.read_definition, path)) for name, path in sorted(self.definition_paths.items()))
        return {name: record for name, record in kept if record is not None}

    @cached_property
    def solutions(self) -> dict[str, SolutionFiles]:
        """Name -> valid Solution with its sources, sorted by name."""
        kept = ((name, self._kept(self.read_solution, path)) for name, path in sorted(self.solution_paths.items()))
        return {name: files for name, files in kept if files is not None}

    def definition(self, name: str) -> Definition:
        """Return one Definition without reading the others.

        Raises:
            NotFoundError: no Definition has this name; the message suggests the nearest names.
            RecordError: the Definition is broken.
        """
        check_kind(name, str, "a definition is asked for by its name, a text")
        path = self.definition_paths.get(name)
        if path is None:
            hint = did_you_mean(name, self.definition_paths)
            raise NotFoundError(f"no definition '{name}'.{hint} Try: tilegym-db list", code="definition_unknown")
        return self.read_definition(path)

    def solution(self, name: str) -> SolutionFiles:
        """Return one Solution without reading the others; raises the same errors as :meth:`definition`."""
        check_kind(name, str, "a solution is asked for by its name, a text")
        path = self.solution_paths.get(name)
        if path is None:
            hint = did_you_mean(name, self.solution_paths)
            raise NotFoundError(
                f"no solution '{name}'.{hint} Try: tilegym-db list --solutions", code="solution_unknown"
            )
        return self.read_solution(path)

    @cached_property
    def _solution_places(self) -> list[tuple[Path, str]]:
        """Place of every Solution, sorted by name, with the op type of its family; '' if it has no family."""
        places = (path for _, path in sorted(self.solution_paths.items()))
        return [(path, path.parent.parent.name if in_family(path) else "") for path in places]

    @cached_property
    def _solution_paths_of(self) -> dict[str, dict[str, list[Path]]]:
        """Op type -> Definition -> places of its Solutions, sorted by name; an op type is filled on first use."""
        return {}

    @cached_property
    def _solutions_of(self) -> dict[str, list[SolutionFiles]]:
        """Definition -> its valid Solutions, sorted by name; filled on first use."""
        return {}

    def solutions_for(self, definition: str) -> list[SolutionFiles]:
        """Return the valid Solutions of one Definition, sorted by name."""
        if definition not in self._solutions_of:
            op_type = self.definition_paths[definition].parent.name if definition in self.definition_paths else ""
            found = self._solution_paths_of.get(op_type)
            if found is None:
                found = self._solution_paths_of[op_type] = {}
                for path, of_family in self._solution_places:
                    # Only the records of a family name their Definition; records of other op types need not be read.
                    if of_family in ("", op_type):
                        found.setdefault(definition_at(path), []).append(path)
            kept = (self._kept(self.read_solution, path) for path in found.get(definition, ()))
            self._solutions_of[definition] = [files for files in kept if files is not None]
        return list(self._solutions_of[definition])

    def solutions_among(self, names: Sequence[str]) -> Mapping[str, SolutionFiles]:
        """Return the valid Solutions of Definitions, by name, and of the Definitions of Solutions; all if no names are given.

        Others are not read, unless a name is none of both or the records of a family do not name their Definition.
        """
        if not names or "solutions" in vars(self):
            return self.solutions
        places = self.solution_paths
        of = {name for name in names if name in self.definition_paths}
        of |= {definition_at(places[name]) for name in names if name in places}
        found = {files.name: files for definition in sorted(of) for files in self.solutions_for(definition)}
        known = all(name in self.definition_paths or name in found for name in names)
        return found if known else self.solutions

    def workloads_for(self, definition: str) -> list[Workload]:
        """Return the valid Workloads of one Definition in file order, shipped ones before those of the overlay.

        Raises:
            NotFoundError: the Definition does not exist.
            RecordError: the Definition is broken.
        """
        record = self.definition(definition)
        found: dict[str, Workload] = {}
        for root in self.roots:
            for path in visible(root / "workloads", f"*/{definition}.jsonl"):
                for item in read_workloads(path, record):
                    if isinstance(item, Broken):
                        self._leave_out(item)
                    else:
                        found.setdefault(item.uuid, item)
        return list(found.values())

    def count_workloads(self, definition: str) -> int:
        """Return the number of Workloads in the files of one Definition, including broken ones."""
        files = (path for root in self.roots for path in visible(root / "workloads", f"*/{definition}.jsonl"))
        return len({one for path in files for one in workloads_stated(path)})

    def backwards_of(self, definition: str) -> list[Definition]:
        """Return the backwards of a Definition that fit it, those with most gradients first."""
        from tilegym_db.records.call import backward_problem

        forward = self.definition(definition)
        found = []
        for record in self.definitions.values():
            if record.backward_of == definition:
                problem = backward_problem(forward, record)
                if problem:
                    path = self.definition_paths[record.name]
                    reason = f"{path}: {record.name} cannot be the backward of {definition}: {problem}."
                    self._leave_out(Broken(path, record.name, record.name, reason))
                else:
                    found.append(record)
        return sorted(found, key=lambda record: -len(record.outputs))

    def all_workloads(self) -> Iterator[Workload]:
        """Yield every valid Workload of every valid Definition."""
        for name in self.definitions:
            yield from self.workloads_for(name)

    def read_definition(self, path: Path) -> Definition:
        """Return the Definition in a file of this catalog; raise :class:`RecordError` if it is broken."""
        cached = self._cache.get(path)
        if cached is None:
            cached = _definition(read_bytes(path, "definition"), path)
            if (cached.name, cached.op_type) != (path.stem, path.parent.name):
                want = f"definitions/{cached.op_type}/{cached.name}.json"
                raise RecordError(
                    f"{path}: name and op_type do not match the path; this record belongs at {want}.",
                    code="record_misplaced",
                )
            self._cache[path] = self.with_forward(cached, path)
        assert not isinstance(cached, SolutionFiles)
        return cached

    def with_forward(self, record: Definition, path: Path) -> Definition:
        """Return a Definition; one with saved tensors is bound to the forward that computes them."""
        from tilegym_db.records.call import bind_forward

        if not record.saved:
            return record
        try:
            return bind_forward(record, self.definition(str(record.backward_of)))
        except (NotFoundError, RecordError) as error:
            raise RecordError(f"{path}: backward_of: {error}", code=error.code) from None

    def read_solution(self, path: Path) -> SolutionFiles:
        """Return the Solution at a place in this catalog; raise :class:`RecordError` if it is broken."""
        from tilegym_db.records.solution import signature_problem

        cached = self._cache.get(path)
        if cached is None:
            cached = SolutionFiles.read(path, self._sources)
            try:
                definition = self.definition(cached.record.definition)
            except NotFoundError as error:
                raise RecordError(f"{path}: {error}", code=error.code) from None
            except RecordError as error:
                raise RecordError(f"{path}: {DEFINITION_BROKEN}: {error}", code="definition_broken") from None
            where = misplaced(path, cached.record, definition.op_type)
            if where is not None:
                raise RecordError(f"{path}: {where}.", code="record_misplaced")
            try:
                cached.record.check_against(definition)
            except RecordError as error:
                raise RecordError(f"{path}: {error}.", code=error.code) from None
            problem = signature_problem(cached.record, cached.sources[cached.record.spec.entry_path], definition)
            if problem is not None:
                raise RecordError(f"{path}: entry_point {problem}.", code="signature_differs")
            self._cache[path] = cached
        assert isinstance(cached, SolutionFiles)
        return cached

    @cached_property
    def _cache(self) -> dict[Path, Definition | SolutionFiles]:
        return {}

    @cached_property
    def _sources(self) -> dict[Path, bytes]:
        """Path -> bytes of every source that was read. Before the first one, the headers of shipped sources are recalled."""
        recall_shipped_sources()
        return {}

    # -- broken records -----------------------------------------------------------------------------------------------

    @cached_property
    def _broken(self) -> dict[tuple[str, str], Broken]:
        return {}

    def _kept(self, read: Callable[[Path], T], path: Path) -> T | None:
        try:
            return read(path)
        except RecordError as error:
            of_solution = path in self.solution_paths.values()
            name, definition = (name_at(path), definition_at(path)) if of_solution else (path.stem, path.stem)
            self._leave_out(Broken(path, name, definition, str(error)))
            return None

    def _leave_out(self, broken: Broken) -> None:
        self._broken.setdefault((broken.name, broken.reason), broken)
        if self.warns:
            warn_once(broken)

    @property
    def left_out(self) -> bool:
        """True if a record read so far is broken."""
        return bool(self._broken)

    def broken(self, names: tuple[str, ...] = ()) -> list[Broken]:
        """Read every record and return the broken ones; with ``names``, only those that concern these names."""
        _ = self.definitions, self.solutions
        for _ in self.all_workloads():
            pass
        return [item for item in self._broken.values() if item.concerns(names)]

    def refuse_broken(self, name: str) -> None:
        """Raise :class:`RecordError` with the reason if a record of this name exists and is broken."""
        if name in self.definition_paths:
            self.definition(name)
        if name in self.solution_paths:
            self.solution(name)

    def refuse_unknown(self, names: Iterable[str], *, drafts: bool = False) -> None:
        """Raise for a name that is not a Definition or a Solution. With ``drafts``, the path of a Solution is a name too."""
        known = {*self.definition_paths, *self.solution_paths}
        for name in names:
            if drafts and is_place(name, self):
                continue
            self.refuse_broken(name)
            if name not in known and is_place(name, self):
                raise NotFoundError(
                    f"'{name}' is a path, and this command takes what is in the catalog. "
                    f"Try: tilegym-db add-solution {shlex.quote(name)}",
                    code="name_is_path",
                )
            if name not in known and name in OTHER_NAMES:
                said = OTHER_NAMES[name].said(name)
                raise NotFoundError(f"{said}. Try: tilegym-db show {name}", code="name_of_others")
            if name not in known:
                hint = did_you_mean(name, known)
                raise NotFoundError(
                    f"'{name}' is neither a definition nor a solution.{hint} Try: tilegym-db list", code="name_unknown"
                )

    @classmethod
    def default(cls, *, warns: bool = True, trust_foreign: bool = False) -> Catalog:
        """Return the shipped catalog and, if it exists, the user's overlay."""
        overlay = home() / "catalog"
        return cls((shipped_root(), overlay) if overlay.is_dir() else (shipped_root(),), warns, trust_foreign)

    def untried(self, record: Definition) -> Path | None:
        """Return the file of a Definition that did not ship, so that its reference may not return; else None.

        It may not have passed ``add-definition``, but may have been written or changed by hand. In a checkout, a Definition is
        shipped if the lock has its digest.
        """
        path, packaged = self.definition_paths.get(record.name), shipped_root()
        if path is None or not path.is_relative_to(packaged):
            return path
        if self.write_root != packaged:
            return None
        with suppress(RecordError):  # a damaged lock proves nothing
            if read_lock(packaged).get(record.name, {}).get(record.version) == record.digest:
                return None
        return path

    @property
    def write_root(self) -> Path:
        """The root that ``add-*`` writes to: the shipped catalog if it is a writable checkout, else the user's overlay."""
        shipped = shipped_root()
        if (shipped / "pyproject.toml").is_file() and os.access(shipped, os.W_OK):
            return shipped
        return home() / "catalog"


@lru_cache(maxsize=1024)
def _definition(content: bytes, path: Path) -> Definition:
    """Return the Definition of a text. Every reader of a process shares it, as checking a record takes milliseconds."""
    from tilegym_db.records import Definition

    return Definition.from_json(content, path)


def is_place(name: str | Path, catalog: Catalog) -> bool:
    """Return True if a text is the path of a Solution, and not the name of a record in the catalog."""
    if isinstance(name, Path):
        return True
    if name in catalog.definition_paths or name in catalog.solution_paths:
        return False
    looks_like_a_path = os.sep in name or name.endswith((".py", ".json")) or of_family_file(Path(name))
    return looks_like_a_path or (Path(name) / RECORD_NAME).is_file()


# ---- Blobs -----------------------------------------------------------------------------------------------

FOLDER, SUFFIX = "blob", ".safetensors"


def find_blob(roots: Sequence[Path], name: str, spec: SafetensorsInput) -> tuple[Path, bytes]:
    """Return the path and the bytes of the file that holds an input, from the first root that has it.

    Raises:
        RecordError: no root has the file, it leads out of its root, or its sha256 is another one or is not stated.
    """
    root = next((root for root in roots if (root / spec.path).is_file()), None)
    if root is None:
        where = " or ".join(map(str, roots)) or "no folder: none is known here"
        raise RecordError(f"inputs.{name}: {spec.path} does not exist in {where}.", code="blob_missing")
    path = root / spec.path
    if not path.resolve().is_relative_to(root.resolve()):
        raise RecordError(f"inputs.{name}: {path} is a link out of {root}.", code="link_outside")
    content = read_bytes(path, "blob", limit=None)
    found = hashlib.sha256(content).hexdigest()
    if spec.sha256 is None:
        raise RecordError(f'inputs.{name}: state what {spec.path} holds: "sha256": "{found}".', code="digest_missing")
    if found != spec.sha256:
        raise RecordError(
            f"inputs.{name}: {path} is not what it was: its sha256 is {found[:12]}..., and the workload says "
            f"{spec.sha256[:12]}....",
            code="digest_differs",
        )
    return path, content


def check_blobs(workloads: Iterable[Workload], source: Path) -> None:
    """Raise :class:`RecordError` if a file that Workloads name cannot be added from ``source``."""
    for name, spec in _named(workloads).values():
        find_blob((source,), name, spec)


def add_blobs(workloads: Iterable[Workload], source: Path | None, root: Path) -> None:
    """Copy the files that Workloads name from ``source`` to ``root``; existing files stay."""
    named, roots = _named(workloads), (root,) if source is None else (source,)
    new = {place: given for place, given in named.items() if not os.path.lexists(root / place)}
    for place, (name, spec) in named.items():  # check all of them before writing one
        if place in new:
            find_blob(roots, name, spec)
        else:
            _refuse_other(name, spec, root)
    for place, (name, spec) in new.items():
        write_atomically(root / place, find_blob(roots, name, spec)[1])


def _named(workloads: Iterable[Workload]) -> dict[str, tuple[str, SafetensorsInput]]:
    """Return path -> name and spec of an input that the file holds."""
    named: dict[str, tuple[str, SafetensorsInput]] = {}
    for workload in workloads:
        for name, spec in workload.files().items():
            place = PurePosixPath(spec.path)
            if place.parts[:1] != (FOLDER,) or len(place.parts) < 2 or place.suffix != SUFFIX:
                raise RecordError(
                    f"inputs.{name}: {spec.path} does not lie in {FOLDER}/, or is not a {SUFFIX} file.",
                    code="blob_place",
                )
            _, known = named.setdefault(place.as_posix(), (name, spec))
            if known.sha256 != spec.sha256:
                raise RecordError(
                    f"inputs.{name}: two workloads name {spec.path}, each with another sha256.", code="blob_clash"
                )
    return named


def _refuse_other(name: str, spec: SafetensorsInput, root: Path) -> None:
    try:
        find_blob((root,), name, spec)
    except RecordError as error:
        raise ConflictError(
            f"{str(error).rstrip('.')}. Give the file another name, or remove that one.", code="blob_exists"
        ) from None


# ---- definitions lock -----------------------------------------------------------------------------
# ``definitions.lock.json`` maps name -> version -> digest, so that a version cannot change its meaning.

LOCK_FILE = "definitions.lock.json"

Locked = dict[str, dict[str, str]]


def lock_path(root: Path) -> Path:
    """Return the path of the lock of one root."""
    return root / "definitions" / LOCK_FILE


def read_lock(root: Path) -> Locked:
    """Return name -> version -> digest of one root; empty if it has no lock. A damaged one is never overwritten."""
    path = lock_path(root)
    if not path.exists():
        return {}
    try:
        content = parse_object(read_bytes(path, "lock"), "lock", path)
    except RecordError as error:
        raise RecordError(
            f"{path}: the lock cannot be read: {str(error).removeprefix(f'{path}: ')}", code="lock_damaged"
        ) from None
    if not isinstance(content, dict):
        raise RecordError(f"{path}: the lock cannot be read: it is no JSON object of names.", code="lock_damaged")
    for name, versions in content.items():
        if not isinstance(versions, dict) or not all(isinstance(digest, str) for digest in versions.values()):
            raise RecordError(
                f"{path}: the lock cannot be read: {name[:60]!r} must map versions to digests.", code="lock_damaged"
            )
    return content
