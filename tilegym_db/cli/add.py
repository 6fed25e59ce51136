"""``tilegym-db add-definition``, ``add-solution``, ``add-workload`` and ``remove``: add and remove records of the catalog."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tilegym_db.cli.kit.options import Implements, complete_language, complete_name, regular_file, solution_place
from tilegym_db.cli.kit.output import note, print_json, print_line


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
    from tilegym_db.verification.add import add_definition

    added = add_definition(file)
    record = added.definition
    assert record is not None
    if as_json:
        print_json({"definition": record.name, "version": record.version, "path": str(added.paths[0])})
    else:
        print_line(str(added.paths[0]))
    if not added.reference_ran:
        note("the reference was not run: torch is not installed (pip install 'tilegym-db[torch]').")
    is_known = added.outcome == "known"
    done = f"{'the catalog has this already:' if is_known else 'added'} definition '{record.name}' {record.version}"
    if not added.workloads and not added.known_workloads:
        note(
            f"{done}. Next: give it sizes, at least one tagged 'tiny' "
            f"(tilegym-db add-workload FILE.jsonl), then: tilegym-db check {record.name}"
        )
        return
    sizes = "its" if is_known else len(added.workloads)
    note(f"{done} and {sizes} workloads. Next: tilegym-db new solution {record.name} --stock")


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
    definition: Implements = None,
    language: Annotated[
        str | None,
        typer.Option("--language", "-l", help="python, triton, tilelang or cutile.", autocompletion=complete_language),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the solution; default: from definition, language, file.")
    ] = None,
    author: Annotated[str | None, typer.Option(help="Author; default: the login name.")] = None,
    description: Annotated[str, typer.Option(help="How it works, in one line.")] = "",
    replace: Annotated[bool, typer.Option("--replace", help="Replace your solution of that name.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Validate a solution and copy it into the catalog in one step, completely or not at all."""
    from tilegym_db.verification.add import add_solution

    added = add_solution(
        path,
        definition=definition,
        language=language,
        name=name,
        author=author,
        description=description,
        replace=replace,
    )
    record = added.solution
    assert record is not None
    folder, noted = str(added.paths[0]), len(added.scan_notes)
    if as_json:
        outcome = {"outcome": added.outcome, "path": folder, "scan_notes": noted}
        print_json({"solution": record.name, "definition": record.definition, **outcome})
    else:
        print_line(folder)
    after = f"tilegym-db bench {record.name}"
    first = "" if record.spec.language == "python" else f"tilegym-db compile {record.name}, then: "
    said = "the catalog has this already:" if added.outcome == "known" else added.outcome
    note(f"{said} solution '{record.name}' for {record.definition}. Next: {first}{after}")
    if noted:
        note(f"the static scan has {noted} notes, which are not errors. To read them: tilegym-db check --verbose")


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
    from tilegym_db.verification.add import add_workloads

    added = add_workloads(file)
    paths, known = [str(path) for path in added.paths], len(added.known_workloads)
    if as_json:
        uuids = [workload.uuid for workload in added.workloads]
        print_json({"added": uuids, "read": len(uuids) + known, "paths": paths})
    else:
        for path in paths:
            print_line(path)
    existing = f", {known} exist already" if known else ""
    names = " ".join(sorted({workload.definition for workload in (*added.workloads, *added.known_workloads)}))
    note(f"added {len(added.workloads)} workloads{existing}. Next: tilegym-db bench {names}")


# ---- Remove -------------------------------------------------------------------------------------------


def remove_command(
    name: Annotated[str, typer.Argument(help="One of your solutions or definitions.", autocompletion=complete_name)],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Remove one of your solutions, or a definition with its workloads. Shipped records and all traces stay."""
    from tilegym_db.verification.add import remove

    removed = remove(name)
    paths = [str(path) for path in removed.paths]
    if as_json:
        print_json({"kind": removed.kind, "name": name, "paths": paths, "traces": removed.traces})
    else:
        for path in paths:
            print_line(path)
    note(f"removed {removed.kind} '{name}'.")
    if removed.traces:
        counts = ", ".join(f"{count} on {gpu}" for gpu, count in removed.traces.items())
        note(
            f"its traces stay in the store and are no longer ranked or served: {counts}. Publish anew if they were published."
        )
