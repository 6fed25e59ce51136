from __future__ import annotations

import os

import pytest

from tilegym_db.cli.doctor import gpu_check, peaks_check
from tilegym_db.measurement import machine
from tilegym_db.measurement.machine import Machine
from tilegym_db.records.roofline import GpuPeaks
from tilegym_db.store.side_files import save_peaks

RATE = {"spread": 0.004, "rounds": 5, "how": "a call"}
H200 = Machine("cuda:0", "h200", "NVIDIA H200", "sm_90", driver="580.159.04")
PEAKS = GpuPeaks.from_dict(
    {
        "gpu": "h200",
        "gpu_name": "NVIDIA H200",
        "sm": "sm_90",
        "driver": "580.159.04",
        "timestamp": "2026-11-21T05:00:00Z",
        "timer": "events",
        "copy_bytes_per_s": {"value": 4.3e12, **RATE},
        "launch_us": {"value": 3.5, **RATE},
        "no_launch_us": {"value": 0.8, **RATE},
        "l2_bytes": 62914560,
        "sm_count": 132,
        "max_sm_mhz": 1980,
        "max_memory_mhz": 3201,
        "memory_bus_bits": 6144,
    }
)


def test_doctor_reports_versions_catalog_and_store(cli, row_scale, home):
    found = {check["what"]: check for check in cli("doctor", "--json").json()}
    assert found["catalog"]["state"] == "ok"
    assert "1 definitions, 1 solutions, 1 workloads" in found["catalog"]["detail"]
    assert str(home / "tilegym.duckdb") in found["store"]["detail"]
    assert {"python", "torch", "gpu", "triton", "tilelang", "cutile"} <= found.keys()


def test_every_gap_comes_with_its_fix(cli, row_scale):
    checks = cli("doctor", "--json").json()
    assert [check["what"] for check in checks if check["state"] == "missing" and not check["fix"]] == []


def test_a_store_that_cannot_be_written_is_a_problem(cli, row_scale, home):
    home.write_text("a file where the folder should be")
    result = cli("doctor")
    assert result.code == 2
    assert "absolute path" in result.err


def test_a_broken_record_is_a_problem(cli, row_scale):
    (row_scale / "definitions" / "elementwise" / "row_scale.json").write_text("{")
    result = cli("doctor")
    assert result.code == 1
    assert "PROBLEM  catalog" in result.out
    assert "row_scale.json: not valid JSON" in " ".join(result.out.split())


def test_a_missing_toolchain_names_the_extra_to_install(cli, row_scale, monkeypatch):
    from tilegym_db.backends import toolchains

    monkeypatch.setattr(toolchains, "_is_installed", lambda package: package != "tilelang")
    check = next(check for check in cli("doctor", "--json").json() if check["what"] == "tilelang")
    assert check["state"] == "missing"
    assert check["fix"] == "pip install 'tilegym-db[tilelang]'"


@pytest.mark.parametrize(
    ("driver", "usable", "cuda", "state"),
    [
        (("NVIDIA H200",), ("NVIDIA H200 (h200, sm_90)",), "13.0", "ok"),
        ((), (), None, "missing"),
        (("NVIDIA H200",), (), None, "problem"),
        (("NVIDIA H200",), (), "13.0", "problem"),
    ],
)
def test_drivers_gpus_are_compared_with_those_usable_by_torch(driver, usable, cuda, state):
    check = gpu_check(driver, usable, cuda)
    assert check.state == state
    assert bool(check.fix) == (state != "ok")


def test_version_lists_what_a_measurement_depends_on(cli):
    assert cli("doctor", "versions").out.startswith("tilegym-db 0.")
    assert cli("doctor", "versions", "--json").json().keys() >= {"tilegym-db", "python", "duckdb", "torch", "triton"}


def test_doctor_says_when_the_gpu_was_calibrated_or_how_to_do_it(cli, row_scale, home, monkeypatch):
    monkeypatch.setattr(machine, "_cuda_machine", lambda index: H200)
    save_peaks(PEAKS.model_copy(update={"driver": "570.1"}), home)
    (check,) = [check for check in cli("doctor", "--json").json() if check["what"] == "peaks"]
    assert (check["state"], check["fix"][:27]) == ("missing", "tilegym-db doctor calibrate")
    assert "not calibrated with driver 580.159.04; known: 2026-11-21, NVIDIA H200, driver 570.1" in check["detail"]
    save_peaks(PEAKS, home)
    result = cli("doctor")
    text = " ".join(result.out.split())
    assert "peaks h200 calibrated 2026-11-21, NVIDIA H200, driver 580.159.04: copy 4.3 TB/s" in text


def test_uncalibrated_gpu_is_named_with_the_command():
    check = peaks_check(None, None, "h200", "580")
    assert (check.state, check.detail) == (
        "missing",
        "h200 is not calibrated, so traces have no speed of light",
    )
    assert check.fix.startswith("tilegym-db doctor calibrate")


