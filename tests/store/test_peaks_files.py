"""Peaks on their way through the store: from files to the table, to questions, to what is published, and back."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from published_tables import lock_folder

from tilegym_db.published.input_files import own_peaks_files
from tilegym_db.records.roofline import GpuPeaks
from tilegym_db.store.filling import ingest, rebuild
from tilegym_db.store.publish import publish
from tilegym_db.store.queries.measured import read_peaks
from tilegym_db.store.side_files import save_peaks


def measured(value: float) -> dict[str, Any]:
    return {"value": value, "spread": 0.004, "rounds": 5, "how": "a call"}


def calibration(day: int = 1, **changes: Any) -> GpuPeaks:
    return GpuPeaks.from_dict(
        {
            "gpu": "h200",
            "gpu_name": "NVIDIA H200",
            "sm": "sm_90",
            "driver": "580.1",
            "timestamp": datetime(2026, 11, day, 12, tzinfo=UTC),
            "timer": "events",
            "copy_bytes_per_s": measured(4.3e12),
            "flops": {"bfloat16": measured(790e12)},
            "launch_us": measured(3.5),
            "no_launch_us": measured(1.0),
            "l2_bytes": 62914560,
            "sm_count": 132,
            "max_sm_mhz": 1980,
            "max_memory_mhz": 3201,
            "memory_bus_bits": 6144,
            **changes,
        }
    )


def publish_by_hand(root, home, peaks: GpuPeaks) -> None:
    path = root / "traces" / peaks.gpu / "peaks.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(peaks.to_json())
    lock_folder(path.parent, home, gpu=peaks.gpu, sm=peaks.sm, published="2026")


@pytest.mark.parametrize("read_only", [True, False])
def test_newest_calibration_counts_as_soon_as_it_is_stored(opened, home, read_only):
    with opened() as store:
        assert read_peaks(store, "h200") is None
    for peaks in (calibration(2), calibration(1)):
        save_peaks(peaks, home)
    with opened(read_only=read_only) as store:
        assert read_peaks(store, "h200") == calibration(2)
        assert read_peaks(store, "b200") is None


def test_published_peaks_are_read_and_those_of_this_machine_win(opened, home, root):
    publish_by_hand(root, home, calibration(9))
    with opened() as store:
        assert read_peaks(store, "h200") == calibration(9)
        assert read_peaks(store, "h200", own=True) is None
    save_peaks(calibration(1), home)
    with opened() as store:
        assert read_peaks(store, "h200") == read_peaks(store, "h200", own=True) == calibration(1)


def test_peaks_can_be_asked_for_of_one_device_and_driver(opened, home):
    save_peaks(calibration(2, driver="590.1"), home)
    save_peaks(calibration(1), home)
    with opened() as store:
        assert read_peaks(store, "h200", driver="580.1") == calibration(1)
        assert read_peaks(store, "h200", driver="570.1") is None
        assert read_peaks(store, "h200", gpu_name="NVIDIA H200 NVL") is None


def test_every_calibration_is_kept_and_survives_a_rebuild(opened, home, catalog):
    for day in (1, 2, 3):
        save_peaks(calibration(day), home)
    opened().__enter__().close()
    rebuild(home, catalog=catalog)
    assert len(own_peaks_files(home)) == 3
    with opened(read_only=True) as store:
        rows = store.rows("SELECT timestamp, is_current FROM peaks WHERE gpu = 'h200' ORDER BY timestamp")
        assert [row["is_current"] for row in rows] == [False, False, True]
        assert rows[0]["timestamp"] == datetime(2026, 11, 1, 12)
        (row,) = store.rows("SELECT copy_bytes_per_s, bfloat16_flops_per_s, launch_us, is_own FROM peaks LIMIT 1")
        assert list(row.values()) == [4.3e12, 790e12, 3.5, True]


def test_a_file_of_peaks_that_is_not_valid_is_named_and_left_out(opened, home, caplog):
    sound = save_peaks(calibration(2), home)
    path = save_peaks(calibration(), home)
    path.write_text(path.read_text().replace('"l2_bytes": 62914560', '"l2_bytes": -1'))
    with opened() as store:
        assert read_peaks(store, "h200") == calibration(2)
    assert sound.is_file()
    (record,) = caplog.records
    assert f"left out: {path}: not a valid peaks: l2_bytes" in record.getMessage()


@pytest.mark.turn("tilegym_db/store/side_files.py", "tilegym_db/store/publish.py")  # fills two stores
def test_own_peaks_are_published_and_fill_another_store(opened, home, root, trace, write_traces, tmp_path):
    save_peaks(calibration(), home)
    with opened() as store:
        ingest(store, [write_traces(trace())])
        report = publish(store, "h200", root)
        path = root / "traces" / "h200" / "peaks.json"
        assert path in report.written
        assert GpuPeaks.from_json(path.read_bytes()) == calibration()
        assert publish(store, "h200", root).written == ()
    own_peaks_files(home)[0].unlink()
    with opened() as store:
        assert read_peaks(store, "h200") == calibration()
        assert read_peaks(store, "h200", own=True) is None
        publish(store, "h200", root)
    assert path.is_file()


def test_peaks_with_a_slower_timer_do_not_replace_published_ones(opened, home, root, trace, write_traces):
    publish_by_hand(root, home, calibration(1))
    path = root / "traces" / "h200" / "peaks.json"
    save_peaks(calibration(2, launch_us=measured(5.1), no_launch_us=measured(2.9)), home)
    with opened() as store:
        ingest(store, [write_traces(trace())])
        assert path not in publish(store, "h200", root).written
    assert GpuPeaks.from_json(path.read_bytes()) == calibration(1)
    save_peaks(calibration(3, launch_us=measured(3.4)), home)
    with opened() as store:
        assert path in publish(store, "h200", root).written
    assert GpuPeaks.from_json(path.read_bytes()) == calibration(3, launch_us=measured(3.4))
