"""Ctrl-C and kill -9 of real ``bench`` processes: what was finished is kept, and nothing of the run lives on."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tilegym_db.catalog import Catalog
from tilegym_db.records import Trace
from tilegym_db.store.filling import ingest
from tilegym_db.store.journal import journal_files, read_journal
from tilegym_db.store.opening import open_store

HANGS = """def run(x, weight, factor, out):
    out.copy_(x * weight * factor)
    while tuple(x.shape) == (24, 48):
        pass
"""
TWO_SIZES = ({"axes": {"M": 40, "N": 32}}, {"axes": {"M": 24, "N": 48}})

# Imports once what every run imports, then makes each run of the command line a separate process.
LAUNCHER = """import os, sys
import tilegym_db.measurement.benchmark, tilegym_db.cli.bench
from tilegym_db.cli.app import main
for line in sys.stdin:
    process = os.fork()
    if process == 0:
        os.dup2(2, 1)
        sys.argv = ["tilegym-db", *line.split()]
        main()
    print(process, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
"""


@pytest.fixture
def environment(tmp_path: Path, home: Path) -> dict[str, str]:
    (tmp_path / "scratch").mkdir()
    return {**os.environ, "TILEGYM_DB_HOME": str(home), "TMPDIR": str(tmp_path / "scratch")}


def finished(home: Path) -> list[Trace]:
    """Every whole trace in the journals."""
    return [trace for path in journal_files(home) for trace in read_journal(path).traces]


def wait_until(condition: Callable[[], bool], timeout_s: float = 150) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def processes_in(folder: Path) -> list[int]:
    """The processes whose working folder lies in this one, as that of every worker does."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if Path(os.readlink(entry / "cwd")).is_relative_to(folder):
                found.append(int(entry.name))
    return found


@pytest.fixture
def hanging_bench(home, make_catalog, environment, tmp_path) -> Iterator[subprocess.Popen[str]]:
    """A bench that has finished its first workload, and whose second one hangs."""
    make_catalog(home / "catalog", {"row_scale_hangs": HANGS}, TWO_SIZES)
    command = [sys.executable, "-m", "tilegym_db.cli.app", "bench", "row_scale", "--gpu", "cpu"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            wait_until(lambda: len(finished(home)) == 2)
            time.sleep(0.3)  # into the call that hangs
            yield process
        finally:
            process.kill()


@pytest.mark.turn("tilegym_db/measurement/local_executor.py", "tilegym_db/sandbox/")  # waits for a hanging process
def test_ctrl_c_ends_a_hanging_run_and_keeps_its_measurements(hanging_bench, home, tmp_path):
    hanging_bench.send_signal(signal.SIGINT)
    out, err = hanging_bench.communicate(timeout=10)
    assert hanging_bench.returncode == 130, err
    assert "Traceback" not in err
    assert "1/1" in out
    assert processes_in(tmp_path / "scratch") == []
    assert [path.name for path in (tmp_path / "scratch").glob("tilegym-db-*")] == ["tilegym-db-timing-cpu.lock"]
    with open_store(home, read_only=True) as store:
        rows = store.rows("SELECT trace_id FROM traces WHERE definition = 'row_scale' AND gpu = 'cpu'")
    assert {row["trace_id"] for row in rows} == {trace.trace_id for trace in finished(home)}
    assert len(rows) == 2


@pytest.mark.turn("tilegym_db/sandbox/")  # test_sandbox_bounds.py kills a harness daily
def test_hanging_worker_does_not_outlive_a_killed_run(hanging_bench, tmp_path):
    assert processes_in(tmp_path / "scratch")
    hanging_bench.kill()
    wait_until(lambda: processes_in(tmp_path / "scratch") == [], timeout_s=10)


@pytest.fixture
def launch(environment, tmp_path) -> Iterator[Callable[..., tuple[int, Callable[[], int]]]]:
    """Start ``tilegym-db`` with arguments; returns the process id and a function that waits for its exit status."""
    command, pipe = [sys.executable, "-c", LAUNCHER], subprocess.PIPE
    with (tmp_path / "stderr").open("wb") as stderr:
        launcher = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=stderr, text=True)
    with launcher:
        stdin, stdout = launcher.stdin, launcher.stdout
        assert stdin is not None
        assert stdout is not None

        def start(*arguments: str) -> tuple[int, Callable[[], int]]:
            stdin.write(" ".join(arguments) + "\n")
            stdin.flush()
            return int(stdout.readline()), lambda: int(stdout.readline())

        yield start


@pytest.mark.nightly
@pytest.mark.slow
def test_random_kills_lose_no_finished_trace_and_runs_resume(launch, home, make_catalog, tmp_path, pytestconfig):
    kills = 20 if pytestconfig.option.all_records else 6  # other moments every time
    sizes = tuple({"axes": {"M": rows, "N": 8}} for rows in range(1, 3 * kills + 1))
    make_catalog(home / "catalog", workloads=sizes)
    bench = ("bench", "row_scale", "--gpu", "cpu")
    moments = random.Random(os.urandom(8))
    known: set[str] = set()
    for kill in range(kills):
        process, exit_status = launch(*bench)
        if kill % 2:  # while it starts, plans, loads
            time.sleep(moments.uniform(0, 1.5))
        else:  # while it measures and writes
            more = len(known) + moments.randrange(1, 4)
            wait_until(lambda more=more: len(finished(home)) >= more)
            time.sleep(moments.uniform(0, 0.05))
        os.kill(process, signal.SIGKILL)
        assert exit_status() == -signal.SIGKILL
        now = {trace.trace_id for trace in finished(home)}
        assert known <= now
        known = now
    assert kills / 2 <= len(known) < len(sizes)  # every other kill waited for at least one more

    _, exit_status = launch(*bench)
    assert exit_status() == 0, (tmp_path / "stderr").read_text()
    measured = Counter(trace.workload_uuid for trace in finished(home))
    assert len(measured) == len(sizes)
    assert set(measured.values()) == {1}  # a run goes on where the last one was killed
    with open_store(home, catalog=Catalog.default()) as store:
        ingest(store)
        stored = {row["trace_id"] for row in store.rows("SELECT trace_id FROM traces WHERE definition = 'row_scale'")}
    assert known <= stored == {trace.trace_id for trace in finished(home)}
    assert processes_in(tmp_path / "scratch") == []
