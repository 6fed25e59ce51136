"""The parts of a model that can be served, one module each.

The module of a part finds it, names the Definitions that its code may compute, and probes it. It also has the forward that asks
for a kernel first. A new kind of part is a new module here, with the functions of :class:`~tilegym_db.models.found.Part`.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

from tilegym_db.records.definition_parts import ANY_CODE

__all__ = ["PARTS", "listed", "part"]


def _in_order(names: list[str]) -> tuple[str, ...]:
    """Return the names sorted, each after those in its ``AFTER``; the parts for code of any kind are the last."""
    ordered: list[str] = []
    names = sorted(names, key=lambda name: name in ANY_CODE)
    while names:
        ready = next(name for name in names if set(getattr(part(name), "AFTER", ())) <= set(ordered))
        ordered.append(ready)
        names.remove(ready)
    return tuple(ordered)


def part(name: str) -> Any:
    """Return the module of a part; it has the functions of :class:`~tilegym_db.models.found.Part`."""
    return importlib.import_module(f"{__name__}.{name}")


def listed() -> tuple[str, ...]:
    """Return the names of the modules in this package, each after those in its ``AFTER``."""
    return _in_order(sorted(module.name for module in pkgutil.iter_modules(__path__)))


PARTS: tuple[str, ...] = listed()
"""The names of the parts. Finding a part may depend on the parts before it."""
