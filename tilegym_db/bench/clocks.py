"""What the GPU's clocks did while something was measured. Read-only: no setting is ever changed.

The driver's management library is called directly (``libnvidia-ml``, which comes with the driver): one call takes
microseconds and no package is needed. ``nvidia-smi`` would start a process to ask the same library, and is of no use
where that cannot be loaded.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from tilegym_db.bench.statistics import median

__all__ = ["ClockReading", "ClockSample", "ClockWatch", "Nvml", "summarise_clocks"]

LIBRARY = "libnvidia-ml.so.1"
SM_CLOCK = 1  # NVML_CLOCK_SM

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
    """The few read-only calls of the management library that are needed."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        # The reasons were called throttle reasons before driver 535; the meaning of the bits is the same.
        self._reasons = getattr(library, "nvmlDeviceGetCurrentClocksEventReasons", None) or getattr(
            library, "nvmlDeviceGetCurrentClocksThrottleReasons", None
        )

    @classmethod
    def open(cls, name: str = LIBRARY) -> Self | None:
        """The library, started; None where there is no driver, or one that does not answer."""
        try:
            library = ctypes.CDLL(name)
            started = library.nvmlInit_v2() == 0
        except (OSError, AttributeError):
            return None
        return cls(library) if started else None

    def close(self) -> None:
        """Every successful :meth:`open` is owed one."""
        self._library.nvmlShutdown()

    def device(self, uuid: str) -> ctypes.c_void_p | None:
        """A handle by the UUID that CUDA gives, since the two libraries number devices differently."""
        for prefix in ("GPU-", "MIG-"):
            handle = ctypes.c_void_p()
            text = (prefix + uuid.removeprefix(prefix)).encode()
            if self._library.nvmlDeviceGetHandleByUUID(text, ctypes.byref(handle)) == 0:
                return handle
        return None

    def sample(self, device: ctypes.c_void_p) -> ClockSample:
        """The SM clock and the reasons why it is not higher, now."""
        clock, reasons = ctypes.c_uint(), ctypes.c_ulonglong()
        has_clock = self._library.nvmlDeviceGetClockInfo(device, SM_CLOCK, ctypes.byref(clock)) == 0
        has_reasons = self._reasons is not None and self._reasons(device, ctypes.byref(reasons)) == 0
        return ClockSample(time.monotonic(), clock.value if has_clock else None, reasons.value if has_reasons else None)


class ClockWatch:
    """Samples the clocks of one device in a thread of this process while the ``with`` block runs.

    Use it in the process that supervises, not in the one that times: there, nothing but the driver is shared with the
    calls that are measured. On a CPU, or where the library is missing, every reading is empty.
    """

    def __init__(self, device: str, interval_s: float = 0.1, library: str = LIBRARY) -> None:
        """``device`` is torch's name of it: ``cuda:0``, or ``cpu``."""
        self._uuid = _uuid_of(device)
        self._interval_s = interval_s
        self._name = library
        self._nvml: Nvml | None = None
        self._handle: ctypes.c_void_p | None = None
        self._samples: list[ClockSample] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._nvml = Nvml.open(self._name) if self._uuid is not None else None
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
