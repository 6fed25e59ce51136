"""Workers are forked from one trusted process: what they share, what they do not, and what becomes of it."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest
from raising import raises

from tilegym_db.sandbox.fork_server import EARLY_IMPORTS
from tilegym_db.sandbox.worker import WorkerDied, WorkerProcess, _fork_server

# What a worker finds out about the processes above it: at level 2, its supervisor and the fork server are visible.
ANCESTORS = """
def parent(process):
    return int(open(f"/proc/{process}/stat").read().rpartition(")")[2].split()[1])
supervisor = os.getppid()
"""


def fork_server_of(worker: WorkerProcess) -> int:
    return worker.fork_server_pid


@pytest.mark.parametrize("name", EARLY_IMPORTS)
def test_early_import_of_the_fork_server_exists(name: str):
    assert importlib.util.find_spec(name) is not None


def test_workers_with_equal_libraries_share_a_process_only(peer):
    workers = [peer("answer(environment=dict(os.environ), folder=os.getcwd(), session=os.getsid(0))") for _ in range(2)]
    answers = [worker.request("call", timeout_s=20).content for worker in workers]
    assert fork_server_of(workers[0]) == fork_server_of(workers[1])
    for worker, answer in zip(workers, answers, strict=True):
        assert {answer["environment"][name] for name in ("HOME", "TMPDIR")} == {str(worker.folder)}
        assert answer["folder"] == str(worker.folder)
    assert answers[0]["session"] != answers[1]["session"] or answers[0]["session"] == 0  # 0: of another namespace


def test_worker_has_no_file_of_the_process_it_was_forked_from(peer):
    answer = peer("answer(files=sorted(map(int, os.listdir('/proc/self/fd'))))").request("call", timeout_s=20)
    opened_by_looking = 1
    assert len(answer.content["files"]) <= 4 + opened_by_looking  # standard streams and the channel


@pytest.mark.turn("tilegym_db/sandbox/fork_server.py", "tilegym_db/sandbox/worker.py")  # starts fork servers
def test_killed_fork_server_ends_its_workers_and_is_replaced(tmp_path, write_peer):
    script = write_peer(tmp_path / "peer.py", "answer()")
    first = WorkerProcess("cpu", tmp_path / "1", script=script)
    try:
        assert first.request("call", timeout_s=20).ok
        os.kill(fork_server_of(first), signal.SIGKILL)
        deadline = time.monotonic() + 20
        while first.alive and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not first.alive
        second = WorkerProcess("cpu", tmp_path / "2", script=script)
        try:
            assert second.request("call", timeout_s=20).ok
            assert fork_server_of(second) != fork_server_of(first)
        finally:
            second.close()
    finally:
        first.close()


@pytest.mark.turn("tilegym_db/sandbox/fork_server.py", "tilegym_db/sandbox/worker.py")  # starts fork servers
def test_abandoned_answer_is_not_taken_for_the_next(tmp_path, write_peer, monkeypatch):
    script = write_peer(tmp_path / "peer.py", "answer(home=os.environ['HOME'])")
    with monkeypatch.context() as patch:

        def interrupted(*_):
            raise KeyboardInterrupt

        patch.setattr(socket, "recv_fds", interrupted)
        with pytest.raises(KeyboardInterrupt):
            WorkerProcess("cpu", tmp_path / "1", script=script)
    worker = WorkerProcess("cpu", tmp_path / "2", script=script)
    try:
        assert worker.request("call", timeout_s=20).content["home"] == str(worker.folder)
    finally:
        worker.close()


def test_a_fork_server_that_cannot_start_says_why(tmp_path, monkeypatch):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no interpreter today >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    monkeypatch.setenv("LANG", "of a test")  # an environment that no fork_server has yet
    with raises(WorkerDied, "fork_server_lost", "no interpreter today"):
        WorkerProcess("cpu", tmp_path / "worker", level=1)


@pytest.mark.parametrize(
    "attempt",
    [
        "os.kill(parent(supervisor), 0)",
        "os.kill(-parent(supervisor), 0)",
        "open(f'/proc/{parent(supervisor)}/environ', 'rb').read()",
        "open(f'/proc/{parent(supervisor)}/mem', 'rb').read(1)",
    ],
)
def test_a_worker_that_sees_its_fork_server_cannot_reach_it(attempt, peer, offered_level):
    if offered_level < 2:
        pytest.skip("not with this kernel and this user")
    body = (
        f"{ANCESTORS}try:\n    {attempt}\n"
        "except OSError as error:\n    answer(error=type(error).__name__)\nelse:\n    answer(error='')"
    )
    answer = peer(body, level=2).request("call", timeout_s=20)
    assert answer.content["error"] == "PermissionError"


def test_environments_read_at_import_get_their_own_fork_servers():
    common = _fork_server({"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"})
    other = _fork_server({"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "2"})
    try:
        assert common is not other
        assert Path(f"/proc/{common._process.pid}").exists()
    finally:
        common.close()
        other.close()
