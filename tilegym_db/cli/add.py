"""``tilegym-db add-definition``, ``add-solution`` and ``add-workload``: add records to the catalog."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilegym_db.cli.kit.options import complete_definition, complete_language, regular_file, solution_place
from tilegym_db.cli.kit.output import note, print_json, print_line

if TYPE_CHECKING:
    from tilegym_db.catalog import Catalog
    from tilegym_db.records import Definition, Solution, Workload


def add_definition_command(
    file: Annotated[
        Path,
        typer.Argument(
            help="A definition as JSON, or the folder of a draft (see new).",
            exists=True,
            readable=True,
            callback=regular_file,
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Validate a definition, run its reference once on small inputs, and copy it into the catalog, with the sizes of a draft."""
    import importlib.util

    from tilegym_db.catalog import Catalog
    from tilegym_db.catalog.blobs import check_blobs
    from tilegym_db.scaffold import read_definition_file
    from tilegym_db.scaffold.definition_draft import WORKLOADS_FILE

    record = Catalog.default().with_forward(read_definition_file(file), file)
    if importlib.util.find_spec("torch") is None:
        note("the reference was not run: torch is not installed (pip install 'tilegym-db[torch]').")
    else:
        from tilegym_db.verification.admission import run_reference_once

        run_reference_once(record, file)
    sizes = file / WORKLOADS_FILE
    workloads = read_workloads(sizes, Catalog.default(), record) if sizes.is_file() else None
    check_blobs(workloads or (), file)  # before anything is added
    path = Catalog.default().add_definition(record)
    if as_json:
        print_json({"definition": record.name, "version": record.version, "path": str(path)})
    else:
        print_line(str(path))
    if workloads is None:
        note(
            f"added definition '{record.name}' {record.version}. Next: give it sizes, at least one tagged 'tiny' "
            f"(tilegym-db add-workload FILE.jsonl), then: tilegym-db check {record.name}"
        )
        return
    added = Catalog.default().add_workloads(workloads, blobs_from=file)
    note(
        f"added definition '{record.name}' {record.version} and {len(added)} workloads. "
        f"Next: tilegym-db new solution {record.name} --stock"
    )


# ---- Solutions ----------------------------------------------------------------------------------------


