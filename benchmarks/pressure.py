"""Do kernels stay right when many of them run at once? Every operator of the catalog, for as long as is asked for.

A round takes some Solutions, each at a case that the package's own fuzzing draws for it: sizes around tile edges and from real
workloads, every layout that it declares, addresses off their alignment, all kinds of contents. Each is called alone first and
judged against the reference; then several threads call all of them over and over, on several streams each, in random order,
in memory that is filled anew for each call. What every call left is then held against the call that was alone: the same bytes
where the Solution is deterministic, else within what the Definition allows, and nothing written anywhere else. One job in four
is cold: it first runs among the others, so that it is compiled by several threads at once.

    python -m benchmarks.pressure --gpu all --seconds 600 --log pressure.jsonl
    python -m benchmarks.pressure --gpu cpu --seconds 30 rms_norm swiglu     # stock code, and Triton's interpreter
    python -m benchmarks.pressure --gpu 2,3 --workers 12 --seconds 270 --end 300 --log pressure.jsonl
    python -m benchmarks.pressure --gpu auto --again pressure.jsonl          # what went wrong there, once more
    python -m benchmarks.pressure --summary pressure.jsonl other.jsonl       # of runs that were cut off, or side by side

Kernels of a round share one worker process, confined as those of verification are. A round compiles most of what it calls, one
after the other, so that a device is given many operators in little time only by several workers (``--workers``). Solutions take
turns over all workers: one of each operator first. A worker that dies takes its round with it; its jobs then run once more one by
one, to find the cause. Exit status 1 after a mismatch or an error, or if nothing ran.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.pressure_jobs import Job, Load, Record, Turns, candidates
from tilegym_db.catalog import Catalog
from tilegym_db.errors import HardwareError, TilegymDBError
from tilegym_db.measurement.machine import MeasuringDevice, choose_gpus, find_gpus, parse_gpus, select_machine
from tilegym_db.paths import scratch_folder
from tilegym_db.records.hardware import CPU
from tilegym_db.sandbox.worker import WorkerDied, WorkerProcess, WorkerTimeout

WORKER = Path(__file__).with_name("pressure_worker.py")


class RunEnded(Exception):
    """A round was still running when everything had to end: it proves nothing."""


# -- one device -----------------------------------------------------------------------------------------------------------


class Device:
    """A worker of one device; another one where the first died."""

    def __init__(self, device: str, catalog: Catalog, folder: Path, load: Load) -> None:
        """Prepare; no worker is started yet."""
        self.device = device
        self._catalog, self._folder, self._load = catalog, folder, load
        self._worker: WorkerProcess | None = None
        self._started = 0
        self._ended = False

    def round(self, jobs: Sequence[Job], seed: int) -> list[dict[str, Any]]:
        """Return the answer of each job. If the worker dies or raises, every job is run alone, and that is reported."""
        answers = self._asked(jobs, seed)
        if isinstance(answers, list):
            return answers
        if len(jobs) == 1:
            return [failed(answers)]
        alone = [self.round([job], seed)[0] for job in jobs]
        if any(answer.get("errors") or answer.get("mismatches") for answer in alone):
            return alone
        return [failed(f"in a round in which {answers}; it runs alone") for _ in jobs]

    def _asked(self, jobs: Sequence[Job], seed: int) -> list[dict[str, Any]] | str:
        load = self._load
        try:
            worker = self._running()
            reply = worker.request(
                "round",
                timeout_s=load.timeout_s,
                jobs=[job.to_message() for job in jobs],
                seed=seed,
                threads=load.threads,
                streams=load.streams,
                repeats=load.repeats,
            )
        except (WorkerDied, WorkerTimeout) as error:
            self.close()
            if self._ended:
                raise RunEnded from None
            return f"the worker was lost: {str(error).splitlines()[0]}"
        if not reply.ok:
            self.close()  # a GPU's context does not survive every error
            return f"the worker raised: {reply.summary}"
        answers: list[dict[str, Any]] = reply.content["jobs"]
        return answers

    def _running(self) -> WorkerProcess:
        if self._ended:
            raise RunEnded
        if self._worker is None:
            self._started += 1
            roots = [root for root in self._catalog.roots if root.is_dir()]
            folders = [root / name for root in roots for name in ("definitions", "solutions", "workloads")]
            self._worker = WorkerProcess(
                self.device,
                self._folder / f"worker-{self._started}",
                {"TRITON_INTERPRET": "1"} if self.device == CPU else {},
                readable=[folder for folder in folders if folder.is_dir()],
                script=WORKER,
            )
            opened = self._worker.request("open", timeout_s=self._load.timeout_s, roots=[str(root) for root in roots])
            if not opened.ok:
                raise HardwareError(f"{self.device}: the worker cannot read the records: {opened.summary}")
            if self._ended:  # while it was started
                raise RunEnded
        return self._worker

    def end(self) -> None:
        """End the worker for good, from whatever thread; the round that it runs raises :class:`RunEnded`."""
        self._ended = True
        worker = self._worker
        if worker is not None:
            worker.kill()

    def close(self) -> None:
        """End the worker."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None


