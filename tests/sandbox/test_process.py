"""The harness's end of the channel against a process at the other end that does not behave."""

from __future__ import annotations

import itertools
import os
import signal
import time
from contextlib import closing
from pathlib import Path

import pytest
from raising import raises

from tilegym_db.sandbox.processes import stolen_us
from tilegym_db.sandbox.protocol import MAX_LINE
from tilegym_db.sandbox.worker import WorkerDied, WorkerHasNoMemory, WorkerProcess, WorkerTimeout


def test_an_answer_with_the_right_id_is_believed(peer):
    reply = peer("answer(got=request)").request("call", timeout_s=10, slot=3)
    assert reply.ok
    assert reply.content["got"] == {"id": reply.content["id"], "op": "call", "slot": 3}


def test_ids_cannot_be_foreseen(peer):
    worker = peer("while True:\n    answer()\n    request = hear()")
    ids = [worker.request("call", timeout_s=10).content["id"] for _ in range(8)]
    gaps = {after - before for before, after in itertools.pairwise(ids)}
    assert len(gaps) == 7
    assert max(ids) > 1 << 40


@pytest.mark.parametrize(
    ("body", "code", "fact"),
    [
        ('say(b"garbage\\n")', "message_not_json", "exit status"),
        ('say(b"\\xff\\x00\\n")', "message_not_json", "exit status"),
        ("say([1])", "message_without_id", "[1]"),
        ('say({"id": 0, "ok": True})', "answer_mismatched", "exit status"),
        ('say({"id": request["id"] + 1, "ok": True})', "answer_mismatched", "exit status"),
        ("say(b'{\"id\": ' + b'{\"id\": 5}\\n')", "message_not_json", "exit status"),
        (f'say(b"x" * {MAX_LINE} + b"y\\n")', "message_too_long", f"{MAX_LINE + 1} bytes"),
        ('while True: say(b"x" * (1 << 16))', "message_too_long", "exit status"),
        ("sys.exit(3)", "worker_ended", "exit status 3"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "worker_ended", "SIGSEGV (exit status -11)"),
        ("channel.close()", "channel_closed", "exit status"),
        ("channel.shutdown(socket.SHUT_RDWR)", "channel_closed", "exit status"),
        ('print("first\\nlast words", flush=True); os._exit(1)', "worker_ended", "output:\nfirst\nlast words"),
        ('print("\\x1b[31m\\0red", flush=True); os._exit(1)', "worker_ended", "output:\n\ufffd[31m\ufffdred"),
        ('raise ValueError("by mistake")', "worker_ended", "ValueError: by mistake"),
    ],
)
def test_anything_else_is_a_death_that_says_how(body, code, fact, peer):
    worker = peer(body)
    with raises(WorkerDied, code, fact):
        worker.request("call", timeout_s=10)
    assert not worker.alive


@pytest.mark.parametrize("second", ["answer(second=True)", 'say(b"half a mess")', 'say({"id": 7})'])
def test_unrequested_message_ends_the_worker_and_is_no_answer(second, peer):
    worker = peer(f"answer(); {second}")
    assert worker.request("call", timeout_s=10).ok
    time.sleep(0.2)
    with raises(WorkerDied, "message_unasked"):
        worker.request("call", timeout_s=10)
    assert not worker.alive


def test_worker_without_gpu_memory_is_separated_from_a_dead_one(tmp_path):
    script = tmp_path / "full.py"
    words = b'{"id": 0, "ok": false, "kind": "memory"}\n'
    script.write_text(f"import socket, sys\nsocket.socket(fileno=int(sys.argv[1])).send({words!r})\nsys.exit(1)\n")
    with closing(WorkerProcess("cpu", tmp_path / "worker", level=1, script=script)) as worker:
        with raises(WorkerHasNoMemory, "gpu_memory_full"):
            worker.request("call", timeout_s=10)
        assert not worker.alive


def test_an_answer_in_pieces_is_put_together(peer):
    body = 'line = json.dumps({"id": request["id"], "ok": True}).encode() + b"\\n"\n'
    body += "for number in range(len(line)):\n    say(line[number:number + 1])\n    time.sleep(0.001)"
    assert peer(body).request("call", timeout_s=10).ok


def test_silence_is_a_timeout_and_the_worker_is_gone(peer):
    worker = peer('print("thinking", flush=True)')
    worker.wait_until_ready()
    started = time.monotonic()
    with raises(WorkerTimeout, "worker_timeout", "0.3 s", "thinking"):
        worker.request("call", timeout_s=0.3)
    assert time.monotonic() - started < 5
    assert not worker.alive
    with raises(WorkerDied, "worker_gone"):
        worker.request("call", timeout_s=1)