def add_solution_command(
    path: Annotated[
        Path,
        typer.Argument(
            help="A .py file that defines run(), a folder with solution.json, or one solution of a family: its .json, or "
            "family.json#NAME.",
            readable=True,
            callback=solution_place,
        ),
    ],
    definition: Annotated[
        str | None,
        typer.Option("--definition", "-d", help="The operator it implements.", autocompletion=complete_definition),
    ] = None,
    language: Annotated[
        str | None,
        typer.Option("--language", "-l", help="python, triton, tilelang or cutile.", autocompletion=complete_language),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the solution; default: from definition, language, file.")
    ] = None,
    author: Annotated[str | None, typer.Option(help="Author; default: the login name.")] = None,
    description: Annotated[str, typer.Option(help="How it works, in one line.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Validate a solution and copy it into the catalog in one step, completely or not at all."""
    from tilegym_db.catalog import Catalog
    from tilegym_db.catalog.record_files import of_family_file
    from tilegym_db.errors import RecordError
    from tilegym_db.records.base import problems_of

    catalog = Catalog.default()
    if path.is_dir() or path.suffix == ".json" or of_family_file(path):
        record, sources = from_record(path, definition, language, name)
    else:
        record, sources = from_file(
            path, catalog, definition, language, name, login_name() if author is None else author.strip(), description
        )
    operator = catalog.definition(record.definition)
    problems = problems_of(lambda: record.check_against(operator))
    if problems:
        raise RecordError(f"{path}: {problems[0]}.", code=problems[0].code)
    check_callable(record, sources, operator, path)
    noted = check_source(record, sources, path)
    folder = catalog.add_solution(record, sources)
    if as_json:
        print_json({"solution": record.name, "definition": record.definition, "path": str(folder), "scan_notes": noted})
    else:
        print_line(str(folder))
    _note_next(record, noted)


def _note_next(record: Solution, noted: int) -> None:
    after = f"tilegym-db bench {record.name}"
    first = "" if record.spec.language == "python" else f"tilegym-db compile {record.name}, then: "
    note(f"added solution '{record.name}' for {record.definition}. Next: {first}{after}")
    if noted:
        note(f"the static scan has {noted} notes, which are not errors. To read them: tilegym-db check --verbose")


def from_record(
    place: Path, definition: str | None, language: str | None, name: str | None
) -> tuple[Solution, dict[str, bytes]]:
    """Read the Solution of a record or of its folder. Options must agree with the record; ``name`` replaces its name.

    Raises:
        RecordError: the Solution is invalid.
        UsageError: an option contradicts the record.
    """
    from tilegym_db.catalog import SolutionFiles
    from tilegym_db.errors import UsageError
    from tilegym_db.records import Solution

    files = SolutionFiles.read(place)
    record = files.record
    for option, given, written in (
        ("--definition", definition, record.definition),
        ("--language", normalise_language(language), record.spec.language),
    ):
        if given is not None and given != written:
            raise UsageError(
                f"{option} {given}: {files.path} says '{written}'. Leave the option out or edit the file.",
                code="option_contradicts_file",
            )
    if name is not None:
        record = Solution.from_dict({**record.to_dict(), "name": name}, "--name")
    return record, dict(files.sources)


def from_file(
    file: Path,
    catalog: Catalog,
    definition: str | None,
    language: str | None,
    name: str | None,
    author: str,
    description: str,
) -> tuple[Solution, dict[str, bytes]]:
    """Make a Solution from one source file, for contiguous tensors and every target.

    Raises:
        UsageError: ``definition`` or ``language`` is missing or unknown, or the file is not a Python source.
        NotFoundError: the Definition does not exist.
        RecordError: the source does not parse or defines no ``run``.
    """
    from tilegym_db.catalog import check_entry_point
    from tilegym_db.errors import UsageError
    from tilegym_db.files import read_bytes
    from tilegym_db.records import Solution
    from tilegym_db.scaffold.solution_draft import DEPENDENCIES

    if file.suffix != ".py":
        raise UsageError(
            f"{file}: give a .py file that defines run(), or the folder or .json of a solution.", code="file_kind"
        )
    if definition is None or language is None:
        missing = f"{'--definition' if definition is None else '--language'} is needed for a single file"
        raise UsageError(
            f"{file}: {missing}. Try: tilegym-db add-solution {file} -d NAME -l triton", code="options_missing"
        )
    operator = catalog.definition(definition)
    language = normalise_language(language)
    assert language is not None
    sources = {file.name: read_bytes(file, "source")}
    spec: dict[str, object] = {
        "language": language,
        "entry_point": f"{file.name}::run",
        "dependencies": DEPENDENCIES[language],
        "destination_passing_style": True,
    }
    values = {
        "name": default_name(definition, language, file.stem) if name is None else name,
        "definition": definition,
        "author": author,
        "description": description,
        "spec": spec,
        "sources": [{"path": file.name}],
    }
    record = Solution.from_dict(values, file)
    check_entry_point(record, sources, file)
    if language == "python" and returns_its_outputs(record, sources[file.name], operator):
        record = Solution.from_dict({**values, "spec": {**spec, "destination_passing_style": False}}, file)
    return record, sources


def normalise_language(language: str | None) -> str | None:
    """Return the language in the spelling of records.

    Raises:
        UsageError: the language is unknown.
    """
    from tilegym_db.errors import UsageError, did_you_mean
    from tilegym_db.records import LANGUAGES

    if language is None or language in LANGUAGES:
        return language
    if language in ("cuda-tile", "cuTile"):
        return "cutile"
    raise UsageError(
        f"unknown language {language!r}.{did_you_mean(language.lower(), LANGUAGES)} Known: {', '.join(LANGUAGES)}.",
        code="language_unknown",
    )


def returns_its_outputs(record: Solution, source: bytes, definition: Definition) -> bool:
    """Return True if ``run`` takes only the inputs, and therefore returns its outputs."""
    from tilegym_db.records.solution import find_function

    function = find_function(source, record.spec.entry_function)
    if function is None or function.args.vararg is not None:
        return False
    positional = len(function.args.posonlyargs) + len(function.args.args)
    required = positional - len(function.args.defaults)
    inputs = len(definition.inputs)
    return required <= inputs and positional < inputs + len(definition.written_outputs)


def check_callable(record: Solution, sources: dict[str, bytes], definition: Definition, where: Path) -> None:
    """Raise :class:`RecordError` if the entry point cannot take the Definition's arguments."""
    from tilegym_db.errors import RecordError
    from tilegym_db.records.solution import signature_problem

    problem = signature_problem(record, sources[record.spec.entry_path], definition)
    if problem is not None:
        raise RecordError(f"{where}: entry_point {problem}.", code="signature_differs")


def check_source(record: Solution, sources: dict[str, bytes], where: Path) -> int:
    """Scan the sources and return the number of notes, which do not refuse them.

    Raises:
        RecordError: the scan refuses the sources; the message has every line and rule.
    """
    from tilegym_db.errors import RecordError
    from tilegym_db.sandbox.scan import hard_findings, scan_sources

    findings = scan_sources(record, sources)
    refused = hard_findings(findings)
    if refused:
        lines = "\n".join(f"  {finding}" for finding in refused)
        raise RecordError(
            f"{where}: the static scan refuses this solution, and nothing was added.\n{lines}", code="scan_refused"
        )
    return len(findings)


def default_name(definition: str, language: str, stem: str) -> str:
    """Return a name such as ``rms_norm_triton_row`` for ``row.py``. Generic file names are left out."""
    detail = re.sub(r"[^a-z0-9]+", "_", stem.lower()).strip("_")
    parts = [definition, language]
    if detail not in ("kernel", "solution", "run", "main", *parts, "_".join(parts)):
        parts.append(detail.removeprefix(definition).removeprefix(f"_{language}").strip("_") or detail)
    return "_".join(parts)


def login_name() -> str:
    """Return the login name of the user, or ``unknown``."""
    import getpass

    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        return "unknown"


# ---- Workloads ----------------------------------------------------------------------------------------


def add_workload_command(
    file: Annotated[
        Path,
        typer.Argument(
            help="Workloads, one JSON object a line (or one object).",
            exists=True,
            dir_okay=False,
            readable=True,
            callback=regular_file,
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Validate workloads and append them to the catalog: all of them, or none if one is invalid.

    Files that hold inputs (safetensors) are copied from the folder of FILE; each workload states their sha256.
    """
    from tilegym_db.catalog import Catalog

    catalog = Catalog.default()
    workloads = read_workloads(file, catalog)
    added = catalog.add_workloads(workloads, blobs_from=file.parent)
    paths = sorted({str(path) for path, _ in added})
    if as_json:
        print_json({"added": [workload.uuid for _, workload in added], "read": len(workloads), "paths": paths})
    else:
        for path in paths:
            print_line(path)
    known = len(workloads) - len(added)
    names = ", ".join(sorted({workload.definition for workload in workloads}))
    note(
        f"added {len(added)} workloads"
        + (f", {known} exist already" if known else "")
        + f". Next: tilegym-db bench {names}"
    )


def read_workloads(file: Path, catalog: Catalog, draft: Definition | None = None) -> list[Workload]:
    """Read the Workloads of a file and check each against its Definition, which may be a draft outside the catalog.

    Raises:
        RecordError: a line is not a valid Workload of its Definition; the message names file, line and key.
        NotFoundError: a line names an unknown Definition.
    """
    from tilegym_db.catalog.record_files import WORKLOAD_BYTES
    from tilegym_db.catalog.writers import check_call
    from tilegym_db.errors import NotFoundError, RecordError
    from tilegym_db.files import read_bytes
    from tilegym_db.records import Workload

    workloads = []
    for where, text in split_objects(file, read_bytes(file, "workload file", WORKLOAD_BYTES)):
        workload = Workload.from_json(text, where)
        try:
            is_draft = draft is not None and draft.name == workload.definition
            operator = draft if draft is not None and is_draft else catalog.definition(workload.definition)
            check_call(operator, workload)
        except NotFoundError as error:
            raise NotFoundError(f"{where}: {error}", code=error.code) from None
        except RecordError as error:
            raise RecordError(f"{where}: {error}", code=error.code) from None
        workloads.append(workload)
    if not workloads:
        raise RecordError(f"{file}: holds no workload. Write one JSON object a line.", code="workload_missing")
    return workloads


def split_objects(file: Path, content: bytes) -> list[tuple[str, bytes]]:
    """Return (location, text) of every object: the whole file if it is one JSON object, else each of its lines."""
    from pydantic_core import from_json

    try:
        from_json(content)
    except ValueError:
        lines = enumerate(content.splitlines(), start=1)
        return [(f"{file}:{number}", line) for number, line in lines if line.strip()]
    return [(str(file), content)]
