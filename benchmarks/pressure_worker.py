"""The confined end of ``pressure.py``: loads kernels and calls them from several threads on several streams at once.

It runs in place of the program of a worker (:mod:`tilegym_db.sandbox.worker`). Unlike verification it compares in the
process in which the kernels run: what is looked for are kernels that disturb each other, not kernels that cheat.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch

from tilegym_db.backends.compile_cache import use_own_folders
from tilegym_db.backends.load import load_entry
from tilegym_db.backends.toolchains import prepare_environment, repair_interpreter
from tilegym_db.catalog import Catalog, SolutionFiles, stock_of
from tilegym_db.errors import SolutionError, TilegymDBError, ToolchainError
from tilegym_db.records import Definition
from tilegym_db.records.call import Call
from tilegym_db.records.workload import Case
from tilegym_db.sandbox.program import copy_returned
from tilegym_db.sandbox.protocol import Channel
from tilegym_db.sandbox.shared_buffers import (
    SharedBuffers,
    SlotPlan,
    plan_slot,
    same_bytes,
    tensor_view,
    tensors_of_slot,
)
from tilegym_db.verification.expected import OracleCase, make_oracle_case
from tilegym_db.verification.verifier import (
    POISON_NAN,
    Failure,
    check_memory,
    fill_slot,
    judge,
    read_outputs,
)

FILLS = (POISON_NAN, None)
"""What outputs hold before a call: bytes that read as NaN, or random ones."""
MOST_BYTES = 4 << 30
"""Of what the calls of one round leave behind until they are compared; with larger tensors there are fewer calls."""
MODES: tuple[Callable[[], Any], ...] = (torch.inference_mode, torch.no_grad, contextlib.nullcontext)
MAX_MESSAGE = 300
TOLD = 3
"""Mismatches and errors of one job that are reported in full."""

_interpreting = threading.Lock()
"""Triton's interpreter keeps the program that it runs in globals: two calls at once are more than it takes."""


class Memory:
    """Slots of the tensors of one call, as :class:`SharedBuffers` has them, of this process alone."""

    def __init__(self, plan: SlotPlan, slots: Sequence[torch.Tensor]) -> None:
        """Keep slots of these bytes, guard bands included."""
        self.plan = plan
        self._slots = slots

    def slot(self, index: int) -> torch.Tensor:
        """Return the bytes of one slot."""
        return self._slots[index]

    def tensor(self, index: int, name: str) -> torch.Tensor:
        """Return one tensor of one slot."""
        plan = next(tensor for tensor in self.plan.tensors if tensor.name == name)
        return tensor_view(self.slot(index), plan)


def memory_of(plan: SlotPlan, slots: Sequence[torch.Tensor]) -> SharedBuffers:
    """Wrap slots for the functions of verification, which only look at slots and tensors."""
    return cast(SharedBuffers, Memory(plan, slots))


@dataclass(frozen=True)
class Left:
    """The bytes that one call left in its slot, and which call it was."""

    where: str
    fill: int
    content: torch.Tensor


