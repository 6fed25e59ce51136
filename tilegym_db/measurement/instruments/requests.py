"""Requests to the process that a tool attaches to: a file with the calls, and marked lines on its output.

The module also chooses the Solutions, runs the tool and finds its program.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tilegym_db.backends.toolchains import DEFAULT_TOOLKIT, TOOLKIT_VARIABLES, package_folders
from tilegym_db.catalog import Catalog, SolutionFiles
from tilegym_db.errors import NotFoundError, SolutionError, ToolchainError, did_you_mean
from tilegym_db.measurement.machine import Machine
from tilegym_db.records import TILE_LANGUAGES, Config, Definition, Workload
from tilegym_db.records.call import Call
from tilegym_db.records.text import canonical_json
from tilegym_db.records.workload import Case, SafetensorsInput
from tilegym_db.sandbox.scan import hard_findings, scan_sources
from tilegym_db.verification.cases import fuzz_cases

MARK = "tilegym-db-call "
"""Start of each line that the process itself prints. The tool and the kernel print to the same output."""


@dataclass(frozen=True)
class SolutionCalls:
    """One Solution of a request: its record, its source's digest, its config, and the cases to call it at."""

    name: str
    record: Path
    digest: str
    definition: str
    cases: Sequence[Case]
    config: Config = field(default_factory=dict)


def write_request(path: Path, device: str, calls: Sequence[SolutionCalls], *, profile: bool = False) -> None:
    """Write a request file for :func:`read_request`."""
    pieces = [
        {**asdict(item), "record": str(item.record), "cases": [_case_content(case) for case in item.cases]}
        for item in calls
    ]
    path.write_text(json.dumps({"device": device, "profile": profile, "calls": pieces}))


def read_request(path: Path) -> tuple[str, list[SolutionCalls], bool]:
    """Return the device, the calls, and true if only the last call of each is profiled."""
    content = json.loads(path.read_text())
    calls = [
        SolutionCalls(**{**item, "record": Path(item["record"]), "cases": [_case_of(case) for case in item["cases"]]})
        for item in content["calls"]
    ]
    return content["device"], calls, content["profile"]


def _case_content(case: Case) -> dict[str, Any]:
    files = {name: spec.model_dump(mode="json") for name, spec in case.files.items()}
    return {**vars(case), "call": vars(case.call), "files": files}


def _case_of(content: Mapping[str, Any]) -> Case:
    files = {name: SafetensorsInput(**spec) for name, spec in content["files"].items()}
    return Case(**{**content, "call": Call(**content["call"]), "files": files})


def marked_line(at: str, name: str, **more: object) -> str:
    """Return a line with the state of the process: at a ``case``, ``done`` with a Solution, or stopped by an ``error``."""
    return MARK + json.dumps({"at": at, "solution": name, **more})


def mark_of(line: str) -> Mapping[str, Any] | None:
    """Return the content of a marked line; None for any other line."""
    if not line.startswith(MARK):
        return None
    content: Mapping[str, Any] = json.loads(line.removeprefix(MARK))
    return content


# ---- chosen ---------------------------------------------------------------------------------------
# Choice of the Solutions and cases for a tool.


@dataclass(frozen=True)
class Chosen:
    """A Solution, its cases, and the Workload of each case, which gives its dtypes and scalars."""

    files: SolutionFiles
    definition: Definition
    cases: Sequence[Case] = ()
    workloads: Sequence[Workload] = ()
    in_catalog: bool = field(default=True)

    @property
    def calls(self) -> SolutionCalls:
        """The calls for a request."""
        return SolutionCalls(
            self.files.name, self.files.path.resolve(), self.files.digest, self.definition.name, self.cases
        )


def choose_solutions(
    catalog: Catalog, names: Sequence[str], machine: Machine, language: str | None = None
) -> list[Chosen]:
    """Return the Solutions that the names stand for: a Solution, a Definition, or a folder with a draft; by default every
    kernel.

    For a Definition, and for the whole catalog, these are the kernels in tile languages that this GPU can run.
    """
    chosen: dict[str, Chosen] = {}
    for name in names or (None,):
        for item in _named(catalog, name, machine):
            if language is None or item.files.record.spec.language == language:
                require_clean_source(item.files)
                chosen.setdefault(item.files.name, item)
    return list(chosen.values())


