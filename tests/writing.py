"""Processes that write records, for the tests that kill them and race them. Every writer is the real one, in a real process.

A server process forks one child per writer. A child that is to be killed kills itself, without warning, before the n-th step that
changes the file system: Python's audit events say when a file is opened, made, renamed or removed, and calls that raise none
(``fsync``, ``write``) are counted as they are made. What DuckDB writes Python does not see, so its writers are killed by time.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import foreign_sets
from loop_authors import GOOD

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["writing", "duckdb", "tilegym_db.store.publish", "tilegym_db.store.filling", "filelock", "tilegym_db.store.sharing",
     "tilegym_db.interchange.importing", "tilegym_db.interchange.flashinfer_export",
     "tilegym_db.loop.submit", "tilegym_db.loop.tasks", "pyarrow.parquet", "pyarrow.dataset"]
)  # fmt: skip

CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.chmod", "os.link", "shutil.rmtree"}
WAIT_S = 60.0


@dataclass(frozen=True)
class Place:
    """The checkout that records are written to, and the home folder of the store."""

    root: Path
    home: Path

    @property
    def beside(self) -> Path:
        """Folder of what is read and written outside of both: foreign data sets, exports, what authors hand in."""
        return self.root.parent / "beside"


@dataclass(frozen=True)
class Ending:
    """``done``, ``refused`` (one of this package's errors) or ``killed``; then what it said, and the steps that it took."""

    kind: str
    said: str = ""
    steps: int = 0
    seconds: float = 0.0


# -- the writers ------------------------------------------------------------------------------------------------------


def add_definition(place: Place, key: str) -> None:
    from tilegym_db.catalog import Catalog, writers
    from tilegym_db.records import Definition

    record = row_scale(place)
    writers.add_definition(Catalog.default(), Definition.from_dict({**record, "name": key}))


def add_version(place: Place, key: str) -> None:
    from tilegym_db.catalog import Catalog, writers
    from tilegym_db.records import Definition

    record = row_scale(place)
    number = int(key.rpartition("_")[2])
    changes = {"version": f"1.{number + 1}.0", "constraints": ["N >= 1", f"M + {number} >= 0"]}
    writers.add_definition(Catalog.default(), Definition.from_dict({**record, **changes}))


def add_solution(place: Place, key: str) -> None:
    from tilegym_db.catalog import Catalog, writers
    from tilegym_db.records import Solution

    stock = Catalog.default().solution("row_scale_stock")
    record = {**stock.record.to_dict(), "name": key, "sources": [{"path": "kernel.py"}, {"path": "parts/rows.py"}]}
    writers.add_solution(
        Catalog.default(), Solution.from_dict(record), {**stock.sources, "parts/rows.py": b"ROWS = 4\n"}
    )


def add_workload(place: Place, key: str) -> None:
    from tilegym_db.catalog import Catalog, writers
    from tilegym_db.records import Workload

    known = Catalog.default().workloads_for("row_scale")[0].to_dict()
    size = 1000 + int(key.rpartition("_")[2])
    record = {**known, "uuid": "", "axes": {"M": size, "N": 8}, "tags": [key]}
    writers.add_workloads(Catalog.default(), [Workload.from_dict(record)])


def update_lock(place: Place, key: str) -> None:
    from tilegym_db.catalog import Catalog, writers

    path = place.root / "definitions" / "elementwise" / f"{key}.json"
    path.write_text(json.dumps({**row_scale(place), "name": key}))  # by hand, so that the lock does not know it
    writers.update_lock(Catalog.default(), place.root)


def journal(place: Place, key: str) -> None:
    from tilegym_db.store.journal import Journal

    with Journal(key, place.home) as file:
        for attempt in range(4):
            file.append(trace_of(place, key, attempt))


def search(place: Place, key: str) -> None:
    from tilegym_db.store.side_files import TuningLog, TuningStep

    content = {
        "run_id": key, "timestamp": "2026-11-01T00:00:00Z", "gpu": "h200", "solution": "row_scale_stock",
        "solution_digest": "d", "definition_digest": "d", "workload_uuid": "u", "config": {}, "outcome": "leads", "reason": "",
    }  # fmt: skip
    with TuningLog(key, place.home) as file:
        for size in range(3):
            file.append(TuningStep.from_dict({**content, "config": {"BLOCK": size}}))


def peaks(place: Place, key: str) -> None:
    from tilegym_db.records.roofline import GpuPeaks
    from tilegym_db.store.side_files import save_peaks

    measured = {"value": 4e12, "spread": 0.01, "rounds": 5, "how": "a copy of 1 GiB"}
    content = {
        "gpu": "h200", "gpu_name": "NVIDIA H200", "sm": "sm_90", "timer": "events",
        "timestamp": datetime.fromtimestamp(1_700_000_000 + int(key.rpartition("_")[2]), UTC).isoformat(),
        "copy_bytes_per_s": measured, "launch_us": {**measured, "value": 3.5}, "no_launch_us": {**measured, "value": 1.0},
        "l2_bytes": 62914560, "sm_count": 132, "max_sm_mhz": 1980, "max_memory_mhz": 3201, "memory_bus_bits": 6144,
    }  # fmt: skip
    save_peaks(GpuPeaks.from_dict(content), place.home)


def model_run(place: Place, key: str) -> None:
    from tilegym_db.records.loop import ModelRun
    from tilegym_db.store.side_files import save_model_run

    estimate = {"median": 2.0, "ci_low": 1.9, "ci_high": 2.1}
    timing = {"ttft_ms": estimate, "total_ms": estimate}
    content = {
        "run_id": key, "timestamp": "2026-11-01T00:00:00Z", "model": "tiny", "model_class": "Tiny", "config_digest": "0" * 64,
        "layers": 1, "parameters": 10, "dtype": "bfloat16", "batch": 1, "prompt_tokens": 4, "new_tokens": 0, "rounds": 8,
        "gpu": "h200", "gpu_name": "NVIDIA H200", "timer": "events", "stock": timing, "patched": timing,
        "ttft_speedup": estimate, "total_speedup": estimate, "equal_tokens": 1,
    }  # fmt: skip
    save_model_run(ModelRun.from_dict(content), place.home)


def ingest(place: Place, key: str) -> None:
    from tilegym_db.store.filling import ingest as bring_in
    from tilegym_db.store.opening import open_store

    journal(place, key)
    with open_store(place.home, lock_timeout_s=WAIT_S) as store:
        bring_in(store)


def publish(place: Place, key: str) -> None:
    from tilegym_db.store.opening import open_store
    from tilegym_db.store.publish import publish as write_out

    with open_store(place.home, lock_timeout_s=WAIT_S) as store:
        write_out(store, "h200", place.root)


def rebuild(place: Place, key: str) -> None:
    from tilegym_db.store.filling import rebuild as make_anew

    make_anew(place.home, lock_timeout_s=WAIT_S)


def import_set(place: Place, key: str) -> None:
    from tilegym_db.interchange.importing import import_data_set

    import_data_set(place.beside / "foreign" / key, home=place.home)


def export(place: Place, key: str) -> None:
    from tilegym_db.catalog import Catalog
    from tilegym_db.interchange.flashinfer_export import build_export
    from tilegym_db.interchange.importing import write_tree

    told = build_export(Catalog.default(), [trace_of(place, key, 0)])
    write_tree(place.beside / "exports" / key, told.files, told.blobs)


def sync(place: Place, key: str) -> None:
    from tilegym_db.store.opening import open_store
    from tilegym_db.store.sharing import SharedDataSet, sync_traces

    with open_store(place.home, lock_timeout_s=WAIT_S) as store:
        sync_traces(store, SharedDataSet(str(place.beside / "others" / key)))


def share(place: Place, key: str) -> None:
    from tilegym_db.store.filling import ingest as bring_in
    from tilegym_db.store.opening import open_store
    from tilegym_db.store.sharing import SharedDataSet, share_traces

    with open_store(place.home, lock_timeout_s=WAIT_S) as store:
        bring_in(store)
        share_traces(store, SharedDataSet(str(place.beside / "team")))


def create_task(place: Place, key: str) -> None:
    from tilegym_db.loop.tasks import create_task as create

    create("row_scale", language="python", gpu="h200", min_speedup=bar_of(key), home=place.home)


def submit_kernel(place: Place, key: str) -> None:
    from tilegym_db.loop.submit import submit

    (task,) = tasks_at(place, SUBMITTED_BAR)
    submit(task, place.beside / "handed_in" / key, home=place.home, root=place.root)


WRITERS: dict[str, Callable[[Place, str], None]] = {
    writer.__name__: writer
    for writer in (
        add_definition, add_version, add_solution, add_workload, update_lock, journal, search, peaks, model_run, ingest, publish,
        rebuild, import_set, export, sync, share, create_task, submit_kernel,
    )
}  # fmt: skip
BY_TIME = ("ingest", "publish", "rebuild", "sync", "share")
SUBMITTED_BAR = 1.5
"""Of the task that kernels are handed in to; those that :func:`create_task` makes have others."""


# -- what some of them read -------------------------------------------------------------------------------------------


def foreign_set(place: Place, key: str) -> None:
    """Write a data set of another project. No two have a file in common, and their folders exist: the steps are equally many."""
    for number in range(256):
        (place.home / "imported" / "objects" / f"{number:02x}").mkdir(parents=True, exist_ok=True)
    tree = foreign_sets.Tree(place.beside / "foreign" / key)
    described = foreign_sets.definition(description=key)
    tree.write(foreign_sets.DEFINITION, described)
    tree.write(foreign_sets.SOLUTION, foreign_sets.solution(content=f"{foreign_sets.SCALE}# {key}\n"))
    tree.write(
        foreign_sets.WORKLOADS, foreign_sets.lines(foreign_sets.of_workload(foreign_sets.workload(uuid=f"w-{key}")))
    )


def others_traces(place: Place, key: str) -> None:
    """Write a shared data set with four traces that another installation measured."""
    from tilegym_db.store.sharing import Row, SharedDataSet

    rows = [Row(trace_of(place, f"others-{key}", attempt).to_json()) for attempt in range(4)]
    SharedDataSet(str(place.beside / "others" / key)).add(rows, "h200")


def handed_in(place: Place, key: str) -> None:
    """Write a kernel as its author leaves it, and the task that it is for."""
    from tilegym_db.loop.tasks import create_task as create

    create("row_scale", language="python", gpu="h200", min_speedup=SUBMITTED_BAR, home=place.home)
    folder = place.beside / "handed_in" / key
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "name": "mine", "definition": "row_scale", "author": key, "sources": [{"path": "kernel.py"}],
        "spec": {"language": "python", "entry_point": "kernel.py::run", "dtypes": {"T": ["float32"]}},
    }  # fmt: skip
    (folder / "solution.json").write_text(json.dumps(record))
    (folder / "kernel.py").write_text(f"{GOOD}# {key}\n")