def test_a_machine_without_a_gpu_is_not_asked_for_its_peaks(cli, row_scale, monkeypatch):
    monkeypatch.setattr(machine, "_cuda_machine", lambda index: None)
    assert [check for check in cli("doctor", "--json").json() if check["what"] == "peaks"] == []


@pytest.mark.parametrize(("folder", "what"), [("peaks", "calibrations"), ("model_runs", "model runs")])
def test_broken_files_of_the_home_are_counted_and_named(folder, what, cli, row_scale, home):
    (home / folder).mkdir(parents=True)
    for number in range(5):
        (home / folder / f"broken{number}.json").write_bytes(b'{"name": 1}\n' if number else b"\xff\xfe\n")
    result = cli("doctor", "--json")
    assert result.code == 1
    (check,) = [check for check in result.json() if check["what"] == what]
    assert check["state"] == "problem"
    assert check["detail"].startswith(f"5 of 5 {what} are broken and left out: ")
    assert check["detail"].count("broken") >= 4
    assert check["detail"].endswith("and 2 more")
    assert f"move them out of {home / folder}" in check["fix"]


def test_journals_with_broken_lines_stay_where_they_are(cli, row_scale, home, journal_traces):
    journal_traces(3.0)
    for number, content in enumerate((b"\xff\xfe\n", b'{"name": 1}\n', b"garbage\n", b'{"name": \n}\n')):
        (home / "runs" / f"broken{number}.jsonl").write_bytes(content)
    result = cli("doctor", "--json")
    assert result.code == 1
    (check,) = [check for check in result.json() if (check["what"], check["state"]) == ("journals", "problem")]
    assert check["detail"].startswith("4 of 5 journals have lines that are left out: ")
    assert check["detail"].endswith("and 1 more")
    assert "move" not in check["fix"]
    assert "leave the files where they are" in check["fix"]


@pytest.mark.parametrize("kind", ["a FIFO", "a folder", "a link to nothing"])
def test_a_journal_that_is_no_regular_file_is_a_problem(kind, cli, row_scale, home):
    path = home / "runs" / "odd.jsonl"
    path.parent.mkdir(parents=True)
    {"a FIFO": os.mkfifo, "a folder": os.mkdir, "a link to nothing": lambda link: link.symlink_to("nowhere")}[kind](
        path
    )
    result = cli("doctor", "--json")
    (check,) = [check for check in result.json() if check["what"] == "journals"]
    assert (result.code, check["state"]) == (1, "problem")
    assert check["detail"].startswith(f"1 of 1 journals is broken and left out: {path}: cannot read this journal")


def test_the_journals_of_the_loop_are_read_too(cli, row_scale, home):
    (home / "loop").mkdir(parents=True)
    os.mkfifo(home / "loop" / "promotions.jsonl")
    (home / "loop" / "attempts.jsonl").write_bytes(b"garbage\n")
    (home / "loop" / "tasks.jsonl").write_bytes(b'{"id": "a\n{"id": "b')
    result = cli("doctor", "--json")
    checks = [check for check in result.json() if check["what"] == "loop journals"]
    assert (result.code, [check["state"] for check in checks]) == (1, ["problem", "problem", "missing"])
    whole, lines, torn = (check["detail"] for check in checks)
    assert "promotions.jsonl: cannot read this journal: it is a FIFO" in whole
    assert lines.startswith("1 of 3 loop journals has lines that are left out: ")
    assert "attempts.jsonl:1: not valid JSON" in lines
    assert torn.startswith("2 lines were cut off when the writer was killed: ")


@pytest.mark.parametrize("ended", [False, True])
def test_torn_line_of_a_killed_writer_is_reported_as_no_problem(ended, cli, row_scale, home, journal_traces):
    """Also where the next writer has ended it, and gone on."""
    journal_traces(3.0)
    path = home / "runs" / "run-1.jsonl"
    whole = path.read_text()
    path.write_text(f'{whole}{{"trace_id": "a' + (f"\n{whole}" if ended else ""))
    result = cli("doctor", "--json")
    (check,) = [check for check in result.json() if check["what"] == "journals"]
    assert (check["state"], "run-1.jsonl:2: cut off in mid write" in check["detail"]) == ("missing", True)
    assert result.code == 0


def test_doctor_reads_no_more_files_than_it_has_time_for(cli, row_scale, home, journal_traces, monkeypatch):
    journal_traces(3.0)
    monkeypatch.setattr("tilegym_db.store.broken_files.BUDGET_S", -1.0)
    (check,) = [check for check in cli("doctor", "--json").json() if check["what"] == "journals"]
    assert (check["state"], check["detail"].split(",")[0]) == ("ok", "1 older journals were not read")


def test_doctor_says_that_serving_is_off_and_how_to_turn_it_on(cli, row_scale, monkeypatch):
    assert "serving" not in {check["what"] for check in cli("doctor", "--json").json()}
    monkeypatch.setenv("TILEGYM_DB_DISABLE", "1")
    found = {check["what"]: check for check in cli("doctor", "--json").json()}
    assert found["serving"]["state"] == "missing"
    assert "TILEGYM_DB_DISABLE" in found["serving"]["fix"]