@dataclass
class Job:
    """One Solution at one case.

    ``cold``: nothing of it has run before, so that what compiles does so in several threads at once.
    """

    definition: Definition
    files: SolutionFiles
    expected: OracleCase
    device: str
    cold: bool = False
    left: list[Left] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    excused: str = ""
    compared: int = 0
    """Calls that were held byte for byte against one alone, and the bytes of their outputs."""
    bytes: int = 0

    def __post_init__(self) -> None:
        self.entry = loaded(self.files)
        self.plan = plan_slot(self.definition, self.expected.case)
        self.pristine = [torch.empty(self.plan.size, dtype=torch.uint8, device=self.device) for _ in FILLS]
        for index, poison in enumerate(FILLS):
            fill_slot(memory_of(self.plan, self.pristine), index, self.definition, self.expected, poison)

    def empty_slot(self) -> torch.Tensor:
        """Return uninitialised memory for a call."""
        return torch.empty_like(self.pristine[0])

    def call(self, slot: torch.Tensor, fill: int) -> torch.Tensor:
        """Fill a slot anew, call the Solution on it and return a copy of all its bytes; raises whatever the Solution raises."""
        spec, outputs, entry = self.files.record.spec, list(self.definition.written_outputs), self.entry
        slot.copy_(self.pristine[fill])
        tensors = tensors_of_slot(slot, self.plan)
        arguments = {**self.expected.inputs, **tensors}
        given = [arguments[name] for name in self.definition.inputs]
        interpreted = spec.language == "triton" and self.device == "cpu"
        with _interpreting if interpreted else contextlib.nullcontext():
            if spec.destination_passing_style:
                entry(*given, *(tensors[name] for name in outputs))
            else:
                misfit = copy_returned(entry(*given), tensors, outputs)
                if misfit is not None:
                    raise SolutionError(misfit["what"])
        return slot.clone()

    def call_alone(self) -> torch.Tensor | None:
        """Return what the first call leaves, with nothing beside it, or None if it raises, which is noted."""
        try:
            left = self.call(self.empty_slot(), 0)
            settle(self.device)
        except Exception as error:  # a kernel may raise anything: it is reported
            self.note_error("alone", error)
            return None
        return left

    def note_error(self, where: str, error: Exception) -> None:
        """Keep what a call raised."""
        first = traceback.format_exception_only(error)[-1].strip().splitlines()[0]
        self.errors.append(f"{where}: {first[:MAX_MESSAGE]}")

    def outputs(self, content: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return every output in the bytes of a slot."""
        return read_outputs(memory_of(self.plan, [content]), 0, self.definition)

    def failure(self, content: torch.Tensor) -> Failure | None:
        """Return why these outputs are not what the Definition asks for."""
        found = judge(self.definition, self.files.record, self.expected, self.outputs(content))
        return found if isinstance(found, Failure) else None

    def compare(self, alone: torch.Tensor, stock: SolutionFiles | None) -> None:
        """Judge the call that ran alone once, and hold all others against it."""
        failure = self.failure(alone)
        if failure is not None and stock is not None and fails(stock, self):
            self.excused = failure.reason  # no code can compute the case, the code that models run included
            return
        if failure is not None:
            self.mismatches.append(f"against the reference: {failure.reason}")
        for left in self.left:
            what = self._difference(left, alone)
            if what:
                self.mismatches.append(f"{left.where}: {what}")

    def _difference(self, left: Left, alone: torch.Tensor) -> str:
        before, case = self.pristine[left.fill], self.expected.case
        wrote = check_memory(memory_of(self.plan, [left.content]), 0, before, self.definition, case)
        if wrote is not None:
            return wrote.reason
        if not self.files.record.spec.deterministic:
            failure = self.failure(left.content)
            return "" if failure is None else failure.reason
        found, want = self.outputs(left.content), self.outputs(alone)
        self.compared += 1
        self.bytes += sum(as_bytes(value).numel() for value in found.values())
        for name, value in found.items():
            if not same_bytes(value, want[name]):
                differing = int((as_bytes(value) != as_bytes(want[name])).sum())
                return f"{differing} of {as_bytes(value).numel()} bytes of {name} differ from those of a call alone"
        return ""


def as_bytes(value: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor."""
    return value.reshape(-1).view(torch.uint8)


def fails(stock: SolutionFiles, job: Job) -> bool:
    """Return whether the code that models run is as wrong at the case of a job, or cannot compute it."""
    other = Job(job.definition, stock, job.expected, job.device)
    left = other.call_alone()
    return left is None or other.failure(left) is not None


# -- running --------------------------------------------------------------------------------------------------------------


def loaded(files: SolutionFiles) -> Callable[..., Any]:
    """Return the entry function, which is imported once."""
    prepare_environment(files.record.spec.language)
    return load_entry(files)


def settle(device: str) -> None:
    """Wait for all streams of a device; raises what a kernel has left there."""
    if device != "cpu":
        torch.cuda.synchronize(device)


def on_stream(stream: Any) -> contextlib.AbstractContextManager[Any]:
    """Launch on a stream; there are none on a CPU."""
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


def calls_of(jobs: Sequence[Job], repeats: int, threads: int) -> int:
    """Return how often each thread calls each job: ``repeats``, or fewer if the results would take too much room."""
    left = sum(job.plan.size for job in jobs) * threads
    return max(1, min(repeats, MOST_BYTES // max(left, 1)))


def one_thread(
    jobs: Sequence[Job], number: int, streams: int, repeats: int, seed: int, begin: threading.Barrier
) -> None:
    """Call every job so many times in a separate order, each call on one of this thread's streams."""
    draw, device = random.Random(seed), jobs[0].device
    try:
        if device != "cpu":
            torch.cuda.set_device(device)
        own: list[Any] = [None] if device == "cpu" else [torch.cuda.Stream(device) for _ in range(streams)]
        # A slot for each stream: what one stream reads, no other one overwrites.
        slots = {(index, which): job.empty_slot() for index, job in enumerate(jobs) for which in range(len(own))}
        settle(device)
    except BaseException:
        begin.abort()  # or the other threads would wait for this one
        raise
    order = [index for index in range(len(jobs)) for _ in range(repeats)]
    draw.shuffle(order)
    begin.wait()
    for count, index in enumerate(order):
        job, which, fill = jobs[index], draw.randrange(len(own)), draw.randrange(len(FILLS))
        where = f"call {count} of thread {number} on stream {which}"
        try:
            with draw.choice(MODES)(), on_stream(own[which]):
                job.left.append(Left(where, fill, job.call(slots[index, which], fill)))
        except Exception as error:  # a kernel may raise anything: it is reported, and the others go on
            job.note_error(where, error)


def run_round(jobs: Sequence[Job], stocks: Mapping[str, SolutionFiles | None], request: Mapping[str, Any]) -> None:
    """Call each job alone, then all of them at once, then compare; jobs that are cold run alone last."""
    alone = {id(job): job.call_alone() for job in jobs if not job.cold}
    running = [job for job in jobs if not job.errors]
    threads, device = request["threads"], jobs[0].device
    repeats = calls_of(running, request["repeats"], threads)
    begin, draw = threading.Barrier(threads), random.Random(request["seed"])
    if running:
        with ThreadPoolExecutor(threads) as pool:
            at_once = [
                pool.submit(one_thread, running, number, request["streams"], repeats, draw.getrandbits(62), begin)
                for number in range(threads)
            ]
        for one in at_once:
            one.result()
    settle(device)
    for job in jobs:
        first = job.call_alone() if job.cold else alone[id(job)]
        if first is not None:
            job.compare(first, stocks[job.definition.name])


# -- serving --------------------------------------------------------------------------------------------------------------


class Program:
    """Answers the harness. Records are read once; a case that the reference fails itself is dropped."""

    def __init__(self, device: str) -> None:
        """Begin for one device."""
        self.device = device
        self.catalog = Catalog(())

    def open(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Read the records."""
        self.catalog = Catalog(tuple(Path(root) for root in request["roots"]))
        use_own_folders()
        if self.device == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
            repair_interpreter()
        return {}

    def round(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Run some jobs at once; what came of each, in order."""
        jobs: dict[int, Job] = {}
        answers: list[dict[str, Any]] = [{} for _ in request["jobs"]]
        for index, asked in enumerate(request["jobs"]):
            definition, files = self.catalog.definition(asked["definition"]), self.catalog.solution(asked["solution"])
            try:
                expected = make_oracle_case(
                    definition, Case(**{**asked["case"], "call": Call(**asked["case"]["call"])}), self.device
                )
                if expected is None:
                    answers[index] = {"dropped": "the reference itself does not pass this case"}
                else:
                    jobs[index] = Job(definition, files, expected, self.device, asked["cold"])
            except (SolutionError, ToolchainError) as error:
                answers[index] = {"errors": 1, "told": [f"not loaded: {str(error).splitlines()[0]}"]}
            except (TilegymDBError, torch.OutOfMemoryError) as error:
                answers[index] = {"dropped": str(error).splitlines()[0]}
        stocks = {
            name: stock_of(self.catalog.solutions_for(name)) for name in {j.definition.name for j in jobs.values()}
        }
        if jobs:
            run_round(list(jobs.values()), stocks, request)
        return {"jobs": [reported(jobs[index]) if index in jobs else answers[index] for index in range(len(answers))]}


def reported(job: Job) -> dict[str, Any]:
    """Return the results of a job."""
    return {
        "calls": len(job.left),
        "compared": job.compared,
        "bytes": job.bytes,
        "excused": job.excused,
        "mismatches": len(job.mismatches),
        "errors": len(job.errors),
        "told": [*job.mismatches[:TOLD], *job.errors[:TOLD]],
    }


def answers_of(program: Program, channel: Channel) -> Iterator[dict[str, Any]]:
    """Yield an answer to each request, until the harness closes the channel."""
    yield {"id": 0, "ok": True}
    for request in iter(channel.receive, None):
        handler = {"open": program.open, "round": program.round}[request["op"]]
        try:
            yield {"id": request["id"], "ok": True, **handler(request)}
        except Exception as error:  # the boundary to the harness, which prints it
            yield {
                "id": request["id"],
                "ok": False,
                "kind": "runtime",
                "error": "".join(traceback.format_exception(error)),
            }


def main() -> None:
    """Serve the harness at the other end of the descriptor in the first argument, on the device in the second."""
    channel, device = Channel(int(sys.argv[1])), sys.argv[2]
    if device != "cpu":
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
    with contextlib.closing(channel):
        for answer in answers_of(Program(device), channel):
            channel.send(answer)


if __name__ == "__main__":
    main()
