"""A low-precision product with strays through the whole harness: passed with its share, refused where a tile is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from verification.low_precision import SOURCE

from tilegym_db.catalog import Catalog, writers
from tilegym_db.measurement.benchmark import bench
from tilegym_db.records import Definition, Solution, Trace, Workload

PRODUCT: dict[str, Any] = {
    "name": "fp8_product",
    "version": "1.0.0",
    "op_type": "gemm",
    "axes": {"M": {"type": "var"}, "N": {"type": "var"}, "K": {"type": "var"}},
    "inputs": {
        "a": {"shape": ["M", "K"], "dtype": "float8_e4m3fn"},
        "b": {"shape": ["N", "K"], "dtype": "float8_e4m3fn"},
    },
    "outputs": {"out": {"shape": ["M", "N"], "dtype": "bfloat16"}},
    "constraints": ["N >= 1", "K >= 1"],
    "cost": {"flops": "2 * M * N * K", "bytes": "M * K + N * K + 2 * M * N"},
    "special_values": [],
    "oracle": "as_written",
    "tolerance": {"bfloat16": {"tau": 0.03, "share": 0.95, "reason": "the kernel of the test plants its own strays"}},
    "reference": f"{SOURCE}import torch\n\n\ndef run(a, b):\n    return (a.float() @ b.float().T).to(torch.bfloat16)\n",
}
STRICT = {**PRODUCT, "tolerance": {"bfloat16": {"tau": 0.03, "reason": "as the other one, and no strays"}}}
STOCK = "import torch\n\n\ndef run(a, b, out):\n    out.copy_(a.float() @ b.float().T)\n"
# One in forty is off by 7% of itself, of twice the median at most: one huge value, 7% off, would be most of a tensor's
# error. Nowhere are two beside each other.
STRAYS = STOCK + (
    "    if out.numel() >= 1024:\n"
    "        row = torch.arange(out.shape[0], device=out.device)[:, None]\n"
    "        column = torch.arange(out.shape[1], device=out.device)\n"
    "        usual = 2 * float(out.float().abs().median())\n"
    "        off = out + 0.07 * out.clamp(-usual, usual)\n"
    "        out.copy_(torch.where((row * 17 + column) % 40 == 39, off, out))\n"
)
SOURCES = {
    "fp8_product_strays": STRAYS,
    "fp8_product_tile": STRAYS + "    out[-16:, -16:] = 0\n",
    "fp8_product_column": STRAYS + "    out[:, -1] *= 1.1\n",
}


def traces(root: Path, definition: dict[str, Any]) -> dict[str, Trace]:
    base = {"definition": "fp8_product", "author": "tests", "sources": [{"path": "kernel.py"}]}
    python = {"language": "python", "entry_point": "kernel.py::run"}
    stock = {"name": "fp8_product_stock", "spec": {**python, "role": "baseline", "provides": "stock"}}
    workload = {"definition": "fp8_product", "axes": {"M": 128, "N": 192, "K": 64}, "tags": ["cpu"]}
    files = {
        "definitions/gemm/fp8_product.json": Definition.from_dict(definition).to_json(),
        "workloads/gemm/fp8_product.jsonl": Workload.from_dict(workload).to_json(),
    }
    records = [
        ({**base, **stock}, STOCK),
        *(({**base, "name": name, "spec": python}, text) for name, text in SOURCES.items()),
    ]
    for record, text in records:
        folder = f"solutions/gemm/fp8_product/{record['name']}"
        files |= {f"{folder}/solution.json": Solution.from_dict(record).to_json(), f"{folder}/kernel.py": text}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    writers.update_lock(Catalog((root,)), root)
    report = bench(devices="cpu", catalog=Catalog((root,)), store_home=root / "home", quick=True)
    return {trace.solution: trace for trace in report.traces}


@pytest.mark.slow
def test_harness_accepts_strays_but_no_missing_value(tmp_path):
    found = traces(tmp_path, PRODUCT)
    strays = found["fp8_product_strays"]
    assert strays.status == "PASSED", strays.reason
    assert strays.correctness.matched_ratio == pytest.approx(1 - 1 / 40, abs=0.02)
    for name in ("fp8_product_tile", "fp8_product_column"):
        assert found[name].status == "INCORRECT_NUMERICAL"
        assert found[name].correctness.gate in {"rel_fro", "worst_row", "share", "elementwise"}


@pytest.mark.slow
def test_strays_are_refused_if_the_definition_has_no_share(tmp_path):
    strays = traces(tmp_path, STRICT)["fp8_product_strays"]
    assert strays.status == "INCORRECT_NUMERICAL"
    assert strays.correctness.gate == "elementwise"
