"""What a call through the resolver costs over calling the kernel's launcher directly, in microseconds of Python.

The kernel does nothing, so that only the way to it is timed: a hit in a call site's cache, on CPU tensors, with 3 and
with 6 inputs. flashinfer-bench's ``apply`` and the ``dispatch`` decorator of TileGym are timed beside it on the same calls,
where they are installed (``pip install --no-deps flashinfer-bench docstring-parser tilegym``). What each of them looks at
before it calls the kernel differs:

* ours: shape, strides, dtype and device of every tensor, and the scalars that select code;
* ``apply``: the shapes; it allocates and returns the outputs of a kernel that writes into arguments;
* TileGym: the name of the chosen backend and nothing of the call, since a backend has one implementation of an operator.

    python benchmarks/dispatch_overhead.py [--calls 2000] [--rounds 200]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import timeit
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tilegym_db.catalog import SolutionFiles
from tilegym_db.published.entries import Candidate
from tilegym_db.records import Definition
from tilegym_db.resolver.decide import Decision, Evidence
from tilegym_db.resolver.dispatch import Dispatcher
from tilegym_db.resolver.loader import load_launcher

# Input name -> shape; None is a Python number.
CASES: dict[str, dict[str, list[str] | None]] = {
    "3 inputs": {"x": ["M", "N"], "weight": ["N"], "eps": None},
    "6 inputs": {"q": ["M", "N"], "k": ["M", "N"], "v": ["M", "N"], "mask": ["M"], "sink": ["N"], "scale": ["N"]},
}
SIZES = {"M": 4, "N": 64}


def define(name: str, inputs: dict[str, list[str] | None]) -> Definition:
    """Return a Definition with these inputs and one output."""
    reference = f"# Source: https://example.org\ndef run({', '.join(inputs)}):\n    return {next(iter(inputs))}\n"
    return Definition.from_dict(
        {
            "name": name,
            "version": "1.0.0",
            "op_type": "toy",
            "axes": {axis: {"type": "var"} for axis in SIZES},
            "inputs": {key: {"shape": shape, "dtype": "float32"} for key, shape in inputs.items()},
            "outputs": {"out": {"shape": ["M", "N"], "dtype": "float32"}},
            "reference": reference,
        }
    )


def kernel_source(definition: Definition) -> str:
    """Return a kernel that takes its arguments and does nothing."""
    return f"def run({', '.join((*definition.inputs, *definition.written_outputs))}):\n    pass\n"


def write_solution(definition: Definition, folder: Path) -> SolutionFiles:
    """Write the kernel as a Solution on disk."""
    folder.mkdir(parents=True)
    (folder / "kernel.py").write_text(kernel_source(definition))
    record = {
        "name": folder.name,
        "definition": definition.name,
        "author": "benchmark",
        "spec": {"language": "python", "entry_point": "kernel.py::run"},
        "sources": [{"path": "kernel.py"}],
    }
    (folder / "solution.json").write_text(json.dumps(record))
    return SolutionFiles.read(folder)


def make_site(definition: Definition, solution: SolutionFiles) -> Dispatcher:
    """Return a call site that is always decided in favour of the kernel."""
    candidate = Candidate(solution.name, solution.digest, "python", "kernel")
    decision = Decision(solution, {}, Evidence("exact", "benchmark", "cpu", candidate=candidate), ())
    return Dispatcher(definition, lambda binding, device, serving, launch: decision)


def flashinfer_apply(definition: Definition, folder: Path) -> Callable[..., Any] | None:
    """Return the same call through flashinfer-bench's ``apply``, or None if it is not installed."""
    if importlib.util.find_spec("flashinfer_bench") is None:
        return None
    os.environ["FIB_CACHE_PATH"] = str(folder / "cache")
    from flashinfer_bench import apply
    from flashinfer_bench.apply import ApplyConfig, ApplyConfigRegistry, ApplyRuntime
    from flashinfer_bench.data import Definition as TheirDefinition
    from flashinfer_bench.data import Solution, Trace, TraceSet

    record = {
        "name": definition.name,
        "op_type": definition.op_type,
        "axes": {axis: {"type": "var"} for axis in SIZES},
        "inputs": {key: {"shape": spec.shape, "dtype": spec.dtype} for key, spec in definition.inputs.items()},
        "outputs": {key: {"shape": spec.shape, "dtype": spec.dtype} for key, spec in definition.outputs.items()},
        "reference": definition.reference,
    }
    solution = {
        "name": "kernel",
        "definition": definition.name,
        "author": "benchmark",
        "spec": {"language": "python", "target_hardware": ["cpu"], "entry_point": "kernel.py::run"},
        "sources": [{"path": "kernel.py", "content": kernel_source(definition)}],
    }
    random = {
        key: {"type": "scalar", "value": 1e-5} if spec.is_scalar else {"type": "random"}
        for key, spec in definition.inputs.items()
    }
    evaluation = {
        "status": "PASSED",
        "environment": {"hardware": "cpu"},
        "timestamp": "2026-01-01T00:00:00",
        "correctness": {},
        "performance": {"latency_ms": 1.0, "reference_latency_ms": 2.0, "speedup_factor": 2.0},
    }
    workload = {"uuid": "w", "axes": SIZES, "inputs": random}
    trace = {"definition": definition.name, "workload": workload, "solution": "kernel", "evaluation": evaluation}
    trace_set = TraceSet(
        root=folder,
        definitions={definition.name: TheirDefinition.model_validate(record)},
        solutions={definition.name: [Solution.model_validate(solution)]},
        traces={definition.name: [Trace.model_validate(trace)]},
    )
    ApplyRuntime(trace_set, ApplyConfigRegistry(default=ApplyConfig())).start()
    return lambda *args: apply(definition.name, args=args)


