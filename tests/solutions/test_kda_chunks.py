"""The Triton kernel of Kimi Delta Attention in chunks gives the recurrence, whatever a row of the state forgets."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from shipped_records import CATALOG

from tilegym_db.backends.aot import CompileJob, compile_many
from tilegym_db.records import Workload

pytestmark = pytest.mark.sweep

INTERPRETED = """
import json, sys
import torch
from tilegym_db.backends.toolchains import repair_interpreter
repair_interpreter()
from tilegym_db.catalog import Catalog
from tilegym_db.resolver.loader import load_verified
from tilegym_db.verification.oracle import oracle
catalog = Catalog.default()
solution = catalog.solution("kda_chunk_triton_chunks")
run = load_verified(solution, solution.digest)
run.__globals__["MOST_PARTS"] = 3  # two sequences of one chunk at once, or one of three
gates, tokens, K, V, dtype, keys, config = json.loads(sys.argv[1])
B, H = 2, 1
dtype = getattr(torch, dtype)
torch.manual_seed(tokens)
q, k = torch.randn(2, B, tokens, H, K).to(dtype)
if keys == "alike":
    k = (k[:, :1] + k / 20).to(dtype)
shape = (B, tokens, H, K)
g = {
    "usual": lambda: -torch.rand(shape),
    "none": lambda: torch.zeros(shape),
    "steep": lambda: torch.where(torch.rand(shape) < 0.05, -80.0, 0.0) - torch.rand(shape) / 1000,
    "everything": lambda: torch.full(shape, -80.0),
}[gates]()
beta = (torch.ones(B, tokens, H) if keys == "alike" else torch.rand(B, tokens, H)).to(dtype)
v, initial = torch.randn(B, tokens, H, V).to(dtype), torch.randn(B, H, K, V)
inputs = dict(q=q, k=k, v=v, g=g, beta=beta, initial_state=initial)
out, final = torch.full(v.shape, float("nan"), dtype=dtype), torch.full_like(initial, float("nan"))
run(*inputs.values(), out, final, **config)
truth = oracle(catalog.definition("kda_chunk"), inputs)
found = {"out": out, "final_state": final}
print(json.dumps([float((found[name] - truth[name]).norm() / truth[name].norm()) for name in found]))
"""
ROUNDING = {"float32": 3e-6, "float16": 4e-4, "bfloat16": 3e-3}


@pytest.mark.turn("solutions/linear_attention/")  # interpreted, of a kernel that seldom changes
@pytest.mark.parametrize(
    ("gates", "tokens", "K", "V", "dtype", "keys", "config"),
    [
        ("usual", 1, 16, 16, "float32", "any", {}),
        ("usual", 130, 24, 20, "bfloat16", "any", {}),
        ("none", 64, 128, 64, "bfloat16", "alike", {}),
        ("none", 130, 32, 32, "float32", "alike", {}),
        ("steep", 130, 32, 16, "float32", "any", {}),
        ("steep", 63, 32, 32, "float16", "alike", {"CHUNK": 32}),
        ("everything", 65, 16, 16, "float32", "any", {}),
    ],
)
def test_chunks_of_kda_are_the_recurrence(gates, tokens, K, V, dtype, keys, config) -> None:
    """Run in a separate process, in which the interpreter of Triton runs the kernels on the CPU."""
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED, json.dumps([gates, tokens, K, V, dtype, keys, config])],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    out, final = json.loads(done.stdout)
    assert out < ROUNDING[dtype]
    assert final < ROUNDING["float32"]


@pytest.mark.turn("solutions/linear_attention/")
@pytest.mark.parametrize(
    ("axes", "config"),
    [
        ({"B": 1, "T": 1, "H": 1, "K": 16, "V": 1}, {}),  # sizes of one are constants to Triton
        ({"B": 1, "T": 128, "H": 2, "K": 128, "V": 128}, {"BLOCK_V": 128, "num_stages": 2}),  # the most shared memory
    ],
)
def test_kernels_compile_for_an_h200(axes: dict[str, int], config: dict[str, int]) -> None:
    workload = Workload.model_validate({"definition": "kda_chunk", "axes": axes, "dtypes": {"T": "float32"}})
    definition, solution = CATALOG.definition("kda_chunk"), CATALOG.solution("kda_chunk_triton_chunks")
    (compiled,) = compile_many([CompileJob(definition, solution, workload, "sm_90", config)])
    assert compiled.status == "compiled"
