"""``tilegym-db demo``: show the main features on this machine in two or three minutes.

Its results go into a separate home folder, so it can be repeated and changes nothing else.
"""

from __future__ import annotations

import json
import os
import shlex
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilegym_db.cli.kit.output import print_table, table_width
from tilegym_db.errors import NotFoundError

if TYPE_CHECKING:
    from tilegym_db.catalog import Catalog
    from tilegym_db.measurement.machine import Machine


TOKENS = 16
OPERATORS = ("rms_norm", "fused_add_rms_norm", "swiglu", "rope_neox")
"""The operators of the patched model, apart from matrix products and attention."""

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
    """Show the main features of tilegym-db on this machine in two or three minutes."""
    from tilegym_db.measurement.machine import select_machine

    started = time.monotonic()
    say("tilegym-db demo: database, verifier, compilers, resolver and a patched model.")
    folder = own_home()
    with heartbeat("inspecting this machine"):
        machine = select_machine("auto")
    say(f"This machine: {machine.gpu_name} ({machine.gpu}). Results of this demo go to {folder}.")
    failed = ask_shipped() + prove_a_definition() + compile_for_hopper()
    failed += measure(machine, folder, tokens)
    failed += patch_a_model(machine, tokens)
    foresee(tokens)
    step("next", f"The demo took {time.monotonic() - started:.0f} s.")
    say("tilegym-db list                                  what is in the catalog")
    say("tilegym-db best rms_norm --gpu h200              the fastest verified kernel per shape")
    say("tilegym-db new definition my_op                  add your own operator: docs/how-to/add-an-operator.md")
    say("tilegym-db doctor                                what works on this machine, and how to fix what does not")
    say("The commands above use your own store. What this demo measured is in a separate one:")
    say(f"TILEGYM_DB_HOME={shlex.quote(str(folder))} tilegym-db best --gpu {machine.gpu}")
    if failed:
        raise typer.Exit(1)


def own_home() -> Path:
    """Create the demo's home folder and make it the home of this process."""
    from tilegym_db.paths import HOME_VARIABLE, home

    folder = home() / "demo"
    folder.mkdir(parents=True, exist_ok=True)
    os.environ[HOME_VARIABLE] = str(folder)
    return folder


# -- the parts ---------------------------------------------------------------------------------------------------------


def ask_shipped() -> int:
    """Query the shipped measurements of an H200 (step 1)."""
    from tilegym_db.store.opening import run_user_query

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
    """Run the self-test of an operator (step 2). It is admitted only if planted errors are caught."""
    from tilegym_db.catalog import Catalog

    step(
        "2. check an operator",
        "A definition is a PyTorch reference with a proof: another formulation must agree\n"
        "with it, and planted mistakes must be caught. Only then can it judge kernels.",
    )
    catalog = Catalog.default()
    definition = catalog.definition("rms_norm")
    with heartbeat("running the self-test of rms_norm"):
        from tilegym_db.verification.self_test import self_test, tiny_workloads

        findings = self_test(definition, tiny_workloads(definition, catalog.workloads_for("rms_norm")))
    assert definition.self_test is not None
    for planted in definition.self_test.planted_errors:
        say(f"   caught: {planted.why}")
    for finding in findings:
        say(f"   NOT caught: {finding}")
    say(f"rms_norm: {len(findings)} findings")
    return len(findings)


