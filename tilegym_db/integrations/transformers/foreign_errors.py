"""What other people's code raises: that of models, and of what loads kernels from a hub."""

from __future__ import annotations

import sys

__all__ = ["of_models"]

BUILT_IN: tuple[type[Exception], ...] = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    BufferError,
    ImportError,
    LookupError,
    NameError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
OF_PACKAGES = (
    ("triton.errors", "TritonError"),
    ("httpx", "HTTPError"),
    ("httpx2", "HTTPError"),
    ("huggingface_hub.errors", "CacheNotFound"),
    ("huggingface_hub.errors", "CorruptedCacheException"),
)
"""Derive from ``Exception`` alone. Named by module: a package that is not loaded has raised nothing."""


def of_models() -> tuple[type[Exception], ...]:
    """The classes to catch around code of a model that may not run here, among them those of packages that are loaded."""
    classes = [getattr(sys.modules.get(module), name, None) for module, name in OF_PACKAGES]
    return (*BUILT_IN, *(one for one in classes if isinstance(one, type) and issubclass(one, Exception)))
