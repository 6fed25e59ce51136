"""Compiles configs in processes without a GPU, in the order in which they will be tried, while the GPU times others."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Self

from tilegym_db.backends.aot import CompileJob, CompileResult, compile_many
from tilegym_db.backends.toolchains import TOOLCHAINS
from tilegym_db.bench.tune.candidates import ConfigCandidate
from tilegym_db.catalog import SolutionFiles
from tilegym_db.records import Definition, Workload
from tilegym_db.records.solution import config_id

__all__ = ["CompileAhead", "refusal"]


class _StoppedError(Exception):
    """Nobody waits for the results any more."""


class CompileAhead:
    """Builds one Solution for one Workload and target. A context manager: leaving it ends the compilers.

    Where nothing can be compiled without a GPU (a processor, Python, a target that the records do not know), every config
    is said to compile: the worker will find out.
    """

    def __init__(self, definition: Definition, solution: SolutionFiles, workload: Workload, target: str) -> None:
        self._definition, self._solution, self._workload, self._target = definition, solution, workload, target
        self._useful = target in TOOLCHAINS[solution.record.spec.language].targets
        self._stopped = threading.Event()
        self._results: dict[str, Future[CompileResult]] = {}
        self._thread: threading.Thread | None = None

    def start(self, candidates: Sequence[ConfigCandidate]) -> None:
        """Begin to compile, first come first served."""
        if not self._useful or not candidates:
            return
        jobs = [
            CompileJob(self._definition, self._solution, self._workload, self._target, candidate.config)
            for candidate in candidates
        ]
        self._results = {candidate.id: Future() for candidate in candidates}
        self._thread = threading.Thread(target=self._build, args=(jobs,), daemon=True)
        self._thread.start()

    def refused(self, wave: Sequence[ConfigCandidate]) -> dict[str, str]:
        """Config id -> the compiler's words, for those of a wave that do not compile; waits until all were tried."""
        waiting = [(candidate.id, self._results[candidate.id]) for candidate in wave if candidate.id in self._results]
        reasons = {key: refusal(result.result()) for key, result in waiting}
        return {key: reason for key, reason in reasons.items() if reason is not None}

    def _build(self, jobs: list[CompileJob]) -> None:
        try:
            compile_many(jobs, self._take)
        except BaseException as error:  # a thread boundary: raised again where a result is waited for
            for result in self._results.values():
                if not result.done():
                    result.set_exception(error)

    def _take(self, job: CompileJob, result: CompileResult) -> None:
        if self._stopped.is_set():
            raise _StoppedError
        self._results[config_id(job.config)].set_result(result)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()


def refusal(result: CompileResult) -> str | None:
    """Why a config does not compile, or None. Only the Solution's own failure counts, not a toolchain that is missing."""
    if result.status != "failed":
        return None
    lines = [line.strip() for line in result.log.splitlines() if re.search(r"\w", line)]
    errors = [line for line in lines if re.search(r"error\b", line, re.IGNORECASE)]
    return (errors or lines or ["the compiler said nothing"])[-1][:300]
