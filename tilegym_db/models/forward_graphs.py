"""Forwards that a caller makes (``model(**inputs)``) in CUDA graphs: those of encoders, classifiers and scoring loops.

A small forward takes the host longer than the GPU, since each layer is dozens of launches. A graph is for inputs of one form:
names, shapes, strides, dtypes and settings. The caller gets copies of its outputs, because the next replay overwrites them.

The first forwards of a form run as before, and are timed. Then graphs must prove themselves on two contents: replays have to give
the bits of forwards with the same kernels. If the mask hides nothing, the graph has none, as transformers drops such masks too.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad

from tilegym_db.models.call_site import AUTOCAST, IN_TRAINING, NEEDS_GRAD, TRACED, UNPATCHED, change_class, subclass
from tilegym_db.models.fixed_cache import first_line
from tilegym_db.models.graphs import (
    MAX_EAGER_RUNS,
    PAYS,
    PLAIN,
    TIMED_REPLAYS,
    Capture,
    GraphedCall,
    Patience,
    Stopwatch,
    captured,
    has_modes,
    has_same_bits,
    masks_as_before,
    numerics_now,
    split,
    state_or_reason,
    stopwatch_of_events,
    submodules,
    undisturbed,
    why_changed,
    why_watched,
)
from tilegym_db.models.next_inputs import CACHES, DECODER, HELD, CapturedForward
from tilegym_db.models.prompt_graphs import EMPTY, GROWING, begun_on, original_class
from tilegym_db.resolver.hot_path import replayed

EAGER_RUNS = 2
"""Forwards of a form that run as before, and are timed. The first one also loads kernels."""
MAX_FORMS = 256
"""Maximum number of forms that are remembered."""
MAX_GRAPHS = 32
"""Maximum number of graphs; the least recently used one is dropped. They share the memory of what they compute on the way."""
MAX_MS = 60.0
"""Milliseconds from which on a forward is taken to wait for the GPU and not for the host."""
MAX_OUTPUT_BYTES = 256 << 20
"""Maximum memory of the outputs of a graph, which are copied after each replay."""
MAX_HELD_BYTES = 1 << 30
"""Maximum memory of the inputs and outputs of all graphs."""
MEMORY_SHARE = 0.05
"""Maximum share of the memory of a GPU that a graph adds to what others have. It is of no other use while there are graphs."""
MAX_UNPAID = 8
"""Proofs that need not have paid off before the next one."""
MAX_FAILURES = 4
"""Forms without a graph, before any has one, after which none is tried any more."""

STATES = (EMPTY, "LinearAttentionLayer")
"""Classes of layers of a cache that have no keys."""
IN_USE = "another thread runs a graph of this model"


@dataclass(frozen=True)
class ForwardReport:
    """The graphs of a model's forwards, their use, and the reasons why others ran as before.

    Attributes:
        captured: graphs captured, each for one form of inputs.
        replayed: forwards that were replays.
        stock: reason -> forwards that ran as before.
    """

    captured: int
    replayed: int
    stock: Mapping[str, int]

    def summary(self) -> str:
        """Return the figures and reasons in words, one a line."""
        lines = [f"forwards in CUDA graphs: {self.replayed} replayed from {self.captured} graphs"]
        return "\n".join(
            [*lines, *(f"forwards without graphs, {count} times: {reason}" for reason, count in self.stock.items())]
        )


class ForwardGraphs:
    """The graphs of one model's forwards. :meth:`install` makes calls of the model use them; :meth:`remove` frees them."""

    def __init__(
        self,
        model: Any,
        capture: Capture | None = None,
        replayed: Callable[[], contextlib.AbstractContextManager[None]] = replayed,
        stopwatch: Stopwatch = stopwatch_of_events,
    ) -> None:
        """Capture nothing yet.

        Args:
            model: of transformers.
            capture: makes a graph of a forward; by default a CUDA graph.
            replayed: the context of calls that a graph repeats.
            stopwatch: measures forwards without waiting for them.
        """
        self._model = weakref.ref(model, self._forget)
        self._device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self._capture = capture or self._captured_in_pool
        self._pool: Any = None
        """The memory that graphs share for what they compute on the way."""
        self._in_pool: list[weakref.ref[CapturedForward]] = []
        self._replayed, self._stopwatch = replayed, stopwatch
        self._forms: OrderedDict[Any, GraphedCall] = OrderedDict()
        self._state: Any = None
        self._weights = Weights([])
        self._patience = Patience(EAGER_RUNS)
        self._lock = threading.Lock()
        self._running = threading.Lock()
        """Held from the copy of inputs to the copy of outputs: all graphs share memory."""
        self._order = _Order(self._device)
        self._others: Counter[str] = Counter()
        """Reasons of forwards that are not those of their form -> forwards."""
        self._captured = self._replays = self._failures = 0
        self._is_open = True
        self.ours: Any = None
        """The class of the model while graphs are installed."""
        self.is_left_out: Callable[[], bool] = lambda: False
        """Tells if this thread makes forwards that are not the caller's own, such as those of ``generate``."""

    @staticmethod
    def fits(model: Any) -> bool:
        """Return True if it is a model of transformers, all of it on one GPU."""
        from transformers import PreTrainedModel

        devices = (
            {parameter.device for parameter in model.parameters()} if isinstance(model, PreTrainedModel) else set()
        )
        return len(devices) == 1 and next(iter(devices)).type == "cuda"

    def install(self) -> None:
        """Give the model a class whose forward asks for graphs."""
        model = self._model()
        base = type(model)
        self.ours = subclass(base, _forward_of(base, self))  # type: ignore[arg-type]
        change_class(model, self.ours)  # type: ignore[arg-type]

    def remove(self) -> None:
        """Give the model its class back, and free all graphs. Safe to call twice.

        If other code has changed the class since, the class stays, and forwards run as before.
        """
        self._is_open = False
        model = self._model()
        if model is not None and self.ours is not None and type(model) is self.ours:
            change_class(model, self.ours.__mro__[1])
        with self._lock:
            self._forget()

    def _forget(self, _: Any = None) -> None:
        """Free graphs, and let weights go. Without it, those of a model that is gone would wait for a garbage collection."""
        self._forms = OrderedDict()
        self._weights.forget()

    def report(self) -> ForwardReport:
        """Return what the graphs have done so far."""
        stock = Counter(self._others)
        for one in self._known():
            if one.failed:
                stock[one.failed] += one.refused
        return ForwardReport(self._captured, self._replays, dict(stock))

    def is_of(self, module: Any) -> bool:
        """Return True if a module is the model, and no copy of it that has the same class."""
        return self._model() is module

    def run(self, model: Any, forward: Callable[..., Any], inputs: dict[str, Any]) -> Any:
        """Return what a forward returns, from a graph where there is one; else from the model's own ``forward``."""
        if self.is_left_out():
            return forward(**inputs)
        known, own = self._form_of(model, inputs)
        is_timed = known is not None and known.runs <= EAGER_RUNS
        outputs = None if known is None or is_timed else self._ask(known, model, forward, inputs, own)
        if outputs is not None:
            return outputs
        stop = self._stopwatch(self._device) if is_timed else None
        outputs = self._as_before(forward, inputs)
        if known is not None and stop is not None:
            known.times["eager"].append(stop())
        return outputs

    def _form_of(self, model: Any, inputs: dict[str, Any]) -> tuple[GraphedCall | None, dict[str, Any]]:
        """Return the form of a forward that may have a graph, and the inputs of the graph; count the reason of another."""
        reason = self._why_stock(model) or why_not_inputs(inputs, self._device)
        if reason:
            self._others[reason] += 1
            if reason == IN_TRAINING:  # which needs the memory
                self._drop_all()
            return None, inputs
        form = split(inputs)[1], torch.is_inference_mode_enabled(), numerics_now()
        if self._has_failed(form):
            return None, inputs
        hides = _needs_mask(inputs, _pad_of(model))
        with self._lock:
            known = self._of((*form, hides))
        known.refused += bool(known.failed)
        return None if known.failed else known, inputs if hides else _without_mask(inputs)

    def _ask(
        self, known: GraphedCall, model: Any, forward: Callable[..., Any], inputs: dict[str, Any], own: dict[str, Any]
    ) -> Any:
        """Return the outputs of :meth:`_from_graph`, one thread at a time; None if it is not the time of a graph."""
        if known.graph is None and not known.tried and known.runs <= self._runs_before_proof():
            return None
        if not self._running.acquire(blocking=False):
            self._others[IN_USE] += 1
            return None
        try:
            outputs = self._from_graph(known, model, forward, inputs, own)
        finally:
            self._running.release()
        known.refused += outputs is None and bool(known.failed)
        return outputs

    def _as_before(self, forward: Callable[..., Any], inputs: dict[str, Any]) -> Any:
        """Return what a forward of stock code returns. If it lacks memory that graphs hold, it gets that, and runs again.

        It does not run again where it may have changed its inputs, such as a cache.
        """
        try:
            return forward(**inputs)
        except torch.OutOfMemoryError:
            if not any(one.graph is not None for one in self._known()):
                raise
            self._drop_all()
            if why_not_inputs(inputs, self._device):
                raise
        return forward(**inputs)  # outside of the handler, which holds what the first run has computed

    def _why_stock(self, model: Any) -> str:
        """Return the reason why no forward may be a replay here; empty if it may."""
        if not self._is_open:
            return UNPATCHED
        if self._failures >= MAX_FAILURES and not self._captured:
            return f"the first {MAX_FAILURES} forms of inputs had no graph"
        if torch.is_grad_enabled():
            return NEEDS_GRAD
        if model.training:
            return IN_TRAINING
        transformed = torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
        if has_modes() or torch._C._is_tracing() or transformed:
            return TRACED
        if torch.is_autocast_enabled(self._device.type):
            return AUTOCAST
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return "the caller captures a graph"
        return ""

    def _has_failed(self, form: tuple[Any, ...]) -> bool:
        """Return True, and count a forward, if none of this form had a graph lately, with a mask that hides something or not.

        Then the mask is not looked at, which waits for the device. Now and then it is, because the next one may be another.
        """
        with self._lock:
            known = [one for hides in (False, True) if (one := self._forms.get((*form, hides))) is not None]
            if not known or not all(one.failed for one in known):
                return False
            for one in known:
                one.count()
            if not all(one.failed for one in known) or known[0].runs % MAX_EAGER_RUNS == 0:
                return False
            known[0].refused += 1
            return True

    def _of(self, key: tuple[Any, ...]) -> GraphedCall:
        """Return what is known about a form that has one forward more, and forget the one used least if there are too many."""
        known = self._forms.pop(key, None) or GraphedCall()
        known.count()
        if self._is_open:
            self._forms[key] = known
        if len(self._forms) > MAX_FORMS:
            self._forms.popitem(last=False)
        return known

    def _runs_before_proof(self) -> int:
        """Return the number of forwards of a form that run as before. It grows with the proofs that have not paid off."""
        unpaid = sum(one.tried and one.replays < PAYS for one in self._known())
        return min(MAX_EAGER_RUNS, max(self._patience.runs, EAGER_RUNS + 2 * (unpaid - MAX_UNPAID)))

    def _from_graph(
        self, known: GraphedCall, model: Any, forward: Callable[..., Any], inputs: dict[str, Any], own: dict[str, Any]
    ) -> Any:
        """Return copies of the outputs of a replay, or None: the first call loads kernels and proves, the second captures."""
        if known.graph is not None and (slower := known.why_slower()):
            known.failed, known.graph = slower, None
            return None
        if known.graph is not None and self._weights.are_in_place():
            stop = self._stopwatch(self._device)
            try:
                outputs = self._replay(known.graph, own, lambda: self._is_as_it_was(model, known))
            except torch.OutOfMemoryError as error:  # as before it may fit, without what graphs hold
                self._drop_all()
                known.fail_for_now(first_line(error))
                return None
            if outputs is not None:
                if len(known.times["replay"]) < TIMED_REPLAYS:
                    known.times["replay"].append(stop())
                known.replays += 1
                self._replays += 1
            return outputs
        if self._is_as_it_was(model, known):
            known.failed = self._why_too_large(known)
            if not known.failed:
                self._prove_or_capture(known, model, forward, inputs, own)
            self._failures += bool(known.failed)
        return None

    def _is_as_it_was(self, model: Any, known: GraphedCall) -> bool:
        """Return True if graphs compute what the model does now; if not, drop them."""
        try:
            state, reason = state_or_reason(model, self._device.type, attributes=True)
            if state is not None and state == self._state:
                return True
            weights = Weights(submodules(model))
        except Exception as error:  # weights may be of any class
            state, reason, weights = None, f"its state cannot be read: {first_line(error)}", Weights([])
        is_first = self._state is None
        with self._lock:
            self._state, self._weights = state, weights
        self._drop_all()
        if reason:  # it may last, so it is not looked for in each forward
            known.fail_for_now(reason)
        elif not is_first:
            for one in self._known():
                one.begin_anew()
        return is_first and not reason

    def _why_too_large(self, known: GraphedCall) -> str:
        best = known.best("eager", 1)
        return f"it takes {best:.0f} ms, too long to wait for the host" if best is not None and best > MAX_MS else ""

    def _prove_or_capture(
        self, known: GraphedCall, model: Any, forward: Callable[..., Any], inputs: dict[str, Any], own: dict[str, Any]
    ) -> None:
        contents = [(inputs, own), (_with_other_contents(inputs), _with_other_contents(own))]
        try:
            with undisturbed(self._device), self._replayed():
                if not known.tried:
                    known.failed = why_watched(submodules(model)) or why_changed(
                        model, lambda: _why_not_proven(forward, contents, self._device)
                    )
                    known.tried = True
                    return
                self._make_room(known)
                run = _with_cache(forward, _empty_cache(model, forward(**own), self._device))
                with masks_as_before(has_positions=_has_positions(own)):
                    graph = self._capture(run, own)
                for _, given in contents[::-1]:
                    if not _are_same(self._replay(graph, given), forward(**given)):
                        known.failed = "a replay does not give the bits of a forward"
                        return
        except torch.OutOfMemoryError as error:
            known.fail_for_now(first_line(error))
        except Exception as error:  # a model may do anything in its forward, such as waiting for the device
            known.failed = first_line(error)
        else:
            known.graph = graph
            self._captured += 1

    def _captured_in_pool(self, forward: Any, inputs: Mapping[str, Any]) -> CapturedForward:
        """Capture a forward into the memory of the other graphs, or into new memory.

        PyTorch gives no memory to a pool that no graph has any more, or in which a capture has failed.
        """
        if self._pool is None or all(graph() is None for graph in self._in_pool):
            self._pool, self._in_pool = torch.cuda.graph_pool_handle(), []
        pool, self._pool = self._pool, None
        grown, whole = 0, torch.cuda.mem_get_info(self._device)[1]

        def measured(**given: Any) -> Any:
            nonlocal grown
            before = torch.cuda.memory_reserved(self._device)
            outputs = forward(**given)
            grown = torch.cuda.memory_reserved(self._device) - before
            return outputs

        graph = captured(measured, inputs, pool)
        if grown > MEMORY_SHARE * whole:
            self._drop_all()  # else they would keep the memory
            raise torch.OutOfMemoryError(f"its graph takes {grown >> 20} MiB of {whole >> 20} MiB")
        self._pool = pool
        self._in_pool.append(weakref.ref(graph))
        return graph

    def _replay(
        self, graph: CapturedForward, own: Mapping[str, Any], may_answer: Callable[[], bool] = lambda: True
    ) -> Any:
        """Return copies of the outputs of a replay, or None if ``may_answer()`` says so, which is asked while the GPU works."""
        self._order.begin(graph.inputs)
        try:
            for kept, given in zip(graph.inputs, split(own)[0], strict=True):
                kept.copy_(given)
            graph.replay()
            return copied_outputs(graph.outputs) if may_answer() else None
        finally:
            self._order.end()

    def _known(self) -> list[GraphedCall]:
        """Return the forms so far, the one used last at the end."""
        with self._lock:
            return [*self._forms.values()]

    def _make_room(self, known: GraphedCall) -> None:
        """Drop the graphs that were used least recently, if a new one would make too many, or hold too much."""
        others = [one for one in self._known() if one.graph is not None and one is not known]
        held = [_bytes_of((one.graph.inputs, one.graph.outputs)) for one in others if one.graph is not None]
        first = max(0, len(others) + 1 - MAX_GRAPHS)
        while sum(held[first:]) > MAX_HELD_BYTES - MAX_OUTPUT_BYTES:
            first += 1
        self._drop(others[:first])

    def _drop_all(self) -> None:
        self._drop(self._known())

    def _drop(self, dropped: list[GraphedCall]) -> None:
        """Free graphs, and forget what their proofs have shown."""
        self._patience.learn([one for one in dropped if one.graph is not None])
        for one in dropped:
            one.graph, one.replays, one.tried = None, 0, False
            one.runs = min(one.runs, EAGER_RUNS)


