"""How large the published traces are, and would be with many more operators and GPUs."""

from __future__ import annotations

import subprocess
import sys
import time
import zipfile
import zlib
from pathlib import Path

import pytest
from published_tables import lock_folder

from tilegym_db.catalog import Catalog
from tilegym_db.paths import shipped_root, use_root
from tilegym_db.published import table as tables
from tilegym_db.published.input_files import TUNING_FOLDER, definition_of, read_lines, shipped_traces, trace_files
from tilegym_db.published.table import load_table

ROOT = shipped_root()
KB, MB = 1000, 1000 * 1000
DEFINITIONS, GPUS = 120, 4
MANY_TRACES = 60
TRACES_A_WHEEL_HOLDS = ("definitions", "solutions", "workloads", "traces", "schema", "tilegym_db")


def size_with_steps(path: Path) -> int:
    steps = path.parent / TUNING_FOLDER / path.name
    return path.stat().st_size + (steps.stat().st_size if steps.is_file() else 0)


def shipped_bytes(folder: Path) -> dict[Path, int]:
    return {
        path: path.stat().st_size for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    }


def test_a_published_trace_takes_300_bytes_at_most() -> None:
    """Files of few traces are left out: the first ones of a file take more than later ones like them."""
    sizes = {}
    for path in shipped_traces(Catalog((ROOT,))):
        traces = len(read_lines(path.read_bytes(), path))
        if traces >= MANY_TRACES:
            sizes[f"{path.parts[-3]}-{definition_of(path)}"] = size_with_steps(path) / traces
    assert len(sizes) > 20
    assert {name: size for name, size in sizes.items() if size > 300} == {}


def test_many_operators_on_many_gpus_fit_a_checkout_and_a_wheel() -> None:
    folders = [path for path in (ROOT / "traces").iterdir() if path.is_dir()]
    sizes = {path: size for folder in folders for path, size in shipped_bytes(folder).items()}
    pairs = sum(len(trace_files(folder)) for folder in folders)
    rest = {
        path: size
        for name in TRACES_A_WHEEL_HOLDS
        if name != "traces"
        for path, size in shipped_bytes(ROOT / name).items()
    }
    grown = DEFINITIONS / len(Catalog((ROOT,)).definitions)  # what is no trace grows with the operators
    checkout = sum(sizes.values()) / pairs * DEFINITIONS * GPUS + grown * sum(rest.values())
    assert checkout < 40 * MB
    packed = {path: len(zlib.compress(path.read_bytes(), 6)) + 300 for path in (*sizes, *rest)}
    wheel = sum(packed[path] for path in sizes) / pairs * DEFINITIONS * GPUS + grown * sum(
        packed[path] for path in rest
    )
    assert wheel < 15 * MB


@pytest.mark.slow
def test_wheel_holds_the_traces_with_their_locks_and_is_small(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for path in (ROOT / "traces").glob("*/**/*.json*"):
        assert f"tilegym_db/_data/{path.relative_to(ROOT).as_posix()}" in names
    assert wheel.stat().st_size < 15 * MB


def test_loading_one_definition_takes_as_long_among_many(tmp_path) -> None:
    shipped = ROOT / "traces" / "h200"
    for count in (1, DEFINITIONS):
        folder = tmp_path / str(count) / "traces" / "h200" / "norm"
        folder.mkdir(parents=True)
        for number in range(count):
            name = "rms_norm" if number == 0 else f"rms_norm_{number}"
            (folder / f"{name}.jsonl.gz").write_bytes((shipped / "norm" / "rms_norm.jsonl.gz").read_bytes())
        with use_root(tmp_path / str(count)):
            lock_folder(folder.parent, tmp_path, gpu="h200", sm="sm_90", published="2026")

    def seconds(count: int) -> float:
        tables._cached_table.cache_clear()
        with use_root(tmp_path / str(count)):
            start = time.process_time()
            table = load_table("h200")
            assert table is not None
            assert table.entries("rms_norm", {"T": "bfloat16"})
            return time.process_time() - start

    alone, among_many = (min(seconds(count) for _ in range(7)) for count in (1, DEFINITIONS))
    assert among_many < 2 * alone + 0.005
