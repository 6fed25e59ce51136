"""CUDA graphs of forwards: how they are captured, what they take from the host, and when they pay off.

A graph repeats what the host did at its capture. So a model has none while something must run on the host, such as a hook, and
its graphs are dropped once the model has other weights or settings.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from tilegym_db.models.call_site import class_before_patches, has_hooks, has_other_forward
from tilegym_db.models.next_inputs import HELD, CapturedForward

TIMED_REPLAYS = 2
PAYS = 8
"""Replays that are worth the proof and the capture of a graph."""
MAX_EAGER_RUNS = 64
"""Forwards that run as before if earlier graphs were dropped too soon, or if there was no memory for one."""


@dataclass
class GraphedCall:
    """Forwards of one form, such as a size: how they have run so far, and their graph."""

    runs: int = 0
    failed: str = ""
    """The reason why these forwards run as before."""
    refused: int = 0
    """Forwards that ran as before for that reason."""
    retry: int = sys.maxsize
    """The number of forwards from which on the reason does not count any more."""
    tried: bool = False
    """The proof has been made, whatever it showed."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while the graph changes, and as long as its memory is read."""
    graph: CapturedForward | None = None
    replays: int = 0
    times: dict[str, list[Callable[[], float | None]]] = field(default_factory=lambda: {"eager": [], "replay": []})

    def best(self, way: str, enough: int) -> float | None:
        """Return the shortest time of a way, in milliseconds; None if fewer than enough are known."""
        known = [time for stopped in self.times[way] if (time := stopped()) is not None]
        return min(known) if len(known) >= enough else None

    def why_slower(self) -> str:
        """Return the reason if replays are slower than forwards were before; empty if not, or if it is not known yet."""
        before, now = self.best("eager", 1), self.best("replay", TIMED_REPLAYS)
        if before is None or now is None or now <= before:
            return ""
        return f"a replay takes {now:.2f} ms, and a forward took {before:.2f} ms"

    def fail_for_now(self, reason: str) -> None:
        """Remember a reason that may pass, such as too little memory, and when to try again."""
        self.failed, self.retry = reason, self.runs + max(self.runs, MAX_EAGER_RUNS)

    def begin_anew(self) -> None:
        """Time forwards again, because the model has changed."""
        self.runs, self.times = 0, {"eager": [], "replay": []}

    def count(self) -> None:
        """Count one forward more, and forget a reason that has lasted long enough."""
        self.runs += 1
        if self.runs >= self.retry:
            self.failed, self.retry = "", sys.maxsize


class Patience:
    """The number of forwards of a form that run as before. It grows if graphs were dropped before they had paid off."""

    def __init__(self, runs: int) -> None:
        """Begin with the least number of forwards."""
        self._least = self.runs = runs

    def learn(self, dropped: list[GraphedCall]) -> None:
        """Decide how long the next graphs wait, from what those that are dropped were worth."""
        paid = sum(one.replays for one in dropped) >= PAYS * len(dropped)
        if dropped:
            self.runs = self._least if paid else min(2 * self.runs, MAX_EAGER_RUNS)


Capture = Callable[[Any, Mapping[str, Any]], CapturedForward]
"""(forward, inputs by name) -> the forward, captured."""

Stopwatch = Callable[[torch.device], Callable[[], Callable[[], float | None]]]
"""``stopwatch(device)`` starts one, and its result stops it. That returns a function: milliseconds, or None if unknown yet."""


def stopwatch_of_events(device: torch.device) -> Callable[[], Callable[[], float | None]]:
    """Measure what is launched on a GPU until the result is called. See :data:`Stopwatch`."""
    if device.type != "cuda":  # graphs of another kind, which are not timed
        return lambda: lambda: None
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    stream = torch.cuda.current_stream(device)
    begin.record(stream)

    def stop() -> Callable[[], float | None]:
        end.record(stream)
        return lambda: begin.elapsed_time(end) if end.query() else None  # type: ignore[no-untyped-call]

    return stop


# ---- state of a model -----------------------------------------------------------------------------
# The parts of a model that a forward reads on the host. A CUDA graph repeats what they were at its capture.

