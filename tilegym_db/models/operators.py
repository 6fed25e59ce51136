"""The operators that compiled code calls: one per Definition, ``torch.ops.tilegym_db.<definition>(*inputs, site)``.

A compiler sees an operator with known output shapes and strides, and neither Python nor counters. When it runs, the call goes to
the call site that ``site`` names, which decides by what it is given, as in eager mode; what no kernel serves, the Definition's
stock solution computes into the same layout. Tracing for a backend that lowers operators, a call for which no kernel pays inside
compiled code at the shapes at hand is replaced by the operations of the stock solution, so that the compiler can fuse them.

Raw library operators, not ``torch.library.custom_op``: a call costs a seventh.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import re
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

from tilegym_db.catalog import Catalog, stock_of
from tilegym_db.models.call_site import CallSite, Operator
from tilegym_db.models.probe import stock_function
from tilegym_db.models.training import training_of
from tilegym_db.records import Definition
from tilegym_db.records.dtypes import scalar_type
from tilegym_db.records.serving import Serving
from tilegym_db.resolver.dispatch import Dispatcher
from tilegym_db.resolver.hot_path import Allocate, allocate_of
from tilegym_db.resolver.resolve import call_site, stock_launcher

NAMESPACE = "tilegym_db"

_dispatch_modes = torch._C._len_torch_dispatch_stack
_functorch_level = torch._C._functorch.peek_interpreter_stack

_tracing = threading.Lock()
_tracers = 0
"""How many threads are in :func:`compiling`."""
_flag_before = False


@dataclass(frozen=True, eq=False)
class OperatorImpl:
    """What an operator call runs: the way to a kernel, or the stock solution."""

    dispatcher: Dispatcher
    site: CallSite
    allocate: Allocate
    stock: Callable[..., Any]
    """``stock(*inputs) -> outputs``: the operations of the stock solution."""
    has_rows: bool
    """Inputs may come with any leading axes, and are rows of a matrix to the Definition."""

    def compute(self, *inputs: Any) -> Any:
        """Return the outputs by a kernel, else by the stock solution; in the layout that ``allocate`` gives."""
        first = inputs[0]
        are_matrices = first.dim() == 2
        given = inputs if are_matrices else self._as_matrices(inputs)
        outputs = self.site.serve(*given) if self.site.is_open else None
        if outputs is None:
            outputs = self.allocate(*given)
            self.dispatcher.run_stock(*given, *(outputs if isinstance(outputs, tuple) else (outputs,)))
        if are_matrices or isinstance(outputs, tuple):
            return outputs
        return outputs.view(*first.shape[:-1], outputs.shape[-1])

    def is_left_to_stock(self, *inputs: Any) -> bool:
        """Return True if compiled code leaves a call to stock at the sizes that its symbols stand for; False if
        those are unknown.
        """
        with unset_fake_temporarily():
            hinted = [_with_hints(value) if isinstance(value, torch.Tensor) else value for value in inputs]
            if any(value is None for value in hinted):
                return False
            given = tuple(self._as_matrices(hinted))
            return not self.dispatcher.belongs_in_compiled_code(given, inputs[0].device, self.allocate)

    def run_stock(self, *inputs: Any, as_matrices: bool = True) -> Any:
        """Return the operations of the stock solution, to be traced or differentiated, in the layout that ``allocate``
        gives.

        ``as_matrices`` is False if it :meth:`takes_leading_axes`.
        """
        found, outputs = self.stock(*(self._as_matrices(inputs) if as_matrices else inputs)), self.allocate(*inputs)
        if isinstance(outputs, tuple):
            return tuple(_laid_out(value, like) for value, like in zip(found, outputs, strict=True))
        return found if found.shape == outputs.shape else found.view(outputs.shape)

    def takes_leading_axes(self, *inputs: Any) -> bool:
        """Return True if the stock solution gives rows the same bits under the leading axes of such inputs as in a
        matrix.

        It is only known to take matrices; so it is tried on a few rows of the same size. Traced without views it is the model's
        own code to the compiler, down to the shapes of what it leaves in memory.
        """
        if not self.has_rows:
            return True
        with unset_fake_temporarily():
            few = [_few_rows(value) if isinstance(value, torch.Tensor) else value for value in inputs]
            try:
                want, found = self.stock(*self._as_matrices(few)), self.stock(*few)
            except Exception:  # anyone's code, given what it was not written for
                return False
            if not isinstance(found, torch.Tensor):
                return False  # of several outputs, as backwards have them, it is not asked
            return found.shape[:-1] == few[0].shape[:-1] and torch.equal(found.view(want.shape), want)

    def _as_matrices(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Return the inputs in the Definition's shape."""
        if not self.has_rows:
            return inputs
        return [
            value.view(-1, value.shape[-1]) if isinstance(value, torch.Tensor) and value.dim() > 2 else value
            for value in inputs
        ]


