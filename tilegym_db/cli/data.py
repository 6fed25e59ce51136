"""``tilegym-db data``: exchange data sets with other projects, and add traces to the database."""

from __future__ import annotations

import importlib.util
import math
import os
import shlex
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilegym_db.cli.commands import command_group
from tilegym_db.cli.kit.formats import AsJson, Wide, open_reader
from tilegym_db.cli.kit.options import MachineGpu, path_given, regular_files, select_definitions
from tilegym_db.cli.kit.output import note, print_json, print_line, print_table
from tilegym_db.errors import NotFoundError, UsageError, did_you_mean

if TYPE_CHECKING:
    from tilegym_db.interchange.flashinfer_export import Export
    from tilegym_db.interchange.importing import ImportReport
    from tilegym_db.judging.judging import ComparedPair, Judgement, PairKey
    from tilegym_db.records import Trace
    from tilegym_db.store.imported import DataSet


app = command_group("Exchange data sets with other projects, and add traces to the database.")

SHOWN = 20
SHOWN_FINDINGS = 5


@app.command("import")
def import_command(
    path: Annotated[
        Path,
        typer.Argument(
            help="Root of the data set, or one fi_trace file; with --remove, an origin.",
            metavar="PATH",
            parser=path_given,
        ),
    ],
    name: Annotated[str | None, typer.Option(help="Name of the data set; by default its folder's name.")] = None,
    dialect: Annotated[
        str | None,
        typer.Option(
            help="flashinfer-trace, fi-trace, sol-execbench, tilegym, kernelbench or gpu-mode; detected by default."
        ),
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace the earlier content of that origin.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Import nothing if anything is refused.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Read and report; change nothing.")] = False,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the imported data set of that origin.")] = False,
    as_json: AsJson = False,
) -> None:
    """Import a data set: FlashInfer-Trace, fi_trace dumps, SOL-ExecBench, TileGym, KernelBench or GPU MODE.

    Imported records live under their origin, apart from the catalog. They are shown but never ranked, published or resolved.
    Problems of KernelBench and GPU MODE run in the sandbox, because only their code says their shapes. Nothing else is run.
    Exit status 1 if something was refused.
    """
    from tilegym_db.judging.problems import import_data_set

    if remove:
        _remove(str(path))
        return
    report = import_data_set(path, name=name, dialect=dialect, replace=replace, strict=strict, dry_run=dry_run)
    if as_json:
        print_json(_as_json(report, dry_run))
    else:
        _print_import(report, dry_run)
    if report.data_set.refused:
        raise typer.Exit(1)


def _remove(origin: str) -> None:
    from tilegym_db.paths import home
    from tilegym_db.store.imported import forget_data_set, import_lock

    with import_lock(home()):
        removed, count = forget_data_set(home(), origin)
    note(f"removed {removed}, and {count} files that no other data set uses.")


def _as_json(report: ImportReport, dry_run: bool) -> dict[str, object]:
    from tilegym_db.store.imported import counted

    found = report.data_set
    return {
        "origin": found.origin,
        "dialect": found.dialect,
        "imported": counted(found.records),
        "files": len(found.files),
        "changed": report.changed,
        "dry_run": dry_run,
        "refused": [{"file": item.path, "key": item.key, "reason": item.reason} for item in found.refused],
        "findings": [
            {"kind": item.kind, "name": item.name, "file": item.path, "line": item.line, "finding": finding}
            for item in found.records
            for finding in item.findings
        ],
    }


def _print_import(report: ImportReport, dry_run: bool) -> None:
    from tilegym_db.store.imported import counted

    found = report.data_set
    with_findings = [item for item in found.records if item.findings]
    counts, lacking = counted(found.records), counted(with_findings)
    print_line(f"{found.origin}: dialect {found.dialect}, {len(found.files)} files")
    print_table(("kind", "imported", "with findings"), [(kind, counts[kind], lacking.get(kind)) for kind in counts])
    if found.refused:
        print_line(f"refused, for {len(found.refused)} reasons:")
        for refusal in found.refused[:SHOWN]:
            print_line(f"  {refusal}")
        if len(found.refused) > SHOWN:
            note(f"  and {len(found.refused) - SHOWN} more: --json lists them all")
        note("the rest is good. To bring in what was refused: mend it, then run the command again with --replace")
    for item in with_findings[:SHOWN_FINDINGS]:
        where = item.path if item.line is None else f"{item.path}:{item.line}"
        note(f"finding: {where}: {'; '.join(item.findings)}")
    if len(with_findings) > SHOWN_FINDINGS:
        note(f"and findings of {len(with_findings) - SHOWN_FINDINGS} more records: --json lists them all")
    if dry_run:
        note("nothing was changed (--dry-run).")
    elif report.changed:
        note(f"Next: tilegym-db list --origin {found.origin}")
    else:
        note("the same content was imported before; nothing changed.")