class Weights:
    """The addresses of a model's weights. A replay reads them, so it must not run if their memory may have another owner."""

    def __init__(self, modules: list[torch.nn.Module]) -> None:
        """Note where the weights are. A module that is replaced lives on until the next :class:`Weights` of its model."""
        holders = [held for module in modules for held in (module._parameters, module._buffers)]
        self._places = [
            (held, name, value.data_ptr()) for held in holders for name, value in held.items() if value is not None
        ]

    def forget(self) -> None:
        """Let modules go that are not part of the model any more."""
        self._places = []

    def are_in_place(self) -> bool:
        """Return True if all of them are where they were. Modules that were added since are not seen."""
        for held, name, address in self._places:
            value = held.get(name)
            if value is None or value.data_ptr() != address:
                return False
        return True


class _Order:
    """Makes a replay wait for the end of the one before, which may be on another stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._end: Any = None

    def begin(self, inputs: list[torch.Tensor]) -> None:
        """Begin a replay that reads these inputs. If they are freed, their memory waits for it too."""
        if self._device.type != "cuda":
            return
        stream = torch.cuda.current_stream(self._device)
        if self._end is not None:
            stream.wait_event(self._end)
        for one in inputs:
            one.record_stream(stream)

    def end(self) -> None:
        if self._device.type == "cuda":
            self._end = self._end or torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._end.record(torch.cuda.current_stream(self._device))


def _forward_of(base: Any, graphs: ForwardGraphs) -> Callable[..., Any]:
    """Return the forward of a class that asks for graphs."""
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = list(inspect.signature(base.forward).parameters.values())[1:]
    names = [one.name for one in parameters if one.kind == kinds[1]]
    has_others = any(one.kind == kinds[0] for one in parameters)

    @functools.wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False))
        is_odd = has_others or len(args) > len(names) or bool(given.keys() & kwargs.keys())
        if torch.compiler.is_compiling() or is_odd or not graphs.is_of(self):
            return base.forward(self, *args, **kwargs)
        return graphs.run(self, functools.partial(base.forward, self), {**given, **kwargs})

    return forward


# ---- decisions ------------------------------------------------------------------------------------


def why_not_inputs(inputs: Mapping[str, Any], device: torch.device) -> str:
    """Return the reason why the inputs of a forward are not those of a graph; empty if they may be."""
    held = [name for name in HELD if inputs.get(name) is not None]
    if held:
        return f"it has {held[0]}"
    tensors = 0
    left = list(inputs.items())
    for name, value in left:  # it grows
        if type(value) in (dict, list, tuple):
            left += [(name, one) for one in (value.values() if type(value) is dict else value)]
        elif type(value) is torch.Tensor:
            tensors += 1
            if value.is_nested or value.layout is not torch.strided:
                return f"{name} is nested or sparse"
            if value.device != device or value.requires_grad:
                return f"{name} is on another device, or needs a gradient"
        elif type(value) not in PLAIN:
            return f"it has {name} of type {type(value).__name__}"
    return "" if tensors else "it has no tensor"


def _needs_mask(inputs: Mapping[str, Any], pad: int | None) -> bool:
    """Return True if there is a mask of tokens that the forward needs. It waits for the device, as transformers does.

    Without a mask, a forward may find what is hidden in the tokens, where some are padding, or in positions that begin anew for
    each of several sequences. So a mask also stays for these.
    """
    mask, ids, positions = (inputs.get(name) for name in (DECODER.mask, DECODER.ids, DECODER.positions))
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2:
        return mask is not None
    sees = (mask == 1).all()
    if pad is not None and isinstance(ids, torch.Tensor):
        sees = sees & (ids != pad).all()
    if isinstance(positions, torch.Tensor):
        sees = sees & (positions == torch.arange(positions.shape[-1], device=positions.device)).all()
    return not bool(sees)


def _has_positions(inputs: Mapping[str, Any]) -> bool:
    """Return True if a caller gives positions, also those of a decoder beside an encoder, or in a dictionary of inputs."""
    return any(
        (isinstance(name, str) and DECODER.positions in name and value is not None)
        or (type(value) is dict and _has_positions(value))
        for name, value in inputs.items()
    )


def _pad_of(model: Any) -> int | None:
    """Return the token that fills up short sequences, as of now: callers set it late, if a tokenizer has none."""
    found = getattr(getattr(model, "config", None), "pad_token_id", None)
    return found if isinstance(found, int) else None


def _without_mask(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in inputs.items() if name != DECODER.mask}


def _with_other_contents(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return inputs with other contents that are as valid: tokens in another order, features from the last to the first."""
    ids = inputs.get(DECODER.ids)
    shape = ids.shape if isinstance(ids, torch.Tensor) else None

    def other(value: Any) -> Any:
        if type(value) is not torch.Tensor or value is inputs.get(DECODER.positions):
            return value
        if shape is not None and len(shape) == 2 and value.shape[:2] == shape:
            return value.roll(1, dims=1)
        # Few numbers may be the corners of a box, which have an order.
        return value.flip(-1) if value.is_floating_point() and value.ndim > 2 and value.shape[-1] > 4 else value

    return {name: other(value) for name, value in inputs.items()}


