"""The Triton kernel of attention with a bias: positions whose keys are all hidden, also by what comes later."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.sweep

INTERPRETED = """
import json, sys
import torch
from tilegym_db.backends.toolchains import repair_interpreter
repair_interpreter()
from tilegym_db.catalog import Catalog
from tilegym_db.resolver.loader import load_verified
from tilegym_db.verification.oracle import as_written
catalog = Catalog.default()
solution = catalog.solution("attention_bias_triton")
run = load_verified(solution, solution.digest)
S, L, causal = json.loads(sys.argv[1])
torch.manual_seed(S)
q, k, v = torch.randn(1, 2, S, 16), *torch.randn(2, 1, 1, L, 16)
bias = torch.randn(1, 2, S, L)
bias[:, :, ::3] = torch.finfo(bias.dtype).min
out = torch.full_like(q, float("nan"))
inputs = dict(q=q, k=k, v=v, bias=bias, causal=causal, scale=0.3)
run(*inputs.values(), out)
truth = as_written(catalog.definition("attention_bias"), inputs)["out"]
assert torch.allclose(truth[:, :, 0], v.mean(2), atol=1e-5)
print(json.dumps(float((out - truth).norm() / truth.norm())))
"""


@pytest.mark.turn("solutions/attention/")  # interpreted, of a kernel that seldom changes
@pytest.mark.parametrize(
    ("S", "L", "causal"),
    [
        (5, 70, True),  # keys in tiles that no other row reads
        (70, 150, True),  # several blocks of queries
        (150, 70, True),  # positions behind the last key
        (20, 40, False),
    ],
)
def test_hidden_positions_get_the_mean_of_all_values(S: int, L: int, causal: bool) -> None:
    """Run in a separate process, in which the interpreter of Triton runs the kernel on the CPU."""
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED, json.dumps([S, L, causal])],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) < 1e-5
