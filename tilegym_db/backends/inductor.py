"""A head start for ``torch.compile`` on a CPU: what every process must find out before its first kernel, found out once.

Without a cache inductor builds and loads a program for each instruction set that the processor has, precompiles a header and
imports thousands of lines: 20 seconds on two cores, where a kernel takes one. Workers may not share a cache, or one
Solution could leave code for the next; but they may begin with what no Solution has touched. So the process that workers are
forked from (:mod:`tilegym_db.verify.sandbox.nursery`) compiles a function of this package's own first. What that leaves on disk
is kept in the user's cache folder, which workers can read: a second session finds it there.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib
import importlib.metadata
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs

if TYPE_CHECKING:
    import torch

__all__ = ["head_start_folder", "take_head_start", "use_own_folders", "uses_torch_compile"]

_HEADERS = "precompiled_headers"
_INSTRUCTION_SETS_OK = "vec_isa_ok"


def uses_torch_compile(sources: Iterable[bytes]) -> bool:
    """Whether a Solution with these sources compiles through inductor, by what its text says."""
    return any(b"torch.compile" in source for source in sources)


def head_start_folder() -> Path:
    """The folder for this machine's processor, compiler and packages, which other users may read; created here."""
    compiler = shutil.which(os.environ.get("CXX", "g++")) or ""
    built = os.stat(compiler).st_mtime_ns if compiler else 0
    described = (importlib.metadata.version("torch"), sys.version, platform.machine(), _flags(), compiler, built)
    key = hashlib.sha256(repr(described).encode()).hexdigest()[:16]
    folder = Path(platformdirs.user_cache_dir("tilegym-db")) / f"inductor-{key}"
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)
    return folder


def _flags() -> str:
    """What the processor can do, by the kernel's word; empty where the kernel says it otherwise."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def take_head_start(folder: Path) -> None:
    """Import inductor and compile a first function, with the folder for everything that this leaves.

    For a trusted process that is forked later, so no thread may be left, and that has not imported inductor. Raises what
    ``torch.compile`` raises.
    """
    os.umask(0o022)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        known = (folder / _INSTRUCTION_SETS_OK).exists()
        os.environ |= {
            "USER": "worker",
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        } | ({"TORCHINDUCTOR_VEC_ISA_OK": "1"} if known else {})
        tempfile.tempdir = str(folder)  # where inductor has its precompiled headers, whatever cache folder it is told

        import torch

        with contextlib.suppress(ImportError):
            importlib.import_module("tqdm").tqdm.monitor_interval = 0  # inductor's progress bar would start a thread
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # a pool of threads would not survive a fork
        # From the cache of whole graphs it would come without most of what is to be done here.
        first = torch.compile(_normalise, fullgraph=True, options={"fx_graph_cache": False})
        first(torch.ones(64, 64, dtype=torch.bfloat16))
        torch.set_num_threads(threads)
        if not known and _all_instruction_sets_work():
            (folder / _INSTRUCTION_SETS_OK).touch()
    tempfile.tempdir = None


def _normalise(x: torch.Tensor) -> torch.Tensor:
    """Something with a reduction, a product and two dtypes in it, as most operators have."""
    wide = x.float()
    return (wide * wide.pow(2).mean(-1, keepdim=True).rsqrt()).to(x.dtype)


def _all_instruction_sets_work() -> bool:
    """Whether the compiler can build for every set that the processor has: what TORCHINDUCTOR_VEC_ISA_OK claims."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return False
    from torch._inductor import cpu_vec_isa

    present = cpu_vec_isa.x86_isa_checker()
    return all(isa for isa in cpu_vec_isa.supported_vec_isa_list if all(flag in present for flag in str(isa).split()))


def use_own_folders() -> None:
    """In a fork of a process with a head start: what this process precompiles itself goes to its own temporary files."""
    codecache = sys.modules.get("torch._inductor.codecache")
    if codecache is not None and hasattr(codecache, "_HEADER_DIR"):
        headers = Path(tempfile.gettempdir()) / _HEADERS
        codecache._HEADER_DIR, codecache._HEADER_LOCK_DIR = str(headers), str(headers / "locks")  # type: ignore[attr-defined]
