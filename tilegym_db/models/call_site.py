"""Call sites: one per group of modules. Each asks for a kernel and counts the calls that do not get one."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

if TYPE_CHECKING:
    from tilegym_db.resolver.dispatch import Dispatcher
    from tilegym_db.resolver.training import Training


IN_TRAINING = "the module is in training mode; model.eval() ends it"
NEEDS_GRAD = "the call may need a gradient; torch.no_grad() or torch.inference_mode() rules that out"
AUTOCAST = "autocast chooses the dtype of the computation"
TRACED = "a tracer, a transform (torch.func, forward-mode AD) or a dispatch mode must see PyTorch operations"
NOT_PLAIN = "the input is no plain tensor"
NO_MEMORY = "the input is on the meta device, which computes nothing"
NOT_ROWS = "the input cannot be viewed as rows without a copy"
OTHER_ACTIVATION = "the activation was replaced, or has hooks"
HAS_HOOKS = "the norm was replaced, or has hooks"
HELD = "other code still holds the output of the sub-layer, so it must not be overwritten"
UNPATCHED = "unpatched"

_grad_enabled = torch.is_grad_enabled
_jit_tracing = torch._C._is_tracing
_dispatch_modes = torch._C._len_torch_dispatch_stack
_functorch_level = torch._C._functorch.peek_interpreter_stack
_any_autocast = torch._C._is_any_autocast_enabled
_Tensor = torch.Tensor


@dataclass(frozen=True)
class Operator:
    """The operator of a Definition as compilers see it: ``call(*inputs, name)``, with the name of the call site.

    The operator finds ``impl`` by that name. Only this object keeps ``impl`` alive.
    """

    call: Callable[..., Any]
    name: str
    impl: Any


def _requires_grad(value: Any) -> bool:
    return isinstance(value, _Tensor) and value.requires_grad


def is_autocast(value: torch.Tensor) -> bool:
    """Return True if autocast chooses the dtype of computations on the device of a tensor."""
    return _any_autocast() and torch.is_autocast_enabled(value.device.type)


class CallSite:
    """One group of modules that call a Definition.

    Attributes:
        serve: ``serve(*inputs)`` returns the outputs of a kernel, or None if no kernel ran.
        dispatcher: the dispatcher that ``serve`` asks.
        operator: the operator for compiled code; None if only stock code may run there.
        training: serves calls that may need a derivative; None if only stock code may.
        stock: ``stock(*inputs)`` returns the outputs of the Definition's stock solution.
        bypassed: reason -> number of calls that were not served.
        own_code: execution mode of the model's own code -> number of calls; empty unless the model has several modes.
        is_open: False once :meth:`close` sends every call to the stock code, for the reason ``closed``.
        give_up: called after ``patience`` calls without a kernel; returns the number of further calls to wait for.
        before: the call site whose outputs are inputs of this one; it is asked first. None for most sites.
        is_recorded: True while calls are only recorded and none is served; the stock code then also runs ``before``.
        shadows: functions that remove the modules from which a copied function reads its globals.
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
        training: Training | None = None,
        stock: Callable[..., Any] | None = None,
    ) -> None:
        self.serve = serve
        self.dispatcher = dispatcher
        self.operator: Operator | None = None
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
        """Send all further calls to the stock code, and count them under ``reason``."""
        self.is_open, self.closed = False, self.closed or reason

    def bypass(self, reason: str) -> None:
        """Count a call that runs the stock code."""
        self.bypassed[reason] = self.bypassed.get(reason, 0) + 1

    def count_own_mode(self, name: str) -> None:
        """Count a call, served or not, by the execution mode of the model's own code."""
        self.own_code[name] = self.own_code.get(name, 0) + 1

    def unserved(self) -> None:
        """Count a call that asked for a kernel and ran the stock code."""
        if self.patience > 0:
            self.patience -= 1
            if self.patience == 0 and self.give_up is not None:
                self.patience = self.give_up(self)

    def falls_back(self, training: bool, *tensors: Any) -> bool:
        """Return True, and count the call, if it must run the stock code for any measurements.

        Args:
            training: the module's flag. Checkpointed training runs its forward without grad and again with it, and both
                runs must compute the same.
            tensors: the tensors that a gradient may flow to; the first is the activation. Numbers beside them do no harm.
        """
        first = tensors[0]
        if (
            not training
            and not _grad_enabled()
            and type(first) is _Tensor
            and not first.is_meta
            and self.is_open
            and forward_ad._current_level < 0
            and not (_dispatch_modes() or _jit_tracing() or _functorch_level())
        ):
            return False  # most calls, so the reasons below cost them nothing
        trains = training or (_grad_enabled() and any(map(_requires_grad, tensors)))
        if training and self.training is None:
            self.bypass(IN_TRAINING)
        elif type(first) is not _Tensor:
            self.bypass(NOT_PLAIN)
        elif first.is_meta:
            self.bypass(NO_MEMORY)
        elif trains and self.training is None:
            self.bypass(NEEDS_GRAD)
        elif _dispatch_modes() or _jit_tracing() or _functorch_level() or forward_ad._current_level >= 0:
            self.bypass(TRACED)
        elif not self.is_open:
            self.bypass(self.closed)
            self.unserved()
        else:
            return False
        return True

    def ask(self, training: bool, *inputs: Any) -> Any:
        """Return the outputs of a kernel, or None if none ran. Ask only if :meth:`falls_back` returned False."""
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

        A compiler runs this while it traces, and guards on what it reads. Nothing is counted. An exported program has no
        operators of this package in it. All tensors must have one dtype: PyTorch alone defines the result of mixed dtypes.
        """
        # torch.compiler.is_exporting() returns True for every compiler in PyTorch 2.11.
        if self.operator is None or not self.is_open or training or torch.compiler._is_exporting_flag:
            return None
        if forward_ad._current_level >= 0:  # kernels have no forward-mode derivative
            return None
        for tensor in tensors:
            if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.dtype != tensors[0].dtype:
                return None
            if torch.is_grad_enabled() and tensor.requires_grad:
                return None
        return self.operator


# ---- replaced behaviour ---------------------------------------------------------------------------
# These functions change one instance. Its class, its module and its ``__dict__`` stay as they are.

_MARK = "_tilegym_db_replaces"
_ORIGINAL = "_tilegym_db_original"
"""The class below all that were made here: there may be one that decodes in graphs on top of one whose forward is patched."""
_FORWARD = "_tilegym_db_forward"
"""The forward that a class was made with, by which one that other code gives it later is noticed."""
_numbers = itertools.count()


def subclass(
    base: type[torch.nn.Module], forward: Callable[..., Any], members: Mapping[str, Any] | None = None
) -> type[torch.nn.Module]:
    """Return a class that differs from ``base`` in ``forward`` and in the given members only.

    The name stays, so configs keyed by class name still work. Copying or pickling an instance gives the base class, so a
    checkpoint has nothing of this package in it.
    """
    original = vars(base).get(_ORIGINAL, base)

    def reduce_ex(self: Any, protocol: Any) -> Any:
        # Protocol 1 lists the class among the arguments. With later protocols, picklers accept no other class there.
        reduced: Any = original.__reduce_ex__(self, min(int(protocol), 1))
        function, arguments, *rest = reduced
        restored = tuple(original if argument is patched else argument for argument in arguments)
        return (function, restored, *rest)

    namespace = {
        **(members or {}),
        "forward": forward,
        "__reduce_ex__": reduce_ex,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        _MARK: base,
        _ORIGINAL: original,
        _FORWARD: forward,
    }
    patched = type(base.__name__, (base,), namespace)
    return patched


def is_patched(module: torch.nn.Module) -> bool:
    """Return True if :func:`subclass` made the module's class or a base of it."""
    return hasattr(type(module), _MARK)


