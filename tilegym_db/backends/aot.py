"""Compile Solutions ahead of time for GPUs that this machine need not have, in worker processes.

A Solution's own ``run`` is called on arguments without contents while its language is intercepted, so what is compiled
is exactly what a launch would compile: same grid choice, same constants, same specialisation of sizes and strides.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence

from tilegym_db.backends.compile_jobs import DEFAULT_TIMEOUT_S, Artifact, CompileJob, CompileResult, CompileStatus
from tilegym_db.backends.compiler_process import CompilerProcess
from tilegym_db.backends.toolchains import TOOLCHAINS, toolchain_status
from tilegym_db.catalog import SolutionFiles
from tilegym_db.records import Definition, Workload
from tilegym_db.records.solution import Tunable

__all__ = ["Artifact", "CompileJob", "CompileResult", "CompileStatus", "compile_many", "compile_solution"]

JOBS_WORTH_A_WORKER = 4
MAX_WORKERS = 16  # a worker with PyTorch and a compiler loaded takes the better part of a gigabyte

OnResult = Callable[[CompileJob, CompileResult], None]


def compile_solution(
    definition: Definition,
    solution: SolutionFiles,
    workload: Workload,
    target: str,
    *,
    config: Mapping[str, Tunable] | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> CompileResult:
    """Compile what one Solution launches for one Workload.

    Args:
        target: a name of ``records.hardware.TARGETS``, such as ``sm_90``.
        config: keyword arguments of ``run``; the source's defaults where None.
        timeout_s: seconds after which the job is given up; the import of the language does not count.
    """
    (result,) = compile_many([CompileJob(definition, solution, workload, target, config or {}, timeout_s)], processes=1)
    return result


def compile_many(
    jobs: Sequence[CompileJob], on_result: OnResult | None = None, processes: int | None = None
) -> list[CompileResult]:
    """Compile many, each worker process serving one language at a time; a crash or hang costs the one job.

    Args:
        jobs: what to compile.
        on_result: called in this thread with every result as it comes, in no particular order.
        processes: how many workers at most. By default one less than the machine's cores, but no more than are worth
            the seconds that each takes to import its language.

    Returns:
        The results in the order of the jobs.
    """
    results: dict[int, CompileResult] = {}
    waiting: list[tuple[int, CompileJob]] = []
    missing = {language: _missing(language) for language in {job.solution.record.spec.language for job in jobs}}

    def finish(index: int, result: CompileResult) -> None:
        results[index] = result
        if on_result is not None:
            on_result(jobs[index], result)

    for index, job in enumerate(jobs):
        early = _unsupported(job) or missing[job.solution.record.spec.language]
        if early is None:
            waiting.append((index, job))
        else:
            finish(index, early)
    if waiting:
        _Pool(waiting).run(finish, processes or _default_processes(len(waiting)))
    return [results[index] for index in range(len(jobs))]


def _default_processes(jobs: int) -> int:
    worth_importing = -(-jobs // JOBS_WORTH_A_WORKER)
    return max(1, min((os.cpu_count() or 2) - 1, worth_importing, MAX_WORKERS))


def _unsupported(job: CompileJob) -> CompileResult | None:
    """The result where there is nothing to compile, or nothing that the Solution promises."""
    spec = job.solution.record.spec
    if not TOOLCHAINS[spec.language].targets:
        return CompileResult("unsupported", log=f"a {spec.language} solution has nothing to compile ahead of time")
    reason = _spec_reason(job)
    return CompileResult("unsupported", log=reason) if reason else None


def _spec_reason(job: CompileJob) -> str | None:
    """Why the Solution's declared limits exclude the job, or None."""
    return job.solution.record.unsupported(
        job.definition.bind_axes(job.workload.axes),
        job.definition.bind_dtypes(job.workload.dtypes),
        job.workload.layout_classes(job.definition),
        target=job.target,
    )


def _missing(language: str) -> CompileResult | None:
    status = toolchain_status(language)
    if status.available:
        return None
    return CompileResult("toolchain-missing", log=f"{language}: {status.detail}. Fix: {status.fix}")


class _Pool:
    """Threads that each drive one worker process, fed from one queue a language."""

    def __init__(self, jobs: Sequence[tuple[int, CompileJob]]) -> None:
        self._lock = threading.Lock()
        self._stopped = False
        self._count = len(jobs)
        self._queues: dict[str, deque[tuple[int, CompileJob]]] = {}
        self._workers: list[CompilerProcess] = []
        self._done: queue.Queue[tuple[int, CompileResult] | BaseException] = queue.Queue()
        for index, job in jobs:
            self._queues.setdefault(job.solution.record.spec.language, deque()).append((index, job))

    def run(self, finish: Callable[[int, CompileResult], None], processes: int) -> None:
        """Work until every job is done; where ``finish`` raises or the user interrupts, end all workers first."""
        threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(processes)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(self._count):
                item = self._done.get()
                if isinstance(item, BaseException):
                    raise item
                finish(*item)
        finally:
            self._stop()
            for thread in threads:
                thread.join()

    def _serve(self) -> None:
        try:
            while (worker := self._new_worker()) is not None:
                with worker:
                    while (taken := self._next_job(worker.language)) is not None:
                        index, job = taken
                        self._done.put((index, worker.compile(job)))
                with self._lock:
                    self._workers.remove(worker)
        except BaseException as error:  # a thread boundary: raised again in the caller's thread, with its traceback
            self._done.put(error)

    def _new_worker(self) -> CompilerProcess | None:
        """A worker for the language with the most jobs left for each worker that it has; None where all are taken."""
        with self._lock:
            serving = Counter(worker.language for worker in self._workers)
            left = {name: len(queued) / (1 + serving[name]) for name, queued in self._queues.items() if queued}
            if self._stopped or not left:
                return None
            worker = CompilerProcess(max(left, key=lambda name: left[name]))
            self._workers.append(worker)
            return worker

    def _next_job(self, language: str) -> tuple[int, CompileJob] | None:
        with self._lock:
            queued = self._queues[language]
            return queued.popleft() if queued and not self._stopped else None

    def _stop(self) -> None:
        with self._lock:
            self._stopped = True
            for worker in self._workers:
                worker.kill()
