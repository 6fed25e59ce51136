"""Run a benchmark as several processes, each with a part of the work, and join what they write.

A harness draws inputs and compares outputs in Python, so threads of one process wait for each other long before a GPU is busy.
PyTorch has a thread a processor in each harness and each worker. In many processes these wait for each other, and a waiting one
keeps its processor busy: four promotions on two processors took 142 s so, and 43 s with one thread in each process.
"""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import tilegym_db
from tilegym_db.sandbox.worker import processors

TO_END_S = 8.0
"""Seconds that a process has to end after its deadline."""
THREADS = "OMP_NUM_THREADS"


@functools.cache
def gates_digest() -> str:
    """Return a digest of the code that decides a verdict: verification, the sandbox, and the records that they read."""
    package, found = Path(tilegym_db.__file__).parent, hashlib.sha256()
    for room in ("records", "sandbox", "verification"):
        for path in sorted((package / room).rglob("*.py")):
            found.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return found.hexdigest()[:12]


def by_gates(lines: Iterable[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Return digest -> the verdicts of that code, the newest last; those of unknown code have one name."""
    found = dict[str, list[Mapping[str, Any]]]()
    for line in lines:
        found.setdefault(str(line.get("gates", "unknown")), []).append(line)
    return found


def one_thread_each() -> None:
    """Let this process, and the workers that it starts, compute in one thread, unless the user has set a number."""
    os.environ.setdefault(THREADS, "1")
    torch.set_num_threads(processors())


def run_parts(script: str, arguments: Sequence[str], processes: int, out: Path, deadline: float) -> int:
    """Run a script once for each part of its work and return the largest exit status.

    Every process gets ``--part NUMBER/COUNT`` and ``--out FILE``. ``out`` has the lines of all files afterwards, also of those
    that did not end within the deadline.
    """
    parts = [out.with_suffix(f".{number}{out.suffix}") for number in range(processes)]
    running = [
        subprocess.Popen(
            [sys.executable, script, *arguments, "--part", f"{number}/{processes}", "--out", str(part)],
            stdout=subprocess.DEVNULL,
            env={THREADS: "1", **os.environ},
        )
        for number, part in enumerate(parts)
    ]
    until, statuses = time.monotonic() + deadline + TO_END_S, []
    for process in running:
        try:
            statuses.append(process.wait(max(until - time.monotonic(), 0.1)))
        except subprocess.TimeoutExpired:
            process.kill()
            statuses.append(process.wait())
    out.write_text("".join(part.read_text() for part in parts if part.exists()))
    for part in parts:
        part.unlink(missing_ok=True)
    return max(statuses)


def without(arguments: Sequence[str], *options: str) -> list[str]:
    """Return the arguments without some options, each with its value."""
    kept, found = [], iter(arguments)
    for argument in found:
        if argument in options:
            next(found)
        elif argument.partition("=")[0] not in options:
            kept.append(argument)
    return kept
