"""A call site: what all modules of one group share, the way to a kernel and the calls that never got that far."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

if TYPE_CHECKING:
    from tilegym_db.models.training import Training
    from tilegym_db.resolver.dispatch import Dispatcher


IN_TRAINING = "the module is in training mode; model.eval() ends it"
NEEDS_GRAD = "a gradient may be asked for; torch.no_grad() or torch.inference_mode() says that none is"
IN_AUTOCAST = "autocast is on in a call that trains"
AUTOCAST = "autocast picks the dtype that it computes in"
TRACED = "a tracer, a transform (torch.func, forward-mode AD) or a dispatch mode must see PyTorch operations"
NOT_PLAIN = "the input is no plain tensor"
NOT_ROWS = "the input cannot be viewed as rows without a copy"
OTHER_ACTIVATION = "the activation was replaced, or has hooks"
HAS_HOOKS = "the norm was replaced, or has hooks"
HELD = "what the sub-layer returned is held by somebody else too, so that it must not be overwritten"
UNPATCHED = "unpatched"

_grad_enabled = torch.is_grad_enabled
_jit_tracing = torch._C._is_tracing
_dispatch_modes = torch._C._len_torch_dispatch_stack
_functorch_level = torch._C._functorch.peek_interpreter_stack
_Tensor = torch.Tensor


@dataclass(frozen=True)
class Operator:
    """The operator of a Definition as compilers see it: ``call(*inputs, name)``, ``name`` being that of the site.

    ``impl`` is what the operator finds by that name, kept alive here and by nothing else.
    """

    call: Callable[..., Any]
    name: str
    impl: Any


def _requires_grad(value: Any) -> bool:
    return isinstance(value, _Tensor) and value.requires_grad


class CallSite:
    """One group of modules that call a Definition.

    Attributes:
        serve: ``serve(*inputs)`` gives the outputs by a kernel, or None with nothing done.
        dispatcher: what ``serve`` asks.
        operator: what goes into compiled code; None if only stock code may.
        training: serves calls that a derivative may be asked of; None if only stock code may.
        stock: ``stock(*inputs)`` returns the outputs by the Definition's stock solution.
        bypassed: how many calls were not served, by reason.
        own_code: how many calls the model's own code would have run in each of its ways, where it has several.
        is_open: False once :meth:`close` sends every call to the stock code, for the reason ``closed``.
        give_up: called once ``patience`` calls have asked for a kernel and none got one; returns how many more to wait for.
        before: the site that is asked first, and whose outputs are inputs of this one's calls; None for most.
        is_recorded: True while nothing is served and calls are only kept: stock then gives what comes before them.
        shadows: take away the modules that a copied function reads its globals from; see :mod:`.rebind`.
    """

    __slots__ = (
        "__weakref__",
        "before",
        "bypassed",
        "closed",
        "dispatcher",
        "give_up",
        "is_open",
        "is_recorded",
        "operator",
        "own_code",
        "patience",
        "serve",
        "shadows",
        "stock",
        "training",
    )

    def __init__(
        self,
        serve: Callable[..., Any],
        dispatcher: Dispatcher | None = None,
        *,
        operator: Operator | None = None,
        training: Training | None = None,
        stock: Callable[..., Any] | None = None,
    ) -> None:
        self.serve = serve
        self.dispatcher = dispatcher
        self.operator = operator
        self.training = training
        self.stock = stock
        self.bypassed: dict[str, int] = {}
        self.own_code: dict[str, int] = {}
        self.is_open = True
        self.closed = ""
        self.patience = 0
        self.give_up: Callable[[CallSite], int] | None = None
        self.before: CallSite | None = None
        self.is_recorded = False
        self.shadows: list[Callable[[], Any]] = []

    def close(self, reason: str = UNPATCHED) -> None:
        """Let no call through any more; ``reason`` is what they are counted under."""
        self.is_open, self.closed = False, self.closed or reason

    def bypass(self, reason: str) -> None:
        """Count a call that is left to the stock code."""
        self.bypassed[reason] = self.bypassed.get(reason, 0) + 1

    def own_way(self, name: str) -> None:
        """Count a call, served or not, by the way in which the model's own code would run it."""
        self.own_code[name] = self.own_code.get(name, 0) + 1

    def unserved(self) -> None:
        """Count a call that asked for a kernel and was left to the stock code."""
        if self.patience > 0:
            self.patience -= 1
            if self.patience == 0 and self.give_up is not None:
                self.patience = self.give_up(self)

    def falls_back(self, training: bool, *tensors: Any) -> bool:
        """Return True if the call must run the stock code whatever was measured; if so it is counted.

        Args:
            training: the module's flag. Checkpointed training runs its forward without grad and again with it, and both
                must compute the same.
            tensors: what a gradient may flow to; the first is the activation.
        """
        trains = training or (_grad_enabled() and any(tensor.requires_grad for tensor in tensors))
        if training and self.training is None:
            self.bypass(IN_TRAINING)
        elif type(tensors[0]) is not _Tensor:
            self.bypass(NOT_PLAIN)
        elif trains and self.training is None:
            self.bypass(NEEDS_GRAD)
        elif trains and torch.is_autocast_enabled(tensors[0].device.type):
            self.bypass(IN_AUTOCAST)
        elif _dispatch_modes() or _jit_tracing() or _functorch_level() or forward_ad._current_level >= 0:
            self.bypass(TRACED)
        elif not self.is_open:
            self.bypass(self.closed)
        else:
            return False
        return True

    def ask(self, training: bool, *inputs: Any) -> Any:
        """Return the outputs by a kernel, or None with nothing done, for a call that does not have to run stock code.

        Args:
            training: the module's flag.
            inputs: in the Definition's shapes and order.
        """
        if not training and not (_grad_enabled() and any(map(_requires_grad, inputs))):
            outputs = self.serve(*inputs)
            if outputs is None:
                self.unserved()
            return outputs
        if self.training is None:
            self.bypass(NEEDS_GRAD)
            return None
        outputs = self.training.ask(inputs, training=training)
        if isinstance(outputs, str):
            self.bypass(outputs)
            return None
        return outputs

    def traced(self, training: bool, *tensors: Any) -> Operator | None:
        """Return the operator to put into compiled code for these tensors, or None for the stock code.

        A compiler runs this while it traces, and guards on what it reads. Nothing is counted, and an exported program has
        no operators of this package in it. One dtype only: what an operation of several dtypes gives is for PyTorch to say.
        """
        # Its function is_exporting() answers True to every compiler in PyTorch 2.11.
        if self.operator is None or not self.is_open or training or torch.compiler._is_exporting_flag:
            return None
        if forward_ad._current_level >= 0:  # a kernel knows no derivative
            return None
        for tensor in tensors:
            if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.dtype != tensors[0].dtype:
                return None
            if torch.is_grad_enabled() and tensor.requires_grad:
                return None
        return self.operator


