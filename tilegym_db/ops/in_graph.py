"""Operators in code that is compiled or traced: ``torch.ops.tilegym_db_ops.<definition>(*inputs, backend)``.

A compiler sees an operator with known output shapes and strides, and which inputs it overwrites; when it runs, the call is
decided by what it is given, as in eager mode. A call that a derivative may be asked of is traced as the operations of the
reference.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import torch

from tilegym_db.ops.catalog_operator import CatalogOperator
from tilegym_db.records.dtypes import scalar_type

__all__ = ["NAMESPACE", "define"]

NAMESPACE = "tilegym_db_ops"

_library: list[torch.library.Library] = []
_defined: dict[str, int] = {}
_defining = threading.Lock()


def define(operator: CatalogOperator) -> Callable[..., Any]:
    """A library operator that runs an operator, under its name, or under a name with a number where that is taken.

    It returns the outputs that are not written in place.
    """
    called = re.sub(r"\W", "_", operator.definition.name)
    with _defining:
        if not _library:
            _library.append(torch.library.Library(NAMESPACE, "FRAGMENT"))  # type: ignore[no-untyped-call]
        number = _defined[called] = _defined.get(called, -1) + 1
    return _define(_library[0], f"{called}_{number}" if number else called, operator)


def _define(library: torch.library.Library, called: str, operator: CatalogOperator) -> Callable[..., Any]:
    # Kernels are chosen by strides: a compiler must hand over the layout that it promised.
    tags = (torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag)
    library.define(called + _schema(operator), tags=tags)  # type: ignore[no-untyped-call]

    def run(*arguments: Any) -> Any:
        outputs = operator.written(arguments[:-1], arguments[-1])
        return None if outputs == () else outputs

    def shapes(*arguments: Any) -> Any:
        outputs = operator.allocate(*arguments[:-1])
        return None if outputs == () else outputs

    library.impl(called, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"{NAMESPACE}::{called}", shapes, lib=library)
    defined: Callable[..., Any] = getattr(getattr(torch.ops, NAMESPACE), called).default

    def differentiate(*arguments: Any) -> Any:
        # The function around it asks this too, but a transform inside of compiled code can hide from it.
        inputs: tuple[Any, ...] = arguments[:-1]
        if operator.is_differentiated(inputs):
            outputs = operator.written_by_reference(inputs)
            return None if outputs == () else outputs
        with torch._C._AutoDispatchBelowAutograd():
            return defined(*arguments)

    library.impl(called, differentiate, "Autograd")  # type: ignore[no-untyped-call]
    return defined


def _schema(operator: CatalogOperator) -> str:
    definition = operator.definition
    inputs: list[str] = []
    for name, spec in definition.inputs.items():
        overwritten = f"Tensor(a{len(inputs)}!)" if name in definition.in_place else "Tensor"
        inputs.append(f"{scalar_type(spec.dtype).__name__ if spec.is_scalar else overwritten} {name}")
    outputs = ", ".join(["Tensor"] * len(definition.written_outputs))
    return f"({', '.join(inputs)}, str backend) -> ({outputs})"
