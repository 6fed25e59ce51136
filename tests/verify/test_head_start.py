"""Workers for torch.compile begin with what no Solution has touched, and can leave nothing there for the next."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tilegym_db.backends.inductor import head_start_folder, uses_torch_compile
from tilegym_db.verify.sandbox.process import WorkerProcess


@pytest.fixture
def start(tmp_path):
    """Starts workers; all of them end with the test."""
    started: list[WorkerProcess] = []

    def start(name: str, **arguments) -> WorkerProcess:
        started.append(WorkerProcess("cpu", tmp_path / name, **arguments))
        return started[-1]

    yield start
    for worker in started:
        worker.close()


def threads_of_nursery(worker: WorkerProcess) -> int:
    worker.wait_until_ready()
    return len(os.listdir(f"/proc/{worker._keeper.nursery}/task"))


def test_a_worker_with_a_head_start_finds_inductor_ready_and_builds_only_its_own_kernel(start, tmp_path):
    script = tmp_path / "compiles.py"
    script.write_text(
        "import sys\nfrom pathlib import Path\nfrom tilegym_db.backends.inductor import use_own_folders\n"
        "from tilegym_db.verify.sandbox.protocol import Channel\n"
        "imported = 'torch._inductor.codecache' in sys.modules\nuse_own_folders()\nimport torch\n"
        "channel = Channel(int(sys.argv[1]))\nchannel.send({'id': 0, 'ok': True})\nrequest = channel.receive()\n"
        "result = torch.compile(lambda x: x * 3 + 1)(torch.ones(8)).tolist()\n"
        "built = sorted({path.suffix for path in Path.cwd().rglob('*') if path.suffix in ('.so', '.gch')})\n"
        "channel.send({'id': request['id'], 'ok': True, 'imported': imported, 'built': built, 'result': result})\n"
    )
    answer = start("worker", script=script, head_start=head_start_folder()).request("call", timeout_s=120).content
    assert answer["imported"]
    assert answer["result"] == [4.0] * 8
    assert answer["built"] == [".so"]  # without the head start, a precompiled header (.gch) as well


def test_a_worker_cannot_write_to_its_head_start(start, tmp_path, offered_level):
    if offered_level < 2:
        pytest.skip("not with this kernel and this user")
    folder = head_start_folder()
    script = tmp_path / "writes.py"
    script.write_text(
        "import sys\nfrom pathlib import Path\nfrom tilegym_db.verify.sandbox.protocol import Channel\n"
        "channel = Channel(int(sys.argv[1]))\nchannel.send({'id': 0, 'ok': True})\nrequest = channel.receive()\n"
        f"folder = Path({str(folder)!r})\nseen = sorted(path.name for path in folder.iterdir())\n"
        "try:\n    (folder / 'left').touch()\n    error = ''\n"
        "except OSError as problem:\n    error = type(problem).__name__\n"
        "channel.send({'id': request['id'], 'ok': True, 'seen': seen, 'error': error})\n"
    )
    answer = start("worker", script=script, head_start=folder).request("call", timeout_s=120).content
    assert answer["error"] in ("PermissionError", "OSError")  # refused by Landlock, or a read-only mount
    assert answer["seen"] == sorted(path.name for path in folder.iterdir())


def test_a_process_that_workers_are_forked_from_has_no_more_threads_for_its_head_start(start):
    assert threads_of_nursery(start("with", head_start=head_start_folder())) == threads_of_nursery(start("without"))


def test_without_a_compiler_a_worker_starts_all_the_same(start, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    worker = start("worker", head_start=head_start_folder())
    worker.wait_until_ready()
    assert worker.alive


def test_sources_that_use_torch_compile_are_told_by_their_text():
    assert uses_torch_compile([b"import torch", b"_compiled = torch.compile(_eager, dynamic=False)"])
    assert not uses_torch_compile([b"import torch", b"torch.sum"])


def test_the_folder_of_a_head_start_is_the_users_and_readable_by_others(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = head_start_folder()
    assert folder.is_relative_to(tmp_path / "cache")
    assert Path(folder).stat().st_mode & 0o777 == 0o755
