"""``tilegym-db model-bench``: tokens a second of a patched model against the same model as it is, and other ways to run it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilegym_db.cli.formats import Wide
from tilegym_db.cli.options import ConfigFile, MachineGpu
from tilegym_db.cli.output import note, print_json, print_table, table_width

if TYPE_CHECKING:
    from tilegym_db.integrations.transformers.patch import Handle
    from tilegym_db.records.model_run import Estimate, ModelRun, ModelTiming

GIB = 1 << 30


def command(
    config: ConfigFile,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
    prompt: Annotated[int, typer.Option(help="Random tokens of each sequence.")] = 512,
    new: Annotated[int, typer.Option(help="Tokens to generate for each; 0 times the prefill alone.")] = 64,
    gpu: MachineGpu = "auto",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    rounds: Annotated[int, typer.Option(help="Generations that count, by each way.", max=100_000)] = 10,
    layers: Annotated[int | None, typer.Option(help="Keep only the first so many layers.")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Prove the patch first; see verify-model.")] = False,
    static_cache: Annotated[
        bool, typer.Option("--static-cache", help="Also both with a static cache and compiled decoding.")
    ] = False,
    compile_prefill: Annotated[
        bool, typer.Option("--compile", help="Also both under torch.compile; for the prefill alone (--new 0).")
    ] = False,
    beside: Annotated[
        list[str] | None, typer.Option(help="Also a library in a process of its own: liger or tilegym; repeatable.")
    ] = None,
    experts: Annotated[
        list[str] | None,
        typer.Option(help="Also stock with its experts set to eager, batched_mm or grouped_mm; repeatable."),
    ] = None,
    profile: Annotated[bool, typer.Option("--profile", help="Also profile one call: GPU time by kernels.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the record as JSON.")] = False,
    wide: Wide = False,
) -> None:
    """Generate with a model of random weights, stock and patched in turns, and store how long each takes.

    Nothing is downloaded. Results are in the views model_runs and model_ways, with evidence level 'model':
    tilegym-db sql "SELECT model, gpu, batch, way, tokens_per_s, speedup, reason FROM model_ways"

    A way that was asked for and cannot be had is reported with its reason.

    Exit 1: a kernel raised, or failed its proof; stock code ran in its place.
    """
    from tilegym_db.bench.machine import refuse_absent_gpu, select_machine

    refuse_absent_gpu(gpu)
    from tilegym_db.cli.model_progress import rounds_on_stderr
    from tilegym_db.integrations.transformers.model_bench import ModelBenchOptions, model_bench

    options = ModelBenchOptions(
        dtype=dtype, batch=batch, prompt=prompt, new=new, rounds=rounds, layers=layers, verify=verify, profile=profile,
        with_static_cache=static_cache, with_compiled_prefill=compile_prefill, beside=tuple(beside or ()),
        experts=tuple(experts or ()),
    )  # fmt: skip
    with rounds_on_stderr() as observer:
        run, handle = model_bench(config, select_machine(gpu), options, observer)
    _report(run, handle, as_json=as_json, wide=wide)


def _report(run: ModelRun, handle: Handle, *, as_json: bool, wide: bool) -> None:
    """Store and print; exit 1 where a kernel raised or failed its proof."""
    path = _store(run)
    if as_json:
        print_json(run.model_dump(mode="json"))
    else:
        print_run(run, wide=wide)
        note(handle.report().text(160 if wide else table_width()))
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


def print_run(run: ModelRun, *, wide: bool = False) -> None:
    """One row per figure of stock and patched, with the ratio of both and its interval; then one per other way."""
    from tilegym_db.records.claims import claims_of

    typer.echo(
        f"{run.model} ({run.model_class}, {run.layers} layers, {run.parameters:,} parameters, {run.dtype}) on "
        f"{run.gpu_name}: batch {run.batch}, prompt {run.prompt_tokens}, new {run.new_tokens}, {run.rounds} rounds"
    )
    print_table(("", "stock", "patched", "speedup", "99% interval", "claim"), _rows(run))
    for reason in dict.fromkeys(claim.reason for claim in claims_of(run).values() if claim.reason):
        note(f"no speedup is claimed: {reason}")
    if run.ways:
        headings = (
            "way",
            "first token, ms",
            "per token, ms",
            "tokens/s",
            "peak GiB",
            "faster than",
            "99% interval",
            "per token",
        )
        rows = [row for name in run.ways for row in _way_rows(run, name)]
        print_table(headings, rows, wide=wide, least=("peak GiB", "per token, ms", "per token", "first token, ms"))
    for name, reason in run.absent.items():
        note(f"{name} took no part: {reason}")
    calls = ", ".join(f"{name} {count}" for name, count in run.kernels.items()) or "none"
    note(f"calls by kernel in one generation: {calls}")
    if run.experts:
        ways = ", ".join(f"{name} {count}" for name, count in run.experts.items())
        note(f"calls of experts in one generation of stock, by transformers' implementation: {ways}")
    note(f"{run.equal_tokens} of {run.compared_tokens} greedy tokens are those of stock")


def _claimed(run: ModelRun, what: str, speedup: Estimate) -> tuple[str | None, str | None, str]:
    """The cells of a speedup, its interval and what may be claimed."""
    from tilegym_db.records.claims import claims_of

    verdict = claims_of(run)[what].verdict
    if not run.kernels:
        return "no kernel ran", None, verdict
    return (*_ratio(speedup), verdict)


def _rows(run: ModelRun) -> list[tuple[object, ...]]:
    stock, patched = run.stock, run.patched
    rows: list[tuple[object, ...]] = [
        ("to first token, ms", stock.ttft_ms.median, patched.ttft_ms.median, *_claimed(run, "ttft", run.ttft_speedup))
    ]
    if stock.tpot_ms is not None and patched.tpot_ms is not None and run.tpot_speedup is not None:
        rows.append(
            (
                "per output token, ms",
                stock.tpot_ms.median,
                patched.tpot_ms.median,
                *_claimed(run, "tpot", run.tpot_speedup),
            )
        )
    name = "tokens per second" if run.new_tokens else "prompt tokens per second"
    rows.append(
        (name, _tokens_per_s(run, stock), _tokens_per_s(run, patched), *_claimed(run, "total", run.total_speedup))
    )
    if stock.peak_memory_bytes is not None and patched.peak_memory_bytes is not None:
        rows.append(("peak GiB", stock.peak_memory_bytes / GIB, patched.peak_memory_bytes / GIB, None, None, None))
    return rows


def _way_rows(run: ModelRun, name: str) -> list[tuple[object, ...]]:
    """One row per way that this one is compared with; the figures in the first of them."""
    timing = run.ways[name].timing
    figures: tuple[object, ...] = (
        name,
        timing.ttft_ms.median,
        None if timing.tpot_ms is None else timing.tpot_ms.median,
        _tokens_per_s(run, timing),
        None if timing.peak_memory_bytes is None else timing.peak_memory_bytes / GIB,
    )
    rows: list[tuple[object, ...]] = []
    for alternative, speedups in run.ways[name].against.items():
        ratio, interval = _ratio(speedups.total)
        per_token = None if speedups.tpot is None else " ".join(filter(None, _ratio(speedups.tpot)))
        rows.append((*((None,) * 5 if rows else figures), f"{alternative} {ratio}", interval, per_token))
    return rows


def _tokens_per_s(run: ModelRun, timing: ModelTiming) -> float:
    """New ones, or those of the prompt where the prefill is all there is."""
    return run.prefill_tokens_per_s(timing) if timing.tokens_per_s is None else timing.tokens_per_s


def _ratio(estimate: Estimate) -> tuple[str, str | None]:
    if estimate.ci_low is None:
        return f"{estimate.median:.3f}x", None
    return f"{estimate.median:.3f}x", f"{estimate.ci_low:.3f} to {estimate.ci_high:.3f}"
