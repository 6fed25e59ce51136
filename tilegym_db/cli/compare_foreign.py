"""``tilegym-db compare-foreign``: the verdicts and times of an imported data set beside ours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilegym_db.cli.formats import Wide
from tilegym_db.cli.output import note, print_json, print_table

if TYPE_CHECKING:
    from tilegym_db.integrations.interchange.comparing import ComparedPair, PairKey
    from tilegym_db.integrations.interchange.judgements import Judgement
    from tilegym_db.records import Trace
    from tilegym_db.store.imported import DataSet


def command(
    origin: Annotated[str, typer.Argument(help="An imported data set (list --origin all).")],
    names: Annotated[list[str] | None, typer.Argument(help="Definitions or solutions; none means all.")] = None,
    run: Annotated[bool, typer.Option("--run", help="Run its solutions here, confined, and judge them.")] = False,
    gpu: Annotated[str, typer.Option(help="auto, cpu, or the GPU in this machine.")] = "auto",
    limit: Annotated[
        int | None, typer.Option(min=1, help="With --run: at most so many workloads per definition.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
    wide: Wide = False,
) -> None:
    """Compare foreign verdicts with ours. With --run, imported Python, Triton and TileLang code runs in the sandbox.

    The reference of the data set runs there too, never in this process. What was found is kept with the data set and is no
    trace: it ranks nothing and is resolved nowhere. What was added to the catalog from a draft (export draft) stands beside
    it with its trace. Exit status 1 where a verdict disagrees.
    """
    from tilegym_db.paths import home
    from tilegym_db.store.imported import data_set

    found = data_set(home(), origin)  # before what judges is loaded, which takes seconds
    known = _checked_names(found, names or [])
    from tilegym_db.integrations.interchange.comparing import compared, summary
    from tilegym_db.integrations.interchange.judgements import kept_judgements

    if run:
        _run(found, known, gpu, limit)
    pairs = [
        pair
        for pair in compared(found, kept_judgements(found), _promoted(found))
        if not known or {pair.definition, pair.solution} & set(known)
    ]
    counts = summary(pairs)
    if as_json:
        print_json({"origin": found.origin, "summary": counts, "pairs": [_row(pair) for pair in pairs]})
    elif pairs:
        has_promoted = any(pair.promoted_status for pair in pairs)
        shown = [at for at, name in enumerate(COLUMNS) if has_promoted or name not in PROMOTED]
        rows = [_cells(pair) for pair in pairs]
        print_table([COLUMNS[at] for at in shown], [[row[at] for at in shown] for row in rows], wide=wide)
        note(", ".join(f"{what}: {count}" for what, count in counts.items()))
    else:
        note(_why_empty(found, known))
    if any(pair.agreement in ("we fail it", "they fail it") for pair in pairs):
        raise typer.Exit(1)


COLUMNS = (
    "definition",
    "solution",
    "workload",
    "theirs",
    "their us",
    "ours",
    "our us",
    "promoted",
    "promoted us",
    "by their rule",
    "agreement",
    "why",
)

PROMOTED = ("promoted", "promoted us")
"""Columns that are shown where something of the data set was added to the catalog and measured."""


def _checked_names(found: DataSet, names: list[str]) -> list[str]:
    from tilegym_db.errors import NotFoundError, did_you_mean

    known = {item.name for item in found.records if item.kind in ("definition", "solution")}
    for name in names:
        if name not in known:
            raise NotFoundError(
                f"{found.origin} has no definition or solution '{name}'.{did_you_mean(name, known)} "
                f"Try: tilegym-db list --origin {found.origin}",
                code="name_unknown",
            )
    return names


def _why_empty(found: DataSet, names: list[str]) -> str:
    """Why neither side has a verdict, and what gives one."""
    from tilegym_db.integrations.interchange.judging import workloads_of

    chosen = [item for item in found.of_kind("solution") if not names or {item.name, item.definition} & set(names)]
    of = f" of {', '.join(names)}" if names else ""
    if not chosen:
        return f"{found.origin} has no solutions{of}, so there is nothing to run."
    if workloads_of(found).keys().isdisjoint(item.definition for item in chosen):
        return (
            f"{found.origin} has no workloads{of}, so nothing can be run. Put them into the data set, then: "
            f"tilegym-db import PATH --name {found.name} --replace"
        )
    return f"neither side has a verdict. Try: tilegym-db compare-foreign {' '.join([found.origin, *names])} --run"


def _run(found: DataSet, names: list[str], gpu: str, limit: int | None) -> None:
    from tilegym_db.bench.machine import select_machine
    from tilegym_db.integrations.interchange.judgements import keep_judgements
    from tilegym_db.integrations.interchange.judging import judge_data_set
    from tilegym_db.verify.worker.process import prepare_workers

    machine = select_machine(gpu)
    prepare_workers(machine.device)

    def tell_and_keep(judgement: Judgement) -> None:
        note(f"{judgement.solution} on {judgement.workload}: {judgement.status} {judgement.reason}"[:200])
        keep_judgements(found, [judgement])  # at once: what comes later may fail or be interrupted

    judge_data_set(found, machine, names=names, limit=limit, observer=tell_and_keep)


def _promoted(found: DataSet) -> dict[PairKey, Trace]:
    from tilegym_db.catalog import Catalog
    from tilegym_db.cli.reader import open_reader
    from tilegym_db.integrations.interchange.comparing import promoted_pairs
    from tilegym_db.integrations.interchange.drafts import origin_tag
    from tilegym_db.store.exchange import told_traces

    catalog = Catalog.default()
    added = {record.op_type for record in catalog.definitions.values() if origin_tag(found) in record.tags}
    if not added:
        return {}
    with open_reader() as store:
        traces = [trace for op_type in sorted(added) for trace in told_traces(store, None, op_type)]
    return promoted_pairs(found, catalog, traces)


def _row(pair: ComparedPair) -> dict[str, Any]:
    from dataclasses import asdict

    return {**asdict(pair), "agreement": pair.agreement, "foreign": True}


def _cells(pair: ComparedPair) -> tuple[Any, ...]:
    ours = pair.ours
    rule = None if ours is None or ours.rule_passed is None else "passed" if ours.rule_passed else "failed"
    return (
        pair.definition,
        pair.solution,
        pair.workload,
        pair.foreign_status,
        pair.foreign_latency_us,
        None if ours is None else ours.status,
        None if ours is None else ours.latency_us,
        pair.promoted_status,
        pair.promoted_latency_us,
        rule,
        pair.agreement,
        None if ours is None else ours.reason[:160],
    )
