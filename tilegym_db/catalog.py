"""The catalog: folders of records on disk, read into validated records with their digests and checked against the lock.

Roots, nearest first: the shipped catalog (the checkout this package runs from, else the package data of an installed
wheel) and the user's overlay (``$TILEGYM_DB_HOME/catalog``). A name may live in one root only: an overlay record never
shadows a shipped one.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from tilegym_db.errors import ConflictError, NotFoundError, RecordError, StoreError, did_you_mean
from tilegym_db.paths import home, shipped_root
from tilegym_db.records import Definition, Solution, Workload
from tilegym_db.records.backward import backward_problem
from tilegym_db.records.signature import signature_problem

__all__ = ["Catalog", "SolutionFiles"]

LOCK_FILE = "definitions.lock.json"
SAFETENSORS_LIMIT = 1 << 30


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
            RecordError: the record is not valid, a source is missing, is a link out of the folder, or does not define
                the entry point.
        """
        path = folder / "solution.json"
        record = Solution.from_json(read_bytes(path, "solution"), path)
        sources = {source.path: read_source(folder, source.path, path) for source in record.sources}
        check_entry_point(record, sources, path)
        return cls(record, folder, sources)


@dataclass
class Catalog:
    """Every record under a list of roots. Records are read on first use and kept; make a new Catalog to see changes."""

    roots: tuple[Path, ...]

    @classmethod
    def default(cls) -> Catalog:
        """The shipped catalog and the user's overlay, where it exists."""
        overlay = home() / "catalog"
        return cls((shipped_root(), overlay) if overlay.is_dir() else (shipped_root(),))

    # -- reading ------------------------------------------------------------------------------------------------------

    @cached_property
    def _definition_paths(self) -> dict[str, Path]:
        return self._unique(path for root in self.roots for path in sorted((root / "definitions").glob("*/*.json")))

    @cached_property
    def _solution_paths(self) -> dict[str, Path]:
        return self._unique(
            path for root in self.roots for path in sorted((root / "solutions").glob("*/*/*/solution.json"))
        )

    @staticmethod
    def _unique(paths: Iterable[Path]) -> dict[str, Path]:
        found: dict[str, Path] = {}
        for path in paths:
            name = path.parent.name if path.name == "solution.json" else path.stem
            if name in found:
                raise ConflictError(f"'{name}' exists twice: {found[name]} and {path}. Rename or remove one of them.")
            found[name] = path
        return found

    @cached_property
    def definitions(self) -> dict[str, Definition]:
        """Name -> Definition, sorted by name. Every file must be valid."""
        return {name: self._read_definition(path) for name, path in sorted(self._definition_paths.items())}

    @cached_property
    def solutions(self) -> dict[str, SolutionFiles]:
        """Name -> Solution with its sources, sorted by name. Every folder must be valid."""
        return {name: self._read_solution(path) for name, path in sorted(self._solution_paths.items())}

    def definition(self, name: str) -> Definition:
        """One Definition, without reading the others.

        Raises:
            NotFoundError: no such name; suggests the nearest.
        """
        path = self._definition_paths.get(name)
        if path is None:
            hint = did_you_mean(name, self._definition_paths)
            raise NotFoundError(f"no definition '{name}'.{hint} Try: tilegym-db list")
        return self._read_definition(path)

    def solution(self, name: str) -> SolutionFiles:
        """One Solution, without reading the others; raises :class:`NotFoundError` as :meth:`definition` does."""
        path = self._solution_paths.get(name)
        if path is None:
            hint = did_you_mean(name, self._solution_paths)
            raise NotFoundError(f"no solution '{name}'.{hint} Try: tilegym-db list --solutions")
        return self._read_solution(path)

    def solutions_for(self, definition: str) -> list[SolutionFiles]:
        """The Solutions of one Definition, by name."""
        return [
            self._read_solution(path)
            for _, path in sorted(self._solution_paths.items())
            if path.parent.parent.name == definition
        ]

    def workloads_for(self, definition: str) -> list[Workload]:
        """The Workloads of one Definition, in the order of their files; overlay after shipped."""
        record = self.definition(definition)
        found: dict[str, Workload] = {}
        for root in self.roots:
            for path in sorted((root / "workloads").glob(f"*/{definition}.jsonl")):
                for number, line in enumerate(read_bytes(path, "workload").splitlines(), start=1):
                    if not line.strip():
                        continue
                    where = f"{path}:{number}"
                    workload = Workload.from_json(line, where)
                    try:
                        if workload.definition != definition:
                            raise RecordError(f"definition is '{workload.definition}', but the file is {path.name}.")
                        workload.check_against(record)
                    except RecordError as error:
                        raise RecordError(f"{where}: {error}") from None
                    found.setdefault(workload.uuid, workload)
        return list(found.values())

    def backwards_of(self, definition: str) -> list[Definition]:
        """The Definitions that compute gradients of one, those of most gradients first.

        Raises:
            RecordError: one of them does not fit the Definition that it names.
        """
        found = [record for record in self.definitions.values() if record.backward_of == definition]
        for record in found:
            problem = backward_problem(self.definition(definition), record)
            if problem:
                raise RecordError(f"{record.name} cannot be the backward of {definition}: {problem}.")
        return sorted(found, key=lambda record: -len(record.outputs))

    def all_workloads(self) -> Iterator[Workload]:
        """Every Workload of every Definition."""
        for name in sorted(self._definition_paths):
            yield from self.workloads_for(name)

    def _read_definition(self, path: Path) -> Definition:
        cached = self._cache.get(path)
        if cached is None:
            cached = Definition.from_json(read_bytes(path, "definition"), path)
            if (cached.name, cached.op_type) != (path.stem, path.parent.name):
                want = f"definitions/{cached.op_type}/{cached.name}.json"
                raise RecordError(f"{path}: name and op_type do not match the path; this record belongs at {want}.")
            self._cache[path] = cached
        assert isinstance(cached, Definition)
        return cached

    def _read_solution(self, path: Path) -> SolutionFiles:
        cached = self._cache.get(path)
        if cached is None:
            cached = SolutionFiles.read(path.parent)
            folder = path.parent
            if (cached.record.name, cached.record.definition) != (folder.name, folder.parent.name):
                want = f"solutions/<op_type>/{cached.record.definition}/{cached.record.name}/"
                raise RecordError(f"{path}: name and definition do not match the path; this record belongs in {want}.")
            try:
                definition = self.definition(cached.record.definition)
            except NotFoundError as error:
                raise RecordError(f"{path}: {error}") from None
            try:
                cached.record.check_against(definition)
            except ValueError as error:
                raise RecordError(f"{path}: {error}.") from None
            problem = signature_problem(cached.record, cached.sources[cached.record.spec.entry_path], definition)
            if problem is not None:
                raise RecordError(f"{path}: entry_point {problem}.")
            self._cache[path] = cached
        assert isinstance(cached, SolutionFiles)
        return cached

    @cached_property
    def _cache(self) -> dict[Path, Definition | SolutionFiles]:
        return {}

    # -- the lock -----------------------------------------------------------------------------------------------------

    def lock_findings(self) -> list[str]:
        """What disagrees between the Definitions and ``definitions.lock.json``; empty where all is well."""
        findings = []
        for root in self.roots:
            locked = read_lock(root)
            for name, path in sorted(self._definition_paths.items()):
                if not path.is_relative_to(root):
                    continue
                record = self._read_definition(path)
                known = locked.get(name, {})
                if record.version not in known:
                    findings.append(
                        f"{path}: version {record.version} is not in {LOCK_FILE}. Try: tilegym-db check --update-lock"
                    )
                elif known[record.version] != record.digest:
                    findings.append(
                        f"{path}: its meaning changed but its version is still {record.version}. "
                        "Raise 'version' (a semantic change needs a new one), or restore the content."
                    )
        return findings

    def update_lock(self, root: Path) -> list[str]:
        """Add the versions that the lock does not know yet; never changes a locked digest. Returns what was added."""
        locked = read_lock(root)
        added = []
        for name, path in sorted(self._definition_paths.items()):
            record = self._read_definition(path)
            if path.is_relative_to(root) and record.version not in locked.get(name, {}):
                locked.setdefault(name, {})[record.version] = record.digest
                added.append(f"{name} {record.version}")
        if added:
            text = json.dumps(locked, indent=2, sort_keys=True) + "\n"
            write_atomically(root / "definitions" / LOCK_FILE, text.encode())
        return added

    # -- adding -------------------------------------------------------------------------------------------------------

    @property
    def write_root(self) -> Path:
        """Where ``add-*`` writes: the shipped catalog if it is a writable checkout, else the user's overlay."""
        shipped = shipped_root()
        if (shipped / "pyproject.toml").is_file() and os.access(shipped, os.W_OK):
            return shipped
        return home() / "catalog"

    def add_definition(self, record: Definition) -> Path:
        """Write a new Definition, or a new version of one, and lock it.

        Raises:
            ConflictError: the same version exists with another meaning, or is not newer than the one that exists.
        """
        path = self._definition_paths.get(record.name)
        root = self.write_root
        if path is not None:
            existing = self._read_definition(path)
            if not path.is_relative_to(root):
                raise ConflictError(
                    f"definition '{record.name}' is shipped in {path} and cannot be shadowed. Use another name."
                )
            if existing.digest == record.digest:
                raise ConflictError(f"definition '{record.name}' {existing.version} already exists at {path}.")
            if existing.op_type != record.op_type:
                raise ConflictError(
                    f"definition '{record.name}' exists at {path} with op_type '{existing.op_type}', and a new version "
                    f"keeps it. Use another name, or move the file and its solutions and workloads first."
                )
            if version_tuple(record.version) <= version_tuple(existing.version):
                raise ConflictError(
                    f"definition '{record.name}' {existing.version} exists at {path} with another meaning. "
                    f"Raise 'version' above {existing.version}."
                )
        target = root / "definitions" / record.op_type / f"{record.name}.json"
        write_atomically(target, (record.to_json(indent=2) + "\n").encode())
        renewed = Catalog((root,))
        renewed.update_lock(root)
        return target

    def add_solution(self, record: Solution, sources: Mapping[str, bytes]) -> Path:
        """Write a new Solution folder in one step: it appears whole or not at all.

        Raises:
            ConflictError: a Solution of that name exists.
        """
        definition = self.definition(record.definition)
        existing = self._solution_paths.get(record.name)
        if existing is not None:
            raise ConflictError(
                f"solution '{record.name}' already exists at {existing.parent}. Choose another with --name."
            )
        folder = self.write_root / "solutions" / definition.op_type / record.definition / record.name
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=f".{record.name}-", dir=folder.parent) as staging:
                staged = Path(staging) / "new"
                for name, content in sources.items():
                    (staged / name).parent.mkdir(parents=True, exist_ok=True)
                    (staged / name).write_bytes(content)
                (staged / "solution.json").write_text(record.to_json(indent=2) + "\n")
                staged.rename(folder)
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise StoreError(f"cannot write {folder}: {error.strerror or error}. Nothing was added.") from None
        return folder

    def add_workloads(self, workloads: Iterable[Workload], root: Path | None = None) -> list[tuple[Path, Workload]]:
        """Append new Workloads to their files; one that exists already is left alone and not returned.

        ``root`` is the catalog to write to, by default :attr:`write_root`.
        """
        added = []
        pending: dict[Path, list[Workload]] = {}
        for workload in workloads:
            record = self.definition(workload.definition)
            workload.check_against(record)
            known = {item.uuid for item in self.workloads_for(workload.definition)}
            path = (root or self.write_root) / "workloads" / record.op_type / f"{record.name}.jsonl"
            batch = pending.setdefault(path, [])
            if workload.uuid not in known and workload.uuid not in {item.uuid for item in batch}:
                batch.append(workload)
                added.append((path, workload))
        for path, batch in pending.items():
            if batch:
                before = path.read_bytes() if path.exists() else b""
                lines = "".join(workload.to_json() + "\n" for workload in batch)
                write_atomically(path, before + lines.encode())
        return added


