"""Finds the compiler of each language, checks that it is complete, and computes the environment that it needs.

The module does not import a language: it reads package metadata and the file system. Only functions that worker processes call
set variables (:func:`prepare_environment`) or make an interpreter ready. A verdict of an interpreter says that the numbers are
right at small sizes. It is of the tier ``interpreter`` and never one of a device.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from tilegym_db.errors import SolutionError, ToolchainError
from tilegym_db.records.hardware import TARGETS

# ---- cuda tools -----------------------------------------------------------------------------------
# nvcc and tileiras come from a CUDA toolkit, ``PATH`` or the ``nvidia`` Python packages. These functions only read.

Environment = Mapping[str, str]
EnvironmentChanges = dict[str, str | None]
"""Variable -> its new value, or None to remove it."""

TOOLKIT_VARIABLES = ("CUDA_HOME", "CUDA_PATH")
DEFAULT_TOOLKIT = Path("/usr/local/cuda")
INSTALL_NVCC = "pip install 'tilegym-db[tilelang]'"
ANY_MINOR_RELEASE = "-DCCCL_DISABLE_CTK_COMPATIBILITY_CHECK"
"""PyTorch pins the runtime's headers (13.2 for 2.15), cuTile needs a newer compiler (13.4), and packages share one folder.
Releases of one major version work together, but CCCL's headers refuse different ones without this flag."""


@dataclass(frozen=True)
class Findings:
    """The result of an inspection: a tool (``detail``), or a missing one (``problem``) and its remedy (``fix``)."""

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
    """The include folder with the CCCL headers (``nv/``, ``cccl/``), if nvcc's own folder lacks them."""

    @property
    def root(self) -> Path:
        """The toolkit's root, which holds ``bin/nvcc``."""
        return self.path.parent.parent


def nothing_to_find(environ: Environment) -> Findings:
    """Return no findings, for a language that needs only its package."""
    return Findings()


def nothing_to_change(environ: Environment) -> EnvironmentChanges:
    """Return no changes, for a language that finds its tools by itself."""
    return {}


# -- Triton ----------------------------------------------------------------------------------------------------------


def inspect_triton(environ: Environment) -> Findings:
    """Check ptxas, which Triton contains unless a variable names another one."""
    chosen = environ.get("TRITON_PTXAS_PATH")
    if chosen and not _is_executable(Path(chosen)):
        return Findings(problem=f"TRITON_PTXAS_PATH names {chosen}, which is no program", fix="unset TRITON_PTXAS_PATH")
    return Findings(f"ptxas: {chosen or 'the one in the package'}")


# -- TileLang --------------------------------------------------------------------------------------------------------


def find_nvcc(environ: Environment) -> Nvcc | None:
    """Return the nvcc for TileLang: from a toolkit that the user names, ``PATH``, the default toolkit or Python packages."""
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
    """Check the tools of TileLang, which emits CUDA C++: nvcc, the CCCL headers, and a C++ compiler for nvcc."""
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
    """Make TileLang use the nvcc of :func:`find_nvcc`.

    TileLang uses ``CUDA_HOME`` even if it lacks nvcc. It prefers the Python packages to the default toolkit even if their
    headers are missing.
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
    """Return the tileiras for cuTile: from the Python packages, ``PATH``, or the toolkit that the user names."""
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
    """Check tileiras, cuTile's compiler."""
    tileiras = find_tileiras(environ)
    if tileiras is None:
        return Findings(problem="no tileiras, cuTile's compiler", fix="pip install 'tilegym-db[cutile]'")
    return Findings(f"tileiras: {tileiras}")


def cutile_environment(environ: Environment) -> EnvironmentChanges:
    """Keep tileiras from an older toolkit.

    tileiras needs libnvvm and ptxas of the same release but looks under ``CUDA_HOME`` first. An older toolkit there
    makes every kernel fail with "failed to compile Tile IR program". A toolkit stays named only if its tileiras is the
    one in use. One from the Python packages also goes on ``PATH``, because cuTile skips it if the versions of related
    packages differ.
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
    """Return a file of the ``nvidia/cu<major>`` folders, which several wheels share, newest CUDA first."""
    found = [
        (int(root.name.removeprefix("cu")), root / relative)
        for folder in package_folders()
        for root in folder.glob("cu[0-9]*")
        if root.name.removeprefix("cu").isdigit() and (root / relative).exists()
    ]
    return max(found, key=lambda item: item[0])[1] if found else None


def package_folders() -> list[Path]:
    """Return every ``nvidia`` folder of installed Python packages, in the order of ``sys.path``."""
    folders = (Path(entry) / "nvidia" for entry in sys.path if entry)
    return [folder for folder in folders if folder.is_dir()]


def _is_executable(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)


_SAME_NAME = {target: target for target in TARGETS}


@dataclass(frozen=True)
class Toolchain:
    """The properties of a language's compiler: its packages, target names, tools and environment."""

    language: str
    package: str
    """The module that a source imports."""
    distributions: tuple[str, ...]
    """Names for an installer, the usual one first."""
    extra: str
    """The extra of tilegym-db that installs it."""
    targets: Mapping[str, str]
    """Target of the records -> the compiler's name for it; empty if nothing is compiled ahead of time."""
    inspect: Callable[[Environment], Findings] = nothing_to_find
    """Function that looks for the native tools of the package."""
    environment: Callable[[Environment], EnvironmentChanges] = nothing_to_change
    """Function that returns the variables to set (or, with None, to remove) before the package is imported."""


