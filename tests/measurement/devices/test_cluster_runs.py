"""Runs on a real Ray cluster: several nodes on this machine, each with separate processes, whose CPUs are measured."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from raising import raises

from tilegym_db.errors import HardwareError
from tilegym_db.measurement.benchmark import bench, verify
from tilegym_db.measurement.devices.places import RemoteProcess, _Cluster
from tilegym_db.measurement.devices.pool import JOINED
from tilegym_db.measurement.machine import Devices
from tilegym_db.measurement.run_setup import Observer
from tilegym_db.measurement.tune.tune import tune
from tilegym_db.sandbox.processes import descendants
from tilegym_db.store.journal import journal_files, read_journal
from tilegym_db.store.opening import open_store

ray_cluster = pytest.importorskip("ray.cluster_utils")

pytestmark = [pytest.mark.alone, pytest.mark.slow]

SIZES = tuple({"axes": {"M": rows, "N": 8}} for rows in (3, 11, 20, 33))
WRONG = "def run(x, weight, factor, out):\n    out.copy_(x * weight * factor)\n    out[-1:] = 0\n"
BLOCKED = """def run(x, weight, factor, out, *, ROWS=2):
    for row in range(0, x.shape[0], ROWS):
        out[row : row + ROWS] = x[row : row + ROWS] * weight * factor
"""
MANY = tuple({"axes": {"M": rows, "N": 8}} for rows in range(3, 59, 7))
NODE = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
# A node that answers nothing counts as lost after two seconds, not after the quarter of a minute that Ray waits by default.
QUICK = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}
OTHER_VERSION = '__version__ = "0.0.1"\n'


@pytest.fixture
def cluster(monkeypatch):
    """A cluster with a head node of one CPU."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    started = ray_cluster.Cluster(initialize_head=True, head_node_args={**NODE, "_system_config": QUICK})
    yield started
    started.shutdown()


@pytest.fixture
def catalog(home, make_catalog):
    return make_catalog(home / "catalog", {"row_scale_wrong": WRONG}, SIZES)


