"""``tilegym-db demo``: the main job from end to end, on whatever machine this is, in two or three minutes.

Its results go into a home of its own, so that it can be run again and changes nothing else.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilegym_db.cli.demo_kernel import add_demo_kernel, publish_here
from tilegym_db.cli.demo_model import REFERENCE_GPU, foresee, patch_a_model
from tilegym_db.cli.demo_output import heartbeat, say, step
from tilegym_db.cli.output import print_table

if TYPE_CHECKING:
    from tilegym_db.bench.machine import Machine

TOKENS = 16
OPERATORS = ("rms_norm", "fused_add_rms_norm", "swiglu", "rope_neox")
"""What the patched model consists of, apart from matrix products and attention."""

SHIPPED = """
    SELECT definition, solution, language, round(latency_us, 1) AS us, round(latency_us * speedup, 1) AS stock_us,
           round(speedup, 2) AS speedup
    FROM best WHERE gpu = $gpu AND dtypes_key = 'T=bfloat16' AND speedup IS NOT NULL AND definition IN $names
    QUALIFY row_number() OVER (PARTITION BY definition ORDER BY abs(ln(latency_us / 50)), axes_key) = 1
    ORDER BY definition
"""


def command(
    tokens: Annotated[int, typer.Option(help="Prompt length of the model.", min=2, max=4096)] = TOKENS,
) -> None:
    """Show the whole of tilegym-db on this machine in two or three minutes."""
    from tilegym_db.bench.machine import select_machine

    started = time.monotonic()
    say("tilegym-db demo: database, verifier, compilers, resolver and a patched model.")
    folder = own_home()
    with heartbeat("looking at this machine"):
        machine = select_machine("auto")
    say(f"This machine: {machine.gpu_name} ({machine.gpu}). Results of this demo go to {folder}.")
    failed = ask_shipped() + prove_a_definition() + compile_for_hopper()
    failed += measure(machine, folder, tokens)
    failed += patch_a_model(machine, tokens)
    foresee(tokens)
    step("next", f"The demo took {time.monotonic() - started:.0f} s.")
    say("tilegym-db list                                  what is in the catalog")
    say("tilegym-db best rms_norm --gpu h200              the fastest verified kernel per shape")
    say("tilegym-db new definition my_op                  an operator of your own: docs/how-to/add-an-operator.md")
    say("tilegym-db doctor                                what works on this machine, and how to fix what does not")
    if failed:
        raise typer.Exit(1)


def own_home() -> Path:
    """A folder under the user's home of this package that everything below reads and writes."""
    from tilegym_db.paths import HOME_VARIABLE, home

    folder = home() / "demo"
    folder.mkdir(parents=True, exist_ok=True)
    os.environ[HOME_VARIABLE] = str(folder)
    return folder


# -- the parts ---------------------------------------------------------------------------------------------------------


def ask_shipped() -> int:
    """1. What ships: measurements of an H200."""
    from tilegym_db.store.sql import run_user_query

    step(
        "1. ask the database",
        "Verified measurements of an H200 come with the package. Here is the fastest verified\n"
        "kernel for each operator of a Llama, beside the model's own PyTorch code (stock_us),\n"
        "at the size that takes it about 50 us:",
    )
    with heartbeat("loading the shipped measurements into DuckDB"):
        answer = run_user_query(SHIPPED, {"gpu": REFERENCE_GPU, "names": list(OPERATORS)})
    print_table(answer.columns, answer.rows)
    return 0 if answer.rows else 1


def prove_a_definition() -> int:
    """2. Why a verdict can be believed: an operator is admitted only if planted mistakes are caught."""
    from tilegym_db.catalog import Catalog

    step(
        "2. check an operator",
        "A definition is a PyTorch reference with a proof: another formulation must agree\n"
        "with it, and planted mistakes must be caught. Only then can it judge kernels.",
    )
    catalog = Catalog.default()
    definition = catalog.definition("rms_norm")
    with heartbeat("running the self-test of rms_norm"):
        from tilegym_db.verify.self_test import self_test, tiny_workloads

        findings = self_test(definition, tiny_workloads(definition, catalog.workloads_for("rms_norm")))
    assert definition.self_test is not None
    for planted in definition.self_test.planted_errors:
        say(f"   caught: {planted.why}")
    for finding in findings:
        say(f"   NOT caught: {finding}")
    say(f"rms_norm: {len(findings)} findings")
    return len(findings)


def compile_for_hopper() -> int:
    """3. Writing kernels needs no GPU: three languages compile for one."""
    from tilegym_db.catalog import Catalog
    from tilegym_db.cli.compile import compile_catalog, failure_count, print_outcomes

    step(
        "3. compile without a GPU",
        "One kernel in each language, compiled for an H200 (sm_90): kernels can be written\nand compiled on a laptop.",
    )
    with heartbeat("compiling rms_norm in Triton, TileLang and cuTile"):
        outcomes = compile_catalog(Catalog.default(), ("rms_norm",), ("sm_90",))
    print_outcomes(outcomes)
    return failure_count(outcomes)


def measure(machine: Machine, folder: Path, tokens: int) -> int:
    """4. A verdict on this machine, published for the resolver."""
    from tilegym_db.bench.benchmark import benchmark
    from tilegym_db.bench.tier_policy import MIN_SANDBOX_LEVEL
    from tilegym_db.catalog import Catalog
    from tilegym_db.cli.bench import print_summary
    from tilegym_db.cli.bench_progress import Progress
    from tilegym_db.verify.worker.process import best_level

    if machine.is_gpu:
        step(
            "4. verify and time",
            f"The norms of a Llama on {machine.gpu_name}: screened, then verified for good in confined processes.",
        )
        names: tuple[str, ...] = ("rms_norm", "fused_add_rms_norm")
        workload = None
    else:
        step(
            "4. verify and time",
            "No GPU here, so the kernel is PyTorch code for a CPU: an RMSNorm that works in\n"
            "place, against the model's own code. First it is screened; then it is verified for\n"
            "good, in a confined process, with secret seeds, 24 fuzzed cases and the\n"
            "supervisor's own clock. A kernel that fails any of this never reaches a model.",
        )
        add_demo_kernel(folder / "catalog", tokens)
        names, workload = ("rms_norm_demo",), "stage:demo"
    with heartbeat("trying how well a worker can be confined here"):
        sandbox = best_level(machine.device)
        promote = sandbox.level >= MIN_SANDBOX_LEVEL
    if not promote:
        say(f"No promotion, so nothing will count as verified: {'; '.join(sandbox.reasons)}")
    with heartbeat("verifying and timing"), Progress() as progress:
        report = benchmark(
            names, gpu=machine.gpu, workload=workload, quick=machine.is_gpu, again=True, promote=promote,
            catalog=Catalog.default(), observer=progress.observer(),
        )  # fmt: skip
    print_summary(report)
    publish_here(machine, folder)
    return sum(count for status, count in report.counts.items() if status not in ("PASSED", "UNSUPPORTED"))
