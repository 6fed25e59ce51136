"""The functions that every call of a call site goes through, generated for its Definition.

A loop over arguments costs three times as much as reading their attributes. So the body is generated once per call site, as one
attribute access after the other, like ``__init__`` by ``dataclasses``. The text contains only the Definition's argument names,
which are checked identifiers.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from threading import get_ident
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple

from tilegym_db.errors import UsageError
from tilegym_db.records import Definition
from tilegym_db.records.definition_parts import Serving, parse_layout
from tilegym_db.records.definition_rules import is_packed
from tilegym_db.records.expressions import names_in

if TYPE_CHECKING:
    from tilegym_db.records.definition_parts import TensorSpec

threads: dict[int, int] = {}
"""Thread -> depth of :func:`replayed` in it. A call site first looks if it is empty, which costs an eager call least."""


class Replayed(NamedTuple):
    """The key of an answer for replays; ``key`` is that of the same call in eager code."""

    key: Any


@contextlib.contextmanager
def replayed() -> Iterator[None]:
    """Make all call sites answer for replays, in this thread inside a ``with`` block."""
    here = get_ident()
    threads[here] = threads.get(here, 0) + 1
    try:
        yield
    finally:
        threads[here] -= 1
        if not threads[here]:
            del threads[here]


def is_replayed() -> bool:
    """Return True if this thread makes calls that will be replayed."""
    return bool(threads) and get_ident() in threads


def key_here(key: Any) -> Any:
    """Return the key of an answer in this thread, from that in eager code."""
    return Replayed(key) if get_ident() in threads else key


# ---- calls that a CUDA graph will repeat ----------------------------------------------------------
# Calls that a CUDA graph will repeat: the threads that make them now, and the keys of their answers.
#
# Such a call costs the host once. So its answer may differ from that of the same call in eager code, and both are remembered.

_FIND = """\
def _call({parameters}):
    _key = ({key},)
    if _threads:
        _key = _key_here(_key)
    _bound = _find(_key)
    if _bound is None{unless_seen}:
        _bound = _miss(_key, ({parameters},))
    _bound.calls += 1
    _launch = _bound.launch
    if _launch is None:
        return {nothing}
"""
_ATTEMPT = """\
    try:
        _launch({parameters})
    except Exception as _error:
        _failed(_key, _bound, _error)
        return False
    return True
"""
# The outputs are not part of the key, because their layout follows from that of the inputs.
_SERVE = """\
    _compute = _bound.compute
    if _compute is not None:
        try:
            return _compute({parameters})
        except Exception as _error:
            _failed(_key, _bound, _error)
            return None
    {outputs} = _allocate({parameters})
    try:
        _launch({parameters}, {outputs})
    except Exception as _error:
        _failed(_key, _bound, _error)
        return None
    return {outputs}
"""
_SERVE_IN_PLACE = """\
    try:
        _launch({parameters})
    except Exception as _error:
        _failed(_key, _bound, _error)
        return None
    return ()