def unpatched_class(module: torch.nn.Module) -> type[torch.nn.Module]:
    """Return the module's class as it was before :func:`subclass` replaced it."""
    cls = type(module)
    replaced: type[torch.nn.Module] | None = vars(cls).get(_MARK)
    return cls if replaced is None else replaced


def class_before_patches(module: torch.nn.Module) -> type[torch.nn.Module]:
    """Return the module's class as it was before any :func:`subclass` of it."""
    cls: type[torch.nn.Module] = vars(type(module)).get(_ORIGINAL, type(module))
    return cls


def has_other_forward(cls: type[torch.nn.Module]) -> bool:
    """Return True if other code has given a class of :func:`subclass` another forward since."""
    made = vars(cls)
    return _FORWARD in made and made.get("forward") is not made[_FORWARD]


def shadow_function(function: FunctionType, replacements: Mapping[str, Any]) -> tuple[FunctionType, Callable[[], Any]]:
    """Return a copy of a function that reads its globals from a new module, and a function that removes that module.

    Some globals are replaced in the new module. It is registered under a private name, because tracers look up a function's
    globals by module name. The second result removes it; so does the end of the copied function.
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


_hooks_of_all = torch.nn.modules.module._global_forward_hooks
_pre_hooks_of_all = torch.nn.modules.module._global_forward_pre_hooks
_backward_hooks_of_all = torch.nn.modules.module._global_backward_hooks
_backward_pre_hooks_of_all = torch.nn.modules.module._global_backward_pre_hooks


def has_hooks(module: Any) -> bool:
    """Return True if a call of a module does more than its class's forward.

    It has hooks, or hooks are registered for all modules, or it has a forward on the instance. Hooks of the backward count
    where one may follow: a checkpoint that re-enters autograd runs training without gradients first.
    """
    if module._forward_hooks or module._forward_pre_hooks or _hooks_of_all or _pre_hooks_of_all:
        return True
    of_backward = module._backward_hooks or module._backward_pre_hooks
    if (of_backward or _backward_hooks_of_all or _backward_pre_hooks_of_all) and (_grad_enabled() or module.training):
        return True
    own = module.__dict__.get("forward")
    return own is not None and not _is_of_class(module, own)


# ---- forwards of instances ------------------------------------------------------------------------
# accelerate sets ``forward`` on an instance: a wrapper that runs its hook around ``_old_forward``, the forward of the class.
# After the hook is removed, ``forward`` is that one. Nothing else that sets a forward on an instance is known.

OF_ACCELERATE = {"_hf_hook", "_old_forward"}
SLOTS = ("forward", "_old_forward")


def runs_class_forward(module: torch.nn.Module) -> bool:
    """Return True if a call of a module runs the forward of its class, possibly inside hooks of accelerate."""
    own: Any = vars(module).get("forward")
    if own is None or _is_of_class(module, own):
        return True
    code = getattr(getattr(own, "func", None), "__code__", None)
    is_wrapper = code is not None and {*code.co_names} >= OF_ACCELERATE and vars(module).keys() >= OF_ACCELERATE
    return is_wrapper and _is_of_class(module, vars(module)["_old_forward"])


def _is_of_class(module: torch.nn.Module, forward: Any) -> bool:
    return getattr(forward, "__self__", None) is module and forward.__func__ is type(module).forward


def change_class(module: torch.nn.Module, cls: type[torch.nn.Module]) -> None:
    """Give a module another class whose forward also runs inside hooks of accelerate."""
    slots = [name for name in SLOTS if name in vars(module) and _is_of_class(module, vars(module)[name])]
    module.__class__ = cls
    for name in slots:
        vars(module)[name] = MethodType(cls.forward, module)


# ---- rows -----------------------------------------------------------------------------------------
# Activations as the rows of a matrix. Each function makes a view or gives up; none copies.


def rows(value: torch.Tensor) -> torch.Tensor | None:
    """View [..., N] as [M, N] without a copy; return None if the strides do not allow it or N is not innermost."""
    shape = value.shape
    if len(shape) == 2 and value.stride(1) == 1:
        return value
    if len(shape) > 2 and value.is_contiguous() and value.numel():
        return value.view(-1, shape[-1])
    return value.view(-1, shape[-1]) if are_rows(value) else None


def are_rows(value: torch.Tensor) -> bool:
    """Return True if :func:`rows` returns a view; an empty tensor has none."""
    if value.dim() < 2 or value.numel() == 0:
        return False
    return value.is_contiguous() or _has_mergeable_rows(value)


def _has_mergeable_rows(value: torch.Tensor) -> bool:
    """Return True if all leading axes together step through memory with one constant stride."""
    *leading, last = zip(value.shape, value.stride(), strict=True)
    steps = [(size, stride) for size, stride in leading if size != 1]
    follow = all(outer[1] == inner[0] * inner[1] for outer, inner in itertools.pairwise(steps))
    return last[1] == 1 and follow
