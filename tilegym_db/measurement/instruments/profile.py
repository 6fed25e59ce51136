"""Nsight Compute on one call of a Solution: bandwidth, occupancy, registers, and the stall reasons of its warps."""

from __future__ import annotations

import csv
import json
import re
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tilegym_db.catalog import Catalog, SolutionFiles
from tilegym_db.errors import HardwareError, ToolchainError, UsageError
from tilegym_db.files import write_atomically
from tilegym_db.measurement.instruments.requests import (
    SolutionCalls,
    find_program,
    output_of,
    require_clean_source,
    write_request,
)
from tilegym_db.measurement.machine import Machine, timing_lock
from tilegym_db.measurement.run_setup import RunSetup
from tilegym_db.paths import scratch_folder
from tilegym_db.records import Config, Definition, Workload
from tilegym_db.records.workload import Case


@dataclass(frozen=True)
class CallProfile:
    """The kernels of one call, with its Solution, Workload and config."""

    solution: str
    solution_digest: str
    workload: Workload
    axes: Mapping[str, int]
    config: Config
    gpu: str
    kernels: Sequence[KernelProfile]

    def to_dict(self) -> dict[str, Any]:
        """Return the content of the JSON file that is stored beside the traces."""
        return {
            "solution": self.solution,
            "solution_digest": self.solution_digest,
            "workload_uuid": self.workload.uuid,
            "axes": dict(self.axes),
            "dtypes": self.workload.dtypes,
            "config": self.config,
            "gpu": self.gpu,
            "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
            "kernels": [kernel.to_dict() for kernel in self.kernels],
        }


def profile(
    solution: str,
    *,
    workload: str,
    config: Config | None = None,
    gpu: str = "auto",
) -> tuple[CallProfile, Path]:
    """Profile one call of a Solution, and store the result as side data of the store.

    Args:
        workload: uuid, axes (``M=1,N=4096``) or tag, with wildcards; of several matches the largest is used.

    Returns:
        The profile and its file; there is one file per source, workload and GPU.
    """
    program = find_program("ncu")
    setup = RunSetup.of(gpu, None, None)
    if not setup.machine.is_gpu:
        raise HardwareError("profile measures kernels on an NVIDIA GPU, and this machine has none.", code="gpu_absent")
    files = setup.catalog.solution(solution)
    require_clean_source(files)
    definition = setup.catalog.definition(files.record.definition)
    chosen = _workload(setup.catalog, definition, files, workload)
    case = Case.of_workload(definition, chosen, distribution="normal", seed=secrets.randbits(62))
    calls = SolutionCalls(files.name, files.path.resolve(), files.digest, definition.name, [case], config or {})
    kernels = _measure(program, calls, setup.machine)
    found = CallProfile(files.name, files.digest, chosen, case.call.axes, config or {}, setup.machine.gpu, kernels)
    path = profile_path(setup.home, found)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(found.to_dict(), indent=1) + "\n").encode())
    return found, path


def _measure(program: Path, calls: SolutionCalls, machine: Machine) -> list[KernelProfile]:
    with scratch_folder() as folder, timing_lock(machine.device):
        request = folder / "request.json"
        write_request(request, machine.device, [calls], profile=True)
        return parse_profile(output_of(profiler_command(program, request), folder))


def profiler_command(program: Path, request: Path) -> list[str]:
    """Return the command line: caches are flushed before each pass, and clocks are not changed."""
    calls = [sys.executable, "-m", "tilegym_db.measurement.instruments.calls", str(request)]
    options = [
        "--csv",
        "--page",
        "raw",
        "--print-units",
        "base",
        "--profile-from-start",
        "off",
        "--clock-control",
        "none",
    ]
    return [str(program), *options, "--cache-control", "all", "--metrics", metrics_argument(), *calls]


def profile_path(home: Path, found: CallProfile) -> Path:
    """Return the path of the side data of one source, workload and GPU."""
    return home / "profiles" / found.gpu / found.solution_digest[:16] / f"{found.workload.uuid}.json"


