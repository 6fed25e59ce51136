"""compute-sanitizer and Nsight Compute over Solutions: what their output means, and what is run under them.

The files in ``recorded`` have the format of the tools' releases of 2021 to 2026; ``without_device.txt`` is what release 2026.4
printed on a machine without a GPU.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from raising import raises

from tilegym_db.catalog import Catalog, SolutionFiles
from tilegym_db.cli.debug import print_kernels
from tilegym_db.errors import NotFoundError, SolutionError, ToolchainError
from tilegym_db.measurement.instruments.calls import arguments_of
from tilegym_db.measurement.instruments.profile import CallProfile, parse_profile, profile_path, profiler_command
from tilegym_db.measurement.instruments.requests import (
    Chosen,
    SolutionCalls,
    choose_solutions,
    find_program,
    output_of,
    read_request,
    with_cases,
    write_request,
)
from tilegym_db.measurement.instruments.sanitize import (
    TOOLS,
    Run,
    Sanitized,
    SanitizerFinding,
    parse_report,
    record_failures,
    sanitize,
    sanitizer_command,
    verdicts_of,
)
from tilegym_db.measurement.machine import cpu_machine
from tilegym_db.measurement.run_setup import RunSetup
from tilegym_db.paths import shipped_root
from tilegym_db.records.call import Call
from tilegym_db.records.workload import Case
from tilegym_db.store.opening import open_store

HERE = Path(__file__).parent
H200 = replace(cpu_machine(), gpu="h200", sm="sm_90", device="cuda:0")


def recorded(name: str) -> str:
    return (HERE / "recorded" / name).read_text()


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return Catalog((shipped_root(),))


@pytest.fixture
def two(catalog: Catalog) -> list[Chosen]:
    """Two Solutions that go by the names in the recorded output, with two cases each."""
    (softmax,) = choose_solutions(catalog, ["softmax_triton"], H200)
    case = Case(Call("softmax", {"M": 2, "N": 3}, {"T": "float32"}))
    files = [replace(softmax.files, record=softmax.files.record.model_copy(update={"name": name})) for name in "ab"]
    workload = catalog.workloads_for("softmax")[0]
    return [Chosen(one, softmax.definition, [case, case], [workload, workload]) for one in files]


# -- what the tools print ----------------------------------------------------------------------------------------------


def test_access_out_of_bounds_has_kernel_line_call_and_count():
    report = parse_report(recorded("memcheck.txt"))
    (finding,) = report.findings
    assert str(finding) == "Invalid __global__ write of size 4 bytes in unmasked_gate at kernel.py:16"
    assert (finding.solution, finding.case, finding.times) == ("a", 1, 2)
    assert "by thread (31,0,0) in block (6,0,0)" in finding.details
    assert report.stopped == ("a", "AcceleratorError: CUDA error: unspecified launch failure")
    assert report.is_complete


def test_a_race_names_both_sides_and_a_warning_is_none():
    race, warning = parse_report(recorded("racecheck.txt")).findings
    assert str(race) == "Race reported between Write access in racing_gate_rows_kernel at tvm_kernels.cu:23"
    assert (race.times, race.is_warning, warning.is_warning) == (6146, False, True)
    assert race.details[0].startswith("and Read access at racing_gate_rows_kernel+0x1d0 in tvm_kernels.cu:24")


def test_older_releases_put_the_line_elsewhere():
    found = [(one.what, one.kernel, one.place) for one in parse_report(recorded("older.txt")).findings]
    assert found == [
        ("Invalid __global__ read of size 16 bytes", "fused_moe_kernel", "/work/fused_moe.py:175"),
        ("Uninitialized __global__ memory read of size 4 bytes", "sums(float const *, float *)", ""),
        ("Barrier error detected. Divergent thread(s) in warp", "divergent(int *)", "probe.cu:20"),
    ]


def test_a_tool_that_did_not_get_to_its_end_proves_nothing(two: list[Chosen]):
    report = parse_report(recorded("without_device.txt"))
    assert not report.is_complete
    (first,), left = verdicts_of("memcheck", two, report)
    assert "did not finish: Error: process didn't terminate successfully" in first.problem
    assert not first.is_clean
    assert left == two[1:]


def test_profile_has_bandwidth_occupancy_registers_and_stalls(capsys: pytest.CaptureFixture[str]):
    rows, tail = parse_profile(recorded("profile.csv"))
    assert (rows.kernel, rows.time_us, rows.metrics["registers"], rows.metrics["grid"]) == ("_rows", 20.48, 40, 4096)
    assert rows.bytes_per_s == pytest.approx((33554432 + 29360128) / 20480e-9)
    assert rows.stalls == {"long_scoreboard": 17.5, "barrier": 4.25}
    assert tail.bytes_per_s is None
    print_kernels([rows, tail])
    shown = capsys.readouterr().out
    assert "3072" in shown
    assert "warps waiting at each issue: long scoreboard 17.50, barrier 4.25" in shown


def test_units_of_older_releases_are_converted():
    text = recorded("profile.csv").replace('"%","ns"', '"%","usecond"').replace('"20,480"', '"20.48"')
    assert parse_profile(text)[0].time_us == pytest.approx(20.48)


@pytest.mark.parametrize(
    ("said", "code", "fact"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission", "profiler_failed", "ERR_NVGPUCTRPERM"),
        ("", "profiler_failed", ""),
        ('==PROF== Disconnected\n"ID","Kernel Name"\n"",""\n', "profiler_saw_nothing", ""),
    ],
)
def test_a_profile_without_kernels_says_what_the_tool_said(said: str, code: str, fact: str):
    with raises(ToolchainError, code, fact):
        parse_profile(said)


# -- what is run -------------------------------------------------------------------------------------------------------


def test_an_absent_tool_is_named_with_how_to_get_it():
    with raises(ToolchainError, "program_absent", "compute-sanitizer", "nvidia-cuda-sanitizer-api"):
        find_program("compute-sanitizer", {"PATH": ""}, installed=lambda name: ())
    with raises(ToolchainError, "program_absent", "ncu", "cuda-nsight-compute"):
        find_program("ncu", {"PATH": ""}, installed=lambda name: [Path("/nowhere") / name])


def test_tool_is_found_in_the_named_toolkit_and_on_the_path(tmp_path: Path):
    for folder in ("toolkit/bin", "path"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "ncu").touch(mode=0o755)
    environ = {"PATH": str(tmp_path / "path"), "CUDA_HOME": str(tmp_path / "toolkit")}
    assert find_program("ncu", environ) == tmp_path / "toolkit/bin/ncu"
    assert find_program("ncu", {"PATH": environ["PATH"]}) == tmp_path / "path/ncu"


def test_commands_name_the_tool_its_options_and_the_program(tmp_path: Path):
    command = sanitizer_command(Path("/x/compute-sanitizer"), "memcheck", tmp_path / "r.json")
    assert command[:3] == ["/x/compute-sanitizer", "--tool", "memcheck"]
    assert {"--padding", "--destroy-on-device-error"} <= set(command)
    assert command[-4:] == [sys.executable, "-m", "tilegym_db.measurement.instruments.calls", str(tmp_path / "r.json")]
    assert "--clock-control" in profiler_command(Path("ncu"), tmp_path / "r.json")


@pytest.mark.turn("tilegym_db/measurement/instruments/")  # reads the whole catalog
def test_names_cover_solutions_definitions_folders_or_all(catalog: Catalog, tmp_path: Path):
    assert [item.files.name for item in choose_solutions(catalog, ["softmax_triton"], H200)] == ["softmax_triton"]
    of_definition = choose_solutions(catalog, ["softmax"], H200)
    assert {item.files.record.spec.language for item in of_definition} == {"triton", "tilelang", "cutile"}
    for part in ("softmax", "activation", "_lib"):  # each choice draws the cases of its operator
        for folder in ("definitions", "solutions", "workloads"):
            if (shipped_root() / folder / part).is_dir():
                shutil.copytree(shipped_root() / folder / part, tmp_path / folder / part)
    small = Catalog((tmp_path,))
    every = choose_solutions(small, [], H200, "triton")
    assert {item.files.record.spec.role for item in every} == {"kernel"}
    assert len(every) > len(choose_solutions(small, ["softmax"], H200, "triton"))
    (draft,) = choose_solutions(catalog, [str(HERE / "planted" / "out_of_bounds")], H200)
    assert (draft.files.name, draft.in_catalog) == ("silu_and_mul_out_of_bounds", False)
    with raises(NotFoundError, "name_unknown", "'softmax_triton'"):
        choose_solutions(catalog, ["softmax_trton"], H200)


def test_source_refused_by_the_scan_does_not_run_unsandboxed(catalog: Catalog, tmp_path: Path):
    shutil.copytree(HERE / "planted" / "out_of_bounds", tmp_path / "x")
    (tmp_path / "x" / "kernel.py").write_text("import os\n\n\ndef run(x, out):\n    os.system('true')\n")
    with raises(SolutionError, "scan_refused"):
        choose_solutions(catalog, [str(tmp_path / "x")], H200)


def test_cases_cover_every_dtype_and_repeat_for_the_same_seed(catalog: Catalog):
    (softmax,) = choose_solutions(catalog, ["softmax_triton"], H200)
    workloads = catalog.workloads_for("softmax")
    drawn = with_cases(softmax, workloads, 12, seed=1)
    assert {case.call.dtypes["T"] for case in drawn.cases} == {item.dtypes["T"] for item in workloads}
    assert len(drawn.cases) == len(drawn.workloads) <= 12
    assert drawn == with_cases(softmax, workloads, 12, seed=1)


def test_a_request_is_read_as_it_was_written(tmp_path: Path):
    case = Case(
        Call("row_scale", {"M": 2}, {"T": "float32"}, {"x": "strided(8, 1)"}, {"eps": 1e-6}),
        distribution="outliers",
        seed=3,
        offset=1,
    )
    calls = SolutionCalls("a", tmp_path / "solution.json", "d", "rms_norm", [case], {"BLOCK": 2})
    write_request(tmp_path / "r.json", "cuda:0", [calls], profile=True)
    assert read_request(tmp_path / "r.json") == ("cuda:0", [calls], True)


def test_a_tensor_is_the_end_of_an_allocation_of_its_own(catalog: Catalog):
    definition = catalog.definition("rms_norm")
    case = Case(
        Call(definition.name, {"M": 3, "N": 5}, {"T": "float32"}, {"x": "strided(8, 1)"}, {"eps": 1e-6}), offset=1
    )
    given = arguments_of(definition, case, "cpu")
    assert list(given) == ["x", "weight", "eps", "out"]
    assert given["x"].stride() == (8, 1)
    for name, elements in (("x", 1 + 2 * 8 + 5), ("weight", 1 + 5), ("out", 1 + 15)):
        assert given[name].untyped_storage().nbytes() == 4 * elements
        assert given[name].storage_offset() == 1


@pytest.mark.turn("tilegym_db/measurement/instruments/")  # starts the program of a tool
@pytest.mark.slow
def test_program_calls_each_solution_at_each_case_and_says_so(catalog: Catalog, tmp_path: Path):
    files, definition = catalog.solution("softmax_stock"), catalog.definition("softmax")
    cases = [
        Case(Call(definition.name, definition.bind_axes({"M": 2, "N": size}), {"T": "float32"})) for size in (3, 5)
    ]
    good = SolutionCalls("softmax_stock", files.path, files.digest, "softmax", cases)
    wrong = replace(good, name="other", config={"no_such_tunable": 1})
    write_request(tmp_path / "r.json", "cpu", [good, wrong])
    said = output_of(
        [sys.executable, "-m", "tilegym_db.measurement.instruments.calls", str(tmp_path / "r.json")], tmp_path
    )
    report = parse_report(said)
    assert report.done == ["softmax_stock"], said
    assert report.stopped is not None
    assert "no_such_tunable" in report.stopped[1]


def test_a_run_goes_on_behind_a_solution_that_ended_it(two: list[Chosen], tmp_path: Path):
    clean = '========= COMPUTE-SANITIZER\ntilegym-db-call {"at": "done", "solution": "b"}\n========= ERROR SUMMARY: 0 errors\n'
    answers, asked = [recorded("memcheck.txt"), clean], []

    def execute(command: list[str], folder: Path) -> str:
        asked.append([calls["name"] for calls in json.loads(Path(command[-1]).read_text())["calls"]])
        return answers[len(asked) - 1]

    first, second = Run("memcheck", "cuda:0", execute, Path("tool")).over(two, tmp_path)
    assert asked == [["a", "b"], ["b"]]
    assert (len(first.errors), first.is_clean, second.is_clean) == (1, False, True)


def test_a_warning_alone_is_clean_and_a_call_that_raised_is_not(two: list[Chosen]):
    warned = Sanitized(two[0], "racecheck", (SanitizerFinding("Race reported", is_warning=True),))
    raised = Sanitized(two[0], "racecheck", problem="RuntimeError: out of memory")
    assert (warned.is_clean, raised.is_clean) == (True, False)


def test_finding_becomes_a_failed_trace_with_line_and_command(row_scale: Path, home: Path):
    setup = RunSetup.of("cpu", None, None)
    files, definition = setup.catalog.solution("row_scale_stock"), setup.catalog.definition("row_scale")
    workload = setup.catalog.workloads_for("row_scale")[0]
    case = Case.of_workload(definition, workload, distribution="normal", seed=7)
    chosen = Chosen(files, definition, [case], [workload])
    finding = SanitizerFinding("Invalid __global__ write of size 4 bytes", "kernel", "kernel.py:9", solution=files.name)
    assert record_failures([Sanitized(replace(chosen, in_catalog=False), "memcheck", (finding,))], setup) == []
    (trace,) = record_failures([Sanitized(chosen, "memcheck", (finding,))], setup)
    with open_store(read_only=True) as store:
        (row,) = store.rows("SELECT status, reason, gate, trace_id FROM traces")
    assert row["trace_id"] == trace.trace_id
    assert row["status"] == "RUNTIME_ERROR"
    assert "in kernel at kernel.py:9" in row["reason"]
    assert trace.failure is not None
    assert trace.failure.command.startswith("tilegym-db debug reproduce row_scale_stock --gpu cpu")


def test_side_data_lies_by_gpu_source_and_workload(catalog: Catalog, tmp_path: Path):
    workload = catalog.workloads_for("softmax")[0]
    found = CallProfile("s", "d" * 64, workload, workload.axes, {}, "h200", parse_profile(recorded("profile.csv")))
    assert profile_path(tmp_path, found) == tmp_path / "profiles" / "h200" / ("d" * 16) / f"{workload.uuid}.json"
    assert json.loads(json.dumps(found.to_dict()))["kernels"][0]["stalls"] == {"long_scoreboard": 17.5, "barrier": 4.25}


def planted(name: str, catalog: Catalog, cases: int) -> Chosen:
    files = SolutionFiles.read(HERE / "planted" / name)
    chosen = Chosen(files, catalog.definition(files.record.definition), in_catalog=False)
    return with_cases(chosen, catalog.workloads_for(chosen.definition.name), cases, seed=1)


@pytest.mark.parametrize("name", ["out_of_bounds", "shared_race"])
def test_a_planted_kernel_is_valid_and_has_cases(name: str, catalog: Catalog):
    chosen = planted(name, catalog, 12)
    assert (chosen.files.record.spec.role, len(chosen.cases) > 0) == ("kernel", True)


def test_a_kernel_that_turns_a_check_off_is_not_run_by_name(catalog: Catalog):
    with raises(SolutionError, "scan_refused"):
        choose_solutions(catalog, [str(HERE / "planted" / "shared_race")], H200)


# -- on a GPU ----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "tool", "what"),
    [("out_of_bounds", "memcheck", "Invalid __global__ write"), ("shared_race", "racecheck", "Race")],
)
def test_a_planted_mistake_is_found(name: str, tool: str, what: str, catalog: Catalog, tmp_path: Path):
    run = Run(tool, "cuda:0", output_of, find_program("compute-sanitizer"))
    (result,) = run.over([planted(name, catalog, 4)], tmp_path)
    assert any(finding.what.startswith(what) for finding in result.errors), result


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_nothing_is_found_in_a_shipped_kernel():
    results = sanitize(["softmax_triton"], cases=6)
    assert len(results) == len(TOOLS)
    assert [result for result in results if not result.is_clean] == []


def run_command(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": "", "CUDA_HOME": "", "CUDA_PATH": ""}
    return subprocess.run(
        [sys.executable, "-m", "tilegym_db", *words], capture_output=True, text=True, env=environment, check=False
    )


@pytest.mark.turn("tilegym_db/measurement/instruments/")  # separate processes
@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "words", [("debug", "sanitize", "softmax_triton"), ("debug", "profile", "softmax_triton", "--workload", "*")]
)
def test_a_command_without_its_tool_says_which_and_fails(words: tuple[str, ...]):
    answer = run_command(*words)
    assert answer.returncode == 2
    assert "Fix:" in answer.stderr or "NVIDIA GPU" in answer.stderr
    assert "Traceback" not in answer.stderr
