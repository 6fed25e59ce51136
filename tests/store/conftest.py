"""A catalog of two small operators on disk, and traces of it as the harness would write them."""

from __future__ import annotations

import itertools
import random
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from disk_limit import full_disk

from tilegym_db.catalog import Catalog, SolutionFiles
from tilegym_db.published.snapshot import signed_line
from tilegym_db.records import Definition, Solution, Trace, Workload
from tilegym_db.records.trace import new_trace_id
from tilegym_db.store.connection import Store
from tilegym_db.store.journal import Journal
from tilegym_db.store.opening import open_store

START = datetime(2026, 1, 1, tzinfo=UTC)
LANGUAGES = {"stock": "python", "triton": "triton", "tilelang": "tilelang"}


@pytest.fixture(autouse=True)
def stores_are_filled(fill_store: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilegym_db.store.filling.create_database", fill_store)


def definition_record(name: str, op_type: str, version: str = "1.0.0", factor: int = 2) -> Definition:
    return Definition.from_dict(
        {
            "name": name,
            "version": version,
            "op_type": op_type,
            "description": f"x times {factor}",
            "tags": ["status:verified"],
            "dtypes": {"T": ["bfloat16", "float32"]},
            "axes": {"M": {"type": "var"}, "N": {"type": "var"}},
            "inputs": {"x": {"shape": ["M", "N"], "dtype": "T"}, "eps": {"shape": None, "dtype": "float32"}},
            "outputs": {"out": {"shape": ["M", "N"], "dtype": "T"}},
            "reference": f"# Source: https://example.org\ndef run(x, eps):\n    return x * {factor}\n",
        }
    )


def workload_record(definition: str, m: int, dtype: str = "bfloat16") -> Workload:
    return Workload.from_dict(
        {
            "definition": definition,
            "axes": {"M": m, "N": 4096},
            "dtypes": {"T": dtype},
            "inputs": {"eps": {"type": "scalar", "value": 1e-5}},
            "tags": ["model:toy"],
        }
    )


def write_definition(root: Path, record: Definition) -> None:
    path = root / "definitions" / record.op_type / f"{record.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(record.to_json())


def write_solution(root: Path, op_type: str, definition: str, kind: str, note: str = "") -> None:
    name = f"{definition}_{kind}"
    folder = root / "solutions" / op_type / definition / name
    folder.mkdir(parents=True, exist_ok=True)
    spec: dict[str, Any] = {"language": LANGUAGES[kind], "entry_point": "kernel.py::run"}
    if kind == "stock":
        spec |= {"role": "baseline", "provides": "stock"}
    record = Solution.from_dict(
        {"name": name, "definition": definition, "author": "tests", "spec": spec, "sources": [{"path": "kernel.py"}]}
    )
    (folder / "solution.json").write_text(record.to_json())
    (folder / "kernel.py").write_text(f"def run(x, eps, out):\n    pass  # {name} {note}\n")


def write_catalog(root: Path) -> Path:
    """Write ``scale`` and ``shift``, each with stock code, two kernels and two shapes."""
    for name, op_type in (("scale", "norm"), ("shift", "activation")):
        write_definition(root, definition_record(name, op_type))
        for kind in LANGUAGES:
            write_solution(root, op_type, name, kind)
        lines = [workload_record(name, m).to_json() + "\n" for m in (1, 4096)]
        folder = root / "workloads" / op_type
        folder.mkdir(parents=True)
        (folder / f"{name}.jsonl").write_text("".join(lines))
    return root


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return the folder of a catalog of two definitions."""
    return write_catalog(tmp_path / "catalog")


@pytest.fixture
def shipped(root: Path, ship: Callable[[Path], Path]) -> Path:
    """Return the catalog's folder as the one that the package came with: its lock needs no signature."""
    return ship(root)


@pytest.fixture
def catalog(root: Path) -> Catalog:
    return Catalog((root,))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def opened(home: Path, root: Path) -> Callable[..., AbstractContextManager[Store]]:
    """Open the store under ``home``, over the catalog as it is on disk now: ``opened(read_only=True)``."""

    @contextmanager
    def open_now(*, read_only: bool = False, lock_timeout_s: float = 0.3) -> Iterator[Store]:
        chosen = Catalog((root,))
        with open_store(home, read_only=read_only, catalog=chosen, lock_timeout_s=lock_timeout_s) as store:
            yield store

    return open_now


class TraceWriter:
    """Makes traces of a catalog. Each is a second later than the one before."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self._clock = itertools.count()

    def __call__(
        self,
        definition: str = "scale",
        kind: str = "triton",
        *,
        m: int = 4096,
        latency_us: float = 10.0,
        speedup: float | None = None,
        sol_ratio: float | None = None,
        status: str = "PASSED",
        gpu: str = "h200",
        tier: str = "promotion",
        config: dict[str, Any] | None = None,
        **changes: Any,
    ) -> Trace:
        second = next(self._clock)
        record = self.catalog.definition(definition)
        solution: SolutionFiles = self.catalog.solution(f"{definition}_{kind}")
        workload = workload_record(definition, m)
        comparisons = [] if speedup is None else [_against_stock(definition, speedup)]
        timed = status == "PASSED" and tier != "interpreter"
        content = {
            "trace_id": new_trace_id("run", tier, second, solution.digest, config or {}, workload.uuid),
            "run_id": "run",
            "timestamp": START + timedelta(seconds=second),
            "definition": definition,
            "definition_version": record.version,
            "definition_digest": record.digest,
            "op_type": record.op_type,
            "solution": solution.name,
            "solution_digest": solution.digest,
            "language": solution.record.spec.language,
            "role": solution.record.spec.role,
            "config": config or {},
            "workload_uuid": workload.uuid,
            "axes": workload.axes,
            "dtypes": workload.dtypes,
            "scalars": workload.scalars(),
            "gpu": gpu,
            "gpu_name": "NVIDIA H200",
            "sm": "sm_90",
            "tier": tier,
            "sandbox_level": 3,
            "status": status,
            "reason": "" if status == "PASSED" else "seen to fail",
            "correctness": {"rel_fro": 0.001, "cases": 9} if status in ("PASSED", "INCORRECT_NUMERICAL") else None,
            "performance": {
                "latency_us": latency_us,
                "ci_low_us": round(latency_us * 0.99, 3),
                "ci_high_us": round(latency_us * 1.01, 3),
                "samples": 60,
                "timer": "events",
                "comparisons": comparisons,
                "sol_ratio": sol_ratio,
            }
            if timed
            else None,
        }
        return Trace.from_dict(content | changes)


def _against_stock(definition: str, ratio: float) -> dict[str, Any]:
    name = f"{definition}_stock"
    return {"with": name, "provides": "stock", "ratio": ratio, "ci_low": ratio * 0.9, "ci_high": ratio * 1.1}


@pytest.fixture
def trace(catalog: Catalog) -> TraceWriter:
    return TraceWriter(catalog)


@pytest.fixture
def write_traces(tmp_path: Path, home: Path) -> Callable[..., Path]:
    """Write traces as a JSONL file, signed as if measured here: ``write_traces(trace, ...)``."""
    numbers = itertools.count()

    def write(*traces: Trace) -> Path:
        path = tmp_path / f"traces-{next(numbers)}.jsonl"
        path.write_bytes(b"".join(signed_line(home, trace.to_json()) for trace in traces))
        return path

    return write


@pytest.fixture(scope="session")
def asked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Catalog]:
    """Return a store with one trace, for tests that only read: its home folder and its catalog."""
    folder = tmp_path_factory.mktemp("asked")
    catalog = Catalog((write_catalog(folder / "catalog"),))
    with Journal("run-1", folder / "home") as journal:
        journal.append(TraceWriter(catalog)(latency_us=7.5))
    open_store(folder / "home", catalog=catalog).close()
    return folder / "home", catalog


@pytest.fixture
def file_size_limit() -> Callable[[int], AbstractContextManager[None]]:
    """Make the kernel refuse writes past ``n`` bytes of a file, as a full disk does: ``with file_size_limit(n)``."""

    return full_disk


# -- an S3 server -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """Yield the address of moto's S3 server, on loopback."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 120
    try:
        while True:
            try:
                urllib.request.urlopen(f"{url}/moto-api/data.json", timeout=5).close()
                break
            except OSError:
                assert process.poll() is None, "moto's server is not installed: pip install 'tilegym-db[dev]'"
                assert time.monotonic() < deadline
                time.sleep(0.1)
        yield url
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def s3(server, monkeypatch, tmp_path) -> str:
    """Return a new bucket's address, with the environment that reaches it."""
    for name, value in {
        "AWS_ENDPOINT_URL": server,
        "AWS_ACCESS_KEY_ID": "AKIDEXAMPLE",
        "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": str(tmp_path / "none"),
    }.items():
        monkeypatch.setenv(name, value)
    bucket = f"team-{random.randrange(1 << 40)}"
    request = urllib.request.Request(f"{server}/{bucket}", method="PUT")
    urllib.request.urlopen(request, timeout=10).close()
    return f"s3://{bucket}/traces?region=us-east-1"
