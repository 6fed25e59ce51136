"""Times calls inside the worker: CUDA events with a cold L2, or the wall clock on a CPU.

The clocks are taken when this module is imported, before any Solution is, so that a Solution that replaces them later does
not change what is measured here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["BlockTimer", "Sample"]

_now_ns = time.perf_counter_ns
_Event: Any = torch.cuda.Event
_record = torch.cuda.Event.record
_elapsed_ms = torch.cuda.Event.elapsed_time
_synchronize = torch.cuda.synchronize
_spin: Any = torch.cuda._sleep  # what PyTorch's own tests keep a device busy with

SPIN_CYCLES_PER_US = 2000
"""The busy-wait kernel counts SM clocks; at most 2 GHz on the GPUs known, so this is at least the time asked for."""


@dataclass(frozen=True)
class Sample:
    """One timed call, in microseconds: device time (wall time on a CPU) and host time from call to return."""

    device_us: float
    host_us: float


class BlockTimer:
    """Times blocks of calls on one device; holds the buffer that evicts the L2 cache."""

    def __init__(self, device: str) -> None:
        """Allocate twice the L2 to write between samples."""
        self.device = device
        self._flush: torch.Tensor | None = None
        self._host_us = 50.0
        if device != "cpu":
            l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
            self._flush = torch.empty(2 * l2_bytes, dtype=torch.uint8, device=device)

    def time(self, calls: Sequence[Callable[[], Any]], restores: Sequence[Callable[[], Any]]) -> list[Sample]:
        """One sample per call, in order; each restore runs before its call, outside the timed window."""
        if self._flush is None:
            return [self._wall(call, restore) for call, restore in zip(calls, restores, strict=True)]
        return self._events(calls, restores)

    def _wall(self, call: Callable[[], Any], restore: Callable[[], Any]) -> Sample:
        restore()
        start = _now_ns()
        call()
        elapsed = (_now_ns() - start) / 1e3
        return Sample(elapsed, elapsed)

    def _events(self, calls: Sequence[Callable[[], Any]], restores: Sequence[Callable[[], Any]]) -> list[Sample]:
        assert self._flush is not None
        pairs = [(_Event(enable_timing=True), _Event(enable_timing=True)) for _ in calls]
        host: list[float] = []
        _synchronize()
        for call, restore, (start, end) in zip(calls, restores, pairs, strict=True):
            restore()
            self._flush.zero_()
            # Keep the device busy while the host prepares the call, so that the events enclose no launch gap.
            _spin(int((20.0 + 1.5 * self._host_us) * SPIN_CYCLES_PER_US))
            _record(start)
            before = _now_ns()
            call()
            host.append((_now_ns() - before) / 1e3)
            _record(end)
        _synchronize()
        self._host_us = min(sorted(host)[len(host) // 2], 2000.0)
        return [
            Sample(_elapsed_ms(start, end) * 1e3, host_us) for (start, end), host_us in zip(pairs, host, strict=True)
        ]
