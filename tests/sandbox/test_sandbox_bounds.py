"""Workers that take more of the machine than they may, or will not go: the harness survives, and nothing is left of them."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from raising import raises

from tilegym_db.sandbox.processes import HOST_SHARE, ResourceBounds, Usage, available_processors, violation
from tilegym_db.sandbox.worker import WorkerDied, WorkerTimeout

pytestmark = pytest.mark.slow

MIB = 1 << 20
SMALL = ResourceBounds(
    memory_bytes=300 * MIB,
    processes=40,
    threads=400,
    output_bytes=5 * MIB,
    disk_bytes=30 * MIB,
    files=500,
)

# Ends by itself well before it would hurt this machine, should nothing stop it.
FORK_BOMB = """
def bomb(depth):
    for _ in range(2):
        with contextlib.suppress(OSError):
            if os.fork() == 0 and depth < 6:
                bomb(depth + 1)
    time.sleep(90)
bomb(0)
"""
MEMORY_BOMB = """
blocks = []
for _ in range(80):
    blocks.append(bytearray(os.urandom(1 << 20) * 10))
    time.sleep(0.005)
"""
MEMORY_OF_MANY = """
for _ in range(12):
    if os.fork() == 0:
        block = bytearray(os.urandom(1 << 20) * 50)
        time.sleep(90)
time.sleep(90)
"""
UNMAPPED_MEMORY = """
files = []
for _ in range(80):
    files.append(os.memfd_create("block"))
    os.write(files[-1], os.urandom(1 << 20) * 10)
    time.sleep(0.02)
"""
ENDLESS_OUTPUT = """
while True:
    os.write(1, b"the last words of a worker that will not stop talking " * 1000)
"""
FULL_DISK = """
for number in range(60):
    with open(f"file-{number}", "wb") as file:
        file.write(os.urandom(1 << 20) * 10)
    time.sleep(0.05)
"""
UNNAMED_FILES = """
files = []
for number in range(60):
    files.append(open("file", "wb"))
    files[-1].write(os.urandom(1 << 20) * 10)
    files[-1].flush()
    os.unlink("file")
    time.sleep(0.05)
"""
MANY_FILES = """
for number in range(100_000):
    open(f"file-{number}", "w").close()
"""
DEEP_FOLDERS = """
for number in range(3000):
    os.mkdir("folder")
    os.chdir("folder")
