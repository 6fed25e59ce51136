"""What a worker must not be able to do to the machine, tried for real at every level that confines.

Nothing here would do harm if it were allowed: signals have number 0, files of the kernel are opened and not written.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tilegym_db.paths import shipped_root
from tilegym_db.sandbox.confine import PACKAGE, FilterOptions, build_filter
from tilegym_db.sandbox.processes import NUMBERS, PROCESSORS, Confinement, this_processor
from tilegym_db.sandbox.worker import WorkerProcess

# Evaluates expressions one by one and answers with what each raised, or with what it gave.
EVALUATOR = """
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    number = request["numbers"][name]
    wide = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    if libc.syscall(ctypes.c_long(number), *wide) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
def read(path):
    with open(path, "rb") as file:
        return repr(file.read(64))
while True:
    try:
        answer(allowed=repr(eval(request["expression"])))
    except OSError as error:
        answer(refused=os.strerror(error.errno))
    request = hear()
"""


CONFINE_ONESELF = """
import os, sys
sys.path.insert(0, sys.argv[1])
from tilegym_db.sandbox.processes import ResourceBounds
from tilegym_db.sandbox.confine import confine
from tilegym_db.sandbox.processes import Confinement, WorkerSpec
spec = WorkerSpec(Confinement(2), ResourceBounds.of_machine(), "cpu", sys.argv[2], 0)
print(confine(spec, os.environ, None)["level"], os.getuid())
try:
    open("/etc/hostname")
except PermissionError:
    print("refused")
"""


@dataclass
class Attempt:
    """One worker of a level that evaluates expressions."""

    worker: WorkerProcess
    level: int
    folder: Path

    def __call__(self, expression: str) -> str | None:
        """The error's text where the expression is refused, else None."""
        content = self.answer(expression)
        assert ("refused" in content) != ("allowed" in content)
        return content.get("refused")

    def value(self, expression: str) -> str:
        """What the expression gives, as text."""
        return str(self.answer(expression)["allowed"])

    def answer(self, expression: str) -> Mapping[str, Any]:
        for name, value in self.places.items():
            expression = expression.replace(name, value)
        numbers = {name: columns[this_processor().column] for name, columns in NUMBERS.items()}
        return self.worker.request("call", timeout_s=20, expression=expression, numbers=numbers).content

    @property
    def places(self) -> dict[str, str]:
        return {
            "{harness}": str(os.getpid()),
            "{thread}": str(threading.get_native_id()),
            "{readable}": str(self.folder / "readable"),
            "{secret}": str(self.folder / "secret"),
            "{outside}": str(self.folder),
            "{checkout}": str(shipped_root()),
        }


# Each level, and level 3 for a Solution that only its owner can read: there the worker's user owns files that are not its own.
CONFINEMENTS = [Confinement(2), Confinement(3), Confinement(3, own_user=False)]


@pytest.fixture(scope="module", params=CONFINEMENTS, ids=["level2", "level3", "level3-same-user"])
def attempt(
    request: pytest.FixtureRequest,
    offered_level: int,
    tmp_path_factory: pytest.TempPathFactory,
    write_peer: Callable[[Path, str], Path],
) -> Iterator[Attempt]:
    """Evaluate an expression in one worker of each level."""
    confinement: Confinement = request.param
    if confinement.level > offered_level:
        pytest.skip("not with this kernel and this user")
    folder = tmp_path_factory.mktemp("refusals")
    readable = folder / "readable"
    readable.mkdir(mode=0o755)
    (readable / "kernel.py").write_text("pass\n")
    (folder / "secret").write_text("of the harness")
    script = write_peer(folder / "peer.py", EVALUATOR)
    worker = WorkerProcess("cpu", folder / "worker", level=confinement, script=script, readable=[readable])
    yield Attempt(worker, confinement.level, folder)
    worker.close()


