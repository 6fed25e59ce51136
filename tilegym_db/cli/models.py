"""``tilegym-db fit`` and ``model``: measure, time and verify kernels for whole models."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilegym_db.cli.app import INTERRUPTED
from tilegym_db.cli.commands import command_group
from tilegym_db.cli.kit.formats import AsJson, Wide, file_name
from tilegym_db.cli.kit.options import (
    ConfigFile,
    Gpus,
    Layers,
    MachineGpu,
    MaxNewTokens,
    ModelDtype,
    PromptTokens,
    Require,
    Rounds,
    Sequences,
    complete_gpu,
    finite_seconds,
    path_given,
)
from tilegym_db.cli.kit.output import note, print_json, print_table, spelled_map, table_width
from tilegym_db.errors import UsageError

if TYPE_CHECKING:
    from tilegym_db.loop.coverage import CoveragePlan
    from tilegym_db.loop.fit import FitReport
    from tilegym_db.loop.from_model import Piece
    from tilegym_db.models.handle import Handle
    from tilegym_db.models.report import PatchReport
    from tilegym_db.records.loop import Estimate, ModelRun, ModelTiming
    from tilegym_db.scaffold.model_calls import Question


app = command_group(
    "Time a patched model, verify its kernels on the calls that it makes, or plan what to measure for models."
)

LARGEST = 8
"""Maximum number of unserved pieces that are listed."""


def fit_command(
    config: ConfigFile,
    batch: Annotated[str, typer.Option(help="Sequences; several as 1,8.", metavar="N[,N]")] = "1",
    prompt_tokens: Annotated[
        str, typer.Option(help="Random tokens of each; several as 512,4096.", metavar="N[,N]")
    ] = "512",
    max_new_tokens: MaxNewTokens = 64,
    gpu: MachineGpu = "auto",
    gpus: Gpus = None,
    dtype: ModelDtype = "bfloat16",
    rounds: Rounds = 10,
    layers: Layers = None,
    lock: Annotated[
        Path | None,
        typer.Option(
            help="Write the kernels that serve the model, for patch(lock=...).", metavar="FILE", parser=path_given
        ),
    ] = None,
    require: Require = "",
    as_json: AsJson = False,
    wide: Wide = False,
) -> None:
    """Capture the calls of a model with random weights, measure kernels for them, publish those for you, and time the model.

    Nothing is downloaded. Every result is stored at once, so you can interrupt and run it again to continue. A second run
    measures nothing. Exit 1: a kernel failed its proof on the model, or something could not be measured.
    """
    from tilegym_db.measurement.machine import devices_of_options

    devices = devices_of_options(gpu, gpus)
    batches, prompts = _numbers("--batch", batch), _numbers("--prompt-tokens", prompt_tokens)
    from tilegym_db.cli.kit.progress import Progress
    from tilegym_db.loop.fit import FitOptions, fit_config

    options = FitOptions(batches, prompts, max_new_tokens, dtype, layers, rounds, lock, require)
    try:
        with Progress(quiet=as_json and not sys.stderr.isatty()) as progress:
            report = fit_config(config, devices, options, progress.observer(), progress.round_done)
    except KeyboardInterrupt:  # while the model is built or timed; the measurements end with a report
        note("interrupted: every measurement so far is kept. The same command continues")
        raise
    if as_json:
        print_json(content_of(report))
    else:
        given = {"--gpu": (gpu, "auto"), "--dtype": (dtype, "bfloat16"), "--layers": (layers, None)}
        asked = {name: str(value) for name, (value, default) in given.items() if value != default}
        print_report(report, config, wide=wide, require=options.required, asked=asked)
    if report.interrupted:
        raise typer.Exit(INTERRUPTED)
    if report.failed:
        raise typer.Exit(1)


def _numbers(option: str, text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch(r"0*[1-9][0-9]{0,11}", word) for word in words):
        raise UsageError(
            f"{option} {text}: numbers of at least 1, separated by commas, such as 1,8.", code="numbers_invalid"
        )
    return tuple(dict.fromkeys(map(int, words)))


def content_of(report: FitReport) -> dict[str, Any]:
    """Return JSON-ready content."""
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
        "kernels": report.kernels,
        "lock": report.lock,
        "failed": report.failed,
        "notes": report.notes,
    }


def print_report(
    report: FitReport,
    config: Path,
    *,
    wide: bool = False,
    require: Sequence[str] = (),
    asked: Mapping[str, str] | None = None,
) -> None:
    """Print what was measured, the share of each piece and what serves it, then the model's timings and the next step.

    ``asked`` are the options that the next command must repeat to profile the same model.
    """
    counts = {} if report.measured is None else report.measured.counts
    done = ", ".join(f"{count} {status}" for status, count in sorted(counts.items())) or "nothing new"
    note(f"{report.model}: {len(report.calls)} kinds of calls on {report.machine.gpu_name}; measured {done}")
    if report.published:
        note(f"published for you in {report.published}")
    rows = [
        (
            "" if number else piece.part,
            "" if number else f"{piece.share:.1%}",  # a module class has its time once, however many operators it calls
            piece.definition or "-",
            "a verified kernel" if piece.served else "its own code",
        )
        for part in report.parts
        for number, piece in enumerate(part.pieces)
    ]
    print_table(("part", "share", "definition", "served by"), rows, wide=wide)
    note(f"{report.served_share:.0%} of the model's time is in parts that verified kernels serve")
    open_pieces = sorted((piece for piece in report.pieces if not piece.served), key=lambda piece: -piece.share)
    reasons = dict.fromkeys(f"{piece.share:.1%} {piece.part}: {_why_open(piece)}" for piece in open_pieces)
    for reason in [*reasons][:LARGEST]:
        note(reason)
    for run in report.runs:
        print_run(run, wide=wide)
    for text in [*report.failed, *report.notes]:
        note(text)
    if report.interrupted:
        note("interrupted; run it again to continue.")
    elif not report.failed and report.kernels:
        kept = f", lock={report.lock!r}" if report.lock else f", require={[*require]!r}" if require else ""
        note(f"Next: tilegym_db.patch(model{kept})")
    elif not report.failed:
        from tilegym_db.published.entries import spelled_requirements

        note(
            f"No verified kernel{spelled_requirements(require)} serves this model here, so tilegym_db.patch(model) would "
            "change nothing. "
            "To rank what a new kernel would be worth:"
        )
        words = [shlex.quote(word) for pair in (asked or {}).items() for word in pair]
        note(" ".join(["Next: tilegym-db task from-model", shlex.quote(str(config)), *words]))


def _why_open(piece: Piece) -> str:
    described = "no verified kernel is faster here at its sizes" if piece.definition else "no definition describes it"
    return piece.reason or described


# ---- Bench ----------------------------------------------------------------------------------------

GIB = 1 << 30


@app.command("bench")
def bench_command(
    config: ConfigFile,
    batch: Sequences = 1,
    prompt_tokens: PromptTokens = 512,
    max_new_tokens: MaxNewTokens = 64,
    gpu: MachineGpu = "auto",
    dtype: ModelDtype = "bfloat16",
    rounds: Rounds = 10,
    layers: Layers = None,
    verify: Annotated[bool, typer.Option("--verify", help="Verify the patch first; see model verify.")] = False,
    static_cache: Annotated[
        bool, typer.Option("--static-cache", help="Also both with a static cache and compiled decoding.")
    ] = False,
    compile_prefill: Annotated[
        bool,
        typer.Option("--compile", help="Also both under torch.compile; for the prefill alone (--max-new-tokens 0)."),
    ] = False,
    beside: Annotated[
        list[str] | None, typer.Option(help="Also a library in a separate process: liger or tilegym; repeatable.")
    ] = None,
    experts: Annotated[
        list[str] | None,
        typer.Option(help="Also stock with its experts set to eager, batched_mm or grouped_mm; repeatable."),
    ] = None,
    profile: Annotated[bool, typer.Option("--profile", help="Also profile one call: GPU time by kernels.")] = False,
    as_json: AsJson = False,
    wide: Wide = False,
) -> None:
    """Generate with a model of random weights, stock and patched in turns, and store how long each takes.

    Nothing is downloaded. Results are in the views model_runs and model_ways, with evidence level 'model':
    tilegym-db sql "SELECT model, gpu, batch, way, tokens_per_s, speedup, reason FROM model_ways"

    A requested way that is unavailable is reported with its reason.

    Exit 1: a kernel raised, or failed its proof; stock code ran in its place.
    """
    from tilegym_db.measurement.machine import refuse_absent_gpu, select_machine

    refuse_absent_gpu(gpu)
    from tilegym_db.cli.kit.progress import Progress
    from tilegym_db.models.bench.model_bench import ModelBenchOptions, model_bench

    options = ModelBenchOptions(
        dtype=dtype, batch=batch, prompt=prompt_tokens, new=max_new_tokens, rounds=rounds, layers=layers, verify=verify,
        profile=profile,
        with_static_cache=static_cache, with_compiled_prefill=compile_prefill, beside=tuple(beside or ()),
        experts=tuple(experts or ()),
    )  # fmt: skip
    with Progress() as progress:
        run, handle = model_bench(config, select_machine(gpu), options, progress.round_done)
    _report(run, handle, as_json=as_json, wide=wide)


def _report(run: ModelRun, handle: Handle, *, as_json: bool, wide: bool) -> None:
    """Store and print a run; exit with 1 if a kernel raised or failed its proof."""
    path = _store(run)
    if as_json:
        print_json(run.model_dump(mode="json"))
    else:
        print_run(run, wide=wide)
        note(handle.report().text(160 if wide else table_width()))
    note(f"stored in {path}")
    if handle.report().problems:
        raise typer.Exit(1)


def _store(run: ModelRun) -> Path:
    from tilegym_db.store.filling import ingest
    from tilegym_db.store.opening import open_store
    from tilegym_db.store.side_files import save_model_run

    path = save_model_run(run)
    with open_store() as store:
        ingest(store)
    return path


def print_run(run: ModelRun, *, wide: bool = False) -> None:
    """Print one row per metric of stock and patched with the speedup and its interval, then one per other way."""
    from tilegym_db.records.loop import claims_of

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
        note(f"{name} was not timed: {reason}")
    calls = ", ".join(f"{name} {count}" for name, count in run.kernels.items()) or "none"
    note(f"calls by kernel in one generation: {calls}")
    if run.experts:
        ways = ", ".join(f"{name} {count}" for name, count in run.experts.items())
        note(f"calls of experts in one generation of stock, by transformers' implementation: {ways}")
    note(f"{run.equal_tokens} of {run.compared_tokens} greedy tokens are those of stock")


def _claimed(run: ModelRun, what: str, speedup: Estimate) -> tuple[str | None, str | None, str]:
    """Return the cells of a speedup, its interval and its claim."""
    from tilegym_db.records.loop import claims_of

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
    """Return one row for each way that ``name`` is compared with. The first row also has the times of ``name``."""
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
    """Return new tokens per second, or prompt tokens per second if only the prefill was timed."""
    return run.prefill_tokens_per_s(timing) if timing.tokens_per_s is None else timing.tokens_per_s


def _ratio(estimate: Estimate) -> tuple[str, str | None]:
    if estimate.ci_low is None:
        return f"{estimate.median:.3f}x", None
    return f"{estimate.median:.3f}x", f"{estimate.ci_low:.3f} to {estimate.ci_high:.3f}"


# ---- Plan -----------------------------------------------------------------------------------------


@app.command("plan")
def plan_command(
    config: Annotated[
        str, typer.Argument(help="config.json of a Hugging Face model, or 'models': the list of known models.")
    ] = "models",
    gpu: Annotated[
        str, typer.Option(help="h100, h200, ...; it need not be here.", autocompletion=complete_gpu)
    ] = "auto",
    goal: Annotated[
        float, typer.Option(help="Percent of the calls that kernels are to answer.", min=0.01, max=100)
    ] = 100,
    everything: Annotated[
        bool, typer.Option("--all", help="Every known model at every stage, on 1, 2, 4 and 8 GPUs; takes minutes.")
    ] = False,
    file: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write the points as workloads, for add-workload.", callback=file_name),
    ] = None,
    measure: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            callback=finite_seconds,
            help="Measure the first points here, for about this long, and publish them for you.",
        ),
    ] = None,
    gpus: Gpus = None,
    as_json: AsJson = False,
    wide: Wide = False,
) -> None:
    """Plan which points to measure so that kernels answer more of the calls of models, and what each costs and answers.

    A point has the figures of the nearest measured one; points at which stock code is expected to be faster are left out. Seconds
    are of one GPU, from the times between published traces.

    With --measure, results are stored at once and published at the end. Interrupt it and run it again to continue.
    """
    if measure is None and gpus is not None:
        raise UsageError("--gpus is for --measure SECONDS.", code="options_clash")
    asked = asked_questions(config, everything=everything)
    if measure is not None:
        _measure(asked, measure, goal, gpu, gpus, file, as_json=as_json, wide=wide)
        return
    from tilegym_db.cli.best import chosen_gpu
    from tilegym_db.loop.coverage import plan_coverage

    plan = plan_coverage(asked, chosen_gpu(gpu) or gpu, goal=goal / 100)
    _write_points(plan, file)
    print_json(plan.to_dict()) if as_json else print_plan(plan, wide=wide)


def asked_questions(config: str, *, everything: bool) -> list[Question]:
    """Return the calls of a config's model at every stage, or those of the known models by which releases are compared."""
    from tilegym_db.scaffold.model_calls import ASKED_STAGES, MODELS, STAGES, known_models, models_of, questions

    if everything:
        return questions(models_of(config))
    if config == MODELS:
        return questions((one for one in known_models() if one.get("asked")), ASKED_STAGES, (1,))
    return questions(models_of(config), STAGES, (1,))


