"""``tilegym-db model-bench``: tokens a second of a patched model against the same model as it is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilegym_db.cli.output import note, print_json, print_table

if TYPE_CHECKING:
    from tilegym_db.records.model_run import Estimate, ModelRun


def command(
    config: Annotated[
        Path, typer.Argument(help="A model's config: a JSON file, or a folder with config.json.", exists=True)
    ],
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
    prompt: Annotated[int, typer.Option(help="Random tokens of each sequence.")] = 512,
    new: Annotated[int, typer.Option(help="Tokens to generate for each, at least 2.")] = 64,
    gpu: Annotated[str, typer.Option(help="auto, cpu, or the GPU in this machine (h100, h200, ...).")] = "auto",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    rounds: Annotated[int, typer.Option(help="Generations that count, by each of the two.")] = 10,
    layers: Annotated[int | None, typer.Option(help="Keep only the first so many layers.")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Prove the patch first; see verify-model.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the record as JSON.")] = False,
) -> None:
    """Generate with a model of random weights, stock and patched in turns, and store how long each takes.

    Nothing is downloaded. Results are in the view model_runs, with evidence level 'model':
    tilegym-db sql "SELECT model, gpu, batch, patched_tokens_per_s, speedup FROM model_runs"

    Exit 1: a kernel raised, or failed its proof; stock code ran in its place.
    """
    from tilegym_db.bench.machine import select_machine
    from tilegym_db.cli.model_progress import rounds_on_stderr
    from tilegym_db.integrations.transformers.model_bench import model_bench

    with rounds_on_stderr() as observer:
        run, handle = model_bench(
            config,
            select_machine(gpu),
            dtype=dtype,
            batch=batch,
            prompt=prompt,
            new=new,
            rounds=rounds,
            layers=layers,
            verify=verify,
            observer=observer,
        )
    path = _store(run)
    if as_json:
        print_json(run.model_dump(mode="json"))
    else:
        print_run(run)
        note(str(handle.report()))
    note(f"stored in {path}")
    if handle.report().failures or handle.report().failed_proofs:
        raise typer.Exit(1)


def _store(run: ModelRun) -> Path:
    from tilegym_db.store.connection import open_store
    from tilegym_db.store.ingest import ingest
    from tilegym_db.store.model_runs import save_model_run

    path = save_model_run(run)
    with open_store() as store:
        ingest(store)
    return path


def print_run(run: ModelRun) -> None:
    """One row per figure: stock, patched, and the ratio of both with its interval."""
    typer.echo(
        f"{run.model} ({run.model_class}, {run.layers} layers, {run.parameters:,} parameters, {run.dtype}) on "
        f"{run.gpu_name}: batch {run.batch}, prompt {run.prompt_tokens}, new {run.new_tokens}, {run.rounds} rounds"
    )
    rows = [
        ("to first token, ms", run.stock.ttft_ms.median, run.patched.ttft_ms.median, *_ratio(run.ttft_speedup)),
        ("per output token, ms", run.stock.tpot_ms.median, run.patched.tpot_ms.median, *_ratio(run.tpot_speedup)),
        ("tokens per second", run.stock.tokens_per_s, run.patched.tokens_per_s, *_ratio(run.total_speedup)),
    ]
    if run.stock.peak_memory_bytes is not None and run.patched.peak_memory_bytes is not None:
        gib = 1 << 30
        rows.append(("peak GiB", run.stock.peak_memory_bytes / gib, run.patched.peak_memory_bytes / gib, "", ""))
    print_table(("", "stock", "patched", "speedup", "99% interval"), rows)
    calls = ", ".join(f"{name} {count}" for name, count in run.kernels.items()) or "none"
    note(f"calls by kernel in one generation: {calls}")
    note(f"{run.equal_tokens} of {run.batch * run.new_tokens} greedy tokens are those of stock")


def _ratio(estimate: Estimate) -> tuple[str, str]:
    return f"{estimate.median:.3f}x", f"{estimate.ci_low:.3f} to {estimate.ci_high:.3f}"
