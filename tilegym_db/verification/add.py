"""Adds records of files to a catalog, each after every check that it must pass, and removes records of the user's.

The rules need more than the catalog: a child process runs a new reference once, and the scan of the sandbox reads the
sources. So they are in this room, and the catalog itself only writes.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Literal

from pydantic_core import from_json

from tilegym_db.catalog import Catalog, SolutionFiles, check_entry_point, writers
from tilegym_db.catalog.reader import check_blobs
from tilegym_db.catalog.record_files import LIBRARY, RECORD_NAME, WORKLOAD_BYTES, file_of, library_file, of_family_file
from tilegym_db.catalog.writers import check_call, check_fits
from tilegym_db.errors import NotFoundError, RecordError, UsageError, check_kind
from tilegym_db.files import read_bytes
from tilegym_db.records import Definition, Solution, Workload
from tilegym_db.records.definition_rules import copied_formulation
from tilegym_db.records.solution import find_function, normalise_language
from tilegym_db.records.text import parse_object
from tilegym_db.sandbox.scan import require_clean, scan_definition, scan_sources
from tilegym_db.scaffold.definition_draft import (
    RECORD_FILE,
    WORKLOADS_FILE,
    is_draft,
    open_places,
    read_definition_file,
)
from tilegym_db.scaffold.solution_draft import DEPENDENCIES, login_name, unfinished
from tilegym_db.store.opening import open_store
from tilegym_db.store.queries.measured import count_traces_of

Sources = Mapping[str, bytes]
"""Path in a Solution's folder -> content."""


@dataclasses.dataclass(frozen=True)
class Added:
    """Records that were added to a catalog, with the files or folders that contain them now."""

    definition: Definition | None = None
    solution: Solution | None = None
    workloads: tuple[Workload, ...] = ()
    """The new ones."""
    paths: tuple[Path, ...] = ()
    """Files of a Definition and of Workloads, or the folder of a Solution."""
    known_workloads: tuple[Workload, ...] = ()
    """Those that the catalog had already, or that a file states twice."""
    scan_notes: tuple[str, ...] = ()
    """Remarks of the static scan about a Solution, which are no errors."""
    outcome: Literal["added", "replaced", "known"] = "added"
    """``known`` if the catalog had the same record, with all Workloads or the bytes of all sources; nothing was written then."""
    reference_ran: bool = False
    """True if the reference of a Definition was run once; without PyTorch it is not."""


def add(
    path: str | Path,
    *,
    definition: str | None = None,
    language: str | None = None,
    name: str | None = None,
    author: str | None = None,
    description: str = "",
    replace: bool = False,
    catalog: Catalog | None = None,
) -> Added:
    """Add what a file or folder contains: a Definition, a Solution or Workloads.

    The checks are those of the command line. If one fails, nothing is added.

    Args:
        path: a ``.py`` file that defines ``run``, the folder or the ``.json`` of a record, the folder of a draft, or Workloads
            as ``.jsonl``.
        definition: the operator of a Solution. Only a ``.py`` file needs it.
        language: the language of a Solution. Only a ``.py`` file needs it.
        name: the name of a Solution, in place of the one in its record or of one made from its file.
        author: the author of a ``.py`` file; by default the login name.
        description: one line about a ``.py`` file.
        replace: let a Solution take the place of the user's own one of that name.
        catalog: the records; the shipped ones and the user's overlay by default. New records are written to
            :attr:`Catalog.write_root`. Make a new catalog to read them.

    Raises:
        RecordError: a record is invalid, or the static scan refuses a source.
        ConflictError: the catalog has another record of that name.
        NotFoundError: a Definition is unknown.
        UsageError: the path does not exist or is of another kind, or an argument is missing or contradicts the record.
    """
    check_kind(path, (str, Path), "add takes the path of a file or folder")
    path = Path(path)
    kind = kind_of(path)
    if kind == "solution":
        return add_solution(
            path, definition=definition, language=language, name=name, author=author, description=description,
            replace=replace, catalog=catalog,
        )  # fmt: skip
    given: dict[str, object] = {"definition": definition, "language": language, "name": name, "author": author}
    given |= {"description": description or None, "replace": replace or None}
    extra = next((key for key, value in given.items() if value is not None), None)
    if extra is not None:
        raise UsageError(
            f"{path}: '{extra}' is for a solution, and this path has a {kind}. Leave it out.", code="options_clash"
        )
    return add_definition(path, catalog=catalog) if kind == "definition" else add_workloads(path, catalog=catalog)