@pytest.mark.parametrize(
    "expression",
    [
        "read('{readable}/kernel.py')",
        "open('file', 'w').write('x')",
        "os.mkdir('folder') or os.rename('file', 'folder/file') or os.symlink('folder', 'link')",
        "os.chmod('folder', 0o700)",
        "read('/proc/self/status')",
        "read('/proc/meminfo')",
        "read('/sys/devices/system/cpu/online')",
        "read('/usr/bin/env')",
        "open('/dev/null', 'w').write('x')",
        "read(ctypes.__file__)",
        "open(f'/proc/self/task/{os.getpid()}/comm', 'w').write('name')",
        "socket.socketpair()",
        "os.pipe()",
        "os.kill(os.getpid(), 0)",
        "__import__('subprocess').run(['/bin/sh', '-c', 'exit 0'], check=True)",
        "__import__('threading').Thread(target=len, args=((),)).start()",
        "os.memfd_create('name')",
        "__import__('multiprocessing').Pipe()",
    ],
)
def test_what_solutions_and_compilers_need_is_allowed(attempt, expression):
    assert attempt(expression) is None


@pytest.mark.parametrize(
    "expression",
    [
        # reading
        "read('/etc/shadow')",
        "read('{secret}')",
        "os.listdir('{outside}')",
        "os.listdir('/')",
        "os.listdir('/root')",
        "os.listdir('/home')",
        "os.listdir('{checkout}/definitions')",
        "os.listdir('{checkout}/traces')",
        "read('{checkout}/pyproject.toml')",
        "read('/proc/{harness}/environ')",
        "read('/proc/{harness}/mem')",
        "read('/proc/{harness}/maps')",
        "os.readlink('/proc/{harness}/fd/0')",
        "read('/proc/{harness}/fd/0')",
        "os.listdir('/proc/{harness}/root/')",
        "os.readlink('/proc/{harness}/cwd')",
        "read('/proc/1/environ')",
        "read('/proc/kcore')",
        "read('/dev/kmsg')",
        "os.open('/dev/mem', os.O_RDONLY)",
        # writing
        "open('{secret}', 'a')",
        "os.truncate('{secret}', 0)",
        "os.open('{readable}/kernel.py', os.O_RDONLY | os.O_TRUNC)",
        "os.truncate('{readable}/kernel.py', 0)",
        "os.unlink('{readable}/kernel.py')",
        "os.rename('file', '{outside}/file')",
        "os.link('{readable}/kernel.py', 'linked')",
        "open('{outside}/new', 'w')",
        "open('/tmp/tilegym-db-test', 'w')",
        "open('/usr/lib/new', 'w')",
        "open('/var/tmp/new', 'w')",
        "os.open('/proc/sys/kernel/core_pattern', os.O_WRONLY)",
        "os.open('/proc/sysrq-trigger', os.O_WRONLY)",
        "os.open('/proc/sys/vm/drop_caches', os.O_WRONLY)",
        "os.open('/proc/{harness}/oom_score_adj', os.O_WRONLY)",
        "os.open('/sys/power/state', os.O_WRONLY)",
        "os.mknod('device', 0o20600, os.makedev(1, 3))",
        "os.mkfifo('{outside}/pipe')",
        # network
        "socket.socket(socket.AF_INET)",
        "socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)",
        "socket.socket(socket.AF_UNIX)",
        "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
        "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
        "socket.socket(socket.AF_VSOCK)",
        "socket.socketpair()[0].connect('/run/any')",
        "socket.socketpair()[0].bind('here')",
        # other processes
        "os.kill({harness}, 0)",
        "os.kill(-1, 0)",
        "os.kill(1, 0)",
        "os.kill(os.getppid(), 0)",
        "call('tgkill', {harness}, {thread}, 0)",
        "call('tkill', {thread}, 0)",
        "signal.pidfd_send_signal(os.pidfd_open({harness}), 0)",
        "call('ptrace', 16, {harness}, 0, 0)",
        "call('process_vm_readv', {harness}, 0, 0, 0, 0, 0)",
        "call('process_vm_writev', {harness}, 0, 0, 0, 0, 0)",
        "call('kcmp', {harness}, os.getpid(), 0, 0, 0)",
        "call('pidfd_getfd', 0, 0, 0)",
        "__import__('resource').prlimit({harness}, 7)",
        "os.sched_setaffinity({harness}, {0})",
        "os.setpriority(os.PRIO_PROCESS, {harness}, 5)",
        # the kernel
        "call('unshare', 0x10000000)",
        "call('clone', 0x10000000 | 17, 0, 0, 0, 0)",
        "call('clone3', 0, 0)",
        "call('setns', 0, 0)",
        "call('mount', 0, 0, 0, 0, 0)",
        "call('umount2', 0, 0)",
        "call('pivot_root', 0, 0)",
        "os.chroot('.')",
        "call('open_tree', -100, 0, 0)",
        "call('bpf', 0, 0, 0)",
        "call('perf_event_open', 0, 0, 0, 0, 0)",
        "call('userfaultfd', 1)",
        "call('io_uring_setup', 1, 0)",
        "call('keyctl', 0, -3, 0)",
        "call('add_key', 0, 0, 0, 0, 0)",
        "call('init_module', 0, 0, 0)",
        "call('kexec_load', 0, 0, 0, 0)",
        "call('swapon', 0, 0)",
        "call('open_by_handle_at', 0, 0, 0)",
        "call('shmget', 0, 4096, 0o1600)",
        "call('mq_open', 0, 0, 0, 0)",
        "call('acct', 0)",
        "call('syslog', 10, 0, 0)",
        "time.clock_settime(time.CLOCK_REALTIME, time.time())",
        "socket.sethostname('name')",
        "os.setxattr('file', 'user.name', b'x') if False else os.setxattr('{readable}/kernel.py', 'user.name', b'x')",
    ],
)
def test_what_reaches_beyond_the_worker_is_refused(attempt, expression):
    refusal = attempt(expression)
    # An error of the arguments, which are nonsense on purpose, would mean that the call itself got through.
    assert refusal in {
        "Operation not permitted",
        "Permission denied",
        "Read-only file system",
        "Function not implemented",
        "Operation not supported",
        *("No such file or directory", "No such process", "Invalid cross-device link")[
            : 3 if attempt.level == 3 else 1
        ],
        *(["Invalid cross-device link"] if "os.link" in expression or "os.rename" in expression else []),
    }


