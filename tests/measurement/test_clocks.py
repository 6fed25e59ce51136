from __future__ import annotations

import ctypes
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pynvml
import pytest

from tilegym_db.driver import driver_gpus, driver_version
from tilegym_db.measurement import timing
from tilegym_db.measurement.benchmark import bench
from tilegym_db.measurement.timing import ClockReading, ClockSample, ClockWatch, Nvml, summarise_clocks

# The management library as its header declares it, for a GPU that is at 1980 MHz, then hot, then idle.
LIBRARY = r"""
#include <string.h>
static unsigned calls;
int started;
int nvmlInitWithFlags(unsigned flags) { started += 1; return 0; }
int nvmlShutdown(void) { started -= 1; return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    if (strcmp(uuid, "GPU-11112222-3333-4444-5555-666677778888")) return 6;
    *device = (void *)0x7f0012345678;
    return 0;
}
int nvmlDeviceGetClockInfo(void *device, int type, unsigned *mhz) {
    if (device != (void *)0x7f0012345678 || type != 1) return 2;
    *mhz = calls == 0 ? 1980 : calls == 1 ? 1755 : 345;
    return 0;
}
int REASONS(void *device, unsigned long long *reasons) {
    if (device != (void *)0x7f0012345678) return 2;
    *reasons = calls == 0 ? 0x4 : calls == 1 ? 0x60 : 0x1;
    calls += 1;
    return 0;
}
int nvmlSystemGetDriverVersion(char *text, unsigned size) { strncpy(text, "580.159.03", size); return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 1; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { *device = (void *)0x7f0012345678; return index > 0; }
int nvmlDeviceGetName(void *device, char *text, unsigned size) { strncpy(text, "NVIDIA H200", size); return 0; }
"""
UUID = "11112222-3333-4444-5555-666677778888"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ctypes.CDLL]:
    """Lets NVIDIA's bindings call this library for the duration of a test."""

    def loaded(name: str) -> ctypes.CDLL:
        library = ctypes.CDLL(name)
        monkeypatch.setattr(pynvml, "nvmlLib", library)
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
        return library

    return loaded


@pytest.fixture(params=["nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"])
def library(tmp_path: Path, request: pytest.FixtureRequest, load: Callable[[str], ctypes.CDLL]) -> Iterator[None]:
    """A compiled library with the interface of the driver's, under the newer and the older name of the reasons."""
    source, target = tmp_path / "nvml.c", tmp_path / "libnvidia-ml.so.1"
    source.write_text(LIBRARY)
    command = ["cc", "-shared", "-fPIC", f"-DREASONS={request.param}", str(source), "-o", str(target)]
    subprocess.run(command, check=True)
    loaded = load(str(target))
    yield
    assert ctypes.c_int.in_dll(loaded, "started").value == 0, "what was started was shut down"


def sample(mhz: int | None, reasons: int | None) -> ClockSample:
    return ClockSample(0.0, mhz, reasons)


@pytest.mark.parametrize(
    ("samples", "reading"),
    [
        ([], ClockReading(None, None, ())),
        ([sample(None, None)], ClockReading(None, None, ())),
        ([sample(1980, 0)], ClockReading(1980, False, ())),
        ([sample(1980, None)], ClockReading(1980, None, ())),
        ([sample(1755, 0x4)], ClockReading(1755, False, ("software power cap",))),
        ([sample(1980, 0x0), sample(1200, 0x8)], ClockReading(1590, True, ("hardware slowdown",))),
        ([sample(1980, 0x0), sample(345, 0x1)], ClockReading(1980, False, ("gpu idle",))),
        ([sample(345, 0x1)], ClockReading(345, False, ("gpu idle",))),
        ([sample(1700, 0x44)], ClockReading(1700, True, ("software power cap", "hardware thermal slowdown"))),
        ([sample(1980, 0x1000)], ClockReading(1980, False, ())),
    ],
)
def test_samples_make_one_reading(samples, reading):
    assert summarise_clocks(samples) == reading


@pytest.mark.parametrize("bit", [bit for bit, (_, slows) in timing.EVENT_REASONS.items() if slows])
def test_heat_and_power_delivery_throttle(bit):
    assert summarise_clocks([sample(1000, bit)]).throttled is True


