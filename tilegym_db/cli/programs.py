"""Programs of NVIDIA's that a command is about: without one there is nothing to be found, and the exit status says so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["needing_program"]


@contextmanager
def needing_program(name: str) -> Iterator[None]:
    """What fails in here for want of a program fails as for want of a package, with exit status 2.

    Raises:
        MissingPackageError: the program is not installed; says how to get it.
    """
    from tilegym_db.bench.instruments.programs import find_program
    from tilegym_db.errors import MissingPackageError, ToolchainError

    try:
        yield
    except ToolchainError:
        try:
            find_program(name)
        except ToolchainError as absent:
            raise MissingPackageError(str(absent), code=absent.code) from None
        raise
