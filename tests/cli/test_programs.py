"""What a command does whose program of NVIDIA's is not installed, or fails."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tilegym_db.cli.kit.options import needing_program
from tilegym_db.errors import ToolchainError
from tilegym_db.measurement.instruments import requests

COMMANDS = [("debug", "sanitize", "row_scale_stock"), ("debug", "profile", "row_scale_stock", "--workload", "*")]


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine on which none of the programs is."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("DEFAULT_TOOLKIT", "NSIGHT_FOLDER"):
        monkeypatch.setattr(requests, name, tmp_path / "none")
    monkeypatch.setattr(requests, "package_folders", lambda: [])


@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_whose_program_is_not_installed_ends_with_the_status_of_a_missing_package(
    words, cli, row_scale, nowhere
):
    result = cli(*words)
    assert (result.code, result.cause) == (2, "program_absent")
    assert "Fix:" in result.err


def test_what_is_asked_wrongly_is_named_before_the_program_that_is_missing(cli, row_scale, nowhere):
    result = cli("debug", "sanitize", "row_scale_stock", "--tool", "nocheck")
    assert (result.code, result.cause, "'nocheck'" in result.err) == (2, "tool_unknown", True)


def test_a_program_that_is_there_and_fails_is_a_failure(tmp_path, monkeypatch):
    program = tmp_path / "ncu"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(ToolchainError) as failed, needing_program("ncu"):
        raise ToolchainError("Nsight Compute measured nothing")
    assert failed.value.exit_code == 1
