"""Compiles the configs of the next wave in processes without a GPU, while the GPU times the wave before."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

from tilegym_db.backends.aot import CompileJob, CompileResult, compile_many
from tilegym_db.backends.toolchains import TOOLCHAINS
from tilegym_db.bench.tune.candidates import Candidate
from tilegym_db.catalog import SolutionFiles
from tilegym_db.records import Definition, Workload

__all__ = ["CompileAhead", "refusals"]


class _StoppedError(Exception):
    """Nobody waits for the results any more."""


class CompileAhead:
    """Builds one Solution for one Workload and target. A context manager: leaving it ends the compilers.

    Where nothing can be compiled without a GPU (a processor, Python, a target that the records do not know), every wave is
    said to compile: the worker will find out.
    """

    def __init__(self, definition: Definition, solution: SolutionFiles, workload: Workload, target: str) -> None:
        self._definition, self._solution, self._workload, self._target = definition, solution, workload, target
        self._useful = target in TOOLCHAINS[solution.record.spec.language].targets
        self._stopped = threading.Event()
        self._pool = ThreadPoolExecutor(max_workers=1)

    def start(self, wave: Sequence[Candidate]) -> Future[dict[str, str]]:
        """Begin; the result is config id -> the compiler's words, for those that do not compile."""
        return self._pool.submit(self._build, list(wave))

    def _build(self, wave: list[Candidate]) -> dict[str, str]:
        if not self._useful:
            return {}
        jobs = [
            CompileJob(self._definition, self._solution, self._workload, self._target, candidate.config)
            for candidate in wave
        ]
        return refusals(wave, compile_many(jobs, self._check))

    def _check(self, job: CompileJob, result: CompileResult) -> None:
        if self._stopped.is_set():
            raise _StoppedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._pool.shutdown(wait=True, cancel_futures=True)


def refusals(wave: Sequence[Candidate], results: Sequence[CompileResult]) -> dict[str, str]:
    """Config id -> why it does not compile. Only the Solution's own failure counts, not a toolchain that is missing."""
    found = {}
    for candidate, result in zip(wave, results, strict=True):
        if result.status == "failed":
            lines = [line.strip() for line in result.log.splitlines() if line.strip()]
            found[candidate.id] = (lines[-1] if lines else "the compiler said nothing")[:300]
    return found
