"""Catalogs of one tiny operator, on disk, with whatever Solutions and Workloads a test needs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tilegym_db.catalog import Catalog, SolutionFiles, writers
from tilegym_db.records import Definition, Workload

ROW_SCALE: dict[str, Any] = {
    "name": "row_scale",
    "version": "1.0.0",
    "op_type": "elementwise",
    "dtypes": {"T": ["float32"]},
    "axes": {"M": {"type": "var"}, "N": {"type": "var"}},
    "inputs": {
        "x": {"shape": ["M", "N"], "dtype": "T"},
        "weight": {"shape": ["N"], "dtype": "T"},
        "factor": {"shape": None, "dtype": "float32"},
    },
    "outputs": {"out": {"shape": ["M", "N"], "dtype": "T"}},
    "constraints": ["N >= 1"],
    "cost": {"flops": "2 * M * N", "bytes": "(2 * M * N + N) * sizeof(T)"},
    "reference": "# Source: https://example.org/row_scale.py#L1\n"
    "def run(x, weight, factor):\n    return x * weight * factor\n",
}
HONEST = "def run(x, weight, factor, out):\n    out.copy_(x * weight * factor)\n"
STOCK = {"role": "baseline", "provides": "stock"}


@pytest.fixture(scope="session")
def make_catalog() -> Callable[..., Catalog]:
    """Write a catalog of ``row_scale`` under a root folder.

    ``solutions``: name -> source, or (source, changes of its spec); ``row_scale_stock`` is always there.
    ``workloads``: records, of which only the axes must be given.
    """

    def make(
        root: Path,
        solutions: Mapping[str, str | tuple[str, dict[str, Any]]] | None = None,
        workloads: tuple[dict[str, Any], ...] = ({"axes": {"M": 40, "N": 32}},),
        definition: dict[str, Any] | None = None,
    ) -> Catalog:
        record = Definition.from_dict({**ROW_SCALE, **(definition or {})})
        folder = f"{record.op_type}/{record.name}"
        write(root / "definitions" / f"{folder}.json", record.to_json())
        for name, given in {f"{record.name}_stock": (HONEST, STOCK), **(solutions or {})}.items():
            source, changes = (given, {}) if isinstance(given, str) else given
            write_python_solution(root / "solutions" / folder / name, record.name, source, **changes)
        lines = []
        for changes in workloads:
            scalar = {"factor": {"type": "scalar", "value": 0.5}}
            content = {
                "definition": record.name,
                "dtypes": {"T": "float32"},
                "inputs": scalar,
                "tags": ["cpu"],
                **changes,
            }
            lines.append(Workload.from_dict(content).to_json())
        write(root / "workloads" / f"{folder}.jsonl", "\n".join(lines))
        catalog = Catalog((root,))
        writers.update_lock(catalog, root)
        return Catalog((root,))

    return make


@pytest.fixture(scope="session")
def write_solution() -> Callable[..., SolutionFiles]:
    """:func:`write_python_solution`, for tests that need no catalog around it."""
    return write_python_solution


def write_python_solution(folder: Path, definition: str, source: str, **spec: Any) -> SolutionFiles:
    """Write a Solution in Python, named like its folder; ``spec`` adds to its spec or changes it."""
    record = {
        "name": folder.name,
        "definition": definition,
        "author": "tests",
        "spec": {"language": "python", "entry_point": "kernel.py::run", **spec},
        "sources": [{"path": "kernel.py"}],
    }
    write(folder / "kernel.py", source)
    write(folder / "solution.json", json.dumps(record))
    return SolutionFiles.read(folder)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
