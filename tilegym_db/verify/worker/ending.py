"""How a worker ended, as its supervisor reports it."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass

from tilegym_db.verify.worker.reply import storable

__all__ = ["Ending", "read_ending"]


@dataclass(frozen=True)
class Ending:
    """What is known of an ended worker; ``code`` None where the supervisor could not say. Negative is a signal."""

    code: int | None
    reason: str
    tail: str

    @classmethod
    def of(cls, code: int | None, reason: str, output: str) -> Ending:
        """From what the supervisor says, made fit to be stored and shown."""
        tail = storable(output).strip()
        return cls(code, storable(reason), f"; its last output:\n{tail}" if tail else "")

    @property
    def signalled(self) -> str:
        """Which signal ended it, to follow "ended"; empty where none did."""
        return f" by {_signal_name(-self.code)}" if self.code is not None and self.code < 0 else ""


def read_ending(printed: bytes) -> Ending | None:
    """From all that the supervisor printed; None where its report is not among it."""
    try:
        report = json.loads(printed.splitlines()[-1])
        code, reason, tail = report["code"], report["reason"], report["tail"]
        if report["leftover"]:
            reason += f"{'; ' if reason else ''}some of its processes could not be ended"
    except (ValueError, TypeError, KeyError, IndexError):
        return None
    return Ending.of(code, reason, tail)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
