"""``benchmarks/sanitize_catalog.py``: what each process is given, what a line says, and what a deadline leaves."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from tilegym_db.bench.instruments.chosen import Chosen, choose_solutions
from tilegym_db.bench.instruments.sanitize import Sanitized
from tilegym_db.bench.instruments.sanitizer_report import SanitizerFinding
from tilegym_db.bench.machine import cpu_machine
from tilegym_db.bench.run_setup import RunSetup
from tilegym_db.catalog import Catalog
from tilegym_db.paths import shipped_root
from tilegym_db.verify.inputs import Case

H200 = replace(cpu_machine(), gpu="h200", sm="sm_90", device="cuda:0")
SAID = (
    '========= COMPUTE-SANITIZER\ntilegym-db-call {"at": "done", "solution": "%s"}\n========= ERROR SUMMARY: 0 errors\n'
)


@pytest.fixture
def sweeping(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(shipped_root()))
    from benchmarks import sanitize_catalog

    return sanitize_catalog


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return Catalog((shipped_root(),))


@pytest.fixture(scope="module")
def chosen(catalog: Catalog) -> list[Chosen]:
    case = Case({"M": 2, "N": 3}, {"T": "float32"}, {})
    return [replace(item, cases=[case]) for item in choose_solutions(catalog, ["softmax"], H200)]


def tool(folder: Path, script: str) -> Path:
    program = folder / "compute-sanitizer"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return program


def test_every_solution_is_in_one_batch_of_each_tool_and_first_tools_come_first(sweeping, chosen) -> None:
    batches = sweeping.batches_of(chosen * 5, ["memcheck", "racecheck"], ["triton", "cutile"], 3)
    assert [batch.tool for batch in batches] == ["memcheck"] * 4 + ["racecheck"] * 4
    assert all(len(batch.solutions) <= 3 for batch in batches)
    languages = [item.files.record.spec.language for batch in batches[:4] for item in batch.solutions]
    assert languages == ["triton"] * 5 + ["cutile"] * 5


def test_processes_side_by_side_have_ports_of_their_own(sweeping) -> None:
    commands = [sweeping.with_port(["tool", "--tool", "memcheck"], slot) for slot in range(16)]
    ports = [int(command[command.index("--port") + 1]) for command in commands]
    assert len({port // sweeping.PORTS for port in ports}) == len(ports)
    assert commands[0][0] == "tool"
    assert commands[0][-2:] == ["--tool", "memcheck"]


def test_a_clean_kernel_and_one_that_no_time_was_left_for(sweeping, chosen, tmp_path: Path) -> None:
    first = chosen[0]
    program = tool(tmp_path, f"cat <<'END'\n{SAID % first.files.name}END")
    said: list[str] = []
    sweep = sweeping.Sweep(program, "cuda:0", 2, time.monotonic() + 60, said.append)
    (clean,) = sweep.run([sweeping.Batch("memcheck", [first])])
    assert clean.is_clean, clean
    assert said[0].split() == ["memcheck", first.files.name, "clean,", "1", "cases"]
    late = sweeping.Sweep(program, "cuda:0", 2, time.monotonic() - 1, said.append)
    (left,) = late.run([sweeping.Batch("memcheck", [first])])
    assert (left.problem, left.is_clean) == (sweeping.NO_TIME, False)


def test_a_process_that_outlives_the_deadline_is_ended_and_proves_nothing(sweeping, chosen, tmp_path: Path) -> None:
    sweep = sweeping.Sweep(tool(tmp_path, "sleep 60"), "cuda:0", 1, time.monotonic() + 0.5, lambda line: None)
    started = time.monotonic()
    results = sweep.run([sweeping.Batch("memcheck", chosen)])
    assert time.monotonic() - started < 30
    assert [result.is_clean for result in results] == [False] * len(chosen)
    assert all(sweeping.NO_TIME in result.problem for result in results)
    assert "not run to the end" in sweeping.summary(results, 1.0)


def test_a_planted_mistake_counts_as_found_only_by_its_own_tool(sweeping, catalog) -> None:
    mistakes = sweeping.planted(RunSetup(H200, catalog, Path()), 2)
    write = SanitizerFinding("Invalid __global__ write of size 2 bytes", "unmasked_gate", "kernel.py:16")
    found = [Sanitized(mistakes["out_of_bounds"], "memcheck", (write,)), Sanitized(mistakes["shared_race"], "memcheck")]
    assert sweeping.missed(found, mistakes) == ["racecheck did not find the planted mistake 'shared_race'"]
    assert "FOUND 1: Invalid __global__ write" in sweeping.line_of(found[0])
