"""The function that every call of a call site goes through, written out for its Definition.

A loop over arguments costs three times what reading their attributes costs, so the body is generated once per call
site, with one attribute access after the other, as ``dataclasses`` does for ``__init__``. The text is made of the
Definition's argument names, which are checked identifiers, and of nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilegym_db.records import Definition
from tilegym_db.records.binding import is_code_selecting

__all__ = ["compile_attempt"]

_BODY = """\
def attempt({parameters}):
    _key = ({key},)
    _bound = _find(_key)
    if _bound is None:
        _bound = _miss(_key, ({parameters},))
    _bound.calls += 1
    _launch = _bound.launch
    if _launch is None:
        return False
    try:
        _launch({parameters})
    except Exception as _error:
        _failed(_key, _bound, _error)
        return False
    return True
"""
# A kernel may raise anything a compiler or driver raises: this is the boundary where it is caught, recorded with its
# traceback and answered with stock code.


def compile_attempt(
    definition: Definition,
    find: Callable[[Any], Any],
    miss: Callable[[Any, tuple[Any, ...]], Any],
    failed: Callable[[Any, Any, Exception], None],
) -> Callable[..., bool]:
    """``attempt(*inputs, *written_outputs) -> bool`` for one call site.

    Args:
        definition: names the arguments and says which are tensors.
        find: key -> what it is bound to, or None.
        miss: binds a key that was not found.
        failed: called with the exception of a launch; the call is then left to stock code.
    """
    parameters = (*definition.inputs, *definition.written_outputs)
    source = _BODY.format(
        parameters=", ".join(parameters), key=", ".join(_key_part(definition, name) for name in parameters)
    )
    namespace: dict[str, Any] = {"_find": find, "_miss": miss, "_failed": failed}
    exec(compile(source, f"<call site of {definition.name}>", "exec"), namespace)
    attempt: Callable[..., bool] = namespace["attempt"]
    attempt.__name__ = attempt.__qualname__ = definition.name
    attempt.__doc__ = f"Run a verified kernel for {definition.name} and return True, or return False with nothing done."
    return attempt


def _key_part(definition: Definition, name: str) -> str:
    spec = definition.inputs.get(name)
    if spec is None or not spec.is_scalar:
        return f"{name}.shape, {name}.stride(), {name}.dtype, {name}.device, type({name})"
    return f"{name}, type({name})" if is_code_selecting(definition, name) else f"type({name})"
