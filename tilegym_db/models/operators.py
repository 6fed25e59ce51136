"""The operators that compiled code calls: one per Definition, ``torch.ops.tilegym_db.<definition>(*inputs, site)``.

A compiler sees an operator with known output shapes and strides; it sees no Python and no counters. When the operator runs, it
calls the call site named ``site``, which decides by the inputs, as in eager mode. If no kernel serves the call, the Definition's
stock solution computes the outputs in the same layout.

Some backends lower operators. While such a backend traces, an operator becomes the operations of the stock solution if no
kernel is faster inside compiled code at these shapes. The compiler can then fuse the operations.

These are raw library operators, because a call costs a seventh of one of ``torch.library.custom_op``.
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
from tilegym_db.records import Definition
from tilegym_db.records.definition_parts import Serving
from tilegym_db.records.dtypes import scalar_type
from tilegym_db.resolver.dispatch import Dispatcher
from tilegym_db.resolver.hot_path import Allocate, allocate_of
from tilegym_db.resolver.resolve import call_site, stock_launcher
from tilegym_db.resolver.training import training_of

NAMESPACE = "tilegym_db"

_dispatch_modes = torch._C._len_torch_dispatch_stack
_functorch_level = torch._C._functorch.peek_interpreter_stack

_tracing = threading.Lock()
_tracers = 0
"""Number of threads in :func:`compiling`."""
_flag_before = False


@dataclass(frozen=True, eq=False)
class OperatorImpl:
    """The code of an operator: its call site, and the stock solution for calls that no kernel serves."""

    dispatcher: Dispatcher
    site: CallSite
    allocate: Allocate
    stock: Callable[..., Any]
    """``stock(*inputs) -> outputs`` runs the operations of the stock solution."""
    has_rows: bool
    """Inputs may have any leading axes; to the Definition they are rows of a matrix."""

    def compute(self, *inputs: Any) -> Any:
        """Return the outputs of a kernel or of the stock solution, in the layout of ``allocate``."""
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
        """Return True if compiled code leaves the call to stock code at the sizes of the trace; False if they are unknown."""
        with unset_fake_temporarily():
            hinted = [_with_hints(value) if isinstance(value, torch.Tensor) else value for value in inputs]
            if any(value is None for value in hinted):
                return False
            given = tuple(self._as_matrices(hinted))
            return not self.dispatcher.belongs_in_compiled_code(given, inputs[0].device, self.allocate)

    def run_stock(self, *inputs: Any, as_matrices: bool = True) -> Any:
        """Run the operations of the stock solution to trace or differentiate them; return outputs in the layout of ``allocate``.

        ``as_matrices`` is False if it :meth:`takes_leading_axes`.
        """
        found, outputs = self.stock(*(self._as_matrices(inputs) if as_matrices else inputs)), self.allocate(*inputs)
        if isinstance(outputs, tuple):
            return tuple(_laid_out(value, like) for value, like in zip(found, outputs, strict=True))
        return found if found.shape == outputs.shape else found.view(outputs.shape)

    def takes_leading_axes(self, *inputs: Any) -> bool:
        """Return True if the stock solution computes the same bits from rows with leading axes as from rows of a matrix.

        The stock solution is only known to take matrices, so this tries it on a few rows of the same size. Without views the
        compiler sees the model's own code, down to the shapes of the tensors that it keeps in memory.
        """
        if not self.has_rows:
            return True
        with unset_fake_temporarily():
            few = [_few_rows(value) if isinstance(value, torch.Tensor) else value for value in inputs]
            try:
                want, found = self.stock(*self._as_matrices(few)), self.stock(*few)
            except Exception:  # stock code may raise anything for shapes that it was not written for
                return False
            if not isinstance(found, torch.Tensor):
                return False  # backwards have several outputs; they are not tried
            return found.shape[:-1] == few[0].shape[:-1] and torch.equal(found.view(want.shape), want)

    def _as_matrices(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Return the inputs in the Definition's shapes."""
        if not self.has_rows:
            return inputs
        return [
            value.view(-1, value.shape[-1]) if isinstance(value, torch.Tensor) and value.dim() > 2 else value
            for value in inputs
        ]


