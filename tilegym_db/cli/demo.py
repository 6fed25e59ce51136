"""``tilegym-db demo``: the main job from end to end, on whatever machine this is.

Checks the catalog, compiles every tile kernel for sm_90, benches the core operators, asks the database for the fastest kernel
per operator, and runs a patched random-weight Llama against its stock self.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

if TYPE_CHECKING:
    from tilegym_db.bench.machine import Machine
    from tilegym_db.catalog import Catalog

BEST_PER_OP = """\
SELECT definition, arg_min(solution, latency_us) AS fastest, arg_min(language, latency_us) AS language,
       arg_min(axes_key, latency_us) AS axes, round(min(latency_us), 1) AS us, round(arg_min(speedup, latency_us), 2) AS vs_stock
FROM best
WHERE gpu = '{gpu}' AND axes_key = (
    SELECT arg_max(inner_best.axes_key, inner_best.latency_us) FROM best AS inner_best
    WHERE inner_best.gpu = best.gpu AND inner_best.definition = best.definition)
GROUP BY definition ORDER BY definition"""

REFERENCE_GPU = "h200"


SHOWN = ("rms_norm", "fused_add_rms_norm", "swiglu", "rope_neox")
"""The operators of the model that is patched at the end; all of them would take a CPU a quarter of an hour."""


def command(
    target: Annotated[str, typer.Option(help="Compile target of the tile kernels.")] = "sm_90",
    tokens: Annotated[int, typer.Option(help="Prompt length of the model.")] = 128,
) -> None:
    """Show the whole of tilegym-db on this machine in a few minutes."""
    from tilegym_db.bench.machine import select_machine
    from tilegym_db.catalog import Catalog
    from tilegym_db.paths import home

    console = Console()
    catalog, machine = Catalog.default(), select_machine("auto")
    failed = _check(console, catalog) + _compile(console, catalog, target)
    failed += _bench(console, machine)
    for gpu in dict.fromkeys((machine.gpu, REFERENCE_GPU)):
        _ask(console, gpu)
    _model(console, catalog, machine.device, tokens)
    console.rule("[bold]next")
    console.print(f"database: {home() / 'tilegym.duckdb'}", highlight=False, soft_wrap=True)
    console.print(
        'try: tilegym-db sql "SELECT * FROM leaderboard"   tilegym-db show rms_norm   tilegym-db doctor',
        highlight=False,
    )
    if failed:
        raise typer.Exit(1)


def _step(console: Console, title: str) -> float:
    console.rule(f"[bold]{title}")
    return time.monotonic()


def _check(console: Console, catalog: Catalog) -> int:
    from tilegym_db.cli.check import check_catalog

    started = _step(console, "1. check the catalog")
    findings = check_catalog(catalog, ())
    for finding in findings:
        console.print(f"[red]{finding}", highlight=False)
    console.print(
        f"{len(catalog.definitions)} definitions, {len(catalog.solutions)} solutions, "
        f"{sum(1 for _ in catalog.all_workloads())} workloads: {len(findings)} findings "
        f"({time.monotonic() - started:.0f} s)",
        highlight=False,
    )
    return len(findings)


def _compile(console: Console, catalog: Catalog, target: str) -> int:
    from tilegym_db.cli.compile import compile_catalog, failure_count, print_outcomes

    started = _step(console, f"2. compile every tile kernel for {target}, without a GPU")
    results = compile_catalog(catalog, (), (target,))
    print_outcomes(results)
    console.print(f"({time.monotonic() - started:.0f} s)")
    return failure_count(results)


def _bench(console: Console, machine: Machine) -> int:
    from tilegym_db.bench.rigor import MIN_SANDBOX_LEVEL
    from tilegym_db.bench.session import benchmark
    from tilegym_db.cli.bench import print_summary
    from tilegym_db.cli.bench_progress import Progress
    from tilegym_db.verify.sandbox.process import best_level

    _step(console, f"3. screen {', '.join(SHOWN)} on {machine.gpu}, then promote what passed")
    sandbox = best_level(machine.device)
    promote = sandbox.level >= MIN_SANDBOX_LEVEL
    if not promote:
        console.print(f"no promotion, so nothing counts as verified: {'; '.join(sandbox.reasons)}", highlight=False)
    with Progress() as progress:
        report = benchmark(SHOWN, gpu=machine.gpu, quick=True, promote=promote, observer=progress.observer())
    print_summary(report)
    return sum(count for status, count in report.counts.items() if status not in ("PASSED", "UNSUPPORTED"))


def _ask(console: Console, gpu: str) -> None:
    from tilegym_db.cli.output import print_table
    from tilegym_db.store.sql import run_user_query

    _step(console, f"4. fastest verified kernel per operator on {gpu}, at its largest shape")
    query = BEST_PER_OP.format(gpu=gpu)
    console.print(query, style="dim", highlight=False)
    answer = run_user_query(query)
    print_table(answer.columns, answer.rows)


def _model(console: Console, catalog: Catalog, device: str, tokens: int) -> None:
    import torch

    from tilegym_db.cli.output import print_table
    from tilegym_db.integrations.transformers import patched

    _step(console, "5. a random-weight Llama, patched")
    model = build_llama().to(device=device, dtype=torch.bfloat16)
    ids = torch.randint(0, model.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0)).to(device)
    with torch.no_grad():
        stock = model(ids).logits
        with patched(model, catalog=catalog) as handle:
            logits = model(ids).logits
            typer.echo(str(handle.report()))
        again = model(ids).logits
    error = float((logits.float() - stock.float()).norm() / stock.float().norm())
    console.print(
        f"patched logits against stock: relative difference {error:.2e}; after unpatch identical: {torch.equal(stock, again)}",
        highlight=False,
    )
    _step(console, f"6. what the same call sites would get on an {REFERENCE_GPU}")
    columns = ("definition", "call", "solution", "evidence")
    print_table(columns, explain_sites(model.config, catalog, tokens=4096))


def build_llama(layers: int = 2) -> Any:
    """A Llama with random weights at the sizes of Llama-3.2-1B, cut to a few layers and a small vocabulary."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
    )
    model: Any = LlamaForCausalLM(config)
    return model.eval()


def explain_sites(config: Any, catalog: Catalog, *, tokens: int) -> list[tuple[str, str, str, str]]:
    """What the resolver gives each call site of such a model, for one prompt and for one new token: rows of a table."""
    from tilegym_db.resolver import decide_request, make_request

    heads = {"Hq": config.num_attention_heads, "Hkv": config.num_key_value_heads, "D": config.head_dim}
    transposed = {name: "row_contiguous" for name in ("q", "k", "q_out", "k_out")}
    rows: list[tuple[str, str, str, str]] = []
    for count in (tokens, 1):
        sites: list[tuple[str, dict[str, int], dict[str, str]]] = [
            ("rms_norm", {"M": count, "N": config.hidden_size}, {}),
            ("swiglu", {"M": count, "I": config.intermediate_size}, {}),
            ("rope_neox", {"B": 1, "Bc": 1, "S": count, **heads}, transposed if count > 1 else {}),
        ]
        for name, axes, layouts in sites:
            definition = catalog.definition(name)
            request = make_request(definition, axes=axes, dtypes={"T": "bfloat16"}, layouts=layouts, gpu=REFERENCE_GPU)
            decision, _ = decide_request(request, catalog)
            chosen = "stock" if decision.solution is None else decision.solution.name
            sizes = " ".join(f"{axis}={size}" for axis, size in axes.items())
            rows.append((name, sizes, chosen, decision.evidence.reason))
    return rows