TOOLCHAINS: dict[str, Toolchain] = {
    "python": Toolchain("python", "torch", ("torch",), "torch", {}),
    "triton": Toolchain("triton", "triton", ("triton", "pytorch-triton"), "triton", _SAME_NAME, inspect=inspect_triton),
    # TileLang emits the tensor-memory and register-reconfiguration instructions that only the "a" variants have.
    "tilelang": Toolchain(
        "tilelang",
        "tilelang",
        ("tilelang",),
        "tilelang",
        _SAME_NAME | {"sm_90": "sm_90a", "sm_100": "sm_100a", "sm_120": "sm_120a"},
        inspect=inspect_nvcc,
        environment=tilelang_environment,
    ),
    "cutile": Toolchain(
        "cutile",
        "cuda.tile",
        ("cuda-tile",),
        "cutile",
        _SAME_NAME,
        inspect=inspect_tileiras,
        environment=cutile_environment,
    ),
}


@dataclass(frozen=True)
class ToolchainStatus:
    """The availability of a language on this machine. ``fix`` is a command or an instruction, empty if it is available."""

    available: bool
    version: str = ""
    detail: str = ""
    fix: str = ""


def toolchain_status(language: str, environ: Environment | None = None) -> ToolchainStatus:
    """Return the status of a language's compiler without importing it."""
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
    """Raise :class:`ToolchainError` with the fix unless the language is installed and complete."""
    status = toolchain_status(language)
    if not status.available:
        raise ToolchainError(
            f"{language} cannot be used here: {status.detail}. Fix: {status.fix}", code="toolchain_unusable"
        )


def check_dependencies(dependencies: tuple[str, ...], needed_by: str) -> None:
    """Raise :class:`ToolchainError` unless the packages that a Solution declares (``triton>=3.4``) are installed."""
    lacking = lacking_dependency(dependencies)
    if lacking is not None:
        raise ToolchainError(f"{needed_by} needs {lacking}", code="dependency_unmet")


def lacking_dependency(dependencies: tuple[str, ...]) -> str | None:
    """Return the first declared package that is missing or of an excluded version, and its remedy, or None."""
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


def declared_libraries(dependencies: tuple[str, ...]) -> dict[str, str]:
    """Return each installed library that a Solution declares beside the toolchains, with its version and its code.

    The code is a hash of the lines for ``.py`` and ``.so`` files in the distribution's ``RECORD``, so that another build of one
    version is another library. A distribution without a ``RECORD`` has only its version, which no trace may rely on.
    """
    toolchains = {name for chain in TOOLCHAINS.values() for name in chain.distributions}
    names = {canonicalize_name(re.split(r"[^\w.-]", text.strip(), maxsplit=1)[0]) for text in dependencies} - toolchains
    return {name: state for name in sorted(names) if (state := _installed_state(name))}


def check_libraries(dependencies: tuple[str, ...], verified: Mapping[str, str], needed_by: str) -> None:
    """Compare the libraries that a Solution declares, as they are installed, with those that it was verified with."""
    for name, state in declared_libraries(dependencies).items():
        if CODE not in state or verified.get(name) != state:
            raise ToolchainError(
                f"{needed_by} was verified with {name} {verified.get(name, 'of unknown version')}, and {state} is installed. "
                f"Verify it again: tilegym-db verify {needed_by}",
                code="library_changed",
            )


CODE = " sha256:"


@functools.lru_cache(maxsize=64)
def _installed_state(name: str) -> str:
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
    lines = [line for line in (found.read_text("RECORD") or "").splitlines() if re.search(r"\.(py|so)[\d.]*,", line)]
    digest = hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()
    return found.version + (CODE + digest if lines else "")


def environment_changes(language: str, environ: Environment | None = None) -> EnvironmentChanges:
    """Return the variables that a language needs set (to a value) or removed (None) to find its compiler.

    The function only reads which files exist.
    """
    return TOOLCHAINS[language].environment(os.environ if environ is None else environ)