# ---- Export -------------------------------------------------------------------------------------------
# Exports the catalog with its verified traces, an imported data set unchanged, or an imported definition as a draft.

FORMATS = ("flashinfer", "original", "draft")
MAX_MIB = 1 << 20
"""Maximum blob size in MiB, which is one tebibyte."""

Form = Annotated[
    str,
    typer.Argument(
        metavar="FORMAT",
        help="flashinfer, original (an imported data set, unchanged) or draft (an imported definition).",
    ),
]
Folder = Annotated[
    Path, typer.Argument(metavar="DIR", help="A folder that does not exist yet, or is empty.", parser=path_given)
]
Blobs = Annotated[
    str | None,
    typer.Option(
        metavar="none|MIB",
        help="Maximum MiB of all inputs written as files because FlashInfer-Bench must not draw them; 64 by default.",
    ),
]
LargestBlob = Annotated[
    str | None, typer.Option(metavar="MIB", help="Maximum MiB of these inputs per workload; 8 by default.")
]


@app.command("export")
def export_command(
    form: Form,
    folder: Folder,
    gpu: Annotated[str | None, typer.Option(help="Only traces of this GPU: h200, h100-sxm, ...")] = None,
    op_type: Annotated[str | None, typer.Option(help="Only this family: norm, activation, gemm, ...")] = None,
    origin: Annotated[
        str | None, typer.Option(help="An imported data set, by its origin, instead of the catalog.")
    ] = None,
    definition: Annotated[str | None, typer.Option(help="With draft: which definition of the data set.")] = None,
    blobs: Blobs = None,
    largest_blob: LargestBlob = None,
    as_json: AsJson = False,
) -> None:
    """Write a FlashInfer-Trace data set: definitions, solutions, workloads, blobs, and verified traces.

    What FlashInfer-Trace cannot express is left out; DIR/tilegym_db/export.json lists it with the reasons. Unedited imported
    records are written byte for byte. A draft is the input of add-definition and add-solution; nothing of it is run here.

    Offsets, ids and related inputs are drawn here with a seed per workload, and written as safetensors.
    """
    from tilegym_db.interchange.importing import refuse_taken

    if form not in FORMATS:
        raise UsageError(f"unknown format '{form}'; known: {', '.join(FORMATS)}.", code="format_unknown")
    if (form != "flashinfer" or origin is not None) and (blobs is not None or largest_blob is not None):
        raise UsageError(
            "--blobs and --largest-blob apply to the catalog's own workloads: use them only with 'flashinfer'.",
            code="option_unfit",
        )
    refuse_taken(folder)
    is_here = _is_here(folder)
    if form == "draft":
        _export_draft(folder, origin, definition)
    elif origin is not None:
        _export_imported(form, folder, origin, op_type)
    elif form == "original":
        raise UsageError(
            "'original' writes an imported data set: give it with --origin. Try: tilegym-db list --origin all",
            code="option_missing",
        )
    else:
        _print_export(_export_catalog(folder, gpu, op_type, _blob_limits(blobs, largest_blob)), folder, as_json)
    if is_here:  # the folder was replaced by renaming, so the shell is in the deleted one
        note('the current folder was replaced; enter it again: cd "$PWD"')


def _is_here(folder: Path) -> bool:
    try:
        return os.path.samefile(folder, os.curdir)
    except OSError:  # it does not exist yet
        return False


def _print_export(export: Export, folder: Path, as_json: bool) -> None:
    reasons = Counter(reason for _, reason in export.left_out)
    if as_json:
        print_json({"folder": str(folder), "exported": export.counts, "left_out": dict(reasons.most_common())})
        return
    print_table(("kind", "exported"), list(export.counts.items()))
    for reason, count in reasons.most_common():
        note(f"left out, {count}: {reason}")
    note(f"wrote {folder}; its contents are listed in {folder}/tilegym_db/export.json")


