"""Times held against the peaks of a GPU: pure on made-up numbers, and in a whole run on this machine's processor."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from tilegym_db.errors import HardwareError
from tilegym_db.measurement.benchmark import bench, run_plan
from tilegym_db.measurement.machine import Machine, cpu_machine
from tilegym_db.measurement.plan import BenchReport, Options, make_plan
from tilegym_db.measurement.run_setup import Observer, peaks_or_reason
from tilegym_db.measurement.time_workload import check_time
from tilegym_db.measurement.timing import TimingBudget
from tilegym_db.paths import shipped_root
from tilegym_db.records.roofline import GpuPeaks, stated_peaks
from tilegym_db.records.trace import Performance
from tilegym_db.verification.verifier import Failure
from tilegym_db.verification.worker_handle import SCREEN


def measured(value: float) -> dict[str, Any]:
    return {"value": value, "spread": 0.0, "rounds": 5, "how": "a call"}


def peaks(bytes_per_s: float = 4e12) -> GpuPeaks:
    """A GPU whose memory copies at that rate, with a bus that could carry a fifth more."""
    return GpuPeaks.from_dict(
        {
            "gpu": "toy",
            "gpu_name": "NVIDIA H200",
            "sm": "sm_90",
            "timestamp": datetime(2026, 11, 21, tzinfo=UTC),
            "timer": "events",
            "copy_bytes_per_s": measured(bytes_per_s),
            "launch_us": measured(3.0),
            "no_launch_us": measured(1.0),
            "l2_bytes": 1,
            "sm_count": 132,
            "max_sm_mhz": 1980,
            "max_memory_mhz": bytes_per_s * 1.2e-6 / 2,
            "memory_bus_bits": 8,
        }
    )


def timed(latency_us: float) -> Performance:
    return Performance(
        latency_us=latency_us, ci_low_us=latency_us, ci_high_us=latency_us, samples=30, cold_l2=True, timer="events"
    )


@pytest.fixture
def catalog(make_catalog, tmp_path):
    return make_catalog(tmp_path, workloads=({"axes": {"M": 1000, "N": 1000}},))


def judge(catalog, latency_us: float, peaks: GpuPeaks) -> Performance | Failure:
    definition, solution = catalog.definition("row_scale"), catalog.solution("row_scale_stock").record
    return check_time(timed(latency_us), definition, solution, catalog.workloads_for("row_scale")[0], peaks)


def test_a_time_gets_its_share_of_the_speed_of_light(catalog):
    """2 x 1000 x 1000 + 1000 floats at 4 TB/s take 2.001 us."""
    found = judge(catalog, 4.002, peaks())
    assert isinstance(found, Performance)
    assert (found.sol_us, found.sol_ratio) == (2.001, 0.5)


def test_share_is_of_the_stated_peaks_of_a_gpu_model(catalog):
    """The same bytes at 4.8 TB/s take 1.6675 us, whatever the calibration of the run measured."""
    for calibrated in (3.9e12, 4.3e12):
        found = judge(catalog, 4.002, peaks(calibrated).model_copy(update={"gpu": "h200"}))
        assert isinstance(found, Performance)
        assert (found.sol_us, found.sol_ratio) == (1.6675, 0.4167)
    assert stated_peaks("h200-mig-1g-18gb") is None


def test_shipped_calibrations_stay_below_the_stated_peaks():
    for path in (shipped_root() / "traces").glob("*/peaks.json"):
        known = GpuPeaks.from_json(path.read_bytes(), path)
        stated = stated_peaks(known.gpu)
        assert stated is not None
        assert known.read_bytes_per_s.value < stated.read_bytes_per_s.value
        assert all(rate.value < stated.flops[name].value for name, rate in known.flops.items())


def test_a_kernel_may_beat_the_calibration_but_not_the_bus(catalog):
    above = judge(catalog, 1.9, peaks(4e12 / 10))
    assert isinstance(above, Failure)
    assert (above.status, above.gate) == ("REJECTED", "physics floor")
    assert "below the physics floor of 16.67 us" in above.reason
    ahead = judge(catalog, 18.0, peaks(4e12 / 10))
    assert isinstance(ahead, Performance)
    assert ahead.sol_ratio == pytest.approx(20.01 / 18, rel=1e-3)


def test_less_than_a_launch_takes_is_rejected_whatever_the_work(catalog):
    found = judge(catalog, 1.5, peaks(4e14))
    assert isinstance(found, Failure)
    assert "so none ran" in found.reason


def test_a_definition_without_a_cost_has_no_speed_of_light(make_catalog, tmp_path):
    catalog = make_catalog(tmp_path, definition={"cost": None})
    assert judge(catalog, 4.0, peaks()) == timed(4.0)


def run(catalog, home, peaks: GpuPeaks | None) -> BenchReport:
    machine = cpu_machine()
    plan = make_plan(catalog, machine, Options(force=True), ())
    return run_plan(plan, machine, home, TimingBudget.quick(), SCREEN, Observer(), peaks)


def test_timed_trace_says_how_near_the_speed_of_light_it_is(make_catalog, tmp_path):
    catalog = make_catalog(tmp_path)
    (trace,) = run(catalog, tmp_path / "home", peaks()).traces
    assert trace.performance is not None
    size = (2 * 40 * 32 + 32) * 4
    assert trace.performance.sol_us == round(size / 4e12 * 1e6, 4)
    assert trace.performance.sol_ratio == pytest.approx(
        trace.performance.sol_us / trace.performance.latency_us, abs=1e-4
    )
    (without,) = run(catalog, tmp_path / "home", None).traces
    assert without.performance is not None
    assert (without.performance.sol_us, without.performance.sol_ratio) == (None, None)


def test_a_run_rejects_a_time_that_no_memory_could_keep_up_with(make_catalog, tmp_path):
    (trace,) = run(make_catalog(tmp_path), tmp_path / "home", peaks(1e3)).traces
    assert trace.status == "REJECTED"
    assert trace.failure is not None
    assert trace.failure.gate == "physics floor"
    assert "tilegym-db bench row_scale_stock" in trace.failure.command


def test_uncalibrated_gpu_is_measured_and_the_report_says_so(make_catalog, tmp_path, monkeypatch):
    def fail(machine: Machine) -> None:
        raise HardwareError("NVIDIA H200 slowed down while it was calibrated")

    monkeypatch.setattr("tilegym_db.measurement.run_setup.calibrate", fail)
    found = peaks_or_reason(Machine("cuda:0", "h200", "NVIDIA H200", "sm_90"), None, tmp_path)
    monkeypatch.setattr("tilegym_db.measurement.benchmark.peaks_or_reason", lambda *_: found)
    report = bench(devices="cpu", quick=True, catalog=make_catalog(tmp_path), store_home=tmp_path / "home")
    assert report.counts == {"PASSED": 1}
    (note,) = report.notes
    assert note.startswith("the traces have no speed of light and no physics floor: NVIDIA H200 slowed down")
