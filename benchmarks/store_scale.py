"""How the store fares with 100,000 traces, or ten million: ingest, the best kernel per operator, memory and size.

Run it with ``python benchmarks/store_scale.py``. It makes a synthetic catalog and journals in a temporary folder, goes
through the same code as the command line, prints a table, and exits with 1 where a limit is missed. The timings are
medians; ingest, which changes the store, runs on a fresh one each time.

    python benchmarks/store_scale.py --traces 10000000    # 2 KB of journal a trace, in --folder or where temporary files go

Beyond 100,000 traces each is ingested once, and the limits are those of ten million: half a second for the best kernels of every
operator, 4 GB of memory.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tilegym_db.catalog import Catalog
from tilegym_db.records import Config, Definition, Solution, Workload
from tilegym_db.records.trace import new_trace_id
from tilegym_db.store.connection import Store
from tilegym_db.store.filling import ingest
from tilegym_db.store.opening import open_store
from tilegym_db.store.queries.measured import best_rows, find_traces, promotable
from tilegym_db.store.queries.publishing import publishable_rows

DEFINITIONS = 20
WORKLOADS = 50
LANGUAGES = ("python", "triton", "triton", "tilelang", "cutile")  # one Solution each
GPUS = ("h200", "b200")
START = datetime(2026, 1, 1, tzinfo=UTC)
SMALL, LINES_A_JOURNAL = 100_000, 100_000
MEMORY_BYTES = 4 << 30
LARGE_LIMITS_S = {"best per operator (SQL)": 0.5}
BEST_PER_OP = """
    SELECT definition, arg_min(solution, latency_us) AS solution, min(latency_us) AS latency_us
    FROM best WHERE gpu = 'h200' GROUP BY definition ORDER BY definition
