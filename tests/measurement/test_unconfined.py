"""Where workers cannot be confined: what the package ships is promoted and serves this user, and nothing else does.

Real processes with Landlock or capabilities taken away verify real kernels on the CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from handicaps import NO_CAPABILITIES, NO_LANDLOCK, keep_a_containers_capabilities

from tilegym_db.catalog import Catalog
from tilegym_db.cli.doctor import sandbox_check
from tilegym_db.sandbox.confine import MINIMAL_VERSION, Sandbox, landlock_version
from tilegym_db.sandbox.processes import Confinement

NEEDS_LANDLOCK = pytest.mark.skipif(
    landlock_version() < MINIMAL_VERSION, reason="the kernel has no Landlock to take away"
)
SLOW = (
    "def run(x, weight, factor, out):\n    for row in range(x.shape[0]):\n        out[row] = x[row] * weight * factor\n"
)
FAST = "def run(x, weight, factor, out):\n    out.copy_(x * weight * factor)\n"
STOCK = {"role": "baseline", "provides": "stock"}
POINT = {"axes": {"M": 64, "N": 64}, "dtypes": {"T": "float32"}, "scalars": {"factor": 0.5}}

# Promotes, publishes for the user, shares, resolves and asks the doctor; everything that is said of it, as JSON.
PROGRAM = """
import contextlib, json, os, sys
from pathlib import Path
root, home, wheel, slots = Path(sys.argv[1]), Path(os.environ["TILEGYM_DB_HOME"]), Path(sys.argv[2]), int(sys.argv[3])
from tilegym_db.paths import use_root
stack = contextlib.ExitStack()
stack.enter_context(use_root(root))
from tilegym_db.measurement.benchmark import verify
from tilegym_db.measurement.machine import cpu_slots
from tilegym_db.catalog import Catalog
from tilegym_db.cli.doctor import check_sandbox
from tilegym_db.errors import TilegymDBError
from tilegym_db.resolver.resolve import resolve
from tilegym_db.store.opening import open_store
from tilegym_db.store.sharing import SharedDataSet
from tilegym_db.store.publish import publish
from tilegym_db.store.sharing import share_traces
from tilegym_db.store.publish import share_tables
from tilegym_db.sandbox.worker import best_level
catalog, said = Catalog((root, wheel / "overlay")), {}
said["level"], said["doctor"] = best_level("cpu").level, [check.state for check in check_sandbox()]
report = verify(devices=cpu_slots(slots) if slots > 1 else "cpu", quick=True, catalog=catalog)
said["traces"] = {trace.solution: (trace.status, trace.sandbox_level) for trace in report.traces}
said["skipped"] = {item.solution: item.reason for item in report.plan.skipped}
said["notes"], said["promoted"] = report.notes, [one.solution for one in report.awards]
with open_store(catalog=catalog) as store:
    for key, given in (("own", {"own": True}), ("shipped", {"root": wheel / "new"})):
        try:
            done = publish(store, "cpu", **given)
            said[key] = {"traces": done.traces, "unconfined": done.unconfined, "left_out": done.left_out}
        except TilegymDBError as error:
            said[key] = str(error)
    data_set = SharedDataSet(str(wheel / "team"))
    said["shared"] = share_traces(store, data_set).traces, share_tables(store, data_set.place, "cpu")
point = json.loads(os.environ["POINT"])
resolved = resolve("row_scale", gpu="cpu", catalog=catalog, **point)
said["reason"] = resolved.evidence.reason
said["served"] = None if resolved.is_stock else resolved.solution.name
said["why_not"] = {lost.candidate.solution: lost.reason for lost in resolved.rejected}
if said["level"] == 1:
    kernel, said["refused"] = root / "solutions/elementwise/row_scale/row_scale_fast/kernel.py", []
    for name in ("row_scale_mine", "row_scale"):
        try:
            verify((name,), devices="cpu", quick=True, force=True, catalog=Catalog(catalog.roots))
        except TilegymDBError as error:
            said["refused"].append(str(error))
        kernel.write_text(kernel.read_text() + "# edited")  # in the package's own folder, and not what it shipped