def _with_hints(value: torch.Tensor) -> torch.Tensor | None:
    """Return a tensor without memory of the sizes that a tracer saw."""
    numbers = [_hint(number) for number in (*value.shape, *value.stride())]
    if any(number is None for number in numbers):
        return None
    sizes, strides = numbers[: value.dim()], numbers[value.dim() :]
    return torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta")  # type: ignore[arg-type]


def _few_rows(value: torch.Tensor) -> torch.Tensor:
    """[..., N] with at most [2, 3] rows, no two alike, on the CPU; the size N has a hint."""
    leading = (1,) * (value.dim() - 3) + (2, 3)[max(0, 3 - value.dim()) :]
    shape = (*leading, _hint(value.shape[-1]) or 0)
    return torch.linspace(-1, 2, math.prod(shape)).view(shape).to(value.dtype)


def _hint(number: int | torch.SymInt) -> int | None:
    if isinstance(number, int):
        return number
    hint: Any = number.node.hint if number.node.has_hint() else None
    return None if hint is None else int(hint)


def _laid_out(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return value if value.stride() == like.stride() else torch.ops.aten.copy(like, value)


# -- the operators ----------------------------------------------------------------------------------------------------

_call_sites: weakref.WeakValueDictionary[str, OperatorImpl] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_library: list[torch.library.Library] = []
_operators: dict[str, dict[str, Callable[..., Any]]] = {}
_defining = threading.Lock()


def make_site(definition: Definition, catalog: Catalog, own: Callable[..., Any] | None = None) -> CallSite:
    """Return a call site of a Definition that models call, for eager and for compiled code.

    Args:
        definition: what is called.
        catalog: whose kernels are asked for, and whose stock solution gives what none serves.
        own: ``own(*inputs) -> output``, the model's own code in place of that stock solution.
    """
    serving = definition.serving or Serving()
    stock = stock_of(catalog.solutions_for(definition.name))
    launcher = None if stock is None else stock_launcher(definition, stock)
    allocate, returning = allocate_of(definition), stock_function(definition, catalog)
    if own is not None:
        launcher, returning = functools.partial(_write, own), own
    dispatcher = call_site(definition, catalog, stock=launcher)
    serve = dispatcher.serving(allocate, serving.growing)
    site = CallSite(serve, dispatcher, training=training_of(definition, catalog), stock=returning)
    # An operator that overwrites an input is for eager code only: compilers fuse an addition by themselves.
    if returning is not None and not definition.in_place and not serving.eager_only:
        impl = OperatorImpl(dispatcher, site, allocate, returning, serving.rows is not None)
        name = f"{definition.name}_{next(_numbers)}"
        _call_sites[name] = impl
        site.operator = Operator(_operator(definition), name, impl)
    return site


def _write(own: Callable[..., Any], *args: Any) -> None:
    *inputs, out = args
    out.copy_(own(*inputs))


def _operator(definition: Definition) -> Callable[..., Any]:
    """Return the operator of a Definition, defined at its first use; of another one of its name, under another name."""
    stated = "" if definition.serving is None else definition.serving.model_dump_json()
    called = re.sub(r"\W", "_", definition.name)
    with _defining:
        named = _operators.setdefault(called, {})
        known = named.get(definition.digest + stated)
        if known is None:
            known = _define(definition, f"{called}_{len(named)}" if named else called)
            named[definition.digest + stated] = known
        return known


def _define(definition: Definition, called: str) -> Callable[..., Any]:
    if not _library:
        _library.append(torch.library.Library(NAMESPACE, "FRAGMENT"))  # type: ignore[no-untyped-call]
    (library,) = _library
    inputs = [f"{_type_of(definition, name)} {name}" for name in definition.inputs]
    outputs = ", ".join(["Tensor"] * len(definition.outputs))
    schema = f"{called}({', '.join(inputs)}, str site) -> ({outputs})"
    # Kernels are chosen by strides: a compiler must hand over the layout that it promised.
    tags = (torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag)
    library.define(schema, tags=tags)  # type: ignore[no-untyped-call]
    library.impl(called, _run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    allocate = allocate_of(definition)
    torch.library.register_fake(f"{NAMESPACE}::{called}", lambda *args: allocate(*args[:-1]), lib=library)
    operator: Any = getattr(getattr(torch.ops, NAMESPACE), called).default
    differentiable = functools.partial(_differentiate, operator)
    library.impl(called, differentiable, "Autograd")  # type: ignore[no-untyped-call]
    operator.py_impl(ProxyTorchDispatchMode)(functools.partial(_trace, operator))
    call: Callable[..., Any] = operator
    return call


def _type_of(definition: Definition, name: str) -> str:
    """Return how an operator's schema calls the type of an input."""
    spec = definition.inputs[name]
    if not spec.is_scalar:
        return "Tensor"
    return scalar_type(spec.dtype).__name__


def _run(*args: Any) -> Any:
    *inputs, name = args
    return _call_sites[name].compute(*inputs)


def _differentiate(operator: Any, *args: Any) -> Any:
    """Return a call that a derivative may be asked of runs stock operations.

    Patched forwards put none into compiled code, but a transform inside that code can hide from them that it wants one.
    """
    *inputs, name = args
    if forward_ad._current_level >= 0 or (torch.is_grad_enabled() and any(map(_requires_grad, inputs))):
        with compiling() if _dispatch_modes() else contextlib.nullcontext():
            return _call_sites[name].run_stock(*inputs)
    if type(inputs[0]) is torch.Tensor and not _dispatch_modes() and not _functorch_level():
        return _call_sites[name].compute(*inputs)  # nobody is looking: spare it the way through the dispatcher
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*args)


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Code within is told that it is being compiled.

    Models ask, since compilers do not support all of what runs, such as grouped products of float32. PyTorch 2.11 answers yes
    to what Dynamo reads alone; newer versions do so during the whole compilation. The flag is one for all threads: the first
    that comes here sets it, and the last that leaves puts it back.
    """
    global _tracers, _flag_before
    with _tracing:
        _tracers += 1
        if _tracers == 1:
            _flag_before, torch.compiler._is_compiling_flag = torch.compiler._is_compiling_flag, True
    try:
        yield
    finally:
        with _tracing:
            _tracers -= 1
            if not _tracers:
                torch.compiler._is_compiling_flag = _flag_before


def _requires_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _trace(operator: Any, mode: ProxyTorchDispatchMode, *args: Any) -> Any:
    """What goes into a graph of low-level operations: the operator, or the stock operations in its place."""
    *inputs, name = args
    impl = _call_sites[name]
    if not impl.is_left_to_stock(*inputs):
        return mode.__torch_dispatch__(operator, (), args, {})
    run = functools.partial(impl.run_stock, as_matrices=not impl.takes_leading_axes(*inputs))
    with mode, compiling():
        # What is traced here was rid of mutations before, and stock code may write into tensors that it made.
        return dispatch_functionalize(run, FunctionalTensorMode())(*inputs)
