"""What verification asks of a GPU, in which order: calls of ``torch.cuda`` are recorded, and tensors stay on the processor."""

from __future__ import annotations

import random
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tilegym_db.sandbox.program import MAX_UNUSED_BYTES, Worker
from tilegym_db.sandbox.protocol import Reply
from tilegym_db.sandbox.shared_buffers import SlotPlan
from tilegym_db.sandbox.situation import Situation
from tilegym_db.verification import sequences, session
from tilegym_db.verification.verifier import Failure
from tilegym_db.verification.worker_handle import WorkerHandle

GPU = "cuda:0"


class PretendedGpu:
    """The calls of ``torch.cuda`` by the main thread, those by other threads, and the bytes that PyTorch keeps."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.others: list[str] = []
        self.reserved = 0

    def note(self, name: str) -> None:
        of_main = threading.current_thread() is threading.main_thread()
        (self.calls if of_main else self.others).append(name)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> PretendedGpu:
    made = PretendedGpu()
    for name in ("set_device", "synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: made.note(name))
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: made.note("clear workspaces"), raising=False)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: made.reserved)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    streams = [
        SimpleNamespace(synchronize=lambda name=name: made.note(f"wait for {name}")) for name in ("main", "side")
    ]
    current = [streams[0]]

    class Entered:
        def __init__(self, stream: object) -> None:
            self.stream = stream

        def __enter__(self) -> None:
            current.append(self.stream)

        def __exit__(self, *_: object) -> None:
            current.pop()

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: streams[1])
    monkeypatch.setattr(torch.cuda, "stream", Entered)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: current[-1])
    return made


def test_a_new_thread_has_a_context_before_it_calls(gpu: PretendedGpu) -> None:
    Situation(in_thread=True).run(GPU, lambda: gpu.note("call"))
    assert gpu.others == ["set_device", "synchronize", "call"]
    assert gpu.calls == []


def test_inputs_arrive_late_on_a_side_stream_that_is_waited_for(gpu: PretendedGpu) -> None:
    situation = Situation(own_memory=True, on_stream=True)

    def call() -> torch.Tensor:
        given = situation.arguments({"x": torch.ones(3)}, lambda microseconds: gpu.note("occupy"))
        gpu.note("call")
        return given["x"]

    assert torch.equal(situation.run(GPU, call), torch.ones(3))
    assert gpu.calls == ["set_device", "synchronize", "wait for side", "occupy", "call", "wait for side"]


@pytest.fixture
def worker() -> Worker:
    """A worker of a kernel that adds one, with one slot."""

    def run(x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x + 1)

    made = Worker(GPU)
    made.entry, made.order, made.outputs = run, ["x"], ["out"]
    made.timer = SimpleNamespace(occupy=lambda microseconds: None)
    made.slots = [{"x": torch.ones(3), "out": torch.zeros(3)}]
    made.described = [made._described(made.slots[0])]
    return made


@pytest.mark.parametrize(
    ("own_memory", "kept", "given_back"),
    [(True, MAX_UNUSED_BYTES + 1, True), (True, MAX_UNUSED_BYTES, False), (False, MAX_UNUSED_BYTES + 1, False)],
)
def test_memory_of_a_situation_goes_back_to_other_workers(
    own_memory: bool, kept: int, given_back: bool, worker: Worker, gpu: PretendedGpu
) -> None:
    gpu.reserved = kept
    assert worker.call({"slot": 0, "situation": {"own_memory": own_memory}}) == {}
    assert torch.equal(worker.slots[0]["out"], torch.full((3,), 2.0))
    assert gpu.calls[-2:] == (["clear workspaces", "empty_cache"] if given_back else ["synchronize", "synchronize"])


def test_threads_of_a_sequence_have_a_context_each(worker: Worker, gpu: PretendedGpu) -> None:
    worker.slots *= 2
    worker.described *= 2
    made = worker.repeat({"slots": [0, 1], "threads": 2, "count": 2, "seconds": 60.0})
    assert made == {"calls": 2, "differing": 0}
    assert sorted(gpu.others) == ["set_device", "set_device", "synchronize", "synchronize"]


@pytest.mark.parametrize(
    ("text", "spoilt"),
    [
        ("RuntimeError: CUDA error: an illegal memory access was encountered", True),
        ("CUDALaunch Error: CUDA_ERROR_ILLEGAL_ADDRESS", True),
        ("torch.AcceleratorError: CUDA error: unspecified launch failure", True),
        ("CUDA_ERROR_INVALID_VALUE and then CUDA_ERROR_LAUNCH_FAILED", True),
        ("torch.AcceleratorError: CUDA error: invalid configuration argument", False),
        ("CUDALaunch Error: CUDA_ERROR_INVALID_VALUE grid=(1,70000,1)", False),
        ("RuntimeError: Triton Error [CUDA]: invalid argument", False),
        ("CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", False),
        ("CUDA error: out of memory", False),
    ],
)
def test_a_refused_launch_leaves_the_context_as_it_was(text: str, spoilt: bool) -> None:
    handle: Any = SimpleNamespace(spoilt=False)
    WorkerHandle._note_spoilt(handle, text)
    assert handle.spoilt is spoilt


def test_calls_of_many_bytes_are_checked_one_at_a_time(gpu: PretendedGpu) -> None:
    large, small = (SlotPlan((), (), size) for size in (session.ROOMY_BYTES, session.ROOMY_BYTES - 1))
    with session._room_for(large, GPU):
        assert session._large_call.locked()
        with session._room_for(small, GPU):  # waits for nothing
            assert gpu.calls == []
    assert gpu.calls == ["empty_cache"]
    assert not session._large_call.locked()
    with session._room_for(large, "cpu"):
        assert not session._large_call.locked()


def test_the_long_run_is_warmed_up_with_its_comparisons(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that a GPU loads for the first comparison is no growth of memory, and the calls before it are watched too."""
    asked: list[object] = []

    def repeat(order: object, count: int, *, seconds: float, watched: int | None = None) -> Reply:
        asked.append(watched)
        return Reply(True, {"calls": count, "differing": int(len(asked) == 1)})

    record = SimpleNamespace(spec=SimpleNamespace(deterministic=True))
    handle = SimpleNamespace(
        solution=SimpleNamespace(record=record),
        definition=SimpleNamespace(in_place={}),
        limits=SimpleNamespace(call_s=1.0),
        ask=lambda op, limit: Reply(True, {"device_bytes": 0, "blocks": 0, "bytes": 0}),
        memory_bytes=lambda: 0,
    )
    steps = [SimpleNamespace(case="a case")]
    memory: Any = SimpleNamespace(handle=handle, steps=steps, fill=lambda slots: None, repeat=repeat)
    failure = sequences._long_run(memory, [0], random.Random(1))
    assert isinstance(failure, Failure)
    assert failure.gate == "sequence"
    assert len(asked) == 3
    assert None not in asked
