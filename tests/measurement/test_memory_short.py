"""A workload that does not fit into memory is unsupported, and the other workloads are measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tilegym_db.measurement.benchmark import bench

HUGE = {"axes": {"M": 4_000_000, "N": 1_000_000}}
"""16 TB in float32."""
ALLOCATES = (
    "# Source: https://example.org/row_scale.py#L1\nimport torch\n\n\ndef run(x, weight, factor):\n"
    "    scratch = torch.empty(1 << 50) if factor == 3.0 else None\n    return x * weight * factor\n"
)
"""A reference that allocates 4 PB for one factor."""
LARGE = {"axes": {"M": 48, "N": 32}, "inputs": {"factor": {"type": "scalar", "value": 3.0}}}
GREEDY = (
    "import torch\n\n\ndef run(x, weight, factor, out):\n    torch.empty(1 << 50)\n    out.copy_(x * weight * factor)\n"
)


@pytest.mark.sweep(2)
@pytest.mark.slow
@pytest.mark.parametrize(("workload", "definition"), [(HUGE, {}), (LARGE, {"reference": ALLOCATES})])
def test_workload_without_memory_leaves_the_others_measured(
    make_catalog: Any, tmp_path: Path, workload: dict[str, Any], definition: dict[str, Any]
) -> None:
    small = [{"axes": {"M": rows, "N": 32}} for rows in (40, 56)]
    catalog = make_catalog(tmp_path, {}, (small[0], workload, small[1]), definition)
    report = bench(devices="cpu", catalog=catalog, store_home=tmp_path / "home", workload="cpu")
    found = {trace.axes["M"]: (trace.status, trace.reason) for trace in report.traces}
    assert {rows: status for rows, (status, _) in found.items()} == {
        40: "PASSED", workload["axes"]["M"]: "UNSUPPORTED", 56: "PASSED",
    }  # fmt: skip
    assert "memory" in found[workload["axes"]["M"]][1]


@pytest.mark.slow
def test_solution_that_allocates_too_much_is_unsupported_here(make_catalog: Any, tmp_path: Path) -> None:
    catalog = make_catalog(tmp_path, {"greedy": GREEDY})
    report = bench(devices="cpu", catalog=catalog, store_home=tmp_path / "home", workload="cpu")
    assert {trace.solution: trace.status for trace in report.traces} == {
        "greedy": "UNSUPPORTED",
        "row_scale_stock": "PASSED",
    }
