"""The Triton kernel of Mamba-2's scan: tensors read in place or moved first give the same, and few variants are compiled."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from shipped_records import CATALOG

from tilegym_db.backends.aot import CompileJob, compile_many

pytestmark = pytest.mark.sweep

NAME = "mamba2_chunk_scan_triton"
INTERPRETED = """
import json, sys
import torch
from tilegym_db.backends.toolchains import repair_interpreter
repair_interpreter()
from tilegym_db.catalog import Catalog
from tilegym_db.resolver.loader import load_verified
from tilegym_db.verification.oracle import oracle
catalog = Catalog.default()
solution = catalog.solution("mamba2_chunk_scan_triton")
run = load_verified(solution, solution.digest)
where, tokens, N, moved_at_once = json.loads(sys.argv[1])
run.__globals__["MOST_MOVED"] = moved_at_once or run.__globals__["MOST_MOVED"]
B, H, P = 2, 1, 64
torch.manual_seed(tokens)
width = H * P + 2 * N
together = {
    "rows": lambda: torch.randn(B, tokens, width).bfloat16(),
    "columns": lambda: torch.randn(B, width, tokens).bfloat16().transpose(1, 2),
    "off": lambda: torch.randn(B, tokens, width + 1).bfloat16()[..., 1:],
}[where]()
x, writes, reads = (part[:, :, None] for part in together.split([P, N, N], -1))
dt, A = torch.randn(B, tokens, H).bfloat16(), -torch.rand(H)
D, bias = torch.rand(2, H).bfloat16()
initial = torch.randn(B, H, P, N)
inputs = dict(
    x=x, dt=dt, A=A, Bmat=writes, Cmat=reads, D=D, dt_bias=bias, initial_state=initial, dt_min=0.0
)
out, final = torch.full((B, tokens, H, P), float("nan")), torch.full_like(initial, float("nan"))
run(*inputs.values(), out, final)
truth = oracle(catalog.definition("mamba2_chunk_scan"), inputs)
found = {"out": out, "final_state": final}
print(json.dumps([float((found[name] - truth[name]).norm() / truth[name].norm()) for name in found]))
"""


@pytest.mark.turn("solutions/linear_attention/")  # interpreted, of a kernel that seldom changes
@pytest.mark.parametrize(
    ("where", "tokens", "N", "moved_at_once"),
    [
        ("rows", 1, 64, 0),
        ("rows", 65, 128, 0),
        ("columns", 136, 64, 0),
        ("columns", 63, 64, 0),
        ("off", 64, 64, 0),
        ("rows", 66, 24, 1),  # a sequence at a time
    ],
)
def test_every_layout_gives_the_recurrence(where: str, tokens: int, N: int, moved_at_once: int) -> None:
    """Run in a separate process, in which the interpreter of Triton runs the kernels on the CPU."""
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED, json.dumps([where, tokens, N, moved_at_once])],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    out, final = json.loads(done.stdout)
    assert max(out, final) < 2e-5


@pytest.mark.turn("solutions/linear_attention/")  # interpreted, of a kernel that seldom changes
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_workloads_of_bfloat16_share_ten_variants() -> None:
    solution, definition = CATALOG.solution(NAME), CATALOG.definition("mamba2_chunk_scan")
    workloads = [item for item in CATALOG.workloads_for(definition.name) if item.dtypes == {"T": "bfloat16"}]

    results = compile_many([CompileJob(definition, solution, item, "sm_90") for item in workloads])

    assert {result.status for result in results} == {"compiled"}
    assert len({artifact.key for result in results for artifact in result.artifacts}) <= 10
