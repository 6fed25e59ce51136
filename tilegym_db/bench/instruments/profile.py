"""Nsight Compute over one call of a Solution: bandwidth, occupancy, registers, and what the warps waited for."""

from __future__ import annotations

import fnmatch
import json
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tilegym_db.bench.device_lock import timing_lock
from tilegym_db.bench.instruments.chosen import require_clean_source
from tilegym_db.bench.instruments.process import output_of
from tilegym_db.bench.instruments.profiler_report import KernelProfile, metrics_argument, parse_profile
from tilegym_db.bench.instruments.programs import find_program
from tilegym_db.bench.instruments.requests import SolutionCalls, write_request
from tilegym_db.bench.machine import Machine
from tilegym_db.bench.run_setup import RunSetup
from tilegym_db.catalog import Catalog, SolutionFiles
from tilegym_db.errors import HardwareError, UsageError
from tilegym_db.files import write_atomically
from tilegym_db.records import Config, Definition, Workload, axes_key
from tilegym_db.records.case import Case
from tilegym_db.scratch import scratch_folder

__all__ = ["CallProfile", "profile", "profile_path", "profiler_command"]


@dataclass(frozen=True)
class CallProfile:
    """The kernels of one call, and what was called."""

    solution: str
    solution_digest: str
    workload: Workload
    axes: Mapping[str, int]
    config: Config
    gpu: str
    kernels: Sequence[KernelProfile]

    def to_dict(self) -> dict[str, Any]:
        """For JSON: the side data that lies beside the traces."""
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
    catalog: Catalog | None = None,
    home: Path | None = None,
) -> tuple[CallProfile, Path]:
    """Profile one call of a Solution, and keep the result as side data of the store.

    Args:
        solution: its name.
        workload: uuid, axes (``M=1,N=4096``) or tag, with wildcards; one that matches several means the largest.
        config: a value per tunable; the source's defaults otherwise.
        gpu: as for :func:`tilegym_db.benchmark`.
        catalog: the records.
        home: folder of the store.

    Returns:
        The profile, and the file that it was written to: one for each source, workload and GPU.

    Raises:
        ToolchainError: Nsight Compute is not installed, or measured nothing (it says why).
        HardwareError: there is no GPU.
        NotFoundError: no such Solution.
        UsageError: no workload of its Definition that it supports matches.
        SolutionError: the scan refuses its source.
    """
    program = find_program("ncu")
    setup = RunSetup.of(gpu, catalog, home)
    if not setup.machine.is_gpu:
        raise HardwareError("profile measures kernels on an NVIDIA GPU, and this machine has none.", code="gpu_absent")
    files = setup.catalog.solution(solution)
    require_clean_source(files)
    definition = setup.catalog.definition(files.record.definition)
    chosen = _workload(setup.catalog, definition, files, workload)
    case = Case.of_workload(definition, chosen, distribution="normal", seed=secrets.randbits(62))
    calls = SolutionCalls(files.name, files.path.resolve(), files.digest, definition.name, [case], config or {})
    kernels = _measure(program, calls, setup.machine)
    found = CallProfile(files.name, files.digest, chosen, case.axes, config or {}, setup.machine.gpu, kernels)
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
    """The command line: caches are flushed before each pass, and clocks are left as they are."""
    calls = [sys.executable, "-m", "tilegym_db.bench.instruments.calls", str(request)]
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
    """Where the side data of one source, workload and GPU lies."""
    return home / "profiles" / found.gpu / found.solution_digest[:16] / f"{found.workload.uuid}.json"


def _workload(catalog: Catalog, definition: Definition, files: SolutionFiles, pattern: str) -> Workload:
    def matches(item: Workload) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for name in (item.uuid, axes_key(item.axes), *item.tags))

    known = catalog.workloads_for(definition.name)
    supported = [
        item
        for item in known
        if matches(item)
        and files.record.unsupported(definition.bind_axes(item.axes), definition.bind_dtypes(item.dtypes)) is None
    ]
    if not supported:
        raise UsageError(
            f"no workload of {definition.name} that {files.name} supports fits {pattern!r}. Try: tilegym-db list --workloads",
            code="workload_unmatched",
        )
    return max(supported, key=lambda item: (_bytes(definition, item), item.uuid))


def _bytes(definition: Definition, workload: Workload) -> float:
    return definition.cost_of(definition.bind_axes(workload.axes), definition.bind_dtypes(workload.dtypes))[1]
