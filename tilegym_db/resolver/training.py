"""Calls that need a derivative: one kernel for the forward and later one for the gradients.

A call is served only if both kernels are verified and measured for it, so a training step is never slower than with stock code.
The backward keeps the inputs, and the outputs that it names as saved; its kernel recomputes what stock code would keep as well.
If an input is overwritten before the backward, PyTorch raises an error, as for any tensor that an operation has kept.

The stock solution of the backward Definition computes gradients that no kernel serves after all (unexpected strides, a kernel
that raised). Gradients that are differentiated again (``create_graph=True``) come from its reference. A reference consists of
operations that autograd can differentiate, and a stock solution may call others.

A backward may know no gradient of an output that it only saves, such as the logarithm of a sum. If the caller goes on with such
an output, autograd computes all gradients of the call from the reference of the forward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch

from tilegym_db.catalog import Catalog, stock_of
from tilegym_db.records import Definition
from tilegym_db.records.call import gradient_outputs, in_training_problem
from tilegym_db.records.definition_rules import GRADIENT
from tilegym_db.resolver.dispatch import Dispatcher, DispatchReport
from tilegym_db.resolver.hot_path import allocate_of
from tilegym_db.resolver.loader import load_verified
from tilegym_db.resolver.resolve import call_site, stock_launcher
from tilegym_db.verification.oracle import load_function

_dispatch_modes = torch._C._len_torch_dispatch_stack
_functorch_level = torch._C._functorch.peek_interpreter_stack


NO_GRADIENT = "torch.no_grad() or torch.inference_mode() states that no gradient is needed"


class Training:
    """The training side of a call site: one backward per set of inputs that need a gradient."""

    def __init__(self, forward: Definition, ways: Sequence[_DefinitionPair]) -> None:
        self._names = tuple(forward.inputs)
        self._ways = {frozenset(way.differentiated): way for way in ways}
        self._ever_differentiated = frozenset().union(*self._ways)
        self._maybe_for_nothing = False

    def ask(self, inputs: tuple[Any, ...], *, training: bool) -> Any:
        """Return the outputs of a kernel, differentiable if grad is enabled.

        Args:
            training: the module's flag. If it is False, the caller may need no gradients, and the reports say how to turn them
                off.

        Returns:
            The outputs; None if stock code must serve the call; or the reason if no backward can ever serve it.
        """
        self._maybe_for_nothing |= not training
        wanted = frozenset(
            index for index, value in enumerate(inputs) if isinstance(value, torch.Tensor) and value.requires_grad
        )
        is_recorded = torch.is_grad_enabled() and bool(wanted)
        if not is_recorded:
            wanted = self._wanted_later(inputs)
        way = self._ways.get(wanted)
        if way is None:
            names = ", ".join(self._names[index] for index in sorted(wanted)) or "no input"
            return f"the call may need a gradient, and no definition computes the gradient of {names} alone"
        return _Call.apply(way, *inputs) if is_recorded else way.serve(*inputs)

    def refuse(self, kernel: str, reason: str) -> None:
        """Leave all calls that would run this kernel to stock code; see :meth:`Dispatcher.refuse`."""
        for way in self._ways.values():
            way.forward.refuse(kernel, reason)

    @contextlib.contextmanager
    def served_through(self, wrap: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
        """Wrap ``serve`` of every Definition with ``wrap(name of the Definition, serve)`` inside a ``with`` block."""
        own = [(way, way.serve, way.serve_gradients) for way in self._ways.values()]
        try:
            for way, serve, serve_gradients in own:
                way.serve = wrap(way.forward.definition.name, serve)
                way.serve_gradients = wrap(way.backward.definition.name, serve_gradients)
            yield
        finally:
            for way, serve, serve_gradients in own:
                way.serve, way.serve_gradients = serve, serve_gradients

    @property
    def dispatchers(self) -> tuple[Dispatcher, ...]:
        """The dispatchers of forward and backward calls."""
        return tuple(dispatcher for way in self._ways.values() for dispatcher in (way.forward, way.backward))

    def reports(self) -> tuple[DispatchReport, ...]:
        """Return the reports of forward and backward calls, without those that were never called."""
        found = (dispatcher.report() for dispatcher in self.dispatchers)
        return tuple(self._explained(report) for report in found if report.calls)

    def _explained(self, report: DispatchReport) -> DispatchReport:
        if not self._maybe_for_nothing:
            return report
        keys = (replace(key, reason=f"{key.reason}; {NO_GRADIENT}") if not key.solution else key for key in report.keys)
        return replace(report, keys=tuple(keys))

    def _wanted_later(self, inputs: tuple[Any, ...]) -> frozenset[int]:
        """Return the inputs that will need a gradient if this call is repeated with grad enabled.

        A checkpoint that re-enters autograd repeats the call, and both calls must compute the same. An activation then needs
        a gradient. A weight needs one if its ``requires_grad`` is set.
        """
        return frozenset(
            index
            for index in self._ever_differentiated
            if not isinstance(inputs[index], torch.nn.Parameter) or inputs[index].requires_grad
        )


class _Argument(NamedTuple):
    """The source of a backward's argument: an input or output of the forward, or the gradient of an output."""

    source: Literal["input", "output", "gradient"]
    position: int