SOURCES: dict[str, Callable[[Place, str], None]] = {
    "import_set": foreign_set, "sync": others_traces, "submit_kernel": handed_in,
}  # fmt: skip


def bar_of(key: str) -> float:
    """Return the bar of the task of a key, which differs from those of others."""
    return 1.1 + int(key.rpartition("_")[2]) / 1000


def tasks_at(place: Place, bar: float) -> list[Any]:
    """Return every line of the journal that is a task with this bar."""
    from tilegym_db.records.loop import Task
    from tilegym_db.store.side_files import journaled

    return [task for task in journaled(Task, place.home) if abs(task.min_speedup - bar) < 1e-9]


def row_scale(place: Place) -> dict[str, Any]:
    return json.loads((place.root / "definitions" / "elementwise" / "row_scale.json").read_text())


def trace_of(place: Place, run: str, attempt: int) -> Any:
    """Return a promoted pass of the stock solution on an H200."""
    from tilegym_db.catalog import Catalog
    from tilegym_db.records import Trace
    from tilegym_db.records.trace import new_trace_id

    catalog = Catalog.default()
    definition, solution = catalog.definition("row_scale"), catalog.solution("row_scale_stock")
    workload = catalog.workloads_for("row_scale")[0]
    content = {
        "trace_id": new_trace_id(run, "promotion", attempt, solution.digest, {}, workload.uuid), "run_id": run,
        "timestamp": datetime(2026, 11, 1, 0, attempt, tzinfo=UTC), "definition": "row_scale",
        "definition_version": definition.version, "definition_digest": definition.digest, "op_type": definition.op_type,
        "solution": solution.name, "solution_digest": solution.digest, "language": "python", "role": "baseline",
        "workload_uuid": workload.uuid, "axes": workload.axes, "dtypes": workload.dtypes, "scalars": {"factor": 0.5},
        "gpu": "h200", "gpu_name": "NVIDIA H200", "sm": "sm_90", "tier": "promotion", "sandbox_level": 3, "attempt": attempt,
        "status": "PASSED", "correctness": {"rel_fro": 1e-7, "cases": 3},
        "performance": {"latency_us": 10.0 + attempt, "ci_low_us": 9.0, "ci_high_us": 15.0, "samples": 50, "timer": "events"},
    }  # fmt: skip
    return Trace.from_dict(content)