def _why_not_proven(
    forward: Callable[..., Any], contents: list[tuple[dict[str, Any], dict[str, Any]]], device: torch.device
) -> str:
    """Return the reason why a graph would not compute what forwards do; empty if it would.

    Args:
        contents: the inputs as the caller gives them, and those of a graph, for some contents. They stay as they are.
    """
    for given, own in contents:
        kept = copied_outputs(given)
        first = forward(**kept)
        if reason := why_not_copied(first, device):
            return reason
        if not _are_same(kept, given):
            return "its forward changes its inputs"
        if not _are_same(first, forward(**copied_outputs(own))):
            return "it computes something else without a mask, or its kernels are not deterministic"
    return ""


# ---- outputs --------------------------------------------------------------------------------------


def why_not_copied(outputs: Any, device: torch.device) -> str:
    """Return the reason why outputs on a device cannot be copied after a replay; empty if they can."""
    reason = ""
    for value in _members(outputs):
        if isinstance(value, torch.Tensor):
            if value.device != device:  # a copy on the host would not wait for the GPU
                reason = reason or "it returns a tensor on another device"
            if type(value) is not torch.Tensor or value.requires_grad:
                reason = reason or "it returns a weight, or a tensor of another class"
        elif type(value) not in PLAIN:
            reason = reason or f"it returns a {type(value).__name__}"
    if (size := _bytes_of(outputs)) > MAX_OUTPUT_BYTES:
        return f"its outputs take {size >> 20} MiB, more than {MAX_OUTPUT_BYTES >> 20}"
    return reason


