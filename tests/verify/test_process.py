"""The supervisor's end of the pipe against a process at the other end that does not behave."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tilegym_db.verify.sandbox.process import WorkerDied, WorkerProcess, WorkerTimeout

# Stands in for the worker: no torch, and in place of its loop whatever the test wants.
PEER = """#!{python}
import json, os, signal, sys, time
requests, replies = os.fdopen(int(sys.argv[3]), "rb"), int(sys.argv[4])
def say(line):
    os.write(replies, line if isinstance(line, bytes) else json.dumps(line).encode() + b"\\n")
say({{"id": 0}})
request = json.loads(requests.readline())
{body}
time.sleep(60)
"""


@pytest.fixture
def peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], WorkerProcess]:
    """A worker process whose other end runs these lines once it got its first request."""
    with contextlib.ExitStack() as stack:

        def start(body: str) -> WorkerProcess:
            script = tmp_path / "peer"
            script.write_text(PEER.format(python=sys.executable, body=body))
            script.chmod(0o755)
            monkeypatch.setattr(sys, "executable", str(script))
            worker = WorkerProcess("cpu", tmp_path / "worker")
            stack.callback(worker.close)
            return worker

        yield start


def test_an_answer_with_the_right_id_is_believed(peer):
    reply = peer('say({"id": 1, "ok": True, "got": request})').request("call", timeout_s=10, slot=3)
    assert reply.ok
    assert reply.content["got"] == {"id": 1, "op": "call", "slot": 3}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('say(b"garbage\\n")', "broke the protocol: not JSON"),
        ("say([1])", "broke the protocol: not a message with an id"),
        ('say({"id": 0, "ok": True})', "answered request 0 instead of 1"),
        ('say({"id": 2, "ok": True})', "answered request 2 instead of 1"),
        ('say(b"x" * (1 << 20) + b"y\\n")', "broke the protocol: a message of 1048577 bytes"),
        ('while True: say(b"x" * (1 << 16))', "sent an endless message"),
        ("sys.exit(3)", r"ended \(exit status 3\)"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", r"ended by SIGSEGV \(exit status -11\)"),
        ("os.close(replies)", "closed its pipe"),
        ('print("first\\nlast words", flush=True); os._exit(1)', "its last output:\nfirst\nlast words"),
        ('print("\\x1b[31m\\0red", flush=True); os._exit(1)', "last output:\n\N{REPLACEMENT CHARACTER}.31m.red"),
    ],
)
def test_anything_else_is_a_death_that_says_how(body, message, peer):
    worker = peer(body)
    with pytest.raises(WorkerDied, match=message):
        worker.request("call", timeout_s=10)
    assert not worker.alive


def test_silence_is_a_timeout_and_the_worker_is_gone(peer):
    worker = peer("")
    started = time.monotonic()
    with pytest.raises(WorkerTimeout, match=r"no answer within 0\.3 s"):
        worker.request("call", timeout_s=0.3)
    assert time.monotonic() - started < 5
    assert not worker.alive
    with pytest.raises(WorkerDied, match="is gone"):
        worker.request("call", timeout_s=1)


def test_a_worker_is_killed_with_the_processes_that_it_started(peer):
    worker = peer('child = os.fork() or time.sleep(60)\nsay({"id": 1, "ok": True, "child": child})')
    child = worker.request("call", timeout_s=10).content["child"]
    worker.close()
    deadline = time.monotonic() + 5
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
        if Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            break  # dead, and waiting for whoever adopts orphans here
        time.sleep(0.02)
    else:
        assert not Path(f"/proc/{child}").exists()


def test_only_what_compilers_need_of_the_environment_reaches_the_worker(peer, monkeypatch, tmp_path):
    monkeypatch.setenv("API_TOKEN", "secret")
    worker = peer('say({"id": 1, "ok": True, "environment": dict(os.environ), "folder": os.getcwd()})')
    content = worker.request("call", timeout_s=10).content
    environment = content["environment"]
    assert "API_TOKEN" not in environment
    assert "TILEGYM_DB_HOME" not in environment
    assert environment["PATH"] == os.environ["PATH"]
    assert environment["HOME"] == content["folder"] == str(tmp_path / "worker")
    caches = [value for name, value in environment.items() if "CACHE" in name]
    assert len(caches) == 5
    assert all(Path(value).is_relative_to(tmp_path) for value in caches)


def test_closing_a_worker_leaves_nothing_and_can_be_done_twice(peer, tmp_path):
    worker = peer("")
    worker.close()
    worker.close()
    assert not (tmp_path / "worker").exists()


@pytest.mark.parametrize(
    ("content", "summary"),
    [
        ({"error": "Traceback ...\nValueError: no such shape\n"}, "ValueError: no such shape"),
        ({"error": "ValueError: \ud800\x00\x1b[0m"}, "ValueError: \N{REPLACEMENT CHARACTER}"),
        ({"error": ["not", "text"]}, "['not', 'text']"),
        ({"error": "x" * 5000}, "x" * 300),
        ({}, "no message"),
    ],
)
def test_an_error_can_be_stored_whatever_the_worker_says(content, summary, peer):
    reply = peer(f'say({{"id": 1, "ok": False, **{content!r}}})').request("call", timeout_s=10)
    assert reply.summary.startswith(summary)
    assert len(reply.summary) <= 300
    reply.error.encode()