class _DefinitionPair:
    """A forward Definition with one of its backward Definitions."""

    def __init__(self, forward: Definition, backward: Definition, catalog: Catalog) -> None:
        inputs, outputs = list(forward.inputs), list(forward.outputs)
        stock = stock_of(catalog.solutions_for(backward.name))
        assert stock is not None, "only called for backwards with a stock solution"
        self.forward = call_site(forward, catalog, mode="training", backward=backward)
        self.backward = call_site(backward, catalog, mode="training", stock=stock_launcher(backward, stock))
        self.serve: Callable[..., Any] = self.forward.serving(allocate_of(forward))
        places = {name: place for place, name in enumerate(backward.outputs)}
        self._gradients = {inputs.index(name): places[output] for name, output in gradient_outputs(backward).items()}
        self.differentiated = tuple(self._gradients)
        self.serve_gradients: Callable[..., Any] = self.backward.serving(allocate_of(backward))
        self._stock = stock
        self._definition = backward
        self._forward = forward
        self._arguments = [
            _Argument("gradient", outputs.index(name.removeprefix(GRADIENT)))
            if name.startswith(GRADIENT)
            else _Argument("output", outputs.index(name))
            if name in backward.saved
            else _Argument("input", inputs.index(name))
            for name in backward.inputs
        ]
        self._unknown = tuple(
            set(range(len(outputs))) - {which for source, which in self._arguments if source == "gradient"}
        )
        self._inputs = [_Argument("input", which) for which in range(len(inputs))] if self._unknown else []
        kept = (argument for argument in self._arguments if argument.source != "gradient")
        self.kept = tuple(dict.fromkeys((*kept, *self._inputs)))

    def gradients(self, kept: Mapping[_Argument, Any], grads: Sequence[Any], like: Sequence[Any]) -> Mapping[int, Any]:
        """Return position of an input -> its gradient.

        Args:
            grads: the gradients of the outputs; None for an output that nothing was computed from.
            like: the shape, dtype and device of each output.
        """
        known = [grad for grad in grads if grad is not None]
        if not known:
            return {}
        if any(grads[which] is not None for which in self._unknown):
            return self._by_autograd([kept[item] for item in self._inputs], grads)
        given = [
            _whole(grads[item.position], *like[item.position]) if item.source == "gradient" else kept[item]
            for item in self._arguments
        ]
        found = None
        if not torch.is_grad_enabled() and not _is_watched(known):
            found = self.serve_gradients(*given)
        if found is None:
            with torch.autocast(known[0].device.type, enabled=False):  # as in kernels, the inputs decide the dtypes
                found = self._code_of_gradients()(*given)
        made = found if isinstance(found, tuple) else (found,)
        return {which: made[place] for which, place in self._gradients.items()}

    def _by_autograd(self, inputs: Sequence[Any], grads: Sequence[Any]) -> Mapping[int, Any]:
        """Return the gradients of all outputs, from the operations of the forward's reference."""
        again = torch.is_grad_enabled()
        run = load_function(self._forward.reference, self._forward.name)
        with torch.enable_grad(), torch.autocast(inputs[self.differentiated[0]].device.type, enabled=False):
            # Views, because one input may be computed from another, and its gradient is apart.
            own = [one.view_as(one) if which in self._gradients else one for which, one in enumerate(inputs)]
            made = run(*own)
        made = made if isinstance(made, tuple) else (made,)
        pairs = [(one, grad) for one, grad in zip(made, grads, strict=True) if grad is not None and one.requires_grad]
        wanted = [own[which] for which in self.differentiated]
        if not pairs:
            return {}
        outputs, factors = zip(*pairs, strict=True)
        found = torch.autograd.grad(outputs, wanted, factors, create_graph=again, allow_unused=True)
        return dict(zip(self.differentiated, found, strict=True))

    def _code_of_gradients(self) -> Callable[..., Any]:
        """Return code of PyTorch operations; autograd can differentiate it if gradients are enabled."""
        if torch.is_grad_enabled():
            return load_function(self._definition.reference, self._definition.name)
        return load_verified(self._stock, self._stock.digest)


