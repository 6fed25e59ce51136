"""Reads the table that Nsight Compute prints (``--csv --page raw``): one kernel a row, one metric a column."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from tilegym_db.errors import ToolchainError

__all__ = ["METRICS", "KernelProfile", "metrics_argument", "parse_profile"]

STALLS = re.compile(r"smsp__average_warps_issue_stalled_(\w+?)_per_issue_active(?:\.ratio)?")
METRICS = {
    "time_ns": "gpu__time_duration.sum",
    "read_bytes": "dram__bytes_read.sum",
    "written_bytes": "dram__bytes_write.sum",
    "dram_share": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm_share": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "occupancy": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "occupancy_limit": "sm__maximum_warps_per_active_cycle_pct",
    "registers": "launch__registers_per_thread",
    "shared_bytes": "launch__shared_mem_per_block",
    "grid": "launch__grid_size",
    "block": "launch__block_size",
    "waves": "launch__waves_per_multiprocessor",
}
"""What is asked of Nsight Compute, by what it is called here. Shares are percent of the peak."""
UNITS = {
    "": 1.0, "%": 1.0, "byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "ns": 1.0, "nsecond": 1.0, "us": 1e3,
    "usecond": 1e3, "ms": 1e6, "msecond": 1e6, "s": 1e9, "second": 1e9,
}  # fmt: skip
"""Unit -> what to multiply by: times in nanoseconds, sizes in bytes. Releases of the tool spell them differently."""


@dataclass(frozen=True)
class KernelProfile:
    """One kernel of a call: the metrics that were measured, and the reasons for which warps waited, most first.

    ``stalls`` is how many warps wait for a reason, on average, when an instruction is issued.
    """

    kernel: str
    metrics: Mapping[str, float] = field(default_factory=dict)
    stalls: Mapping[str, float] = field(default_factory=dict)

    @property
    def time_us(self) -> float | None:
        """Device time at the clocks that it was profiled at."""
        return None if "time_ns" not in self.metrics else self.metrics["time_ns"] / 1e3

    @property
    def bytes_per_s(self) -> float | None:
        """Device memory read and written over the time: the achieved bandwidth."""
        names = ("time_ns", "read_bytes", "written_bytes")
        if any(name not in self.metrics for name in names) or not self.metrics["time_ns"]:
            return None
        time_ns, read, written = (self.metrics[name] for name in names)
        return (read + written) / time_ns * 1e9

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "time_us": self.time_us, "bytes_per_s": self.bytes_per_s}


def metrics_argument() -> str:
    """What ``--metrics`` of Nsight Compute is given."""
    return ",".join([*METRICS.values(), "regex:smsp__average_warps_issue_stalled_.*_per_issue_active.ratio"])


def parse_profile(text: str) -> list[KernelProfile]:
    """The kernels that the tool measured, in launch order.

    Raises:
        ToolchainError: there is no table in the output; has what the tool said instead.
    """
    lines = text.splitlines()
    start = next((number for number, line in enumerate(lines) if line.startswith('"ID",')), None)
    if start is None:
        raise ToolchainError(f"Nsight Compute measured nothing: {_said(lines)}", code="profiler_failed")
    rows = list(csv.reader(line for line in lines[start:] if line.startswith('"')))
    header, units, kernels = rows[0], rows[1] if len(rows) > 1 else [], rows[2:]
    if not kernels:
        raise ToolchainError(f"Nsight Compute saw no kernel: {_said(lines)}", code="profiler_saw_nothing")
    return [_kernel(dict(zip(header, row, strict=False)), dict(zip(header, units, strict=False))) for row in kernels]


def _kernel(row: Mapping[str, str], units: Mapping[str, str]) -> KernelProfile:
    values = {name: _number(row.get(metric, ""), units.get(metric, "")) for name, metric in METRICS.items()}
    stalls: dict[str, float] = {}
    for column, text in row.items():
        match = STALLS.fullmatch(column)
        value = _number(text, "") if match else None
        if match and value and match[1] != "selected" and not match[1].endswith("_not_issued"):
            stalls[match[1]] = value
    ordered = dict(sorted(stalls.items(), key=lambda item: (-item[1], item[0])))
    known = {name: value for name, value in values.items() if value is not None}
    return KernelProfile(row.get("Kernel Name", ""), known, ordered)


def _number(text: str, unit: str) -> float | None:
    """A number of the table in base units; None for what is none (``n/a``, ``nan``)."""
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return None
    scale = UNITS.get(unit.partition("/")[0].strip(), 1.0)
    return value * scale if value == value else None


def _said(lines: list[str]) -> str:
    errors = [line.removeprefix("==ERROR==").strip() for line in lines if line.startswith("==ERROR==")]
    return "; ".join(errors or [line for line in lines if line.strip()][-3:]) or "it printed nothing"
