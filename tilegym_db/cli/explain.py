"""``tilegym-db explain``: show which solution the resolver picks for a call, and why it rejects the others."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Annotated

import typer

from tilegym_db.cli.kit.formats import TABLE, Form, open_reader, unverified_note, with_form, write_json, write_records
from tilegym_db.cli.kit.options import (
    Axes,
    Dtypes,
    Require,
    Scalars,
    Trust,
    complete_definition,
    complete_gpu,
    parse_axes,
    parse_pairs,
    parse_scalars,
)
from tilegym_db.cli.kit.output import note, print_table, spelled_map
from tilegym_db.errors import StoreError, UsageError
from tilegym_db.paths import DISABLE_VARIABLE, is_disabled

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tilegym_db.records import Workload
    from tilegym_db.resolver.explain import Explanation


NO_VERIFIED_SOLUTION = 3
UNSTATED = ("axis_missing", "dtype_missing")
"""Codes of a call that lacks a part."""


@with_form
def command(
    name: Annotated[
        str,
        typer.Argument(help="The definition that is called.", metavar="NAME", autocompletion=complete_definition),
    ],
    axes: Axes = None,
    dtype: Dtypes = None,
    gpu: Annotated[
        str, typer.Option(help="A GPU such as h200 or cpu; auto is this machine's.", autocompletion=complete_gpu)
    ] = "auto",
    scalar: Scalars = None,
    layout: Annotated[
        list[str] | None, typer.Option(help="Layouts: x=row_contiguous (absent: contiguous).", metavar="X=CLASS,...")
    ] = None,
    mode: Annotated[str, typer.Option(help="inference or training.")] = "inference",
    launch: Annotated[str, typer.Option(help="call, or replay for a call in a CUDA graph.")] = "call",
    require: Require = "",
    form: Form = TABLE,
    trust: Trust = False,
) -> None:
    """Show which solution the resolver picks for a call, and why it rejects the others. Exit 3: stock code runs."""
    from tilegym_db.resolver.explain import explain

    sizes, dtypes = parse_axes(axes), parse_pairs("--dtype", dtype)
    try:
        explanation = explain(
            name,
            axes=sizes,
            dtypes=dtypes,
            layouts=parse_pairs("--layout", layout),
            scalars=parse_scalars(scalar),
            gpu=gpu,
            mode=mode,
            launch=launch,
            trust=trust,
            require=require,
        )
    except UsageError as error:
        if error.code not in UNSTATED:
            raise
        raise UsageError(f"{error}{_example(name, sizes, dtypes, gpu)}", code=error.code) from None
    _write(form, explanation)
    if explanation.solution is None:
        if form.is_table and is_disabled():
            note(f"To see kernels, unset {DISABLE_VARIABLE}.")
        elif form.is_table:
            _note_next(name, explanation.request.gpu)
        raise typer.Exit(NO_VERIFIED_SOLUTION)


def _example(name: str, axes: Mapping[str, int], dtypes: Mapping[str, str], gpu: str) -> str:
    """Return the whole command for a Workload that has most of the given sizes and dtypes; empty without a Workload."""
    from tilegym_db.catalog import Catalog
    from tilegym_db.records import axes_key
    from tilegym_db.records.text import binding_key, explain_command

    def shared(item: Workload) -> int:
        return len(axes.items() & item.axes.items()) + len(dtypes.items() & item.dtypes.items())

    known = Catalog.default().workloads_for(name)
    if not known:
        return ""
    near = max(known, key=shared)  # the first one of several
    where = "" if gpu == "auto" else gpu
    return f" Try: {explain_command(name, axes_key(near.axes), binding_key(near.dtypes), where)}"


def _write(form: Form, explanation: Explanation) -> None:
    if form.kind == "json":
        write_json(form, explanation.to_dict())
    elif form.is_table:
        _print(explanation, form.wide)
    else:
        write_records(form, explanation.candidates())


COLUMNS = ("", "solution", "language", "config", "latency us", "speedup", "CI low", "why")
LEAST = ("CI low", "language", "config")


def _print(explanation: Explanation, wide: bool) -> None:
    request, evidence = explanation.request, explanation.evidence
    call = request.call
    asked = {**call.axes, **call.dtypes, **call.scalars, **call.layouts}
    note(f"{request.definition.name} at {spelled_map(asked)} on {request.gpu}:")
    rows = [["picked" if row.pop("picked") else "", *row.values()] for row in explanation.candidates()]
    reasons = [str(row[-1]) for row in rows]
    for row, reason, above in zip(rows[1:], reasons[1:], reasons, strict=False):
        row[-1] = "as above" if reason and reason == above else reason
    print_table(COLUMNS, rows, wide=wide, least=LEAST, most=("solution", "latency us"), prose=("why",))
    if explanation.left_to_compilers:
        note(f"Under torch.compile, stock code runs: {explanation.left_to_compilers}.")
    if evidence.published:
        note(f"Measured on {evidence.gpu}, published {evidence.published}. Speedup is against stock code.")
    for table in explanation.shared_tables:
        if not table["used"]:
            note(f"not used: {table['why']}")


def _note_next(definition: str, gpu: str) -> None:
    """Print how many passes await verification, and the next step on this machine."""
    from tilegym_db.resolver.device import default_gpu
    from tilegym_db.resolver.explain import next_step
    from tilegym_db.store.queries.measured import best_rows, count_unverified

    has_torch = importlib.util.find_spec("torch") is not None
    measured: list[str] = []
    waiting = 0
    try:
        with open_reader() as store:
            unverified = unverified_note(store, definition=definition, gpu=gpu)
            waiting = count_unverified(store, definition=definition, gpu=gpu)
            measured = sorted({row["gpu"] for row in best_rows(store, definition=definition)})
    except StoreError as error:  # the decision does not depend on the store
        unverified = f"note: {error}"
    if unverified:
        note(unverified)
    note(next_step(definition, gpu, default_gpu()[0], measured, waiting, can_bench=has_torch))
