"""Which level a machine has, and what a worker says about the one it got."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from handicaps import NO_CAPABILITIES, NO_LANDLOCK
from raising import raises

from tilegym_db.sandbox.processes import Confinement, WorkerSpec
from tilegym_db.sandbox.worker import WorkerDied, WorkerProcess, best_level

REPORT = """
from tilegym_db.sandbox.worker import best_level
sandbox = best_level("cpu")
print(sandbox.level, sandbox.description, *sandbox.reasons, sep="\\n")
"""


def test_the_best_level_is_what_the_kernel_offers(offered_level):
    sandbox = best_level("cpu")
    assert sandbox.level == offered_level
    assert sandbox.description.startswith(f"level {offered_level}: ")
    refused = {reason.split(":")[0] for reason in sandbox.reasons}
    assert all(f"level {level}" in " ".join(refused) for level in range(offered_level + 1, 4))
    assert best_level("cpu") is sandbox


def test_worker_gets_the_best_level_by_default_and_states_it(tmp_path, offered_level):
    worker = WorkerProcess("cpu", tmp_path / "worker")
    try:
        assert worker.sandbox_level == offered_level
    finally:
        worker.close()


@pytest.mark.parametrize("level", [1, 2, 3])
def test_a_level_is_had_in_full_or_not_at_all(level, peer, offered_level):
    worker = peer("answer()", level=level)
    if level <= offered_level:
        assert worker.sandbox_level == level
        assert worker.request("call", timeout_s=10).ok
    else:
        with raises(WorkerDied, "worker_ended") as raised:
            worker.request("call", timeout_s=10)
        assert re.search(r"exit status (70|1)\b", str(raised.value))


def test_level_1_confines_nothing_but_resources(peer):
    body = "import resource\nanswer(core=resource.getrlimit(resource.RLIMIT_CORE), hosts=os.path.exists('/etc/hosts'),"
    body += " read=open('/etc/hostname').read(), status=open('/proc/self/status').read())"
    content = peer(body, level=1).request("call", timeout_s=10).content
    assert content["core"] == [0, 0]
    assert "NoNewPrivs:\t0" in content["status"]


def test_owner_only_file_costs_the_separate_user_not_the_level(peer, tmp_path, offered_level):
    if offered_level < 3:
        pytest.skip("no level 3 here")
    (tmp_path / "solution").mkdir()
    (tmp_path / "solution/kernel.py").write_text("pass\n")
    for mode, own_user in ((0o644, True), (0o600, False)):
        (tmp_path / "solution/kernel.py").chmod(mode)
        body = f"answer(read=open({str(tmp_path / 'solution/kernel.py')!r}).read())"
        worker = peer(body, level=3, readable=[tmp_path / "solution"])
        assert worker.request("call", timeout_s=10).content["read"] == "pass\n"
        assert (worker.runs_as != os.getuid()) == own_user
        assert worker.sandbox_level == 3


def test_two_workers_are_two_users(peer, offered_level):
    if offered_level < 3:
        pytest.skip("no level 3 here")
    first, second = (peer("answer()", level=3) for _ in range(2))
    assert first.runs_as != second.runs_as


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("handicap", "level", "reason"),
    [
        pytest.param(NO_CAPABILITIES, 2, "unshare: Operation not permitted", id="no capabilities"),
        pytest.param(NO_LANDLOCK, 1, "this kernel has none", id="no Landlock"),
    ],
)
def test_refused_level_is_replaced_by_the_next_with_the_reason(handicap, level, reason, offered_level):
    if offered_level < 2:
        pytest.skip("level 2 is refused here without further ado")
    done = subprocess.run([sys.executable, "-c", handicap + REPORT], capture_output=True, text=True, check=True)
    found, description, *reasons = done.stdout.splitlines()
    assert int(found) == min(level, offered_level)
    assert description.startswith(f"level {found}: ")
    assert len(reasons) >= 3 - int(found)
    assert all(reason in text for text in reasons), reasons
    assert all("is not available" in text for text in reasons)


def test_what_the_harness_asks_survives_the_pipe():
    from tilegym_db.sandbox.processes import ResourceBounds

    spec = WorkerSpec(
        Confinement(3, own_user=False, proc_writes="none", unix_sockets=True),
        ResourceBounds.of_machine(),
        "cuda:1",
        "/scratch",
        5,
        readable=("/a", "/b"),
        hidden=("/c",),
        script="/peer.py",
        protected=(-1, 5),
    )
    assert WorkerSpec.from_json(spec.to_json()) == spec
    assert "\n" not in spec.to_json()


def test_harness_folder_on_the_workers_path_shows_nothing_else(peer, tmp_path: Path, offered_level):
    if offered_level < 3:
        pytest.skip("no level 3 here")
    tmp_path.chmod(0o700)
    (tmp_path / "expected.bin").write_bytes(b"the oracle")
    body = f"answer(seen=os.path.lexists({str(tmp_path / 'expected.bin')!r}))"
    assert peer(body, level=3).request("call", timeout_s=10).content["seen"] is False
