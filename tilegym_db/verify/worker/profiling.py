"""What runs on the device during a call, as CUPTI reports it: every kernel, copy and cleared block, on any stream, added up.

The profiler is set up before a Solution is loaded; it lives in the same process all the same, so what it says can convict a
Solution but is not the only thing that acquits it (``docs/trust.md``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from tilegym_db.verify.worker.reply import KernelUse, sum_uses

__all__ = ["KernelProfiler", "uses_of_events"]

_profile: Any = profile
_synchronize = torch.cuda.synchronize
_sleep = time.sleep

LINGER_S = 0.02
"""How long to wait after the calls for work that was put off until after the return."""


class KernelProfiler:
    """Records device activities; the first session of a process takes seconds and misses events, so one is spent here."""

    def __init__(self) -> None:
        """Start CUPTI once."""
        self.activities([lambda: torch.zeros(1, device="cuda")])

    def activities(self, calls: Sequence[Callable[[], Any]]) -> list[KernelUse]:
        """Make the calls, wait for them and a little longer, and add up what ran on the device."""
        _synchronize()
        with _profile(activities=[ProfilerActivity.CUDA]) as session:
            for call in calls:
                call()
            _synchronize()
            _sleep(LINGER_S)
            _synchronize()
        return uses_of_events(session.profiler.kineto_results.events())


def uses_of_events(events: Iterable[Any]) -> list[KernelUse]:
    """Add up the events of the device in a profile; events of the host are left out."""
    on_device = DeviceType.CUDA
    return sum_uses(
        (event.name(), event.duration_ns() / 1e3, event.device_resource_id())
        for event in events
        if event.device_type() == on_device
    )