def end_all(devices: Sequence[Device]) -> None:
    """End the workers of all of them for good."""
    for device in devices:
        device.end()


def failed(why: str) -> dict[str, Any]:
    """Return the answer for a job that gave none."""
    return {"calls": 0, "excused": "", "mismatches": 0, "errors": 1, "told": [why]}


# -- all of it ------------------------------------------------------------------------------------------------------------


def press(device: Device, turns: Turns, options: argparse.Namespace, record: Record, until: float) -> None:
    """Round after round in one worker; at least one."""
    load = load_of(options)
    try:
        for _ in rounds(until):
            jobs, seed = turns.next_jobs(options.jobs)
            if not jobs:
                return  # nothing runs here, or at no size that is drawn
            run(device, jobs, seed, load, record)
    except RunEnded:
        return
    finally:
        device.close()


def rounds(until: float) -> Iterator[int]:
    """Yield numbers from 0, until a time of the monotonic clock has come; one at least."""
    number = 0
    while number == 0 or time.monotonic() < until:
        yield number
        number += 1


def run(device: Device, jobs: Sequence[Job], seed: int, load: Load, record: Record) -> None:
    """Add one round to the record."""
    for job, answer in zip(jobs, device.round(jobs, seed), strict=True):
        record.add(device.device, job, answer, seed, load)


def again(device: Device, file: Path, options: argparse.Namespace, record: Record) -> None:
    """Repeat the rounds of a log in which something went wrong, under the load that is asked for now."""
    lines = lines_of(file)
    wrong = dict.fromkeys(line["round"] for line in lines if line.get("mismatches") or line.get("errors"))
    try:
        for seed in wrong:
            run(device, [Job.of_log(line) for line in lines if line["round"] == seed], seed, load_of(options), record)
    except RunEnded:
        return
    finally:
        device.close()


def lines_of(file: Path) -> list[dict[str, Any]]:
    """Return the lines of a log."""
    return [json.loads(text) for text in file.read_text(encoding="utf-8").splitlines() if text.strip()]


def load_of(options: argparse.Namespace) -> Load:
    """Return the load that the options ask for."""
    return Load(options.threads, options.streams, options.repeats, options.timeout)


