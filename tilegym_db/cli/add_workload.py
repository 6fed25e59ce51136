"""``tilegym-db add-workload``: concrete sizes for the operators, into the catalog."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilegym_db.cli.options import regular_file
from tilegym_db.cli.output import note, print_json, print_line

if TYPE_CHECKING:
    from tilegym_db.catalog import Catalog
    from tilegym_db.records import Definition, Workload


def command(
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
    """Validate workloads and append them to the catalog; all of them or, where one is wrong, none.

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
    """Every Workload of a file, checked against its Definition, which may be a draft that the catalog does not have yet.

    Raises:
        RecordError: a line is no Workload, or does not fit its Definition; names file, line and key.
        NotFoundError: a line names an unknown Definition.
    """
    from tilegym_db.catalog.call_rules import check_call
    from tilegym_db.catalog.workload_files import WORKLOAD_BYTES
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
    """(where, text) of every object: the whole file if it is one JSON object over several lines, else its lines."""
    from pydantic_core import from_json

    try:
        from_json(content)
    except ValueError:
        lines = enumerate(content.splitlines(), start=1)
        return [(f"{file}:{number}", line) for number, line in lines if line.strip()]
    return [(str(file), content)]
