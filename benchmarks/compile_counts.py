"""Count what one promotion of a kernel compiles: distinct specialisations by phase, without a GPU and without compiling.

The sizes, dtypes and layouts are those that a promotion on a GPU would draw. Each call runs the Solution's own code on memory
that is never touched. A launch stops where the language would compile: Triton before ``_do_compile``, cuTile before
``export_kernel``, TileLang before ``JITImpl.compile``. What reaches this place is counted.

    python -m benchmarks.compile_counts rms_norm_triton softmax_tilelang --seeds 3

``fuzz``: the fuzz cases of one dtype binding. ``large``: the large cases. ``judged``: the calls of sequences that are judged.
``shapes``: all 300 shapes, of which a kernel makes as many as fit into some seconds. ``own``: the shapes of its Workloads.
``all``: the union of these without ``shapes``. ``gates``: the union of ``fuzz``, ``large`` and ``judged``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from tilegym_db.backends.load import load_entry, unload_entry
from tilegym_db.backends.stand_ins import pretend_device
from tilegym_db.backends.toolchains import prepare_environment
from tilegym_db.catalog import Catalog, SolutionFiles
from tilegym_db.records import Definition, Workload
from tilegym_db.records.workload import Case
from tilegym_db.sandbox.shared_buffers import plan_slot, tensors_of_slot
from tilegym_db.verification.cases import fuzz_cases
from tilegym_db.verification.large import large_cases
from tilegym_db.verification.sequences import drawn_pairs, equal_pairs, in_other_dtypes, shapes_along
from tilegym_db.verification.worker_handle import PROMOTION, WorkerHandle

TARGET = "sm_90"
FREE_BYTES = 130 << 30
"""Free memory of an H200; a sixth of it is the limit of a large case."""


@contextlib.contextmanager
def counting_triton(keys: set[object]) -> Iterator[None]:
    """Add the key of each specialisation that Triton would compile."""
    from triton.runtime.jit import JITFunction

    from tilegym_db.backends import triton

    def compile_nothing(function: Any, key: object, signature: object, device: int, *rest: Any) -> Any:
        asm, metadata = {"cubin": b""}, SimpleNamespace(name=function.__name__, shared=0)
        return SimpleNamespace(hash=str((function.__module__, function.__name__, key)), asm=asm, metadata=metadata)

    with (
        patch.object(JITFunction, "_do_compile", compile_nothing),
        triton.recording(TARGET) as recorder,
        patch.object(recorder, "add", lambda artifact: keys.add(artifact.key)),
    ):
        yield


@contextlib.contextmanager
def counting_cutile(keys: set[object]) -> Iterator[None]:
    """Add the key of each specialisation that cuTile would compile."""
    from tilegym_db.backends import cutile

    with (
        patch.object(cutile, "export_kernel", lambda *arguments, **options: None),
        cutile.recording(TARGET, "count") as recorder,
        patch.object(recorder, "add", lambda artifact: keys.add(artifact.key)),
    ):
        yield


@contextlib.contextmanager
def counting_tilelang(keys: set[object]) -> Iterator[None]:
    """Add the arguments of each factory whose kernel TileLang would compile."""
    from tilelang.jit import JITImpl

    def compile_nothing(factory: Any, *args: Any, **named: Any) -> Callable[..., None]:
        key = factory.func.__name__ if hasattr(factory.func, "__name__") else id(factory), args, tuple(named.items())
        return lambda *arguments, **more: keys.add(repr(key))

    with patch.object(JITImpl, "compile", compile_nothing):
        yield


COUNTING = {"triton": counting_triton, "cutile": counting_cutile, "tilelang": counting_tilelang}


def arguments_of(definition: Definition, case: Case) -> list[Any]:
    """Return the arguments of a call, on memory that is reserved and never touched, with the alignment of the case."""
    plan = plan_slot(definition, case)
    slot = tensors_of_slot(torch.empty(plan.size, dtype=torch.uint8), plan)
    given = {**case.call.scalars, **slot}
    return [given[name] for name in (*definition.inputs, *definition.written_outputs)]


def calls_of(
    handle: WorkerHandle, workloads: Sequence[Workload], workload: Workload, seed: int
) -> dict[str, Sequence[Case]]:
    """Draw the calls by phase that one promotion makes for the dtypes of a Workload."""
    definition, record = handle.definition, handle.solution.record
    dtypes, scalars = definition.bind_dtypes(workload.dtypes), workload.scalars()
    anchors = [one.axes for one in workloads]
    count = PROMOTION.fuzz_cases
    cases = fuzz_cases(definition, record, anchors, dtypes, scalars, count=count, seed=seed)
    large = large_cases(definition, record, dtypes, scalars, seed=seed, budget_bytes=FREE_BYTES // 6, on_gpu=True)
    drawn = random.Random(f"sequences {seed}")
    _, shapes = shapes_along(handle, cases, drawn)
    pairs = drawn_pairs(sorted(shapes), drawn)
    equal = [case for pair in equal_pairs(handle, cases, drawn) for case in pair]
    other = in_other_dtypes(handle, equal[:2], drawn)
    judged = [shapes[size] for size in (*pairs, *pairs.values())] + equal + other
    own = [
        Case.of_workload(definition, one, distribution="normal", seed=0)
        for one in workloads
        if definition.bind_dtypes(one.dtypes) == dtypes
    ]
    return {
        "fuzz": cases,
        "large": [one.case for one in large],
        "judged": judged,
        "shapes": [*shapes.values()],
        "own": own,
    }


def count(solution: SolutionFiles, definition: Definition, workloads: Sequence[Workload], seed: int) -> dict[str, Any]:
    """Return the number of specialisations and of calls by phase, and the first error of each kind."""
    record = solution.record
    prepare_environment(record.spec.language)
    handle = WorkerHandle(definition, solution, "cuda:0", Path("/nowhere"), policy=PROMOTION)
    definition = handle.definition
    supported = [
        one
        for one in workloads
        if record.unsupported(definition.bind_axes(one.axes), definition.bind_dtypes(one.dtypes)) is None
    ]
    calls = calls_of(handle, supported, supported[0], seed)
    keys, errors = dict[str, set[object]](), dict[str, str]()
    for phase, cases in calls.items():
        keys[phase] = set()
        with COUNTING[record.spec.language](keys[phase]), pretend_device(TARGET):
            entry = load_entry(solution)
            for case in cases:
                try:
                    entry(*arguments_of(definition, case))
                except Exception as error:  # counted elsewhere: a promotion reports it
                    errors.setdefault(f"{phase} {type(error).__name__}", f"{error} at {case}"[:200])
            unload_entry(solution)
    keys["gates"] = keys["fuzz"] | keys["large"] | keys["judged"]
    keys["all"] = keys["gates"] | keys["own"]
    counts = {phase: len(found) for phase, found in keys.items()}
    return {"phases": counts, "calls": {phase: len(cases) for phase, cases in calls.items()}, "errors": errors}


def main() -> None:
    """Print one line per Solution."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("solutions", nargs="+")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    catalog = Catalog.default()
    for name in options.solutions:
        solution = catalog.solution(name)
        definition = catalog.definition(solution.record.definition)
        found = [
            count(solution, definition, catalog.workloads_for(definition.name), seed) for seed in range(options.seeds)
        ]
        phases = {phase: median(one["phases"][phase] for one in found) for phase in found[0]["phases"]}
        print(json.dumps({"solution": name, **phases, "of": found[0]["calls"]}))
        if options.verbose:
            print(json.dumps(found[0]["errors"], indent=1))


if __name__ == "__main__":
    main()
