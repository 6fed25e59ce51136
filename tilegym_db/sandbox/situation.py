"""The situation of a call: the modes, memory, thread and settings of the process in which a model may call a kernel.

None of them may change a result, and a call may leave none of them changed. The harness draws a situation for most calls of a
promotion, so that a kernel that is right in one situation only is found by chance. The worker sets it up.
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from tilegym_db.records.definition_parts import span_of
from tilegym_db.sandbox.shared_buffers import fill_tensor

Gradients = Literal["on", "off", "inference"]

PARAMETER_SHARE, DEEPEST = 0.5, 200
"""Probability of an input to be a Parameter, and the maximum number of frames below a call, as many as in a large model."""
STREAM_BUSY_US = 300.0
"""Time for which a side stream is busy before inputs are copied on it, so that a kernel on another stream reads too early."""
SWITCH_INTERVAL_S = 1e-6
_POISON = 0xFF
FAR = (0, 0, 1 << 14, 1 << 24)
"""Elements before a tensor in its own memory, as before a slice of a cache or of packed weights; multiples of any alignment."""


@dataclass(frozen=True)
class Situation:
    """The circumstances of one call.

    ``gradients``: gradient mode. ``own_memory``: the tensors lie in PyTorch's own memory, as in a model, not in shared memory.
    ``parameters``: inputs that are given as Parameters; ``requires_grad`` says if these require gradients. ``default_dtype``
    and ``precision`` are PyTorch's settings for new tensors and for products in float32. ``depth``: number of additional frames
    below the call. ``in_thread``: called by another thread than the main one. ``on_stream``: on a new stream. ``far``: elements
    before each tensor in its own memory.
    """

    gradients: Gradients = "on"
    own_memory: bool = False
    parameters: tuple[str, ...] = ()
    requires_grad: bool = False
    default_dtype: str = "float32"
    precision: str = "highest"
    depth: int = 0
    in_thread: bool = False
    on_stream: bool = False
    far: int = 0

    @classmethod
    def drawn(cls, seed: int, inputs: Sequence[str], *, multiplies_by_torch: bool, on_gpu: bool) -> Situation:
        """Return a random situation; the same one for the same seed.

        Args:
            multiplies_by_torch: PyTorch multiplies for this Solution, so the precision of its products must stay.
        """
        drawn = random.Random(f"situation {seed}")
        gradients: Gradients = drawn.choice(("on", "off", "off", "inference", "inference"))
        own_memory = drawn.random() < 0.6
        return cls(
            gradients=gradients,
            own_memory=own_memory,
            parameters=tuple(name for name in inputs if drawn.random() < PARAMETER_SHARE),
            # With gradients on, PyTorch would record the call: a model calls kernels without that.
            requires_grad=drawn.random() < 0.6 and gradients != "on",
            default_dtype=drawn.choice(("float32", "float32", "bfloat16", "float16")),
            precision="highest" if multiplies_by_torch else drawn.choice(("highest", "high", "medium")),
            depth=drawn.choice((0, 1, drawn.randrange(DEEPEST))),
            in_thread=drawn.random() < 0.3,
            on_stream=on_gpu and own_memory and drawn.random() < 0.4,
            far=drawn.choice(FAR) if own_memory else 0,
        )

    def __str__(self) -> str:
        """Return the differences from a plain call, in words."""
        parts = [f"gradients {self.gradients}"] if self.gradients != "on" else []
        parts += ["tensors in PyTorch's own memory"] if self.own_memory else []
        requires = " that require gradients" if self.requires_grad else ""
        parts += [f"Parameters{requires}: {', '.join(self.parameters)}"] if self.parameters else []
        parts += [f"default dtype {self.default_dtype}"] if self.default_dtype != "float32" else []
        parts += [f"matmul precision {self.precision}"] if self.precision != "highest" else []
        parts += [f"{self.depth} more frames"] if self.depth else []
        parts += ["in another thread"] if self.in_thread else []
        parts += ["on a side stream"] if self.on_stream else []
        parts += [f"{self.far} elements into their memory"] if self.far else []
        return "; ".join(parts) or "a plain call"

    # -- in the worker ------------------------------------------------------------------------------------------------

    def run(self, device: str, call: Callable[[], Any]) -> Any:
        """Return the result of ``call``, which runs with these modes and settings."""
        return in_threads([lambda: self._within(device, call)])[0] if self.in_thread else self._within(device, call)

    def _within(self, device: str, call: Callable[[], Any]) -> Any:
        take_device(device)
        with _settings(self.default_dtype, self.precision), _gradient_mode(self.gradients):
            stream = torch.cuda.Stream(device) if self.on_stream else None  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
                result = _deeper(self.depth, call)
                if stream is not None:
                    stream.synchronize()
                return result

    def arguments(self, slot: Mapping[str, Any], occupy: Callable[[float], None]) -> dict[str, Any]:
        """Return the arguments of a call by name, made from the tensors and scalars of a slot.

        Activations of inference mode are made in it, Parameters before. An object with two names stays one object. ``occupy``
        keeps the current stream busy for some microseconds.
        """
        tensors = {id(value): value for value in slot.values() if isinstance(value, torch.Tensor)}
        weights = {id(slot[name]) for name in self.parameters}
        given = dict(tensors)
        if self.own_memory:
            for key, value in tensors.items():
                with _outside_inference() if key in weights else contextlib.nullcontext():
                    given[key] = _empty_like(value, self.far)
            if self.on_stream:
                torch.cuda.current_stream().synchronize()
                occupy(STREAM_BUSY_US)
            for key, value in tensors.items():
                fill_tensor(given[key], value)
        with _outside_inference():
            for key in weights:
                requires_grad = self.requires_grad and given[key].is_floating_point()
                given[key] = torch.nn.Parameter(given[key], requires_grad=requires_grad)
        return {name: given.get(id(value), value) for name, value in slot.items()}


def take_device(device: str) -> None:
    """Make a device that of this thread, with its context, as in each thread of a model that has used it.

    ``set_device`` alone leaves a new thread without a context if the device is the first one, since it has that number already.
    A launcher that calls the driver then fails. Waiting for the device makes the context current.
    """
    if device != "cpu":
        torch.cuda.set_device(device)
        torch.cuda.synchronize(device)


def in_threads(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Return the result of each call, made in a new thread each, all at the same time; raise the first error.

    The threads take turns as often as Python can, so that a place that they share is more likely to show.
    """
    results: list[Any] = [None] * len(calls)
    errors: list[BaseException] = []

    def body(number: int) -> None:
        try:
            results[number] = calls[number]()
        except BaseException as error:  # raised again in the thread that asked
            errors.append(error)

    threads = [threading.Thread(target=body, args=(number,), daemon=True) for number in range(len(calls))]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    if errors:
        raise errors[0]
    return results