def test_without_a_driver_nothing_is_read(monkeypatch):
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "CDLL", lambda name: ctypes.CDLL(f"{name}.that-is-not-here"))
    assert Nvml.open() is None
    assert (driver_version(), driver_gpus()) == ("", ())
    with ClockWatch("cuda:0", uuid=UUID) as watch:
        pass
    assert watch.reading() == ClockReading(None, None, ())


def test_of_a_library_that_is_not_the_drivers_nothing_is_read(load):
    load("libc.so.6")
    assert Nvml.open() is None
    assert (driver_version(), driver_gpus()) == ("", ())


def test_the_driver_says_its_version_and_its_gpus(library):
    assert driver_version() == "580.159.03"
    assert driver_gpus() == ("NVIDIA H200, driver 580.159.03",)


def test_a_cpu_has_no_clocks_to_read():
    before = threading.active_count()
    with ClockWatch("cpu") as watch:
        assert threading.active_count() == before
    assert watch.reading() == ClockReading(None, None, ())


def test_clocks_are_sampled_before_during_and_after_the_block(library):
    with ClockWatch("cuda:0", interval_s=0.01, uuid=UUID) as watch:
        deadline = time.monotonic() + 10
        while not watch.reading().throttled and time.monotonic() < deadline:
            time.sleep(0.005)
    slow = ("software power cap", "software thermal slowdown", "hardware thermal slowdown")
    found = watch.reading()
    assert (found.sm_mhz, found.throttled) == (round((1980 + 1755) / 2), True)
    assert set(slow) <= set(found.reasons)
    assert not any(thread.name == "clock-watch" for thread in threading.enumerate())


def test_a_short_block_is_sampled_twice(library):
    with ClockWatch("cuda:0", interval_s=60, uuid=UUID) as watch:
        pass
    assert watch.reading().sm_mhz == round((1980 + 1755) / 2)


def test_what_is_shorter_than_the_interval_is_seen_by_looking(library):
    with ClockWatch("cuda:0", interval_s=60, uuid=UUID) as watch:
        begun = time.monotonic()
        assert not watch.reading().throttled
        watch.look()
        assert watch.reading(begun).throttled
        assert watch.reading(begun).slowdowns == ("software thermal slowdown", "hardware thermal slowdown")


def test_looking_at_a_cpu_sees_nothing():
    with ClockWatch("cpu") as watch:
        watch.look()
    assert watch.reading() == ClockReading(None, None, ())


def test_a_reading_can_leave_out_what_was_before(library):
    with ClockWatch("cuda:0", interval_s=60, uuid=UUID) as watch:
        assert watch.reading() == ClockReading(1980, False, ("software power cap",))
        later = time.monotonic()
    assert watch.reading(since=later).sm_mhz == 1755


def test_a_device_that_the_library_does_not_know_is_not_read(library):
    with ClockWatch("cuda:0", uuid="0000") as watch:
        pass
    assert watch.reading() == ClockReading(None, None, ())


class SteadyDriver:
    """A device whose clock never changes."""

    def __init__(self, reasons: int) -> None:
        self.reasons = reasons

    def device(self, uuid: str) -> str:
        return uuid

    def sample(self, device: str) -> ClockSample:
        return ClockSample(time.monotonic(), 1755, self.reasons)

    def close(self) -> None:
        pass


@pytest.mark.turn("tilegym_db/measurement/timing.py")  # a whole bench run
@pytest.mark.parametrize(
    ("reasons", "status", "said"), [(0x4, "PASSED", ""), (0x40, "UNSUPPORTED", "hardware thermal slowdown")]
)
def test_run_records_the_clock_and_rejects_times_of_a_hot_device(
    reasons, status, said, make_catalog, tmp_path, monkeypatch
):
    monkeypatch.setattr(timing, "_uuid_of", lambda device: UUID)
    monkeypatch.setattr(Nvml, "open", lambda: SteadyDriver(reasons))
    report = bench(devices="cpu", quick=True, catalog=make_catalog(tmp_path), store_home=tmp_path / "home")
    (trace,) = report.traces
    assert trace.status == status
    assert said in trace.reason
    if trace.performance is not None:
        assert (trace.performance.clock_mhz, trace.performance.throttled) == (1755, False)


@pytest.mark.gpu
def test_this_gpus_clock_is_read():
    with ClockWatch("cuda:0") as watch:
        pass
    found = watch.reading()
    assert found.sm_mhz is not None
    assert 100 < found.sm_mhz < 4000
    assert found.throttled in (True, False)
