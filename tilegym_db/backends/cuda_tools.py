"""Where nvcc, tileiras and their companions lie: a CUDA toolkit, ``PATH``, or the ``nvidia`` Python packages.

Read-only: looks at the file system and at a mapping of environment variables, and returns what it found.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "Environment",
    "EnvironmentChanges",
    "Findings",
    "Nvcc",
    "cutile_environment",
    "find_nvcc",
    "find_tileiras",
    "inspect_nvcc",
    "inspect_tileiras",
    "inspect_triton",
    "nothing_to_change",
    "nothing_to_find",
    "package_folders",
    "tilelang_environment",
]

Environment = Mapping[str, str]
EnvironmentChanges = dict[str, str | None]
"""Variable -> its new value, or None to remove it."""

TOOLKIT_VARIABLES = ("CUDA_HOME", "CUDA_PATH")
DEFAULT_TOOLKIT = Path("/usr/local/cuda")
INSTALL_NVCC = "pip install 'tilegym-db[tilelang]'"
ANY_MINOR_RELEASE = "-DCCCL_DISABLE_CTK_COMPATIBILITY_CHECK"
"""PyTorch pins the runtime's headers (13.2 for 2.15), cuTile needs a newer compiler (13.4), and packages share one folder.
Releases of one major version work together, but CCCL's headers refuse any that are not the same unless told so."""


@dataclass(frozen=True)
class Findings:
    """What was found (``detail``), or what is missing (``problem``) and how to get it (``fix``)."""

    detail: str = ""
    problem: str = ""
    fix: str = ""


@dataclass(frozen=True)
class Nvcc:
    """An nvcc, how it was found, and the extra header folder it needs."""

    path: Path
    source: str
    """``toolkit`` (named by CUDA_HOME or CUDA_PATH), ``path``, ``default`` or ``packages``."""
    headers: Path | None = None
    """The include folder with the CCCL headers (``nv/``, ``cccl/``), where that is not nvcc's own."""

    @property
    def root(self) -> Path:
        """The toolkit's root, which holds ``bin/nvcc``."""
        return self.path.parent.parent


def nothing_to_find(environ: Environment) -> Findings:
    """For a language that needs no native tool beyond its package."""
    return Findings()


def nothing_to_change(environ: Environment) -> EnvironmentChanges:
    """For a language that finds its tools by itself."""
    return {}


# -- Triton ----------------------------------------------------------------------------------------------------------


def inspect_triton(environ: Environment) -> Findings:
    """Triton brings its own ptxas; a variable may point it elsewhere."""
    chosen = environ.get("TRITON_PTXAS_PATH")
    if chosen and not _is_executable(Path(chosen)):
        return Findings(problem=f"TRITON_PTXAS_PATH names {chosen}, which is no program", fix="unset TRITON_PTXAS_PATH")
    return Findings(f"ptxas: {chosen or 'the one in the package'}")


# -- TileLang --------------------------------------------------------------------------------------------------------


def find_nvcc(environ: Environment) -> Nvcc | None:
    """The nvcc for TileLang: a toolkit that the user names, ``PATH``, the default toolkit, then the Python packages."""
    packaged = _packaged_nvcc()
    for variable in TOOLKIT_VARIABLES:
        if environ.get(variable) and _is_executable(path := Path(environ[variable]) / "bin" / "nvcc"):
            return packaged if packaged is not None and path == packaged.path else Nvcc(path, "toolkit")
    on_path = shutil.which("nvcc", path=environ.get("PATH", ""))
    if on_path:
        return Nvcc(Path(on_path), "path")
    if _is_executable(path := DEFAULT_TOOLKIT / "bin" / "nvcc"):
        return Nvcc(path, "default")
    return packaged


def _packaged_nvcc() -> Nvcc | None:
    path = _in_packages("bin/nvcc")
    if path is None or not _is_executable(path):
        return None
    headers = _in_packages("include/nv/target")
    own = path.parent.parent / "include"
    outside = headers.parent.parent if headers is not None and headers.parent.parent != own else None
    return Nvcc(path, "packages", outside)


