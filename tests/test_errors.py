"""Errors: a missing package is one sentence with what to install, and a refused record keeps nothing alive."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

from tilegym_db.errors import REQUIRED, RecordError, did_you_mean, missing_package
from tilegym_db.records import Trace

ROOT = Path(__file__).parents[1]
BLOCK = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {name!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocked())
"""


def test_every_required_package_is_known_by_its_modules():
    import tomllib

    text = (ROOT / "pyproject.toml").read_text()
    declared = {re.split("[^a-z-]", line)[0] for line in tomllib.loads(text)["project"]["dependencies"]}
    assert declared == set(REQUIRED.values())
    for module, package in REQUIRED.items():
        assert f"pip install {package}" in str(missing_package(f"{module}.inner"))
    assert missing_package("of_somebody_else") is None


@pytest.mark.parametrize(("module", "arguments"), [("typer", ["--help"]), ("duckdb", ["sql", "SELECT 1"])])
def test_a_broken_installation_has_no_traceback(tmp_path: Path, module: str, arguments: list[str]):
    (tmp_path / "sitecustomize.py").write_text(BLOCK.format(name=module))
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "TILEGYM_DB_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "tilegym_db", *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 2
    assert re.fullmatch(rf"error: [^\n]*Try: pip install {module}\n", result.stderr)


def test_refused_record_keeps_nothing_of_its_callers() -> None:
    class Held:
        pass

    def refuse() -> weakref.ref[Held]:
        held = Held()
        with pytest.raises(RecordError):
            Trace.from_dict({"timestamp": "0001-01-01T00:00:00Z"})
        return weakref.ref(held)

    held = refuse()
    gc.collect()
    assert held() is None


@pytest.mark.parametrize("name", ["RMSNorm", "rmsnorm", "rms-norm", "RMS_NORM", "rms norm", "RMS.Norm", "rms_norm "])
def test_another_spelling_of_a_name_is_the_only_suggestion(name: str) -> None:
    assert did_you_mean(name, ["gated_rms_norm", "rms_norm", "rms_norms"]) == " Did you mean 'rms_norm'?"
    assert did_you_mean("rms_nrom", ["rms_norm"]) == " Did you mean 'rms_norm'?"
