"""Two processes that share a batch, through DDP and FSDP2: kernels give the gradients of stock code, and of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tilegym_db import Catalog

# Two processes that load PyTorch; one has the same gradients daily.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.sweep,
    pytest.mark.turn("tilegym_db/resolver/training.py", "tests/parallel_gradients.py"),
]

SCRIPT = Path(__file__).parents[1] / "parallel_gradients.py"
NORMS, LAYERS = 5, 2
EXACT, CAST = 2e-5, 3e-2


@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
def test_processes_have_the_gradients_of_stock(way: str, training_kernels: Catalog, tmp_path: Path) -> None:
    out = tmp_path / "gradients.json"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launcher, str(SCRIPT), way, str(out)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    for name, result in json.loads(out.read_text()).items():
        bound = CAST if name == "autocast" else EXACT
        assert result["failures"] == [], name
        assert (result["stock"] <= bound, result["alone"] <= bound) == (True, True), (name, result)
        assert result["hits"]["cross_entropy_backward"] == 1, name
        assert result["hits"]["swiglu_backward"] == LAYERS, name
        assert norm_calls(result["hits"]) == expected_norms(name), name


def norm_calls(hits: dict[str, int]) -> int:
    return hits.get("rms_norm_backward", 0) + hits.get("rms_norm_backward_x", 0)


def expected_norms(name: str) -> int:
    # Frozen norms pass a gradient on; the first has nothing to pass it to, unless it runs again for a checkpoint.
    return NORMS - 1 if name in ("adapters last", "adapters first") else NORMS
