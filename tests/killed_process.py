"""Runs part of a test in a process that kills itself."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any


def killed(work: Callable[[], Any]) -> None:
    """Run something in a separate process that kills itself on the way."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(7)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), f"it ended by itself: {status}"
    assert os.WTERMSIG(status) == signal.SIGKILL
