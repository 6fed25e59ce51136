"""Runs cuTile kernels on CPU tensors, in place of a device that is not there.

cuTile's own front end settles every type, shape and constant of a kernel, and contracts products and sums, exactly as it does
ahead of the compiler; what it hands on is executed here with NumPy, block after block. So the rules of verification are not
written down a second time. What this does not show is how a device rounds transcendental functions and sums, how it orders
blocks, and anything about speed.

Imported in worker processes and tests only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

__all__ = ["install", "interpreting"]

_for_good = ExitStack()

DEVICE = "sm_90"
"""The target that stands in for the device of which a kernel's host code may ask."""


def install() -> None:
    """Replace launches for the rest of this process. Call it before a Solution is loaded."""
    _for_good.enter_context(interpreting())


@contextmanager
def interpreting() -> Iterator[None]:
    """Run every launch here; undone on exit."""
    import cuda.tile as ct

    from tilegym_db.backends.cutile_interpreter.launching import run
    from tilegym_db.backends.stand_ins import install_driver, pretend_device
    from tilegym_db.errors import SolutionError

    def launch(stream: object, grid: object, kernel: Any, kernel_args: tuple[Any, ...], /, **options: Any) -> None:
        if not isinstance(kernel, ct.kernel):
            raise SolutionError(f"cuda.tile.launch takes a kernel, not {type(kernel).__name__}.", code="kernel_type")
        run(grid, kernel, kernel_args)

    install_driver()
    original, ct.launch = ct.launch, launch
    try:
        with pretend_device(DEVICE):
            yield
    finally:
        ct.launch = original
