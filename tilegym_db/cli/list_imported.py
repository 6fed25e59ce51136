"""``tilegym-db list --origin``: what imported data sets hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tilegym_db.cli.formats import Form, write_records
from tilegym_db.cli.output import note, print_table

if TYPE_CHECKING:
    from tilegym_db.store.imported import DataSet, Kind, StoredRecord

__all__ = ["imported_rows", "print_imported"]


def imported_rows(origin: str, kind: Kind, op_type: str | None) -> list[dict[str, Any]]:
    """One row per record of a kind, of one data set or of ``all``.

    Raises:
        NotFoundError: no such data set.
    """
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
    """A table, in which findings are counted, or records, in which they are spelled."""
    if not form.is_table:
        write_records(form, rows, ("origin",))
    elif rows:
        cells = [tuple(len(v) or None if isinstance(v, list) else v for v in row.values()) for row in rows]
        print_table(list(rows[0]), cells, wide=form.wide)
        note(f"{len(rows)} listed; they are foreign: shown, never ranked, published or resolved. Findings: --json")
    else:
        note("nothing matches.")
