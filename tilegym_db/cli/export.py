"""``tilegym-db export``: the catalog and its verified traces for FlashInfer-Bench, or an imported data set as it was, or a
definition of one as a draft."""

from __future__ import annotations

import importlib.util
import math
import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilegym_db.cli.options import path_given
from tilegym_db.cli.output import note, print_json, print_table

if TYPE_CHECKING:
    from tilegym_db.integrations.interchange.flashinfer_export import Export

FORMATS = ("flashinfer", "original", "draft")
MOST_MIB = 1 << 20
"""A tebibyte of blobs: more than a data set has."""

Form = Annotated[
    str,
    typer.Argument(
        metavar="FORMAT",
        help="flashinfer, original (an imported data set as it was) or draft (an imported definition).",
    ),
]
Folder = Annotated[
    Path, typer.Argument(metavar="DIR", help="A folder that does not exist yet, or is empty.", parser=path_given)
]
Blobs = Annotated[
    str | None,
    typer.Option(
        metavar="none|MIB",
        help="MiB of all inputs that are written as files, since FlashInfer-Bench must not draw them; 64 by default.",
    ),
]
LargestBlob = Annotated[
    str | None, typer.Option(metavar="MIB", help="MiB of the inputs of one workload that are; 8 by default.")
]


def command(
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
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Write a FlashInfer-Trace data set: definitions, solutions, workloads, blobs, and verified traces.

    What FlashInfer-Trace has no word for is left out; DIR/tilegym_db/export.json says what, and why. Imported records that
    nobody edited come out byte for byte. A draft is what add-definition and add-solution take; nothing of it is run here.

    Offsets, ids and inputs that belong together are drawn here, with the seed of the workload, and written as safetensors.
    """
    from tilegym_db.errors import UsageError
    from tilegym_db.integrations.interchange.writing import refuse_taken

    if form not in FORMATS:
        raise UsageError(f"unknown format '{form}'; known: {', '.join(FORMATS)}.", code="format_unknown")
    if (form != "flashinfer" or origin is not None) and (blobs is not None or largest_blob is not None):
        raise UsageError(
            "--blobs and --largest-blob are about the catalog's own workloads: give them with 'flashinfer' alone.",
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
        _print(_export_catalog(folder, gpu, op_type, _blob_limits(blobs, largest_blob)), folder, as_json)
    if is_here:  # written beside it and renamed: a shell stands in the old one, which is gone
        note('the folder you are in was replaced; enter it again: cd "$PWD"')


def _is_here(folder: Path) -> bool:
    try:
        return os.path.samefile(folder, os.curdir)
    except OSError:  # it does not exist yet
        return False


def _print(export: Export, folder: Path, as_json: bool) -> None:
    reasons = Counter(reason for _, reason in export.left_out)
    if as_json:
        print_json({"folder": str(folder), "exported": export.counts, "left_out": dict(reasons.most_common())})
        return
    print_table(("kind", "exported"), list(export.counts.items()))
    for reason, count in reasons.most_common():
        note(f"left out, {count}: {reason}")
    note(f"wrote {folder}; what is where: {folder}/tilegym_db/export.json")


def _blob_limits(total: str | None, largest: str | None) -> tuple[int, int] | str:
    """Bytes of all blobs and of one; or why there are none."""
    from tilegym_db.errors import UsageError
    from tilegym_db.integrations.interchange.export_blobs import LARGEST_MIB, MIB, TOTAL_MIB

    if total == "none":
        if largest is not None:
            raise UsageError(
                "--largest-blob says how large a blob may be, and --blobs none leaves blobs out: give one of them.",
                code="options_clash",
            )
        return ""
    limits = (
        int(_mib("--blobs", total, TOTAL_MIB, " or 'none'") * MIB),
        int(_mib("--largest-blob", largest, LARGEST_MIB) * MIB),
    )
    missing = [name for name in ("torch", "safetensors") if importlib.util.find_spec(name) is None]
    if not missing:
        return limits
    reason = f"drawing blobs needs {' and '.join(missing)}: pip install {' '.join(missing)}"
    if total is not None or largest is not None:
        raise UsageError(f"{reason}; or leave their workloads out with --blobs none.", code="blob_refused")
    return reason


def _mib(option: str, text: str | None, default: float, other: str = "") -> float:
    from tilegym_db.errors import UsageError

    try:
        value = default if text is None else float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= MOST_MIB:
        raise UsageError(
            f"{option} takes a number of MiB above 0 and at most {MOST_MIB}{other}, not '{text}'.", code="size_invalid"
        )
    return value


def _export_catalog(folder: Path, gpu: str | None, op_type: str | None, limits: tuple[int, int] | str) -> Export:
    from tilegym_db.catalog import Catalog
    from tilegym_db.cli.reader import open_reader
    from tilegym_db.cli.selection import select_definitions
    from tilegym_db.integrations.interchange.export_blobs import BlobFolder
    from tilegym_db.integrations.interchange.flashinfer_export import build_export
    from tilegym_db.integrations.interchange.writing import folder_beside, write_tree
    from tilegym_db.records.hardware import parse_gpu
    from tilegym_db.store.exchange import told_traces, unverified_counts

    catalog = Catalog.default()
    select_definitions(catalog, op_type, None)
    chosen = None if gpu is None else parse_gpu(gpu)
    with open_reader() as store:
        traces = told_traces(store, chosen, op_type)
        unverified = unverified_counts(store, chosen, op_type)
    with folder_beside(folder) as scratch:
        export = build_export(
            catalog, traces, op_type, None if isinstance(limits, str) else BlobFolder(scratch, *limits)
        )
        write_tree(folder, export.files, export.blobs | export.drawn)
    for tier, count in unverified.items():
        note(f"left out, {count} passes of the tier {tier}: superseded, taken back, or never promoted")
    if limits and isinstance(limits, str):
        note(f"no blobs: {limits}")
    return export


def _export_imported(form: str, folder: Path, origin: str, op_type: str | None) -> None:
    from tilegym_db.errors import UsageError
    from tilegym_db.integrations.interchange.flashinfer_trace import DIALECT
    from tilegym_db.integrations.interchange.writing import imported_files, write_tree
    from tilegym_db.paths import home
    from tilegym_db.store.imported import data_set

    found = data_set(home(), origin)
    if form == "flashinfer" and found.dialect != DIALECT:
        raise UsageError(
            f"{found.origin} is no FlashInfer-Trace data set. Try: tilegym-db export original DIR --origin {origin}",
            code="data_set_dialect",
        )
    files = imported_files(found, op_type)
    if not files:
        raise UsageError(f"{found.origin} has nothing of op_type '{op_type}'.", code="data_set_empty")
    write_tree(folder, files)
    note(f"wrote {len(files)} files of {found.origin} to {folder}, byte for byte.")


def _export_draft(folder: Path, origin: str | None, name: str | None) -> None:
    from tilegym_db.errors import UsageError
    from tilegym_db.integrations.interchange.drafts import STILL_TO_WRITE, draft_of
    from tilegym_db.integrations.interchange.writing import write_tree
    from tilegym_db.paths import home
    from tilegym_db.store.imported import data_set

    if origin is None or name is None:
        raise UsageError(
            "'draft' writes one definition of an imported data set: give --origin and --definition.",
            code="option_missing",
        )
    draft = draft_of(data_set(home(), origin), name)
    write_tree(folder, draft.files, draft.copies)
    for what, reason in draft.left_out:
        note(f"left out, {what}: {reason}")
    if draft.judged:
        note(f"{name}: {draft.judged}")
    for text in draft.undrawn:
        note(
            f"say how inputs are drawn that hold {text}: 'input_generators' or 'joint_inputs' in {folder}/definition.json"
        )
    missing = " and ".join(f"{folder}/{file}" for file in STILL_TO_WRITE)
    note(
        f"wrote {folder}, with {len(draft.solutions)} solutions. Read {folder}/reference.py: once added, it runs unconfined."
    )
    note(f"Next: write {missing}, then: tilegym-db add-definition {folder}; tilegym-db check {name}")
    for solution in draft.solutions:
        note(f"then: tilegym-db add-solution {folder}/{solution}")