def _measure(
    asked: list[Question],
    seconds: float,
    goal: float,
    gpu: str,
    gpus: str | None,
    file: Path | None,
    *,
    as_json: bool,
    wide: bool,
) -> None:
    from tilegym_db.measurement.machine import begin_workers, devices_of_options

    devices = devices_of_options(gpu, gpus)
    begin_workers(devices)
    from tilegym_db.cli.kit.progress import Progress
    from tilegym_db.loop.coverage import measure_next, served_share

    def planned(plan: CoveragePlan) -> None:
        _write_points(plan, file)
        if not as_json:
            print_plan(plan, wide=wide)

    with Progress(quiet=as_json and not sys.stderr.isatty()) as progress:
        found = measure_next(
            asked, seconds, goal=goal / 100, devices=devices, observer=progress.observer(), planned=planned
        )
    if as_json:
        print_json(found.to_dict())
    for remark in found.notes:
        note(remark)
    shares = [100 * served_share(counts.elements()) for counts in (found.before, found.after)]
    note(
        f"kernels answered {shares[0]:.1f}% of {len(asked)} calls and answer {shares[1]:.1f}% now; {found.left} points are left"
    )
    if found.published:
        note(f"published for you in {found.published}")
    if found.interrupted:
        raise typer.Exit(INTERRUPTED)
    failed = found.report is not None and any(status not in ("PASSED", "UNSUPPORTED") for status in found.report.counts)
    if failed:
        raise typer.Exit(1)


