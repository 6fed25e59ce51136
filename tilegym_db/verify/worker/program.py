"""The worker process: loads one Solution and calls it on shared memory when the harness says so.

Untrusted from the moment a Solution is loaded. It never sees the oracle, the seeds or the store; what it answers is only
used as described in :mod:`tilegym_db.verify.worker.protocol`. The supervisor calls :func:`main` in a process that is confined by
then; standard output and error belong to the Solution and go to a log.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from tilegym_db.verify.worker import protocol
from tilegym_db.verify.worker.answers import copy_returned, is_compile_error, is_memory_error

__all__ = ["Worker", "main"]


RECOMPILE_LIMIT = 64
"""Graphs that torch.compile may keep for one function. Its own limit of 8 is less than the shapes, strides, offsets and modes
(inference or not) of one promotion, and a function that must be one graph raises beyond it."""


class Worker:
    """State of one worker: the loaded entry point and the attached buffers."""

    def __init__(self, device: str) -> None:
        """Prepare for one device, ``cpu`` or ``cuda:<n>``."""
        self.device = device
        self.entry: Callable[..., Any] | None = None
        self.config: dict[str, Any] = {}
        self.returns = False
        self.release: Callable[[], None] | None = None
        self.slots: list[dict[str, Any]] = []
        self.order: list[str] = []
        self.outputs: list[str] = []
        self.in_place: dict[str, str] = {}
        self.timer: Any = None
        self.profiler: Any = None
        self.state_watch: Any = None

    # -- requests -----------------------------------------------------------------------------------------------------

    def prepare(self, request: dict[str, Any]) -> dict[str, Any]:
        """Take hold of clocks and of the profiler, before a Solution can replace them."""
        from tilegym_db.verify.worker.process_state import StateWatch
        from tilegym_db.verify.worker.profiling import KernelProfiler
        from tilegym_db.verify.worker.timing import BlockTimer

        self.timer = BlockTimer(self.device)
        self.state_watch = StateWatch()
        if request["profile"] and self.device != "cpu":
            self.profiler = KernelProfiler()
        return {}

    def load(self, request: dict[str, Any]) -> dict[str, Any]:
        """Import the Solution of a record, if its digest is the one announced."""
        from pathlib import Path

        import torch

        from tilegym_db.backends.compile_cache import use_own_folders
        from tilegym_db.backends.load import load_entry
        from tilegym_db.backends.toolchains import TOOLCHAINS, prepare_environment
        from tilegym_db.catalog import SolutionFiles
        from tilegym_db.errors import SolutionError
        from tilegym_db.verify.worker.interpreters import INTERPRETERS

        if self.device != "cpu":
            torch.cuda.set_device(self.device)
        files = SolutionFiles.read(Path(request["record"]))
        if files.digest != request["digest"]:
            raise SolutionError(
                f"the source of {files.name} changed on disk while it was being measured", code="source_changed"
            )
        prepare_environment(files.record.spec.language)
        use_own_folders()
        if request.get("interpret"):
            INTERPRETERS[files.record.spec.language].install()
        if files.uses_torch_compile:
            torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
        packages = [TOOLCHAINS[files.record.spec.language].package, *request["libraries"]]
        self.state_watch.begin(packages, compiles=files.uses_torch_compile)
        self.entry = load_entry(files)
        self.returns = not files.record.spec.destination_passing_style
        self.order, self.outputs = request["inputs"], request["outputs"]
        self.in_place = request["in_place"]
        return {}

    def attach(self, request: dict[str, Any]) -> dict[str, Any]:
        """Map the buffers and build the arguments of every slot."""
        from tilegym_db.verify.worker.shared_buffers import attach, tensor_of_its_own

        self.detach({})
        memory, plan, self.release = attach(request["buffers"], request["descriptors"][0])
        self.config = request["config"]
        for index in range(request["buffers"]["slots"]):
            slot = memory[index * plan.size : (index + 1) * plan.size]
            tensors = {tensor.name: tensor_of_its_own(slot, tensor) for tensor in plan.tensors}
            self.slots.append({**request["scalars"], **tensors})
        return {}

    def detach(self, request: dict[str, Any]) -> dict[str, Any]:
        """Forget the buffers."""
        self.slots = []
        if self.release is not None:
            self.release()
            self.release = None
            self._give_back_memory()
        return {}

    def call(self, request: dict[str, Any]) -> dict[str, Any]:
        """Call the Solution once on one slot and wait for it; a returned value is copied to the slot's outputs.

        With ``as_in_model`` it is called as a model does: in inference mode, on allocations of PyTorch's own, which bring what
        lies in the slot and take back everything that is there afterwards. ``without_gradients`` is how models generate.
        """
        import torch

        slot = self.slots[request["slot"]]
        if not request.get("as_in_model"):
            with torch.no_grad() if request.get("without_gradients") else contextlib.nullcontext():
                mismatch = self._copy_returned(slot, self._bound(slot)())
        else:
            with torch.inference_mode():
                own = {name: _copied(value) for name, value in slot.items()}
                mismatch = self._copy_returned(own, self._bound(own)())
                self._synchronize()
                for name, value in own.items():
                    if isinstance(value, torch.Tensor):
                        slot[name].copy_(value)
        self._synchronize()
        return {"mismatch": mismatch} if mismatch else {}

    def repeat(self, request: dict[str, Any]) -> dict[str, Any]:
        """Call the Solution over and over on the slots listed, as a model does that has run for a while."""
        import torch

        calls = [self._bound(self.slots[index]) for index in request["slots"]]
        with torch.inference_mode():
            for number in range(request["count"]):
                calls[number % len(calls)]()
        self._synchronize()
        return {}

    def scalars(self, request: dict[str, Any]) -> dict[str, Any]:
        """Other numbers for the calls that follow on these slots."""
        for slot in self.slots:
            slot.update(request["scalars"])
        return {}

    def state(self, request: dict[str, Any]) -> dict[str, Any]:
        """What is another one in this process than before the Solution was loaded."""
        return {"changes": self.state_watch.changes()}

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """Call the Solution once on each slot listed, behind a busy device, and answer when all of it is done.

        The harness's clock runs meanwhile. With no slots it is the null call, which costs what asking costs. Returned
        values are copied to the outputs at once, so that their memory is used again as it is while timing.
        """
        import torch

        calls = [(slot, self._bound(slot)) for slot in (self.slots[index] for index in request["slots"])]
        self.timer.occupy(request["busy_us"])
        with torch.inference_mode():  # as models are served; blocks are timed without
            for slot, call in calls:
                self._copy_returned(slot, call())
        self._synchronize()
        return {}

    def time(self, request: dict[str, Any]) -> dict[str, Any]:
        """Time one call on each of the slots listed, in that order."""
        slots = {index: self.slots[index] for index in request["slots"]}
        pristine = {index: {name: slot[name].clone() for name in self.in_place} for index, slot in slots.items()}

        def restore(index: int) -> None:
            for name, value in pristine[index].items():
                slots[index][name].copy_(value)

        def finish(index: int, returned: Any) -> None:
            self._copy_returned(slots[index], returned)

        calls = {index: self._bound(slot) for index, slot in slots.items()}
        samples = self.timer.time(request["slots"], calls, restore, finish)
        return {
            "device_us": [sample.device_us for sample in samples],
            "host_us": [sample.host_us for sample in samples],
        }

    def profile(self, request: dict[str, Any]) -> dict[str, Any]:
        """Everything that runs on the device because of one call on each slot listed, also on other streams or later."""
        calls = [self._bound(self.slots[index]) for index in request["slots"]]
        activities = self.profiler.activities(calls)
        return {"activities": [vars(activity) for activity in activities]}

    # -- details ------------------------------------------------------------------------------------------------------

    def _bound(self, slot: dict[str, Any]) -> Callable[[], Any]:
        assert self.entry is not None
        entry, config = self.entry, self.config
        names = self.order if self.returns else [*self.order, *self.outputs]
        arguments = [slot[name] for name in names]
        return lambda: entry(*arguments, **config)

    def _copy_returned(self, slot: dict[str, Any], returned: Any) -> dict[str, str] | None:
        return copy_returned(returned, slot, self.outputs) if self.returns else None

    def _give_back_memory(self) -> None:
        if self.device != "cpu":
            import torch

            torch.cuda.empty_cache()  # the next workload needs it

    def _synchronize(self) -> None:
        if self.device != "cpu":
            import torch

            torch.cuda.synchronize()

    def serve(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer one request; whatever the Solution raises becomes part of the answer."""
        handlers = {
            "prepare": self.prepare,
            "load": self.load,
            "attach": self.attach,
            "detach": self.detach,
            "call": self.call,
            "run": self.run,
            "time": self.time,
            "profile": self.profile,
            "repeat": self.repeat,
            "scalars": self.scalars,
            "state": self.state,
        }
        try:
            return {"id": request["id"], "ok": True, **handlers[request["op"]](request)}
        except Exception as error:  # the boundary to untrusted code: recorded whole, judged by the harness
            kind = "compile" if is_compile_error(error) else "memory" if is_memory_error(error) else "runtime"
            text = "".join(traceback.format_exception(error, limit=-8))
            return {"id": request["id"], "ok": False, "kind": kind, "error": text[-8000:]}


