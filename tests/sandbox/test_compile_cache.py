"""Workers for torch.compile begin with what no Solution has touched, can leave nothing there for the next, and do without."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from tilegym_db.backends.compile_cache import compile_cache_folder, use_compile_cache
from tilegym_db.catalog import Catalog
from tilegym_db.sandbox.worker import WorkerProcess

pytestmark = pytest.mark.slow
# A header takes half a minute to build, so what needs one is nightly; daily, test_sandbox_refusals.py tries what is written.

BEGIN = """
from pathlib import Path
from tilegym_db.backends.compile_cache import use_own_folders
began_with = 'torch._inductor.codecache' in sys.modules
use_own_folders()
import torch
def built():
    return sorted({path.suffix for path in Path.cwd().rglob('*') if path.suffix in ('.so', '.gch')})
"""


@pytest.fixture(scope="module")
def folder() -> Path:
    """The user's own, made where it is not there yet."""
    found = compile_cache_folder()
    assert found is not None
    return found


@pytest.fixture
def start(peer):
    """Starts workers that run these lines, confined as this machine can."""
    return lambda body="answer()", **options: peer(BEGIN + body, level=None, **options)


def ask(worker: WorkerProcess) -> dict[str, object]:
    return dict(worker.request("call", timeout_s=150).content)


@pytest.mark.nightly
def test_worker_with_a_compile_cache_builds_only_its_own_kernel(start, folder):
    body = "result = torch.compile(lambda x: x * 3 + 1)(torch.ones(8)).tolist()\n"
    found = ask(start(f"{body}answer(began_with=began_with, built=built(), result=result)", compile_cache=folder))
    assert found["began_with"]
    assert found["result"] == [4.0] * 8
    assert found["built"] == [".so"]  # without the compile cache, a precompiled header (.gch) as well


@pytest.mark.nightly
def test_unprepared_header_is_built_in_the_workers_own_folder(start, folder):
    body = (
        "torch._inductor.config.cpp.simdlen = 1\n"  # other flags
        "result = torch.compile(lambda x: x * 3 + 1)(torch.ones(8)).tolist()\nanswer(built=built(), result=result)"
    )
    found = ask(start(body, compile_cache=folder))
    assert (found["built"], found["result"]) == ([".gch", ".so"], [4.0] * 8)


@pytest.mark.nightly
def test_a_worker_cannot_write_to_its_compile_cache(start, folder, offered_level):
    if offered_level < 2:
        pytest.skip("not with this kernel and this user")
    body = (
        f"folder = Path({str(folder)!r})\nseen = sorted(path.name for path in folder.iterdir())\n"
        "try:\n    (folder / 'left').touch()\n    error = ''\n"
        "except OSError as problem:\n    error = type(problem).__name__\nanswer(seen=seen, error=error)"
    )
    found = ask(start(body, compile_cache=folder))
    assert found["error"] in ("PermissionError", "OSError")  # refused by Landlock, or a read-only mount
    assert found["seen"] == sorted(path.name for path in folder.iterdir())


@pytest.mark.nightly
def test_fork_server_has_no_more_threads_for_its_compile_cache(start, folder):
    def threads(worker: WorkerProcess) -> int:
        worker.wait_until_ready()
        return len(os.listdir(f"/proc/{worker.fork_server_pid}/task"))

    assert threads(start(compile_cache=folder)) == threads(start())


@pytest.mark.turn("tilegym_db/sandbox/")  # Inductor without a compiler
@pytest.mark.parametrize("trouble", ["no compiler", pytest.param("spoilt", marks=pytest.mark.nightly)])
def test_failed_compile_cache_leaves_no_files_and_workers_start(trouble, start, folder, tmp_path, monkeypatch):
    if trouble == "spoilt":
        ask(start(compile_cache=folder))  # so that there is one
    else:
        (tmp_path / "programs").mkdir()
        monkeypatch.setenv("PATH", str(tmp_path / "programs"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    own = compile_cache_folder()
    assert own is not None
    if trouble == "spoilt":
        shutil.copytree(folder, own)
        for header in own.rglob("*.gch"):
            header.write_bytes(header.read_bytes()[:1000])
    assert ask(start("answer(began_with=began_with)", compile_cache=own))["began_with"] is False
    assert list(own.parent.iterdir()) == []


@pytest.mark.parametrize("cache", ["a file", "no/such/folder"])
def test_no_writable_cache_folder_means_no_compile_cache(cache, tmp_path, monkeypatch):
    (tmp_path / "a file").touch()
    place = tmp_path / cache if cache == "a file" else Path("/proc") / cache
    monkeypatch.setenv("XDG_CACHE_HOME", str(place))
    assert compile_cache_folder() is None


@pytest.mark.nightly
def test_pytorch_with_other_header_places_gives_no_compile_cache(folder, tmp_path, monkeypatch):
    codecache = type(sys)("codecache")
    monkeypatch.setitem(sys.modules, "torch._inductor.codecache", codecache)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(tempfile, "tempdir", None)  # it leaves its own behind when it fails
    with pytest.raises(RuntimeError, match="keeps no _HEADER_DIR"):
        use_compile_cache(folder, tmp_path)


def test_solutions_with_torch_compile_are_found_by_their_text():
    shipped = Catalog.default().solutions["swiglu_compile"]
    assert shipped.uses_torch_compile

    def told(*lines: bytes) -> bool:
        return replace(shipped, sources={str(number): line for number, line in enumerate(lines)}).uses_torch_compile

    assert told(b"import torch", b"_compiled = torch.compile(_eager, dynamic=False)")
    assert not told(b"import torch", b"torch.sum")