def kind_of(path: Path) -> Literal["definition", "solution", "workload"]:
    """Return the kind of the records in a file or folder, from its suffix or the keys of its object; refuse others."""
    if not file_of(path).exists():
        raise UsageError(f"{path}: there is no such file or folder.", code="file_missing")
    if path != file_of(path):
        return "solution"
    if path.is_dir():
        return "definition" if is_draft(path) else "solution"
    if path.suffix == ".py":
        return "solution"
    if path.suffix == ".jsonl":
        return "workload"
    if path.suffix == ".json":
        content = parse_object(read_bytes(path, "record", WORKLOAD_BYTES), "record", path)
        keys = content.keys() if isinstance(content, dict) else ()
        if "spec" in keys or "solutions" in keys:
            return "solution"
        if "reference" in keys or "outputs" in keys:
            return "definition"
        if "definition" in keys:
            return "workload"
    raise UsageError(
        f"{path}: neither a definition, a solution nor workloads. Give a .py file that defines run(), the .json of a record, "
        "the folder of a solution or of a draft, or workloads as .jsonl.",
        code="file_kind",
    )


# ---- Definitions ----------------------------------------------------------------------------------------


def add_definition(path: Path, *, catalog: Catalog | None = None) -> Added:
    """Add a Definition and the Workloads of its draft, after its reference ran once on small inputs.

    Raises:
        RecordError: the Definition or one of its Workloads is invalid, or the reference fails.
        ConflictError: the version exists with another meaning, or is not newer than the existing one.
    """
    catalog = catalog or Catalog.default()
    record = catalog.with_forward(read_definition_file(path), path)
    require_clean(scan_definition(record), path, "the record")
    _require_finished(open_places(path), path)
    copied = copied_formulation(record.reference, record.self_test)
    if copied is not None:
        raise RecordError(f"{path}: {copied}", code=copied.code)
    has_torch = importlib.util.find_spec("torch") is not None
    if has_torch:
        from tilegym_db.verification.admission import run_reference_once  # loads PyTorch

        run_reference_once(record, path)
    sizes = path / WORKLOADS_FILE
    workloads = read_workloads(sizes, catalog, record) if sizes.is_file() else []
    check_blobs(workloads, path)  # before anything is added
    is_known = record.name in catalog.definition_paths and catalog.definition(record.name) == record
    target = writers.add_definition(catalog, record)
    added = _appended(workloads, path, catalog.reread(catalog.write_root)) if workloads else Added()
    outcome: Literal["added", "known"] = "known" if is_known and not added.workloads else "added"
    return dataclasses.replace(
        added, definition=record, paths=(target, *added.paths), outcome=outcome, reference_ran=has_torch
    )


# ---- Solutions ------------------------------------------------------------------------------------------


def add_solution(
    path: Path,
    *,
    definition: str | None = None,
    language: str | None = None,
    name: str | None = None,
    author: str | None = None,
    description: str = "",
    replace: bool = False,
    catalog: Catalog | None = None,
) -> Added:
    """Add a Solution in one step, after the static scan of its sources.

    Args:
        path: a ``.py`` file that defines ``run``, a folder with ``solution.json``, or one Solution of a family: its
            ``.json``, or ``family.json#<solution>``.

    Raises:
        RecordError: the Solution is invalid, does not fit its Definition, or the static scan refuses it.
        ConflictError: a Solution of that name exists with other content, and is shipped or ``replace`` is false.
        NotFoundError: the Definition is unknown.
        UsageError: an argument is missing or unknown, or contradicts the record.
    """
    catalog = catalog or Catalog.default()
    record, sources = read_draft(
        path, catalog, definition=definition, language=language, name=name, author=author, description=description
    )
    notes = _scanned(record, sources, path)
    _require_finished(unfinished(record, sources, catalog.definition(record.definition)), path)
    outcome = _outcome(record, sources, catalog)
    folder = writers.add_solution(catalog, record, sources, replace=replace)
    return Added(solution=record, paths=(folder,), scan_notes=notes, outcome=outcome)


def _outcome(record: Solution, sources: Sources, catalog: Catalog) -> Literal["added", "replaced", "known"]:
    """Return what adding a Solution will do, if it is not refused."""
    if record.name not in catalog.solution_paths:
        return "added"
    try:
        known = catalog.solution(record.name)
    except RecordError:
        return "replaced"
    return "known" if (known.record, dict(known.sources)) == (record, dict(sources)) else "replaced"


def read_draft(
    path: Path,
    catalog: Catalog,
    *,
    definition: str | None,
    language: str | None = None,
    name: str | None = None,
    author: str | None = None,
    description: str = "",
    entry: str = "run",
) -> tuple[Solution, Sources]:
    """Return the Solution of a file or folder with its sources, after every check except the scan.

    Args:
        catalog: has the Definition, and the shared code that a ``.py`` file imports.
        entry: the function of a ``.py`` file that is called; a record names its own.
    """
    language = None if language is None else normalise_language(language)
    if path.is_dir() or path.suffix == ".json" or of_family_file(path):
        record, sources = _from_record(path, definition, language, name)
    else:
        author = login_name() if author is None else author.strip()
        record, sources = _from_file(path, catalog, definition, language, name, author, description, entry)
    check_fits(record, sources, catalog.definition(record.definition), path)
    return record, sources