def devices(asked: str) -> list[tuple[str, str]]:
    """Return (torch's name, ``sm_XX``) of every device that ``--gpu`` means.

    Raises:
        TilegymDBError: there is no such device here.
    """
    if asked in ("auto", CPU):
        machine = select_machine(asked)
        return [(machine.device, machine.sm or CPU)]
    chosen: list[MeasuringDevice] = choose_gpus(
        parse_gpus(asked if "," in asked or asked == "all" else f"{asked},"), find_gpus()
    )
    return [(f"cuda:{one.index}", select_machine("auto", one.index).sm) for one in chosen]


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="operators; all that have kernels by default")
    parser.add_argument("--gpu", default="auto", help="auto, cpu, all, or indices: 0,1")
    parser.add_argument("--seconds", type=float, default=600.0, help="a round that has begun by then is finished")
    parser.add_argument("--end", type=float, default=math.inf, help="seconds; a round still running then is given up")
    parser.add_argument("--workers", type=int, default=1, help="processes of each device, each with separate rounds")
    parser.add_argument("--threads", type=int, default=4, help="that call kernels at once")
    parser.add_argument("--streams", type=int, default=3, help="of each thread, on a GPU")
    parser.add_argument("--repeats", type=int, default=4, help="calls of each thread of one Solution in a round")
    parser.add_argument("--jobs", type=int, default=8, help="Solutions in a round")
    parser.add_argument("--shapes", type=int, default=24, help="of a Solution; each one may have to be compiled for")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for one round")
    parser.add_argument("--language", action="append", default=[], help="only Solutions in it; may be given again")
    parser.add_argument("--log", type=Path, help="JSON lines to write, one for each Solution in a round")
    parser.add_argument(
        "--again", type=Path, metavar="FILE", help="run the rounds of such a log in which something went wrong"
    )
    parser.add_argument("--summary", type=Path, nargs="+", metavar="FILE", help="run nothing: the table of such logs")
    parser.add_argument(
        "--catalog", type=Path, action="append", help="root folder of records; by default those that ship"
    )
    options = parser.parse_args(arguments)
    counts = ("workers", "threads", "streams", "repeats", "jobs", "shapes")
    if min(getattr(options, name) for name in counts) < 1 or options.seconds < 0:
        parser.error(f"{', '.join(f'--{name}' for name in counts)} are at least 1, --seconds at least 0")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; print what came of it. 1 where something is wrong, or nothing ran."""
    options = parsed(arguments)
    try:
        catalog = Catalog(tuple(options.catalog)) if options.catalog else Catalog.default()
        found = devices(options.gpu)
        sm = found[0][1]  # of all: devices are chosen of one kind
        chosen = candidates(catalog, sm, options.names, options.language)
    except TilegymDBError as error:
        print(error, file=sys.stderr)
        return 1
    expected = set() if options.again else {one.key for one in chosen}
    if options.summary:
        record = Record(None)
        for line in (line for file in options.summary for line in lines_of(file)):
            record.count(line)
        return told(record, expected)
    turns = Turns(catalog, chosen, sm, options.shapes, options.seed)
    log = options.log.open("a", encoding="utf-8") if options.log else None
    record, until = Record(log), time.monotonic() + options.seconds
    names = [name for name, _ in found for _ in range(1 if options.again else options.workers)]
    with scratch_folder() as folder, ThreadPoolExecutor(len(names)) as pool:
        workers = [Device(name, catalog, folder / str(n), load_of(options)) for n, name in enumerate(names)]
        timer = threading.Timer(min(options.end, threading.TIMEOUT_MAX), end_all, [workers])
        timer.daemon = True
        timer.start()
        running = [
            pool.submit(again, one, options.again, options, record)
            if options.again
            else pool.submit(press, one, turns, options, record, until)
            for one in workers
        ]
        lost = [why for done in running if (why := done.exception()) is not None]
        timer.cancel()
    if log is not None:
        log.close()
    for why in lost:
        print(f"a worker was given up: {why!r}", file=sys.stderr)
    return told(record, expected) or int(bool(lost))


def told(record: Record, expected: set[tuple[str, str]]) -> int:
    """Print the table and what it comes to; the exit status."""
    print(record.table(expected))
    print(record.summary(expected))
    return int(record.total("mismatches") + record.total("errors") > 0 or not record.total("calls"))


if __name__ == "__main__":
    sys.exit(main())
