"""Times calls inside the worker: CUDA events with a cold L2, or the wall clock on a CPU.

The clocks are taken when this module is imported, before any Solution is, so that a Solution that replaces them later does
not change what is measured here.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilegym_db.errors import HardwareError

_now_ns = time.perf_counter_ns
_Event: Any = torch.cuda.Event
_record = torch.cuda.Event.record
_elapsed_ms = torch.cuda.Event.elapsed_time
_synchronize = torch.cuda.synchronize
_spin: Any = torch.cuda._sleep  # what PyTorch's own tests keep a device busy with

_NOT_SUPPORTED = 801  # the driver's answer where no line can persist

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
            self._reset_persisting: Callable[[], int] = ctypes.CDLL("libcuda.so.1").cuCtxResetPersistingL2Cache

    def occupy(self, duration_us: float) -> None:
        """Keep the device busy for about that long, so that later launches wait behind it."""
        if self._flush is not None and duration_us > 0:
            _spin(int(duration_us * SPIN_CYCLES_PER_US))

    def time(
        self,
        order: Sequence[int],
        calls: Mapping[int, Callable[[], Any]],
        restore: Callable[[int], None],
        finish: Callable[[int, Any], None],
    ) -> list[Sample]:
        """Time the calls named by ``order``, in that order.

        Args:
            restore: runs before each call, outside the timed window.
            finish: takes what the call returned, after the timed window.
        """
        return (
            self._wall(order, calls, restore, finish)
            if self._flush is None
            else self._events(order, calls, restore, finish)
        )

    def _wall(
        self,
        order: Sequence[int],
        calls: Mapping[int, Callable[[], Any]],
        restore: Callable[[int], None],
        finish: Callable[[int, Any], None],
    ) -> list[Sample]:
        samples = []
        for index in order:
            restore(index)
            call = calls[index]
            start = _now_ns()
            returned = call()
            elapsed = (_now_ns() - start) / 1e3
            finish(index, returned)
            samples.append(Sample(elapsed, elapsed))
        return samples

    def _events(
        self,
        order: Sequence[int],
        calls: Mapping[int, Callable[[], Any]],
        restore: Callable[[int], None],
        finish: Callable[[int, Any], None],
    ) -> list[Sample]:
        assert self._flush is not None
        pairs = [(_Event(enable_timing=True), _Event(enable_timing=True)) for _ in order]
        host: list[float] = []
        for index, (start, end) in zip(order, pairs, strict=True):
            restore(index)
            call = calls[index]
            self._release_lines()
            self._flush.zero_()
            # Keep the device busy while the host prepares the call, so that the events enclose no launch gap.
            self.occupy(20.0 + 1.5 * self._host_us)
            _record(start)
            before = _now_ns()
            returned = call()
            host.append((_now_ns() - before) / 1e3)
            _record(end)
            finish(index, returned)
        self._release_lines()  # the next block must not find lines of the last call in L2
        self._host_us = min(sorted(host)[len(host) // 2], 2000.0)
        return [
            Sample(_elapsed_ms(start, end) * 1e3, host_us) for (start, end), host_us in zip(pairs, host, strict=True)
        ]

    def _release_lines(self) -> None:
        """Wait for the device, then turn lines that were accessed as ``evict_last`` into ordinary lines.

        Writing to memory does not evict them: a kernel that asks for them again would find them, and look faster than it
        is (``docs/decisions/timing.md``, 0023).
        """
        _synchronize()
        code = self._reset_persisting()
        if code not in (0, _NOT_SUPPORTED):
            raise HardwareError(
                f"cuCtxResetPersistingL2Cache failed with CUDA error {code}; the L2 stays warm.",
                code="cuda_call_failed",
            )
