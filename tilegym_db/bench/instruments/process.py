"""Runs a tool with the process that it attaches to, and ends both."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

__all__ = ["output_of"]

TIMEOUT_S = 1800.0
ENVIRONMENT = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONUNBUFFERED": "1"}


def output_of(command: list[str], folder: Path) -> str:
    """What a command prints, on both of its outputs, as it came; a command that does not end is ended."""
    environment = {**os.environ, **ENVIRONMENT}
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        said, _ = process.communicate()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return said.decode(errors="replace")
