"""A small catalog with published tables: real files, python-language solutions, CPU tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from published_tables import write_table

from tilegym_db.catalog import Catalog, SolutionFiles
from tilegym_db.records import Definition

SOURCE_LINE = "# Source: https://example.org/op.py#L1\n"

DEFINITIONS: dict[str, dict[str, Any]] = {
    "scale_rows": {
        "dtypes": {"T": ["bfloat16", "float32"]},
        "axes": {"M": {"type": "var"}, "N": {"type": "var"}},
        "inputs": {
            "x": {"shape": ["M", "N"], "dtype": "T"},
            "weight": {"shape": ["N"], "dtype": "T"},
            "eps": {"shape": None, "dtype": "float32"},
        },
        "outputs": {"out": {"shape": ["M", "N"], "dtype": "T"}},
        "cost": {"flops": "2 * M * N", "bytes": "(2 * M * N + N) * sizeof(T)"},
        "reference": "def run(x, weight, eps):\n    return x * weight + eps\n",
        "serving": {"independent": [["M"]]},
    },
    "add_into": {
        "axes": {"M": {"type": "var"}},
        "inputs": {"x": {"shape": ["M"], "dtype": "float32"}, "total": {"shape": ["M"], "dtype": "float32"}},
        "outputs": {
            "out": {"shape": ["M"], "dtype": "float32"},
            "total_out": {"shape": ["M"], "dtype": "float32"},
        },
        "in_place": {"total": "total_out"},
        "reference": "def run(x, total):\n    total.add_(x)\n    return 2 * total\n",
    },
    "halves": {
        "axes": {"M": {"type": "var"}, "I": {"type": "var"}, "H": {"type": "const", "value": 2}},
        "inputs": {"x": {"shape": ["M", "H*I"], "dtype": "float32"}, "swap": {"shape": None, "dtype": "bool"}},
        "outputs": {"out": {"shape": ["M", "I"], "dtype": "float32"}},
        "reference": "def run(x, swap):\n    a, b = x.chunk(2, -1)\n    return b - a if swap else a - b\n",
    },
}


@dataclass
class Shop:
    """Writes a catalog and its published tables under one folder."""

    root: Path
    home: Path

    @property
    def catalog(self) -> Catalog:
        """The catalog as it lies on disk now."""
        return Catalog((self.root,))

    def definition(self, name: str) -> Definition:
        """Return one Definition."""
        return self.catalog.definition(name)

    def define(self, name: str, **content: Any) -> None:
        """Write a Definition; its reference is given without the line that names a source."""
        path = self.root / "definitions" / "toy" / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        reference = SOURCE_LINE + content["reference"]
        record = {"name": name, "version": "1.0.0", "op_type": "toy", **content, "reference": reference}
        path.write_text(json.dumps(record))

    def add(self, definition: str, name: str, source: str, **spec: Any) -> SolutionFiles:
        """Write a Solution whose source is the body of ``kernel.py``; replaces one of that name."""
        folder = self.root / "solutions" / "toy" / definition / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "kernel.py").write_text(source)
        record = {
            "name": name,
            "definition": definition,
            "author": "tests",
            "spec": {"language": "python", "entry_point": "kernel.py::run", **spec},
            "sources": [{"path": "kernel.py"}],
        }
        (folder / "solution.json").write_text(json.dumps(record))
        return SolutionFiles.read(folder)

    def candidate(self, files: SolutionFiles, latency_us: float = 10.0, **changes: Any) -> dict[str, Any]:
        """Return a table candidate: verified, 1.5x faster than stock, with a 1% interval."""
        spec = files.record.spec
        return {
            "solution": files.name,
            "solution_digest": files.digest,
            "language": spec.language,
            "role": spec.role,
            "provides": spec.provides,
            "config": {},
            "latency_us": latency_us,
            "ci_low_us": latency_us * 0.995,
            "ci_high_us": latency_us * 1.005,
            "speedup": 1.5,
            "speedup_ci_low": 1.45,
            "tier": "promotion",
            "sandbox_level": 3,
            "trace_id": "t-1",
            "envelope_cases": 5,
            **changes,
        }

    def entry(
        self, definition: str, axes: dict[str, int], candidates: list[dict[str, Any]], **changes: Any
    ) -> dict[str, Any]:
        """Return a measured point; it has the first choice of every dtype variable unless ``dtypes`` is given."""
        record = self.definition(definition)
        return {
            "definition": definition,
            "definition_version": record.version,
            "definition_digest": record.digest,
            "op_type": record.op_type,
            "dtypes": {name: choices[0] for name, choices in record.dtypes.items()},
            "axes": axes,
            "scalars": {},
            "layouts": {},
            "candidates": candidates,
            **changes,
        }

    def publish(self, entries: list[dict[str, Any]], *, gpu: str = "cpu", **changes: Any) -> Path:
        """Write the table of a GPU where ``publish`` writes it on a machine without a writable checkout."""
        folder = self.home / "published" / gpu
        write_table(folder, entries, self.home, **changes)
        return folder


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ship: Callable[[Path], Path]) -> Shop:
    """Return a catalog with three Definitions, no Solutions, and nothing published."""
    shop = Shop(tmp_path / "shipped", tmp_path / "home")
    for name, content in DEFINITIONS.items():
        shop.define(name, **content)
    monkeypatch.setenv("TILEGYM_DB_HOME", str(shop.home))
    ship(shop.root)
    return shop


STOCK = "def run(x, weight, eps):\n    return x * weight + eps\n"
KERNEL = "def run(x, weight, eps, out, *, BIAS=0):\n    out.copy_(x * weight + eps + BIAS)\n"


@pytest.fixture
def stock(shop: Shop) -> SolutionFiles:
    """Write the stock code of ``scale_rows``, which returns its output."""
    return shop.add(
        "scale_rows", "scale_rows_stock", STOCK, role="baseline", provides="stock", destination_passing_style=False
    )


@pytest.fixture
def kernel(shop: Shop) -> SolutionFiles:
    """Write a destination-passing kernel of ``scale_rows``; its tunable BIAS shows which config ran."""
    return shop.add("scale_rows", "scale_rows_kernel", KERNEL, tunables={"BIAS": [0, 1]})


@pytest.fixture
def publish_kernel(shop: Shop, stock: SolutionFiles, kernel: SolutionFiles) -> Callable[..., None]:
    """Publish the kernel as the winner for ``scale_rows`` at M=4 and M=64, N=8, in float32, beside stock."""

    def publish(**changes: Any) -> None:
        candidates = [
            shop.candidate(kernel, 50.0, **changes),
            shop.candidate(stock, 75.0, speedup=1.0, speedup_ci_low=1.0),
        ]
        shop.publish([shop.entry("scale_rows", {"M": m, "N": 8}, candidates, dtypes={"T": "float32"}) for m in (4, 64)])

    return publish
