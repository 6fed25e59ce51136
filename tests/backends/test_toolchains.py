from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from raising import raises

from tilegym_db.backends import toolchains
from tilegym_db.backends.toolchains import (
    ANY_MINOR_RELEASE,
    TOOLCHAINS,
    environment_changes,
    prepare_environment,
    require_toolchain,
    toolchain_status,
)
from tilegym_db.errors import ToolchainError
from tilegym_db.records import LANGUAGES
from tilegym_db.records.hardware import TARGETS


def program(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def toolkit(root: Path, *tools: str) -> Path:
    for tool in tools:
        program(root / "bin" / tool)
    return root


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty ``nvidia`` package folder in place of the installed one, and no default toolkit."""
    root = tmp_path / "site" / "nvidia"
    root.mkdir(parents=True)
    monkeypatch.setattr(toolchains, "package_folders", lambda: sorted(tmp_path.glob("*site/nvidia")))
    monkeypatch.setattr(toolchains, "DEFAULT_TOOLKIT", tmp_path / "no-toolkit")
    return root


def test_the_table_covers_every_language_and_names_every_target() -> None:
    assert tuple(TOOLCHAINS) == LANGUAGES
    assert {chain.language: tuple(chain.targets) for chain in TOOLCHAINS.values()} == {
        "python": (),
        "triton": TARGETS,
        "tilelang": TARGETS,
        "cutile": TARGETS,
    }


@pytest.mark.parametrize("language", LANGUAGES)
def test_an_installed_language_has_a_version(language: str) -> None:
    status = toolchain_status(language)

    assert status.available, status
    assert status.version


def test_status_imports_no_language() -> None:
    code = (
        "import sys; from tilegym_db.backends.toolchains import *; [toolchain_status(name) for name in TOOLCHAINS];"
        "print([name for name in ('torch', 'triton', 'tilelang', 'cuda.tile') if name in sys.modules])"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert printed.strip() == "[]"


@pytest.mark.parametrize(
    ("language", "package", "extra"),
    [
        ("python", "torch", "torch"),
        ("triton", "triton", "triton"),
        ("tilelang", "tilelang", "tilelang"),
        ("cutile", "cuda.tile", "cutile"),
        ("triton", "torch", "torch"),
    ],
)
def test_a_missing_package_is_reported_with_its_extra(
    language: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find_spec(name))

    assert toolchain_status(language).fix == f"pip install 'tilegym-db[{extra}]'"
    with raises(ToolchainError, "toolchain_unusable", f"pip install 'tilegym-db[{extra}]'"):
        require_toolchain(language)


def test_tilelang_uses_the_toolkit_that_the_user_names(packages: Path, tmp_path: Path) -> None:
    environ = {"CUDA_HOME": str(toolkit(tmp_path / "cuda", "nvcc")), "PATH": ""}

    assert environment_changes("tilelang", environ) == {}


def test_tilelang_is_not_misled_by_a_toolkit_folder_without_nvcc(packages: Path, tmp_path: Path) -> None:
    nvcc = program(tmp_path / "bin" / "nvcc")
    environ = {"CUDA_HOME": str(tmp_path / "gone"), "PATH": str(nvcc.parent)}

    assert environment_changes("tilelang", environ) == {"CUDA_HOME": None}


def test_tilelang_finds_nvcc_in_the_newest_python_package(packages: Path) -> None:
    for release in ("cu9", "cu13"):
        program(packages / release / "bin" / "nvcc")
        (packages / release / "include" / "nv").mkdir(parents=True)
        (packages / release / "include" / "nv" / "target").touch()
    environ = {"PATH": "", "CUDA_PATH": "/gone"}

    changed = {"CUDA_PATH": None, "CUDA_HOME": str(packages / "cu13"), "NVCC_PREPEND_FLAGS": ANY_MINOR_RELEASE}
    assert prepare_environment("tilelang", environ) == changed
    assert prepare_environment("tilelang", environ) == {}


def test_tilelang_finds_headers_that_were_installed_elsewhere(packages: Path, tmp_path: Path) -> None:
    program(packages / "cu13" / "bin" / "nvcc")
    other = tmp_path / "user-site" / "nvidia"
    include = other / "cu13" / "include"
    (include / "nv").mkdir(parents=True)
    (include / "nv" / "target").touch()

    flags = environment_changes("tilelang", {"PATH": "", "NVCC_PREPEND_FLAGS": "-w"})["NVCC_PREPEND_FLAGS"]

    assert flags == f"-I{include} -I{include / 'cccl'} {ANY_MINOR_RELEASE} -w"


@pytest.mark.parametrize(
    ("tools", "problem"),
    [((), "no nvcc"), (("nvcc",), "nvidia-cuda-cccl")],
)
def test_tilelang_without_a_complete_compiler_is_not_available(
    packages: Path, tools: tuple[str, ...], problem: str
) -> None:
    toolkit(packages / "cu13", *tools)

    status = toolchain_status("tilelang", {"PATH": ""})

    assert not status.available
    assert problem in status.detail
    assert status.fix == "pip install 'tilegym-db[tilelang]'"


def test_tilelang_needs_a_compiler_for_the_host_side(packages: Path, tmp_path: Path) -> None:
    status = toolchain_status("tilelang", {"PATH": "", "CUDA_HOME": str(toolkit(tmp_path / "cuda", "nvcc"))})

    assert (status.available, status.fix) == (False, "apt install g++")


def test_cutile_is_kept_from_an_older_toolkit(packages: Path, tmp_path: Path) -> None:
    tileiras = program(packages / "cu13" / "bin" / "tileiras")
    environ = {"CUDA_HOME": str(toolkit(tmp_path / "cuda-12", "nvcc")), "PATH": "/usr/bin"}

    changes = environment_changes("cutile", environ)

    assert changes == {"CUDA_HOME": None, "PATH": f"{tileiras.parent}{os.pathsep}/usr/bin"}
    assert environment_changes("cutile", {"PATH": changes["PATH"] or ""}) == {}


def test_cutile_keeps_the_toolkit_whose_tileiras_is_in_use(packages: Path, tmp_path: Path) -> None:
    root = toolkit(tmp_path / "cuda-13.4", "tileiras")

    assert environment_changes("cutile", {"CUDA_HOME": str(root), "PATH": str(root / "bin")}) == {}


def test_cutile_without_tileiras_is_not_available(packages: Path) -> None:
    status = toolchain_status("cutile", {"PATH": ""})

    assert (status.available, status.fix) == (False, "pip install 'tilegym-db[cutile]'")


def test_preparing_applies_the_changes_and_says_which(packages: Path, tmp_path: Path) -> None:
    program(packages / "cu13" / "bin" / "tileiras")
    environ = {"CUDA_HOME": str(tmp_path), "PATH": "/usr/bin", "HOME": "/home/me"}

    changes = prepare_environment("cutile", environ)

    assert environ == {"PATH": changes["PATH"], "HOME": "/home/me"}
    assert changes["CUDA_HOME"] is None


def test_a_ptxas_that_is_no_program_is_named(tmp_path: Path) -> None:
    status = toolchain_status("triton", {"TRITON_PTXAS_PATH": str(tmp_path)})

    assert (status.available, status.fix) == (False, "unset TRITON_PTXAS_PATH")


def test_declared_library_has_its_version_and_hash(tmp_path, monkeypatch):
    folder = tmp_path / "my_library-1.2.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Name: my-library\nVersion: 1.2\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = []
    for digest, page in [("one", "a"), ("two", "a"), ("two", "b")]:
        (folder / "RECORD").write_text(f"my_library/a.py,sha256={digest},3\nmy_library-1.2.dist-info/page,{page},\n")
        toolchains._installed_state.cache_clear()
        found.append(toolchains.declared_libraries(("torch>=2", "My_Library >= 1", "not-installed"))["my-library"])
    assert found[0].startswith("1.2 sha256:")
    assert found[0] != found[1] == found[2]
