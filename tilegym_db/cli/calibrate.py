"""``tilegym-db calibrate``: measure what the GPU of this machine can do at most."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tilegym_db.cli.output import note, print_json, print_table

if TYPE_CHECKING:
    from tilegym_db.records.peaks import GpuPeaks, Measured

# Operands of the products that are not called after theirs; those that stay in float32 use no tensor cores.
_OPERANDS = {"tf32": "float32", "float32": None}


def command(
    gpu: Annotated[str, typer.Option(help="auto, or the GPU in this machine (h100, h200, ...).")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the record as JSON.")] = False,
) -> None:
    """Measure the peaks of this GPU, which speed-of-light ratios are taken against, and store them.

    Takes a few seconds. Traces that exist keep the ratio that they were written with.
    """
    from tilegym_db.bench.machine import refuse_absent_gpu, select_machine

    refuse_absent_gpu(gpu)
    from tilegym_db.bench.calibrate import calibrate
    from tilegym_db.store.peaks_files import save_peaks

    peaks = calibrate(select_machine(gpu))
    path = save_peaks(peaks)
    if as_json:
        print_json(peaks.to_dict())
    else:
        print_peaks(peaks)
    note(f"stored in {path}")


def print_peaks(peaks: GpuPeaks) -> None:
    """One row per peak: what was measured, how far the rounds lay apart, how, and the most that the driver admits to."""
    from tilegym_db.records.roofline import product_ceiling

    bus = peaks.memory_ceiling_bytes_per_s / 1e12
    rows: list[tuple[str, Measured, float, float | None]] = [("copy, TB/s", peaks.copy_bytes_per_s, 1e12, bus)]
    if peaks.read_bytes_per_s is not None:
        rows.append(("read, TB/s", peaks.read_bytes_per_s, 1e12, bus))
    for dtype, measured in peaks.flops.items():
        ceiling = product_ceiling(_OPERANDS.get(dtype, dtype), peaks)
        rows.append((f"{dtype} product, TFLOP/s", measured, 1e12, ceiling / 1e12 if ceiling else None))
    rows.append(("launch, us", peaks.launch_us, 1, None))
    rows.append(("no launch, us", peaks.no_launch_us, 1, None))
    typer.echo(f"{peaks.gpu_name} ({peaks.gpu}, {peaks.sm}), driver {peaks.driver}, CUDA {peaks.cuda}")
    print_table(
        least=("at most",),
        prose=("how",),
        columns=("peak", "measured", "spread", "at most", "how"),
        rows=[
            (name, measured.value / unit, f"{measured.spread:.1%}", ceiling, measured.how)
            for name, measured, unit, ceiling in rows
        ],
    )
