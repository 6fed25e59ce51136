"""``tilegym-db explain``: show which solution the resolver picks for a call, and why it rejects the others."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilegym_db.cli.kit.formats import (
    AsArrow,
    AsCsv,
    AsJson,
    AsParquet,
    Form,
    OutputFile,
    Wide,
    chosen_form,
    write_json,
    write_records,
)
from tilegym_db.cli.kit.options import (
    Axes,
    Trust,
    complete_definition,
    complete_gpu,
    parse_axes,
    parse_pairs,
    parse_scalars,
)
from tilegym_db.cli.kit.output import note, print_table, spelled_map

if TYPE_CHECKING:
    from tilegym_db.resolver import Decision, Request


NO_VERIFIED_SOLUTION = 3


def command(
    name: Annotated[
        str,
        typer.Argument(help="The definition that is called.", metavar="NAME", autocompletion=complete_definition),
    ],
    axes: Axes = None,
    dtype: Annotated[list[str] | None, typer.Option(help="Dtypes: T=bfloat16.", metavar="T=DTYPE,...")] = None,
    gpu: Annotated[
        str, typer.Option(help="A GPU such as h200 or cpu; auto is this machine's.", autocompletion=complete_gpu)
    ] = "auto",
    scalar: Annotated[list[str] | None, typer.Option(help="Scalars: eps=1e-5.", metavar="S=VALUE,...")] = None,
    layout: Annotated[
        list[str] | None, typer.Option(help="Layouts: x=row_contiguous (absent: contiguous).", metavar="X=CLASS,...")
    ] = None,
    mode: Annotated[str, typer.Option(help="inference or training.")] = "inference",
    as_json: AsJson = False,
    as_csv: AsCsv = False,
    as_parquet: AsParquet = False,
    as_arrow: AsArrow = False,
    output: OutputFile = None,
    wide: Wide = False,
    trust: Trust = False,
) -> None:
    """Show which solution the resolver picks for a call, and why it rejects the others. Exit 3: stock code runs."""
    from tilegym_db.catalog import Catalog, stock_of
    from tilegym_db.records.call import Call
    from tilegym_db.resolver import decide_request, make_request, unavailable_languages

    form = chosen_form(as_json, as_csv, as_parquet, as_arrow, output, wide)
    catalog = Catalog.default(trust_foreign=trust)
    slug, target = _device(gpu)
    request = make_request(
        catalog.definition(name),
        Call(
            name,
            axes=parse_axes("--axes", axes),
            dtypes=parse_pairs("--dtype", dtype),
            layouts=parse_pairs("--layout", layout),
            scalars=parse_scalars("--scalar", scalar),
        ),
        gpu=slug,
        sm=target,
        mode=mode,
        unavailable=unavailable_languages(catalog.solutions_for(name)) if target else None,
    )
    decision, solutions = decide_request(request, catalog)
    stock = stock_of(solutions.values())
    answer = describe(request, decision, stock.name if stock else None)
    answer["shared_tables"] = shared_tables(slug, trust=trust)
    _write(form, answer)
    if form.is_table and decision.solution is None:
        _note_next(name, slug)
    if decision.solution is None:
        raise typer.Exit(NO_VERIFIED_SOLUTION)


def _device(gpu: str) -> tuple[str, str | None]:
    """Return (slug or family, compile target). Only ``auto`` asks the driver."""
    from tilegym_db.records.hardware import parse_gpu
    from tilegym_db.resolver.device import default_gpu

    return default_gpu() if gpu.strip().lower() == "auto" else (parse_gpu(gpu), None)


def describe(request: Request, decision: Decision, stock: str | None) -> dict[str, Any]:
    """Return the decision as plain values, for ``--json`` and for the table."""
    from tilegym_db.resolver import not_in_compiled_code

    evidence, chosen = decision.evidence, decision.evidence.candidate
    return {
        "definition": request.definition.name,
        "axes": dict(request.call.axes),
        "dtypes": dict(request.call.dtypes),
        "scalars": dict(request.call.scalars),
        "layouts": dict(request.call.layouts),
        "gpu": request.gpu,
        "mode": request.mode,
        "solution": decision.solution.name if decision.solution else None,
        "stock": stock,
        "config": decision.config,
        "left_to_compilers": not_in_compiled_code(decision) if decision.solution else None,
        "evidence": {
            "source": evidence.source,
            "reason": evidence.reason,
            "gpu": evidence.gpu,
            "published": evidence.published,
            "axes": dict(evidence.axes) if evidence.axes is not None else None,
            "measurement": vars(chosen) if chosen is not None else None,
        },
        "rejected": [{**vars(candidate), "reason": reason} for candidate, reason in decision.rejected],
    }


def shared_tables(gpu: str, *, trust: bool = False) -> list[dict[str, Any]]:
    """Return the shared tables for a GPU slug or family: origin, trust, and use."""
    from tilegym_db.paths import home
    from tilegym_db.published.shared_tables import serving, tables_in
    from tilegym_db.records.hardware import same_gpu

    found = [table for table in tables_in(home()) if same_gpu(gpu, table.gpu)]
    used = {table.snapshot.folder for table in serving(found, trust=trust)}
    return [
        {
            "gpu": table.gpu,
            "address": table.address,
            "published": table.snapshot.published,
            "standing": table.standing,
            "used": table.snapshot.folder in used,
            "why": "" if table.snapshot.folder in used else table.why_unused,
        }
        for table in found
    ]


def _write(form: Form, answer: dict[str, Any]) -> None:
    if form.kind == "json":
        write_json(form, answer)
    elif form.is_table:
        _print(answer, form.wide)
    else:
        write_records(form, candidate_records(answer))


COLUMNS = ("", "solution", "language", "config", "latency us", "speedup", "CI low", "why")
LEAST = ("CI low", "language", "config")


def _print(answer: dict[str, Any], wide: bool) -> None:
    evidence = answer["evidence"]
    asked = {**answer["axes"], **answer["dtypes"], **answer["scalars"], **answer["layouts"]}
    note(f"{answer['definition']} at {spelled_map(asked)} on {answer['gpu']}:")
    rows = [
        _row("picked", evidence["measurement"] or {"solution": _stock_label(answer)}, evidence["reason"]),
        *(_row("", item, item["reason"]) for item in answer["rejected"]),
    ]
    print_table(COLUMNS, rows, wide=wide, least=LEAST, prose=("why",))
    if answer["left_to_compilers"]:
        note(f"Under torch.compile, stock code runs: {answer['left_to_compilers']}.")
    if evidence["published"]:
        note(f"Measured on {evidence['gpu']}, published {evidence['published']}. Speedup is against stock code.")
    for table in answer["shared_tables"]:
        if not table["used"]:
            note(f"not used: {table['why']}")


def candidate_records(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one flat record per candidate, the picked one first, for tabular formats."""
    picked = answer["evidence"]["measurement"] or {"solution": _stock_label(answer)}
    keys = ("solution", "language", "config", "latency_us", "speedup", "speedup_ci_low")
    return [
        {"picked": index == 0, **{key: item.get(key) for key in keys}, "reason": why}
        for index, (item, why) in enumerate(
            [(picked, answer["evidence"]["reason"]), *((item, item["reason"]) for item in answer["rejected"])]
        )
    ]


