"""Runs on several devices: CPU slots, which go through everything that GPUs go through but the driver."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from raising import raises

from tilegym_db.errors import HardwareError
from tilegym_db.measurement.benchmark import bench, verify
from tilegym_db.measurement.machine import cpu_slots
from tilegym_db.measurement.run_setup import Observer
from tilegym_db.measurement.tune.tune import TuneObserver, tune
from tilegym_db.store.journal import journal_files, read_journal
from tilegym_db.store.opening import open_store
from tilegym_db.verification.phases import AT_WORK, PROCESSORS, SIDE_BY_SIDE, START, TIME, VERIFY

SIZES = tuple({"axes": {"M": rows, "N": 8}} for rows in (3, 11))
NO_PYTHON = {"PYTHONHOME": "/nowhere"}
BLOCKED = """def run(x, weight, factor, out, *, ROWS=2):
    if ROWS == 7:
        raise ValueError("seven rows do not fit")
    for row in range(0, x.shape[0], ROWS):
        out[row : row + ROWS] = x[row : row + ROWS] * weight * factor
"""
WRONG = "def run(x, weight, factor, out):\n    out.copy_(x * weight * factor)\n    out[-1:] = 0\n"


def supervisors() -> list[int]:
    """The processes that this one started as supervisors of devices."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"measurement.devices.supervisor" in (entry / "cmdline").read_bytes():
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
    return make_catalog(home / "catalog", {"row_scale_wrong": WRONG}, SIZES)


@pytest.mark.nightly
@pytest.mark.slow
def test_killed_supervisor_loses_nothing_and_repeats_nothing(catalog, home):
    at_work: list[tuple[str, str]] = []
    killed: list[int] = []

    def kill_one(trace):
        if not killed:
            killed.append(supervisors()[0])
            os.kill(killed[0], signal.SIGKILL)

    observer = Observer(traced=kill_one, at_work=lambda device, what: at_work.append((device, what)))
    report = verify(("row_scale",), catalog=catalog, store_home=home, devices=cpu_slots(2), observer=observer)

    status = {"row_scale_stock": "PASSED", "row_scale_wrong": "INCORRECT_NUMERICAL"}
    uuids = [workload.uuid for workload in catalog.workloads_for("row_scale")]
    assert verdicts(report.traces) == {(name, uuid): status[name] for name in status for uuid in uuids}
    assert report.counts == {"PASSED": 2, "INCORRECT_NUMERICAL": 2}  # each pair once
    assert {device for device, _ in at_work} == {"slot 0", "slot 1"}
    assert any(what.startswith("lost: ") and "killed by SIGKILL" in what for _, what in at_work)
    spent = max(report.seconds.values(), key=lambda seconds: seconds.get(AT_WORK, 0.0))
    assert spent[AT_WORK] > spent[VERIFY] > 0
    assert min(spent[name] for name in (TIME, PROCESSORS, *SIDE_BY_SIDE)) > 0
    assert any("killed by SIGKILL" in note for note in report.notes)
    assert report.unfinished == []
    assert sum(report.devices.values()) == len(report.traces)
    assert stored(home) == sorted(trace.trace_id for trace in report.traces)
    journaled = Counter(trace.workload_uuid for path in journal_files(home) for trace in read_journal(path).traces)
    assert set(journaled.values()) == {2}  # each comparison whole, and once
    assert supervisors() == []


@pytest.mark.turn("tilegym_db/measurement/devices/")  # two supervisors
@pytest.mark.slow
def test_idle_device_leaves_its_work_and_ctrl_c_keeps_results(catalog, home):
    seen = []

    def interrupt(trace):
        seen.append(trace)
        if len(seen) == 2:  # the whole of one workload
            raise KeyboardInterrupt

    one, other = cpu_slots(2)
    devices = [one, replace(other, environment=NO_PYTHON)]
    observer = Observer(traced=interrupt)
    report = bench(("row_scale",), catalog=catalog, store_home=home, devices=devices, observer=observer)
    assert report.interrupted
    assert any("slot 1 is not used anymore" in note for note in report.notes)
    assert all(trace.host for trace in report.traces)
    assert report.seconds["slot 0"][START] > 0
    assert AT_WORK not in report.seconds["slot 1"]
    assert stored(home) == sorted(trace.trace_id for trace in seen)
    assert supervisors() == []


@pytest.mark.nightly
@pytest.mark.slow
def test_searches_on_two_slots_agree_and_a_second_does_nothing(home, make_catalog):
    tunable = (BLOCKED, {"tunables": {"ROWS": [1, 48, 7]}})
    sizes = ({"axes": {"M": 96, "N": 64}}, {"axes": {"M": 128, "N": 64}})
    catalog = make_catalog(home / "catalog", {"row_scale_blocked": tunable}, sizes)
    at_work: set[str] = set()
    observer = TuneObserver(at_work=lambda device, what: at_work.add(device))
    report = tune(catalog=catalog, store_home=home, budget_s=5, devices=cpu_slots(2), observer=observer)
    assert {result.workload_uuid: result.config for result in report.results} == {
        workload.uuid: {"ROWS": 48} for workload in catalog.workloads_for("row_scale")
    }
    assert at_work == {"slot 0", "slot 1"}
    assert (report.notes, report.unfinished) == ([], [])
    again = tune(devices="cpu", catalog=catalog, store_home=home, budget_s=5)
    assert [result.config for result in again.results] == [{"ROWS": 48}] * 2
    assert again.steps == []


def test_devices_that_never_work_are_named_with_their_reason(catalog, home):
    broken = [replace(slot, environment=NO_PYTHON) for slot in cpu_slots(2)]
    with raises(HardwareError, "devices_lost", "slot 0", "slot 1"):
        bench(("row_scale",), catalog=catalog, store_home=home, devices=broken)


SWALLOWS = """
import os, queue, socket, threading, time
from multiprocessing.connection import Connection
from tilegym_db.measurement.devices import supervisor

supervisor.GRACE_S = 0.3
ours, theirs = socket.socketpair()
heard = (Connection(os.dup(theirs.fileno())), queue.Queue())
heard[1].put("an order")
threading.Thread(target=supervisor.listen, args=heard, daemon=True).start()
while True:
    try:
        ours.close()
        theirs.close()  # the last end of the connection: the interrupt follows, here, where it is caught
        time.sleep(60)
    except KeyboardInterrupt:
        pass
"""


WAITS = """
import os, queue, signal, socket, sys, threading
from multiprocessing.connection import Connection
from tilegym_db.measurement.devices import supervisor

ours, theirs = socket.socketpair()
orders = queue.Queue()
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # no signal wakes it
threading.Thread(target=supervisor.listen, args=(Connection(theirs.detach()), orders), daemon=True).start()
ours.close()
sys.exit(7 if orders.get(timeout=10) is None else 1)
"""


@pytest.mark.turn("tilegym_db/measurement/devices/")  # waits for processes
def test_waiting_supervisor_ends_with_its_orders_unsignalled():
    assert subprocess.run([sys.executable, "-c", WAITS], timeout=30).returncode == 7


@pytest.mark.turn("tilegym_db/measurement/devices/")  # waits for processes
def test_supervisor_that_catches_interrupts_ends_with_its_orders():
    assert subprocess.run([sys.executable, "-c", SWALLOWS], timeout=20).returncode == 1
