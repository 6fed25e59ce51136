"""Where compute-sanitizer and Nsight Compute lie, and how to get the one that is missing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from tilegym_db.backends.cuda_tools import DEFAULT_TOOLKIT, TOOLKIT_VARIABLES, package_folders
from tilegym_db.errors import ToolchainError

__all__ = ["find_program"]

NSIGHT_FOLDER = Path("/opt/nvidia/nsight-compute")
FIXES = {
    "compute-sanitizer": "pip install nvidia-cuda-sanitizer-api, or install a CUDA toolkit, which has it in bin/",
    "ncu": "install a CUDA toolkit or Nsight Compute (NVIDIA's package cuda-nsight-compute), which has it in bin/",
}


def _installed(name: str) -> Iterator[Path]:
    """Yield where installers put a program: in the default toolkit, in Nsight's folder, in a Python package."""
    yield DEFAULT_TOOLKIT / "bin" / name
    if name == "ncu":
        yield from sorted(NSIGHT_FOLDER.glob("*/ncu"), reverse=True)
    for folder in package_folders():
        yield from sorted(folder.glob(f"cu[0-9]*/bin/{name}"), reverse=True)


def find_program(
    name: str,
    environ: Mapping[str, str] | None = None,
    installed: Callable[[str], Iterable[Path]] = _installed,
) -> Path:
    """Return a program: of a CUDA toolkit that the user names, on ``PATH``, else the first one that is ``installed``.

    Raises:
        ToolchainError: it is nowhere; says how to get it.
    """
    environ = os.environ if environ is None else environ
    for path in (*_named(name, environ), *installed(name)):
        if path.is_file() and os.access(path, os.X_OK):
            return path
    raise ToolchainError(f"{name} is not installed, or not on PATH. Fix: {FIXES[name]}.", code="program_absent")


def _named(name: str, environ: Mapping[str, str]) -> Iterator[Path]:
    yield from (Path(environ[variable]) / "bin" / name for variable in TOOLKIT_VARIABLES if environ.get(variable))
    on_path = shutil.which(name, path=environ.get("PATH", ""))
    if on_path:
        yield Path(on_path)
