"""Notices which linear layers' weights a model's code reads outside of the layers' own forward.

Such code (``x.to(self.fc.weight.dtype)``, ``x @ fc.weight``, ``next(self.parameters())``) would take codes for numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

__all__ = ["noticed_reads"]

WEIGHT = "weight"

Module = torch.nn.Module


class _Noticing(dict[str, Any]):
    """The parameters of a module, telling of every way to get at the weight; attributes and ``parameters()`` come by here."""

    def __init__(self, own: Mapping[str, Any], tell: Callable[[], None]) -> None:
        super().__init__(own)
        self._tell = tell

    def __getitem__(self, name: str) -> Any:
        if name == WEIGHT:
            self._tell()
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        if name == WEIGHT:
            self._tell()
        return super().get(name, default)

    def items(self) -> Any:
        self._tell()
        return super().items()

    def values(self) -> Any:
        self._tell()
        return super().values()


@contextlib.contextmanager
def noticed_reads(layers: Mapping[str, Module]) -> Iterator[set[str]]:
    """While it lasts, gather the names of those layers whose weight is read while their own forward does not run.

    Args:
        layers: by name; hooks that they have count as the model's code. Afterwards they are as they were.
    """
    read: set[str] = set()
    with contextlib.ExitStack() as undo:
        for name, module in layers.items():
            _notice(name, module, read, undo)
        yield read


def _notice(name: str, module: Module, read: set[str], undo: contextlib.ExitStack) -> None:
    own: dict[str, Any] = module._parameters
    running: list[bool] = []
    watched = _Noticing(own, lambda: None if running else read.add(name))

    def restore() -> None:
        own.clear()
        own.update(dict.items(watched))  # what the model's code assigned meanwhile stays
        vars(module)["_parameters"] = own

    # The last to run before the forward, and the first after it.
    begin = module.register_forward_pre_hook(lambda *_: running.append(True))
    undo.callback(begin.remove)
    end = module.register_forward_hook(lambda *_: running.clear(), prepend=True, always_call=True)
    undo.callback(end.remove)
    vars(module)["_parameters"] = watched
    undo.callback(restore)