def prepare_environment(language: str, environ: MutableMapping[str, str] | None = None) -> EnvironmentChanges:
    """Apply :func:`environment_changes` to this process before the language is imported; return the changes.

    Only worker processes call this. It has no effect on a language that is already imported, because TileLang and cuTile
    look for their compilers once. In a user's process the language finds what it would find without this package;
    :func:`environment_changes` reports the difference.
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
    """Return an installed version and cache it; a missing package is looked up again."""
    return importlib.metadata.version(distribution)


def _version(distributions: tuple[str, ...]) -> str:
    for name in distributions:
        try:
            return _installed_version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


# ---- compatibility --------------------------------------------------------------------------------
# Package metadata shows which installed packages do not fit together; nothing is imported.

TILEIRAS = "nvidia-cuda-tileiras"
COMPILER_PARTS = ("nvidia-nvvm", "nvidia-cuda-nvcc", "nvidia-cuda-crt")
"""Tools that tileiras and nvcc call. They fit if they are of one release (such as 13.4), otherwise they may not."""
HOPPER_RELEASE = Version("13.3")
"""The first release of tileiras that compiles for sm_90."""


@dataclass(frozen=True)
class Misfit:
    """Installed packages that do not fit together: the consequence, and the command that fixes it."""

    packages: tuple[str, ...]
    detail: str
    fix: str


def installed_versions() -> dict[str, str]:
    """Return the version of each installed distribution that this module checks."""
    versions = {}
    for name in (TILEIRAS, *COMPILER_PARTS, "torch", "triton"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def torch_requirements() -> tuple[str, ...]:
    """Return the requirements in the metadata of the installed PyTorch; empty if it is not installed."""
    try:
        return tuple(importlib.metadata.requires("torch") or ())
    except importlib.metadata.PackageNotFoundError:
        return ()


def misfits(versions: Mapping[str, str], required_by_torch: tuple[str, ...] = ()) -> list[Misfit]:
    """Return the installed packages (by distribution name) that do not fit together, or not the installed PyTorch."""
    return [*_compiler_misfits(versions), *_triton_misfits(versions, required_by_torch)]


def _compiler_misfits(versions: Mapping[str, str]) -> Iterator[Misfit]:
    release = _release(versions.get(TILEIRAS, ""))
    if release is not None and release < HOPPER_RELEASE:
        detail = f"{TILEIRAS} {versions[TILEIRAS]} cannot compile for Hopper (sm_90); {HOPPER_RELEASE} and newer can"
        yield Misfit((TILEIRAS,), detail, f"pip install -U {TILEIRAS} {' '.join(COMPILER_PARTS)}")
    leader = TILEIRAS if release is not None else "nvidia-cuda-nvcc"
    leading = _release(versions.get(leader, ""))
    others = [name for name in COMPILER_PARTS if name != leader and _release(versions.get(name, "")) is not None]
    apart = tuple(name for name in others if _release(versions[name]) != leading)
    if leading is not None and apart:
        named = ", ".join(f"{name} {versions[name]}" for name in (leader, *apart))
        pins = " ".join(f"'{name}=={leading}.*'" for name in (leader, *others))
        yield Misfit((leader, *apart), f"compilers of several releases: {named}", f"pip install {pins}")


def _triton_misfits(versions: Mapping[str, str], required_by_torch: tuple[str, ...]) -> Iterator[Misfit]:
    if "triton" not in versions or "torch" not in versions:
        return
    for text in required_by_torch:
        requirement = Requirement(text)
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        fits = requirement.specifier.contains(versions["triton"], prereleases=True)
        if requirement.name == "triton" and applies and not fits:
            detail = (
                f"torch {versions['torch']} asks for triton{requirement.specifier}, and {versions['triton']} is here"
            )
            yield Misfit(("torch", "triton"), detail, f"pip install 'triton{requirement.specifier}'")


def _release(version: str) -> Version | None:
    """Return the release: 13.4 for 13.4.92, or None for an invalid version."""
    try:
        parsed = Version(version)
    except InvalidVersion:
        return None
    return Version(f"{parsed.major}.{parsed.minor}")


# ---- interpreters --------------------------------------------------------------------------------

# ---- triton interpreter ---------------------------------------------------------------------------
# Makes the Triton interpreter compute with bfloat16 and 8-bit floats as hardware does, inside a worker process.
#
# The interpreter keeps bfloat16 values as raw 16-bit integers. Three of its operations forget what that means: a cast
# from float32 cuts the low bits off where hardware rounds to nearest even, a cast to float32 makes other numbers of
# subnormals, and ``tl.dot`` multiplies the integers. A product of float32 is exact where hardware rounds to tf32. A cast
# from float32 to 8 bits rounds ties away from zero, and loses the carry where a value rounds up to a power of two. All are
# seen in Triton 3.6 and 3.9. A kernel must not be blamed, or excused, for any.


def repair_interpreter() -> None:
    """Replace these operations for the rest of this process. Call it before a Solution is loaded."""
    import numpy as np
    import torch
    import triton.language as tl
    from triton.runtime import interpreter

    broken: Any = interpreter
    convert_float, create_dot = broken._convert_float, broken.InterpreterBuilder.create_dot

    eight_bits = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}

    def to_float32(data: Any) -> Any:
        return torch.from_numpy(np.ascontiguousarray(data).view(np.int16)).view(torch.bfloat16).float().numpy()

    def to_bfloat16(data: Any) -> Any:
        values = torch.from_numpy(np.ascontiguousarray(data).view(np.float32))
        return values.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)

    def to_eight_bits(data: Any, target: Any) -> Any:
        dtype = eight_bits[target]
        most = torch.finfo(dtype).max  # beyond, hardware gives the largest number
        values = torch.from_numpy(np.ascontiguousarray(data).view(np.float32))
        return values.clamp(-most, most).to(dtype).view(torch.uint8).numpy()

    def cast(data: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        if source == tl.float32 and target == tl.bfloat16:
            return to_bfloat16(data)
        if source == tl.bfloat16 and target == tl.float32:
            return to_float32(data).view(np.uint32)
        if source == tl.float32 and target in eight_bits and rounding_mode != broken._ir.ROUNDING_MODE.RTZ:
            return to_eight_bits(data, target)
        return convert_float(data, source, target, rounding_mode)

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return broken.TensorHandle(to_float32(handle.data), tl.float32)

    def in_tf32(handle: Any) -> Any:
        if handle.dtype.scalar != tl.float32:
            return handle
        data = np.ascontiguousarray(handle.data)
        rounded = (data.view(np.uint32) + np.uint32(1 << 12)) & np.uint32(~0x1FFF & 0xFFFFFFFF)
        # The sum of a NaN of all ones, which marks memory that nothing has written, would be zero.
        return broken.TensorHandle(np.where(np.isnan(data), data, rounded.view(np.float32)), tl.float32)

    def dot(self: Any, a: Any, b: Any, acc: Any, precision: Any, *rest: Any) -> Any:
        if precision == broken._ir.INPUT_PRECISION.TF32:  # float32 unless the kernel asks for another precision
            a, b = in_tf32(a), in_tf32(b)
        return create_dot(self, widened(a), widened(b), acc, precision, *rest)

    broken._convert_float = cast
    broken.InterpreterBuilder.create_dot = dot


@dataclass(frozen=True)
class Interpreter:
    """The setup of one language's interpreter in a worker that runs only one Solution."""

    install: Callable[[], None]
    """Called in the worker before the Solution is loaded; for the rest of the process."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the worker starts with."""


