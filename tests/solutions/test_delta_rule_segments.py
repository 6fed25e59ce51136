"""The Triton kernel of the gated delta rule gives the same results when a sequence is cut into segments."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

INTERPRETED = """
import json, sys
import torch
from tilegym_db.sandbox.interpreters import repair_interpreter
repair_interpreter()
from tilegym_db.catalog import Catalog
from tilegym_db.resolver.loader import load_verified
catalog = Catalog.default()
solution = catalog.solution("gated_delta_rule_chunk_triton")
run = load_verified(solution, solution.digest)
tokens, segments, K, V = json.loads(sys.argv[1])
torch.manual_seed(tokens)
q, k = torch.randn(2, 1, tokens, 1, K).bfloat16()
v = torch.randn(1, tokens, 2, V).bfloat16()
g = -torch.rand(1, tokens, 2) * torch.tensor([1e-3, 0.05])
beta = torch.rand(1, tokens, 2).bfloat16()
initial = torch.randn(1, 2, K, V)

def called(segments):
    out, final = torch.full_like(v, float("nan")), torch.full_like(initial, float("nan"))
    run(q, k, v, g, beta, initial, out, final, segments=segments)
    return out.float(), final

whole, cut = called(1), called(segments)
print(json.dumps([float((one - other).norm() / one.norm()) for one, other in zip(whole, cut)]))
"""


@pytest.mark.parametrize(("tokens", "segments", "K", "V"), [(300, 5, 32, 32), (200, 2, 16, 24)])
def test_segments_change_nothing(tokens: int, segments: int, K: int, V: int) -> None:
    """Run in a separate process, in which the interpreter of Triton runs the kernels on the CPU."""
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED, json.dumps([tokens, segments, K, V])],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    out, final = json.loads(done.stdout)
    assert out < 1e-3  # a rounding of the output that falls the other way
    assert final < 2e-5
