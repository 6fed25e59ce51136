"""What the interpreter raises: a kernel that does what it must not, and what the interpreter has no rule for."""

from __future__ import annotations

from tilegym_db.errors import SolutionError

__all__ = ["KernelFault", "NotInterpreted"]


class KernelFault(SolutionError):
    """A kernel did what is undefined on a device, such as an access outside of a buffer."""

    code = "kernel_fault"


class NotInterpreted(SolutionError):
    """A part of TileLang that the interpreter has no rule for."""

    code = "not_interpreted"
