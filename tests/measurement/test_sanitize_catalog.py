"""``benchmarks/sanitize_catalog.py``: what each process is given, what a line says, and what a deadline leaves."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from tilegym_db.catalog import Catalog
from tilegym_db.measurement.instruments.requests import Chosen, choose_solutions
from tilegym_db.measurement.instruments.sanitize import Sanitized, SanitizerFinding
from tilegym_db.measurement.machine import cpu_machine
from tilegym_db.measurement.run_setup import RunSetup
from tilegym_db.paths import shipped_root
from tilegym_db.records.call import Call
from tilegym_db.records.workload import Case

H200 = replace(cpu_machine(), gpu="h200", sm="sm_90", device="cuda:0")
MARK = "tilegym-db-call "
END = "========= ERROR SUMMARY: 0 errors"


def done(name: str) -> str:
    return MARK + json.dumps({"at": "done", "solution": name, "seconds": 1.5})


def case(name: str) -> str:
    return MARK + json.dumps({"at": "case", "solution": name, "number": 0})


@pytest.fixture
def sweeping(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(shipped_root()))
    from benchmarks import sanitize_catalog

    return sanitize_catalog


@pytest.fixture
def pool(sweeping: ModuleType) -> ModuleType:
    from benchmarks import sanitize_pool

    return sanitize_pool


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return Catalog((shipped_root(),))


@pytest.fixture(scope="module")
def chosen(catalog: Catalog) -> list[Chosen]:
    one = Case(Call("row_scale", {"M": 2, "N": 3}, {"T": "float32"}))
    return [replace(item, cases=[one]) for item in choose_solutions(catalog, ["softmax"], H200)]


def tool(folder: Path, script: str) -> Path:
    program = folder / "compute-sanitizer"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return program


def sweep_of(pool: ModuleType, program: Path, told: list, limit_s: float = 60, **more: object):
    caches = program.parent / "caches"
    return pool.Sweep(program, "cpu", 2, time.monotonic() + limit_s, caches, told.append, **more)


def test_every_solution_is_in_one_batch_and_languages_take_turns(sweeping, chosen) -> None:
    batches = sweeping.batches_of(chosen * 5, ["triton", "cutile"], 3, ["memcheck", "racecheck"])
    assert [(batch.tool, tuple(batch.then)) for batch in batches] == [("plain", ("memcheck", "racecheck"))] * 4
    assert all(len(batch.solutions) <= 3 for batch in batches)
    languages = [batch.solutions[0].files.record.spec.language for batch in batches]
    assert languages == ["triton", "cutile"] * 2
    assert sum(len(batch.solutions) for batch in batches) == 10


def test_smallest_useful_cases_of_several_dtypes_are_taken(sweeping, catalog) -> None:
    (item,) = choose_solutions(catalog, ["rms_norm_triton"], H200)
    kept = sweeping.smallest(item, catalog.workloads_for(item.definition.name), 2, seed=3)
    assert len({str(one.call.dtypes) for one in kept.cases}) == 2
    sizes = [
        max(math.prod(item.definition.shape_of(name, one.call.axes)) for name in ("x", "out")) for one in kept.cases
    ]
    assert all(size <= 1 << 20 for size in sizes)
    assert min(sizes) >= sweeping.WORTH_A_CALL
    assert len(kept.workloads) == 2


def test_processes_side_by_side_have_ports_of_their_own(pool) -> None:
    commands = [pool.with_port(["tool", "--tool", "memcheck"], slot) for slot in range(16)]
    ports = [int(command[command.index("--port") + 1]) for command in commands]
    assert len({port // pool.PORTS for port in ports}) == len(ports)
    assert max(ports) + pool.PORTS < 1 << 16
    assert commands[0][0] == "tool"
    assert commands[0][-2:] == ["--tool", "memcheck"]


def test_processes_are_spread_over_the_devices_that_are_visible(pool) -> None:
    assert [pool.device_of(slot, 2, "") for slot in range(4)] == ["0", "1", "0", "1"]
    assert [pool.device_of(slot, 2, "2, 3") for slot in range(4)] == ["2", "3", "2", "3"]
    assert [pool.device_of(slot, 4, "GPU-a,GPU-b") for slot in range(3)] == ["GPU-a", "GPU-b", "GPU-a"]


@pytest.mark.turn("benchmarks/sanitize")  # a script that starts workers
def test_both_planted_mistakes_run_before_any_kernel_is_compiled(
    sweeping, pool, chosen, tmp_path: Path, catalog
) -> None:
    from benchmarks.sanitize_order import unchecked_first

    tools = ("memcheck", "racecheck")
    mistakes = sweeping.planted(RunSetup(H200, catalog, Path()), 2)
    controls = [pool.Batch(name, [item], is_control=True) for item in mistakes.values() for name in tools]
    kernels = sweeping.batches_of(chosen, ["triton"], 1, tools)
    ran = tmp_path / "ran"
    program = tool(tmp_path, f'for word in "$@"; do last=$word; done; cat $last >> {ran}; echo >> {ran}')
    for rank in (None, unchecked_first(tools, frozenset())):
        ran.write_text("")
        sweep = sweep_of(pool, program, [], order=("plain", *tools), rank=rank)
        sweep.jobs = 1
        sweep.run([*kernels, *controls])
        names = [item.files.name for item in mistakes.values()]
        lines = ran.read_text().splitlines()[:4]
        assert [next(name for name in names if name in line) for line in lines] == [
            name for name in names for _ in tools
        ]


def test_a_clean_kernel_and_one_that_no_time_was_left_for(sweeping, pool, chosen, tmp_path: Path) -> None:
    first = chosen[0]
    program = tool(tmp_path, f"cat <<'END'\n========= COMPUTE-SANITIZER\n{done(first.files.name)}\n{END}\nEND")
    told: list = []
    (clean,) = sweep_of(pool, program, told).run([pool.Batch("memcheck", [first])])
    assert clean.result.is_clean, clean
    record = sweeping.record_of(told[0])
    assert (record["result"], record["seconds"], record["tool"]) == ("clean", 1.5, "memcheck")
    assert record["shapes"] == [str(first.cases[0])]
    late = sweep_of(pool, program, told, limit_s=-1).run([pool.Batch("memcheck", [first], ("racecheck",))])
    assert [(out.result.tool, out.result.problem) for out in late] == [
        ("memcheck", pool.NO_TIME),
        ("racecheck", pool.NO_TIME),
    ]


def test_process_past_the_deadline_is_ended_and_proves_nothing(sweeping, pool, chosen, tmp_path: Path) -> None:
    sweep = sweep_of(pool, tool(tmp_path, "sleep 60"), [], limit_s=0.5)
    started = time.monotonic()
    outcomes = sweep.run([pool.Batch("memcheck", chosen)])
    assert time.monotonic() - started < 30
    results = [outcome.result for outcome in outcomes]
    assert [result.problem for result in results] == [pool.NO_TIME] * len(chosen)
    assert sweeping.summary(results, 1.0).splitlines()[1].split()[-2:] == ["1", "0"]


def test_hung_kernel_ends_alone_and_the_work_before_it_reruns(pool, sweeping, chosen, tmp_path: Path) -> None:
    good, hung = chosen[0].files.name, chosen[1].files.name
    script = f"""
