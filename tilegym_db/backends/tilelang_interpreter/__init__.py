"""Runs TileLang kernels on CPU tensors, as Triton's interpreter runs Triton's: what a machine without a GPU can verify.

A kernel is run from the tree that TileLang's language makes of it, before any lowering: wrong masks, indices, dtypes and
roundings show, an access outside of a tensor or lanes that disagree raise, and what only the compiler or the device could do
wrong (layouts, pipelines, missing barriers) does not show. There is a rule for each operation or an error that names it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import tilelang  # noqa: F401 - its module of the same name as a function of it is patched below

from tilegym_db.backends.stand_ins import pretend_device
from tilegym_db.backends.tilelang_interpreter.kernel import InterpretedKernel
from tilegym_db.backends.tilelang_interpreter.state import KernelFault, NotInterpreted

__all__ = ["InterpretedKernel", "KernelFault", "NotInterpreted", "install", "interpreting"]

DEVICE = "sm_90"
"""The target that stands in for the device of which a kernel's host code may ask."""

_for_good = ExitStack()


def install() -> None:
    """Make every ``@tilelang.jit`` factory of this process give interpreted kernels from now on."""
    _for_good.enter_context(interpreting())


@contextmanager
def interpreting() -> Iterator[None]:
    """Make every ``@tilelang.jit`` factory give interpreted kernels; undone on exit."""
    factory: Any = sys.modules["tilelang.jit"].JITImpl
    original = factory.compile

    def compile(self: Any, *args: Any, **named: Any) -> InterpretedKernel:
        return InterpretedKernel(self.get_tir(*args, **named), self.out_idx)

    factory.compile = compile
    try:
        with pretend_device(DEVICE):
            yield
    finally:
        factory.compile = original