PLAIN = frozenset((bool, int, float, complex, str, type(None)))
_CODE = (FunctionType, BuiltinFunctionType, MethodType, functools.partial)
_TENSORS = (torch.nn.Parameter, torch.Tensor)
_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module())) - {"training"}


def submodules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return a module and all modules inside it, each once; ``model.modules()`` takes three times as long."""
    found, seen = [model], {id(model)}
    for module in found:  # it grows
        for child in module._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                found.append(child)
    return found


def state_of(
    modules: Iterable[torch.nn.Module], configs: Iterable[Any], *, attributes: bool = False
) -> tuple[list[Any], list[Any]]:
    """Return tensors and settings of modules, for comparison with a later state. No module is held.

    They are places of weights and buffers, classes of modules (before patches, since a call site that leaves the model served
    none of its calls) and their forwards, and plain attributes of modules and configs: numbers, names, flags and functions, such
    as the adapter in use. With ``attributes``, tensors that are plain attributes too.
    """
    kinds = (*_CODE, torch.Tensor) if attributes else _CODE
    tensors, settings = list[Any](), list[Any]()
    one: Any
    for module in modules:
        for held in (module._parameters, module._buffers):
            for one in held.values():
                if type(one) in _TENSORS:  # most of them, so they take no call
                    tensors += one.data_ptr(), one.dtype, one.shape, one.stride()
                elif one is not None:
                    tensors += place_of(one)
        original = class_before_patches(module)
        settings += original, original.forward
        if original is not (cls := type(module)) and has_other_forward(cls):
            settings.append(cls.forward)
        _add_settings(vars(module), settings, kinds)
    for config in configs:
        _add_settings(vars(config), settings, kinds)
    return tensors, settings


def place_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return the address, dtype, shape and strides of a tensor; for a subclass that wraps tensors, those of each."""
    if hasattr(tensor, "__tensor_flatten__"):
        return tuple(place_of(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    if tensor.layout is not torch.strided:
        return (id(tensor),)
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _add_settings(attributes: Mapping[str, Any], settings: list[Any], kinds: tuple[type, ...]) -> None:
    for name, value in attributes.items():
        if name in _OF_EVERY_MODULE:
            continue
        if (kind := type(value)) in PLAIN:  # most of them, so they take no call
            settings += name, value
        elif isinstance(value, kinds):
            settings += name, _setting(value)
        elif kind in (list, tuple, dict, set) and value:
            members = [one for pair in value.items() for one in pair] if kind is dict else list(value)
            if all([type(one) in PLAIN for one in members]):
                settings += name, members
            elif all([type(one) in PLAIN or isinstance(one, kinds) for one in members]):
                settings += name, [_setting(one) for one in members]


def _setting(value: Any) -> Any:
    """Return what is compared of a plain attribute."""
    if isinstance(value, torch.Tensor):
        return place_of(value)
    if isinstance(value, MethodType):  # without its module, which would be part of a cycle until a garbage collection
        return value.__func__, id(value.__self__)
    return value


def _configs_of(modules: Iterable[torch.nn.Module]) -> list[Any]:
    """Return the configs of modules and the configs in them, each once: a part of a model may have another than the whole."""
    found = {id(config): config for module in modules if hasattr(config := vars(module).get("config"), "__dict__")}
    left = [*found.values()]
    for config in left:  # it grows
        for value in vars(config).values():
            if hasattr(value, "get_text_config") and id(value) not in found:
                found[id(value)] = value
                left.append(value)
    return left


def state_or_reason(model: torch.nn.Module, kind: str, *, attributes: bool = False) -> tuple[Any, str]:
    """Return what the forwards of a model read on the host, and the reason why none may be a replay now; empty if they may.

    Args:
        kind: of the device that its graphs are for, such as cuda.
        attributes: also look at tensors that are plain attributes. A forward must not replace them, or each state is another.
    """
    modules = submodules(model)
    if any([has_hooks(module) for module in modules]):
        return None, "modules have hooks"
    now = next((parameter.device.type for parameter in model.parameters()), "")
    if now != kind:
        return None, f"the model has moved from {kind} to {now}"
    below = [vars(cls).get("forward") for cls in class_before_patches(model).__mro__]  # each may call the one below
    return (state_of(modules, _configs_of(modules), attributes=attributes), below), ""


def why_watched(modules: Iterable[torch.nn.Module]) -> str:
    """Return the reason if other code has replaced the forward of a class of modules; empty if none has.

    Such a forward may do something on the host, such as keeping what it sees, which no replay does.
    """
    for cls in {class_before_patches(module) for module in modules}:
        owner: Any = next((one for one in cls.__mro__ if "forward" in vars(one)), cls)
        places = [str(getattr(one, "__module__", "")) for one in (owner, owner.forward)]
        if places[0].partition(".")[0] != places[1].partition(".")[0]:
            return f"the forward of {cls.__name__} was replaced by one of {places[1]}"
    return ""


def numerics_now() -> tuple[Any, ...]:
    """Return the settings of PyTorch that choose how a forward computes. A graph has those of its capture."""
    cuda: Any = torch.backends.cuda
    cudnn: Any = torch.backends.cudnn
    # The public getters raise an error if a caller has used both the older and the newer names of these settings.
    precision = torch._C._get_fp32_precision_getter
    return (
        *(precision("cuda", operation) for operation in ("matmul", "conv", "rnn")),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
        cuda.matmul.allow_fp16_reduced_precision_reduction,
        cuda.matmul.allow_bf16_reduced_precision_reduction,
        cuda.matmul.allow_fp16_accumulation,
        cudnn.enabled,
        cudnn.benchmark,
        cudnn.deterministic,
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
    )


def has_modes() -> bool:
    """Return True if a mode of this thread sees what PyTorch runs. A default device sees only what makes tensors."""
    if torch._C._len_torch_dispatch_stack():
        return True
    modes: list[Any] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return any(type(mode) is not DeviceContext for mode in modes)


@contextlib.contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Make a context whose forwards take no random numbers from those that the caller gets, also of Python and NumPy."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


def why_changed(model: Any, decide: Callable[[], str]) -> str:
    """Return the reason that a decision gives, or that its forwards put something else into modules, which a replay does not do.

    What they put there is taken out again.
    """
    modules = list(model.modules())
    places = [place for module in modules for place in (vars(module), module._buffers)]
    before = [dict(place) for place in places]
    inside = [
        (name, value, _copy_of(value))
        for place in places
        for name, value in place.items()
        if name not in _OF_EVERY_MODULE and type(value) in (list, dict, set, torch.Tensor)
    ]
    try:
        reason = decide()
    finally:
        changed = [name for place, was in zip(places, before, strict=True) for name in _put_back(place, was)]
        changed += [name for name, value, was in inside if _put_back_inside(value, was)]
    return reason or (f"its forward changes {', '.join(sorted({*changed}))} of its modules" if changed else "")


def _copy_of(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else copy.copy(value)


def _put_back(place: dict[str, Any], was: Mapping[str, Any]) -> list[str]:
    """Make the members of a dictionary those of before, and return the names of those that were not."""
    changed = [name for name in {*place, *was} if not _is_same(place.get(name, place), was.get(name, was))]
    for name in changed:
        if name in was:
            place[name] = was[name]
        else:
            del place[name]
    return changed


def _put_back_inside(value: Any, was: Any) -> bool:
    """Make a tensor or a container what it was before, in place; return True if it was not."""
    if isinstance(value, torch.Tensor):
        if is_changed := not has_same_bits(value, was):
            value.copy_(was)
        return is_changed
    is_same = all(map(_is_same, _flat(value), _flat(was))) if type(value) is not set else value == was
    if len(value) == len(was) and is_same:
        return False
    value.clear()
    (value.extend if type(value) is list else value.update)(was)
    return True


def _flat(container: Any) -> list[Any]:
    return [one for pair in container.items() for one in pair] if type(container) is dict else list(container)


def _is_same(value: Any, other: Any) -> bool:
    if value is other or isinstance(value, MethodType):  # a method is made anew when a call site ends
        return True
    return type(value) is type(other) and isinstance(value, int | float | str) and bool(value == other)


def has_same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if two tensors have the same values; NaN equals NaN. Waits for the device."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())


# ---- capture --------------------------------------------------------------------------------------


def split(inputs: Mapping[str, Any]) -> tuple[list[torch.Tensor], tuple[Any, ...]]:
    """Return the tensors of the inputs, and what else decides the course of a forward, as a key.

    It runs for each token, so it walks through the inputs itself.
    """
    tensors: list[torch.Tensor] = []
    form: list[Any] = []
    _add(inputs, tensors, form)
    return tensors, tuple(form)


def _add(inputs: Mapping[Any, Any], tensors: list[torch.Tensor], form: list[Any]) -> None:
    for name, value in inputs.items():
        if name in HELD:
            continue
        form.append(name)
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            form += value.shape, value.stride(), value.dtype, value.device
        elif value is None or type(value) in (bool, int, str):
            form += type(value), value
        elif type(value) in (dict, list, tuple):
            form += type(value), len(value)
            _add(value if type(value) is dict else dict(enumerate(value)), tensors, form)
        else:
            form.append(repr(value))


def copied(inputs: Any, kept: list[torch.Tensor]) -> Any:
    """Return a copy of inputs without those that a graph reads in place. Append the copied tensors to ``kept``."""
    if isinstance(inputs, torch.Tensor):
        kept.append(inputs.clone())
        return kept[-1]
    if type(inputs) is dict:
        return {name: copied(value, kept) for name, value in inputs.items() if name not in HELD}
    if type(inputs) in (list, tuple):
        return type(inputs)(copied(value, kept) for value in inputs)
    return inputs


_capturing = threading.Lock()
_deciding = threading.RLock()
"""Held while transformers decides otherwise about masks: two such contexts that overlap would leave one in place."""


class _OwnGraph(torch.cuda.CUDAGraph):
    """A graph whose capture leaves the random numbers of the GPU to other threads.

    A capture holds the state of the default generator, and then PyTorch refuses numbers to all other threads. So the generator
    has another state while the capture begins, which is a moment. A forward that draws numbers itself cannot be captured.
    """

    def capture_begin(self, *args: Any, **kwargs: Any) -> None:
        generator: Any = torch.cuda.default_generators[torch.cuda.current_device()]
        state = generator.graphsafe_get_state()
        generator.graphsafe_set_state(state.clone_state())
        try:
            super().capture_begin(*args, **kwargs)
        finally:
            generator.graphsafe_set_state(state)


@contextlib.contextmanager
def masks_as_before(*, has_positions: bool) -> Iterator[None]:
    """Make a context for a capture in which transformers leaves out the masks that its forwards leave out before.

    transformers looks at the contents of masks to see if they hide something, which no capture can do. But some releases, such as
    5.17, then build a mask even where the caller gives none, and all of them do so where positions may be of packed sequences.
    """
    from transformers import masking_utils as masks

    thread = threading.get_ident()

    def is_here() -> bool:
        return threading.get_ident() == thread

    def is_tracing(tensor: Any = None) -> bool:
        return traces(tensor) if tensor is not None or not is_here() else False

    def sequences(position_ids: Any) -> Any:
        return None if is_here() and not has_positions else find_sequences(position_ids)

    with _deciding:
        traces, find_sequences = masks.is_tracing, masks.find_packed_sequence_indices
        masks.is_tracing, masks.find_packed_sequence_indices = is_tracing, sequences
        try:
            yield
        finally:
            masks.is_tracing, masks.find_packed_sequence_indices = traces, find_sequences


def captured(model: Any, inputs: Mapping[str, Any], pool: Any = None) -> CapturedForward:
    """Capture a forward; its inputs are copies, which a replay reads again.

    Args:
        pool: the memory of other graphs, none of which runs at the same time; by default the graph has memory for itself.
    """
    kept: list[torch.Tensor] = []
    given = copied(dict(inputs), kept)
    graph = _OwnGraph()
    held = {name: inputs[name] for name in HELD if name in inputs}
    where = torch.cuda.device(kept[0].device)  # a graph has the work of the current GPU, which may be another
    # A capture that cannot begin or end may leave its own stream as the current one, so this one is set again.
    stream = torch.cuda.stream(torch.cuda.current_stream(kept[0].device))
    with _capturing, where, stream, torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        outputs = model(**given, **held)
    return CapturedForward(graph.replay, kept, outputs)
