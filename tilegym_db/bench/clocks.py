"""What the GPU's clocks did while something was measured. Read-only: no setting is ever changed.

NVIDIA's management library tells it, through NVIDIA's own bindings (nvidia-ml-py): one call takes microseconds. PyTorch's
``torch.cuda.clock_rate`` goes through the same bindings, starts the library anew for each value, and knows no reasons.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType, TracebackType
from typing import Any, Self

from tilegym_db.bench.statistics import median
from tilegym_db.driver import started_library

__all__ = ["ClockReading", "ClockSample", "ClockWatch", "Nvml", "summarise_clocks"]

# nvmlClocksEventReasons: bit -> name, and whether it means that the GPU runs slower than it should.
EVENT_REASONS: dict[int, tuple[str, bool]] = {
    0x1: ("gpu idle", False),
    0x2: ("application clocks setting", False),
    0x4: ("software power cap", False),  # normal for large matrix products: that is what the GPU can sustain
    0x8: ("hardware slowdown", True),
    0x10: ("sync boost", False),
    0x20: ("software thermal slowdown", True),
    0x40: ("hardware thermal slowdown", True),
    0x80: ("hardware power brake", True),
    0x100: ("display clock setting", False),
}
IDLE = 0x1


@dataclass(frozen=True)
class ClockSample:
    """The state at one moment of ``time.monotonic()``; None is what the driver would not say."""

    at: float
    sm_mhz: int | None
    reasons: int | None


@dataclass(frozen=True)
class ClockReading:
    """A stretch of time: median SM clock, whether heat or power delivery slowed the GPU, and every reason seen."""

    sm_mhz: int | None = None
    throttled: bool | None = None
    reasons: tuple[str, ...] = ()

    @property
    def slowdowns(self) -> tuple[str, ...]:
        """Those of the reasons that mean heat or power delivery."""
        slowing = {name for name, slows in EVENT_REASONS.values() if slows}
        return tuple(reason for reason in self.reasons if reason in slowing)


def summarise_clocks(samples: Iterable[ClockSample]) -> ClockReading:
    """One reading of many samples. While the GPU idles its clock says nothing, so busy moments count where there are any."""
    taken = list(samples)
    masks = [sample.reasons for sample in taken if sample.reasons is not None]
    busy = [sample for sample in taken if not (sample.reasons or 0) & IDLE]
    clocks = [sample.sm_mhz for sample in busy or taken if sample.sm_mhz is not None]
    seen = 0
    for mask in masks:
        seen |= mask
    known = {bit: reason for bit, reason in EVENT_REASONS.items() if seen & bit}
    return ClockReading(
        sm_mhz=round(median(clocks)) if clocks else None,
        throttled=any(slows for _, slows in known.values()) if masks else None,
        reasons=tuple(name for name, _ in known.values()),
    )


class Nvml:
    """The management library, started. What the driver does not tell is None."""

    def __init__(self, library: ModuleType) -> None:
        self._library = library

    @classmethod
    def open(cls) -> Self | None:
        """The library, started; None where there is no driver, or one that does not answer."""
        library = started_library()
        return None if library is None else cls(library)

    def close(self) -> None:
        """Every successful :meth:`open` is owed one."""
        self._library.nvmlShutdown()

    def device(self, uuid: str) -> Any:
        """A handle by the UUID that CUDA gives, since the two libraries number devices differently; None for no device."""
        names = (prefix + uuid.removeprefix(prefix) for prefix in ("GPU-", "MIG-"))
        handles = (self._told(self._library.nvmlDeviceGetHandleByUUID, name) for name in names)
        return next((handle for handle in handles if handle is not None), None)

    def sample(self, device: Any) -> ClockSample:
        """The SM clock and the reasons why it is not higher, now."""
        clock = self._told(self._library.nvmlDeviceGetClockInfo, device, self._library.NVML_CLOCK_SM)
        reasons = self._told(self._library.nvmlDeviceGetCurrentClocksEventReasons, device)
        if reasons is None:  # the name of the same before driver 535; the meaning of the bits did not change
            reasons = self._told(self._library.nvmlDeviceGetCurrentClocksThrottleReasons, device)
        return ClockSample(time.monotonic(), clock, reasons)

    def _told(self, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except self._library.NVMLError:
            return None


class ClockWatch:
    """Samples the clocks of one device in a thread of this process while the ``with`` block runs.

    Use it in the process that supervises, not in the one that times: there, nothing but the driver is shared with the
    calls that are measured. On a CPU, or where no driver answers, every reading is empty.
    """

    def __init__(self, device: str, interval_s: float = 0.1, uuid: str | None = None) -> None:
        """``device`` is torch's name of it: ``cuda:0``, or ``cpu``; PyTorch says its ``uuid`` if it is not given."""
        self._uuid = uuid or _uuid_of(device)
        self._interval_s = interval_s
        self._nvml: Nvml | None = None
        self._handle: Any = None
        self._samples: list[ClockSample] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._nvml = Nvml.open() if self._uuid is not None else None
        if self._nvml is not None and self._uuid is not None:
            self._handle = self._nvml.device(self._uuid)
            if self._handle is not None:
                self.look()
                self._thread = threading.Thread(target=self._watch, name="clock-watch", daemon=True)
                self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if self._nvml is not None:
            self._nvml.close()

    def reading(self, since: float | None = None) -> ClockReading:
        """What was seen so far, or since a moment of ``time.monotonic()``. Also answers after the block has ended."""
        return summarise_clocks(sample for sample in tuple(self._samples) if since is None or sample.at >= since)

    def look(self) -> None:
        """Take a sample now, inside the ``with`` block: what is shorter than the interval would else go unseen."""
        if self._nvml is not None and self._handle is not None:
            self._samples.append(self._nvml.sample(self._handle))

    def _watch(self) -> None:
        while not self._stop.wait(self._interval_s):
            self.look()
        self.look()


def _uuid_of(device: str) -> str | None:
    if device == "cpu":
        return None
    import torch

    return str(torch.cuda.get_device_properties(device).uuid)
