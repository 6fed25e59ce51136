"""``tilegym-db add-definition``: a new operator, or a new version of one, into the catalog."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tilegym_db.cli.options import regular_file
from tilegym_db.cli.output import note, print_json, print_line


def command(
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
    """Validate a definition, run its reference once on small inputs, and copy it into the catalog; of a draft, its sizes too."""
    import importlib.util

    from tilegym_db.catalog import Catalog
    from tilegym_db.catalog.blob_files import check_blobs
    from tilegym_db.cli.add_workload import read_workloads
    from tilegym_db.scaffold import read_definition_file
    from tilegym_db.scaffold.definition_draft import WORKLOADS_FILE

    record = Catalog.default().with_forward(read_definition_file(file), file)
    if importlib.util.find_spec("torch") is None:
        note("the reference was not run: torch is missing here (pip install 'tilegym-db[torch]').")
    else:
        from tilegym_db.verify.admission import run_reference_once

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