def read_bytes(path: Path, what: str) -> bytes:
    """The content of a record file; :class:`RecordError` where it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise RecordError(f"{path}: cannot read this {what}: {error.strerror or error}.") from None


def read_source(folder: Path, name: str, record_path: Path) -> bytes:
    """A source file of a Solution; refuses a link that leads out of the folder."""
    path = folder / name
    if not path.is_file():
        raise RecordError(f"{record_path}: sources: '{name}' does not exist beside solution.json.")
    if not path.resolve().is_relative_to(folder.resolve()):
        raise RecordError(
            f"{record_path}: sources: '{name}' is a link out of the folder ({path.resolve()}). Copy the file."
        )
    return read_bytes(path, "source")


def check_entry_point(record: Solution, sources: Mapping[str, bytes], where: Path) -> None:
    """Raise :class:`RecordError` unless the entry point's file parses and defines its function at the top level."""
    import ast

    path, function = record.spec.entry_path, record.spec.entry_function
    try:
        tree = ast.parse(sources[path])
    except (SyntaxError, ValueError) as error:
        raise RecordError(f"{where}: source '{path}' is not valid Python: {error}.") from None
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    if function not in names:
        found = ", ".join(names) or "no function"
        raise RecordError(f"{where}: entry_point '{function}' is missing in '{path}', which defines {found}.")


def read_lock(root: Path) -> dict[str, dict[str, str]]:
    """name -> version -> digest of one root; empty where it has no lock."""
    path = root / "definitions" / LOCK_FILE
    if not path.is_file():
        return {}
    try:
        content: dict[str, dict[str, str]] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RecordError(f"{path}: the lock cannot be read: {error}.") from None
    return content


def write_atomically(path: Path, content: bytes) -> None:
    """Replace ``path`` in one step, so that nobody ever reads half a file; :class:`StoreError` where that fails."""
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise StoreError(f"cannot write {path}: {error.strerror or error}. Nothing was changed.") from None


def version_tuple(version: str) -> tuple[int, ...]:
    """``1.10.0`` -> (1, 10, 0), to compare."""
    return tuple(int(part) for part in version.split("."))