def _copied(value: Any) -> Any:
    """A tensor's contents in memory of its own, with the same strides; anything else as it is."""
    import torch

    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(value)


def _end_with(harness: int) -> None:
    """Follow a harness that was killed: a call that hangs would otherwise keep its device for ever."""

    def watch(sleep: Callable[[float], None] = time.sleep) -> None:
        while os.getppid() == harness:
            sleep(0.5)
        os.killpg(0, signal.SIGKILL)  # with every compiler that was started here

    threading.Thread(target=watch, daemon=True).start()


def main(channel: int, device: str) -> None:
    """Serve requests until the harness closes the channel.

    Args:
        channel: descriptor of the socket to the harness.
        device: ``cpu`` or ``cuda:<n>``.
    """
    _end_with(os.getppid())
    worker = Worker(device)
    with contextlib.closing(protocol.Channel(channel)) as harness:
        # Imports are the slow part of a start; done before the first request, a spare worker is warm.
        import torch

        if device != "cpu":
            try:
                torch.zeros(1, device=device)
            except RuntimeError as error:
                if not is_memory_error(error):
                    raise
                harness.send({"id": 0, "ok": False, "kind": "memory"})
                raise
        harness.send({"id": 0, "ok": True})
        while (request := harness.receive()) is not None and request["op"] != "exit":
            harness.send(worker.serve(request))