time.sleep(90)
"""


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("body", "bound"),
    [
        pytest.param(FORK_BOMB, "processes (at most 40)", id="fork bomb"),
        pytest.param(MEMORY_BOMB, "MiB of memory (at most 300 MiB)", id="memory"),
        pytest.param(MEMORY_OF_MANY, "MiB of memory (at most 300 MiB)", id="memory of many"),
        pytest.param(UNMAPPED_MEMORY, "MiB of memory (at most 300 MiB)", id="unmapped memory"),
        pytest.param(ENDLESS_OUTPUT, "MiB of output (at most 5 MiB)", id="output"),
        pytest.param(FULL_DISK, "MiB of disk (at most 30 MiB)", id="disk"),
        pytest.param(UNNAMED_FILES, "MiB of disk (at most 30 MiB)", id="unnamed files"),
        pytest.param(MANY_FILES, "files (at most 500)", id="files"),
        pytest.param(DEEP_FOLDERS, "files (at most 500)", id="deep folders"),
    ],
)
def test_worker_that_takes_too_much_is_ended_with_the_reason(body, bound, peer, confining_level):
    bounds = replace(SMALL, memory_bytes=4 << 30) if "processes" in bound else SMALL
    worker = peer(body, level=confining_level, bounds=bounds)
    # The bound on time is far above the second or two that it takes: a busy machine gives the supervisor its turn late.
    with raises(WorkerDied, "worker_was_ended", bound) as raised:
        worker.request("call", timeout_s=60)
    assert body != ENDLESS_OUTPUT or "not stop talking" in str(raised.value)
    assert_nothing_left(worker)


@pytest.mark.sweep(2)
def test_memory_that_processes_share_counts_once(peer, confining_level):
    body = "block = bytearray(os.urandom(1 << 20) * 100)\nfor _ in range(10):\n    if os.fork() == 0: time.sleep(90)\n"
    bounds = replace(
        SMALL, memory_bytes=800 * MIB
    )  # eleven times the block is more; a CUDA build of PyTorch takes 250 itself
    worker = peer(body + "time.sleep(1)\nanswer()", level=confining_level, bounds=bounds)
    assert worker.request("call", timeout_s=10).ok


def test_one_file_cannot_outgrow_the_disk_bound(peer, confining_level):
    body = "file = open('file', 'wb')\ntry:\n    os.truncate('file', 100 << 20)\nexcept OSError as error:\n"
    body += "    answer(error=str(error))"
    worker = peer(body, level=confining_level, bounds=SMALL)
    assert "File too large" in worker.request("call", timeout_s=10).content["error"]


def test_at_level_3_the_kernel_itself_bounds_the_threads(peer, offered_level):
    if offered_level < 3:
        pytest.skip("no level 3 here")
    body = (
        "import threading\ncount = 0\n"
        "try:\n    for count in range(2000):\n        threading.Thread(target=time.sleep, args=(20,), daemon=True).start()\n"
        "except RuntimeError:\n    pass\nanswer(count=count)"
    )
    assert 300 < peer(body, level=3, bounds=SMALL).request("call", timeout_s=10).content["count"] < 400


# Takes the end of a pipe, which every process that it starts inherits.
TAKE_PIPE = """
line, descriptors, _, _ = socket.recv_fds(channel, 1 << 16, 1)
request = json.loads(line)
os.set_inheritable(descriptors[0], True)
"""
# A process that forks and ends, over and over, as fast as a machine can: a search for it by its number comes too late.
HOPPING = """
import subprocess
with open("hop.c", "w") as file:
    file.write("#include <fcntl.h>\\n#include <time.h>\\n#include <unistd.h>\\n"
               "int main(void) { time_t end = time(0) + 20; int file = open(\\"hops\\", O_CREAT | O_WRONLY | O_APPEND, 0600);"
               " setsid(); while (time(0) < end) { if (fork() > 0) _exit(0); setpgid(0, 0); write(file, \\"x\\", 1); }"
               " return 0; }")
subprocess.run(["gcc", "-O1", "-w", "hop.c", "-o", "hop"], check=True)
loader = "/lib64/ld-linux-x86-64.so.2"  # level 2 lets nobody make a file a program
for _ in range(2):
    subprocess.Popen([loader, "./hop"] if os.path.exists(loader) else ["./hop"], pass_fds=descriptors)
while not os.path.exists("hops") or os.path.getsize("hops") < 100:
    time.sleep(0.01)
answer()
time.sleep(60)
"""
DAEMON = """
if os.fork() == 0:
    with contextlib.suppress(OSError):
        os.setsid()
    if os.fork() == 0:
        for descriptor in (0, 1, 2):
            os.close(descriptor)
        channel.close()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(30)
    os._exit(0)
os.wait()
answer()
"""


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(HOPPING, id="hopping from process to process"),
        pytest.param(DAEMON, id="daemon"),
        pytest.param(DAEMON + "sys.exit(0)", id="daemon of a worker that ended"),
        pytest.param("answer()\nos.kill(os.getpid(), signal.SIGSTOP)", id="stopped"),
        pytest.param("if os.fork() == 0: os.kill(os.getpid(), signal.SIGSTOP)\nanswer()", id="stopped child"),
    ],
)
def test_nothing_is_left_of_a_worker_that_was_closed(body, peer, confining_level):
    worker = peer("answer()" + TAKE_PIPE + body, level=confining_level)
    worker.request("call", timeout_s=10)
    read, write = os.pipe()
    with open(read, "rb") as reader:
        worker.request("call", timeout_s=20, descriptors=(write,))
        os.close(write)
        started = time.monotonic()
        worker.close()
        assert time.monotonic() - started < 5
        # The pipe ends when the last process that has its other end is gone.
        assert select.select([reader], [], [], 0)[0] == [reader]
        assert reader.read() == b""
    assert_nothing_left(worker)


def test_orphans_are_found_without_confinement_as_well(peer):
    worker = peer(DAEMON, level=1)
    worker.request("call", timeout_s=10)
    assert_nothing_left(worker)


def test_a_worker_that_stops_itself_is_a_timeout(peer, confining_level):
    worker = peer("os.kill(os.getpid(), signal.SIGSTOP)", level=confining_level)
    with raises(WorkerTimeout, "worker_timeout"):
        worker.request("call", timeout_s=0.5)
    assert_nothing_left(worker)


def test_signals_of_a_worker_to_its_group_reach_no_other_process(peer, confining_level):
    worker = peer("os.kill(0, signal.SIGKILL)", level=confining_level)
    with raises(WorkerDied, "worker_ended", "SIGKILL"):
        worker.request("call", timeout_s=10)
    assert_nothing_left(worker)


HARNESS = """
import sys, time
from pathlib import Path
from tilegym_db.sandbox.worker import WorkerProcess
from tilegym_db.paths import scratch_folder
with scratch_folder(Path(sys.argv[1])) as folder:
    script, level = Path(sys.argv[2]), int(sys.argv[3])
    workers = [WorkerProcess("cpu", folder / str(number), level=level, script=script) for number in range(2)]
    for worker in workers:
        worker.request("call", timeout_s=20)
    print(folder, *(worker.supervisor_pid for worker in workers), flush=True)
    time.sleep(60)