def inspect_nvcc(environ: Environment) -> Findings:
    """TileLang emits CUDA C++: it needs nvcc with the CCCL headers, and a C++ compiler for nvcc to drive."""
    nvcc = find_nvcc(environ)
    if nvcc is None:
        problem = "no nvcc: neither a CUDA toolkit nor the Python package nvidia-cuda-nvcc"
        return Findings(problem=problem, fix=INSTALL_NVCC)
    if nvcc.source == "packages" and _in_packages("include/nv/target") is None:
        problem = f"{nvcc.path} lacks its C++ headers (nv/target, of the Python package nvidia-cuda-cccl)"
        return Findings(problem=problem, fix=INSTALL_NVCC)
    search = environ.get("PATH", "")
    if not any(shutil.which(name, path=search) for name in ("g++", "c++", "clang++")):
        return Findings(problem="nvcc needs a C++ compiler and there is none on PATH", fix="apt install g++")
    return Findings(f"nvcc: {nvcc.path}")


def tilelang_environment(environ: Environment) -> EnvironmentChanges:
    """Make TileLang use what :func:`find_nvcc` found.

    TileLang takes ``CUDA_HOME`` on trust, even where no nvcc is in it, and prefers the Python packages to the default
    toolkit even where their headers are missing.
    """
    nvcc = find_nvcc(environ)
    if nvcc is None or nvcc.source == "toolkit":
        return {}
    changes: EnvironmentChanges = {name: None for name in TOOLKIT_VARIABLES if name in environ}
    if nvcc.source != "path":
        changes["CUDA_HOME"] = str(nvcc.root)
        if environ.get("CUDA_HOME") == str(nvcc.root):
            del changes["CUDA_HOME"]
    own = [f"-I{nvcc.headers}", f"-I{nvcc.headers / 'cccl'}"] if nvcc.headers is not None else []
    if nvcc.source == "packages":
        own.append(ANY_MINOR_RELEASE)
    flags = environ.get("NVCC_PREPEND_FLAGS", "")
    if own and " ".join(own) not in flags:
        changes["NVCC_PREPEND_FLAGS"] = f"{' '.join(own)} {flags}".strip()
    return changes


# -- cuTile ----------------------------------------------------------------------------------------------------------


def find_tileiras(environ: Environment) -> Path | None:
    """The tileiras for cuTile: that of the Python packages, on ``PATH``, or of the toolkit that the user names."""
    packaged = _in_packages("bin/tileiras")
    if packaged is not None and _is_executable(packaged):
        return packaged
    on_path = shutil.which("tileiras", path=environ.get("PATH", ""))
    if on_path:
        return Path(on_path)
    roots = [Path(environ[name]) for name in TOOLKIT_VARIABLES if environ.get(name)]
    found = (root / "bin" / "tileiras" for root in [*roots, DEFAULT_TOOLKIT])
    return next((path for path in found if _is_executable(path)), None)


def inspect_tileiras(environ: Environment) -> Findings:
    """cuTile needs tileiras, the compiler of its intermediate language."""
    tileiras = find_tileiras(environ)
    if tileiras is None:
        return Findings(problem="no tileiras, cuTile's compiler", fix="pip install 'tilegym-db[cutile]'")
    return Findings(f"tileiras: {tileiras}")


def cutile_environment(environ: Environment) -> EnvironmentChanges:
    """Keep tileiras from an older toolkit.

    tileiras needs libnvvm and ptxas of its own release but looks under ``CUDA_HOME`` first; an older toolkit there
    makes every kernel fail with "failed to compile Tile IR program". A toolkit stays named only if its tileiras is the
    one in use. One from the Python packages goes on ``PATH`` too, since cuTile passes it over where the versions of
    the packages around it differ.
    """
    tileiras = find_tileiras(environ)
    if tileiras is None:
        return {}
    changes: EnvironmentChanges = {}
    for variable in TOOLKIT_VARIABLES:
        if environ.get(variable) and tileiras.parent != Path(environ[variable]) / "bin":
            changes[variable] = None
    search = environ.get("PATH", "")
    if shutil.which("tileiras", path=search) != str(tileiras):
        changes["PATH"] = os.pathsep.join(part for part in (str(tileiras.parent), search) if part)
    return changes


# -- looking ---------------------------------------------------------------------------------------------------------


def _in_packages(relative: str) -> Path | None:
    """A file of the ``nvidia/cu<major>`` folders, which wheels of several names share, newest CUDA first."""
    found = [
        (int(root.name.removeprefix("cu")), root / relative)
        for folder in package_folders()
        for root in folder.glob("cu[0-9]*")
        if root.name.removeprefix("cu").isdigit() and (root / relative).exists()
    ]
    return max(found, key=lambda item: item[0])[1] if found else None


def package_folders() -> list[Path]:
    """Every ``nvidia`` folder that Python packages were installed into, in the order of ``sys.path``."""
    folders = (Path(entry) / "nvidia" for entry in sys.path if entry)
    return [folder for folder in folders if folder.is_dir()]


def _is_executable(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)