def test_half_an_answer_is_a_timeout(peer):
    worker = peer("say(b'{\"id\": ')")
    with raises(WorkerTimeout, "worker_timeout"):
        worker.request("call", timeout_s=0.5)


def test_a_worker_that_does_not_listen_is_a_timeout_too(peer):
    worker = peer("answer(); time.sleep(60)")
    worker.request("call", timeout_s=10)
    with raises(WorkerTimeout, "worker_timeout"):
        worker.request("call", timeout_s=0.5, much="x" * 900_000)


def test_a_late_answer_is_never_credited(peer):
    worker = peer("time.sleep(0.4); answer()")
    with raises(WorkerTimeout, "worker_timeout"):
        worker.request("call", timeout_s=0.2)
    time.sleep(0.4)
    with raises(WorkerDied, "worker_gone"):
        worker.request("call", timeout_s=1)


def test_open_files_go_with_a_request(peer, tmp_path):
    body = "line, descriptors, _, _ = socket.recv_fds(channel, 1 << 16, 4)\nrequest = json.loads(line)\n"
    body += 'os.write(descriptors[1], b"written by the worker")\nanswer(read=os.pread(descriptors[0], 100, 0).decode())'
    worker = peer("answer()\n" + body)
    worker.request("call", timeout_s=10)
    with (tmp_path / "in").open("w+b", buffering=0) as first, (tmp_path / "out").open("w+b") as second:
        first.write(b"for the worker")
        reply = worker.request("call", timeout_s=10, descriptors=(first.fileno(), second.fileno()))
    assert reply.content["read"] == "for the worker"
    assert (tmp_path / "out").read_bytes() == b"written by the worker"


def test_a_worker_cannot_give_the_harness_open_files(peer):
    before = len(os.listdir("/proc/self/fd"))
    body = 'line = json.dumps({"id": request["id"], "ok": True}).encode() + b"\\n"\n'
    worker = peer(body + "socket.send_fds(channel, [line], [0, 1, 2])")
    during = len(os.listdir("/proc/self/fd"))
    assert worker.request("call", timeout_s=10).ok
    assert len(os.listdir("/proc/self/fd")) == during
    worker.close()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_worker_is_killed_with_the_processes_that_it_started(peer):
    worker = peer("child = os.fork() or time.sleep(60)\nanswer(child=child)")
    child = worker.request("call", timeout_s=10).content["child"]
    assert Path(f"/proc/{child}").exists()
    worker.close()
    assert not Path(f"/proc/{child}").exists()


def test_only_variables_that_compilers_need_reach_the_worker(peer, monkeypatch):
    monkeypatch.setenv("API_TOKEN", "secret")
    worker = peer("answer(environment=dict(os.environ), folder=os.getcwd())", environment={"TRITON_INTERPRET": "1"})
    content = worker.request("call", timeout_s=10).content
    environment = content["environment"]
    assert "API_TOKEN" not in environment
    assert "TILEGYM_DB_HOME" not in environment
    assert environment["TRITON_INTERPRET"] == "1"
    assert environment["PATH"] == os.environ["PATH"]
    assert environment["HOME"] == content["folder"] == str(worker.folder)
    caches = [value for name, value in environment.items() if "CACHE" in name]
    assert len(caches) == 5
    assert all(Path(value).is_relative_to(worker.folder) for value in caches)


def test_worker_has_its_channel_and_output_and_no_other_file(peer):
    body = 'answer(open=sorted(int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")))'
    assert set(peer(body).request("call", timeout_s=10).content["open"]) == {0, 1, 2, 3}


def test_closing_a_worker_leaves_nothing_and_can_be_done_twice(peer):
    worker = peer("")
    worker.close()
    worker.close()
    assert not worker.folder.exists()


def test_a_worker_whose_supervisor_was_killed_is_gone_too(peer):
    worker: WorkerProcess = peer("answer(supervisor=os.getppid(), worker=os.getpid())")
    ids = worker.request("call", timeout_s=10).content
    os.kill(ids["supervisor"], signal.SIGKILL)
    with raises(WorkerDied, "worker_ended"):
        worker.request("call", timeout_s=10)


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
    reply = peer(f'say({{"id": request["id"], "ok": False, **{content!r}}})').request("call", timeout_s=10)
    assert reply.summary.startswith(summary)
    assert len(reply.summary) <= 300
    reply.error.encode()


def test_time_taken_by_the_host_is_known_per_processor_and_grows():
    before = stolen_us()
    assert len(before) == len(list(Path("/sys/devices/system/cpu").glob("cpu[0-9]*/topology")))
    assert all(now >= then >= 0.0 for then, now in zip(before, stolen_us(), strict=True))
