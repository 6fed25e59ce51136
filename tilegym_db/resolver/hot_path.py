"""The functions that every call of a call site goes through, written out for its Definition.

A loop over arguments costs three times what reading their attributes costs, so the body is generated once per call
site, with one attribute access after the other, as ``dataclasses`` does for ``__init__``. The text is made of the
Definition's argument names, which are checked identifiers, and of nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilegym_db.records import Definition

__all__ = ["compile_attempt", "compile_serve", "size_of"]

_FIND = """\
def _call({parameters}):
    _key = ({key},)
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
# The outputs are not part of the key: their layout follows from that of the inputs.
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
# A kernel may raise anything a compiler or driver raises: this is the boundary where it is caught, recorded with its
# traceback and answered with stock code.


Find = Callable[[Any], Any]
"""key -> what it is bound to, or None."""

Miss = Callable[[Any, tuple[Any, ...]], Any]
"""(key, arguments) -> what the call is bound to from now on."""

Failed = Callable[[Any, Any, Exception], None]
"""Called with (key, what it is bound to, exception of the launch); the call is then left to stock code."""


def compile_attempt(definition: Definition, find: Find, miss: Miss, failed: Failed) -> Callable[..., bool]:
    """``attempt(*inputs, *written_outputs) -> bool`` for one call site."""
    parameters = (*definition.inputs, *definition.written_outputs)
    attempt = _compile(definition, parameters, _FIND + _ATTEMPT, "False", find=find, miss=miss, failed=failed)
    attempt.__doc__ = f"Run a verified kernel for {definition.name} and return True, or return False with nothing done."
    return attempt


def compile_serve(
    definition: Definition,
    find: Find,
    miss: Miss,
    failed: Failed,
    allocate: Callable[..., Any],
    growing: str | None = None,
) -> Callable[..., Any]:
    """``serve(*inputs) -> outputs or None`` for one call site; ``allocate(*inputs)`` makes the outputs of a served call.

    With a ``growing`` axis, keys leave its size out: what is found counts as found for the sizes that it has ``seen``.
    """
    parameters = tuple(definition.inputs)
    functions = {"find": find, "miss": miss, "failed": failed, "allocate": allocate}
    serve = _compile(definition, parameters, _FIND + _SERVE, "None", growing, **functions)
    serve.__doc__ = f"The outputs of {definition.name} by a verified kernel, or None with nothing done."
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
    exec(compile(source, f"<call site of {definition.name}>", "exec"), namespace)
    compiled: Callable[..., Any] = namespace["_call"]
    compiled.__name__ = compiled.__qualname__ = definition.name
    return compiled


def size_of(definition: Definition, axis: str) -> tuple[str, int]:
    """The first input that has an axis, and which of its dimensions that is.

    Raises:
        ValueError: an output has it too, or no input.
    """
    if not any(axis in (output.shape or ()) for output in definition.outputs.values()):
        for name in definition.tensor_inputs:
            shape = definition.inputs[name].shape or ()
            if axis in shape:
                return name, shape.index(axis)
    raise ValueError(f"{axis} of {definition.name} is no axis of inputs alone")


def _key_part(definition: Definition, name: str, growing: str | None, size: str) -> str:
    spec = definition.inputs.get(name)
    if spec is not None and spec.is_scalar:
        # A continuous one, too: a kernel serves it inside the range that was verified, and a model has few values of it.
        return f"{name}, type({name})"
    shape = () if spec is None else spec.shape or ()
    if growing not in shape:
        return f"{name}.shape, {name}.stride(), {name}.dtype, {name}.device, type({name})"
    found = ((entry, f"{name}.shape[{index}]") for index, entry in enumerate(shape))
    sizes = [f"{part} == {size}" if entry == growing else part for entry, part in found if part != size]
    # Strides of a contiguous tensor change with its sizes; the class of its layout does not.
    layout = f"{name}.is_contiguous() or {name}.stride()"
    return f"{', '.join([*sizes, layout])}, {name}.dtype, {name}.device, type({name})"