def _blob_limits(total: str | None, largest: str | None) -> tuple[int, int] | str:
    """Return the maximum bytes of all blobs and of one blob, or the reason that there are no blobs."""
    from tilegym_db.interchange.flashinfer_export import MAX_BLOB_MIB, MAX_TOTAL_MIB, MIB

    if total == "none":
        if largest is not None:
            raise UsageError(
                "--largest-blob limits blobs, but --blobs none leaves them out: give one of the two.",
                code="options_clash",
            )
        return ""
    limits = (
        int(_mib("--blobs", total, MAX_TOTAL_MIB, " or 'none'") * MIB),
        int(_mib("--largest-blob", largest, MAX_BLOB_MIB) * MIB),
    )
    missing = [name for name in ("torch", "safetensors") if importlib.util.find_spec(name) is None]
    if not missing:
        return limits
    reason = f"drawing blobs needs {' and '.join(missing)}: pip install {' '.join(missing)}"
    if total is not None or largest is not None:
        raise UsageError(f"{reason}; or leave their workloads out with --blobs none.", code="blob_refused")
    return reason


def _mib(option: str, text: str | None, default: float, other: str = "") -> float:
    try:
        value = default if text is None else float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= MAX_MIB:
        raise UsageError(
            f"{option} takes a number of MiB above 0 and at most {MAX_MIB}{other}, not '{text}'.", code="size_invalid"
        )
    return value


def _export_catalog(folder: Path, gpu: str | None, op_type: str | None, limits: tuple[int, int] | str) -> Export:
    from tilegym_db.catalog import Catalog
    from tilegym_db.interchange.flashinfer_export import BlobFolder, build_export
    from tilegym_db.interchange.importing import folder_beside, write_tree
    from tilegym_db.records.hardware import parse_gpu
    from tilegym_db.store.queries.measured import traced_gpus
    from tilegym_db.store.sharing import shareable_traces, unverified_counts

    catalog = Catalog.default()
    select_definitions(catalog, op_type, None)
    with open_reader() as store:
        chosen = None if gpu is None else parse_gpu(gpu, traced_gpus(store))
        traces = shareable_traces(store, chosen, op_type)
        unverified = unverified_counts(store, chosen, op_type)
    with folder_beside(folder) as scratch:
        export = build_export(
            catalog, traces, op_type, None if isinstance(limits, str) else BlobFolder(scratch, *limits)
        )
        write_tree(folder, export.files, export.blobs | export.drawn)
    for tier, count in unverified.items():
        note(f"left out, {count} passes of the tier {tier}: superseded, taken back, or never verified")
    if limits and isinstance(limits, str):
        note(f"no blobs: {limits}")
    return export


def _export_imported(form: str, folder: Path, origin: str, op_type: str | None) -> None:
    from tilegym_db.interchange.flashinfer_trace import DIALECT
    from tilegym_db.interchange.importing import imported_files, write_tree
    from tilegym_db.paths import home
    from tilegym_db.store.imported import data_set

    found = data_set(home(), origin)
    if form == "flashinfer" and found.dialect != DIALECT:
        raise UsageError(
            f"{found.origin} is not a FlashInfer-Trace data set. Try: tilegym-db data export original DIR --origin {origin}",
            code="data_set_dialect",
        )
    files = imported_files(found, op_type)
    if not files:
        raise UsageError(f"{found.origin} has nothing of op_type '{op_type}'.", code="data_set_empty")
    write_tree(folder, files)
    note(f"wrote {len(files)} files of {found.origin} to {folder}, byte for byte.")


def _export_draft(folder: Path, origin: str | None, name: str | None) -> None:
    from tilegym_db.interchange.adapt import STILL_TO_WRITE
    from tilegym_db.interchange.importing import write_tree
    from tilegym_db.paths import home
    from tilegym_db.store.imported import data_set

    if origin is None or name is None:
        raise UsageError(
            "'draft' writes one definition of an imported data set: give --origin and --definition.",
            code="option_missing",
        )
    found = data_set(home(), origin)  # before the slow import of PyTorch
    from tilegym_db.judging.sandboxed import compared_draft

    draft = compared_draft(found, name)
    write_tree(folder, draft.files, draft.copies)
    for what, reason in draft.left_out:
        note(f"left out, {what}: {reason}")
    if draft.judged:
        note(f"{name}: {draft.judged}")
    for text in draft.undrawn:
        note(
            f"add generators whose inputs satisfy {text}: 'input_generators' or 'joint_inputs' in {folder}/definition.json"
        )
    missing = " and ".join(f"{folder}/{file}" for file in STILL_TO_WRITE)
    note(
        f"wrote {folder}, with {len(draft.solutions)} solutions. Read {folder}/reference.py: once added, it runs unconfined."
    )
    note(f"Next: write {missing}, then: tilegym-db add-definition {shlex.quote(str(folder))}; tilegym-db check {name}")
    for solution in draft.solutions:
        note(f"then: tilegym-db add-solution {shlex.quote(f'{folder}/{solution}')}")


# ---- Compare with foreign verdicts --------------------------------------------------------------------


