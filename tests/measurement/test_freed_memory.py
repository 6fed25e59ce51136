"""What a call without memory held is free before the next one begins, in this process and in the worker."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from conftest import DEFINITION, KERNEL

from tilegym_db.catalog import SolutionFiles
from tilegym_db.measurement import runner
from tilegym_db.measurement.runner import BufferPool
from tilegym_db.records import Definition, Workload
from tilegym_db.sandbox.processes import descendants
from tilegym_db.verification import expected as contents_module
from tilegym_db.verification import worker_handle
from tilegym_db.verification.expected import ExpectedCache, WorkloadContents
from tilegym_db.verification.session import Verification
from tilegym_db.verification.verifier import Failure
from tilegym_db.verification.worker_handle import WorkerHandle

ELEMENTS = (1 << 20) + 7
"""A size that no other tensor has."""
SHARED = "memfd:tilegym-db"


@pytest.fixture(autouse=True)
def nothing_is_collected_by_chance() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def drawn() -> WorkloadContents:
    definition = Definition.from_dict(DEFINITION)
    inputs = {"factor": {"type": "scalar", "value": 0.5}}
    record = {"definition": "row_scale", "axes": {"M": 8, "N": 33}, "dtypes": {"T": "float32"}, "inputs": inputs}
    return WorkloadContents.draw(definition, Workload.from_dict(record), 7, ExpectedCache(definition, "cpu"))


def no_memory(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError("out of memory")


def descriptors() -> int:
    """Return how many descriptors of shared memory this process has."""
    links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
    return sum(SHARED in os.readlink(link) for link in links if link.is_symlink())


def test_failed_case_is_freed_with_its_error(monkeypatch: pytest.MonkeyPatch, drawn: WorkloadContents) -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    def make(*_: object) -> None:
        tensor = torch.zeros(ELEMENTS)
        held.append(weakref.ref(tensor))
        no_memory()

    monkeypatch.setattr(contents_module, "make_oracle_case", make)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        drawn.cache.get(drawn.sets[0].case)
    first, second = held
    assert first() is None  # or it would take the memory of the second attempt
    assert second() is not None  # the frames of the error hold it
    del raised
    assert second() is None


@pytest.mark.turn("tilegym_db/measurement/", "tilegym_db/sandbox/shared_buffers.py")  # whole bench runs
def test_pool_that_cannot_be_filled_is_freed(monkeypatch: pytest.MonkeyPatch, drawn: WorkloadContents) -> None:
    before = descriptors()
    monkeypatch.setattr(runner, "fill_slot", no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        BufferPool(drawn.definition, drawn.sets, "cpu", 1 << 20)
    assert descriptors() == before


@pytest.mark.turn("tilegym_db/measurement/", "tilegym_db/sandbox/shared_buffers.py")  # whole bench runs
def test_worker_unmaps_a_call_that_cannot_be_compared(
    monkeypatch: pytest.MonkeyPatch,
    drawn: WorkloadContents,
    tmp_path: Path,
    write_solution: Callable[..., SolutionFiles],
) -> None:
    solution = write_solution(tmp_path / "solutions" / "scales", "row_scale", KERNEL)
    mapped: list[bool] = []

    def maps() -> bool:
        assert handle.worker is not None
        pids = descendants(handle.worker._supervisor.pid)
        return any(SHARED in Path(f"/proc/{pid}/maps").read_text() for pid in pids)

    def compare(*_: object, **__: object) -> None:
        mapped.append(maps())
        no_memory()

    monkeypatch.setattr(worker_handle, "verify_slot", compare)
    with closing(WorkerHandle(drawn.definition, solution, "cpu", tmp_path / "workers")) as handle:
        outcome = Verification(handle).own_shape(drawn)
        assert isinstance(outcome, Failure)
        assert outcome.no_memory
        assert mapped == [True]
        assert not maps()
