"""Sequences of commands with faults between and in them: nothing acknowledged is lost, and each result is one of those allowed.

The faults are a kill at any write or moment, a full disk, a read-only home, a torn line of a journal, a lost database, and two
processes at once.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
from command_outcome import STATUSES, outcome
from disk_limit import full_disk
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

import tilegym_db
from tilegym_db.catalog import Catalog
from tilegym_db.paths import use_root
from tilegym_db.store.journal import read_journal

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NAMES = ("mine", "other")
BODIES = tuple(
    f"def run(x, weight, factor, out):\n    out.copy_({product})\n"
    for product in ("x * weight * factor", "weight * x * factor")
)
READERS = (
    ["list"], ["list", "--solutions"], ["best"], ["best", "--rank"], ["show", "row_scale"], ["sql", "FROM best"],
    ["report", "weekly"], ["check", "--static"],
    ["explain", "row_scale", "--axes", "M=4,N=8", "--dtype", "T=float32", "--gpu", "h200"],
)  # fmt: skip
IN_A_PROCESS = """
import ctypes, os, signal, sys
root, at, obeys, *line = sys.argv[1:]
left = int(at)
if obeys == "modes" and os.geteuid() == 0:  # root may write to everything unless it gives up that capability
    libc, nothing = ctypes.CDLL(None, use_errno=True), (ctypes.c_uint32 * 6)()
    assert libc.capset((ctypes.c_uint32 * 2)(0x20080522, 0), nothing) == 0, os.strerror(ctypes.get_errno())
def counted(call):
    def run(*given, **options):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*given, **options)
    return run
for name in ("fsync", "replace", "rename", "link", "unlink", "mkdir", "ftruncate"):
    setattr(os, name, counted(getattr(os, name)))
from pathlib import Path
from tilegym_db.paths import use_root
from tilegym_db.cli.app import main
sys.argv = ["tilegym-db", *line]
with use_root(Path(root)):
    main()
