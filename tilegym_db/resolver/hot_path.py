"""The functions that every call of a call site goes through, written out for its Definition.

A loop over arguments costs three times what reading their attributes costs, so the body is generated once per call
site, with one attribute access after the other, as ``dataclasses`` does for ``__init__``. The text is made of the
Definition's argument names, which are checked identifiers, and of nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilegym_db.records import Definition
from tilegym_db.records.binding import is_code_selecting

__all__ = ["compile_attempt", "compile_serve"]

_FIND = """\
def _call({parameters}):
    _key = ({key},)
    _bound = _find(_key)
    if _bound is None:
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
"""(key, arguments) -> what the key is bound to from now on."""

Failed = Callable[[Any, Any, Exception], None]
"""Called with (key, what it is bound to, exception of the launch); the call is then left to stock code."""


def compile_attempt(definition: Definition, find: Find, miss: Miss, failed: Failed) -> Callable[..., bool]:
    """``attempt(*inputs, *written_outputs) -> bool`` for one call site."""
    parameters = (*definition.inputs, *definition.written_outputs)
    attempt = _compile(definition, parameters, _FIND + _ATTEMPT, "False", find=find, miss=miss, failed=failed)
    attempt.__doc__ = f"Run a verified kernel for {definition.name} and return True, or return False with nothing done."
    return attempt


def compile_serve(
    definition: Definition, find: Find, miss: Miss, failed: Failed, allocate: Callable[..., Any]
) -> Callable[..., Any]:
    """``serve(*inputs) -> outputs or None`` for one call site; ``allocate(*inputs)`` makes the outputs of a served call."""
    parameters = tuple(definition.inputs)
    functions = {"find": find, "miss": miss, "failed": failed, "allocate": allocate}
    serve = _compile(definition, parameters, _FIND + _SERVE, "None", **functions)
    serve.__doc__ = f"The outputs of {definition.name} by a verified kernel, or None with nothing done."
    return serve


def _compile(
    definition: Definition, parameters: tuple[str, ...], body: str, nothing: str, **functions: Any
) -> Callable[..., Any]:
    source = body.format(
        parameters=", ".join(parameters),
        key=", ".join(_key_part(definition, name) for name in parameters),
        outputs=", ".join(definition.written_outputs),
        nothing=nothing,
    )
    namespace: dict[str, Any] = {f"_{name}": function for name, function in functions.items()}
    exec(compile(source, f"<call site of {definition.name}>", "exec"), namespace)
    compiled: Callable[..., Any] = namespace["_call"]
    compiled.__name__ = compiled.__qualname__ = definition.name
    return compiled


def _key_part(definition: Definition, name: str) -> str:
    spec = definition.inputs.get(name)
    if spec is None or not spec.is_scalar:
        return f"{name}.shape, {name}.stride(), {name}.dtype, {name}.device, type({name})"
    return f"{name}, type({name})" if is_code_selecting(definition, name) else f"type({name})"
