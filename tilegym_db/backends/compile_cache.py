"""A compile cache for ``torch.compile`` on a CPU, which holds results that every process needs before its first kernel.

Without a cache inductor builds and loads a program for each instruction set that the processor has, precompiles a header and
imports thousands of lines: 20 seconds on two cores, where a kernel takes one. Workers may not share a cache, or one
Solution could leave code for the next; but they may begin with what no Solution has touched. So the process that workers are
forked from (:mod:`tilegym_db.sandbox.fork_server`) compiles a function of this package's own first. The precompiled header
and the answer about instruction sets are kept in the user's cache folder, which workers can read; they appear there whole, by
renaming, when ``python -m tilegym_db.backends.compile_cache FOLDER`` has made them.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs

from tilegym_db.paths import scratch_folder

if TYPE_CHECKING:
    import torch

BUILD_TIMEOUT_S = 120.0
_HEADERS = "precompiled_headers"
_INSTRUCTION_SETS_OK = "vec_isa_ok"
_RESULT, _WORK = "result", "work"


def compile_cache_folder() -> Path | None:
    """Return the folder for this machine's processor, compiler and packages, which may not exist yet.

    Return None if the user has no writable cache folder; then workers start without a cache, which takes longer.
    """
    parent = Path(platformdirs.user_cache_dir("tilegym-db"))
    try:
        parent.mkdir(parents=True, exist_ok=True)
        if parent.stat().st_uid != os.geteuid() or not os.access(parent, os.W_OK | os.X_OK):
            return None
    except OSError:
        return None
    return parent / f"inductor-{_fingerprint()}"


@functools.cache  # asked for at the start of every worker
def _fingerprint() -> str:
    compiler = shutil.which("g++") or ""
    built = os.stat(compiler).st_mtime_ns if compiler else 0
    spec = importlib.util.find_spec("torch")
    packages = importlib.metadata.version("torch"), spec.origin if spec else "", sys.version
    return hashlib.sha256(repr((packages, platform.machine(), _flags(), compiler, built)).encode()).hexdigest()[:16]


def _flags() -> str:
    """Return the processor's features as the kernel lists them; empty if the kernel uses another format."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def use_compile_cache(folder: Path, private: Path) -> None:
    """Import inductor and compile a first function with the contents of the folder; make the folder if it is missing.

    For a trusted process that is forked later, so that no thread may be left, and that has not imported inductor. Raises what
    ``torch.compile`` raises, and then the process is not fit to be forked.
    """
    if not folder.is_dir():
        with _one_at_a_time(folder.parent):  # several harnesses of a host begin at once
            if not folder.is_dir():
                _make(folder)
    headers = folder / _HEADERS
    known = sorted(headers.iterdir())
    os.environ |= _environment(private)
    if (folder / _INSTRUCTION_SETS_OK).exists():
        os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "1"
    tempfile.tempdir = str(private)
    _keep_headers_in(headers, private / "locks")
    _compile_first()
    tempfile.tempdir = None
    if sorted(headers.iterdir()) != known:
        raise RuntimeError("inductor wanted another header than the one that was made for it")


def forget_compile_cache(folder: Path) -> None:
    """Remove a cache that did not work, so that the next session makes it again."""
    with contextlib.suppress(OSError), scratch_folder(folder.parent) as aside:
        folder.rename(aside / folder.name)


def use_own_folders() -> None:
    """Let a fork of a process with a compile cache precompile headers into its own temporary files."""
    if "torch._inductor.codecache" in sys.modules:
        own = Path(tempfile.gettempdir()) / _HEADERS
        _keep_headers_in(own, own / "locks")


def _keep_headers_in(headers: Path, locks: Path) -> None:
    """Set the folders of precompiled headers and locks, which inductor sets when it is imported."""
    codecache = importlib.import_module("torch._inductor.codecache")
    for name, value in (("_HEADER_DIR", headers), ("_HEADER_LOCK_DIR", locks)):
        if not hasattr(codecache, name):
            raise RuntimeError(f"this PyTorch keeps no {name}")
        setattr(codecache, name, str(value))


def _environment(private: Path) -> dict[str, str]:
    return {
        "TORCHINDUCTOR_CACHE_DIR": str(private / "cache"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }


def _compile_first() -> None:
    import torch

    with contextlib.suppress(ImportError):
        importlib.import_module("tqdm").tqdm.monitor_interval = 0  # inductor's progress bar would start a thread
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a pool of threads would not survive a fork
    # The cache of whole graphs would skip most of the work that is to be done here.
    first = torch.compile(_normalise, fullgraph=True, options={"fx_graph_cache": False})
    first(torch.ones(64, 64, dtype=torch.bfloat16))
    torch.set_num_threads(threads)


def _normalise(x: torch.Tensor) -> torch.Tensor:
    """Normalise rows: a reduction, a product and two dtypes, as most operators have."""
    wide = x.float()
    return (wide * wide.pow(2).mean(-1, keepdim=True).rsqrt()).to(x.dtype)


@contextlib.contextmanager
def _one_at_a_time(parent: Path) -> Iterator[None]:
    """Lock the folder itself, so that no lock file remains. If its file system has no locks, processes repeat the same work."""
    held = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


# -- making it ---------------------------------------------------------------------------------------------------------------


def _make(folder: Path) -> None:
    """Start a separate process that makes the folder; the folder appears complete or not at all, and the first process wins."""
    with scratch_folder(folder.parent) as part:
        maker = subprocess.Popen(
            [sys.executable, "-P", "-m", "tilegym_db.backends.compile_cache", str(part)],
            stdin=subprocess.DEVNULL,
            env=os.environ | _environment(part / _WORK),
            start_new_session=True,
        )
        try:
            failed = maker.wait(BUILD_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(maker.pid, signal.SIGKILL)  # with the compilers that it started
            maker.wait()
            raise
        if failed:
            raise RuntimeError(f"inductor made no kernel (exit status {failed})")
        with contextlib.suppress(OSError):  # another process was sooner
            (part / _RESULT).rename(folder)


def main(part: Path) -> None:
    """Make the files to keep in ``part/result``."""
    os.umask(0o022)
    work, headers = part / _WORK, part / _RESULT / _HEADERS
    work.mkdir()
    headers.mkdir(parents=True)
    tempfile.tempdir = str(work)
    _keep_headers_in(headers, work / "locks")
    _compile_first()
    if _all_instruction_sets_work():
        (part / _RESULT / _INSTRUCTION_SETS_OK).touch()


def _all_instruction_sets_work() -> bool:
    """Return True if the compiler can build for all instruction sets of the processor, as TORCHINDUCTOR_VEC_ISA_OK claims."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return False
    from torch._inductor import cpu_vec_isa

    present = cpu_vec_isa.x86_isa_checker()
    return all(isa for isa in cpu_vec_isa.supported_vec_isa_list if all(flag in present for flag in str(isa).split()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