# ---- rebind ---------------------------------------------------------------------------------------
# Ways to give one instance other behaviour without touching its class, its module or its ``__dict__``.

_MARK = "_tilegym_db_replaces"
_numbers = itertools.count()


def subclass(base: type[torch.nn.Module], forward: Callable[..., Any]) -> type[torch.nn.Module]:
    """Return a class that differs from ``base`` in ``forward`` only.

    It keeps the name, so that configs keyed by class name go on working; copying or pickling an instance gives back the base
    class, so that nothing of this package ends up in a checkpoint.
    """

    def reduce_ex(self: Any, protocol: Any) -> Any:
        # Protocol 1 has the class among its arguments; picklers refuse another class there in the later ones.
        reduced: Any = base.__reduce_ex__(self, min(int(protocol), 1))
        function, arguments, *rest = reduced
        restored = tuple(base if argument is patched else argument for argument in arguments)
        return (function, restored, *rest)

    namespace = {
        "forward": forward,
        "__reduce_ex__": reduce_ex,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        _MARK: base,
    }
    patched = type(base.__name__, (base,), namespace)
    return patched


def is_patched(module: torch.nn.Module) -> bool:
    """Return True if the module's class, or one that it derives from, was made by :func:`subclass`."""
    return hasattr(type(module), _MARK)


def unpatched_class(module: torch.nn.Module) -> type[torch.nn.Module]:
    """Return the module's class, or what it was before :func:`subclass` made another of it."""
    cls = type(module)
    replaced: type[torch.nn.Module] | None = vars(cls).get(_MARK)
    return cls if replaced is None else replaced


def shadow_function(function: FunctionType, replacements: Mapping[str, Any]) -> tuple[FunctionType, Callable[[], Any]]:
    """Return the same code, reading its globals from a module of its own in which some are replaced; and what removes
    that module.

    The module is registered under a private name because tracers look a function's globals up by module name. It is removed
    by the second result, or with the function.
    """
    shadow = ModuleType(f"{function.__module__}__tilegym_db_{next(_numbers)}")
    private = {"__name__", "__spec__", "__loader__"}
    vars(shadow).update({name: value for name, value in function.__globals__.items() if name not in private})
    vars(shadow).update(replacements)
    sys.modules[shadow.__name__] = shadow
    copied = FunctionType(
        function.__code__, vars(shadow), function.__name__, function.__defaults__, function.__closure__
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    copied.__qualname__ = function.__qualname__
    forget = weakref.finalize(copied, sys.modules.pop, shadow.__name__, None)
    forget.atexit = False
    return copied, forget


def has_hooks(module: Any) -> bool:
    """Return True if calling a module does more than its class's forward: hooks, or a forward of its own."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


# ---- rows -----------------------------------------------------------------------------------------
# Activations as the rows of a matrix: a view, or nothing. Nothing here is ever copied.


def rows(value: torch.Tensor) -> torch.Tensor | None:
    """[..., N] as [M, N] without a copy; None if the strides do not allow it, or N is not the innermost one."""
    if value.dim() == 2 and value.stride(1) == 1:
        return value
    return value.view(-1, value.shape[-1]) if are_rows(value) else None


def are_rows(value: torch.Tensor) -> bool:
    """Return True if :func:`rows` has an answer; a matrix counts only where it is not empty."""
    if value.dim() < 2 or value.numel() == 0:
        return False
    return value.is_contiguous() or _has_mergeable_rows(value)


def _has_mergeable_rows(value: torch.Tensor) -> bool:
    """Return True if the leading axes, from the last to the first, are steps of one constant stride."""
    *leading, last = zip(value.shape, value.stride(), strict=True)
    steps = [(size, stride) for size, stride in leading if size != 1]
    follow = all(outer[1] == inner[0] * inner[1] for outer, inner in itertools.pairwise(steps))
    return last[1] == 1 and follow