PLAIN = Situation()
"""A call as tests make it: with gradients on, on shared memory, in the main thread."""


@contextlib.contextmanager
def _settings(dtype: str, precision: str) -> Iterator[None]:
    """Set the defaults of PyTorch, and set them back unless the block has changed them itself."""
    wanted = getattr(torch, dtype), precision
    before = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    torch.set_default_dtype(wanted[0])
    torch.set_float32_matmul_precision(wanted[1])
    try:
        yield
    finally:
        if torch.get_default_dtype() == wanted[0]:
            torch.set_default_dtype(before[0])
        if torch.get_float32_matmul_precision() == wanted[1]:
            torch.set_float32_matmul_precision(before[1])


def _gradient_mode(gradients: Gradients) -> contextlib.AbstractContextManager[object]:
    if gradients == "inference":
        return torch.inference_mode()
    return torch.set_grad_enabled(gradients == "on")


def _deeper(frames: int, call: Callable[[], Any]) -> Any:
    return call() if frames <= 0 else _deeper(frames - 1, call)


def _empty_like(value: torch.Tensor, far: int) -> torch.Tensor:
    """Return a tensor with the same strides and alignment in PyTorch's memory, whose bytes from ``far`` elements on are set."""
    offset, span = value.storage_offset(), span_of(value.shape, value.stride())
    memory = torch.empty(far + offset + span, dtype=value.dtype, device=value.device)
    memory[far:].view(torch.uint8).fill_(_POISON)
    return memory.as_strided(value.shape, value.stride(), far + offset)


def _outside_inference() -> contextlib.AbstractContextManager[object]:
    """Return a context outside inference mode. Models make their weights there, even if they are called in it."""
    return torch.inference_mode(False)


# ---- arguments afterwards -------------------------------------------------------------------------
# What a call may not change about the tensors that it is given, beside the contents of its outputs.

Described = tuple[tuple[str, object], ...]


def described(value: torch.Tensor, *, written: bool) -> Described:
    """Return the properties of a tensor that a call must leave as they are; ``written``: the call may write to it."""
    return (
        ("its kind", type(value)),
        ("its shape", tuple(value.shape)),
        ("its strides", value.stride()),
        ("its dtype", value.dtype),
        ("its storage offset", value.storage_offset()),
        ("its address", value.data_ptr()),
        ("the size of its storage", value.untyped_storage().nbytes()),
        ("requires_grad", value.requires_grad),
        ("grad_fn", value.grad_fn),
        ("its hooks", len(value._backward_hooks or ())),
        ("its attributes", tuple(name for name in value.__dict__ if not name.startswith("_dynamo"))),
        # Tensors of inference mode have no version, and empty ones share it with others.
        (
            "the number of writes to it",
            None if written or value.is_inference() or not value.numel() else value._version,
        ),
    )


def changed_property(before: Described, value: torch.Tensor, *, written: bool) -> str | None:
    """Return a property that a call has changed, with its values; None if there is none."""
    for (name, then), (_, now) in zip(before, described(value, written=written), strict=True):
        if then != now:
            return f"{name} was {then} before the call and is {now} after it"
    return None
