"""``tilegym-db fit``: what a model needs on this machine, measured, published for this user, proved and timed."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilegym_db.cli.formats import Wide
from tilegym_db.cli.options import ConfigFile, Gpus, MachineGpu
from tilegym_db.cli.output import note, print_json, print_table

if TYPE_CHECKING:
    from tilegym_db.loop.fit import FitReport

LARGEST = 8
"""So many pieces that nothing serves are named."""


def command(
    config: ConfigFile,
    batch: Annotated[str, typer.Option(help="Sequences; several as 1,8.", metavar="N[,N]")] = "1",
    prompt: Annotated[str, typer.Option(help="Random tokens of each; several as 512,4096.", metavar="N[,N]")] = "512",
    new: Annotated[int, typer.Option(help="Tokens to generate for each; 0 times the prefill alone.", min=0)] = 64,
    gpu: MachineGpu = "auto",
    gpus: Gpus = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    rounds: Annotated[int, typer.Option(help="Generations that count, by each way.", min=1, max=100_000)] = 10,
    layers: Annotated[int | None, typer.Option(help="Keep only the first so many layers.", min=1)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    wide: Wide = False,
) -> None:
    """See the calls of a model with random weights, measure what could serve them, publish it for you, and time the model.

    Nothing is downloaded. Everything is kept the moment it is measured: interrupt at any time and run it again to go on; a
    second run measures nothing. Exit 1: a kernel failed its proof on the model, or something could not be measured.
    """
    from tilegym_db.bench.machine import refuse_absent_gpu

    refuse_absent_gpu(gpu, gpus)
    batches, prompts = _numbers("--batch", batch), _numbers("--prompt", prompt)
    from tilegym_db.cli.bench_progress import Progress
    from tilegym_db.loop.fit import FitOptions, fit_config

    options = FitOptions(batches, prompts, new, dtype, layers, rounds, gpus)
    with Progress(quiet=as_json and not sys.stderr.isatty()) as progress:
        report = fit_config(config, gpu, options, progress.observer(), progress.round_done)
    if as_json:
        print_json(content_of(report))
    else:
        print_report(report, wide=wide)
    if report.failed or report.interrupted:
        raise typer.Exit(1)


def _numbers(option: str, text: str) -> tuple[int, ...]:
    from tilegym_db.errors import UsageError

    words = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch(r"0*[1-9][0-9]{0,11}", word) for word in words):
        raise UsageError(
            f"{option} {text}: numbers of at least 1, separated by commas, such as 1,8.", code="numbers_invalid"
        )
    return tuple(dict.fromkeys(map(int, words)))


def content_of(report: FitReport) -> dict[str, Any]:
    """JSON-ready content."""
    return {
        "model": report.model,
        "gpu": report.machine.gpu,
        "calls": [call.uuid for call in report.calls],
        "measured": {} if report.measured is None else dict(report.measured.counts),
        "published": report.published,
        "served_share": round(report.served_share, 4),
        "pieces": [piece.to_dict() for piece in report.pieces],
        "runs": [run.model_dump(mode="json") for run in report.runs],
        "new_runs": report.new_runs,
        "failed": report.failed,
        "notes": report.notes,
    }


def print_report(report: FitReport, *, wide: bool = False) -> None:
    """What was measured, the share of each piece and what serves it, then the model before and after."""
    from tilegym_db.cli.model_bench import print_run

    counts = {} if report.measured is None else report.measured.counts
    done = ", ".join(f"{count} {status}" for status, count in sorted(counts.items())) or "nothing that was not known"
    note(f"{report.model}: {len(report.calls)} kinds of calls on {report.machine.gpu_name}; measured {done}")
    if report.published:
        note(f"published for you in {report.published}")
    rows = [
        (
            piece.part,
            f"{piece.share:.1%}",
            piece.definition or "-",
            "a verified kernel" if piece.served else "its own code",
        )
        for piece in report.pieces
    ]
    print_table(("part", "share", "definition", "served by"), rows, wide=wide)
    note(f"{report.served_share:.0%} of the time of the model's own code is of parts with verified kernels")
    open_pieces = sorted((piece for piece in report.pieces if not piece.served), key=lambda piece: -piece.share)
    for piece in open_pieces[:LARGEST]:
        why = piece.reason or "no verified kernel is faster here at its sizes"
        note(f"{piece.share:.1%} {piece.part}: {why}")
    for run in report.runs:
        print_run(run, wide=wide)
    for text in [*report.failed, *report.notes]:
        note(text)
    if report.interrupted:
        note("interrupted; run it again to go on.")
    elif not report.failed:
        note("Next: tilegym_db.patch(model)")