"""
KILLED = -9
PUBLISH = ["publish", "--gpu", "h200"]
BENCH = ["bench", "row_scale_stock", "--gpu", "cpu", "--quick", "--force"]
VERIFY = ["verify", "row_scale_stock", "--gpu", "cpu", "--force"]
MOST_RUNS = 2
"""Of bench and verify in a sequence: each takes many seconds."""


class Sequences(RuleBasedStateMachine):
    """A home and a checkout, with what they must hold."""

    start: Callable[[], tuple[Path, Path]]
    journal: Callable[..., list[str]]

    def __init__(self) -> None:
        super().__init__()
        self.root, self.home = self.start()
        self.resources = ExitStack()
        self.resources.enter_context(use_root(self.root))
        self.environment = self.resources.enter_context(pytest.MonkeyPatch.context())
        self.environment.setenv("TILEGYM_DB_HOME", str(self.home))
        self.solutions: dict[str, str] = {}
        self.traces: set[str] = set()
        self.timed_here: set[str] = set()
        self.runs = 0
        self.data_set, self.mates_home = self.home.parent / "shared", self.home.parent / "home of a mate"
        self.shared: set[str] = set()

    def teardown(self) -> None:
        self.resources.close()

    # -- what is there ------------------------------------------------------------------------------------------------

    def found(self) -> dict[str, str]:
        """Return the body of each of our Solutions."""
        catalog = Catalog((self.root,), warns=False)
        assert not catalog.broken(), catalog.broken()
        kept = {name: catalog.solutions[name] for name in NAMES if name in catalog.solutions}
        return {name: next(iter(files.sources.values())).decode() for name, files in kept.items()}

    def did(self, line: list[str]) -> int:
        code, errors = outcome(line)
        assert code in STATUSES, (line, errors)
        assert "Traceback" not in errors, (line, errors)
        return code

    def adding(self, name: str, body: int, replaces: bool) -> list[str]:
        source = self.home.parent / f"{self.home.name}-{body}.py"
        source.write_text(BODIES[body])
        line = ["add-solution", str(source), "-d", "row_scale", "-l", "python", "--name", name]
        return [*line, "--replace"] if replaces else line

    def settle(self, *allowed: dict[str, str]) -> None:
        """Check that one of some states is there, and go on from it."""
        there = self.found()
        assert there in allowed
        self.solutions = there

    def after(self, line: list[str], state: dict[str, str]) -> dict[str, str]:
        """Return the state after a command that nothing disturbs."""
        if line[0] not in ("remove", "add-solution"):
            return state
        if line[0] == "remove":
            return {name: body for name, body in state.items() if name != line[1]}
        name, body = line[line.index("--name") + 1], Path(line[1]).read_text()
        return {**state, name: body} if name not in state or "--replace" in line else state

    @property
    def sharing(self) -> list[str]:
        return [*PUBLISH, "--to", str(self.data_set)]

    @property
    def syncing(self) -> list[str]:
        return ["data", "sync", str(self.data_set)]

    @contextmanager
    def of_the_mate(self) -> Iterator[None]:
        """Give commands of the block the home of another installation, which only knows what is shared or published."""
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("TILEGYM_DB_HOME", str(self.mates_home))
            yield

    # -- commands -----------------------------------------------------------------------------------------------------

    @rule(name=st.sampled_from(NAMES), body=st.integers(0, 1), replaces=st.booleans())
    def add(self, name: str, body: int, replaces: bool) -> None:
        line = self.adding(name, body, replaces)
        refused = not replaces and self.solutions.get(name, BODIES[body]) != BODIES[body]
        assert self.did(line) == (1 if refused else 0)
        self.settle(self.after(line, self.solutions))

    @rule(name=st.sampled_from(NAMES))
    def remove(self, name: str) -> None:
        assert self.did(["remove", name]) == (0 if name in self.solutions else 2)
        self.settle(self.after(["remove", name], self.solutions))

    @rule(count=st.integers(1, 3))
    def measure(self, count: int) -> None:
        for _ in range(count):
            name = f"t{len(self.traces)}"
            self.journal(3.0 + len(self.traces), trace_id=name, run_id="run")
            self.traces.add(name)

    @rule(line=st.sampled_from(READERS))
    def read(self, line: list[str]) -> None:
        assert self.did(line) in (0, 3)

    @rule(rebuilds=st.booleans())
    def ingest(self, rebuilds: bool) -> None:
        assert self.did(["data", "ingest", *(["--rebuild"] if rebuilds else [])]) == 0
        self.every_trace_is_there()

    @rule()
    def publish(self) -> None:
        assert self.did(PUBLISH) == (0 if self.traces else 2)
        if self.traces:
            self.published_is_whole()

    @rule()
    def share(self) -> None:
        assert self.did(self.sharing) == 0
        self.shared = set(self.traces)
        self.shared_is_whole()

    @rule()
    def sync(self) -> None:
        if self.data_set.exists():
            with self.of_the_mate():
                assert self.did(self.syncing) == 0
            self.mate_has_what_was_shared()

    @precondition(lambda self: self.runs < MOST_RUNS)
    @rule(line=st.sampled_from([BENCH, VERIFY]), killed_after_s=st.sampled_from([None, 2, 6, 12]))
    def bench(self, line: list[str], killed_after_s: float | None) -> None:
        self.runs += 1
        process = self.process(line)
        if killed_after_s is not None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(killed_after_s)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        self.ended(process, line, timeout_s=240)
        self.timed_here = {
            trace.trace_id
            for path in (self.home / "runs").glob("*.jsonl")
            for trace in read_journal(path).traces
            if trace.gpu == "cpu"
        }
        self.every_trace_is_there()

    @rule(gpu=st.sampled_from(["h200", "cpu"]))
    def resolve(self, gpu: str) -> None:
        found = tilegym_db.resolve("row_scale", axes={"M": 4, "N": 8}, dtypes={"T": "float32"}, gpu=gpu)
        assert found.solution.name in {"row_scale_stock", *self.solutions}

    # -- faults -------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.home.exists())
    @rule(data=st.data())
    def home_is_read_only(self, data: st.DataObject) -> None:
        line = data.draw(st.sampled_from([*READERS, self.adding("mine", 0, True), ["data", "ingest"], PUBLISH]))
        places = [self.home, *self.home.rglob("*")]
        modes = {path: path.stat().st_mode for path in places if not path.is_symlink()}
        for path, mode in modes.items():
            path.chmod(mode & 0o555)
        try:
            self.ended(self.process(line, obeys="modes"), line)
        finally:
            for path, mode in modes.items():
                path.chmod(mode)
        self.settle(self.solutions, self.after(line, self.solutions))  # what is added lies in the checkout
        self.every_trace_is_there()

    @rule()
    def a_writer_dies_within_a_line(self) -> None:
        for path in (self.home / "runs").glob("*.jsonl"):
            with path.open("ab") as file:
                file.write(b'{"trace_id": "torn", "run_id": ')
            break

    @rule()
    def database_is_lost(self) -> None:
        for path in self.home.glob("tilegym.duckdb*"):
            path.unlink()

    @rule(name=st.sampled_from(NAMES), body=st.integers(0, 1), size=st.sampled_from([0, 60, 500, 5000]))
    def disk_is_full(self, name: str, body: int, size: int) -> None:
        line = self.adding(name, body, True)
        with full_disk(size):
            self.did(line)
        self.settle(self.solutions, self.after(line, self.solutions))

    @rule(size=st.sampled_from([0, 5000, 300_000]))
    def disk_is_full_for_the_database(self, size: int) -> None:
        with full_disk(size):
            self.did(["data", "ingest"])
        self.every_trace_is_there()

    @rule(name=st.sampled_from(NAMES), body=st.integers(0, 1), at=st.integers(1, 16), removes=st.booleans())
    def process_is_killed(self, name: str, body: int, at: int, removes: bool) -> None:
        line = ["remove", name] if removes else self.adding(name, body, True)
        self.ended(self.process(line, at), line)
        self.settle(self.solutions, self.after(line, self.solutions))

    @rule(at=st.integers(1, 16), rebuilds=st.booleans())
    def ingest_is_killed(self, at: int, rebuilds: bool) -> None:
        line = ["data", "ingest", *(["--rebuild"] if rebuilds else [])]
        self.ended(self.process(line, at), line)
        self.every_trace_is_there()

    @rule(name=st.sampled_from(NAMES), bodies=st.permutations([0, 1]), replaces=st.booleans(), removes=st.booleans())
    def two_processes_at_once(self, name: str, bodies: list[int], replaces: bool, removes: bool) -> None:
        first = self.adding(name, bodies[0], replaces)
        second = ["remove", name] if removes else self.adding(name, bodies[1], replaces)
        lines = (first, second)
        for process, line in [(self.process(line), line) for line in lines]:
            self.ended(process, line)
        orders = (lines, (second, first))
        self.settle(*(self.after(b, self.after(a, self.solutions)) for a, b in orders))

    @rule(line=st.sampled_from(READERS))
    def reader_beside_a_writer(self, line: list[str]) -> None:
        writer = self.process(["data", "ingest", "--rebuild"])
        self.read(line)
        assert self.ended(writer, ["data", "ingest", "--rebuild"]) == 0

    @rule(at=st.integers(1, 24))
    def publish_is_killed(self, at: int) -> None:
        self.ended(self.process(PUBLISH, at), PUBLISH)
        self.every_trace_is_there()  # readers take what is whole
        self.publish()

    @rule(size=st.sampled_from([0, 60, 500, 5000]))
    def disk_is_full_for_publishing(self, size: int) -> None:
        with full_disk(size):
            self.did(PUBLISH)
        self.every_trace_is_there()
        self.publish()

    @rule(at=st.integers(1, 24), syncs=st.booleans())
    def exchange_is_killed(self, at: int, syncs: bool) -> None:
        if syncs and not self.data_set.exists():
            return
        line = self.syncing if syncs else self.sharing
        with self.of_the_mate() if syncs else nullcontext():
            self.ended(self.process(line, at), line)
        self.share()
        self.sync()

    @rule(others=st.sampled_from(["publish", "ingest", "rebuild", "share"]))
    def publish_beside_another_writer(self, others: str) -> None:
        line = {
            "publish": PUBLISH, "ingest": ["data", "ingest"], "rebuild": ["data", "ingest", "--rebuild"], "share": self.sharing,
        }[others]  # fmt: skip
        both = [(self.process(one), one) for one in (PUBLISH, line)]
        for process, one in both:
            assert self.ended(process, one) in ((0,) if self.traces or one != PUBLISH else (2,)), one
        self.every_trace_is_there()
        self.publish()

    @rule()
    def sync_beside_share(self) -> None:
        self.share()
        if not self.traces:
            return  # nothing is shared, so there is no data set
        with self.of_the_mate():
            syncing = self.process(self.syncing)
        assert self.did(self.sharing) == 0
        assert self.ended(syncing, self.syncing) == 0
        self.mate_has_what_was_shared()

    def process(self, line: list[str], kill_at: int = 0, obeys: str = "") -> subprocess.Popen[bytes]:
        words = [sys.executable, "-c", IN_A_PROCESS, str(self.root), str(kill_at), obeys, *line]
        return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)

    def ended(self, process: subprocess.Popen[bytes], line: list[str], timeout_s: float = 60) -> int:
        _, errors = process.communicate(timeout=timeout_s)
        assert process.returncode in {*STATUSES, KILLED}, (line, errors)
        assert b"Traceback" not in errors, (line, errors)
        return process.returncode

    # -- what always holds --------------------------------------------------------------------------------------------

    @invariant()
    def solutions_are_those_that_were_acknowledged(self) -> None:
        assert self.found() == self.solutions

    def published_is_whole(self) -> None:
        """Check that the published folder is one of its lock, and holds traces that were measured."""
        from tilegym_db.published.input_files import published_folders, read_traces, trace_files
        from tilegym_db.published.snapshot import open_snapshot

        (folder,) = published_folders(Catalog((self.root,), warns=False))
        snapshot, files = open_snapshot(folder, self.home), trace_files(folder)
        digests = {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
        assert digests.items() <= dict(snapshot.files).items()
        found = {trace.trace_id for path in files for trace in read_traces(path.read_bytes(), path)}
        assert found
        assert found <= self.traces

    def shared_is_whole(self) -> None:
        from tilegym_db.store.sharing import SharedDataSet

        data_set = SharedDataSet(str(self.data_set))
        read = [data_set.rows(file) for file in data_set.files()] if self.data_set.exists() else []
        assert not any(problem for _, problem in read)
        assert {json.loads(row.record)["trace_id"] for rows, _ in read for row in rows} == self.shared

    def mate_has_what_was_shared(self) -> None:
        from tilegym_db.store.opening import open_store

        with open_store(self.mates_home, read_only=True) as store:
            rows = store.rows("SELECT trace_id, origin FROM traces WHERE definition = 'row_scale'")
        assert self.shared <= {row["trace_id"] for row in rows} <= self.traces
        assert len({row["trace_id"] for row in rows}) == len(rows)

    def every_trace_is_there(self) -> None:
        from tilegym_db.store.filling import ingest
        from tilegym_db.store.opening import open_store

        with open_store() as store:
            ingest(store)
            rows = store.rows("SELECT trace_id FROM traces WHERE definition = 'row_scale'")
        assert {row["trace_id"] for row in rows} == self.traces | self.timed_here
        assert len(rows) == len(self.traces | self.timed_here)


@pytest.mark.turn("tilegym_db/store/")  # single commands are fuzzed daily
def test_sequence_of_commands_and_faults_loses_nothing(
    row_scale: Path, journal_traces: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    monkeypatch.chdir(tmp_path)
    made: list[Path] = []

    def start() -> tuple[Path, Path]:
        place = tmp_path / f"example-{len(made)}"
        made.append(place)
        shutil.copytree(row_scale, place / "checkout")
        return place / "checkout", place / "home"

    monkeypatch.setattr(Sequences, "start", staticmethod(start), raising=False)
    monkeypatch.setattr(Sequences, "journal", staticmethod(journal_traces), raising=False)
    run_state_machine_as_test(
        Sequences,
        settings=settings(
            max_examples=EXAMPLES if pytestconfig.option.all_records else SOME_EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            database=None,
            phases=[Phase.generate],  # to make a sequence shorter takes minutes; the failing one is short already
            suppress_health_check=list(HealthCheck),
        ),
    )


EXAMPLES, SOME_EXAMPLES, STEPS = 10, 3, 12
"""Ten sequences take about two minutes of an idle core; a run of the sample draws three."""
