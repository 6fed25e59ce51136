"""The languages that run on a CPU, in an interpreter, and how a worker is made to interpret them.

A verdict from here says that the numbers are right at small sizes. It is of the tier ``interpreter`` and never one of a device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

__all__ = ["INTERPRETERS", "Interpreter", "interpreted_here"]


@dataclass(frozen=True)
class Interpreter:
    """What one language needs, in a worker that runs nothing but the Solution it judges."""

    install: Callable[[], None]
    """Called in the worker before the Solution is loaded; for the rest of the process."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the worker starts with."""


def _triton() -> None:
    from tilegym_db.verify.worker.triton_interpreter import repair_interpreter

    repair_interpreter()


def _cutile() -> None:
    from tilegym_db.backends.cutile_interpreter import install

    install()


def _tilelang() -> None:
    from tilegym_db.backends.tilelang_interpreter import install

    install()


INTERPRETERS: dict[str, Interpreter] = {
    "triton": Interpreter(_triton, {"TRITON_INTERPRET": "1"}),
    "cutile": Interpreter(_cutile),
    "tilelang": Interpreter(_tilelang),
}


def interpreted_here(language: str, *, on_gpu: bool) -> bool:
    """Whether a Solution in a language is interpreted on this machine, and so not timed."""
    return not on_gpu and language in INTERPRETERS