# -- running and killing them -----------------------------------------------------------------------------------------


class Steps:
    """Counts what changes the file system in this process, and kills it before a given step."""

    def __init__(self, kill_at: int | None) -> None:
        self.count = 0
        self._kill_at = kill_at
        for name in ("fsync", "write", "ftruncate", "fchmod"):
            setattr(os, name, self._counted(getattr(os, name)))
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in CHANGES or (
            event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        ):
            self.step()

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.step()
            return function(*arguments)

        return call

    def step(self) -> None:
        self.count += 1
        if self.count == self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


def _child(
    sender: Any, start: float, name: str, place: Place, key: str, kill_at: int | None, kill_after_s: float | None
) -> None:
    import tilegym_db.measurement.machine
    from tilegym_db.errors import TilegymDBError
    from tilegym_db.paths import use_root

    os.environ["TILEGYM_DB_HOME"] = str(place.home)
    tilegym_db.measurement.machine._cuda_machine = lambda index: None  # nothing is measured, wherever this runs
    time.sleep(max(0.0, start - time.time()))
    if kill_after_s is not None:
        threading.Timer(kill_after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    steps, begun = Steps(kill_at), time.monotonic()
    try:
        with use_root(place.root):
            WRITERS[name](place, key)
    except TilegymDBError as error:
        answer = "refused", str(error), steps.count, time.monotonic() - begun
    else:
        answer = "done", "", steps.count, time.monotonic() - begun
    sender.send(answer)
    sender.close()
    os._exit(0)  # a timer that has not fired yet does not delay the exit


def run(
    writers: Sequence[tuple[str, str]], place: Place, *, kill_at: int | None = None, kill_after_s: float | None = None
) -> list[Ending]:
    """Run (writer, key) pairs, all at once, each in a separate process, and return how each ended."""
    for name, key in writers:
        SOURCES.get(name, lambda place, key: None)(place, key)
    start = time.time() + (0.05 if len(writers) > 1 else 0.0)
    children = []
    for name, key in writers:
        receiver, sender = CONTEXT.Pipe(duplex=False)
        process = CONTEXT.Process(target=_child, args=(sender, start, name, place, key, kill_at, kill_after_s))
        process.start()
        sender.close()
        children.append((receiver, process))
    endings = []
    for receiver, process in children:
        assert receiver.poll(2 * WAIT_S), "the writer hangs"
        try:
            endings.append(Ending(*receiver.recv()))
        except EOFError:
            process.join()
            assert process.exitcode == -signal.SIGKILL, f"the writer broke: exit code {process.exitcode}"
            endings.append(Ending("killed"))
        process.join()
    return endings