@pytest.mark.parametrize("path", ["{readable}/kernel.py", "{secret}", "{outside}"])
@pytest.mark.parametrize("change", ["os.chmod(path, 0o777)", "os.utime(path, (0, 0))", "os.chown(path, 12345, 12345)"])
def test_attributes_of_files_outside_stay_as_they_are(attempt, change, path):
    path = path.format(readable=attempt.folder / "readable", secret=attempt.folder / "secret", outside=attempt.folder)
    before = os.stat(path)
    attempt(change.replace("path", repr(path)))
    after = os.stat(path)
    assert (before.st_mode, before.st_uid, before.st_mtime) == (after.st_mode, after.st_uid, after.st_mtime)


def test_no_capability_is_left_nor_can_be_had_again(attempt):
    lines = "[line.split()[1] for line in {} if line.startswith(('Cap', 'NoNew', 'Seccomp:'))]"
    child = "__import__('subprocess').run(['/bin/cat', '/proc/self/status'], capture_output=True, text=True).stdout"
    nothing = repr(["0" * 16] * 5 + ["1", "2"])
    assert attempt.value(lines.format("open('/proc/self/status')")) == nothing
    assert attempt.value(lines.format(f"{child}.splitlines()")) == nothing


def test_no_core_is_dumped_and_files_have_a_limit(attempt):
    core, size, files = eval(attempt.value("[__import__('resource').getrlimit(number)[1] for number in (4, 1, 7)]"))
    assert core == 0
    assert 0 < size <= 8 << 30
    assert 0 < files <= 4096