@app.command("compare")
def compare_command(
    origin: Annotated[str, typer.Argument(help="An imported data set (list --origin all).")],
    names: Annotated[list[str] | None, typer.Argument(help="Definitions or solutions; none means all.")] = None,
    run: Annotated[bool, typer.Option("--run", help="Verify its solutions here, in the sandbox.")] = False,
    gpu: MachineGpu = "auto",
    limit: Annotated[
        int | None, typer.Option(min=1, help="With --run: maximum number of workloads per definition.")
    ] = None,
    as_json: AsJson = False,
    wide: Wide = False,
) -> None:
    """Compare foreign verdicts with ours. With --run, imported Python, Triton and TileLang code runs in the sandbox.

    The reference of the data set runs there too, never in this process. The results are stored with the data set. They are not
    traces, so they rank and resolve nothing. A definition that was added from a draft ('data export draft') is shown with its
    trace. Exit status 1 if a verdict disagrees.
    """
    from tilegym_db.paths import home
    from tilegym_db.store.imported import data_set

    found = data_set(home(), origin)  # before the slow import of PyTorch
    known = _checked_names(found, names or [])
    from tilegym_db.judging.judging import compared, kept_judgements, summary

    if run:
        _run(found, known, gpu, limit)
    pairs = [
        pair
        for pair in compared(found, kept_judgements(found), _verified(found))
        if not known or {pair.definition, pair.solution} & set(known)
    ]
    counts = summary(pairs)
    if as_json:
        print_json({"origin": found.origin, "summary": counts, "pairs": [_row(pair) for pair in pairs]})
    elif pairs:
        has_verified = any(pair.verified_status for pair in pairs)
        shown = [at for at, name in enumerate(COLUMNS) if has_verified or name not in VERIFIED]
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
    "verified",
    "verified us",
    "by their rule",
    "agreement",
    "why",
)

VERIFIED = ("verified", "verified us")
"""Columns that are shown only if something of the data set was added to the catalog and measured."""


def _checked_names(found: DataSet, names: list[str]) -> list[str]:
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
    """Return why neither side has a verdict, and the next command."""
    from tilegym_db.judging.judging import workloads_of

    chosen = [item for item in found.of_kind("solution") if not names or {item.name, item.definition} & set(names)]
    of = f" of {', '.join(names)}" if names else ""
    if not chosen:
        return f"{found.origin} has no solutions{of}, so there is nothing to run."
    if workloads_of(found).keys().isdisjoint(item.definition for item in chosen):
        return (
            f"{found.origin} has no workloads{of}, so nothing can be run. Put them into the data set, then: "
            f"tilegym-db data import PATH --name {found.name} --replace"
        )
    return f"neither side has a verdict. Try: tilegym-db data compare {' '.join([found.origin, *names])} --run"


def _run(found: DataSet, names: list[str], gpu: str, limit: int | None) -> None:
    from tilegym_db.judging.judging import judge_data_set, keep_judgements
    from tilegym_db.measurement.machine import select_machine
    from tilegym_db.sandbox.worker import prepare_workers

    machine = select_machine(gpu)
    prepare_workers(machine.device)

    def tell_and_keep(judgement: Judgement) -> None:
        note(f"{judgement.solution} on {judgement.workload}: {judgement.status} {judgement.reason}"[:200])
        keep_judgements(found, [judgement])  # at once, because a later step may fail

    judge_data_set(found, machine, names=names, limit=limit, observer=tell_and_keep)


def _verified(found: DataSet) -> dict[PairKey, Trace]:
    from tilegym_db.catalog import Catalog
    from tilegym_db.interchange.adapt import origin_tag
    from tilegym_db.judging.judging import verified_pairs
    from tilegym_db.store.sharing import shareable_traces

    catalog = Catalog.default()
    added = {record.op_type for record in catalog.definitions.values() if origin_tag(found) in record.tags}
    if not added:
        return {}
    with open_reader() as store:
        traces = [trace for op_type in sorted(added) for trace in shareable_traces(store, None, op_type)]
    return verified_pairs(found, catalog, traces)


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
        pair.verified_status,
        pair.verified_latency_us,
        rule,
        pair.agreement,
        None if ours is None else ours.reason[:160],
    )


# ---- Ingest ---------------------------------------------------------------------------------------------