request=$(for word in "$@"; do last=$word; done; echo $last)
if grep -q {good} $request; then echo '{done(good)}'; fi
if grep -q {hung} $request; then echo '{case(hung)}'; echo 'compiling'; sleep 60; fi
echo '{END}'"""
    outcomes = sweep_of(pool, tool(tmp_path, script), [], stall_s=1.0).run([pool.Batch("memcheck", chosen[:2])])
    by_name = {outcome.result.chosen.files.name: outcome for outcome in outcomes}
    assert len(outcomes) == 2
    assert by_name[good].result.is_clean
    assert "printed nothing for 1 s" in by_name[hung].result.problem
    assert "compiling" in by_name[hung].said
    assert sweeping.kind_of(by_name[hung].result) == "no verdict"


@pytest.mark.turn("benchmarks/sanitize")  # a script that starts workers
def test_a_kernel_that_fails_without_a_tool_is_run_under_none(sweeping, pool, chosen, tmp_path: Path) -> None:
    (python,) = choose_solutions(Catalog((shipped_root(),)), ["softmax_stock"], H200)
    good, bad = replace(python, cases=chosen[0].cases), chosen[1]  # no tile language runs on a CPU
    program = tool(tmp_path, f"echo '{done(good.files.name)}'; echo '{END}'")
    sweep = sweep_of(pool, program, [], order=("plain", "memcheck"))
    outcomes = sweep.run([pool.Batch("plain", [bad, good], ("memcheck",))])
    said = {(out.result.chosen.files.name, out.result.tool): sweeping.kind_of(out.result) for out in outcomes}
    assert said == {
        (bad.files.name, "plain"): "no verdict",
        (bad.files.name, "memcheck"): "not run",
        (good.files.name, "plain"): "clean",
        (good.files.name, "memcheck"): "clean",
    }
    (why,) = [out.result.problem for out in outcomes if sweeping.kind_of(out.result) == "not run"]
    assert "fails without a tool" in why


def test_a_planted_mistake_counts_as_found_only_by_its_own_tool(sweeping, catalog) -> None:
    mistakes = sweeping.planted(RunSetup(H200, catalog, Path()), 2)
    write = SanitizerFinding("Invalid __global__ write of size 2 bytes", "unmasked_gate", "kernel.py:16")
    found = [
        Sanitized(mistakes["out_of_bounds"], "memcheck", (write,)),
        Sanitized(mistakes["shared_race"], "racecheck", problem="no device"),
    ]
    said = "racecheck did not find the planted mistake 'shared_race': no device"
    assert sweeping.missed(found, mistakes) == [said]
    assert "FOUND 1: Invalid __global__ write" in sweeping.line_of(found[0])
