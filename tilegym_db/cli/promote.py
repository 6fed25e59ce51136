"""``tilegym-db promote``: verify solutions for good."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from tilegym_db.cli.options import Executor, Gpus, MachineGpu, Names, WorkloadGlob


def command(
    names: Names = None,
    language: Annotated[
        str | None, typer.Option(help="Only solutions in this language, and those that they are compared with.")
    ] = None,
    gpu: MachineGpu = "auto",
    gpus: Gpus = None,
    executor: Executor = None,
    workload: WorkloadGlob = None,
    quick: Annotated[bool, typer.Option(help="Few workloads and samples.")] = False,
    again: Annotated[bool, typer.Option(help="Promote anew what has a verdict already.")] = False,
    allow_unsandboxed: Annotated[
        bool, typer.Option(help="Promote where workers cannot be confined; such traces are never published.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the traces as JSON lines.")] = False,
) -> None:
    """Run the promotion tier: only what passes it is verified, and used by best, the resolver and patched models.

    Fresh confined processes, fresh secrets, all fuzz cases, five runs bit for bit, ownership of the device time,
    and a time that the harness's own clock agrees with.
    """
    from tilegym_db.bench.machine import refuse_absent_gpu
    from tilegym_db.cli.known_names import refuse_unknown_names

    refuse_absent_gpu(gpu, gpus, executor)
    refuse_unknown_names(names or ())
    from tilegym_db.bench.benchmark import promote
    from tilegym_db.cli.bench import finish
    from tilegym_db.cli.bench_progress import Progress

    with Progress(quiet=as_json and not sys.stderr.isatty()) as progress:
        report = promote(
            tuple(names or ()),
            gpu=gpu,
            gpus=gpus,
            executor=executor,
            language=language,
            workload=workload,
            quick=quick,
            again=again,
            allow_unsandboxed=allow_unsandboxed,
            observer=progress.observer(),
        )
    finish(report, as_json=as_json)
