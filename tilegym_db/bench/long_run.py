"""Thousands of calls before the clock is audited: a model calls a kernel for days, and that is what is judged."""

from __future__ import annotations

import random
import threading

import torch

from tilegym_db.bench.buffer_pool import BufferPool
from tilegym_db.bench.runner import Runner
from tilegym_db.records.trace import Performance
from tilegym_db.verify.verifier import Failure

__all__ = ["LONG_RUN_CALLS", "audit_long_run", "long_run_calls"]

LONG_RUN_CALLS = 4000
LONG_RUN_S = 0.6
"""Cheap calls only: one that takes longer is repeated less often."""


def long_run_calls(performance: Performance, seed: int) -> int:
    """How often a call is repeated: a secret number, so that nobody can count up to it."""
    call_us = max(performance.latency_us, performance.host_us or 0.0)
    most = max(8, min(LONG_RUN_CALLS, int(LONG_RUN_S * 1e6 / call_us)))
    return random.Random(seed).randint(most // 2, most)


def audit_long_run(runner: Runner, pool: BufferPool, performance: Performance, seed: int) -> Failure | None:
    """Repeat the call on a few slots, while this process looks at the inputs: nobody may borrow them, not even for a moment.

    What the calls leave is not judged here: the clock's audit, which follows in the same process, judges fresh contents.
    """
    slots = range(min(2, pool.slots))
    pool.prepare(slots, poison=True)
    watch = _InputWatch(pool, slots)
    watch.start()
    failure = runner.handle.repeat_calls(slots, long_run_calls(performance, seed))
    watch.stop()
    if failure is not None:
        return failure
    if watch.changed:
        reason = f"its input {watch.changed} held other contents while it was called, if only for a moment"
        return Failure("REJECTED", reason, gate="borrowed input")
    return None


class _InputWatch(threading.Thread):
    """Reads the inputs of some slots, over and over, in a thread of the harness."""

    def __init__(self, pool: BufferPool, slots: range) -> None:
        super().__init__(daemon=True)
        self.changed = ""
        self._done = threading.Event()
        replaced = pool.definition.in_place
        names = [plan.name for plan in pool.buffers.plan.inputs if plan.name not in replaced]
        self._pairs = [
            (name, view, view.clone()) for name in names for slot in slots for view in [pool.buffers.tensor(slot, name)]
        ]

    def run(self) -> None:
        while not self._done.is_set() and not self.changed:
            for name, view, before in self._pairs:
                if not torch.equal(view.contiguous().view(torch.uint8), before.contiguous().view(torch.uint8)):
                    self.changed = name
            self._done.wait(0.001)

    def stop(self) -> None:
        """Wait for the last look."""
        self._done.set()
        self.join()