"""


@dataclass(frozen=True)
class Measurement:
    """One line of the table: wall time, the CPU time of all threads, and the limit on the former where there is one."""

    what: str
    seconds: float
    cpu_s: float
    limit_s: float | None
    detail: str

    @property
    def missed(self) -> bool:
        """True where it took longer than it may."""
        return self.limit_s is not None and self.seconds > self.limit_s


def write_catalog(root: Path, workloads: int = WORKLOADS) -> Catalog:
    """Write ``DEFINITIONS`` operators, each with a Solution per entry of ``LANGUAGES`` and ``workloads`` shapes."""
    for index in range(DEFINITIONS):
        name = f"op{index:02d}"
        definition = Definition.from_dict(
            {
                "name": name,
                "version": "1.0.0",
                "op_type": f"family{index % 6}",
                "dtypes": {"T": ["bfloat16"]},
                "axes": {"M": {"type": "var"}, "N": {"type": "var"}},
                "inputs": {"x": {"shape": ["M", "N"], "dtype": "T"}, "eps": {"shape": None, "dtype": "float32"}},
                "outputs": {"out": {"shape": ["M", "N"], "dtype": "T"}},
                "reference": "# Source: made up\ndef run(x, eps):\n    return x\n",
            }
        )
        _write(root / "definitions" / definition.op_type / f"{name}.json", definition.to_json())
        lines = [_workload(name, number).to_json() for number in range(workloads)]
        _write(root / "workloads" / definition.op_type / f"{name}.jsonl", "\n".join(lines) + "\n")
        for number, language in enumerate(LANGUAGES):
            _write_solution(root / "solutions" / definition.op_type / name, name, number, language)
    return Catalog((root,))


def _write_solution(folder: Path, definition: str, number: int, language: str) -> None:
    spec = {"language": language, "entry_point": "kernel.py::run", "role": "kernel" if number else "baseline"}
    name = f"{definition}_{language}_{number}"
    record = {
        "name": name,
        "definition": definition,
        "author": "made up",
        "spec": spec,
        "sources": [{"path": "kernel.py"}],
    }
    _write(folder / name / "solution.json", Solution.from_dict(record).to_json())
    _write(folder / name / "kernel.py", f"def run(x, eps, out):\n    pass  # {name}\n")


def _workload(definition: str, number: int) -> Workload:
    return Workload.from_dict(
        {
            "definition": definition,
            "axes": {"M": 1 << (number % 15), "N": 1024 * (1 + number // 15)},
            "dtypes": {"T": "bfloat16"},
            "inputs": {"eps": {"type": "scalar", "value": 1e-5}},
        }
    )


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def trace_lines(catalog: Catalog, count: int) -> Iterator[str]:
    """Yield ``count`` journal lines: every solution on every shape of two GPUs, again and again.

    Each is screened once and then verified. A tenth of the screens fail.
    """
    rng = random.Random(0)
    points = [
        (gpu, catalog.definition(workload.definition), solution, workload)
        for gpu in GPUS
        for name in catalog.definitions
        for workload in catalog.workloads_for(name)
        for solution in catalog.solutions_for(name)
    ]
    for number in range(count):
        gpu, definition, solution, workload = points[number % len(points)]
        attempt = number // len(points)
        config: Config = {"BLOCK_M": 1 << attempt % 4, "num_warps": 4}
        tier = "promotion" if attempt else "screen"
        failed = attempt == 0 and rng.random() < 0.1
        yield json.dumps(
            {
                "trace_id": new_trace_id("run", tier, attempt, solution.digest, config, workload.uuid + gpu),
                "run_id": f"run-{attempt}",
                "timestamp": (START + timedelta(seconds=number)).isoformat(),
                "definition": definition.name,
                "definition_version": definition.version,
                "definition_digest": definition.digest,
                "op_type": definition.op_type,
                "solution": solution.name,
                "solution_digest": solution.digest,
                "language": solution.record.spec.language,
                "role": solution.record.spec.role,
                "config": config,
                "workload_uuid": workload.uuid,
                "axes": workload.axes,
                "dtypes": workload.dtypes,
                "scalars": workload.scalars(),
                "gpu": gpu,
                "gpu_name": f"NVIDIA {gpu.upper()}",
                "sm": "sm_90" if gpu == "h200" else "sm_100",
                "driver": "580.65.06",
                "cuda": "13.0",
                "libs": {"torch": "2.13.0", "triton": "3.9.0", "tilelang": "0.1.15", "cuda-tile": "1.7.0"},
                "tier": tier,
                "attempt": attempt,
                "sandbox_level": 3,
                **(_failure(workload) if failed else _pass(rng)),
            }
        )


def _failure(workload: Workload) -> dict[str, Any]:
    return {
        "status": "INCORRECT_NUMERICAL",
        "reason": "frobenius 0.1 > 0.004",
        "correctness": {"rel_fro": 0.1, "cases": 9},
        "failure": {
            "gate": "frobenius",
            "axes": workload.axes,
            "dtypes": workload.dtypes,
            "contents": "outliers",
            "seed": "1234567890123456789",
            "output": "out",
            "index": [0, 17],
            "expected": "1.5",
            "got": "0",
            "worst_row": 0,
            "command": "tilegym-db debug reproduce op00_triton_1 --gpu h200 --distribution outliers --seed 1234567890123456789",
        },
    }


def _pass(rng: random.Random) -> dict[str, Any]:
    latency = rng.uniform(5, 500)
    ratio = rng.uniform(0.5, 3)
    comparison = {"ratio": ratio, "ci_low": ratio * 0.99, "ci_high": ratio * 1.01}
    return {
        "status": "PASSED",
        "envelope": {"cases": 28, "digest": "0" * 64, "seed": "1234567890123456789"},
        "audit": {"wall_us": latency * 1.02, "owned_share": 1.0, "kernels": ["op_kernel"]},
        "correctness": {"rel_fro": 0.001, "worst_row_rel": 0.002, "max_abs": 0.01, "matched_ratio": 1.0, "cases": 9},
        "performance": {
            "latency_us": latency,
            "ci_low_us": latency * 0.99,
            "ci_high_us": latency * 1.01,
            "samples": 60,
            "host_us": 20.0,
            "cold_l2": True,
            "timer": "events",
            "comparisons": [{"with": name, "provides": name, **comparison} for name in ("stock", "library", "compile")],
            "sol_us": latency / 2,
            "sol_ratio": 0.5,
            "clock_mhz": 1980,
        },
    }


def timed(action: Callable[[], object]) -> tuple[float, float]:
    """Return the wall time and CPU time (all threads) of one call in seconds. CPU time says more on a busy machine."""
    wall, cpu = time.perf_counter(), time.process_time()
    action()
    return time.perf_counter() - wall, time.process_time() - cpu


def medians(samples: list[tuple[float, float]]) -> tuple[float, float]:
    """Return the medians of wall and of CPU times."""
    return statistics.median(wall for wall, _ in samples), statistics.median(cpu for _, cpu in samples)


def measure(folder: Path, traces: int, repeats: int) -> list[Measurement]:
    """Time everything ``repeats`` times."""
    catalog = write_catalog(folder / "catalog")
    journals = write_journals(folder, trace_lines(catalog, traces))
    size = f"{sum(path.stat().st_size for path in journals) / 1e6:.0f} MB of JSONL"
    ingests, is_large = [], traces > SMALL
    for number in range(repeats):
        with open_store(folder / f"home{number}", catalog=catalog) as store:
            ingests.append(timed(partial(ingest, store, journals, trust=True)))
    found = [Measurement(f"ingest {traces:,} traces", *medians(ingests), None if is_large else 1.5, size)]
    with open_store(folder / "home0", catalog=catalog) as store:
        again = timed(lambda: ingest(store, journals, trust=True))
        found.append(Measurement("ingest them again (adds nothing)", *again, None, size))
        size = f"{store.path.stat().st_size / 1e6:.0f} MB database"
    opens = [
        timed(lambda: open_store(folder / "home0", read_only=True, catalog=catalog).close()) for _ in range(repeats)
    ]
    found.append(Measurement("open for reading", *medians(opens), None, size))
    with open_store(folder / "home0", read_only=True, catalog=catalog) as store:
        for what, question, limit_s in QUESTIONS:
            rows = len(question(store))
            samples = [timed(partial(question, store)) for _ in range(repeats)]
            found.append(
                Measurement(what, *medians(samples), LARGE_LIMITS_S.get(what) if is_large else limit_s, f"{rows} rows")
            )
    return found


def write_journals(folder: Path, lines: Iterator[str]) -> list[Path]:
    """Write journals of at most :data:`LINES_A_JOURNAL` lines each."""
    paths: list[Path] = []
    while piece := list(itertools.islice(lines, LINES_A_JOURNAL)):
        paths.append(folder / f"traces-{len(paths):04d}.jsonl")
        with paths[-1].open("w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in piece)
    return paths


def peak_memory_bytes() -> int:
    """Return the most bytes that this process has had in memory so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