def _workload(catalog: Catalog, definition: Definition, files: SolutionFiles, pattern: str) -> Workload:
    known = catalog.workloads_for(definition.name)
    supported = [
        item
        for item in known
        if item.matches(pattern)
        and files.record.unsupported(definition.bind_axes(item.axes), definition.bind_dtypes(item.dtypes)) is None
    ]
    if not supported:
        raise UsageError(
            f"no workload of {definition.name} fits {pattern!r} and is supported by {files.name}. "
            "Try: tilegym-db list --workloads",
            code="workload_unmatched",
        )
    return max(supported, key=lambda item: (_bytes(definition, item), item.uuid))


def _bytes(definition: Definition, workload: Workload) -> float:
    return definition.cost_of(definition.bind_axes(workload.axes), definition.bind_dtypes(workload.dtypes))[1]


# ---- profiler report ------------------------------------------------------------------------------
# Reader of the table that Nsight Compute prints (``--csv --page raw``): one row per kernel, one column per metric.

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
"""Our name -> metric of Nsight Compute. Shares are percent of the peak."""
UNITS = {
    "": 1.0, "%": 1.0, "byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "ns": 1.0, "nsecond": 1.0, "us": 1e3,
    "usecond": 1e3, "ms": 1e6, "msecond": 1e6, "s": 1e9, "second": 1e9,
}  # fmt: skip
"""Unit -> factor: times in nanoseconds, sizes in bytes. Releases of the tool spell units differently."""


@dataclass(frozen=True)
class KernelProfile:
    """One kernel of a call: its metrics, and the stall reasons of its warps, the largest first.

    ``stalls`` is the average number of warps that wait for a reason when an instruction is issued.
    """

    kernel: str
    metrics: Mapping[str, float] = field(default_factory=dict)
    stalls: Mapping[str, float] = field(default_factory=dict)

    @property
    def time_us(self) -> float | None:
        """Device time in microseconds, at the clocks of the profile."""
        return None if "time_ns" not in self.metrics else self.metrics["time_ns"] / 1e3

    @property
    def bytes_per_s(self) -> float | None:
        """Achieved bandwidth: device memory read and written, per second."""
        names = ("time_ns", "read_bytes", "written_bytes")
        if any(name not in self.metrics for name in names) or not self.metrics["time_ns"]:
            return None
        time_ns, read, written = (self.metrics[name] for name in names)
        return (read + written) / time_ns * 1e9

    def to_dict(self) -> dict[str, Any]:
        """Return the kernel as JSON content."""
        return {**asdict(self), "time_us": self.time_us, "bytes_per_s": self.bytes_per_s}


def metrics_argument() -> str:
    """Return the value of Nsight Compute's ``--metrics``."""
    return ",".join([*METRICS.values(), "regex:smsp__average_warps_issue_stalled_.*_per_issue_active.ratio"])


def parse_profile(text: str) -> list[KernelProfile]:
    """Return the measured kernels in launch order; without a table, raise an error with the output of the tool."""
    lines = text.splitlines()
    start = next((number for number, line in enumerate(lines) if line.startswith('"ID",')), None)
    if start is None:
        raise ToolchainError(f"Nsight Compute measured nothing: {_printed_by_tool(lines)}", code="profiler_failed")
    rows = list(csv.reader(line for line in lines[start:] if line.startswith('"')))
    header, units, kernels = rows[0], rows[1] if len(rows) > 1 else [], rows[2:]
    if not kernels:
        raise ToolchainError(f"Nsight Compute saw no kernel: {_printed_by_tool(lines)}", code="profiler_saw_nothing")
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
    """Return a number of the table in base units; None for other text (``n/a``, ``nan``)."""
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return None
    scale = UNITS.get(unit.partition("/")[0].strip(), 1.0)
    return value * scale if value == value else None


def _printed_by_tool(lines: list[str]) -> str:
    errors = [line.removeprefix("==ERROR==").strip() for line in lines if line.startswith("==ERROR==")]
    return "; ".join(errors or [line for line in lines if line.strip()][-3:]) or "it printed nothing"