def tilegym_dispatch(definition: Definition, launcher: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return the launcher behind TileGym's ``dispatch``, or None if it is not installed."""
    spec = importlib.util.find_spec("tilegym")
    if spec is None or spec.submodule_search_locations is None:
        return None
    if "tilegym" not in sys.modules:
        # The package imports every kernel it has, which needs a GPU; the dispatcher itself needs none of them.
        package = types.ModuleType("tilegym")
        package.__spec__, package.__path__ = spec, list(spec.submodule_search_locations)
        sys.modules["tilegym"] = package
    from tilegym.backend import dispatch, get_current_backend, register_impl

    register_impl(definition.name, get_current_backend())(launcher)

    @dispatch(definition.name)
    def operator(*args: Any) -> Any:
        raise NotImplementedError

    return operator


def microseconds(
    ways: dict[str, Callable[..., Any]], args: tuple[Any, ...], calls: int, rounds: int
) -> dict[str, float]:
    """Time of one call, each way. Rounds are interleaved and the best counts: every disturbance only adds."""
    names = {f"a{index}": value for index, value in enumerate(args)}
    statement = f"call({', '.join(names)})"
    timers = {way: timeit.Timer(statement, globals={"call": call, **names}) for way, call in ways.items()}
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(rounds):
        for way, timer in timers.items():
            best[way] = min(best[way], timer.timeit(calls) / calls * 1e6)
    return best


def main() -> None:
    """Print one table: each way to the kernel, its time per call, and its overhead over the bare launcher."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()
    print(f"{'':10}{'way':26}{'us a call':>10}{'overhead us':>13}")
    with tempfile.TemporaryDirectory() as folder:
        for label, inputs in CASES.items():
            definition = define(label.replace(" ", "_"), inputs)
            solution = write_solution(definition, Path(folder) / label / "kernel")
            site = make_site(definition, solution)
            theirs = flashinfer_apply(definition, Path(folder) / label / "flashinfer")
            bare = "bare launcher"
            launcher = load_launcher(definition, solution, {}, solution.digest)
            tilegym = tilegym_dispatch(definition, launcher)
            ways: dict[str, Callable[..., Any]] = {
                bare: launcher,
                "call site, attempt(...)": site.attempt,
                "call site, site(...)": site,
                **({"flashinfer-bench apply": theirs} if theirs is not None else {}),
                **({"TileGym dispatch": tilegym} if tilegym is not None else {}),
            }
            shapes = [*inputs.values(), list(SIZES)]
            args = tuple(1e-5 if shape is None else torch.ones([SIZES[axis] for axis in shape]) for shape in shapes)
            for way in ways.values():
                way(*args)
            taken = microseconds(ways, args, options.calls, options.rounds)
            for name, value in taken.items():
                print(f"{label:10}{name:26}{value:10.2f}{value - taken[bare]:13.2f}")


if __name__ == "__main__":
    main()