def _from_record(
    place: Path, definition: str | None, language: str | None, name: str | None
) -> tuple[Solution, Sources]:
    """Return the Solution of a record or of its folder. Arguments must agree with it; ``name`` replaces its name."""
    if place.is_dir() and not (place / RECORD_NAME).exists() and (place / RECORD_FILE).is_file():
        raise UsageError(
            f"{place} is a draft of a definition, and holds no {RECORD_NAME}. Try: tilegym-db check "
            f"{shlex.quote(f'{place}/')}, then: tilegym-db add-definition {shlex.quote(f'{place}/')}",
            code="draft_of_definition",
        )
    files = SolutionFiles.read(place)
    record = files.record
    for key, given, written in (
        ("definition", definition, record.definition),
        ("language", language, record.spec.language),
    ):
        if given is not None and given != written:
            raise UsageError(
                f"{files.path}: its {key} is '{written}', and '{given}' was asked for. Leave that out or edit the file.",
                code="option_contradicts_file",
            )
    if name is not None:
        record = Solution.from_dict({**record.to_dict(), "name": name}, "name")
    return record, files.sources


def _from_file(
    file: Path,
    catalog: Catalog,
    definition: str | None,
    language: str | None,
    name: str | None,
    author: str,
    description: str,
    entry: str,
) -> tuple[Solution, Sources]:
    """Return the Solution of one source file and shared code, for contiguous tensors and every target."""
    if file.suffix != ".py":
        raise UsageError(
            f"{file}: give a .py file that defines run(), or the folder or .json of a solution.", code="file_kind"
        )
    if definition is None or language is None:
        lacking = "definition" if definition is None else "language"
        words = ["tilegym-db", "add-solution", str(file), "-d", definition or "NAME", "-l", language or "triton"]
        raise UsageError(f"{file}: a single file needs a {lacking}. Try: {shlex.join(words)}", code="options_missing")
    operator = catalog.definition(definition)
    sources = with_shared_code({file.name: read_bytes(file, "source")}, catalog.roots)
    spec: dict[str, object] = {
        "language": language,
        "entry_point": f"{file.name}::{entry}",
        "dependencies": DEPENDENCIES[language],
        "destination_passing_style": True,
    }
    values = {
        "name": default_name(definition, language, file.stem) if name is None else name,
        "definition": definition,
        "author": author,
        "description": description,
        "spec": spec,
        "sources": [{"path": path} for path in sources],
    }
    record = Solution.from_dict(values, file)
    check_entry_point(record, sources, file)
    if language == "python" and returns_its_outputs(record, sources[file.name], operator):
        record = Solution.from_dict({**values, "spec": {**spec, "destination_passing_style": False}}, file)
    return record, sources


def with_shared_code(sources: Sources, roots: Sequence[Path]) -> Sources:
    """Return sources with the shared code that they import, directly or through other shared code.

    Args:
        roots: of the catalog; ``from _lib.triton.scale import x`` reads ``solutions/_lib/triton/scale.py`` of the first.
    """
    found, waiting = dict(sources), list(sources)
    while waiting:
        path = waiting.pop()
        for name in _shared_imports(path, found[path]):
            file = None if name in found else library_file(roots, name)
            if file is not None:
                found[name] = read_bytes(file, "source")
                waiting.append(name)
    return found


