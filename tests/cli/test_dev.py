from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

KERNEL = "def run(x, weight, factor):\n    return (x.float() * weight.float() * factor).to(x.dtype)\n"
TRITON = """import triton
import triton.language as tl


@triton.jit
def scale_row(x, weight, factor, out, N: tl.constexpr, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    inside = columns < N
    row = tl.program_id(0).to(tl.int64) * N
    value = tl.load(x + row + columns, mask=inside).to(tl.float32) * tl.load(weight + columns, mask=inside) * factor
    tl.store(out + row + columns, value.to(out.dtype.element_ty), mask=inside)


def run(x, weight, factor, out):
    rows, width = x.shape
    scale_row[(rows,)](x, weight, factor, out, width, triton.next_power_of_2(width))
"""
ON_A_CPU = ("-d", "row_scale", "--gpu", "cpu")


@pytest.fixture
def kernel(tmp_path, row_scale):
    path = tmp_path / "mine.py"
    path.write_text(TRITON)
    return path


def test_passing_kernel_prints_one_line_per_step(cli, kernel, row_scale, home, snapshot):
    before = snapshot(row_scale)
    result = cli("dev", kernel, *ON_A_CPU)
    assert result.code == 0
    head, *steps = result.out.splitlines()
    assert "row_scale M=4 N=8 T=float32" in head
    assert [line.split()[0] for line in steps] == ["scan", "compile", "check", "time"]
    assert "PASSED" in steps[2]
    assert snapshot(row_scale) == before
    assert not home.exists()


def test_wrong_kernel_is_a_finding_with_the_failed_gate(cli, kernel):
    kernel.write_text(KERNEL.replace("* factor", "* 2 * factor"))
    result = cli("dev", kernel, *ON_A_CPU, "--axes", "M=64,N=64", "--dtype", "T=bfloat16", "--json")
    assert result.code == 1
    report = result.json()
    assert (report["passed"], report["axes"], report["dtypes"]) == (False, {"M": 64, "N": 64}, {"T": "bfloat16"})
    problem = report["problem"]
    assert (problem["step"], problem["code"], problem["status"]) == ("check", "rel_fro", "INCORRECT_NUMERICAL")
    assert (problem["output"], len(problem["index"])) == ("out", 2)
    assert float(problem["got"]) == pytest.approx(2 * float(problem["expected"]), rel=0.05)
    assert (report["latency_us"], report["errors"]) == (None, None)


@pytest.mark.turn("tilegym_db/cli/dev.py", "tilegym_db/measurement/dev.py")  # several rounds of dev
@pytest.mark.slow
def test_each_open_place_of_a_draft_is_named_until_it_is_gone(cli, row_scale, tmp_path):
    draft = tmp_path / "draft"
    assert cli("new", "solution", "row_scale", "-l", "python", "-o", draft).code == 0
    record = draft / "solution.json"
    tried = cli("dev", draft, "--gpu", "cpu", "--json").json()
    assert [place.partition(":")[0] for place in tried["open_places"]] == ["solution.json", "kernel.py"]
    (draft / "kernel.py").write_text(KERNEL)
    result = cli("dev", draft, "--gpu", "cpu")
    (line,) = [line for line in result.out.splitlines() if line.startswith("draft ")]
    assert (result.code, "solution.json" in line) == (0, True)
    assert cli("add-solution", draft).cause == "draft_unfinished"
    record.write_text(record.read_text().replace("TODO: ", ""))
    assert not any(line.startswith("draft ") for line in cli("dev", draft, "--gpu", "cpu").out.splitlines())
    assert cli("add-solution", draft).code == 0


def test_timed_kernel_has_a_latency_and_a_speedup(cli, kernel):
    kernel.write_text(KERNEL)
    report = cli("dev", kernel, *ON_A_CPU, "--json").json()
    assert (report["passed"], report["timer"], report["compile"]) == (True, "wall", None)
    assert report["latency_us"] > 0
    assert report["speedup"] > 0


def test_scan_finding_ends_the_round(cli, kernel):
    kernel.write_text("import threading\n" + TRITON)
    result = cli("dev", kernel, *ON_A_CPU)
    assert result.code == 1
    assert "scan_refused" in result.out
    assert "mine.py:1" in result.out
    assert "compile" not in result.out


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        (("-d", "row_scales"), "definition_unknown"),
        ((), "options_missing"),
        (("-d", "row_scale", "-l", "rust"), "language_unknown"),
        (("-d", "row_scale", "--axes", "K=4"), "axis_unknown"),
        (("-d", "row_scale", "--target", "sm_1"), "target_unknown"),
        (("-d", "row_scale", "--gpu", "h900"), "gpu_unknown"),
    ],
)
def test_wrong_request_is_wrong_usage(cli, kernel, options, cause):
    result = cli("dev", kernel, *(() if "--gpu" in options else ("--gpu", "cpu")), *options)
    assert (result.code, result.cause, result.out) == (2, cause, "")


@pytest.mark.turn("tilegym_db/cli/dev.py")  # test_dev.py of measurement has rounds of a session daily
def test_watch_prints_a_round_per_edit_and_ends_well(tmp_path, home):
    kernel = tmp_path / "gate.py"
    right = (
        "def run(x):\n    gate, up = x.float().chunk(2, dim=-1)\n    return (gate.sigmoid() * gate * up).to(x.dtype)\n"
    )
    kernel.write_text(right)
    words = ["dev", str(kernel), "-d", "silu_and_mul", "--gpu", "cpu", "--watch", "--json"]
    process = subprocess.Popen(
        [sys.executable, "-m", "tilegym_db", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TILEGYM_DB_HOME": str(home)},
    )
    try:
        assert json.loads(process.stdout.readline())["passed"]
        kernel.write_text(right.replace("* up", "* up * 2"))
        assert json.loads(process.stdout.readline())["problem"]["step"] == "check"
        kernel.write_text(right.replace("return", "return return"))
        assert json.loads(process.stdout.readline())["problem"]["code"] == "python_syntax"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.stdout.close()
    assert not home.exists()


def test_kernel_that_is_missing_names_the_command_of_a_draft(cli, row_scale, tmp_path):
    refused = cli("dev", str(tmp_path / "none.py"), "-d", "row_scale")
    assert refused.code == 2
    assert "tilegym-db new solution" in " ".join(refused.err.split())