def _write_points(plan: CoveragePlan, file: Path | None) -> None:
    if file is not None:
        from tilegym_db.cli.new import write_new_file

        write_new_file(file, "".join(point.workload.to_json() + "\n" for point in plan.points))
        note(f"wrote {len(plan.points)} workloads. Next: tilegym-db add-workload {shlex.quote(str(file))}")


def print_plan(plan: CoveragePlan, *, wide: bool = False) -> None:
    """Print one row per point, then what the calls are answered by now and what cannot be measured."""
    rows = [
        (
            point.workload.definition,
            spelled_map(point.workload.axes),
            ", ".join(point.workload.dtypes.values()),
            ", ".join(f"{name} {layout}" for name, layout in point.workload.layouts.items()),
            ", ".join(point.solutions),
            f"{point.seconds:.0f}",
            point.answers,
            f"{100 * plan.expected_share(number):.1f}%",
            point.basis or "none",
        )
        for number, point in enumerate(plan.points, start=1)
    ]
    columns = ("definition", "axes", "dtypes", "layouts", "solutions", "seconds", "answers", "then", "expected from")
    print_table(columns, rows, wide=wide, least=("layouts", "dtypes", "expected from"))
    answers = ", ".join(f"{name} {count}" for name, count in plan.answers.items())
    note(f"{plan.questions} calls on {plan.gpu}: {answers}")
    note(
        f"{len(plan.points)} points cost about {plan.seconds:.0f} s of one {plan.gpu} and bring the share of kernels from "
        f"{100 * plan.share:.1f}% to {100 * plan.expected_share():.1f}%"
        + (f", and up to {plan.unsure} calls more, of which no GPU has measured any" if plan.unsure else "")
    )
    if plan.expected_share() + plan.unsure / max(1, plan.questions) < plan.goal < 1:
        note(f"the goal of {100 * plan.goal:g}% is not reached by measuring: it needs faster or other kernels")
    if plan.slower:
        note(f"{plan.slower} calls are not measured because stock code is expected to be faster there")
    if plan.refused:
        call, reason = next(iter(plan.refused.items()))
        note(f"{len(plan.refused)} calls cannot be measured, such as {call}: {reason}. --json has all")