def compile_for_hopper() -> int:
    """Compile kernels in three languages without a GPU (step 3)."""
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
    """Verify and time kernels on this machine, and publish them for the resolver (step 4)."""
    from tilegym_db.catalog import Catalog
    from tilegym_db.cli.bench import print_summary
    from tilegym_db.cli.kit.progress import Progress
    from tilegym_db.measurement.benchmark import bench
    from tilegym_db.sandbox.worker import best_level
    from tilegym_db.verification.worker_handle import MIN_SANDBOX_LEVEL

    if machine.is_gpu:
        step(
            "4. verify and time",
            f"The norms of a Llama on {machine.gpu_name}: screened, then fully verified in confined processes.",
        )
        names: tuple[str, ...] = ("rms_norm", "fused_add_rms_norm")
        workload = None
    else:
        step(
            "4. verify and time",
            "No GPU here, so the kernel is PyTorch code for a CPU: an RMSNorm that works in\n"
            "place, against the model's own code. First it is screened; then it is fully\n"
            "verified in a confined process, with secret seeds, 24 fuzzed cases and the\n"
            "supervisor's own clock. A kernel that fails any of this never reaches a model.",
        )
        add_demo_kernel(folder / "catalog", tokens)
        names, workload = ("rms_norm_demo",), "stage:demo"
    with heartbeat("testing the sandbox of this machine"):
        sandbox = best_level(machine.device)
        verify = sandbox.level >= MIN_SANDBOX_LEVEL
    if not verify:
        say(f"Nothing will count as verified: {'; '.join(sandbox.reasons)}")
    with heartbeat("verifying and timing"), Progress() as progress:
        report = bench(
            names, devices=machine.gpu, workload=workload, quick=machine.is_gpu, force=True, verify=verify,
            catalog=Catalog.default(), observer=progress.observer(),
        )  # fmt: skip
    print_summary(report)
    publish_here(machine, folder)
    return sum(count for status, count in report.counts.items() if status not in ("PASSED", "UNSUPPORTED"))


# ---- Model ----------------------------------------------------------------------------------------------

REFERENCE_GPU = "h200"


def patch_a_model(machine: Machine, tokens: int) -> int:
    """Patch a model, so that it runs verified kernels where they are faster (step 5)."""
    import torch

    from tilegym_db.catalog import Catalog

    step(
        "5. patch a model",
        "A Llama of two layers with random weights. tilegym_db.patch(model) lets verified\n"
        "kernels serve its calls. What is not verified or not faster on this machine stays\n"
        "the model's own code, and the report says why.",
    )
    with heartbeat("loading transformers and building the model"):
        from tilegym_db.models import patched

        dtype = torch.bfloat16 if machine.is_gpu else torch.float32
        model = build_llama().to(device=machine.device, dtype=dtype)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, model.config.vocab_size, (1, tokens), generator=generator).to(machine.device)
    ops = None if machine.is_gpu else ("rms_norm",)
    with heartbeat("running the model, stock and patched"), torch.no_grad():
        stock = model(ids).logits
        with patched(model, catalog=Catalog.default(), ops=ops) as handle:
            logits = model(ids).logits
            report = handle.report()
        again = model(ids).logits
    say(report.text(table_width()))
    error = float((logits.float() - stock.float()).norm() / stock.float().norm())
    say(
        f"{report.kernel_calls} calls ran a verified kernel. Patched logits against stock: relative difference {error:.1e}."
    )
    say(f"After unpatching, the model gives its own logits bit for bit: {torch.equal(stock, again)}.")
    if not report.kernel_calls:
        say("No kernel was faster than the model's own code by more than the noise of this machine, so none is used.")
    return 0 if torch.equal(stock, again) else 1


def foresee(tokens: int) -> None:
    """Show which kernels the same model would use on an H200, from the shipped measurements (step 6)."""
    from tilegym_db.catalog import Catalog

    step(
        "6. the same model on an H200",
        "What each call of that model runs on an H200 in bfloat16, by the shipped\n"
        "measurements: time of the kernel, and speedup over the model's own code. A call of\n"
        "one token is a step of decoding.",
    )
    with heartbeat("asking the resolver"):
        rows = explain_sites(build_config(), Catalog.default(), tokens=4096)
    print_table(("definition", "call", "runs", "us", "speedup"), rows)