def _triton() -> None:
    from triton.runtime.autotuner import Autotuner

    Autotuner.run = refuse_autotune  # without a GPU, it would say that there is no driver
    repair_interpreter()
    turn_programs()


def refuse_autotune(*args: Any, **options: Any) -> NoReturn:
    """Raise :class:`SolutionError`, in place of a search at the first launch."""
    raise SolutionError(
        "triton.autotune measures at run time, which no Solution may do. Declare the search space as spec.tunables.",
        code="autotune_forbidden",
    )


def turn_programs() -> None:
    """Let the Triton interpreter run the programs of some launches from the last to the first.

    A GPU runs them in any order, and at once. A kernel whose programs need what others wrote passes in one order only.
    """
    from triton.runtime import interpreter

    executor, builder, launches = interpreter.GridExecutor, interpreter.interpreter_builder, Counter[Any]()
    call, set_place = executor.__call__, builder.set_grid_idx

    def launch(self: Any, *args: Any, **options: Any) -> Any:
        # Not each second launch: if a call launches a kernel twice, that would turn the same launch of each call.
        builder.turned = launches[self.fn].bit_count() % 2
        launches[self.fn] += 1
        return call(self, *args, **options)

    def place(*indices: int) -> None:
        last = (size - 1 for size in builder.grid_dim)
        set_place(*(end - index if builder.turned else index for end, index in zip(last, indices, strict=True)))

    executor.__call__, builder.set_grid_idx = launch, place


def _cutile() -> None:
    from tilegym_db.backends.cutile_interpreter import install

    install()


def _tilelang() -> None:
    from tilegym_db.backends.tilelang_interpreter import install

    install()


INTERPRETERS: dict[str, Interpreter] = {
    "triton": Interpreter(_triton, {"TRITON_INTERPRET": "1"}),
    "cutile": Interpreter(_cutile),
    "tilelang": Interpreter(_tilelang),
}


def interpreted_here(language: str, *, on_gpu: bool) -> bool:
    """Return True if a Solution in a language is interpreted on this machine, and so not timed."""
    return not on_gpu and language in INTERPRETERS
