"""What is said of a Solution whose worker cannot be set up, or whose source does not load."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from conftest import DEFINITION

from tilegym_db.catalog import SolutionFiles
from tilegym_db.records import Definition
from tilegym_db.verification.worker_handle import RunnerLimits, WorkerHandle

RAISES = "raise ValueError(7)\n\n\ndef run(x, weight, factor, out):\n    pass\n"


@pytest.fixture
def make(tmp_path: Path, write_solution: Callable[..., SolutionFiles]) -> Iterator[Callable[..., WorkerHandle]]:
    """A handle of a source that raises when it is loaded, with so many seconds for that."""
    with ExitStack() as stack:

        def handle(limit_s: float = 60.0) -> WorkerHandle:
            solution = write_solution(tmp_path / "solutions" / "raises", "row_scale", RAISES)
            limits = RunnerLimits(first_call_s=limit_s)
            made = WorkerHandle(Definition.from_dict(DEFINITION), solution, "cpu", tmp_path / "workers", limits=limits)
            stack.callback(made.close)
            return made

        yield handle


def test_a_source_that_did_not_load_gets_another_process(make: Callable[..., WorkerHandle]) -> None:
    handle = make()
    first, worker = handle.load(), handle.worker
    again = handle.load()
    assert first is not None
    assert again is not None
    assert again.status == first.status
    assert worker is not None
    assert not worker.alive
    assert handle.worker is not worker


@pytest.mark.parametrize(
    ("limit_s", "status", "says"),
    [
        (1e-4, "UNSUPPORTED", "this machine could not set up a worker: 'prepare' did not finish"),
        (60.0, "RUNTIME_ERROR", "the source does not load"),
    ],
)
def test_solution_answers_only_for_faults_of_its_own_source(
    limit_s: float, status: str, says: str, make: Callable[..., WorkerHandle]
) -> None:
    failure = make(limit_s).load()
    assert failure is not None
    assert (failure.status, failure.reason) == (status, says)