@app.command("ingest")
def ingest_command(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Trace files (.jsonl); none means every journal of the store.",
            exists=True,
            dir_okay=False,
            callback=regular_files,
        ),
    ] = None,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Rebuild the database from its journals.")] = False,
    trust: Annotated[
        bool,
        typer.Option("--trust", help="Trust traces that this installation did not measure (origin 'foreign')."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Add journals to the database. Known traces are skipped, so you can run it at any time.

    Exit status 1 if a line is not a valid trace; the others are still ingested. A line that a killed writer left unfinished in
    a journal of the store is only named: its trace was never acknowledged.
    """
    from tilegym_db.store import filling
    from tilegym_db.store.journal import CUT_OFF
    from tilegym_db.store.opening import open_store

    if rebuild and files:
        raise UsageError("--rebuild reads every journal of the store; give no files with it.", code="options_clash")
    if rebuild and trust:
        raise UsageError(
            "--rebuild keeps what was trusted before; run: tilegym-db data ingest --trust [FILES]", code="options_clash"
        )
    if rebuild:
        report = filling.rebuild()
    else:
        with open_store() as store:
            report = filling.ingest(store, files, trust=trust)
    # A cut-off line in a file that was given means that the file is incomplete.
    torn = [] if files else [line for line in report.rejected if line.reason.startswith(CUT_OFF)]
    rejected = [str(line) for line in report.rejected if line not in torn]
    if as_json:
        counts = {"files": report.files, "added": report.added, "known": report.known}
        print_json({**counts, "rejected": rejected, "cut_off": [str(line) for line in torn]})
    else:
        typer.echo(f"{report.added} traces added, {report.known} known already, from {report.files} files")
    for line in (*rejected, *(f"{line} Nothing to do: its writer was killed." for line in torn), *report.notes):
        note(line)
    if rejected:
        raise typer.Exit(1)


# ---- Overrule -------------------------------------------------------------------------------------------


@app.command("overrule")
def overrule_command(
    trace_id: Annotated[
        str, typer.Argument(help="The failed trace, by its id or the start of it.", metavar="TRACE_ID")
    ],
    because: Annotated[str, typer.Option("--because", help="The cause of the failure, if it was not the solution.")],
    as_json: AsJson = False,
) -> None:
    """Say that a failed trace does not count, so that the passes it took back count again.

    A wrong number outweighs every pass of that source and config on that GPU, before and after it. Overrule it only if you know
    that the machine was at fault. Your name, the time and the reason are journaled and published. Nothing is removed.
    """
    from tilegym_db.store.filling import overrule
    from tilegym_db.store.opening import open_store

    with open_store() as store:
        overruling = overrule(store, trace_id, because)
    if as_json:
        print_json(overruling.to_dict())
    else:
        typer.echo(f"trace {trace_id} of {overruling.solution} on {overruling.gpu} is overruled: {overruling.reason}")
        note(f"Next: tilegym-db best {overruling.definition} --gpu {overruling.gpu}")


# ---- Sync -----------------------------------------------------------------------------------------------


@app.command("sync")
def sync_command(
    uri: Annotated[str, typer.Argument(help="A folder, or an address such as s3://bucket/folder.", metavar="URI")],
    trust: Annotated[
        bool,
        typer.Option("--trust", help="Trust traces and tables that this installation did not write."),
    ] = False,
    tables: Annotated[
        bool, typer.Option("--tables", help="Fetch only the resolver tables, for a machine that only serves.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Add every trace of a shared data set to the database, and its resolver tables to the user's folder.

    Known traces are skipped. Traces of other installations are foreign: they are shown, but used only with --trust. The same
    holds for their tables. With --trust, patch(), resolve() and 'explain' use each table in addition to what is published here.
    The next 'data sync --trust' replaces a table by a newer one of the same writer. Credentials come from the environment, as for
    any S3 tool. Exit status 1 if a file of the data set is invalid; the others are still read.
    """
    from tilegym_db.paths import home
    from tilegym_db.store.publish import fetch_tables
    from tilegym_db.store.sharing import SharedDataSet, brought_in

    data_set = SharedDataSet(uri)
    report, rejected = brought_in(data_set, trust=trust) if not tables else (None, [])
    found = fetch_tables(home(), data_set.place, trust=trust)
    rejected += found.problems
    counts = {} if report is None else {"files": report.files, "added": report.added, "known": report.known}
    if as_json:
        facts = {"tables": found.tables, "new_tables": found.new, "waiting_tables": found.waiting}
        print_json({**counts, **facts, "rejected": rejected})
    elif report is not None:
        typer.echo(f"{report.added} traces added, {report.known} known already, from {report.files} files")
    if not as_json and (found.tables or report is None):
        typer.echo(f"{found.tables} resolver tables, {found.new} of them new here")
    for line in (*rejected, *(report.notes if report is not None else ()), *found.notes(uri)):
        note(line)
    if rejected:
        raise typer.Exit(1)