def test_the_store_is_not_to_be_read(attempt, tmp_path, write_peer, home):
    home.mkdir()
    (home / "tilegym.duckdb").write_text("measurements")
    # Even if a folder around it is: here, one on PATH.
    tmp_path.chmod(0o755)
    script = write_peer(tmp_path / "peer.py", EVALUATOR)
    environment = {"PATH": f"{os.environ['PATH']}:{tmp_path}"}
    with closing(WorkerProcess("cpu", tmp_path / "worker", environment, level=attempt.level, script=script)) as worker:
        inside = Attempt(worker, attempt.level, attempt.folder)
        (tmp_path / "tool").write_text("a compiler")
        assert inside(f"read('{tmp_path}/peer.py')") is None
        assert inside(f"read('{home}/tilegym.duckdb')") == "Permission denied"


def test_at_level_3_there_are_no_other_processes_and_no_network(peer, offered_level):
    if offered_level < 3:
        pytest.skip("no level 3 here")
    body = (
        "answer(processes=[name for name in os.listdir('/proc') if name.isdigit()],"
        " network=open('/proc/net/dev').read(), user=os.getuid(), groups=os.getgroups())"
    )
    worker = peer(body, level=3)
    content = worker.request("call", timeout_s=20).content
    assert content["processes"] == ["1", "2"]
    assert [line.split(":")[0].strip() for line in content["network"].splitlines()[2:]] == ["lo"]
    assert content["user"] == worker.runs_as != 0
    assert content["groups"] == []


def test_a_system_call_of_another_convention_ends_the_process(peer, confining_level):
    if os.uname().machine != "x86_64":
        pytest.skip("only x86_64 has more than one")
    body = (
        "libc = ctypes.CDLL(None)\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    libc.syscall(0x40000000 | 39)\n"  # getpid of the x32 convention
        "    os._exit(0)\n"
        "answer(status=os.waitpid(child, 0)[1])"
    )
    assert peer(body, level=confining_level).request("call", timeout_s=20).content["status"] & 0x7F == 31  # SIGSYS


@pytest.mark.parametrize("machine", PROCESSORS.values(), ids=PROCESSORS.keys())
def test_a_filter_jumps_only_forward_and_inside_itself(machine):
    program = build_filter(machine, FilterOptions(protected=(-1, 4711)))
    assert len(program) < 4096
    for position, (operation, yes, no, _) in enumerate(program):
        assert 0 <= yes < 256
        assert 0 <= no < 256
        assert position + 1 + max(yes, no) < len(program) or operation == 0x06


def test_the_numbers_of_this_processor_are_those_of_its_headers():
    column = this_processor().column
    source = "".join(f"#ifdef __NR_{name}\n{name} __NR_{name}\n#endif\n" for name in NUMBERS)
    text = f"#include <asm/unistd.h>\n{source}"
    found = subprocess.run(["gcc", "-E", "-P", "-"], input=text, capture_output=True, text=True, check=True).stdout
    known = dict(line.split() for line in found.splitlines() if line and not line.startswith("#"))
    headers = {name: int(number) for name, number in known.items() if number.isdigit()}
    assert len(headers) > 80
    assert headers == {name: NUMBERS[name][column] for name in headers}


def test_level_2_takes_no_privilege(offered_level):
    """Apply the filter as the unprivileged user, by an interpreter that any user can run."""
    python = Path("/usr/bin/python3")
    if os.geteuid() != 0 or offered_level < 2 or not python.exists():
        pytest.skip("needs root, to become nobody, and an interpreter of the system")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        shutil.copytree(PACKAGE, folder / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
        (folder / "scratch").mkdir(mode=0o777)
        command = [python, "-c", CONFINE_ONESELF, folder, folder / "scratch"]
        done = subprocess.run(
            command, capture_output=True, text=True, user=65534, group=65534, extra_groups=[], cwd="/"
        )
    assert done.stdout.split() == ["2", "65534", "refused"], done.stderr
