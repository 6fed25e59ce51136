"""``tilegym-db verify-model``: prove on a model's own numbers the kernels that a patch would put into it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tilegym_db.cli.formats import Wide
from tilegym_db.cli.options import ConfigFile, MachineGpu
from tilegym_db.cli.output import note, print_json, print_table

if TYPE_CHECKING:
    from tilegym_db.integrations.transformers.report import PatchReport


def command(
    config: ConfigFile,
    gpu: MachineGpu = "auto",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
    prompt: Annotated[int, typer.Option(help="Random tokens of each sequence; one more is decoded.")] = 128,
    layers: Annotated[int | None, typer.Option(help="Keep only the first so many layers.")] = None,
    capture: Annotated[
        bool, typer.Option("--capture", help="Keep the model's calls as workloads in your catalog.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    wide: Wide = False,
) -> None:
    """Patch a model with random weights, and compare each kernel with stock code on the calls that the model makes.

    Nothing is downloaded. Exit 1: a kernel is further from fp64 than stock allows, and a patch with verify=True leaves it out.
    """
    from tilegym_db.bench.machine import refuse_absent_gpu, select_machine

    refuse_absent_gpu(gpu)
    from tilegym_db.integrations.transformers.report import PROOF_COLUMNS
    from tilegym_db.integrations.transformers.verify_model import keep_workloads, model_tag, verify_model

    device = select_machine(gpu).device
    found = verify_model(config, device=device, dtype=dtype, batch=batch, prompt=prompt, layers=layers)
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
    """How many calls were tried and how they ended, and the sites that are left alone as a whole."""
    proofs = [proof for site in report.sites for proof in site.proofs]
    proved, failed = sum(proof.holds for proof in proofs), len(report.failed_proofs)
    note(f"{proved} proved, {failed} failed, {len(proofs) - proved - failed} run stock code anyway")
    for site in report.sites:
        if site.reason:
            note(f"{site.module_class} x{site.modules} stays stock: {site.reason}")
        for way in site.own_code:
            note(f"{site.module_class} x{site.modules}: the model's own code is {way}")