def _shared_imports(path: str, source: bytes) -> list[str]:
    """Return the paths that shared modules imported by a source may have."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    folders, modules = PurePosixPath(path).parts, []
    for node in nodes:
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = [*(folders[: -node.level] if node.level else ()), *filter(None, [node.module])]
            modules += [".".join(parts), *(".".join([*parts, alias.name]) for alias in node.names)]
    paths = (module.replace(".", "/") + ".py" for module in modules)
    return [name for name in dict.fromkeys(paths) if name.startswith(f"{LIBRARY}/")]


def returns_its_outputs(record: Solution, source: bytes, definition: Definition) -> bool:
    """Return True if ``run`` takes only the inputs, and therefore returns its outputs."""
    function = find_function(source, record.spec.entry_function)
    if function is None or function.args.vararg is not None:
        return False
    positional = len(function.args.posonlyargs) + len(function.args.args)
    required = positional - len(function.args.defaults)
    inputs = len(definition.inputs)
    return required <= inputs and positional < inputs + len(definition.written_outputs)


def default_name(definition: str, language: str, stem: str) -> str:
    """Return a name such as ``rms_norm_triton_row`` for ``row.py``. Generic file names are left out."""
    detail = re.sub(r"[^a-z0-9]+", "_", stem.lower()).strip("_")
    parts = [definition, language]
    if detail not in ("kernel", "solution", "run", "main", *parts, "_".join(parts)):
        parts.append(detail.removeprefix(definition).removeprefix(f"_{language}").strip("_") or detail)
    return "_".join(parts)


def _scanned(record: Solution, sources: Sources, where: Path) -> tuple[str, ...]:
    """Scan the sources and return the notes. Raise :class:`RecordError` with every line and rule if they are refused."""
    findings = scan_sources(record, sources)
    require_clean(findings, where, "this solution")
    return tuple(map(str, findings))


def _require_finished(places: Sequence[str], path: Path) -> None:
    """Raise :class:`RecordError` if places of a draft are still open."""
    if places:
        more = f" and {len(places) - 1} more" if len(places) > 1 else ""
        raise RecordError(
            f"{path}: a draft with an open place: {places[0].rstrip('.')}{more}. Replace each TODO, and add it again.",
            code="draft_unfinished",
        )


# ---- Workloads ------------------------------------------------------------------------------------------


def add_workloads(file: Path, *, catalog: Catalog | None = None) -> Added:
    """Append the Workloads of a file to the catalog: all of them, or none if one is invalid.

    Files that contain inputs (safetensors) are copied from the folder of ``file``; each Workload states their sha256.

    Args:
        file: one JSON object a line, or one object.
        catalog: see :func:`add`.

    Raises:
        RecordError: a line is not a valid Workload of its Definition; the message names file, line and key.
        NotFoundError: a line names an unknown Definition.
    """
    catalog = catalog or Catalog.default()
    return _appended(read_workloads(file, catalog), file.parent, catalog)


def _appended(workloads: Sequence[Workload], blobs_from: Path, catalog: Catalog) -> Added:
    written = writers.add_workloads(catalog, workloads, blobs_from=blobs_from)
    new = {workload.uuid: workload for _, workload in written}
    left = dict(new)
    known = tuple(workload for workload in workloads if left.pop(workload.uuid, None) is None)
    return Added(
        workloads=tuple(new.values()), paths=tuple(sorted({path for path, _ in written})), known_workloads=known
    )


def read_workloads(file: Path, catalog: Catalog, draft: Definition | None = None) -> list[Workload]:
    """Read the Workloads of a file and check each against its Definition, which may be a draft outside the catalog."""
    workloads = []
    for where, text in _split_objects(file, read_bytes(file, "workload file", WORKLOAD_BYTES)):
        workload = Workload.from_json(text, where)
        try:
            is_of_draft = draft is not None and draft.name == workload.definition
            operator = draft if draft is not None and is_of_draft else catalog.definition(workload.definition)
            check_call(operator, workload)
        except NotFoundError as error:
            raise NotFoundError(f"{where}: {error}", code=error.code) from None
        except RecordError as error:
            raise RecordError(f"{where}: {error}", code=error.code) from None
        workloads.append(workload)
    if not workloads:
        raise RecordError(f"{file}: holds no workload. Write one JSON object a line.", code="workload_missing")
    return workloads


def _split_objects(file: Path, content: bytes) -> list[tuple[str, bytes]]:
    """Return (location, text) of every object: the whole file if it is one JSON object, else each of its lines."""
    try:
        from_json(content)
    except ValueError:
        lines = enumerate(content.splitlines(), start=1)
        return [(f"{file}:{number}", line) for number, line in lines if line.strip()]
    return [(str(file), content)]


# ---- removal --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Removed:
    """A record that was removed, with its files and the traces that stay."""

    kind: Literal["definition", "solution"]
    name: str
    paths: tuple[Path, ...]
    """The folder of a Solution, or the files of a Definition and its Workloads."""
    traces: dict[str, int]
    """GPU -> number of its traces. They stay in the store, and nothing ranks or serves them."""


def remove(name: str, *, catalog: Catalog | None = None, store_home: Path | None = None) -> Removed:
    """Remove a Solution or a Definition of the user's. Shipped records are never removed, and traces stay.

    Args:
        name: of the Solution or Definition.
        catalog: the records; the shipped ones and the user's overlay by default.
        store_home: folder of the store; by default ``$TILEGYM_DB_HOME`` or the user data folder.

    Raises:
        ConflictError: the record is shipped, is one of a family's file, or is a Definition that other records use.
        NotFoundError: there is no such record.
        StoreError: a file cannot be removed, or the store cannot be used; then nothing is removed.
    """
    catalog = catalog or Catalog.default()
    with open_store(store_home, read_only=True, catalog=catalog) as store:
        traces = count_traces_of(store, name)
    is_definition = name in catalog.definition_paths
    paths = writers.remove(catalog, name)
    return Removed("definition" if is_definition else "solution", name, paths, traces)
