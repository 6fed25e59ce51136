"""The Triton kernel of the gated delta rule: segments change nothing, and writes erase a large state as in the reference."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.sweep(2)

INTERPRETED = """
import json, sys
import torch
from tilegym_db.backends.toolchains import repair_interpreter
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


@pytest.mark.turn("solutions/linear_attention/")  # interpreted, of a kernel that seldom changes
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


ERASED = """
import json
import torch
from tilegym_db.backends.toolchains import repair_interpreter
repair_interpreter()
from tilegym_db.catalog import Catalog
from tilegym_db.resolver.loader import load_verified
from tilegym_db.verification.oracle import oracle
catalog = Catalog.default()
solution = catalog.solution("gated_delta_rule_chunk_triton")
run = load_verified(solution, solution.digest)
torch.manual_seed(0)
q, k = torch.randn(2, 1, 66, 1, 2).bfloat16()
v = torch.randn(1, 66, 2, 16).bfloat16()
g, beta = torch.zeros(1, 66, 2), torch.rand(1, 66, 2).bfloat16()
initial = torch.randn(1, 2, 2, 16)
initial[..., 0] = 1e3
inputs = dict(q=q, k=k, v=v, g=g, beta=beta, initial_state=initial)
out, final = torch.empty_like(v), torch.empty_like(initial)
run(*inputs.values(), out, final)
truth = oracle(catalog.definition("gated_delta_rule_chunk"), inputs)["final_state"]
rms = truth.square().mean(-1, keepdim=True).sqrt()
print(json.dumps(float(((final - truth).abs() / rms).max())))
"""


@pytest.mark.turn("solutions/linear_attention/")  # interpreted, of a kernel that seldom changes
def test_state_that_writes_erase_leaves_no_rounding() -> None:
    """With 16 bits of the state in products, the error would be 1e-2."""
    done = subprocess.run(
        [sys.executable, "-c", ERASED],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) < 2e-3
