"""The environment of workers: what they get of the user's, what all of a device have in common, and their own folders."""

from __future__ import annotations

import os
from pathlib import Path

from tilegym_db.confinement.bounds import available_processors

__all__ = ["common_environment", "own_environment", "processors"]

# What a compiler or the CUDA driver needs to find itself; nothing else of the user's environment reaches a Solution.
KEPT_VARIABLES = (
    "PATH",
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
    "CUDA_HOME",
    "CUDA_PATH",
    "CUDA_VISIBLE_DEVICES",
    "NVIDIA_VISIBLE_DEVICES",
    "VIRTUAL_ENV",
    "LANG",
    "LC_ALL",
)


def common_environment(device: str) -> dict[str, str]:
    """What the environments of all workers for a device have in common."""
    environment = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    package_root = str(Path(__file__).resolve().parents[3])
    paths = [package_root, *environment.get("PYTHONPATH", "").split(os.pathsep)]
    environment |= {
        "PYTHONPATH": os.pathsep.join(path for path in dict.fromkeys(paths) if path),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": str(processors()),
    }
    if device == "cpu":
        # Threads that wait for each other sleep rather than spin, or their processor time would say nothing.
        environment["OMP_WAIT_POLICY"] = "PASSIVE"
        # The C library keeps what is freed. By itself it gives memory back to the system, or not, depending on what was freed
        # before, and then a call takes four times as long for the pages that it has to be given again.
        environment["MALLOC_MMAP_THRESHOLD_"] = str(32 << 20)
        environment["MALLOC_TRIM_THRESHOLD_"] = str(1 << 40)
    return environment


def processors() -> int:
    """How many processors the maths of one worker may use at once: OMP_NUM_THREADS, or all that this process may use."""
    available = available_processors()
    asked_for = os.environ.get("OMP_NUM_THREADS", "")
    return min(int(asked_for), available) if asked_for.isdigit() and int(asked_for) else available


def own_environment(folder: Path) -> dict[str, str]:
    """The variables that name a worker's own folders, all below its scratch folder."""
    caches = folder / "cache"
    return {
        "HOME": str(folder),
        "USER": "worker",  # a user of its own has no entry in the system's list, where libraries would look it up
        "TMPDIR": str(folder),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "TILELANG_CACHE_DIR": str(caches / "tilelang"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "CUDA_CACHE_PATH": str(caches / "cuda"),
        "CUDA_TILE_CACHE_DIR": str(caches / "cutile"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # its pool of compiling processes finds no GPU inside the sandbox
    }