def kill_node(node) -> None:
    """The raylet and every process below it, at once."""
    pid = node.all_processes["raylet"][0].process.pid
    for process in (pid, *descendants(pid)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def journaled(home: Path) -> Counter[tuple[str, str]]:
    traces = [trace for path in journal_files(home) for trace in read_journal(path).traces]
    return Counter((trace.solution, trace.workload_uuid) for trace in traces)


@pytest.fixture
def drivers() -> list[_Cluster]:
    """What started each of the actors."""
    return []


@pytest.fixture
def started(monkeypatch, drivers) -> list[RemoteProcess]:
    """The driver's ends of all actors, in the order in which they were started."""
    ends: list[RemoteProcess] = []
    start = _Cluster.start

    def remembered(cluster, device):
        ends.append(start(cluster, device))
        drivers.append(cluster)
        return ends[-1]

    monkeypatch.setattr(_Cluster, "start", remembered)
    return ends


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_killed_node_loses_nothing_and_a_new_node_is_taken_in(cluster, make_catalog, home, started, drivers, capsys):
    catalog = make_catalog(home / "catalog", {"row_scale_wrong": WRONG}, MANY)
    lost = cluster.add_node(**NODE)
    at_work: dict[str, list[str]] = {}

    def change_the_cluster(device: str, what: str) -> None:
        at_work.setdefault(device, []).append(what)
        if what == JOINED:  # no node gets work until then
            wait_for(lambda: started[-1].is_ready)
        if what.startswith("row_scale") and sum(map(len, at_work.values())) == 2:  # both are in the middle of something
            kill_node(lost)
            cluster.add_node(**NODE)
            wait_for(lambda: not drivers[0]._found.empty())  # the head gets no more work until then

    report = verify(
        ("row_scale",),
        devices=Devices("cpu", executor=f"ray:{cluster.address}"),
        catalog=catalog,
        store_home=home,
        observer=Observer(at_work=change_the_cluster),
    )
    assert (report.unfinished, report.interrupted) == ([], False)
    uuids = [workload.uuid for workload in catalog.workloads_for("row_scale")]
    status = {"row_scale_stock": "PASSED", "row_scale_wrong": "INCORRECT_NUMERICAL"}
    assert {(trace.solution, trace.workload_uuid): trace.status for trace in report.traces} == {
        (name, uuid): status[name] for name in status for uuid in uuids
    }
    assert set(journaled(home).values()) == {1}
    assert len(journaled(home)) == len(report.traces) == 2 * len(MANY)

    gone = {device for device, told in at_work.items() if any(what.startswith("lost: ") for what in told)}
    assert len(at_work) == 3  # the head, the node that was killed, and the one that came in its place
    assert len(gone) == 1
    assert any("is not used anymore" in note for note in report.notes)
    assert set(report.devices) <= set(at_work)
    # The one that joins gets what is left when it is ready; where the head was faster, that is nothing.
    (joined,) = (device for device, told in at_work.items() if JOINED in told)
    assert joined not in gone
    assert set(report.devices) - gone
    assert capsys.readouterr().out == ""  # where results are printed as JSON
    with open_store(home, read_only=True) as store:
        counted = "SELECT origin, host, count(*) AS traces FROM traces WHERE run_id = $run GROUP BY ALL"
        rows = store.rows(counted, {"run": report.run_id})
    assert rows == [{"origin": "local", "host": os.uname().nodename, "traces": 2 * len(MANY)}]


def test_nodes_that_cannot_take_part_are_refused_with_the_reason(cluster, catalog, home, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # Ray lets nodes import from the folder that a driver is in
    (tmp_path / "other" / "tilegym_db").mkdir(parents=True)
    (tmp_path / "other" / "tilegym_db" / "__init__.py").write_text(OTHER_VERSION)
    (tmp_path / "none" / "tilegym_db").mkdir(parents=True)
    (tmp_path / "none" / "tilegym_db" / "__init__.py").write_text("raise ImportError('there is nothing here')\n")
    for folder in ("other", "none"):
        cluster.add_node(**NODE, num_gpus=1, env_vars={"PYTHONPATH": str(tmp_path / folder)})
    arguments = {"catalog": catalog, "store_home": home, "devices": f"ray:{cluster.address}"}
    with raises(HardwareError, "cluster_nodes_unusable", "tilegym-db 0.0.1", "there is nothing here", "pip install"):
        bench(("row_scale",), **arguments)


def test_cluster_without_gpu_or_with_a_silent_gpu_is_refused(cluster, catalog, home):
    arguments = {"catalog": catalog, "store_home": home, "devices": f"ray:{cluster.address}"}
    with raises(HardwareError, "cluster_device_absent", "'--gpu cpu'"):
        bench(("row_scale",), **arguments)
    cluster.add_node(**NODE, num_gpus=1)  # Ray believes this number
    with raises(HardwareError, "devices_lost", "GPU 0", "PyTorch"):
        bench(("row_scale",), **arguments)


def test_cluster_search_puts_the_winner_into_the_drivers_store(cluster, home, make_catalog):
    sizes = ({"axes": {"M": 96, "N": 64}}, {"axes": {"M": 128, "N": 64}})
    catalog = make_catalog(home / "catalog", {"row_scale_blocked": (BLOCKED, {"tunables": {"ROWS": [1, 48]}})}, sizes)
    devices = Devices("cpu", executor=f"ray:{cluster.address}")
    report = tune(devices=devices, catalog=catalog, store_home=home, budget_s=5)
    assert {result.workload_uuid: result.config for result in report.results} == {
        workload.uuid: {"ROWS": 48} for workload in catalog.workloads_for("row_scale")
    }
    assert (report.notes, report.unfinished) == ([], [])
    again = tune(devices="cpu", catalog=catalog, store_home=home, budget_s=5)
    assert [result.config for result in again.results] == [{"ROWS": 48}] * 2
    assert again.steps == []
