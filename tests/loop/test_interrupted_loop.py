"""Ctrl-C in ``auto-kernelize``: what was found until then is printed, and the exit status says what happened."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = {
    "model_type": "qwen3", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 2048,
}  # fmt: skip
AUTHOR = """import os, pathlib, signal, sys, time
if pathlib.Path(sys.argv[1]).exists():
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(60)
pathlib.Path(sys.argv[1]).touch()
sys.exit("no idea")
"""


@pytest.mark.nightly  # test_killed_loop.py and cli/test_ends_of_runs.py end runs daily
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_interrupted_loop_prints_the_experiments_it_journaled(tmp_path: Path, home: Path) -> None:
    """The author fails at the first task, and presses Ctrl-C at the second."""
    config, script = tmp_path / "config.json", tmp_path / "author.py"
    config.write_text(json.dumps(CONFIG))
    script.write_text(AUTHOR)
    command = [
        sys.executable, "-m", "tilegym_db", "task", "auto", config, "--gpu", "cpu", "--dtype", "float32", "--prompt-tokens", "16",
        "--language", "python", "--max-attempts", "1", "--json", "--author", f"{sys.executable} {script} {tmp_path / 'asked'}",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2]), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 130, done.stderr
    (experiment,) = json.loads(done.stdout)
    assert (experiment["decision"], "no idea" in experiment["reason"]) == ("crash", True)
    (line,) = (home / "loop" / "experiments.jsonl").read_text().splitlines()
    assert json.loads(line)["id"] == experiment["id"]
    assert "ended:" not in done.stderr
