"""Where the devices of a pool are, as far as planning has to know it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from tilegym_db.bench.machine import Machine
from tilegym_db.catalog import SolutionFiles

__all__ = ["Missing", "Site"]


@dataclass(frozen=True)
class Missing:
    """What cannot be used somewhere, and why: languages, and Solutions (by name) that declare a package."""

    languages: Mapping[str, str]
    solutions: Mapping[str, str]


@dataclass(frozen=True)
class Site:
    """Devices of other hosts: one of them, whose kind and libraries all have, and what is missing there for Solutions."""

    machine: Machine
    missing: Callable[[Iterable[SolutionFiles]], Missing]
