"""``tilegym-db add-solution``: a kernel for an operator, into the catalog."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilegym_db.cli.completion import complete_definition, complete_language
from tilegym_db.cli.options import regular_file
from tilegym_db.cli.output import note, print_json, print_line

if TYPE_CHECKING:
    from tilegym_db.catalog import Catalog
    from tilegym_db.records import Definition, Solution


def command(
    path: Annotated[
        Path,
        typer.Argument(
            help="A .py file that defines run(), a folder with solution.json, or the .json of one solution of a family.",
            exists=True,
            readable=True,
            callback=regular_file,
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
    author: Annotated[str | None, typer.Option(help="Who wrote it; default: the name of the login.")] = None,
    description: Annotated[str, typer.Option(help="How it works, in one line.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Validate a solution and copy it into the catalog in one step: it appears whole or not at all."""
    from tilegym_db.catalog import Catalog
    from tilegym_db.errors import RecordError
    from tilegym_db.records.base import problems_of

    catalog = Catalog.default()
    if path.is_dir() or path.suffix == ".json":
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
        note(f"the static scan noted {noted} places, which is no fault. To read them: tilegym-db check --verbose")


def from_record(
    place: Path, definition: str | None, language: str | None, name: str | None
) -> tuple[Solution, dict[str, bytes]]:
    """The Solution of a record or of its folder; options may repeat what it says, and ``name`` replaces its name.

    Raises:
        RecordError: it is no valid Solution.
        UsageError: an option contradicts it.
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
    """A Solution made of one source file; it declares nothing but contiguous tensors and every target.

    Raises:
        UsageError: ``definition`` or ``language`` is missing or unknown, or the file is no Python source.
        NotFoundError: no such Definition.
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
    """The language as records spell it.

    Raises:
        UsageError: no such language.
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
    """True where ``run`` takes the inputs only, so that it must return what it computes."""
    from tilegym_db.records.signature import find_function

    function = find_function(source, record.spec.entry_function)
    if function is None or function.args.vararg is not None:
        return False
    positional = len(function.args.posonlyargs) + len(function.args.args)
    required = positional - len(function.args.defaults)
    inputs = len(definition.inputs)
    return required <= inputs and positional < inputs + len(definition.written_outputs)


def check_callable(record: Solution, sources: dict[str, bytes], definition: Definition, where: Path) -> None:
    """Raise :class:`RecordError` where the entry point cannot take the arguments of the Definition."""
    from tilegym_db.errors import RecordError
    from tilegym_db.records.signature import signature_problem

    problem = signature_problem(record, sources[record.spec.entry_path], definition)
    if problem is not None:
        raise RecordError(f"{where}: entry_point {problem}.", code="signature_differs")


def check_source(record: Solution, sources: dict[str, bytes], where: Path) -> int:
    """Scan the sources; returns how many places the scan notes without refusing them.

    Raises:
        RecordError: the scan refuses something; names every line and rule.
    """
    from tilegym_db.errors import RecordError
    from tilegym_db.verify.scan import hard_findings, scan_sources

    findings = scan_sources(record, sources)
    refused = hard_findings(findings)
    if refused:
        lines = "\n".join(f"  {finding}" for finding in refused)
        raise RecordError(
            f"{where}: the static scan refuses this solution, and nothing was added.\n{lines}", code="scan_refused"
        )
    return len(findings)


def default_name(definition: str, language: str, stem: str) -> str:
    """``rms_norm_triton_row`` for ``row.py``; file names that say nothing add nothing."""
    detail = re.sub(r"[^a-z0-9]+", "_", stem.lower()).strip("_")
    parts = [definition, language]
    if detail not in ("kernel", "solution", "run", "main", *parts, "_".join(parts)):
        parts.append(detail.removeprefix(definition).removeprefix(f"_{language}").strip("_") or detail)
    return "_".join(parts)


def login_name() -> str:
    """Who runs this, as the system says."""
    import getpass

    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user need not have a name
        return "unknown"
