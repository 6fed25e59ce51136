from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from tilegym_db.cli import doctor
from tilegym_db.errors import HardwareError
from tilegym_db.measurement import machine
from tilegym_db.measurement.machine import Machine
from tilegym_db.published.input_files import own_peaks_files
from tilegym_db.records.roofline import GpuPeaks

H200 = Machine("cuda:0", "h200", "NVIDIA H200", "sm_90")


def measured(value: float) -> dict[str, Any]:
    return {"value": value, "spread": 0.004, "rounds": 5, "how": f"a call at {value:.3g}"}


PEAKS = GpuPeaks.from_dict(
    {
        "gpu": "h200",
        "gpu_name": "NVIDIA H200",
        "sm": "sm_90",
        "driver": "580.159.04",
        "timestamp": datetime(2026, 11, 21, tzinfo=UTC),
        "timer": "events",
        "copy_bytes_per_s": measured(4.3e12),
        "flops": {"bfloat16": measured(790e12), "tf32": measured(400e12), "float32": measured(50e12)},
        "launch_us": measured(3.5),
        "no_launch_us": measured(1.0),
        "l2_bytes": 62914560,
        "sm_count": 132,
        "max_sm_mhz": 1980,
        "max_memory_mhz": 3201,
        "memory_bus_bits": 6144,
    }
)


def invoke(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(doctor.calibrate_command)
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def on_an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose calibration is known, since the real one needs the GPU."""
    monkeypatch.setattr(machine, "_cuda_machine", lambda index: H200)
    monkeypatch.setattr("tilegym_db.measurement.calibrate.calibrate", lambda found: PEAKS)


def test_machine_without_a_gpu_is_refused_and_nothing_is_stored(home, monkeypatch):
    monkeypatch.setattr(machine, "_cuda_machine", lambda index: None)
    result = invoke()
    assert isinstance(result.exception, HardwareError)
    assert result.exception.exit_code == 2
    assert "peaks are measured on a GPU, and 'cpu'" in str(result.exception)
    assert not home.exists()


def test_absent_gpu_is_never_calibrated_under_its_name(on_an_h200, home):
    result = invoke("--gpu", "b200")
    assert isinstance(result.exception, HardwareError)
    assert own_peaks_files(home) == []


def test_peaks_are_printed_beside_the_drivers_figures_and_stored(on_an_h200, home):
    result = invoke()
    assert result.exit_code == 0
    rows = {line.split("  ")[0]: line.split() for line in result.stdout.splitlines()}
    assert rows["copy, TB/s"][2:5] == ["4.3", "0.4%", "4.917"]
    assert rows["bfloat16 product, TFLOP/s"][3:6] == ["790", "0.4%", "1071"]
    assert rows["tf32 product, TFLOP/s"][3:6] == ["400", "0.4%", "535.3"]
    assert rows["float32 product, TFLOP/s"][3:6] == ["50", "0.4%"]  # without tensor cores: no ceiling known
    assert "launch, us" in rows
    (stored,) = own_peaks_files(home)
    assert str(stored) in result.stderr
    assert GpuPeaks.from_json(stored.read_bytes()) == PEAKS


def test_json_is_the_record(on_an_h200):
    assert GpuPeaks.from_dict(json.loads(invoke("--json").stdout)) == PEAKS
