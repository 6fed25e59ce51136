"""Patches models as they are built."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tilegym_db.integrations.transformers.patch import Handle, patch_what_fits

__all__ = ["patched_init"]


@contextlib.contextmanager
def patched_init(**options: Any) -> Iterator[list[Handle]]:
    """Patch every transformers model that this thread builds inside the ``with`` block, as the block ends.

    The models are built stock and stay patched after the block. Yields the list of their handles, which is empty until the
    block ends; where one cannot be patched, none is.

    To hear of new models, ``PreTrainedModel.__init__`` is wrapped while any thread is inside such a block. Models that other
    threads build meanwhile are built as ever.
    """
    handles: list[Handle] = []
    with _constructed_models() as built:
        yield handles
    models = [model for model in (reference() for reference in built) if model is not None]
    inner = {id(module) for model in models for module in model.modules() if module is not model}
    try:
        for model in models:
            if id(model) not in inner:
                handles.append(patch_what_fits(model, **options))
    except BaseException:
        while handles:
            handles.pop().unpatch()
        raise


Built = list["weakref.ref[torch.nn.Module]"]


class _Watch:
    """The wrapper around ``PreTrainedModel.__init__``, there while it is needed; each thread has a stack of listeners."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._original: Callable[..., None] | None = None
        self._here = threading.local()

    @property
    def listeners(self) -> list[Built]:
        """Of this thread, the innermost block last."""
        found: list[Built] = self._here.__dict__.setdefault("listeners", [])
        return found

    def begin(self) -> None:
        """Wrap the constructor for the first user."""
        from transformers import PreTrainedModel

        with self._lock:
            if self._users == 0:
                self._original = PreTrainedModel.__init__
                PreTrainedModel.__init__ = self._wrapper(self._original)
            self._users += 1

    def end(self) -> None:
        """Put the constructor back after the last one."""
        from transformers import PreTrainedModel

        with self._lock:
            self._users -= 1
            if self._users == 0 and self._original is not None:
                PreTrainedModel.__init__ = self._original

    def _wrapper(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def remember(model: Any, *args: Any, **kwargs: Any) -> None:
            original(model, *args, **kwargs)
            if self.listeners:
                self.listeners[-1].append(weakref.ref(model))

        return remember


_watch = _Watch()


@contextlib.contextmanager
def _constructed_models() -> Iterator[Built]:
    """The models that this thread constructs inside the block, parts of others included, as weak references."""
    built: Built = []
    _watch.begin()
    _watch.listeners.append(built)
    try:
        yield built
    finally:
        _watch.listeners.pop()
        _watch.end()
