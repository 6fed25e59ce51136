"""What can only be a mistake is refused at once: the harness and PyTorch, which take seconds, are not loaded for it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys
from tilegym_db.cli.app import main
try:
    main()
except SystemExit as ended:
    print(ended.code, "torch" in sys.modules)
"""


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    "words",
    [
        ("bench", "rms_nrom"), ("tune", "rms_nrom"), ("verify", "rms_nrom"), ("regress", "rms_nrom", "--against", "HEAD"),
        ("debug", "reproduce", "rms_norm_tritno"), ("dev", __file__, "-d", "rms_nrom"),
    ],
)  # fmt: skip
def test_an_unknown_name_is_refused_before_pytorch_is_loaded(words, home):
    command = [sys.executable, "-c", PROGRAM, *words, "--gpu", "cpu"]
    environment = {**os.environ, "TILEGYM_DB_HOME": str(home)}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert result.stdout.split() == ["2", "False"]
    assert "'rms_norm" in result.stderr


@pytest.mark.sweep(3)
@pytest.mark.parametrize("command", ["bench", "verify", "tune"])
def test_a_glob_without_match_is_refused_before_pytorch_loads(command, home):
    words = [sys.executable, "-c", PROGRAM, command, "rms_norm_triton", "--workload", "M=4,N=5", "--gpu", "cpu"]
    environment = {**os.environ, "TILEGYM_DB_HOME": str(home)}
    result = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    assert result.stdout.split() == ["2", "False"]
    assert "definition = 'rms_norm'" in result.stderr


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    "words",
    [
        ("model", "verify"),
        ("model", "bench"),
        ("fit",),
        ("task", "from-model"),
        (
            "task",
            "recommend",
        ),
    ],
)
def test_size_that_no_model_has_is_refused_before_pytorch_loads(words, home, write_json):
    config = write_json({"model_type": "llama", "hidden_size": -64})
    environment = {**os.environ, "TILEGYM_DB_HOME": str(home)}
    command = [sys.executable, "-c", PROGRAM, *words, str(config)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert result.stdout.split() == ["2", "False"]
    assert "hidden_size" in result.stderr
    assert "-64" in result.stderr


@pytest.mark.sweep(6)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("task", "recommend", "--gpu", "hopper"), "'hopper'"),
        (("fit", "--gpu", "cpu", "--batch", "0"), "--batch 0"),
        (("fit", "--gpu", "cpu", "--batch", "9" * 5000), "--batch 9"),
        (("fit", "--gpu", "cpu", "--prompt-tokens", "4,-1"), "--prompt-tokens 4,-1"),
        (("fit", "--gpu", "cpu", "--rounds", "0"), "Invalid value for '--rounds'"),
        (("fit", "--gpu", "cpu", "--max-new-tokens", "-1"), "Invalid value for '--max-new-tokens'"),
        (("fit", "--gpu", "cpu", "--layers", "0"), "Invalid value for '--layers'"),
        (("data", "compare", "nobody"), "'nobody'"),
        (("task", "submit", "nobody", "."), "'nobody'"),
    ],
)
def test_wrong_argument_is_refused_before_pytorch_loads(words, said, home, write_json):
    config = write_json({"model_type": "llama", "hidden_size": 64})
    given = [str(config)] if words[0] == "fit" or words[1] == "recommend" else []
    environment = {**os.environ, "TILEGYM_DB_HOME": str(home), "COLUMNS": "200"}
    command = [sys.executable, "-c", PROGRAM, *words, *given]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert result.stdout.split() == ["2", "False"]
    assert said in result.stderr
    assert "Traceback" not in result.stderr
