from __future__ import annotations

import tempfile
import threading

from tilegym_db.measurement.machine import timing_lock


def test_one_timing_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    timing = threading.Event()

    def wait_for_a_turn() -> None:
        with timing_lock("cpu"):
            timing.set()

    other = threading.Thread(target=wait_for_a_turn)
    with timing_lock("cpu"):
        other.start()
        assert not timing.wait(0.1)
    assert timing.wait(5)
    other.join()
