"""Batches of Solutions under compute-sanitizer, as many processes at a time as there are cores, until a deadline.

Each batch runs once without a tool. That compiles its kernels into caches that the tools' runs then read, and says of a kernel
that fails by itself that no tool is to blame. What a process that crashed or hung had already done is run again without the
Solution at fault.
"""

from __future__ import annotations

import heapq
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from tilegym_db.measurement.instruments.requests import ENVIRONMENT, Chosen, mark_of, write_request
from tilegym_db.measurement.instruments.sanitize import PREFIX, Sanitized, parse_report, sanitizer_command, verdicts_of
from tilegym_db.measurement.machine import VISIBLE

__all__ = ["NO_TIME", "PLAIN", "Batch", "Outcome", "Sweep", "device_of", "with_port"]

PLAIN = "plain"
"""The run without a tool."""
PORTS = 64
"""For each process at a time: the tool talks to its process over one, and by itself tries ten from the same one on."""
CONNECT_S = 120
"""A process imports PyTorch before it calls CUDA: beside many others that takes longer than the 10 s that the tool waits."""
STALL_S = 100.0
"""A process that prints nothing for this long hangs: it prints a line before each call."""
ATTEMPTS = 3
NO_TIME = "not run: no time was left"
SAID_CHARACTERS = 3000
_CACHES = {
    "TRITON_CACHE_DIR": "triton",
    "TILELANG_CACHE_DIR": "tilelang",
    "CUDA_TILE_CACHE_DIR": "cutile",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
}


@dataclass(frozen=True)
class Batch:
    """Work of one process, the tool that it runs under, and the tools that come after it."""

    tool: str
    solutions: Sequence[Chosen]
    then: Sequence[str] = ()
    attempt: int = 1
    """Of the same Solutions, after a process that did not come to its end."""
    is_control: bool = False
    """A planted mistake, which runs before everything else."""


@dataclass(frozen=True)
class Outcome:
    """A result, how long the calls took, and what the process printed last where that may explain it."""

    result: Sanitized
    seconds: float | None = None
    said: str = ""