def _note_next(definition: str, gpu: str) -> None:
    """Print how many passes await verification, and the next step on this machine."""
    from tilegym_db.cli.kit.reader import open_reader, unverified_note
    from tilegym_db.errors import StoreError
    from tilegym_db.resolver.device import default_gpu
    from tilegym_db.store.queries import best_rows, count_unverified

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


def _stock_label(answer: dict[str, Any]) -> str:
    return f"stock ({answer['stock']})" if answer["stock"] else "none: there is no stock solution"


def _row(mark: str, item: dict[str, Any], why: str) -> list[Any]:
    keys = ("solution", "language", "config", "latency_us", "speedup", "speedup_ci_low")
    return [mark, *(item.get(key) for key in keys), why]


# ---- Next step ------------------------------------------------------------------------------------------


def next_step(
    definition: str, asked: str, here: str, measured: Sequence[str] = (), waiting: int = 0, *, can_bench: bool = True
) -> str:
    """Return the next command that is possible on this machine, for ``definition`` on the GPU ``asked``.

    Args:
        asked: a slug or a family.
        here: the slug of this machine; ``cpu`` without a GPU.
        measured: GPUs with verified traces of the definition.
        waiting: screen passes on ``asked`` that await verification.
        can_bench: True if PyTorch is installed, which every measurement needs.
    """
    from tilegym_db.records.hardware import CPU, same_gpu

    if asked == here or same_gpu(asked, here):
        if not can_bench:
            return "Measurements need PyTorch, which is not installed here. Next: pip install 'tilegym-db[torch]'"
        if waiting:
            return f"Next, on this {here}: tilegym-db verify {definition}, then tilegym-db publish --gpu {here}."
        return (
            f"Next, on this {here}: tilegym-db bench {definition} --gpu {here} --verify, "
            f"then tilegym-db publish --gpu {here}."
        )
    others = [gpu for gpu in measured if not same_gpu(asked, gpu)]
    what = "has no GPU" if here == CPU else f"has a {here}"
    absent = f"This machine {what}, so nothing can be measured for {asked} here. "
    if any(same_gpu(asked, gpu) for gpu in measured):
        return f"{absent}Kernels measured on {asked}: tilegym-db best {definition} --gpu {asked}"
    if others:
        return f"{absent}Kernels measured elsewhere: tilegym-db best {definition} --gpu {others[0]}"
    return f"{absent}Its kernels can still be compiled here: tilegym-db compile {definition}"