def build_config() -> Any:
    """Return the config of Llama-3.2-1B with two layers and a small vocabulary."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=4096,
        hidden_size=HIDDEN,
        intermediate_size=8192,
        num_hidden_layers=2,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
    )


def build_llama() -> Any:
    """Build a Llama of :func:`build_config` with random weights."""
    import torch
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(build_config())
    return model.eval()


def explain_sites(config: Any, catalog: Catalog, *, tokens: int) -> list[tuple[Any, ...]]:
    """Return the resolver's choice for each call site of such a model, for one prompt and for one new token, as table rows."""
    from tilegym_db.records.call import Call
    from tilegym_db.resolver.resolve import decide_request, make_request

    heads = {"Hq": config.num_attention_heads, "Hkv": config.num_key_value_heads, "D": config.head_dim}
    transposed = {name: "row_contiguous" for name in ("q", "k", "q_out", "k_out")}
    rows: list[tuple[Any, ...]] = []
    for count in (tokens, 1):
        sites: list[tuple[str, dict[str, int], dict[str, str]]] = [
            ("rms_norm", {"M": count, "N": config.hidden_size}, {}),
            ("fused_add_rms_norm", {"M": count, "N": config.hidden_size}, {}),
            ("swiglu", {"M": count, "I": config.intermediate_size}, {}),
            ("rope_neox", {"B": 1, "Bc": 1, "S": count, **heads}, transposed if count > 1 else {}),
        ]
        for name, axes, layouts in sites:
            definition = catalog.definition(name)
            request = make_request(definition, Call(name, axes, {"T": "bfloat16"}, layouts), gpu=REFERENCE_GPU)
            decision, _ = decide_request(request, catalog)
            chosen = "stock" if decision.solution is None else decision.solution.name
            found = decision.evidence.candidate
            measured = (None, None) if found is None else (found.latency_us, found.speedup)
            rows.append((name, f"{count} token" + ("s" if count > 1 else ""), chosen, *measured))
    return rows


# ---- Kernel and published table -------------------------------------------------------------------------

KERNEL = '''"""RMSNorm in float32 without temporaries: the norm of each row at once, and two products in place."""

import torch


def run(x, weight, eps, out):
    """x, out [M, N], weight [N]."""
    scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    scale.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    torch.mul(x, scale, out=out)
    out.mul_(weight)
'''

KERNEL_RECORD = {
    "schema_version": 1,
    "name": "rms_norm_demo",
    "definition": "rms_norm",
    "author": "tilegym-db demo",
    "description": "PyTorch on a CPU, in place.",
    "spec": {
        "language": "python",
        "entry_point": "kernel.py::run",
        "destination_passing_style": True,
        "dependencies": ["torch>=2.8"],
        "dtypes": {"T": ["float32"]},
        "layouts": {"x": "row_contiguous", "out": "row_contiguous"},
    },
    "sources": [{"path": "kernel.py"}],
}

HIDDEN = 2048


def add_demo_kernel(catalog: Path, tokens: int) -> None:
    """Add the CPU kernel and the sizes of the demo's model to the demo's catalog."""
    from tilegym_db.catalog import Catalog, writers
    from tilegym_db.files import write_atomically
    from tilegym_db.records import Workload

    folder = catalog / "solutions" / "norm" / "rms_norm" / "rms_norm_demo"
    write_atomically(folder / "kernel.py", KERNEL.encode())
    write_atomically(folder / "solution.json", (json.dumps(KERNEL_RECORD, indent=2) + "\n").encode())
    sizes = [
        Workload.from_dict(
            {
                "definition": "rms_norm",
                "axes": {"M": tokens, "N": HIDDEN},
                "dtypes": {"T": "float32"},
                "inputs": {"eps": {"type": "scalar", "value": 1e-6}},
                "tags": ["stage:demo"],
            }
        )
    ]
    writers.add_workloads(Catalog.default(), sizes, root=catalog)


def publish_here(machine: Machine, folder: Path) -> None:
    """Publish the verified kernels for the resolver of this demo."""
    from tilegym_db.store.opening import open_store
    from tilegym_db.store.publish import publish

    published = folder / "published"
    if not published.exists():
        (folder / "traces").mkdir(exist_ok=True)
        published.symlink_to("traces", target_is_directory=True)
    try:
        with open_store(folder, read_only=True) as store:
            report = publish(store, machine.gpu, root=folder)
    except NotFoundError as error:
        say(f"Nothing was published: {error}")
        return
    say(f"Published {report.entries} shapes for {machine.gpu}: from now on the resolver of this demo may use them.")


# ---- Output ---------------------------------------------------------------------------------------------


def say(text: str) -> None:
    """Print one line to standard output."""
    typer.echo(text)


def step(title: str, why: str) -> None:
    """Print the title of a step and its explanation."""
    say(f"\n== {title}\n{why}\n")


@contextmanager
def heartbeat(what: str, every_s: float = 3.0) -> Iterator[None]:
    """Print every few seconds that a step is still running, also into a pipe."""
    done, began = threading.Event(), time.monotonic()

    def beat() -> None:
        while not done.wait(every_s):
            say(f"   ... {what}, {time.monotonic() - began:.0f} s")

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