"""
# A kernel may raise anything that a compiler or driver raises. This boundary catches it, records the traceback and runs stock.


Find = Callable[[Any], Any]
"""key -> its binding, or None."""

Miss = Callable[[Any, tuple[Any, ...]], Any]
"""(key, arguments) -> the binding of the call from now on."""

Failed = Callable[[Any, Any, Exception], None]
"""Called with (key, its binding, exception of the launch); stock code then runs the call."""


def compile_attempt(definition: Definition, find: Find, miss: Miss, failed: Failed) -> Callable[..., bool]:
    """Compile ``attempt(*inputs, *written_outputs) -> bool`` for one call site."""
    parameters = (*definition.inputs, *definition.written_outputs)
    attempt = _compile(definition, parameters, _FIND + _ATTEMPT, "False", find=find, miss=miss, failed=failed)
    attempt.__doc__ = f"Run a verified kernel for {definition.name} and return True, or do nothing and return False."
    return attempt


def compile_serve(
    definition: Definition,
    find: Find,
    miss: Miss,
    failed: Failed,
    allocate: Callable[..., Any],
    growing: str | None = None,
) -> Callable[..., Any]:
    """Compile ``serve(*inputs) -> outputs or None`` for one call site; ``allocate(*inputs)`` makes the outputs.

    Keys do not contain the size of a ``growing`` axis. A binding then counts as found only for sizes that it has ``seen``.
    If all outputs overwrite inputs, the outputs of a kernel are an empty tuple.
    """
    parameters = tuple(definition.inputs)
    functions = {"find": find, "miss": miss, "failed": failed, "allocate": allocate}
    body = _FIND + (_SERVE if definition.written_outputs else _SERVE_IN_PLACE)
    serve = _compile(definition, parameters, body, "None", growing, **functions)
    serve.__doc__ = f"Return the outputs of {definition.name} by a verified kernel, or None if no kernel ran."
    return serve


def _compile(
    definition: Definition,
    parameters: tuple[str, ...],
    body: str,
    nothing: str,
    growing: str | None = None,
    **functions: Any,
) -> Callable[..., Any]:
    size = "" if growing is None else "{}.shape[{}]".format(*size_of(definition, growing))
    source = body.format(
        parameters=", ".join(parameters),
        key=", ".join(_key_part(definition, name, growing, size) for name in parameters),
        outputs=", ".join(definition.written_outputs),
        nothing=nothing,
        unless_seen=f" or {size} not in _bound.seen" if size else "",
    )
    namespace: dict[str, Any] = {f"_{name}": function for name, function in functions.items()}
    namespace |= {"_threads": threads, "_key_here": key_here}
    exec(_code(source, definition.name), namespace)
    compiled: Callable[..., Any] = namespace["_call"]
    compiled.__name__ = compiled.__qualname__ = definition.name
    return compiled


@lru_cache(1024)
def _code(source: str, name: str) -> CodeType:
    """Compile source once for all call sites that have it, such as those of the layers of a model."""
    return compile(source, f"<call site of {name}>", "exec")


def size_of(definition: Definition, axis: str) -> tuple[str, int]:
    """Return the first input that has an axis, and the index of that dimension; refuse an axis that outputs have too."""
    if not any(axis in (output.shape or ()) for output in definition.outputs.values()):
        for name in definition.tensor_inputs:
            shape = definition.inputs[name].shape or ()
            if axis in shape:
                return name, shape.index(axis)
    raise ValueError(f"{axis} of {definition.name} is no axis of inputs alone")


def _key_part(definition: Definition, name: str, growing: str | None, size: str) -> str:
    spec = definition.inputs.get(name)
    if spec is not None and spec.is_scalar:
        # Continuous scalars too: a kernel serves them inside the verified range, and a model has few values.
        return f"{name}, type({name})"
    shape = () if spec is None else spec.shape or ()
    if growing not in shape:
        return f"{name}.shape, {name}.stride(), {name}.dtype, {name}.device, type({name})"
    found = ((entry, f"{name}.shape[{index}]") for index, entry in enumerate(shape))
    sizes = [f"{part} == {size}" if entry == growing else part for entry, part in found if part != size]
    # The strides of a contiguous tensor change with its sizes; the class of its layout does not.
    layout = f"{name}.is_contiguous() or {name}.stride()"
    return f"{', '.join([*sizes, layout])}, {name}.dtype, {name}.device, type({name})"


# ---- allocation -----------------------------------------------------------------------------------
# The uninitialised outputs of a call, in the layout that the Definition promises to callers in a model.
#
# One expression per output, because it runs at every call that a kernel serves, and a compiler traces it with symbolic sizes.

Allocate = Callable[..., Any]
"""``allocate(*inputs)`` returns the one output, or a tuple of outputs, uninitialised."""

_NAME = re.compile(r"[A-Za-z_]\w*")
_MULTIPLE = re.compile(r"^\s*(\d+)\s*\*\s*([A-Za-z_]\w*)\s*$|^\s*([A-Za-z_]\w*)\s*\*\s*(\d+)\s*$")
_PACKED = re.compile(r"^\s*([A-Za-z_]\w*)\s*//\s*(\d+)\s*$")
"""The last dimension of packed codes (``H // 2``). They fill whole bytes, so the division is exact."""


def allocate_of(definition: Definition) -> Allocate:
    """Return the function that makes the written outputs of a Definition for inputs in its shapes.

    If ``serving.rows`` names an axis, inputs and outputs may have any leading axes in its place.
    """
    serving = definition.serving or Serving()
    key = definition.name, definition.digest, serving.model_dump_json()
    known = _made.get(key)
    if known is None:
        known = _made[key] = _compile_allocation(definition, serving)
    return known


_made: dict[tuple[str, str, str], Allocate] = {}


def _compile_allocation(definition: Definition, serving: Serving) -> Allocate:
    import torch

    from tilegym_db.sandbox.shared_buffers import storage_dtype

    namespace: dict[str, Any] = {"_torch": torch, "_dtype": storage_dtype, "ceil_div": lambda a, b: -(-a // b)}
    made = [_expression(definition, serving, name) for name in definition.written_outputs]
    returned = made[0] if len(made) == 1 else f"({', '.join(made)},)" if made else "()"
    source = f"def _allocate({', '.join(definition.inputs)}):\n    return {returned}\n"
    exec(compile(source, f"<outputs of {definition.name}>", "exec"), namespace)
    allocate: Allocate = namespace["_allocate"]
    allocate.__doc__ = f"Return the uninitialised outputs of {definition.name} for its inputs."
    return allocate


def _expression(definition: Definition, serving: Serving, name: str) -> str:
    spec, layout = definition.outputs[name], serving.outputs.get(name)
    if name in definition.layouts:
        return _strided(definition, serving, name)
    if layout is not None and layout.like is not None:
        return f"_torch.empty_like({layout.like})"
    if layout is None:
        same = next((given for given in definition.tensor_inputs if _is_like(definition.inputs[given], spec)), None)
        if same is not None:
            return f"_torch.empty_like({same}, memory_format=_torch.contiguous_format)"
    base, dtype = _base(definition, spec)
    order = [*range(len(spec.shape or ()))] if layout is None or layout.order is None else [*layout.order]
    sizes = _sizes(definition, serving, name)
    written = "".join(f"{size}, " for size in sizes)
    if order == sorted(order):
        return f"{base}.new_empty(({written}){dtype})"
    if any(size.startswith("*") for size in sizes):
        dense = f"{base}.new_empty(({''.join(f'{sizes[which]}, ' for which in order)}){dtype})"
        return f"{dense}.permute({', '.join(str(order.index(which)) for which in range(len(sizes)))})"
    # One call in place of an allocation and its permuted view. A stride is the product of the sizes further inside.
    inside = [order[order.index(which) + 1 :] for which in range(len(sizes))]
    strides = ", ".join(" * ".join(sizes[one] for one in inner) or "1" for inner in inside)
    return f"{base}.new_empty_strided(({written}), ({strides}){dtype})"


def _strided(definition: Definition, serving: Serving, name: str) -> str:
    """Return an output with the strides of the Definition; memory between its elements is never written."""
    spec, text = definition.outputs[name], definition.layouts[name]
    if serving.rows is not None and serving.rows in (spec.shape or ()):
        raise UsageError(
            f"'{name}' of {definition.name} has the layout {text}, which does not allow other leading axes.",
            code="output_layout_unfit",
        )
    base, dtype = _base(definition, spec)
    sizes, strides = (
        "".join(f"{_size(definition, entry, name)}, " for entry in entries)
        for entries in (spec.shape or (), parse_layout(text) or ())
    )
    return f"{base}.new_empty_strided(({sizes}), ({strides}){dtype})"


def _is_like(given: TensorSpec, output: TensorSpec) -> bool:
    return (given.shape, given.dtype) == (output.shape, output.dtype)


def _base(definition: Definition, spec: TensorSpec) -> tuple[str, str]:
    """Return the input whose device a new tensor has, and the dtype argument if the dtypes differ."""
    for name in definition.tensor_inputs:
        if definition.inputs[name].dtype == spec.dtype:
            return name, ""
    if spec.dtype in definition.dtypes or not definition.tensor_inputs:
        raise UsageError(
            f"no input of {definition.name} determines the dtype or the device of an output.",
            code="output_dtype_unknown",
        )
    return definition.tensor_inputs[0], f", dtype=_dtype({spec.dtype!r})"


def _sizes(definition: Definition, serving: Serving, name: str) -> list[str]:
    """Return one Python expression per dimension of an output. One starred expression stands for all leading axes of rows."""
    found = []
    for entry in definition.outputs[name].shape or ():
        if entry == serving.rows and serving.rows is not None:
            having = next(given for given in definition.tensor_inputs if serving.rows in _shape(definition, given))
            found.append(f"*{having}.shape[:-1]")
        else:
            found.append(_size(definition, entry, name))
    return found


def _shape(definition: Definition, name: str) -> tuple[str | int, ...]:
    return definition.inputs[name].shape or ()


def _size(definition: Definition, entry: str | int, name: str) -> str:
    if isinstance(entry, int):
        return str(entry)
    axes, _ = names_in(entry)
    spelled = _NAME.sub(lambda word: _axis(definition, word[0], name) if word[0] in axes else word[0], entry)
    return spelled if entry in axes else f"({spelled})"


def _axis(definition: Definition, axis: str, name: str) -> str:
    value = definition.axes[axis].value
    if value is not None:
        return str(value)
    scalar = definition.axes[axis].scalar
    if scalar is not None:
        return scalar
    for given in definition.tensor_inputs:
        shape = _shape(definition, given)
        if axis in shape:  # counted from the end, because leading axes may replace the first
            return f"{given}.shape[{shape.index(axis) - len(shape)}]"
    for given in definition.tensor_inputs:
        shape = _shape(definition, given)
        for index, entry in enumerate(shape):
            match = _MULTIPLE.match(str(entry))
            if match and axis in (match.group(2), match.group(3)):
                return f"({given}.shape[{index - len(shape)}] // {match.group(1) or match.group(4)})"
        packed = shape and is_packed(definition.inputs[given], definition.dtypes)
        if packed and (row := _PACKED.match(str(shape[-1]))) and axis == row.group(1):
            return f"({given}.shape[-1] * {row.group(2)})"
    raise UsageError(
        f"the size of {axis} in '{name}' of {definition.name} does not follow from the shapes of its inputs.",
        code="output_size_unknown",
    )


def with_outputs(inputs: tuple[Any, ...], allocate: Allocate) -> tuple[Any, ...]:
    """Return inputs and outputs without memory, enough to bind a call by shapes, strides and dtypes."""
    import torch

    shadows = tuple(
        torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        if isinstance(value, torch.Tensor)
        else value
        for value in inputs
    )
    outputs = allocate(*shadows)
    return (*shadows, *(outputs if isinstance(outputs, tuple) else (outputs,)))
