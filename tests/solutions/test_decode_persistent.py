"""The Triton kernel of decoding for many sequences: a program that goes through several heads keeps them apart."""

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
from tilegym_db.verification.oracle import oracle
catalog = Catalog.default()
solution = catalog.solution("attention_decode_triton_persistent")
run = load_verified(solution, solution.digest)
B, group, L, offset, config = json.loads(sys.argv[1])
torch.manual_seed(L)
Hkv, D = 2, 24
q = torch.randn(B, Hkv * group, 1, D).half()
k, v = torch.randn(2, B, Hkv, L, D + 8 * offset).half()[..., offset : offset + D]
k = k * torch.arange(1, B + 1)[:, None, None, None]  # a score that is kept for the next sequence would show
out = torch.full_like(q, float("nan"))
inputs = dict(q=q, k=k, v=v, scale=0.2)
run(*inputs.values(), out, **config)
truth = oracle(catalog.definition("attention_decode"), inputs)["out"]
print(json.dumps(float((out - truth).norm() / truth.norm())))
"""


@pytest.mark.turn("solutions/attention/")  # interpreted, of a kernel that seldom changes
@pytest.mark.parametrize(
    ("B", "group", "L", "offset", "config"),
    [
        (5, 3, 200, 0, {"PROGRAMS": 3}),  # four heads for one program, three for the others
        (1, 1, 1, 0, {}),
        (2, 2, 600, 0, {"PROGRAMS": 3, "UNITS": 4}),  # spans, of which the last one is shorter
        (3, 2, 130, 1, {"PROGRAMS": 4}),  # rows that the copy engine cannot address
    ],
)
def test_streams_of_several_heads_give_attention(
    B: int, group: int, L: int, offset: int, config: dict[str, int]
) -> None:
    """Run in a separate process, in which the interpreter of Triton runs the kernels on the CPU."""
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED, json.dumps([B, group, L, offset, config])],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) < 1e-3