# ---- Verify ---------------------------------------------------------------------------------------


@app.command("verify")
def verify_command(
    config: ConfigFile,
    gpu: MachineGpu = "auto",
    dtype: ModelDtype = "bfloat16",
    batch: Sequences = 1,
    prompt_tokens: PromptTokens = 128,
    layers: Layers = None,
    capture: Annotated[
        bool, typer.Option("--capture", help="Keep the model's calls as workloads in your catalog.")
    ] = False,
    as_json: AsJson = False,
    wide: Wide = False,
) -> None:
    """Patch a model with random weights, and compare each kernel with stock code on the calls that the model makes.

    After the prompt, one more token is decoded.

    Nothing is downloaded. Exit 1: a kernel's error exceeds the one that stock allows, so a patch with verify=True leaves it out.
    """
    from tilegym_db.measurement.machine import refuse_absent_gpu, select_machine

    refuse_absent_gpu(gpu)
    from tilegym_db.models.patch import keep_workloads, model_tag, verify_model
    from tilegym_db.models.report import PROOF_COLUMNS

    device = select_machine(gpu).device
    found = verify_model(config, device=device, dtype=dtype, batch=batch, prompt=prompt_tokens, layers=layers)
    if as_json:
        print_json(found.report.to_dict())
    else:
        print_table(PROOF_COLUMNS, found.report.proof_rows(), wide=wide, least=("allowed", "stock error", "definition"))
        print_summary(found.report)
    if capture:
        kept = keep_workloads(found.workloads, model_tag(config))
        for path in sorted({path for path, _ in kept}):
            note(str(path))
        names = " ".join(sorted({workload.definition for _, workload in kept}))
        known = len(found.workloads) - len(kept)
        note(
            f"kept {len(kept)} workloads, {known} exist already." + (f" Next: tilegym-db bench {names}" if kept else "")
        )
    if found.report.failed_proofs:
        raise typer.Exit(1)


def print_summary(report: PatchReport) -> None:
    """Print how many calls were proved or failed, and the sites that keep stock code."""
    proofs = [proof for site in report.sites for proof in site.proofs]
    proved, failed = sum(proof.holds for proof in proofs), len(report.failed_proofs)
    note(report.note or f"{proved} proved, {failed} failed, {len(proofs) - proved - failed} run stock code anyway")
    for site in report.sites:
        if site.reason:
            note(f"{site.module_class} x{site.modules} stays stock: {site.reason}")
        for way in site.own_code:
            note(f"{site.module_class} x{site.modules}: the model's own code is {way}")