print(json.dumps(said))
"""


@pytest.fixture
def package(make_catalog: Callable[..., Catalog], tmp_path: Path, ship: Callable[[Path], Path]) -> Path:
    """A package that ships an operator with stock code and a fast kernel; the user's overlay has another kernel for it."""
    from write_checked_records import judged

    from tilegym_db.published.snapshot import checked_file

    root = tmp_path / "shipped"
    catalog = make_catalog(
        root, {"row_scale_stock": (SLOW, STOCK), "row_scale_fast": FAST}, ({"axes": {"M": 64, "N": 64}},)
    )
    ship(root)
    checked_file().write_text(json.dumps(judged(catalog, set())))
    mine = tmp_path / "overlay" / "solutions" / "elementwise" / "row_scale" / "row_scale_mine"
    mine.mkdir(parents=True)
    record = json.loads((root / "solutions/elementwise/row_scale/row_scale_fast/solution.json").read_text())
    (mine / "solution.json").write_text(json.dumps({**record, "name": "row_scale_mine"}))
    (mine / "kernel.py").write_text(FAST + "# mine\n")
    return root


@pytest.fixture
def said(package: Path, tmp_path: Path) -> Callable[..., Any]:
    """Run the program on a machine that lacks something."""

    def run(handicap: str, slots: int = 1, preexec_fn: Callable[[], None] | None = None) -> Any:
        environ = {**os.environ, "TILEGYM_DB_HOME": str(tmp_path / "home"), "POINT": json.dumps(POINT)}
        command = [sys.executable, "-c", handicap + PROGRAM, str(package), str(tmp_path), str(slots)]
        done = subprocess.run(command, capture_output=True, text=True, env=environ, preexec_fn=preexec_fn)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.mark.turn("tilegym_db/sandbox/")  # two promotions; test_sandbox_levels.py has the level daily
@pytest.mark.sweep(2)
@NEEDS_LANDLOCK
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("handicap", "slots"),
    [(NO_LANDLOCK, 1), (NO_CAPABILITIES + NO_LANDLOCK, 2)],
    ids=["no Landlock", "nor namespaces, several devices"],
)
def test_only_shipped_code_is_promoted_and_serves_this_user(said, handicap, slots, tmp_path):
    found = said(handicap, slots)
    assert (found["level"], found["doctor"]) == (1, ["missing"])
    assert found["traces"] == {"row_scale_fast": ["PASSED", 1], "row_scale_stock": ["PASSED", 1]}
    assert "its source is not one that the package ships" in found["skipped"]["row_scale_mine"]
    assert any("workers cannot be confined here (sandbox level 1: " in note for note in found["notes"])
    assert any("Left out: 1 sources" in note for note in found["notes"])
    assert found["promoted"] == ["row_scale_fast"]
    assert (found["own"]["traces"], found["own"]["unconfined"], found["own"]["left_out"]) == (2, 2, {})
    assert found["served"] == "row_scale_fast"
    assert "its worker was not confined (sandbox level 1), so it serves this user alone" in found["reason"]
    assert "2: the worker was not confined" in found["shipped"]
    assert found["shared"] == [0, []]
    assert not (tmp_path / "team").exists()
    assert not (tmp_path / "new").exists()
    mine, edited = found["refused"]
    assert "The package ships no source of row_scale_mine" in mine
    assert "With --allow-unsandboxed" in mine
    assert "The package ships no source of row_scale_fast, row_scale_mine" in edited


@pytest.mark.turn("tilegym_db/sandbox/")  # a promotion without capabilities; test_sandbox_levels.py has the level daily
@NEEDS_LANDLOCK
@pytest.mark.timeout(300)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root has capabilities to give up")
def test_workers_in_a_container_are_confined_and_may_be_promoted(said):
    found = said("", preexec_fn=keep_a_containers_capabilities)
    assert (found["level"], found["doctor"]) == (2, ["ok"])
    assert {level for _, level in found["traces"].values()} == {2}
    assert set(found["traces"]) == {"row_scale_fast", "row_scale_mine", "row_scale_stock"}
    assert found["own"]["unconfined"] == 0
    assert found["shared"][0] == 3
    assert found["served"] in ("row_scale_fast", "row_scale_mine")


def test_doctor_says_what_a_machine_without_confinement_does() -> None:
    check = sandbox_check(
        Sandbox(Confinement(1), "level 1: a session of its own", ("level 2 is not available: no Landlock",))
    )
    assert check.state == "missing"
    assert "only kernels that the package ships are verified, and only you can use them (level 1" in check.detail
    assert "no Landlock" in check.detail