def _with_hints(value: torch.Tensor) -> torch.Tensor | None:
    """Return a tensor without memory that has the sizes that a tracer saw; None if it saw none."""
    numbers = [_hint(number) for number in (*value.shape, *value.stride())]
    if any(number is None for number in numbers):
        return None
    sizes, strides = numbers[: value.dim()], numbers[value.dim() :]
    return torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta")  # type: ignore[arg-type]


def _few_rows(value: torch.Tensor) -> torch.Tensor:
    """Return [..., N] with at most [2, 3] rows, all different, on the CPU; the size N has a hint."""
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


# -- operators by Definition ------------------------------------------------------------------------------------------

_call_sites: weakref.WeakValueDictionary[str, OperatorImpl] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_library: list[torch.library.Library] = []
_operators: dict[str, dict[str, Callable[..., Any]]] = {}
_defining = threading.Lock()


def make_site(
    definition: Definition, catalog: Catalog, own: Callable[..., Any] | None = None, *, check: bool = False
) -> CallSite:
    """Return a call site of a Definition, for eager and for compiled code.

    Args:
        own: ``own(*inputs) -> output``, the model's own code, in place of that stock solution.
        check: check a kernel at the first call of a size that was not measured.
    """
    serving = definition.serving or Serving()
    stock = stock_of(catalog.solutions_for(definition.name))
    launcher = None if stock is None else stock_launcher(definition, stock)
    allocate, returning = allocate_of(definition), stock_function(definition, catalog)
    if own is not None:
        launcher, returning = functools.partial(_write, own), own
    dispatcher = call_site(definition, catalog, stock=launcher, check=check)
    serve = dispatcher.serving(allocate, serving.growing)
    site = CallSite(serve, dispatcher, training=training_of(definition, catalog), stock=returning)
    # An operator that overwrites an input is for eager code only: compilers fuse an addition without help.
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
    """Return the operator of a Definition, and define it at its first use. A second Definition of one name gets another name."""
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
    # Kernels are chosen by strides, so a compiler must pass the layout that it promised.
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
    """Return the type of an input in the schema of an operator."""
    spec = definition.inputs[name]
    if not spec.is_scalar:
        return "Tensor"
    return scalar_type(spec.dtype).__name__


def _run(*args: Any) -> Any:
    *inputs, name = args
    return _call_sites[name].compute(*inputs)


def _differentiate(operator: Any, *args: Any) -> Any:
    """Run stock operations if the call may need a derivative, else the operator.

    Patched forwards put no such call into compiled code. But a transform inside compiled code can hide from them that it
    needs a derivative.
    """
    *inputs, name = args
    if forward_ad._current_level >= 0 or (torch.is_grad_enabled() and any(map(_requires_grad, inputs))):
        with compiling() if _dispatch_modes() else contextlib.nullcontext():
            return _call_sites[name].run_stock(*inputs)
    if type(inputs[0]) is torch.Tensor and not _dispatch_modes() and not _functorch_level():
        return _call_sites[name].compute(*inputs)  # no transform or mode is active: skip the dispatcher
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*args)


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Make PyTorch report that it is compiling, while code in the ``with`` block runs.

    Models ask PyTorch, because compilers do not support everything that runs, such as grouped products of float32. PyTorch
    2.11 says so only of code that Dynamo reads; newer versions say so during the whole compilation. All threads share the flag:
    the first that enters sets it, and the last that leaves restores it.
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
    """Put the operator into a graph of low-level operations, or the stock operations in its place."""
    *inputs, name = args
    impl = _call_sites[name]
    if not impl.is_left_to_stock(*inputs):
        return mode.__torch_dispatch__(operator, (), args, {})
    run = functools.partial(impl.run_stock, as_matrices=not impl.takes_leading_axes(*inputs))
    with mode, compiling():
        # Functionalise again: the graph has no mutations, but stock code may write into tensors that it made.
        return dispatch_functionalize(run, FunctionalTensorMode())(*inputs)
