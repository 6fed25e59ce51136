"""What verification costs: the screen tier against a run of the same Solutions without sandbox and without gates.

The ungated run does what a script of a kernel's author does: one process, inputs drawn once, a call that compiles, then as
many timed samples as the screen took, with the same timer. Both run on this machine, one after the other, over the same
workloads; start-up is part of both, and both begin with the compilers' caches empty, as in the first session on a machine. With
``--later`` ours begins with what it keeps between sessions (the compile cache of decision 0016), as in every later one.

    python benchmarks/screen_cost.py --gpu auto rms_norm softmax --workload 'stage:*'
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tilegym_db.bench.benchmark import benchmark
from tilegym_db.records import Trace

CACHES = ("TRITON_CACHE_DIR", "TILELANG_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH", "CUDA_TILE_CACHE_DIR")


def screen(names: list[str], gpu: str, workload: str | None, *, quick: bool, later: bool) -> tuple[float, list[Trace]]:
    """(seconds, traces) of the screen tier in a store of its own."""
    with tempfile.TemporaryDirectory() as folder:
        if not later:
            os.environ["XDG_CACHE_HOME"] = folder
        start = time.perf_counter()
        report = benchmark(tuple(names), gpu=gpu, workload=workload, quick=quick, store_home=Path(folder))
        return time.perf_counter() - start, report.traces


def ungated(pairs: list[dict[str, Any]], device: str) -> float:
    """Seconds that a plain process takes to call and time the same pairs."""
    command = [sys.executable, __file__, "--plain", device]
    with tempfile.TemporaryDirectory() as folder:
        empty = {"HOME": folder, "TMPDIR": folder, **{name: f"{folder}/{name.lower()}" for name in CACHES}}
        start = time.perf_counter()
        subprocess.run(command, input=json.dumps(pairs), text=True, check=True, env=os.environ | empty)
        return time.perf_counter() - start


def run_plain(pairs: list[dict[str, Any]], device: str) -> None:
    """Call and time every pair in this process."""
    import torch

    from tilegym_db.backends.load import load_entry
    from tilegym_db.backends.toolchains import prepare_environment
    from tilegym_db.backends.torch_dtypes import storage_dtype
    from tilegym_db.catalog import Catalog
    from tilegym_db.records import Workload
    from tilegym_db.records.case import Case
    from tilegym_db.sandbox.timing import BlockTimer
    from tilegym_db.verify.inputs import draw_inputs

    catalog, timer = Catalog.default(), BlockTimer(device)
    for pair in pairs:
        files = catalog.solution(pair["solution"])
        definition = catalog.definition(files.record.definition)
        prepare_environment(files.record.spec.language)
        entry = load_entry(files)
        workload: Workload = next(w for w in catalog.workloads_for(definition.name) if w.uuid == pair["workload"])
        case = Case.of_workload(definition, workload, distribution="normal", seed=1)
        arguments: list[Any] = []
        for name, value in draw_inputs(definition, case, device).items():
            if isinstance(value, torch.Tensor):
                strided = torch.empty_strided(
                    value.shape, case.strides(definition, name), dtype=value.dtype, device=device
                )
                value = strided.copy_(value)
            arguments.append(value)
        if files.record.spec.destination_passing_style:
            for name in definition.written_outputs:
                dtype = storage_dtype(definition.dtype_of(name, case.call.dtypes))
                shape, strides = definition.shape_of(name, case.call.axes), case.strides(definition, name)
                arguments.append(torch.empty_strided(shape, strides, dtype=dtype, device=device))
        call = lambda entry=entry, arguments=arguments: entry(*arguments)  # noqa: E731
        call()
        for _ in range(-(-pair["samples"] // 10)):
            timer.time([0] * 10, {0: call}, lambda index: None, lambda index, returned: None)


def main() -> int:
    """Run both and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--gpu", default="auto")
    parser.add_argument("--workload", default=None)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--later", action="store_true", help="begin with what is kept between sessions")
    parser.add_argument("--plain", metavar="DEVICE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.plain:
        run_plain(json.load(sys.stdin), options.plain)
        return 0
    seconds, traces = screen(options.names, options.gpu, options.workload, quick=options.quick, later=options.later)
    timed = [trace for trace in traces if trace.performance is not None]
    pairs = [
        {"solution": trace.solution, "workload": trace.workload_uuid, "samples": trace.performance.samples}
        for trace in timed
        if trace.performance is not None
    ]
    if not pairs:
        print("nothing was timed")
        return 1
    device = "cpu" if timed[0].gpu == "cpu" else "cuda:0"
    plain = ungated(pairs, device)
    samples = sum(pair["samples"] for pair in pairs)
    print(f"{len(pairs)} pairs, {samples} samples on {timed[0].gpu_name}")
    print(f"ungated, one process   {plain:8.1f} s   {60 * len(pairs) / plain:6.1f} pairs a minute")
    print(f"screen tier            {seconds:8.1f} s   {60 * len(pairs) / seconds:6.1f} pairs a minute")
    print(f"ratio                  {seconds / plain:8.2f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
