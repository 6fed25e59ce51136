from __future__ import annotations

import pytest

from tilegym_db.cli.doctor import gpu_check


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
    assert result.code == 1
    assert "PROBLEM  store" in result.out
    assert "set TILEGYM_DB_HOME" in result.out


def test_a_broken_record_is_a_problem(cli, row_scale):
    (row_scale / "definitions" / "elementwise" / "row_scale.json").write_text("{")
    result = cli("doctor")
    assert result.code == 1
    assert "PROBLEM  catalog" in result.out
    assert "row_scale.json: not valid JSON" in result.out


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
def test_the_drivers_gpus_are_compared_with_those_that_torch_can_use(driver, usable, cuda, state):
    check = gpu_check(driver, usable, cuda)
    assert check.state == state
    assert bool(check.fix) == (state != "ok")


def test_version_lists_what_a_measurement_depends_on(cli):
    assert cli("version").out.startswith("tilegym-db 0.")
    assert cli("version", "--json").json().keys() >= {"tilegym-db", "python", "duckdb", "torch", "triton"}
