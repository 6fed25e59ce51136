"""``tilegym-db list``: list records of the catalog and of imported data sets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilegym_db.cli.kit.formats import TABLE, Form, with_form, write_records
from tilegym_db.cli.kit.options import OpType, of_kind, select_definitions, status_of
from tilegym_db.cli.kit.output import note, print_table
from tilegym_db.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tilegym_db.catalog import Catalog
    from tilegym_db.records import Definition
    from tilegym_db.store.imported import DataSet, Kind, StoredRecord


@with_form
def command(
    word: Annotated[
        str | None,
        typer.Argument(help="Only records whose name, or whose definition's, contains this.", metavar="WORD"),
    ] = None,
    solutions: Annotated[bool, typer.Option("--solutions", help="List solutions.")] = False,
    workloads: Annotated[bool, typer.Option("--workloads", help="List workloads.")] = False,
    awards: Annotated[
        bool,
        typer.Option("--awards", help="List awards: kernels that beat the best baseline by 1.10x, with their status."),
    ] = False,
    op_type: OpType = None,
    status: Annotated[str | None, typer.Option(help="Only definitions with the tag status:<this>.")] = None,
    origin: Annotated[
        str | None, typer.Option(help="List an imported data set instead, by its origin; 'all' lists every one.")
    ] = None,
    form: Form = TABLE,
) -> None:
    """List definitions, or their solutions (--solutions) or workloads (--workloads)."""
    from tilegym_db.catalog import Catalog

    if solutions + workloads + awards > 1:
        raise UsageError(
            "--solutions, --workloads and --awards list different things; give one of them.", code="options_clash"
        )
    if origin is not None:
        rows = imported_rows(origin, "solution" if solutions else "workload" if workloads else "definition", op_type)
        print_imported(_named(rows, word), form)
        return
    describe = solution_rows if solutions else workload_rows if workloads else award_records if awards else None
    rows = _named(listed_rows(Catalog.default(), describe, op_type, status), word)
    if not form.is_table:
        write_records(form, rows)
    elif rows:
        cells = [tuple(_spelled(value) for value in row.values()) for row in rows]
        least = LEAST_OF_AWARDS if awards else LEAST
        print_table(list(rows[0]), cells, wide=form.wide, least=least, key=("definition", "axes"))
        note(f"{len(rows)} listed. Look closer: tilegym-db show NAME")
    else:
        note("nothing matches." if word is None else "nothing matches. Every operator: tilegym-db list")


NAMES = ("definition", "solution", "award")
LEAST_OF_AWARDS = ("trace", "digest", "ratio", "over")
LEAST = ("trace", "tags", "description", "layouts", "version", "digest", "targets", "status", "role")


def listed_rows(
    catalog: Catalog,
    describe: Callable[[Catalog, Sequence[Definition]], list[dict[str, Any]]] | None,
    op_type: str | None,
    status: str | None,
) -> list[dict[str, Any]]:
    """Return the rows of a family and status, from ``describe``; by default rows of Definitions, which are cached."""
    from tilegym_db.paths import home
    from tilegym_db.store.statements import keep_rows, kept_rows, state_of

    keeps = describe is None and home().is_dir()
    state = state_of(catalog) if keeps else ""
    kept = kept_rows(home(), state) if keeps else None
    if kept is not None:
        return of_kind(kept, [(row["op_type"], row["status"]) for row in kept], op_type, status)
    from tilegym_db.catalog.record_files import keeping_parsed_sources

    with keeping_parsed_sources(home()):
        rows = (describe or definition_rows)(catalog, select_definitions(catalog, op_type, status))
    if keeps and op_type is None and status is None and not catalog.left_out:
        keep_rows(home(), state, rows)
    return rows


def _named(rows: list[dict[str, Any]], word: str | None) -> list[dict[str, Any]]:
    """Return the rows with a word in one of their names, in any case."""
    if word is None:
        return rows
    return [row for row in rows if any(word.lower() in str(row.get(name, "")).lower() for name in NAMES)]


def _spelled(value: Any) -> Any:
    """Return a cell of the table: join lists, and cut a description to its first sentence."""
    if isinstance(value, list):
        return ", ".join(value)
    return value.partition(". ")[0] if isinstance(value, str) else value


def definition_rows(catalog: Catalog, definitions: Sequence[Definition]) -> list[dict[str, Any]]:
    """Return one row per Definition."""
    rows = []
    for item in definitions:
        kernels = [solution.record.spec for solution in catalog.solutions_for(item.name)]
        rows.append(
            {
                "definition": item.name,
                "op_type": item.op_type,
                "version": item.version,
                "status": status_of(item),
                "languages": sorted({spec.language for spec in kernels}),
                "solutions": len(kernels),
                "workloads": catalog.count_workloads(item.name),
                "description": item.description,
            }
        )
    return rows


def solution_rows(catalog: Catalog, definitions: Sequence[Definition]) -> list[dict[str, Any]]:
    """Return one row per Solution of the Definitions."""
    return [
        {
            "solution": solution.name,
            "definition": item.name,
            "language": solution.record.spec.language,
            "role": solution.record.spec.role,
            "targets": [] if solution.record.spec.language == "python" else [*solution.record.spec.target_hardware],
            "digest": solution.digest[:12],
            "description": solution.record.description,
        }
        for item in definitions
        for solution in catalog.solutions_for(item.name)
    ]


def workload_rows(catalog: Catalog, definitions: Sequence[Definition]) -> list[dict[str, Any]]:
    """Return one row per Workload of the Definitions."""
    from tilegym_db.records import axes_key

    return [
        {
            "workload": workload.uuid,
            "definition": item.name,
            "axes": axes_key(workload.axes),
            "dtypes": [*workload.dtypes.values()],
            "layouts": sorted(workload.layout_classes(item)),
            "tags": [*workload.tags],
        }
        for item in definitions
        for workload in catalog.workloads_for(item.name)
    ]


def award_records(catalog: Catalog, definitions: Sequence[Definition]) -> list[dict[str, Any]]:
    """Return one row per award of the Definitions, with its status."""
    from tilegym_db.store.opening import open_store
    from tilegym_db.store.queries.loop import award_rows

    names = {item.name for item in definitions}
    with open_store(read_only=True, catalog=catalog) as store:
        found = [row for row in award_rows(store) if row["definition"] in names]
    return [
        {
            "award": row["id"],
            "status": row["status"],
            "solution": row["solution"],
            "digest": row["solution_digest"][:12],
            "over": row["baseline"],
            "ratio": row["ratio"],
            "ci_low": row["ci_low"],
            "trace": row["trace_id"],
        }
        for row in found
    ]


# ---- Imported data sets ---------------------------------------------------------------------------------


def imported_rows(origin: str, kind: Kind, op_type: str | None) -> list[dict[str, Any]]:
    """Return one row per record of a kind, from one data set or from ``all``."""
    from tilegym_db.paths import home
    from tilegym_db.store.imported import data_set, data_sets

    chosen = data_sets(home()) if origin == "all" else [data_set(home(), origin)]
    return [row for found in chosen for row in _rows(found, kind, op_type)]


def _rows(found: DataSet, kind: Kind, op_type: str | None) -> list[dict[str, Any]]:
    families = {item.name: item.record.get("op_type") for item in found.of_kind("definition")}
    counts: dict[tuple[str, str], int] = {}
    for item in found.records:
        counts[item.kind, item.definition] = counts.get((item.kind, item.definition), 0) + 1
    return [
        {"origin": found.origin, **_columns(item, counts, families)}
        for item in found.of_kind(kind)
        if op_type is None or families.get(item.definition) == op_type
    ]


def _columns(item: StoredRecord, counts: dict[tuple[str, str], int], families: dict[str, Any]) -> dict[str, Any]:
    if item.kind == "definition":
        what: dict[str, Any] = {"definition": item.name, "op_type": families[item.name]} | {
            f"{kind}s": counts.get((kind, item.name), 0) for kind in ("solution", "workload", "trace")
        }
    elif item.kind == "solution":
        spec = item.record["spec"]
        what = {"solution": item.name, "definition": item.definition, "language": spec.get("language")}
        what["author"] = item.record["author"]
    else:
        axes = ",".join(f"{name}={size}" for name, size in item.record["axes"].items())
        what = {"workload": item.name, "definition": item.definition, "axes": axes}
    return what | {"findings": [*item.findings]}


def print_imported(rows: Sequence[dict[str, Any]], form: Form) -> None:
    """Print a table with numbers of findings, or records with their texts."""
    if not form.is_table:
        write_records(form, rows, ("origin",))
    elif rows:
        cells = [tuple(len(v) or None if isinstance(v, list) else v for v in row.values()) for row in rows]
        print_table(list(rows[0]), cells, wide=form.wide)
        note(f"{len(rows)} listed; they are foreign: shown, never ranked, published or resolved. Findings: --json")
    else:
        note("nothing matches.")