def _bytes_of(outputs: Any) -> int:
    return sum(one.nbytes for one in _members(outputs) if isinstance(one, torch.Tensor))


def _members(outputs: Any) -> list[Any]:
    """Return all that outputs contain, in order: of containers what is in them, and of a cache what its layers hold."""
    found: list[Any] = []
    left = [outputs]
    while left:
        value = left.pop()
        if isinstance(value, Mapping):
            left += [value[name] for name in sorted(value, key=str)]
        elif isinstance(value, list | tuple):
            left += value
        elif _is_known_cache(value):
            left += [vars(layer) for layer in value.layers]
        elif isinstance(value, torch.dtype | torch.device):
            found.append(str(value))
        else:
            found.append(value)
    return found


def _is_known_cache(value: Any) -> bool:
    from transformers import DynamicCache

    if type(value) is not DynamicCache or getattr(value, "offloading", False):
        return False
    return all(type(layer).__name__ in (*GROWING, *STATES) for layer in value.layers)


def _are_same(one: Any, other: Any) -> bool:
    """Return True if outputs have the same members, tensors by their bits."""
    pairs = _members(one), _members(other)
    return len(pairs[0]) == len(pairs[1]) and all(map(_is_same, *pairs))


def _is_same(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(one) is type(other) and bool(one == other)
    return has_same_bits(one, other)


def copied_outputs(value: Any, memo: dict[int, torch.Tensor] | None = None) -> Any:
    """Return outputs with own memory. A tensor that is there twice is one tensor in the copy too."""
    memo = {} if memo is None else memo
    if isinstance(value, torch.Tensor):
        if id(value) not in memo:
            memo[id(value)] = value.clone()
        return memo[id(value)]
    if isinstance(value, Mapping):
        copies = {name: copied_outputs(one, memo) for name, one in value.items()}
        return copies if type(value) is dict else type(value)(**copies)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(copied_outputs(one, memo) for one in value))
    if isinstance(value, list | tuple):
        return type(value)(copied_outputs(one, memo) for one in value)
    if _is_known_cache(value):
        cache = copy.copy(value)
        cache.layers = [_copied_layer(layer, memo) for layer in value.layers]
        return cache
    return value


def _copied_layer(layer: Any, memo: dict[int, torch.Tensor]) -> Any:
    own = copy.copy(layer)
    own.__class__ = original_class(layer)
    for name, value in vars(layer).items():
        setattr(own, name, copied_outputs(value, memo))
    return own


def _empty_cache(model: Any, outputs: Any, device: torch.device) -> dict[str, Any]:
    """Return the empty cache that a forward begins with, by its name in the outputs; nothing if the outputs have none.

    Otherwise the forward would make one, with a copy from the host, which no capture may contain.
    """
    from transformers import DynamicCache

    name = next((one for one in CACHES if isinstance(outputs, Mapping) and _is_known_cache(outputs.get(one))), "")
    cache = DynamicCache(config=model.config) if name else None
    if cache is None or list(map(type, cache.layers)) != list(map(type, outputs[name].layers)):
        return {}
    return {name: begun_on(cache, device)}


def _with_cache(forward: Callable[..., Any], empty: dict[str, Any]) -> Callable[..., Any]:
    return lambda **given: forward(**given | copy.deepcopy(empty))
