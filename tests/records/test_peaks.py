from __future__ import annotations

import json
from typing import Any

import pytest
from raising import raises

from tilegym_db.errors import RecordError
from tilegym_db.records.roofline import GpuPeaks


def measured(value: float) -> dict[str, Any]:
    return {"value": value, "spread": 0.004, "rounds": 5, "how": "a call"}


H200: dict[str, Any] = {
    "gpu": "h200",
    "gpu_name": "NVIDIA H200",
    "sm": "sm_90",
    "driver": "580.159.04",
    "timestamp": "2026-11-21T05:00:00Z",
    "timer": "events",
    "copy_bytes_per_s": measured(4.3e12),
    "read_bytes_per_s": measured(4.45e12),
    "flops": {"bfloat16": measured(790e12), "float8_e4m3fn": measured(1400e12)},
    "launch_us": measured(3.5),
    "no_launch_us": measured(0.8),
    "l2_bytes": 62914560,
    "sm_count": 132,
    "max_sm_mhz": 1980,
    "max_memory_mhz": 3201,
    "memory_bus_bits": 6144,
}


def test_peaks_survive_json():
    peaks = GpuPeaks.from_dict(H200)
    again = GpuPeaks.from_json(peaks.to_json())
    assert again == peaks
    assert json.loads(peaks.to_json())["schema_version"] == 1


def test_the_memory_bus_moves_two_words_a_clock():
    assert GpuPeaks.from_dict(H200).memory_ceiling_bytes_per_s == pytest.approx(4.917e12, rel=1e-3)


@pytest.mark.parametrize(
    ("changes", "code", "name"),
    [
        ({"gpu": "cpu"}, "gpu_is_cpu", "gpu: "),
        ({"sm": ""}, "text_pattern", "sm: "),
        ({"timestamp": "2026-11-21T05:00:00"}, "time_zone_missing", "timestamp: "),
        ({"flops": {"int8": measured(1e15)}}, "dtype_unknown", "'int8'"),
        ({"flops": {"bfloat16": measured(0)}}, "value_range", "flops.bfloat16.value"),
        ({"copy_bytes_per_s": measured(6e12)}, "peak_implausible", "copy_bytes_per_s: "),
        ({"read_bytes_per_s": measured(6e12)}, "peak_implausible", "read_bytes_per_s: "),
        ({"launch_us": measured(0.8)}, "launch_too_short", "launch_us: "),
        ({"l2_bytes": 0}, "value_range", "l2_bytes"),
        ({"l2_byte": 1}, "key_unknown", "'l2_bytes'"),
    ],
)
def test_an_implausible_record_is_refused_and_names_the_key(changes, code, name):
    with raises(RecordError, code, name):
        GpuPeaks.from_dict(H200 | changes, "peaks.json")