def _whole(grad: torch.Tensor | None, shape: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a gradient of one number a row as a tensor in memory, and zeros for none.

    A sum of losses hands on one number, expanded.
    """
    if grad is None:
        return torch.zeros(shape, dtype=dtype, device=device)
    return grad.contiguous() if grad.dim() == 1 and not _dispatch_modes() else grad


def _is_watched(grads: Sequence[torch.Tensor]) -> bool:
    """Return True if a mode or transform must see PyTorch operations, or if the gradients are batched tensors."""
    if _dispatch_modes() or _functorch_level():
        return True
    return any(torch._C._functorch.is_legacy_batchedtensor(grad) for grad in grads)


class _Call(torch.autograd.Function):
    """One call that autograd records: ``apply(way, *inputs)``."""

    @staticmethod
    def forward(ctx: Any, way: _DefinitionPair, *inputs: Any) -> Any:
        """Return the outputs of a kernel; None, with nothing recorded, if stock code must serve the call."""
        outputs = way.serve(*inputs)
        if outputs is not None:
            made = outputs if isinstance(outputs, tuple) else (outputs,)
            values = {item: (inputs if item.source == "input" else made)[item.position] for item in way.kept}
            ctx.way, ctx.like = way, [(one.shape, one.dtype, one.device) for one in made]
            ctx.numbers = {item: value for item, value in values.items() if not isinstance(value, torch.Tensor)}
            ctx.tensors = tuple(item for item in way.kept if item not in ctx.numbers)
            ctx.save_for_backward(*(values[item] for item in ctx.tensors))
            ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Return the gradients of the inputs; with ``create_graph`` they can be differentiated again."""
        kept = {**ctx.numbers, **dict(zip(ctx.tensors, ctx.saved_tensors, strict=True))}
        found = ctx.way.gradients(kept, grads, ctx.like)
        wanted = ctx.needs_input_grad[1:]
        return (None, *(found.get(which) if wanted[which] else None for which in range(len(wanted))))


def training_of(asked: Definition, catalog: Catalog) -> Training | None:
    """Return the training side of a call site; None if no Definition computes gradients of its Definition.

    A Definition that overwrites an input has none. Training asks for the Definition that it names in its place; if that does not
    fit, which ``check`` reports, for none.
    """
    instead = None if asked.serving is None else asked.serving.in_training
    if instead is not None and instead not in catalog.definitions:
        return None
    definition = asked if instead is None else catalog.definition(instead)
    if instead is not None and in_training_problem(asked, definition):
        return None
    ways = [
        _DefinitionPair(definition, backward, catalog)
        for backward in catalog.backwards_of(definition.name)
        if _can_fall_back(backward, catalog)
    ]
    return Training(definition, ways) if ways else None


def _can_fall_back(backward: Definition, catalog: Catalog) -> bool:
    stock = stock_of(catalog.solutions_for(backward.name))
    return stock is not None and not stock.record.spec.destination_passing_style
