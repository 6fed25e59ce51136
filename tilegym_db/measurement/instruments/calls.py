"""The program that a tool attaches to. It calls Solutions on cases; each tensor has its own allocation of exactly its size.

Run it as ``python -m tilegym_db.measurement.instruments.calls REQUEST``, with ``PYTORCH_NO_CUDA_MEMORY_CACHING=1``. PyTorch's
caching allocator would hide writes beyond a tensor that stay within a cached block.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch

from tilegym_db.backends.load import load_entry
from tilegym_db.backends.toolchains import prepare_environment
from tilegym_db.catalog import Catalog, SolutionFiles
from tilegym_db.measurement.instruments.requests import SolutionCalls, marked_line, read_request
from tilegym_db.records import Definition
from tilegym_db.records.definition_parts import span_of
from tilegym_db.records.solution import narrowed
from tilegym_db.records.workload import Case
from tilegym_db.sandbox.shared_buffers import fill_tensor, storage_dtype
from tilegym_db.verification.inputs import BlobReader, draw_inputs

WARM_UP_CALLS = 3
_profiler: Any = torch.cuda.profiler  # has no annotations
STOPPED = 3
"""Exit status after a call that raised. The CUDA context may be lost, so this process makes no further calls."""


def arguments_of(definition: Definition, case: Case, device: str, blobs: BlobReader | None = None) -> dict[str, Any]:
    """Return all arguments of ``run`` by name.

    Inputs are copied from the host as whole allocations, gaps included; outputs are not initialised. So no other kernel
    runs on the device before the Solution, and a read of an output is a read of uninitialised memory.
    """
    given: dict[str, Any] = {}
    for name, value in draw_inputs(definition, case, "cpu", blobs=blobs).items():
        if isinstance(value, torch.Tensor):
            strides = case.strides(definition, name)
            flat = torch.zeros(span_of(value.shape, strides) + case.offset, dtype=value.dtype)
            fill_tensor(flat.as_strided(value.shape, strides, case.offset), value)
            value = flat.to(device).as_strided(value.shape, strides, case.offset)
        given[name] = value
    for name in definition.written_outputs:
        dtype = storage_dtype(definition.dtype_of(name, case.call.dtypes))
        shape, strides = definition.shape_of(name, case.call.axes), case.strides(definition, name)
        flat = torch.empty(span_of(shape, strides) + case.offset, dtype=dtype, device=device)
        given[name] = flat.as_strided(shape, strides, case.offset)
    return given


def run_solution(calls: SolutionCalls, device: str, *, profile: bool) -> None:
    """Call one Solution on each of its cases; print a marked line before each case and at the end."""
    started = time.monotonic()
    files = SolutionFiles.read(calls.record)
    if files.digest != calls.digest:
        raise SystemExit(f"the source of {calls.name} changed on disk during the run")
    catalog = Catalog.default()
    definition = narrowed(catalog.definition(calls.definition), files.record.spec.omits)
    blobs = BlobReader(catalog.roots)
    prepare_environment(files.record.spec.language)
    entry = load_entry(files)
    writes = files.record.spec.destination_passing_style
    names = (*definition.inputs, *(definition.written_outputs if writes else ()))
    for number, case in enumerate(calls.cases):
        print(marked_line("case", calls.name, number=number), flush=True)
        given = arguments_of(definition, case, device, blobs)
        arguments = [given[name] for name in names]
        if profile:
            for _ in range(WARM_UP_CALLS):
                entry(*arguments, **calls.config)
            _synchronize(device)
            _profiler.start()
        entry(*arguments, **calls.config)
        _synchronize(device)
        if profile:
            _profiler.stop()
    print(marked_line("done", calls.name, seconds=round(time.monotonic() - started, 3)), flush=True)


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


def main() -> int:
    """Make all calls of the request named on the command line."""
    device, every, profile = read_request(Path(sys.argv[1]))
    for calls in every:
        try:
            with torch.no_grad():
                run_solution(calls, device, profile=profile)
        except Exception as error:  # an error of the kernel: print it for the reader of the output
            print(marked_line("error", calls.name, what=f"{type(error).__name__}: {error}"[:2000]), flush=True)
            return STOPPED
    return 0


if __name__ == "__main__":
    sys.exit(main())