"""


@pytest.mark.sweep(2)
def test_workers_end_with_a_harness_that_was_killed(tmp_path, write_peer, confining_level):
    script = write_peer(tmp_path / "peer.py", DAEMON)
    command = [sys.executable, "-c", HARNESS, str(tmp_path), str(script), str(confining_level)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as harness:
        assert harness.stdout is not None
        folder, *supervisors = harness.stdout.readline().split()
        harness.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 10
    while any(map(is_running, supervisors)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(is_running, supervisors))
    assert processes_mentioning(folder) == []
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("usage", "words"),
    [
        (Usage(), None),
        (Usage(300 * MIB, 40, 5 * MIB, 30 * MIB, 500), None),
        (Usage(memory_bytes=301 * MIB), "it used 301 MiB of memory (at most 300 MiB)"),
        (Usage(processes=41), "it ran 41 processes (at most 40)"),
        (Usage(output_bytes=6 * MIB), "it wrote 6 MiB of output (at most 5 MiB)"),
        (Usage(disk_bytes=31 * MIB), "its files took 31 MiB of disk (at most 30 MiB)"),
        (Usage(files=501), "it made 501 files (at most 500)"),
    ],
)
def test_a_bound_is_exceeded_by_more_and_not_by_as_much(usage, words):
    assert violation(usage, SMALL) == words


def test_bounds_grow_with_the_machine(monkeypatch: pytest.MonkeyPatch):
    small = ResourceBounds.of_machine()
    monkeypatch.setattr(os, "cpu_count", lambda: 1024)
    large = ResourceBounds.of_machine()
    assert large.threads > small.threads
    assert large.processes > small.processes
    assert 0 < small.memory_bytes < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert replace(small, threads=large.threads, processes=large.processes) == large


def test_harness_beside_others_takes_its_part_of_the_machine(monkeypatch, tmp_path):
    here = len(os.sched_getaffinity(0))
    assert available_processors(tmp_path) == here  # nothing says that there is a quota
    group = tmp_path / "sys/fs/cgroup"
    (group / "cpu").mkdir(parents=True)
    (group / "cpu.max").write_text("max 100000\n")
    assert available_processors(tmp_path) == here
    (group / "cpu.max").write_text("100000 100000\n")
    assert available_processors(tmp_path) == 1
    (group / "cpu.max").unlink()
    (group / "cpu/cpu.cfs_quota_us").write_text(f"{4 * here * 100_000}\n")
    (group / "cpu/cpu.cfs_period_us").write_text("100000\n")
    assert available_processors(tmp_path) == here
    alone = ResourceBounds.of_machine().memory_bytes
    monkeypatch.setenv(HOST_SHARE, str(8 * here))
    assert available_processors(tmp_path) == 1  # half of one
    assert ResourceBounds.of_machine().memory_bytes <= alone // here


def assert_nothing_left(worker) -> None:
    worker.close()
    assert not worker.folder.exists()
    assert processes_mentioning(str(worker.folder)) == []


def processes_mentioning(folder: str) -> list[int]:
    """The processes that live in a folder or were started with it as HOME, zombies not counted."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            environment = Path(f"/proc/{name}/environ").read_bytes()
            if folder.encode() in environment or os.readlink(f"/proc/{name}/cwd").startswith(folder):
                found.append(int(name))
    return found


def is_running(process: str) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
