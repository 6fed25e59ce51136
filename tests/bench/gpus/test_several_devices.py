"""Runs on several devices: CPU slots, which go through everything that GPUs go through but the driver."""

from __future__ import annotations

import contextlib
import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from tilegym_db.bench.benchmark import benchmark, promote
from tilegym_db.bench.gpus.devices import cpu_slots
from tilegym_db.bench.run_setup import Observer
from tilegym_db.errors import HardwareError
from tilegym_db.store.connection import open_store
from tilegym_db.store.journal import journal_files, read_journal

SIZES = tuple({"axes": {"M": rows, "N": 8}} for rows in (3, 5, 7, 11, 13, 17))
FAST = "def run(x, weight, factor, out):\n    out.copy_(x * (weight * factor))\n"
WRONG = "def run(x, weight, factor, out):\n    out.copy_(x * weight * factor)\n    if x.shape[0] == 7:\n        out[-1] = 0\n"


def supervisors() -> list[int]:
    """The processes that this one started as supervisors of devices."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"bench.gpus.supervisor" in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return sorted(found)


def verdicts(traces) -> dict[tuple[str, str], str]:
    return {(trace.solution, trace.workload_uuid): trace.status for trace in traces}


def stored(home: Path) -> list[str]:
    with open_store(home, read_only=True) as store:
        rows = store.rows("SELECT trace_id FROM traces WHERE definition = 'row_scale' ORDER BY trace_id")
    return [row["trace_id"] for row in rows]


@pytest.fixture
def catalog(home, make_catalog):
    return make_catalog(home / "catalog", {"row_scale_fast": FAST, "row_scale_wrong": WRONG}, SIZES)


def test_two_slots_give_the_verdicts_of_one_process_and_share_the_work(catalog, home, tmp_path):
    alone = promote(("row_scale",), gpu="cpu", quick=False, catalog=catalog, store_home=tmp_path / "alone")
    at_work: set[str] = set()
    observer = Observer(at_work=lambda device, what: at_work.add(device))
    both = promote(("row_scale",), gpu="cpu", catalog=catalog, store_home=home, gpus=cpu_slots(2), observer=observer)
    assert verdicts(both.traces) == verdicts(alone.traces)
    assert Counter(both.counts)["PASSED"] >= 12
    assert at_work == {"slot 0", "slot 1"}
    assert sum(both.devices.values()) == len(both.traces) == len(stored(home))
    assert set(both.devices) == {"slot 0", "slot 1"}
    assert (both.notes, both.unfinished) == ([], [])
    assert all(trace.host for trace in both.traces)
    assert supervisors() == []


def test_a_supervisor_killed_in_the_middle_loses_nothing_and_repeats_nothing(catalog, home):
    killed: list[int] = []

    def kill_one(trace):
        if not killed:
            killed.append(supervisors()[0])
            os.kill(killed[0], signal.SIGKILL)

    report = promote(
        ("row_scale",),
        gpu="cpu",
        catalog=catalog,
        store_home=home,
        gpus=cpu_slots(2),
        observer=Observer(traced=kill_one),
    )
    pairs = Counter((trace.solution, trace.workload_uuid) for trace in report.traces)
    assert len(pairs) == 3 * len(SIZES)
    assert set(pairs.values()) == {1}
    assert any("killed by SIGKILL" in note for note in report.notes)
    assert report.unfinished == []
    assert stored(home) == sorted(trace.trace_id for trace in report.traces)
    runs = Counter(
        (trace.workload_uuid, trace.run_id) for path in journal_files(home) for trace in read_journal(path).traces
    )
    assert set(runs.values()) == {3}  # each comparison whole
    assert supervisors() == []


def test_ctrl_c_keeps_what_is_concluded_and_leaves_no_process(catalog, home):
    seen = []

    def interrupt(trace):
        seen.append(trace)
        if len(seen) == 3:  # the whole of one workload
            raise KeyboardInterrupt

    observer = Observer(traced=interrupt)
    report = benchmark(
        ("row_scale",), gpu="cpu", catalog=catalog, store_home=home, gpus=cpu_slots(2), observer=observer
    )
    assert report.interrupted
    assert stored(home) == sorted(trace.trace_id for trace in seen)
    assert supervisors() == []


def test_devices_that_never_work_are_named_with_their_reason(catalog, home):
    slots = [slot for slot in cpu_slots(2)]
    broken = [type(slot)(slot.label, slot.index, environment={"PYTHONHOME": "/nowhere"}) for slot in slots]
    with pytest.raises(HardwareError, match=r"no device is left.*slot 0.*slot 1"):
        benchmark(("row_scale",), gpu="cpu", catalog=catalog, store_home=home, gpus=broken)


def test_one_device_that_never_works_leaves_its_work_to_the_other(catalog, home):
    one, other = cpu_slots(2)
    broken = type(other)(other.label, other.index, environment={"PYTHONHOME": "/nowhere"})
    report = benchmark(("row_scale",), gpu="cpu", catalog=catalog, store_home=home, gpus=[one, broken])
    assert len(verdicts(report.traces)) == 3 * len(SIZES)
    assert set(report.devices) == {"slot 0"}
    assert any("slot 1 is used no more" in note for note in report.notes)
