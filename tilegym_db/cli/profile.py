"""``tilegym-db profile``: Nsight Compute over one call of a solution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from tilegym_db.cli.completion import complete_name
from tilegym_db.cli.options import MachineGpu
from tilegym_db.cli.output import note, print_json, print_table
from tilegym_db.cli.pairs import parse_tunables

if TYPE_CHECKING:
    from tilegym_db.bench.instruments.profiler_report import KernelProfile

STALLS_SHOWN = 6


def command(
    name: Annotated[str, typer.Argument(help="The solution.", metavar="SOLUTION", autocompletion=complete_name)],
    workload: Annotated[
        str, typer.Option(help="Glob over uuid, axes (M=1,*) and tags; of several matches the largest.")
    ],
    config: Annotated[list[str] | None, typer.Option(help="Tunables: BLOCK_M=2.", metavar="NAME=VALUE,...")] = None,
    gpu: MachineGpu = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print every metric as JSON.")] = False,
) -> None:
    """Profile one call with Nsight Compute: bandwidth, occupancy, registers, and what the warps waited for.

    Metrics are kept as JSON beside the store, one file for each source, workload and GPU. Times are at the clocks of that
    moment, with cold caches and kernel by kernel: they explain a time of bench, and are none. Exit status 2
    where Nsight Compute is not installed.
    """
    from tilegym_db.bench.machine import refuse_absent_gpu

    refuse_absent_gpu(gpu)
    from tilegym_db.bench.instruments.profile import profile
    from tilegym_db.cli.programs import needing_program

    tunables = parse_tunables("--config", config)
    with needing_program("ncu"):
        found, path = profile(name, workload=workload, config=tunables, gpu=gpu)
    if as_json:
        print_json(found.to_dict())
    else:
        axes = ", ".join(f"{axis}={size}" for axis, size in found.axes.items())
        typer.echo(f"{found.solution} at {axes} on {found.gpu}")
        print_kernels(found.kernels)
    note(f"stored in {path}")


def print_kernels(kernels: Sequence[KernelProfile]) -> None:
    """One row a kernel, and below it the reasons for which its warps waited."""
    columns = ("kernel", "us", "GB/s", "DRAM %", "SM %", "occupancy %", "of", "registers", "shared B", "grid", "block")
    names = (
        "dram_share", "sm_share", "occupancy", "occupancy_limit", "registers", "shared_bytes", "grid", "block",
    )  # fmt: skip
    rows = [
        (
            kernel.kernel,
            kernel.time_us,
            None if kernel.bytes_per_s is None else kernel.bytes_per_s / 1e9,
            *(kernel.metrics.get(name) for name in names),
        )
        for kernel in kernels
    ]
    print_table(columns, rows, least=("grid", "block", "SM %"))
    for kernel in kernels:
        stalls = list(kernel.stalls.items())[:STALLS_SHOWN]
        if stalls:
            said = ", ".join(f"{reason.replace('_', ' ')} {warps:.2f}" for reason, warps in stalls)
            typer.echo(f"{kernel.kernel}: warps waiting at each issue: {said}")
