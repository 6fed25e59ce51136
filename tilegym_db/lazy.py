"""Lazy loading of a package's public names, so that importing the package costs almost nothing."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping


def loader(package: str, homes: Mapping[str, str]) -> Callable[[str], object]:
    """Return a ``__getattr__`` for a package.

    Args:
        package: the package's name.
        homes: public name -> the module that defines it, or the module itself.
    """

    def load(name: str) -> object:
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module '{package}' has no attribute {name!r}")
        module = importlib.import_module(home)
        value: object = module if home == f"{package}.{name}" else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    return load
