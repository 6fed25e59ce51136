"""Shows that a tile solution does its own work: the kernels that run on the GPU while it is called, by name.

Each solution is called once per dtype it declares, at a prime number of rows and at sizes that are no power of two, under
``torch.profiler``. A kernel counts as its own if it bears the name of a function in the solution's sources; anything else
(PyTorch's element-wise kernels, a library's, a copy) is a finding. Clearing memory is allowed.

Run it through ``python benchmarks/model_hits.py --profile``.
"""

from __future__ import annotations

import ast
import fnmatch
import itertools
import json
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from tilegym_db.backends.load import load_entry
from tilegym_db.catalog import Catalog, SolutionFiles
from tilegym_db.errors import HardwareError
from tilegym_db.records import Definition
from tilegym_db.records.solution import TILE_LANGUAGES
from tilegym_db.resolver.device import default_gpu
from tilegym_db.verify.inputs import Case, draw_inputs
from tilegym_db.verify.torch_dtypes import storage_dtype

__all__ = ["bound_call", "declared_cases", "device_activities", "foreign_kernels", "function_names", "profile_catalog"]

# Size of each axis, by its name in the Definitions. 1009, 127 and 7 are prime; 1003 breaks 16-byte alignment.
_HEADS = {"B": 3, "Hq": 6, "Hkv": 3, "D": 96, "Bc": 1}
CASES: dict[str, dict[str, int]] = {
    "many rows": {"M": 1009, "N": 1000, "I": 1000, "K": 1000, **_HEADS, "S": 127},
    "few rows": {"M": 7, "N": 1000, "I": 1000, "K": 1000, **_HEADS, "S": 1},
    "unaligned": {"M": 1009, "N": 1003, "I": 1003, "K": 1003, **_HEADS, "S": 127, "D": 90},
}


DEVICE_ACTIVITIES = ("kernel", "gpu_memcpy", "gpu_memset")


def function_names(solution: SolutionFiles) -> set[str]:
    """Every function that the solution's sources define, nested ones included."""
    trees = (ast.parse(source) for path, source in solution.sources.items() if path.endswith(".py"))
    return {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def foreign_kernels(launched: Iterable[str], functions: Iterable[str]) -> list[str]:
    """The device activities that are neither kernels made from one of the functions nor cleared memory.

    Triton names a kernel as its function, TileLang appends ``_kernel`` and a number, cuTile ``_K`` and the signature.
    """
    own = "|".join(re.escape(name) for name in functions)
    pattern = re.compile(rf"(void )?({own})(_kernel(_\d+)?|_K\w+)?(\(.*\))?")
    return [name for name in launched if not name.startswith("Memset") and not pattern.fullmatch(name.strip())]


def device_activities(call: Callable[[], Any]) -> list[str]:
    """Names of everything that ran on the GPU during the call: kernels, copies, cleared memory."""
    synchronize: Callable[[], Any] = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        call()
        synchronize()
    with tempfile.TemporaryDirectory() as folder:
        # The exported trace says what kind of activity each event is; the events of older PyTorch versions do not.
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_bytes())["traceEvents"]
    return [event["name"] for event in events if event.get("cat") in DEVICE_ACTIVITIES]


def declared_cases(definition: Definition, solution: SolutionFiles, target: str) -> Iterator[tuple[str, Case]]:
    """Every size and dtype that the solution declares for this GPU."""
    workloads = Catalog.default().workloads_for(definition.name)
    scalars = workloads[0].scalars() if workloads else {}
    bindings = [
        dict(zip(definition.dtypes, choice, strict=True)) for choice in itertools.product(*definition.dtypes.values())
    ]
    for (name, sizes), dtypes in itertools.product(CASES.items(), bindings):
        axes = definition.bind_axes({axis: sizes[axis] for axis in definition.var_axes})
        if solution.record.unsupported(axes, dtypes, target=target) is None:
            yield name, Case(axes=axes, dtypes=dtypes, scalars=scalars, seed=1)


def bound_call(definition: Definition, solution: SolutionFiles, case: Case, device: str) -> Callable[[], Any]:
    """The solution bound to fresh inputs and outputs on the device."""
    inputs = draw_inputs(definition, case, device)
    outputs = [
        torch.empty(
            definition.shape_of(name, case.axes),
            dtype=storage_dtype(definition.dtype_of(name, case.dtypes)),
            device=device,
        )
        for name in definition.written_outputs
    ]
    entry = load_entry(solution)
    return lambda: entry(*inputs.values(), *outputs)


def profile_catalog(pattern: str, say: Callable[[str], None]) -> dict[str, Any]:
    """Profile the tile solutions whose name matches; one row per solution, case and dtype, and what is wrong.

    Raises:
        HardwareError: there is no CUDA GPU.
    """
    if not torch.cuda.is_available():
        raise HardwareError("--profile needs a CUDA GPU, and there is none here.")
    catalog, (gpu, target) = Catalog.default(), default_gpu()
    solutions = [files for files in catalog.solutions.values() if files.record.spec.language in TILE_LANGUAGES]
    solutions = [files for files in solutions if fnmatch.fnmatch(files.name, pattern)]
    device_activities(lambda: torch.zeros(1, device="cuda"))  # the first session of a process misses events
    rows: list[dict[str, Any]] = []
    findings: list[str] = []
    for number, files in enumerate(solutions, start=1):
        definition, functions = catalog.definition(files.record.definition), function_names(files)
        say(f"{number} of {len(solutions)}: {files.name}")
        before = len(rows)
        for name, case in declared_cases(definition, files, target):
            call = bound_call(definition, files, case, "cuda")
            call()  # compiles
            launched = device_activities(call)
            foreign = foreign_kernels(launched, functions)
            rows.append(
                {"solution": files.name, "case": name, "call": str(case), "kernels": launched, "foreign": foreign}
            )
            if foreign or not launched:
                findings.append(f"{files.name} {case}: {', '.join(foreign) or 'nothing ran on the device'}")
        if len(rows) == before:
            findings.append(f"{files.name}: none of the cases is declared for {target}")
        kernels = sorted({kernel[:80] for row in rows[before:] for kernel in row["kernels"]})
        say(f"    {len(rows) - before} calls: {', '.join(kernels)}")
    return {"gpu": gpu, "calls": rows, "findings": findings}
