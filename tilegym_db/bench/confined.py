"""Refuses a promotion where workers cannot be confined."""

from __future__ import annotations

from tilegym_db.bench.machine import Machine
from tilegym_db.bench.tier_policy import MIN_SANDBOX_LEVEL
from tilegym_db.errors import HardwareError
from tilegym_db.verify.worker.process import best_level

__all__ = ["require_sandbox"]


def require_sandbox(machine: Machine) -> None:
    """Return where workers for this device can be confined as a promotion asks for.

    Raises:
        HardwareError: they cannot; the message says what the kernel refused.
    """
    sandbox = best_level(machine.device)
    if sandbox.level < MIN_SANDBOX_LEVEL:
        raise HardwareError(
            f"promotion needs workers confined at level {MIN_SANDBOX_LEVEL} or better, and this machine reaches "
            f"{sandbox.level}: {'; '.join(sandbox.reasons)}. With --allow-unsandboxed the traces are recorded as such "
            "and never published."
        )
