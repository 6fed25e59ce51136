from __future__ import annotations

import ast
import json
import os
import pkgutil
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest
from house import cycles, import_graph, sources

import tilegym_db

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("torch", "triton", "tilelang", "tvm", "cuda.tile", "transformers", "numpy", "pyarrow")
LIGHT_PACKAGES = ("records", "catalog", "store", "errors", "paths", "cli")


def loaded_after(code: str) -> set[str]:
    """The modules that a fresh interpreter has after running some code, without those it starts with."""
    script = f"import sys; before = set(sys.modules)\n{code}\nprint('\\n'.join(set(sys.modules) - before))"
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(answer.stdout.split())


def heavy_in(modules: set[str]) -> list[str]:
    return sorted(name for name in modules if name.startswith(tuple(f"{heavy}." for heavy in HEAVY)) or name in HEAVY)


def test_no_modules_import_each_other_directly_or_not():
    trees = {path: ast.parse(text) for path, text in sources(ROOT / "tilegym_db").items()}
    assert cycles(import_graph(ROOT, trees)) == []


def test_importing_the_package_loads_nothing_but_the_package():
    loaded = {name.partition(".")[0] for name in loaded_after("import tilegym_db")}
    assert loaded - sys.stdlib_module_names == {"tilegym_db"}


def test_light_modules_load_neither_torch_nor_a_compiler():
    names = [
        info.name
        for info in pkgutil.walk_packages(tilegym_db.__path__, "tilegym_db.")
        if info.name.split(".")[1] in LIGHT_PACKAGES
    ]
    assert len(names) > 30
    assert heavy_in(loaded_after(f"import {', '.join(names)}")) == []


def test_command_line_help_loads_neither_torch_nor_the_database():
    code = "from tilegym_db.cli.app import app\ntry:\n    app(['--help'])\nexcept SystemExit:\n    pass"
    modules = loaded_after(code)
    assert heavy_in(modules) == []
    assert "duckdb" not in modules


@pytest.mark.parametrize("name", tilegym_db.__all__)
def test_every_public_name_loads(name):
    assert getattr(tilegym_db, name).__name__.rpartition(".")[2] == name


def test_python_needs_no_other_names_than_these():
    functions = {"add", "bench", "check", "explain", "fit", "open_store", "publish", "resolve", "tune", "verify"}
    patching = {"patch", "patched", "patched_init"}
    records = {"Catalog", "Definition", "Solution", "Trace", "Workload"}
    assert set(tilegym_db.__all__) == functions | patching | records | {"TilegymDBError", "ops"}


def test_the_public_names_are_listed_and_others_are_refused():
    assert set(tilegym_db.__all__) <= set(dir(tilegym_db))
    with pytest.raises(AttributeError, match="module 'tilegym_db' has no attribute 'pacth'"):
        _ = tilegym_db.pacth


def test_constraints_pin_every_name_of_the_extras_by_version():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][0-9A-Za-z.]*", line) for line in lines)
    pinned = {normalised(line) for line in lines}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = [
        *project["dependencies"],
        *(text for texts in project["optional-dependencies"].values() for text in texts),
    ]
    assert {normalised(text) for text in required} - {"tilegym-db"} <= pinned
    # Each build of PyTorch pins its own CUDA toolkit: what it pins here would exclude all builds but one.
    assert not pinned & {"cuda-toolkit", "cuda-bindings", "nvidia-cublas", "nvidia-cuda-runtime", "nvidia-nccl-cu13"}
    assert {"nvidia-cuda-tileiras", "nvidia-nvvm", "nvidia-cuda-nvcc", "nvidia-cuda-crt"} <= pinned
    releases = {line.partition("==")[2] for line in lines if line.startswith(("nvidia-cuda-tile", "nvidia-nvvm"))}
    assert len(releases) == 1


def normalised(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9_.-]+", requirement)
    assert match
    return re.sub(r"[-_.]+", "-", match.group()).lower()


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts folder of an environment that has the wheel and its core dependencies, and nothing else."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "venv", with_pip=True)
    scripts = folder / "venv" / "bin"
    install = [scripts / "python", "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", wheel]
    subprocess.run(install, cwd=folder, check=True, capture_output=True)
    return scripts


@pytest.mark.nightly
@pytest.mark.slow
def test_the_installed_wheel_works_without_the_repository(installed: Path, tmp_path: Path, home: Path):
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": os.defpath, "TILEGYM_DB_HOME": str(home)}
        command = [installed / "tilegym-db", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    listed = {row["definition"] for row in json.loads(run("list", "--json").stdout)}
    assert {"rms_norm", "gemm", "rope_neox"} <= listed
    counted = run("sql", "SELECT count(DISTINCT name) AS n FROM definitions", "--csv")
    assert counted.stdout == f"n\n{len(listed)}\n", counted.stderr
    best = run("best", "rms_norm", "--gpu", "h200", "--json")
    assert best.returncode == 0, best.stderr
    assert {row["gpu"] for row in json.loads(best.stdout)} == {"h200"}
    missing = run("doctor")
    assert "pip install 'tilegym-db[torch]'" in missing.stdout
    assert "Traceback" not in missing.stderr