@dataclass
class Sweep:
    """Batches on their way through a pool of processes, until a deadline."""

    program: Path
    device: str
    jobs: int
    deadline: float
    """By ``time.monotonic()``."""
    caches: Path
    """Folder of compiled kernels, which all processes share."""
    say: Callable[[Outcome], None] = print
    stall_s: float = STALL_S
    gpus: int = 1
    """Processes are spread over so many devices."""
    order: Sequence[str] = ()
    """Tools, the most urgent first."""
    rank: Callable[[Batch], tuple[int, ...]] | None = None
    """How urgent a batch is, the smallest first, where that is more than a question of its tool."""
    outcomes: list[Outcome] = field(default_factory=list)
    _waiting: list[tuple[tuple[int, ...], int, Batch]] = field(default_factory=list)
    _running: int = 0
    _count: int = 0
    _change: threading.Condition = field(default_factory=threading.Condition)
    _slots: queue.SimpleQueue[int] = field(default_factory=queue.SimpleQueue)

    def __post_init__(self) -> None:
        for slot in range(self.jobs):
            self._slots.put(slot)

    def run(self, batches: Sequence[Batch]) -> list[Outcome]:
        """Return every Solution's outcome for every tool, in the order in which they came."""
        for batch in batches:
            self._push(batch)
        with ThreadPoolExecutor(self.jobs) as pool:
            for worker in [pool.submit(self._work) for _ in range(self.jobs)]:
                worker.result()
        return self.outcomes

    # -- queue -----------------------------------------------------------------------------------------------------------

    def _push(self, batch: Batch) -> None:
        if not batch.solutions:
            return
        with self._change:
            self._count += 1
            heapq.heappush(self._waiting, (self._urgency(batch), self._count, batch))
            self._change.notify()

    def _urgency(self, batch: Batch) -> tuple[int, ...]:
        if batch.is_control:
            return (-1,)
        if self.rank is not None:
            return self.rank(batch)
        return (self.order.index(batch.tool) if batch.tool in self.order else -1,)

    def _work(self) -> None:
        while True:
            with self._change:
                while not self._waiting and self._running:
                    self._change.wait()
                if not self._waiting:
                    return
                _, _, batch = heapq.heappop(self._waiting)
                self._running += 1
            try:
                self._batch(batch)
            finally:
                with self._change:
                    self._running -= 1
                    self._change.notify_all()

    def _tell(self, outcome: Outcome) -> None:
        with self._change:
            self.outcomes.append(outcome)
            self.say(outcome)

    # -- one batch -------------------------------------------------------------------------------------------------------

    def _batch(self, batch: Batch) -> None:
        if time.monotonic() >= self.deadline:
            for tool in (batch.tool, *batch.then):
                for item in batch.solutions:
                    self._tell(Outcome(Sanitized(item, tool, problem=NO_TIME)))
            return
        slot = self._slots.get()
        started = time.monotonic()
        try:
            text, ended = self._output_of(batch, slot)
        finally:
            self._slots.put(slot)
        self._judge(batch, text, ended, time.monotonic() - started)

    def _judge(self, batch: Batch, text: str, ended: str, seconds: float) -> None:
        """Report known verdicts, and queue the rest of the batch and its next tool."""
        report = parse_report(text)
        report.is_complete = not ended and (report.is_complete or batch.tool == PLAIN)
        results, left = verdicts_of(batch.tool, batch.solutions, report)
        if ended == NO_TIME:
            results += [Sanitized(item, batch.tool, problem=NO_TIME) for item in left]
            left = []
        retries: list[Chosen] = []
        passed: list[Chosen] = []
        for result in results:
            name = result.chosen.files.name
            again = name in report.done and bool(result.problem) and ended != NO_TIME and batch.attempt < ATTEMPTS
            if again:
                retries.append(result.chosen)
                continue
            problem = NO_TIME if NO_TIME in result.problem else result.problem
            if batch.tool == PLAIN:
                problem = problem.replace("compute-sanitizer did", "the process did")
            result = replace(result, problem=problem)
            self._tell(Outcome(result, report.seconds.get(name, seconds), tail_of(text) if result.problem else ""))
            passed += [result.chosen] if batch.then and not (batch.tool == PLAIN and result.problem) else []
            if batch.tool == PLAIN and result.problem:
                self._give_up(result, batch.then)
        self._push(replace(batch, solutions=retries, attempt=batch.attempt + 1))
        self._push(replace(batch, solutions=left))
        if batch.then and passed:
            self._push(Batch(batch.then[0], passed, batch.then[1:]))

    def _give_up(self, result: Sanitized, tools: Sequence[str]) -> None:
        why = NO_TIME if result.problem == NO_TIME else f"not run under it: fails without a tool: {result.problem}"
        for tool in tools:
            self._tell(Outcome(Sanitized(result.chosen, tool, problem=why)))

    def _output_of(self, batch: Batch, slot: int) -> tuple[str, str]:
        """Return what a process printed, and why it was ended, if it was."""
        with tempfile.TemporaryDirectory(prefix="sanitize-") as name:
            folder = Path(name)
            request, output = folder / "request.json", folder / "output"
            write_request(request, self.device, [item.calls for item in batch.solutions])
            command = command_of(self.program, batch.tool, request, slot)
            with output.open("wb") as written:
                process = subprocess.Popen(
                    command, cwd=folder, env=self._environment(slot), stdin=subprocess.DEVNULL, stdout=written,
                    stderr=subprocess.STDOUT, start_new_session=True,
                )  # fmt: skip
            ended = self._watched(process, output)
            text = output.read_bytes().decode(errors="replace")
        return (f"{text}\n{PREFIX} {ended}\n" if ended else text), ended

    def _watched(self, process: subprocess.Popen[bytes], output: Path) -> str:
        """Wait for a process; end one that prints nothing any more, or that is still there at the deadline, and say so."""
        size, since, ended = -1, time.monotonic(), ""
        while not ended:
            try:
                return _last_word(process.wait(0.2))
            except subprocess.TimeoutExpired:
                now, grown = time.monotonic(), output.stat().st_size
                if grown != size:
                    size, since = grown, now
                if now >= self.deadline:
                    ended = NO_TIME
                elif now - since >= self.stall_s:
                    ended = f"ended by the sweep: it printed nothing for {self.stall_s:.0f} s"
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return ended

    def _environment(self, slot: int) -> dict[str, str]:
        shared = {variable: str(self.caches / name) for variable, name in _CACHES.items()}
        environment = {**os.environ, **ENVIRONMENT, **shared, "OMP_NUM_THREADS": "1"}
        if self.gpus > 1:
            environment[VISIBLE] = device_of(slot, self.gpus, os.environ.get(VISIBLE, ""))
        return environment


def device_of(slot: int, gpus: int, visible: str) -> str:
    """Return the one device that the processes of a slot see; only some may be visible to begin with, as ``2,3``."""
    names = [name.strip() for name in visible.split(",") if name.strip()] or [str(number) for number in range(gpus)]
    return names[slot % min(gpus, len(names))]


def _last_word(status: int) -> str:
    """Return why a process that ended by itself proves nothing: a signal ended it. What raised has said so."""
    return f"ended by {signal.Signals(-status).name}" if status < 0 else ""


def command_of(program: Path, tool: str, request: Path, slot: int) -> list[str]:
    """Return the command line of one process, under its tool or without one."""
    if tool == PLAIN:
        return [sys.executable, "-m", "tilegym_db.measurement.instruments.calls", str(request)]
    return with_port(sanitizer_command(program, tool, request), slot)


def with_port(command: Sequence[str], slot: int) -> list[str]:
    """Return the command with separate ports, so that many run side by side."""
    first = 49152 + PORTS * slot
    ours = ("--port", str(first), "--max-connections", str(PORTS), "--launch-timeout", str(CONNECT_S))
    return [command[0], *ours, *command[1:]]


def tail_of(text: str) -> str:
    """Return the end of a process's output without its own marks: a traceback, a compiler's error, a tool's last words."""
    kept = "\n".join(line for line in text.splitlines() if mark_of(line) is None)
    return kept[-SAID_CHARACTERS:]
