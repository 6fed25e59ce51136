"""Which compiler each language needs, whether it is installed and complete, and the environment it wants.

Nothing here imports a language: the answers come from package metadata and from the file system. The process of a user
is never changed behind their back: only :func:`prepare_environment`, which worker processes call, sets variables.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass

from packaging.requirements import InvalidRequirement, Requirement

from tilegym_db.backends import cuda_tools
from tilegym_db.backends.cuda_tools import Environment, EnvironmentChanges, Findings
from tilegym_db.errors import ToolchainError
from tilegym_db.records.hardware import TARGETS

__all__ = [
    "TOOLCHAINS",
    "Toolchain",
    "ToolchainStatus",
    "check_dependencies",
    "environment_changes",
    "lacking_dependency",
    "prepare_environment",
    "require_toolchain",
    "toolchain_status",
]

_SAME_NAME = {target: target for target in TARGETS}


@dataclass(frozen=True)
class Toolchain:
    """What differs between languages as far as installing and naming goes."""

    language: str
    package: str
    """What a source imports."""
    distributions: tuple[str, ...]
    """What an installer calls it, the usual name first."""
    extra: str
    """The extra of tilegym-db that installs it."""
    targets: Mapping[str, str]
    """Target of the records -> what this compiler calls it; empty where nothing is compiled ahead of time."""
    inspect: Callable[[Environment], Findings] = cuda_tools.nothing_to_find
    """Looks for the native tools that the package drives."""
    environment: Callable[[Environment], EnvironmentChanges] = cuda_tools.nothing_to_change
    """The variables to set (or, with None, to remove) before the package is imported."""


TOOLCHAINS: dict[str, Toolchain] = {
    "python": Toolchain("python", "torch", ("torch",), "torch", {}),
    "triton": Toolchain(
        "triton", "triton", ("triton", "pytorch-triton"), "triton", _SAME_NAME, inspect=cuda_tools.inspect_triton
    ),
    # TileLang emits the tensor-memory and register-reconfiguration instructions that only the "a" variants have.
    "tilelang": Toolchain(
        "tilelang",
        "tilelang",
        ("tilelang",),
        "tilelang",
        _SAME_NAME | {"sm_90": "sm_90a", "sm_100": "sm_100a", "sm_120": "sm_120a"},
        inspect=cuda_tools.inspect_nvcc,
        environment=cuda_tools.tilelang_environment,
    ),
    "cutile": Toolchain(
        "cutile",
        "cuda.tile",
        ("cuda-tile",),
        "cutile",
        _SAME_NAME,
        inspect=cuda_tools.inspect_tileiras,
        environment=cuda_tools.cutile_environment,
    ),
}


@dataclass(frozen=True)
class ToolchainStatus:
    """Whether a language can be compiled here. ``fix`` is a command or an instruction, empty where all is well."""

    available: bool
    version: str = ""
    detail: str = ""
    fix: str = ""


def toolchain_status(language: str, environ: Environment | None = None) -> ToolchainStatus:
    """What is installed for a language, without importing it.

    Args:
        language: a key of :data:`TOOLCHAINS`.
        environ: the variables to look under; those of this process by default.
    """
    toolchain = TOOLCHAINS[language]
    install = f"pip install 'tilegym-db[{toolchain.extra}]'"
    if not _is_installed(toolchain.package):
        detail = f"the Python package '{toolchain.distributions[0]}' is missing"
        return ToolchainStatus(False, detail=detail, fix=install)
    if not _is_installed("torch"):
        return ToolchainStatus(False, detail="PyTorch is missing", fix="pip install 'tilegym-db[torch]'")
    version = _version(toolchain.distributions)
    found = toolchain.inspect(os.environ if environ is None else environ)
    if found.problem:
        return ToolchainStatus(False, version, found.problem, found.fix or install)
    return ToolchainStatus(True, version, found.detail)


def require_toolchain(language: str) -> None:
    """Do nothing where the language is installed and complete.

    Raises:
        ToolchainError: what is missing, and the command that installs it.
    """
    status = toolchain_status(language)
    if not status.available:
        raise ToolchainError(
            f"{language} cannot be used here: {status.detail}. Fix: {status.fix}", code="toolchain_unusable"
        )


def check_dependencies(dependencies: tuple[str, ...], needed_by: str) -> None:
    """Compare what a Solution declares (``triton>=3.4``) with what is installed.

    Raises:
        ToolchainError: a package is missing or its version is outside the declared range.
    """
    lacking = lacking_dependency(dependencies)
    if lacking is not None:
        raise ToolchainError(f"{needed_by} needs {lacking}", code="dependency_unmet")


def lacking_dependency(dependencies: tuple[str, ...]) -> str | None:
    """The first declared package that is missing, or of a version outside the declared range, and how to get it; None where
    all are here."""
    for text in dependencies:
        try:
            requirement = Requirement(text)
        except InvalidRequirement as error:
            return f"{text!r}, which is no requirement: {error}. Correct spec.dependencies."
        known = next((chain for chain in TOOLCHAINS.values() if requirement.name in chain.distributions), None)
        version = _version(known.distributions if known else (requirement.name,))
        if version and requirement.specifier.contains(version, prereleases=True):
            continue
        if not version and known and _is_installed(known.package):
            continue  # unpacked without its metadata: present, of unknown version
        found = f"{version} is installed" if version else "it is not installed"
        return f"{text}, but {found}. Fix: pip install '{text}'"
    return None


def environment_changes(language: str, environ: Environment | None = None) -> EnvironmentChanges:
    """The variables that a language needs set (to a value) or removed (None) to find its own compiler.

    Pure, apart from looking at which files exist.
    """
    return TOOLCHAINS[language].environment(os.environ if environ is None else environ)


def prepare_environment(language: str, environ: MutableMapping[str, str] | None = None) -> EnvironmentChanges:
    """Apply :func:`environment_changes` to this process, before the language is imported; returns what was changed.

    For worker processes, which belong to this package. It has no effect on a language that is already imported, since
    TileLang and cuTile look for their compilers once. In a process of the user's, nothing calls this: the language
    finds there what it would find without this package, and :func:`environment_changes` says what differs.
    """
    target = os.environ if environ is None else environ
    changes = environment_changes(language, target)
    for name, value in changes.items():
        if value is None:
            target.pop(name, None)
        else:
            target[name] = value
    return changes


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the parent of a dotted name
        return False


@functools.lru_cache(maxsize=64)
def _installed_version(distribution: str) -> str:
    """Read once: what is not installed yet is asked about again, what is imported already does not change."""
    return importlib.metadata.version(distribution)


def _version(distributions: tuple[str, ...]) -> str:
    for name in distributions:
        try:
            return _installed_version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""
