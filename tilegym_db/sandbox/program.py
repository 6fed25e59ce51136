"""The worker process: loads one Solution and calls it on shared memory when the harness says so.

The process is untrusted once it loads a Solution. It never sees the oracle, the seeds or the store. The harness uses its
answers only as described in :mod:`tilegym_db.sandbox.protocol`. The supervisor calls :func:`main` in a confined process.
Standard output and error belong to the Solution and go to a log.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import hashlib
import importlib
import os
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch  # the slow part of a start: it precedes the first request, so that a spare worker is warm
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from tilegym_db.sandbox import protocol
from tilegym_db.sandbox.protocol import KernelUse, sum_uses
from tilegym_db.sandbox.shared_buffers import attach, fill_tensor, same_bytes, tensors_of_slot
from tilegym_db.sandbox.situation import Described, Situation, changed_property, described, in_threads, take_device

RECOMPILE_LIMIT = 64
"""Maximum number of graphs that torch.compile keeps for one function. Its default of 8 is less than the shapes, strides,
offsets and modes (inference or not) of one verification, and a function that must be one graph raises beyond it."""

WATCHED_SHARE = 0.25
"""Share of the calls of a watched run whose outputs are compared; a few wrong calls among thousands should be found."""


MAX_STRETCH = 5.0
"""Maximum time of a run of calls, as a multiple of what it may use of a processor."""
MAX_UNUSED_BYTES = 1 << 30
"""Memory that PyTorch may keep after a call on its own memory. It keeps some for each side stream, and gives none to another."""


class _Mallinfo(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "used", "free", "keepcost")
    )


_mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
if _mallinfo is not None:
    _mallinfo.restype = _Mallinfo


def _bytes_in_use() -> int:
    """Return the bytes that the C library has handed out; 0 if it cannot tell."""
    found = _mallinfo() if _mallinfo is not None else None
    return 0 if found is None else int(found.used + found.hblkhd)


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
        self.described: list[dict[str, Described]] = []
        self.order: list[str] = []
        self.outputs: list[str] = []
        self.in_place: dict[str, str] = {}
        self.timer: Any = None
        self.profiler: Any = None
        self.state_watch: Any = None

    # -- requests -----------------------------------------------------------------------------------------------------

    def prepare(self, request: dict[str, Any]) -> dict[str, Any]:
        """Save references to clocks and the profiler before a Solution can replace them."""
        from tilegym_db.sandbox.timing import BlockTimer

        self.timer = BlockTimer(self.device)
        self.state_watch = StateWatch()
        if request["profile"] and self.device != "cpu":
            self.profiler = KernelProfiler()
        return {}

    def load(self, request: dict[str, Any]) -> dict[str, Any]:
        """Import the Solution of a record, if its digest is the one announced."""
        from pathlib import Path

        from tilegym_db.backends.compile_cache import use_own_folders
        from tilegym_db.backends.load import load_entry
        from tilegym_db.backends.toolchains import INTERPRETERS, TOOLCHAINS, prepare_environment
        from tilegym_db.catalog import SolutionFiles
        from tilegym_db.errors import SolutionError

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
        self.detach({})
        memory, plans, self.release = attach(request["buffers"], request["descriptors"][0])
        self.config = request["config"]
        for number, (start, plan) in enumerate(plans):
            scalars = request["scalars"][number % len(request["scalars"])]
            self.slots.append({**scalars, **tensors_of_slot(memory[start : start + plan.size], plan)})
        self.described = [self._described(slot) for slot in self.slots]
        return {}

    def detach(self, request: dict[str, Any]) -> dict[str, Any]:
        """Forget the buffers."""
        self.slots, self.described = [], []
        if self.release is not None:
            self.release()
            self.release = None
            self._give_back_memory()
        return {}

    def call(self, request: dict[str, Any]) -> dict[str, Any]:
        """Call the Solution once on one slot in a situation, and wait for it; copy a returned value to the slot's outputs.

        If the situation has tensors in PyTorch's own memory, they start with the contents of the slot, and their contents are
        copied back afterwards.
        """
        slot, situation = self.slots[request["slot"]], Situation(**request.get("situation", {}))

        def call() -> dict[str, str] | None:
            given = situation.arguments(slot, self.timer.occupy)
            before = self._described(given)
            mismatch = self._copy_returned(given, self._bound(given)()) or self._changed(before, given)
            if situation.own_memory:
                for name, value in slot.items():
                    if hasattr(value, "copy_"):
                        fill_tensor(value, given[name].detach())
            return mismatch

        mismatch = situation.run(self.device, call)
        self._synchronize()
        if situation.own_memory and self.device != "cpu":
            unused = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
            if unused > MAX_UNUSED_BYTES:
                self._give_back_memory()
        return {"mismatch": mismatch} if mismatch else {}

    def repeat(self, request: dict[str, Any]) -> dict[str, Any]:
        """Call the Solution on the listed slots in turn, ``count`` times in all or until they have taken ``seconds``.

        Time that a busy machine gives to others does not count, up to ``MAX_STRETCH`` of it: else it would see fewer calls.
        With several ``threads``, each takes some of the slots. Returned values are copied to the outputs of their slots. The
        answer has the number of calls. With a ``watched`` seed, the bytes of a share of the calls are compared with those of
        the first call of their slot, and the answer has the number of calls that differ.
        """
        order, threads, count = request["slots"], request["threads"], request["count"]
        seconds, watch = request["seconds"], request.get("watched")
        chance, first, differing = random.Random(watch), dict[int, list[torch.Tensor]](), 0

        def calls(own: list[int]) -> int:  # the part of one thread
            nonlocal differing
            take_device(self.device)
            deadline, used = time.monotonic() + MAX_STRETCH * seconds, time.thread_time()
            bound = [(self.slots[index], self._bound(self.slots[index])) for index in own]
            with torch.inference_mode():
                for number in range(count * len(own) // len(order)):
                    slot, call = bound[number % len(bound)]
                    self._copy_returned(slot, call())
                    if watch is not None and (number < len(bound) or chance.random() < WATCHED_SHARE):
                        found = [slot[name] for name in self.outputs]
                        if id(slot) not in first:
                            first[id(slot)] = [value.clone() for value in found]
                        differing += not all(map(same_bytes, first[id(slot)], found))
                    if time.thread_time() - used > seconds or time.monotonic() > deadline:
                        return number + 1
            return int(count * len(own) // len(order))

        parts = [part for part in (order[start::threads] for start in range(threads)) if part]
        made = calls(order) if threads == 1 else sum(in_threads([functools.partial(calls, part) for part in parts]))
        self._synchronize()
        changed = [self._changed(self.described[index], self.slots[index]) for index in dict.fromkeys(order)]
        mismatch = next((found for found in changed if found), None)
        return {"calls": made, "differing": differing, **({"mismatch": mismatch} if mismatch else {})}

    def misuse(self, request: dict[str, Any]) -> dict[str, Any]:
        """Call the Solution once per tensor of the first slot with another object in its place, and ignore the errors.

        Nearly every kernel then raises at some line. In a model it may raise there too, without memory or by an interrupt.
        """
        slot, raised = self.slots[0], 0
        for name in [name for name, value in slot.items() if isinstance(value, torch.Tensor)]:
            try:
                self._bound({**slot, name: object()})()
            except Exception:  # whatever it is: the calls after it are judged
                raised += 1
        self._synchronize()
        return {"raised": raised}

    def memory(self, request: dict[str, Any]) -> dict[str, Any]:
        """Report the bytes of live tensors on the device, Python's blocks of memory, and the bytes in use on the host."""
        gc.collect()
        on_device = torch.cuda.memory_allocated(self.device) if self.device != "cpu" else 0
        return {"device_bytes": on_device, "blocks": sys.getallocatedblocks(), "bytes": _bytes_in_use()}

    def scalars(self, request: dict[str, Any]) -> dict[str, Any]:
        """Replace the scalar arguments of later calls on these slots."""
        for slot in self.slots:
            slot.update(request["scalars"])
        return {}

    def state(self, request: dict[str, Any]) -> dict[str, Any]:
        """Report the process state that changed since before the Solution was loaded."""
        return {"changes": self.state_watch.changes()}

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """Call the Solution once on each listed slot, behind a busy device, and answer when all calls have finished.

        The harness measures the time. Without slots this is the null call, which costs only the request. Returned values are
        copied to the outputs at once, so that their memory is reused as in timing.
        """
        calls = [(slot, self._bound(slot)) for slot in (self.slots[index] for index in request["slots"])]
        self.timer.occupy(request["busy_us"])
        with torch.inference_mode():  # as models are served; timed blocks run without it
            for slot, call in calls:
                self._copy_returned(slot, call())
        self._synchronize()
        return {}

    def time(self, request: dict[str, Any]) -> dict[str, Any]:
        """Time one call on each of the listed slots, in that order."""
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
        """Report all device activity caused by one call on each listed slot, including other streams and later work."""
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

    def _described(self, slot: Mapping[str, Any]) -> dict[str, Described]:
        written = {*self.outputs, *self.in_place}
        tensors = {name: value for name, value in slot.items() if isinstance(value, torch.Tensor)}
        return {name: described(value, written=name in written) for name, value in tensors.items()}

    def _changed(self, before: Mapping[str, Described], slot: Mapping[str, Any]) -> dict[str, str] | None:
        """Return a mismatch, its kind and a description, if a call changed an input, or the shape or place of an output."""
        written = {*self.outputs, *self.in_place}
        for name, known in before.items():
            what = changed_property(known, slot[name], written=name in written)
            if what is not None:
                return {"kind": "argument", "what": f"{name}: {what}"}
        return None

    def _give_back_memory(self) -> None:
        """Free what PyTorch keeps for later calls, as other workers and the next workload need the memory.

        Each thread and side stream in which PyTorch multiplied has a workspace of cuBLAS, which lives as long as the process.
        """
        if self.device != "cpu":
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()

    def _synchronize(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()

    def serve(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer one request; an exception from the Solution becomes part of the answer."""
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
            "memory": self.memory,
            "misuse": self.misuse,
            "scalars": self.scalars,
            "state": self.state,
        }
        try:
            return {"id": request["id"], "ok": True, **handlers[request["op"]](request)}
        except Exception as error:  # the boundary to untrusted code: the answer records it and the harness decides
            kind = "compile" if is_compile_error(error) else "memory" if is_memory_error(error) else "runtime"
            text = "".join(traceback.format_exception(error, limit=-8))
        if kind == "memory":  # not before the exception is gone, whose frames hold the tensors of the call
            gc.collect()
            self._give_back_memory()
        return {"id": request["id"], "ok": False, "kind": kind, "error": text[-8000:]}


def _end_with(harness: int) -> None:
    """End this process group when the harness is killed, because a hanging call would keep the device forever."""

    def watch(sleep: Callable[[float], None] = time.sleep) -> None:
        while os.getppid() == harness:
            sleep(0.5)
        os.killpg(0, signal.SIGKILL)  # with every compiler that was started here

    threading.Thread(target=watch, daemon=True).start()


def main(channel: int, device: str) -> None:
    """Serve requests until the harness closes the channel.

    Args:
        channel: descriptor of the socket to the harness.
    """
    _end_with(os.getppid())
    worker = Worker(device)
    with contextlib.closing(protocol.Channel(channel)) as harness:
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


# ---- answers --------------------------------------------------------------------------------------

# Parts of class names along the exception chain that distinguish compile errors from runtime errors.
COMPILE_ERROR_NAMES = ("Compil", "TileSyntax", "TileType", "TileValue", "TileUnsupported", "OutOfResources", "PTXAS")


def is_compile_error(error: BaseException) -> bool:
    """Return True if an error or one of its causes comes from a compiler."""
    seen: BaseException | None = error
    while seen is not None:
        if any(part in type(seen).__name__ for part in COMPILE_ERROR_NAMES):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def is_memory_error(error: BaseException) -> bool:
    """Return True if the device is out of memory, which other processes may have taken. A CUDA context may not fit either."""
    from tilegym_db.errors import is_out_of_memory

    return is_out_of_memory(error)


def copy_returned(returned: Any, slot: Mapping[str, Any], outputs: Sequence[str]) -> dict[str, str] | None:
    """Copy the returned value of a call to the outputs of its slot; return the kind of a mismatch and a sentence, or None."""
    values = returned if isinstance(returned, tuple | list) else (returned,)
    if len(values) != len(outputs):
        return {"kind": "shape", "what": f"{len(values)} values returned, {len(outputs)} expected"}
    for name, value in zip(outputs, values, strict=True):
        target = slot[name]
        if type(value) is not torch.Tensor:
            return {"kind": "shape", "what": f"{name} is a {type(value).__name__}, not a plain tensor"}
        if value.shape != target.shape:
            return {"kind": "shape", "what": f"{name} has shape {list(value.shape)}, expected {list(target.shape)}"}
        if value.dtype != target.dtype:
            return {"kind": "dtype", "what": f"{name} has dtype {value.dtype}, expected {target.dtype}"}
        if value.device != target.device:
            return {"kind": "shape", "what": f"{name} is on {value.device}, expected {target.device}"}
        target.copy_(value)
    return None


# ---- process state --------------------------------------------------------------------------------
# State that a call may change for later code in its process: switches, generators, environment, modules.
#
# The worker takes a snapshot after the language is imported and before the Solution is loaded. The harness refuses a
# Solution that changes the state, because in a model the kernel shares its process with code that depends on it.
# For example, drawing from PyTorch's generator changes the tokens that are sampled later.

Snapshot = dict[str, str]

# Prefixes of variables that the toolchains set when they compile, and read again.
_OF_TOOLCHAINS = ("TRITON", "TORCH", "TILELANG", "TVM", "CUDA", "CUTILE", "PYTORCH", "KMP", "OMP", "NVIDIA", "CUPTI")
# State that torch.compile changes permanently when it first compiles. Only baselines use it, and they never serve a model.
_OF_TORCH_COMPILE = ("recursion limit", "the environment", "warnings.filters")
_TINY = 1e-40  # subnormal in float32: zero where denormals are flushed


def _backends() -> Snapshot:
    """Return the plain-valued switches below ``torch.backends`` by dotted name."""
    found: Snapshot = {}
    for library in ("cuda.matmul", "cudnn", "mkldnn", "opt_einsum"):
        module: Any = torch.backends
        for part in library.split("."):
            module = getattr(module, part)
        for name in ("enabled", "benchmark", "deterministic", "allow_tf32", "allow_fp16_reduced_precision_reduction"):
            found[f"torch.backends.{library}.{name}"] = str(getattr(module, name, None))
        name = "allow_bf16_reduced_precision_reduction"
        found[f"torch.backends.{library}.{name}"] = str(getattr(module, name, None))
    cuda: Any = torch.backends.cuda
    for name in ("flash_sdp_enabled", "mem_efficient_sdp_enabled", "math_sdp_enabled", "cudnn_sdp_enabled"):
        found[f"torch.backends.cuda.{name}"] = str(getattr(cuda, name)())
    return found


_SWITCHES: dict[str, Callable[[], object]] = {
    "torch.is_grad_enabled": torch.is_grad_enabled,
    "torch.is_inference_mode_enabled": torch.is_inference_mode_enabled,
    "torch.get_default_dtype": torch.get_default_dtype,
    "torch.get_default_device": torch.get_default_device,
    "torch.get_num_threads": torch.get_num_threads,
    "torch.get_num_interop_threads": torch.get_num_interop_threads,
    "torch.get_float32_matmul_precision": torch.get_float32_matmul_precision,
    "torch.are_deterministic_algorithms_enabled": torch.are_deterministic_algorithms_enabled,
    "torch.is_deterministic_algorithms_warn_only_enabled": torch.is_deterministic_algorithms_warn_only_enabled,
    "torch.is_anomaly_enabled": torch.is_anomaly_enabled,
    "torch.is_autocast_enabled": lambda: [torch.is_autocast_enabled(device) for device in ("cpu", "cuda")],
    "torch.get_autocast_dtype": lambda: [torch.get_autocast_dtype(device) for device in ("cpu", "cuda")],
    "denormals are kept": lambda: bool((torch.tensor([_TINY]) * torch.ones(1)).item()),
    "working directory": os.getcwd,
    "recursion limit": sys.getrecursionlimit,
    "switch interval": sys.getswitchinterval,
    "trace function": lambda: (sys.gettrace(), sys.getprofile()),
}


def switches() -> Snapshot:
    """Return the state that must not change at all, not even by loading or compiling."""
    return {name: str(read()) for name, read in _SWITCHES.items()} | _backends()


def traces_of_calls() -> Snapshot:
    """Return the state that an imported language may change but a Solution may not: generators, environment, warning filters."""
    found = {
        "torch's random state": _digest(torch.get_rng_state().numpy().tobytes()),
        "Python's random state": _digest(repr(random.getstate()).encode()),
        "warnings.filters": _digest(repr(_filters()).encode()),
        "the environment": str(sorted((k, v) for k, v in os.environ.items() if not k.startswith(_OF_TOOLCHAINS))),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["CUDA's random state"] = _digest(torch.cuda.get_rng_state().numpy().tobytes())
    found |= _compiler_settings()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        found["numpy's random state"] = _digest(repr(numpy.random.get_state()).encode())
    return found


def _compiler_settings() -> Snapshot:
    """Return the plain-valued settings and the hooks of the imported compilers, which other kernels of the process share."""
    found: Snapshot = {}
    knobs: Any = sys.modules.get("triton.knobs")
    for group in ("compilation", "runtime", "language") if knobs is not None else ():
        settings = getattr(knobs, group)
        for name, value in settings.knobs.items():
            found[f"triton.knobs.{group}.{name}"] = str(value)
        for name in (name for name in dir(settings) if name.endswith("hook")):
            hook = getattr(settings, name)
            found[f"triton.knobs.{group}.{name}"] = str(len(getattr(hook, "calls", (hook,) if hook else ())))
    return found


class StateWatch:
    """A comparison of the process state with a snapshot from before the Solution was loaded."""

    def __init__(self) -> None:
        """Take the snapshot of the switches, which not even a language may change."""
        self._before, self._ignored = switches(), frozenset[str]()

    def begin(self, packages: Iterable[str], *, compiles: bool) -> None:
        """Import the packages of a language and take the snapshot of the remaining state.

        Args:
            packages: the language and reviewed libraries, which may change the process when they are imported. If an import
                fails, loading the Solution reports it.
        """
        for package in packages:
            with contextlib.suppress(ImportError):
                importlib.import_module(package)
        self._before |= traces_of_calls()
        self._ignored = frozenset(_OF_TORCH_COMPILE if compiles else ())

    def changes(self) -> list[str]:
        """Return one sentence for each change since the snapshot."""
        after = switches() | traces_of_calls()
        return changes({name: value for name, value in self._before.items() if name not in self._ignored}, after)


def _filters() -> list[object]:
    """Return the filters for Python's own warning categories; a library that is imported late may add its own."""
    return [entry for entry in warnings.filters if entry[2].__module__ == "builtins"]


def changes(before: Snapshot, after: Snapshot) -> list[str]:
    """Return one sentence for each value that differs."""
    return [
        f"{name} is {after[name][:80]} after calls and was {value[:80]} before"
        for name, value in before.items()
        if name in after and after[name] != value
    ]


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


# ---- profiling ------------------------------------------------------------------------------------
# CUPTI reports every kernel, copy and cleared block on any stream during a call.
#
# The profiler starts before a Solution is loaded but lives in the same process. Its report can show that a Solution
# is invalid. It does not alone show that a Solution is valid (``docs/trust.md``).

_profile: Any = profile
_synchronize = torch.cuda.synchronize
_sleep = time.sleep

LINGER_S = 0.02
"""Seconds to wait after the calls for work that they deferred until after the return."""


class KernelProfiler:
    """A recorder of device activities. It runs one session at once, because the first takes seconds and misses events."""

    def __init__(self) -> None:
        """Start CUPTI once."""
        self.activities([lambda: torch.zeros(1, device="cuda")])

    def activities(self, calls: Sequence[Callable[[], Any]]) -> list[KernelUse]:
        """Make the calls, wait for them and a little longer, and add up what ran on the device."""
        _synchronize()
        with _profile(activities=[ProfilerActivity.CUDA]) as session:
            for call in calls:
                call()
            _synchronize()
            _sleep(LINGER_S)
            _synchronize()
        return uses_of_events(session.profiler.kineto_results.events())


def uses_of_events(events: Iterable[Any]) -> list[KernelUse]:
    """Add up the events of the device in a profile; events of the host are left out."""
    on_device = DeviceType.CUDA
    return sum_uses(
        (event.name(), event.duration_ns() / 1e3, event.device_resource_id())
        for event in events
        if event.device_type() == on_device
    )