QUESTIONS: tuple[tuple[str, Callable[[Store], list[Any]], float], ...] = (
    ("best per operator (SQL)", lambda store: store.rows(BEST_PER_OP), 0.06),
    ("best of one definition, every column", lambda store: best_rows(store, definition="op07"), 0.1),
    ("what is publishable of one GPU", lambda store: publishable_rows(store, "h200"), 0.3),
    ("what verify may be tried on", lambda store: promotable(store, "h200"), 0.1),
    ("one trace by its id", lambda store: find_traces(store, "0000"), 0.1),
)


def main() -> int:
    """Measure, print, and say with the exit status whether every limit held."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, help="5; of more than 100,000 traces 1")
    parser.add_argument("--folder", type=Path, help="where there is room for the journals and the database")
    arguments = parser.parse_args()
    repeats = arguments.repeats or (1 if arguments.traces > SMALL else 5)
    with tempfile.TemporaryDirectory(prefix="tilegym-db-scale-", dir=arguments.folder) as folder:
        found = measure(Path(folder), arguments.traces, repeats)
    table = Table("what", "took", "CPU", "limit", "of", title=f"store with {arguments.traces:,} traces")
    for item in found:
        limit = "" if item.limit_s is None else f"{item.limit_s * 1e3:.0f} ms"
        took, cpu = f"{item.seconds * 1e3:.0f} ms", f"{item.cpu_s * 1e3:.0f} ms"
        table.add_row(item.what, took, cpu, limit, item.detail, style="red" if item.missed else None)
    Console().print(table)
    peak = peak_memory_bytes()
    print(f"peak memory {peak / 1e6:,.0f} MB of {MEMORY_BYTES / 1e6:,.0f} MB")
    return int(peak > MEMORY_BYTES or any(item.missed for item in found))


if __name__ == "__main__":
    sys.exit(main())