def _named(catalog: Catalog, name: str | None, machine: Machine) -> list[Chosen]:
    if name is not None and (os.sep in name or name == "."):
        files = SolutionFiles.read(Path(name))
        return [Chosen(files, catalog.definition(files.record.definition), in_catalog=False)]
    if name is not None and name in catalog.solutions:
        files = catalog.solution(name)
        return [Chosen(files, catalog.definition(files.record.definition))]
    if name is not None and name not in catalog.definitions:
        hint = did_you_mean(name, [*catalog.solutions, *catalog.definitions])
        raise NotFoundError(
            f"'{name}' is neither a solution, nor a definition, nor a folder.{hint} Try: tilegym-db list",
            code="name_unknown",
        )
    wanted = catalog.solutions.values() if name is None else catalog.solutions_for(name)
    return [
        Chosen(files, catalog.definition(files.record.definition))
        for files in wanted
        if files.record.spec.language in TILE_LANGUAGES
        and files.record.spec.role == "kernel"
        and machine.sm in files.record.spec.target_hardware
    ]


def require_clean_source(files: SolutionFiles) -> None:
    """Raise :class:`SolutionError` if the scan refuses a source: it would run outside the sandbox."""
    found = hard_findings(scan_sources(files.record, files.sources))
    if found:
        raise SolutionError(
            f"{files.name} is not run: a tool attaches to a process outside of the sandbox, and the scan refuses {found[0]}",
            code="scan_refused",
        )


def with_cases(chosen: Chosen, workloads: Sequence[Workload], count: int, seed: int) -> Chosen:
    """Return the Solution with about ``count`` fuzz cases over its dtype bindings, including sizes of real workloads."""
    definition, record = chosen.definition, chosen.files.record
    bindings: dict[str, Workload] = {}
    for workload in workloads:
        dtypes = definition.bind_dtypes(workload.dtypes)
        if record.unsupported(definition.bind_axes(workload.axes), dtypes) is None:
            bindings.setdefault(canonical_json([dtypes, workload.scalars()]), workload)
    generator = random.Random(seed)
    each = max(2, -(-count // max(len(bindings), 1)))
    cases: list[Case] = []
    sources: list[Workload] = []
    for workload in bindings.values():
        drawn = fuzz_cases(
            definition, record, [item.axes for item in workloads], definition.bind_dtypes(workload.dtypes),
            workload.scalars(), count=each, seed=generator.getrandbits(62),
        )  # fmt: skip
        cases += drawn
        sources += [workload] * len(drawn)
    return Chosen(chosen.files, definition, cases[:count], sources[:count], chosen.in_catalog)


# ---- process --------------------------------------------------------------------------------------
# Execution of a tool and of the process that it attaches to.

TIMEOUT_S = 1800.0
ENVIRONMENT = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONUNBUFFERED": "1"}


def output_of(command: list[str], folder: Path) -> str:
    """Run a command and return its stdout and stderr, interleaved; kill it after a timeout."""
    environment = {**os.environ, **ENVIRONMENT}
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return output.decode(errors="replace")


# ---- programs -------------------------------------------------------------------------------------
# Location of compute-sanitizer and Nsight Compute, and the fix if one is missing.

NSIGHT_FOLDER = Path("/opt/nvidia/nsight-compute")
FIXES = {
    "compute-sanitizer": "pip install nvidia-cuda-sanitizer-api, or install a CUDA toolkit, which has it in bin/",
    "ncu": "install a CUDA toolkit or Nsight Compute (NVIDIA's package cuda-nsight-compute), which has it in bin/",
}


def _installed(name: str) -> Iterator[Path]:
    """Yield the paths where installers put a program: the default toolkit, Nsight's folder, Python packages."""
    yield DEFAULT_TOOLKIT / "bin" / name
    if name == "ncu":
        yield from sorted(NSIGHT_FOLDER.glob("*/ncu"), reverse=True)
    for folder in package_folders():
        yield from sorted(folder.glob(f"cu[0-9]*/bin/{name}"), reverse=True)


def find_program(
    name: str,
    environ: Mapping[str, str] | None = None,
    installed: Callable[[str], Iterable[Path]] = _installed,
) -> Path:
    """Find a program: first in the user's CUDA toolkit, then on ``PATH``, then among ``installed``; else raise with the fix."""
    environ = os.environ if environ is None else environ
    for path in (*_named_program(name, environ), *installed(name)):
        if path.is_file() and os.access(path, os.X_OK):
            return path
    raise ToolchainError(f"{name} is not installed, or not on PATH. Fix: {FIXES[name]}.", code="program_absent")


def _named_program(name: str, environ: Mapping[str, str]) -> Iterator[Path]:
    yield from (Path(environ[variable]) / "bin" / name for variable in TOOLKIT_VARIABLES if environ.get(variable))
    on_path = shutil.which(name, path=environ.get("PATH", ""))
    if on_path:
        yield Path(on_path)
